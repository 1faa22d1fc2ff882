/*
 * Two tasks exchange small messages in turn. The asking task runs under callgrind, which counts the instructions of each
 * call in measured(). The answer is there before the asking task receives it, so the counts contain no waiting. With the
 * role "step" the calls stand between breakpoints for locks.c instead.
 *
 * Arguments: the role; a file through which the answering task says how many answers it has sent; the number of
 * unreceived messages in front of each answer.
 */
#include <pvm3.h>

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define NAME "counted"
#define WARM_UP 300
#define ROUND_TRIPS 1000
#define STEPPED_ROUND_TRIPS 20
#define TAG_ASK 1
#define TAG_ANSWER 2
#define TAG_FRONT 3
#define TAG_FRONT_END 4
#define TAG_END 5

static volatile int *answers;

static void must(int good, const char *what)
{
    if (!good) {
        printf("%s failed, pvm_errno %d\n", what, pvm_errno);
        exit(1);
    }
}

static void map_answers(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT, 0600);

    must(fd >= 0 && ftruncate(fd, sizeof *answers) == 0, path);
    answers = mmap(NULL, sizeof *answers, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    must(answers != MAP_FAILED, "mmap");
}

static void answer(int front)
{
    int asker, tag, number, i;

    must(pvm_initsend(PvmDataRaw) > 0 && pvm_putinfo(NAME, pvm_getsbuf(), PvmMboxDefault) >= 0, "pvm_putinfo");
    for (;;) {
        /* This task never sleeps, so that no count contains its wake-up. */
        while ((i = pvm_nrecv(-1, -1)) == 0)
            sched_yield();
        must(i > 0 && pvm_bufinfo(i, NULL, &tag, &asker) == 0, "pvm_nrecv");
        if (tag == TAG_END)
            return;
        must(pvm_upkint(&number, 1, 1) == 0, "pvm_upkint");
        if (tag == TAG_FRONT) {
            for (i = 0; i < front; i++)
                must(pvm_initsend(PvmDataRaw) > 0 && pvm_pkint(&i, 1, 1) == 0 && pvm_send(asker, TAG_FRONT) == 0,
                    "a message in front");
            tag = TAG_FRONT_END;
        } else {
            tag = TAG_ANSWER;
        }
        must(pvm_initsend(PvmDataRaw) > 0 && pvm_pkint(&number, 1, 1) == 0 && pvm_send(asker, tag) == 0, "the answer");
        __atomic_add_fetch(answers, tag == TAG_ANSWER, __ATOMIC_SEQ_CST);
    }
}

/* A breakpoint before a call and after it. */
#define STEP(call_) \
    do { \
        __asm__ volatile("int3" ::: "memory"); \
        call_; \
        __asm__ volatile("int3" ::: "memory"); \
    } while (0)

static void stepped(int answerer)
{
    int number, i;

    for (i = 0; i < STEPPED_ROUND_TRIPS; i++) {
        int wanted = *answers + 1;

        STEP(pvm_initsend(PvmDataRaw));
        STEP(pvm_pkint(&i, 1, 1));
        STEP(pvm_send(answerer, TAG_ASK));
        while (*answers < wanted)
            sched_yield();
        STEP(pvm_recv(answerer, TAG_ANSWER));
        STEP(pvm_upkint(&number, 1, 1));
        must(number == i, "the number");
    }
}

/* One function for the rounds that count and one for those before, so that callgrind keeps them apart. */
#define ROUND_TRIPS_FUNCTION(name_) \
    static __attribute__((noinline)) void name_(int answerer, int count) \
    { \
        int number, i; \
\
        __asm__ volatile("# " #name_); /* The compiler would merge equal functions. */ \
        for (i = 0; i < count; i++) { \
            int wanted = *answers + 1; \
\
            pvm_initsend(PvmDataRaw); \
            pvm_pkint(&i, 1, 1); \
            pvm_send(answerer, TAG_ASK); \
            while (*answers < wanted) \
                sched_yield(); \
            pvm_recv(answerer, TAG_ANSWER); \
            pvm_upkint(&number, 1, 1); \
            must(number == i, "the number"); \
        } \
    }

ROUND_TRIPS_FUNCTION(warm_up)
ROUND_TRIPS_FUNCTION(measured)

int main(int argc, char **argv)
{
    int mid, peer, front = argc == 4 ? atoi(argv[3]) : 0;

    must(argc == 4, "usage");
    map_answers(argv[2]);
    must(pvm_mytid() > 0, "pvm_mytid");
    if (!strcmp(argv[1], "answer")) {
        answer(front);
        pvm_exit();
        return 0;
    }
    mid = pvm_recvinfo(NAME, 0, PvmMboxWaitForInfo);
    must(mid > 0 && pvm_bufinfo(mid, NULL, NULL, &peer) == 0, "pvm_recvinfo");
    pvm_initsend(PvmDataRaw);
    pvm_pkint(&front, 1, 1);
    pvm_send(peer, TAG_FRONT);
    must(pvm_recv(peer, TAG_FRONT_END) > 0, "the end of the messages in front");
    warm_up(peer, WARM_UP);
    if (!strcmp(argv[1], "step"))
        stepped(peer);
    else
        measured(peer, ROUND_TRIPS);
    pvm_initsend(PvmDataRaw);
    pvm_send(peer, TAG_END);
    pvm_exit();
    return 0;
}
