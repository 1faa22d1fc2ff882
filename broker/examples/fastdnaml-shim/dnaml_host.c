/* Host, dispatcher and merger of parallel fastDNAml, as the foreman of a broker session.
 *
 * dnaml_host SESSION INPUT_FILE
 * Slaves may come and go: the tree of a slave that is gone goes to another slave. Ends the session
 * when the master is done and all slaves have left. */
#include "p4.h"
#include "smbl.h"
#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MEMBERS_MAX = 1024, TREES_MAX = 4096 };

static char *waiting[TREES_MAX]; /* trees without a slave, first in first out */
static int waiting_count;
static int asking[MEMBERS_MAX], asking_count; /* slaves without a tree */
static char *given[MEMBERS_MAX];              /* the tree that a slave has */
static int is_slave[MEMBERS_MAX];             /* 1 until the slave is gone */
static char *best;
static double best_likelihood = -DBL_MAX;
static int results, wanted; /* results since the last answer, and wanted for the next one */
static int master, no_more_trees, master_is_done;
static int living_slaves, slaves;
static int evaluated, repeated;

static void check(const char *what, int code) {
  if (code == SMBL_SUCCESS) return;
  fprintf(stderr, "dnaml_host: %s: %s\n", what, SMBL_Error_string());
  exit(1);
}

/* A slave that is gone is no failure: its notice follows. */
static void send_to(int member, const char *text, int type) {
  int code = SMBL_Send_opt(text, text ? (int)strlen(text) + 1 : 0, member, type, 0, 60);
  if (code != SMBL_GONE) check("sending", code);
}

static double likelihood_of(const char *tree) {
  const char *key = strstr(tree, "likelihood");
  const char *value = key ? strchr(key, '=') : NULL;
  return value ? strtod(value + 1, NULL) : -DBL_MAX;
}

static void dispatch(void) {
  while (asking_count > 0 && (waiting_count > 0 || no_more_trees)) {
    int slave = asking[--asking_count];
    if (waiting_count == 0) {
      send_to(slave, NULL, DNAML_WORK);
      continue;
    }
    given[slave] = waiting[0];
    memmove(waiting, waiting + 1, --waiting_count * sizeof *waiting);
    send_to(slave, given[slave], DNAML_WORK);
  }
}

static void add_waiting(char *tree) {
  if (waiting_count == TREES_MAX) {
    fprintf(stderr, "dnaml_host: more than %d trees wait\n", TREES_MAX);
    exit(1);
  }
  waiting[waiting_count++] = tree;
}

static void answer_master(void) {
  if (wanted == 0 || results < wanted) return;
  send_to(master, best, DNAML_BEST);
  results -= wanted;
  wanted = 0;
  free(best);
  best = NULL;
  best_likelihood = -DBL_MAX;
}

static void take_result(int slave, char *tree) {
  if (!given[slave]) {
    free(tree);
    return;
  }
  free(given[slave]);
  given[slave] = NULL;
  results++;
  evaluated++;
  double likelihood = likelihood_of(tree);
  if (best && likelihood <= best_likelihood) {
    free(tree);
    return;
  }
  free(best);
  best = tree;
  best_likelihood = likelihood;
}

static void forget_slave(int slave) {
  for (int i = 0; i < asking_count; i++)
    if (asking[i] == slave) asking[i--] = asking[--asking_count];
  if (!given[slave]) return;
  add_waiting(given[slave]);
  given[slave] = NULL;
  repeated++;
}

static void handle(const char *input_file, int type, int source, char *text) {
  switch (type) {
  case DNAML_HELLO:
    if (*(int *)text) master = source;
    else {
      is_slave[source] = 1;
      living_slaves++;
      slaves++;
    }
    send_to(source, input_file, DNAML_FILE_NAME);
    break;
  case DNAML_REQUEST: asking[asking_count++] = source; break;
  case DNAML_TREE:
    if (text[0]) add_waiting(strdup(text));
    else no_more_trees = 1;
    break;
  case DNAML_RESULT: take_result(source, strdup(text)); break;
  case DNAML_NUM_TREE: wanted += atoi(text); break;
  case DNAML_DONE: master_is_done |= source == master; break;
  case SMBL_TYPE_GONE:
    if (source == master && !no_more_trees) {
      fprintf(stderr, "dnaml_host: the master is gone\n");
      exit(1);
    }
    forget_slave(source);
    living_slaves -= is_slave[source];
    is_slave[source] = 0;
    break;
  }
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  char *text = malloc(DNAML_TREE_BYTES_MAX + 1);
  if (!text) return 1;
  check("joining", SMBL_Init(argv[1], SMBL_FOREMAN_ROLE));
  check("watching", SMBL_Watch(SMBL_ANY_SOURCE));
  while (!master_is_done || living_slaves > 0) {
    SMBL_Status status;
    check("receiving", SMBL_Recv(text, DNAML_TREE_BYTES_MAX, SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &status));
    if (status.source >= MEMBERS_MAX) {
      fprintf(stderr, "dnaml_host: more than %d members\n", MEMBERS_MAX);
      return 1;
    }
    text[status.size] = 0;
    handle(argv[2], status.type, status.source, text);
    dispatch();
    answer_master();
  }
  printf("trees %d repeated %d slaves %d\n", evaluated, repeated, slaves);
  check("ending", SMBL_Finish(5));
  check("leaving", SMBL_Finalize());
  return 0;
}
