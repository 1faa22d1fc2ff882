/* Two threads of one member probe and receive: broker_threads SESSION
 *
 * The member sends itself messages of different sizes. Each message must be received once, with its
 * own size and content. Prints 'received N'. */
#include "smbl.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBER = 5, OTHER = 6, MESSAGES = 1000, SIZE_MAX_BYTES = 256, THREADS = 2 };

static int counts[MESSAGES];

static void require(int is_true, const char *what) {
  if (is_true) return;
  fprintf(stderr, "%s: %s\n", what, SMBL_Error_string());
  exit(1);
}

static int size_of(int number) { return (int)sizeof number + number % 97; }

static void *receive_share(void *unused) {
  (void)unused;
  for (int taken = 0; taken < MESSAGES / THREADS;) {
    unsigned char buffer[SIZE_MAX_BYTES];
    SMBL_Status probed, status;
    require(SMBL_Probe(SMBL_ANY_SOURCE, NUMBER, &probed) == SMBL_SUCCESS, "probe");
    /* The other thread may have received the message since the probe; the next one may not fit. */
    int code = SMBL_Recv(buffer, probed.size, SMBL_ANY_SOURCE, NUMBER, &status);
    if (code == SMBL_ERR_TRUNCATED) continue;
    require(code == SMBL_SUCCESS, "receive");
    int number;
    memcpy(&number, buffer, sizeof number);
    require(number >= 0 && number < MESSAGES && status.size == size_of(number), "size");
    __atomic_fetch_add(&counts[number], 1, __ATOMIC_SEQ_CST);
    taken++;
  }
  return NULL;
}

/* A probe removes nothing, and the receive after it gets the probed message. */
static void check_one_thread(int rank) {
  SMBL_Status status;
  int flag = 1;
  char text[8] = "";
  require(SMBL_Iprobe(SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &flag, &status) == SMBL_SUCCESS && !flag, "nothing is there");
  require(SMBL_Send("first", 6, rank, NUMBER) == SMBL_TAKEN, "send");
  require(SMBL_Send("second", 7, rank, OTHER) == SMBL_TAKEN, "send");
  require(SMBL_Probe(rank, OTHER, &status) == SMBL_SUCCESS, "probe by type");
  require(status.source == rank && status.type == OTHER && status.size == 7, "what the probe tells");
  require(SMBL_Recv(text, 3, status.source, status.type, &status) == SMBL_ERR_TRUNCATED, "a small buffer");
  require(SMBL_Recv(text, sizeof text, status.source, status.type, &status) == SMBL_SUCCESS, "receive");
  require(strcmp(text, "second") == 0, "the probed message");
  require(SMBL_Iprobe(SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &flag, &status) == SMBL_SUCCESS && flag, "the other stays");
  require(SMBL_Recv(text, sizeof text, SMBL_ANY_SOURCE, SMBL_ANY_TYPE, &status) == SMBL_SUCCESS, "receive");
  require(strcmp(text, "first") == 0, "the message that stayed");
  require(SMBL_Recv_timeout(text, sizeof text, rank, NUMBER, 0.01, &status) == SMBL_ERR_TIMEOUT, "a time limit");
}

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  int rank;
  require(SMBL_Init(argv[1], SMBL_FOREMAN_ROLE) == SMBL_SUCCESS, "join");
  require(SMBL_Comm_rank(&rank) == SMBL_SUCCESS, "rank");
  check_one_thread(rank);
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, receive_share, NULL);
  for (int number = 0; number < MESSAGES; number++) {
    unsigned char buffer[SIZE_MAX_BYTES] = {0};
    memcpy(buffer, &number, sizeof number);
    require(SMBL_Send_opt(buffer, size_of(number), rank, NUMBER, 0, 60) == SMBL_TAKEN, "send");
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  int received = 0;
  for (int number = 0; number < MESSAGES; number++) {
    require(counts[number] == 1, "each message once");
    received++;
  }
  printf("received %d\n", received);
  require(SMBL_Finish(0) == SMBL_SUCCESS, "finish");
  return 0;
}
