/* p4.h and comm_link.h over a broker session. The session is in SEMPA_SESSION, or in the session
 * file that SEMPA_SESSION_FILE names. Compile with -DSHIM_MASTER=1 for the master. */
#define DNAML_SHIM
#include "comm_link.h"
#include "p4.h"
#include "smbl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef SHIM_MASTER
#define SHIM_MASTER 0
#endif

/* Seconds to wait for a foreman or for room. */
#define WAIT_SECONDS 120.0

static void check(const char *what, int code) {
  if (code == SMBL_SUCCESS) return;
  fprintf(stderr, "fastDNAml: %s: %s\n", what, SMBL_Error_string());
  exit(code == SMBL_ERR_OVER ? SMBL_EXIT_OVER : 1);
}

static void join(void) {
  static int has_joined;
  if (has_joined) return;
  check("joining the session", SMBL_Init(NULL, SMBL_WORKER_ROLE));
  has_joined = 1;
}

static void send_to_foreman(const void *buffer, int size, int type) {
  check("sending", SMBL_Send_opt(buffer, size, SMBL_FOREMAN, type, 0, WAIT_SECONDS));
}

int p4_send(int type, int to, char *buffer, int size) {
  (void)to;
  send_to_foreman(buffer, size, type);
  if (type == DNAML_DONE) check("leaving", SMBL_Finalize());
  return 0;
}

int p4_recv(int *type, int *from, char **message, int *size) {
  SMBL_Status status;
  join();
  if (*type == DNAML_FILE_NAME) {
    int is_master = SHIM_MASTER;
    send_to_foreman(&is_master, sizeof is_master, DNAML_HELLO);
  }
  check("waiting", SMBL_Probe(SMBL_ANY_SOURCE, *type, &status));
  *message = malloc(status.size + 1);
  if (!*message) exit(1);
  check("receiving", SMBL_Recv(*message, status.size, SMBL_ANY_SOURCE, *type, &status));
  (*message)[status.size] = 0;
  *size = status.size;
  *from = DNAML_HOST_ID;
  return 0;
}

void *dnaml_malloc(const char *function, unsigned long size) {
  int receives_tree = strcmp(function, "receiveTree") == 0;
  return malloc(receives_tree && size < DNAML_TREE_BYTES_MAX ? DNAML_TREE_BYTES_MAX : size);
}

void p4_msg_free(char *message) { free(message); }

int p4_get_my_id(void) {
  int rank = 0;
  join();
  check("the number", SMBL_Comm_rank(&rank));
  return rank;
}

/* fastDNAml stores the number and does not use it: slaves come and go. */
int p4_num_total_slaves(void) { return 1; }

int p4_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int)(now.tv_sec * 1000 + now.tv_nsec / 1000000);
}

void open_link(comm_block *comm) { comm->done_flag = 0; }

void close_link(comm_block *comm) { (void)comm; }

/* A slave reads a tree to evaluate, the master the best result. */
void read_comm_msg(comm_block *comm, char *tree) {
  SMBL_Status status;
  int type = SHIM_MASTER ? DNAML_BEST : DNAML_WORK;
  check("receiving a tree", SMBL_Recv(tree, DNAML_TREE_BYTES_MAX, SMBL_ANY_SOURCE, type, &status));
  comm->done_flag = status.size == 0;
}

/* The master writes a tree to evaluate, a slave a result. */
void write_comm_msg(comm_block *comm, char *tree) {
  int size = comm->done_flag || !tree ? 0 : (int)strlen(tree) + 1;
  send_to_foreman(tree, size, SHIM_MASTER ? DNAML_TREE : DNAML_RESULT);
}

/* Functions of fastDNAml, and their replacements (p4.h tells why). */
int str_treeGetLabel(char **tree, char *label, int size);
int str_treeGetCh(char **tree);

int str_treeFlushLabel(char **tree) {
  str_treeGetLabel(tree, NULL, 0);
  return 1;
}

int str_treeProcessLength(char **tree, double *length) {
  char *end;
  if (!str_treeGetCh(tree)) return 0;
  --*tree;
  double value = strtod(*tree, &end);
  if (end == *tree) return 0;
  if (length) *length = value;
  *tree = end;
  return 1;
}

/* fastDNAml's whole program, for the master as for a slave. */
int slave(void);

int main(void) {
  slave();
  return 0;
}
