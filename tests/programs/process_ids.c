/*
 * Tells process ids.
 *
 *   process_ids          as a task: answers every message with the numbers below
 *   process_ids ask TID  from a command line: asks one such task and prints
 *                        "pid N child N thread N listed N seed N"; listed is ti_pid of pvm_tasks
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TAG_ASK = 1, TAG_ANSWER };

enum { NUMBERS = 5 };

/* A time at which all tasks start. */
enum { COMMON_TIME = 1764288000 };

static void *thread_id(void *id)
{
    *(int *)id = (int)syscall(SYS_gettid);
    return NULL;
}

static int id_of_thread(void)
{
    pthread_t thread;
    int id = -1;
    if (pthread_create(&thread, NULL, thread_id, &id) == 0)
        pthread_join(thread, NULL);
    return id;
}

/* The child tells its number itself. */
static int id_of_child(void)
{
    int ends[2], id = -1;
    if (pipe(ends) != 0)
        return -1;
    pid_t child = fork();
    if (child == 0) {
        int own = getpid();
        _exit(write(ends[1], &own, sizeof own) != sizeof own);
    }
    close(ends[1]);
    if (read(ends[0], &id, sizeof id) != sizeof id)
        id = -1;
    close(ends[0]);
    waitpid(child, NULL, 0);
    return id;
}

static int listed_id(int tid)
{
    struct pvmtaskinfo *info = NULL;
    int count = 0;
    return pvm_tasks(tid, &count, &info) == PvmOk && count == 1 ? info[0].ti_pid : -1;
}

int main(int argc, char **argv)
{
    static const char *names[NUMBERS] = { "pid", "child", "thread", "listed", "seed" };
    int numbers[NUMBERS];
    if (pvm_mytid() < 0)
        return 2;
    if (argc > 2 && strcmp(argv[1], "ask") == 0) {
        struct timeval patience = { 30, 0 };
        int tid = (int)strtoul(argv[2] + (argv[2][0] == 't'), NULL, 16);
        pvm_initsend(PvmDataDefault);
        if (pvm_send(tid, TAG_ASK) < 0 || pvm_trecv(tid, TAG_ANSWER, &patience) <= 0)
            return 1;
        pvm_upkint(numbers, NUMBERS, 1);
        for (int i = 0; i < NUMBERS; i++)
            printf("%s %d ", names[i], numbers[i]);
        printf("\n");
        pvm_exit();
        return 0;
    }
    for (;;) {
        int buf = pvm_recv(-1, TAG_ASK), len, tag, tid;
        if (buf < 0)
            return 3;
        pvm_bufinfo(buf, &len, &tag, &tid);
        numbers[0] = getpid();
        numbers[1] = id_of_child();
        numbers[2] = id_of_thread();
        numbers[3] = listed_id(pvm_mytid());
        srand(getpid() ^ COMMON_TIME);
        numbers[4] = rand();
        pvm_initsend(PvmDataDefault);
        pvm_pkint(numbers, NUMBERS, 1);
        pvm_send(tid, TAG_ANSWER);
    }
}
