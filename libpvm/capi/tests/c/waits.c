/*
 * Two tasks exchange messages in turn and count the system calls with which their threads wait: futex and sched_yield.
 * This program defines both functions, and the library calls these definitions. Nothing else is slowed down, as a
 * tracer would do.
 *
 * Arguments: the role; the processor of this task before it enrols; the processor after it has enrolled (-1: any).
 * The asking task has more: the maximum of futex calls and of yields in a batch, and the minimum of yields. It ends
 * successfully as soon as a batch is within these bounds. Other programs may disturb any one batch.
 */
#define _GNU_SOURCE
#include <pvm3.h>

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#define NAME "waits"
#define ROUND_TRIPS 100
#define BATCHES_MAX 200
#define TAG_ASK 1
#define TAG_END 2

/* Calls of this thread; those of the library's own threads do not count. */
static __thread int futexes, yields;

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    long a[6];
    va_list list;
    int i;

    va_start(list, number);
    for (i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (!next)
        next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_futex)
        futexes++;
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int sched_yield(void)
{
    static int (*next)(void);

    if (!next)
        next = (int (*)(void))dlsym(RTLD_NEXT, "sched_yield");
    yields++;
    return next();
}

static void must(int good, const char *what)
{
    if (!good) {
        printf("%s failed, pvm_errno %d\n", what, pvm_errno);
        exit(1);
    }
}

static void pin(const char *argument)
{
    cpu_set_t set;

    if (atoi(argument) < 0)
        return;
    CPU_ZERO(&set);
    CPU_SET(atoi(argument), &set);
    must(sched_setaffinity(0, sizeof set, &set) == 0, "sched_setaffinity");
}

/* Runs before all ordinary threads, also of the library, so that no other program delays this task. Needs root. */
static void come_first(void)
{
    struct sched_param parameters = {.sched_priority = 1};

    if (sched_setscheduler(0, SCHED_FIFO, &parameters) != 0)
        printf("other programs may disturb this task\n");
}

/* Answers each question with the numbers of calls that this task has made so far. */
static void answer(void)
{
    int asker, tag;

    must(pvm_initsend(PvmDataRaw) > 0 && pvm_putinfo(NAME, pvm_getsbuf(), PvmMboxDefault) >= 0, "pvm_putinfo");
    for (;;) {
        must(pvm_recv(-1, -1) > 0 && pvm_bufinfo(pvm_getrbuf(), NULL, &tag, &asker) == 0, "pvm_recv");
        if (tag == TAG_END)
            return;
        must(pvm_initsend(PvmDataRaw) > 0 && pvm_pkint(&futexes, 1, 1) == 0 && pvm_pkint(&yields, 1, 1) == 0
                 && pvm_send(asker, TAG_ASK) == 0,
            "the answer");
    }
}

static void ask(int answerer, int *peer_futexes, int *peer_yields)
{
    must(pvm_initsend(PvmDataRaw) > 0 && pvm_send(answerer, TAG_ASK) == 0, "the question");
    must(pvm_recv(answerer, TAG_ASK) > 0 && pvm_upkint(peer_futexes, 1, 1) == 0 && pvm_upkint(peer_yields, 1, 1) == 0,
        "the answer");
}

int main(int argc, char **argv)
{
    int peer, batch, i, futexes_before, yields_before, peer_futexes, peer_yields;

    must(argc >= 4, "usage");
    come_first();
    pin(argv[2]);
    must(pvm_mytid() > 0, "pvm_mytid");
    pin(argv[3]);
    if (!strcmp(argv[1], "answer")) {
        answer();
        pvm_exit();
        return 0;
    }
    must(argc == 7, "usage");
    i = pvm_recvinfo(NAME, 0, PvmMboxWaitForInfo);
    must(i > 0 && pvm_bufinfo(i, NULL, NULL, &peer) == 0, "pvm_recvinfo");
    ask(peer, &peer_futexes, &peer_yields);
    for (batch = 0; batch < BATCHES_MAX; batch++) {
        futexes_before = futexes + peer_futexes;
        yields_before = yields + peer_yields;
        for (i = 0; i < ROUND_TRIPS; i++)
            ask(peer, &peer_futexes, &peer_yields);
        futexes_before = futexes + peer_futexes - futexes_before;
        yields_before = yields + peer_yields - yields_before;
        if (futexes_before <= atoi(argv[4]) && yields_before <= atoi(argv[5]) && yields_before >= atoi(argv[6]))
            break;
    }
    printf("batch %d: %d futex calls, %d yields in %d round trips\n", batch, futexes_before, yields_before, ROUND_TRIPS);
    must(pvm_initsend(PvmDataRaw) > 0 && pvm_send(peer, TAG_END) == 0, "the end");
    pvm_exit();
    return batch < BATCHES_MAX ? 0 : 2;
}
