/* The few calls of the p4 library that the parallel half of fastDNAml uses, over a broker session.
 * All partners of a process (host, dispatcher, merger) are the session's foreman, `dnaml_host`. */
#ifndef P4_H
#define P4_H

/* Partners. */
#define DNAML_HOST_ID (-1)
#define DNAML_DISPATCHER_ID (-2)
#define DNAML_MERGER_ID (-3)

/* Message types of fastDNAml. */
#define DNAML_FILE_NAME 1 /* from the host: name of the input file */
#define DNAML_REQUEST 2   /* a slave asks for a tree */
#define DNAML_NUM_TREE 3  /* number of results of which the master wants the best, as text */
#define DNAML_DONE 4      /* a process ends */
#define DNAML_ADD_SPECS 5
#define DNAML_SEND_TREE 6
#define DNAML_RECV_TREE 7
#define DNAML_STEP_TIME 8

/* Message types between this layer and `dnaml_host`. */
#define DNAML_HELLO 20  /* a process asks for the name of the input file */
#define DNAML_TREE 21   /* from the master: a tree to evaluate; empty: there are no more */
#define DNAML_WORK 22   /* to a slave: a tree to evaluate; empty: the slave ends */
#define DNAML_RESULT 23 /* from a slave: an evaluated tree */
#define DNAML_BEST 24   /* to the master: the best result */

/* Largest size of a tree in bytes. */
#define DNAML_TREE_BYTES_MAX (1 << 20)

/* Number of steps between two reports of times. */
#define DNAML_STEP_TIME_COUNT 10

/* The parallel half of fastDNAml 1.2.2 has five mistakes that keep it from running with any
 * implementation of p4, or with slaves that join late. The source stays as it is; the definitions
 * below mend its calls.
 * 1. str_treeFinishCom is called without the place for a nested comment: none is passed.
 * 2. str_treeFindTipName gets the first character of a name as a third argument, and ignores the
 *    character although it has been read: the call steps back to it.
 * 3. str_treeFlushLabel fails where there is no label, which is where a tree has none.
 * 4. str_treeProcessLength stores a length that nobody wants through a null pointer.
 * 5. receiveTree allocates room for a tree with as many tips as the previous one. A slave that joins
 *    late has no previous tree and receives a large one: Malloc gives receiveTree the largest room.
 * For 3 and 4, the definitions are weak, and p4_shim.c has others. */
#undef Malloc
#define Malloc(size) dnaml_malloc(__func__, size)
#define str_treeFinishCom(...) DNAML_TWO_ARGUMENTS(str_treeFinishCom, __VA_ARGS__, NULL, )
#define DNAML_TWO_ARGUMENTS(name, first, second, ...) name(first, second)
#define str_treeFindTipName(...) \
  DNAML_THIRD_OR_FOURTH(__VA_ARGS__, DNAML_FIND_FROM_START, DNAML_FIND, )(__VA_ARGS__)
#define DNAML_THIRD_OR_FOURTH(first, second, third, fourth, ...) fourth
#define DNAML_FIND(first, second) str_treeFindTipName(first, second)
#define DNAML_FIND_FROM_START(first, second, third) (--*(first), str_treeFindTipName(first, second))
#ifndef DNAML_SHIM
#pragma weak str_treeFlushLabel
#pragma weak str_treeProcessLength
#endif

/* Allocates memory for a function of fastDNAml. */
void *dnaml_malloc(const char *function, unsigned long size);

int p4_send(int type, int to, char *buffer, int size);
int p4_recv(int *type, int *from, char **message, int *size);
void p4_msg_free(char *message);
int p4_get_my_id(void);
int p4_num_total_slaves(void);
/* Milliseconds. */
int p4_clock(void);

#endif
