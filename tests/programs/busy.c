/*
 * Computes without a pause and watches its own clock.
 *
 *   busy            as a task: notes each time its clock jumped by more than GAP_US; answers every message
 *   busy NUMBER     the same, after it has started so many of the same on its host
 *   busy ask TID    from a command line: asks one such task and prints "gap FROM TO" for each, in microseconds since
 *                   1970, oldest first, then "now TIME"
 */
#include <pvm3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

#define GAP_US 40000
#define GAPS_MAX 20000
#define LOOK_EVERY 4096

enum { TAG_ASK = 1, TAG_ANSWER };

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int serve(void)
{
    static long gaps[2 * GAPS_MAX];
    int count = 0;
    volatile unsigned int work = 1;
    int64_t last = now_us();
    for (unsigned int round = 0;; round++) {
        for (int i = 0; i < 200; i++)
            work = work * 1664525u + 1013904223u;
        int64_t now = now_us();
        if (now - last > GAP_US && count < GAPS_MAX) {
            gaps[2 * count] = last;
            gaps[2 * count + 1] = now;
            count++;
        }
        last = now;
        if (round % LOOK_EVERY == 0) {
            int buf = pvm_nrecv(-1, TAG_ASK), len, tag, tid;
            if (buf < 0)
                return 3;
            if (buf > 0) {
                long here = now;
                pvm_bufinfo(buf, &len, &tag, &tid);
                pvm_initsend(PvmDataDefault);
                pvm_pkint(&count, 1, 1);
                pvm_pklong(gaps, 2 * count, 1);
                pvm_pklong(&here, 1, 1);
                pvm_send(tid, TAG_ANSWER);
            }
        }
    }
}

static int start(int number)
{
    int tids[64];
    if (number < 1 || number > 64)
        return 0;
    return pvm_spawn("busy", NULL, PvmTaskHost, ".", number, tids) == number;
}

int main(int argc, char **argv)
{
    if (pvm_mytid() < 0)
        return 2;
    if (argc == 2 && !start(atoi(argv[1])))
        return 4;
    if (argc < 3)
        return serve();
    static long gaps[2 * GAPS_MAX];
    int tid = (int)strtoul(argv[2] + (argv[2][0] == 't'), NULL, 16), count;
    long now;
    struct timeval patience = { 30, 0 };
    pvm_initsend(PvmDataDefault);
    if (pvm_send(tid, TAG_ASK) < 0)
        return 2;
    if (pvm_trecv(tid, TAG_ANSWER, &patience) <= 0) {
        printf("no answer\n");
        return 1;
    }
    pvm_upkint(&count, 1, 1);
    pvm_upklong(gaps, 2 * count, 1);
    pvm_upklong(&now, 1, 1);
    for (int i = 0; i < count; i++)
        printf("gap %ld %ld\n", gaps[2 * i], gaps[2 * i + 1]);
    printf("now %ld\n", now);
    pvm_exit();
    return 0;
}
