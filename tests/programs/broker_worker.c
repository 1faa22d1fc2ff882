/* Workers of a session that leave, die and come back.
 *
 * broker_worker SESSION COUNT PAUSE_MS [LIFE...]
 * COUNT processes join SESSION (a name, or the path of a session file). A LIFE is 'leave:N',
 * 'kill:N' or 'owner:N': a process leaves, kills itself, or leaves for the owner after N tasks, and
 * the next process takes its place; process number i begins with life number i. After all lives, a
 * process works until the session is over. Exit status: 0 if all last processes met the end of the
 * session, 1 after a failure, SMBL_EXIT_OVER if the only process came after the end. */
#include "smbl.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { READY = 1, TASK = 2, RESULT = 3, COUNT_MAX = 64 };

static void fail(const char *what, int code) {
  fprintf(stderr, "worker %d: %s: %d %s\n", (int)getpid(), what, code, SMBL_Error_string());
  fflush(stderr);
  _exit(code == SMBL_ERR_OVER ? SMBL_EXIT_OVER : 1);
}

static void check(const char *what, int code) {
  if (code != SMBL_SUCCESS) fail(what, code);
}

/* Works until the session is over, or until the life ends. */
static void work(const char *session, int pause_ms, const char *life) {
  check("join", SMBL_Init(session, SMBL_WORKER_ROLE));
  int rank = 0, limit = -1;
  check("rank", SMBL_Comm_rank(&rank));
  if (life) limit = atoi(strchr(life, ':') + 1);
  check("watch", SMBL_Watch(SMBL_ANY_SOURCE));
  int foreman = 0, must_announce = 1;
  for (int done = 0;; done++) {
    if (done == limit) {
      if (strncmp(life, "kill", 4) == 0) kill(getpid(), SIGKILL);
      check("leave", strncmp(life, "owner", 5) == 0 ? SMBL_Finalize_for_owner() : SMBL_Finalize());
      _exit(0);
    }
    long number = 0;
    int code;
    SMBL_Status status = {.type = SMBL_TYPE_RETURNED};
    while (status.type != TASK) {
      /* The next foreman must learn of this worker, too. */
      if (must_announce) code = SMBL_Send_opt(&rank, sizeof rank, SMBL_FOREMAN, READY, SMBL_RETURN, 120);
      if (must_announce && code == SMBL_ERR_OVER) _exit(SMBL_EXIT_OVER);
      if (must_announce && code != SMBL_GONE) check("ready", code);
      code = SMBL_Recv(&number, sizeof number, SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &status);
      if (code == SMBL_ERR_OVER) _exit(SMBL_EXIT_OVER);
      check("receive", code);
      must_announce = status.type == SMBL_TYPE_RETURNED ||
                      (status.type == SMBL_TYPE_GONE && status.source == foreman);
    }
    foreman = status.source;
    if (pause_ms) usleep(pause_ms * 1000);
    long answer[2] = {number, number * number};
    code = SMBL_Send_opt(answer, sizeof answer, SMBL_FOREMAN, RESULT, 0, 120);
    if (code == SMBL_ERR_OVER) _exit(SMBL_EXIT_OVER);
    /* A result for a foreman that is gone is lost; the next foreman asks again. */
    if (code != SMBL_GONE) check("result", code);
  }
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  int count = atoi(argv[2]), pause_ms = atoi(argv[3]);
  int lives = argc - 4, life_of[COUNT_MAX] = {0};
  pid_t pids[COUNT_MAX];
  if (count == 1 && lives == 0) work(argv[1], pause_ms, NULL);
  int running = count, failed = 0;
  for (int i = 0; i < count && i < COUNT_MAX; i++) {
    pids[i] = fork();
    if (pids[i] == 0) work(argv[1], pause_ms, lives ? argv[4 + i % lives] : NULL);
  }
  while (running > 0) {
    int status;
    pid_t pid = wait(&status);
    for (int i = 0; i < count; i++) {
      if (pids[i] != pid) continue;
      int is_planned = life_of[i] < lives;
      int met_end = WIFEXITED(status) && WEXITSTATUS(status) == SMBL_EXIT_OVER;
      int ended_well = (WIFEXITED(status) && WEXITSTATUS(status) == 0) ||
                       (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      if (met_end || !is_planned || !ended_well) {
        running--;
        failed |= !met_end;
        continue;
      }
      life_of[i]++;
      const char *life = life_of[i] < lives ? argv[4 + (i + life_of[i]) % lives] : NULL;
      pids[i] = fork();
      if (pids[i] == 0) work(argv[1], pause_ms, life);
    }
  }
  return failed;
}
