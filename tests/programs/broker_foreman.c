/* A foreman that gives tasks to workers that come and go.
 *
 * broker_foreman SESSION TASKS WORKERS [hold]
 * Waits for WORKERS workers, has TASKS numbers squared and prints one line of totals. With 'hold',
 * the session ends when standard input ends. A task goes to another worker if it comes back, or if
 * its worker is gone. A result that comes twice counts once. */
#include "smbl.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { READY = 1, TASK = 2, RESULT = 3, MEMBERS_MAX = 4096, TASKS_MAX = 100000 };
enum { WAITING = 0, DONE = -1 }; /* other values: the worker that has the task */

static int holder[TASKS_MAX];
static int idle[MEMBERS_MAX], idle_count;
static int tasks, done, first_waiting;
static int departures, returned, doubled, reasons[8];
static long sum;

static void check(const char *what, int code) {
  if (code == SMBL_SUCCESS) return;
  fprintf(stderr, "foreman: %s: %d %s\n", what, code, SMBL_Error_string());
  exit(code == SMBL_ERR_OVER ? SMBL_EXIT_OVER : 1);
}

static void put_back(int task) {
  if (holder[task] == DONE) return;
  holder[task] = WAITING;
  if (task < first_waiting) first_waiting = task;
}

static void give_tasks(void) {
  while (idle_count > 0) {
    while (first_waiting < tasks && holder[first_waiting] != WAITING) first_waiting++;
    if (first_waiting == tasks) return;
    /* First come, first served: every worker gets tasks. */
    int worker = idle[0];
    memmove(idle, idle + 1, --idle_count * sizeof *idle);
    long number = first_waiting;
    int code = SMBL_Send_opt(&number, sizeof number, worker, TASK, SMBL_RETURN, 60);
    if (code == SMBL_GONE) continue;
    check("task", code);
    holder[number] = worker;
  }
}

static void take_mail(void) {
  long words[2];
  SMBL_Status status;
  check("receive", SMBL_Recv(words, sizeof words, SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &status));
  switch (status.type) {
  case READY:
    idle[idle_count++] = status.source;
    break;
  case RESULT:
    idle[idle_count++] = status.source;
    if (holder[words[0]] == DONE) {
      doubled++;
      break;
    }
    holder[words[0]] = DONE;
    sum += words[1];
    done++;
    if (done % 50 == 0) printf("%d done\n", done);
    break;
  case SMBL_TYPE_RETURNED:
    returned++;
    if (holder[words[0]] == status.source) put_back((int)words[0]);
    break;
  case SMBL_TYPE_GONE:
    departures++;
    reasons[status.reason]++;
    for (int i = 0; i < idle_count; i++)
      if (idle[i] == status.source) idle[i--] = idle[--idle_count];
    for (int task = 0; task < tasks; task++)
      if (holder[task] == status.source) put_back(task);
    break;
  }
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  setvbuf(stdout, NULL, _IOLBF, 0);
  tasks = atoi(argv[2]);
  check("join", SMBL_Init(argv[1], SMBL_FOREMAN_ROLE));
  check("watch", SMBL_Watch(SMBL_ANY_SOURCE));
  int rank = 0;
  check("rank", SMBL_Comm_rank(&rank));
  printf("foreman is member %d\n", rank);
  int workers = atoi(argv[3]);
  while (idle_count < workers) take_mail();
  printf("all workers are here\n");
  while (done < tasks) {
    give_tasks();
    take_mail();
  }
  printf("results %d sum %ld departures %d left %d lost %d killed %d moved-out %d returned %d doubled %d\n", done, sum,
         departures, reasons[SMBL_REASON_LEFT], reasons[SMBL_REASON_LOST], reasons[SMBL_REASON_KILLED],
         reasons[SMBL_REASON_MOVED_OUT], returned, doubled);
  if (argc > 4 && strcmp(argv[4], "hold") == 0)
    while (getchar() != EOF) {
    }
  check("finish", SMBL_Finish(10));
  check("leave", SMBL_Finalize());
  return 0;
}
