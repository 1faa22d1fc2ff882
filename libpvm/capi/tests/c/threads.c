/* Tests concurrent calls of threads, forked children with and without calls, and the descriptor of pvm_getfds. */
#include <pvm3.h>

#include "check.h"

int pvmendtask(void);

#include <poll.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUNDS 2000

static int me;

/* Sends numbers with the thread's own tag to this task and must receive them in order. As in PVM, all threads of a
   process share the active buffers, so the threads use pvm_psend and pvm_precv, which need none. */
static void *talk(void *argument)
{
    int tag = (int)(long)argument, i, got[4], len;

    for (i = 0; i < ROUNDS; i++) {
        int numbers[4] = {i, tag, i ^ tag, -i};

        IS(0, pvm_psend(me, tag, numbers, 4, PVM_INT));
        IS(0, pvm_precv(me, tag, got, 4, PVM_INT, 0, 0, &len));
        IS(16, len);
        IS(0, memcmp(numbers, got, sizeof got));
    }
    return 0;
}

/* Only receives: the other threads take in its messages, too, and must wake it. */
static void *listen_only(void *argument)
{
    int tag = (int)(long)argument, i, number;

    for (i = 0; i < ROUNDS; i++) {
        IS(0, pvm_precv(me, tag, &number, 1, PVM_INT, 0, 0, 0));
        IS(i, number);
    }
    return 0;
}

/* Meanwhile creates and frees buffers and queries the daemon. */
static void *disturb(void *argument)
{
    int i, n;
    struct pvmtaskinfo *tasks;

    for (i = 0; i < ROUNDS; i++) {
        int mid = pvm_mkbuf(PvmDataRaw);

        if (mid <= 0)
            IS(1, mid);
        IS(0, pvm_bufinfo(mid, &n, 0, 0));
        IS(0, pvm_freebuf(mid));
        if (i % 100 == 0)
            IS(0, pvm_tasks(me, &n, &tasks));
        pvm_getopt(PvmRoute);
        pvm_nrecv(me, 77777);
    }
    return argument;
}

/* Calls that do not wait for messages end while another thread runs a handler, also if messages have arrived. */
static void *ask(void *argument)
{
    int number = 1;

    IS(0, pvm_psend(me, 52, &number, 1, PVM_INT));
    IS(PvmOk, pvm_pstat(me));
    IS(0, pvm_nrecv(me, 53));
    return argument;
}

static int handled;

/* A handler that waits for another thread. */
static int wait_for_thread(int mid)
{
    pthread_t asker;

    IS(1, mid > 0);
    IS(0, pthread_create(&asker, 0, ask, 0));
    IS(0, pthread_join(asker, 0));
    handled++;
    return 0;
}

/* A handler in which the process becomes another task. */
static int leave(int mid)
{
    IS(1, mid > 0);
    IS(0, pvm_exit());
    me = pvm_mytid();
    handled++;
    return 0;
}

/* Messages that had arrived for the old task do not reach the next task of the process. */
static void become_another_task(void)
{
    int number = 6, tag;

    for (tag = 61; tag <= 63; tag++)
        IS(0, pvm_psend(me, tag, &number, 1, PVM_INT));
    IS(0, pvm_nrecv(me, 99)); /* takes in the first message */
    pvmendtask();
    me = pvm_mytid();
    IS(1, me > 0);
    IS(0, pvm_nrecv(-1, 62));
    IS(0, pvm_nrecv(-1, 63));

    handled = 0;
    IS(0, pvm_psend(me, 64, &number, 1, PVM_INT));
    IS(0, pvm_psend(me, 65, &number, 1, PVM_INT));
    IS(1, pvm_addmhf(-1, 64, -1, leave) >= 0);
    pvm_nrecv(-1, 99);
    IS(1, handled);
    IS(1, me > 0);
    IS(0, pvm_nrecv(-1, 65));
    IS(0, pvm_nrecv(-1, 65));
}

static int ready(int fd, int span)
{
    struct pollfd one = {fd, POLLIN, 0};

    return poll(&one, 1, span);
}

int main(void)
{
    pthread_t threads[6];
    int i, *fds, status, number = 5;
    pid_t pid;

    /* Ends a test that hangs. */
    alarm(60);
    me = pvm_mytid();
    IS(1, me > 0);
    for (i = 0; i < 6; i++)
        IS(0, pthread_create(&threads[i], 0, i < 4 ? talk : disturb, (void *)(long)(i + 1)));
    for (i = 0; i < 6; i++)
        IS(0, pthread_join(threads[i], 0));
    IS(0, pvm_nrecv(-1, -1));

    for (i = 0; i < 3; i++)
        IS(0, pthread_create(&threads[i], 0, listen_only, (void *)(long)(100 + i)));
    for (i = 0; i < 3 * ROUNDS; i++) {
        int round = i / 3;

        IS(0, pvm_psend(me, 100 + i % 3, &round, 1, PVM_INT));
        if (i % 100 == 0)
            usleep(300);
    }
    for (i = 0; i < 3; i++)
        IS(0, pthread_join(threads[i], 0));
    IS(0, pvm_nrecv(-1, -1));

    i = pvm_addmhf(me, 50, -1, wait_for_thread);
    IS(1, i >= 0);
    IS(0, pvm_psend(me, 50, &number, 1, PVM_INT));
    IS(0, pvm_nrecv(me, 51));
    IS(1, handled);
    IS(0, pvm_delmhf(i));
    IS(1, pvm_recv(me, 52) > 0);
    become_another_task();

    IS(1, pvm_getfds(&fds));
    IS(0, ready(fds[0], 0));
    IS(0, pvm_psend(me, 9, &number, 1, PVM_INT));
    IS(1, ready(fds[0], 20000));
    IS(1, pvm_nrecv(me, 9) > 0);
    IS(0, ready(fds[0], 0));

    /* A poll that finds nothing takes in one message, and the descriptor shows the other one. */
    IS(0, pvm_psend(me, 9, &number, 1, PVM_INT));
    IS(0, pvm_psend(me, 10, &number, 1, PVM_INT));
    IS(1, ready(fds[0], 20000));
    IS(0, pvm_nrecv(me, 11));
    IS(1, ready(fds[0], 20000));
    IS(0, pvm_nrecv(me, 11));
    IS(0, ready(fds[0], 0));
    IS(1, pvm_nrecv(me, 10) > 0);
    IS(1, pvm_nrecv(me, 9) > 0);

    pid = fork();
    if (pid == 0)
        _exit(0);
    IS(pid, waitpid(pid, &status, 0));
    IS(0, status);
    pid = fork();
    if (pid == 0)
        _exit(pvm_mytid() > 0 && pvm_parent() == PvmNoParent && pvm_exit() == 0 ? 7 : 1);
    IS(pid, waitpid(pid, &status, 0));
    IS(7, WEXITSTATUS(status));
    IS(me, pvm_mytid());
    IS(0, pvm_psend(me, 9, &number, 1, PVM_INT));
    IS(1, pvm_recv(me, 9) > 0);
    IS(0, pvm_exit());
    return 0;
}
