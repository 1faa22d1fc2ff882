/* A worker: squares numbers until the session is over.
 *
 *     gcc squares_worker.c -lsempa_broker -o squares_worker
 *     ./squares_worker SESSION          as a task of the virtual machine
 *     ./squares_worker ./x.session      outside, with the file of 'pvm-broker secret' */
#include <smbl.h>
#include <stdio.h>

enum { READY = 1, WORK = 2, SQUARE = 3 };

static int report(const char *what, int result) {
  fprintf(stderr, "%s: %s\n", what, SMBL_Error_string());
  return result == SMBL_ERR_OVER ? SMBL_EXIT_OVER : 1;
}

int main(int argc, char **argv) {
  long number;
  SMBL_Status status;
  int result;
  if (argc != 2) return 2;
  if ((result = SMBL_Init(argv[1], SMBL_WORKER_ROLE)) != 0) return report("joining", result);
  result = SMBL_Send_opt(NULL, 0, SMBL_FOREMAN, READY, 0, 60);
  while (result == SMBL_SUCCESS) {
    result = SMBL_Recv(&number, sizeof number, SMBL_ANY_SOURCE, WORK, &status);
    if (result != SMBL_SUCCESS) break;
    long answer[2] = {number, number * number};
    result = SMBL_Send(answer, sizeof answer, status.source, SQUARE);
  }
  return report("working", result);
}
