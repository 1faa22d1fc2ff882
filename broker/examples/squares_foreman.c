/* A foreman: gives numbers to workers that come and go, and adds their squares.
 *
 *     gcc squares_foreman.c -lsempa_broker -o squares_foreman
 *     ./squares_foreman SESSION COUNT
 *
 * A number comes back (SMBL_RETURN) if its worker is gone before it has received the number; a
 * number that a worker has received and not answered is given again when the worker is gone. */
#include <smbl.h>
#include <stdio.h>
#include <stdlib.h>

enum { READY = 1, WORK = 2, SQUARE = 3 };

static void must(const char *what, int result) {
  if (result == SMBL_SUCCESS) return;
  fprintf(stderr, "%s: %s\n", what, SMBL_Error_string());
  exit(result == SMBL_ERR_OVER ? SMBL_EXIT_OVER : 1);
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  int count = atoi(argv[2]), done = 0;
  long sum = 0;
  int *worker_of = calloc(count, sizeof *worker_of); /* 0: waits, -1: done */
  if (!worker_of) return 1;
  must("joining", SMBL_Init(argv[1], SMBL_FOREMAN_ROLE));
  must("watching", SMBL_Watch(SMBL_ANY_SOURCE));
  while (done < count) {
    long words[2];
    SMBL_Status status;
    must("receiving", SMBL_Recv(words, sizeof words, SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &status));
    if (status.type == SQUARE && worker_of[words[0]] != -1) {
      worker_of[words[0]] = -1;
      sum += words[1];
      done++;
    }
    if (status.type == SMBL_TYPE_RETURNED) worker_of[words[0]] = 0;
    if (status.type == SMBL_TYPE_GONE)
      for (int i = 0; i < count; i++)
        if (worker_of[i] == status.source) worker_of[i] = 0;
    if (status.type != READY && status.type != SQUARE) continue;
    long next = 0;
    while (next < count && worker_of[next] != 0) next++;
    if (next == count) continue;
    worker_of[next] = status.source;
    int result = SMBL_Send_opt(&next, sizeof next, status.source, WORK, SMBL_RETURN, 60);
    if (result == SMBL_GONE) worker_of[next] = 0;
    else must("sending", result);
  }
  printf("the sum of %d squares is %ld\n", count, sum);
  must("ending the session", SMBL_Finish(5));
  must("leaving", SMBL_Finalize());
  return 0;
}
