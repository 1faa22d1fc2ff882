/*
 * Computes without a pause and watches its own clock.
 *
 *   busy                   as a task: notes each time its clock jumped by more than GAP_US; answers every message
 *   busy NUMBER            the same, after it has started this number of further ones on its host
 *   busy ask TID           from a command line: asks one such task and prints "gap FROM TO" for each, in microseconds since
 *                          1970, oldest first, then "now TIME"
 *   busy farm COUNT UNITS  from a command line: spawns COUNT tasks that do UNITS units of work each and watch their
 *                          clocks. Prints "spawned TID" for each; when one has ended "watched TID FROM TO", between which it
 *                          has looked at its clock all the time, "gap TID FROM TO" for each of its gaps and
 *                          "task TID right|wrong"; then "farm COUNT"
 *   busy work UNITS        as a task: one of these
 */
#include <pvm3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include "steps.h"

#define GAP_US 40000
#define GAPS_MAX 20000
#define LOOK_EVERY 4096
#define STEPS_PER_LOOK 200
#define FARM_MAX 64

enum { TAG_ASK = 1, TAG_ANSWER, TAG_DONE };

static long gaps[2 * GAPS_MAX];
static int count;
static int64_t last;

/* Notes how long ago the last look was, if it was long ago. */
static void look(void)
{
    int64_t now = now_us(CLOCK_REALTIME);
    if (now - last > GAP_US && count < GAPS_MAX) {
        gaps[2 * count] = last;
        gaps[2 * count + 1] = now;
        count++;
    }
    last = now;
}

static void pack_gaps(void)
{
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&count, 1, 1);
    pvm_pklong(gaps, 2 * count, 1);
}

static int unpack_gaps(void)
{
    return pvm_upkint(&count, 1, 1) < 0 || count < 0 || count > GAPS_MAX || pvm_upklong(gaps, 2 * count, 1) < 0;
}

static int serve(void)
{
    uint32_t work = 1;
    last = now_us(CLOCK_REALTIME);
    for (unsigned int round = 0;; round++) {
        work = steps(work, STEPS_PER_LOOK);
        look();
        if (round % LOOK_EVERY == 0) {
            int buf = pvm_nrecv(-1, TAG_ASK), len, tag, tid;
            if (buf < 0)
                return 3;
            if (buf > 0) {
                long here = last;
                pvm_bufinfo(buf, &len, &tag, &tid);
                pack_gaps();
                pvm_pklong(&here, 1, 1);
                pvm_send(tid, TAG_ANSWER);
            }
        }
    }
}

static int start(int number)
{
    int tids[FARM_MAX];
    if (number < 1 || number > FARM_MAX)
        return 0;
    return pvm_spawn("busy", NULL, PvmTaskHost, ".", number, tids) == number;
}

static int ask(int tid)
{
    long now;
    struct timeval patience = { 30, 0 };
    pvm_initsend(PvmDataDefault);
    if (pvm_send(tid, TAG_ASK) < 0)
        return 2;
    if (pvm_trecv(tid, TAG_ANSWER, &patience) <= 0 || unpack_gaps()) {
        printf("no answer\n");
        return 1;
    }
    pvm_upklong(&now, 1, 1);
    for (int i = 0; i < count; i++)
        printf("gap %ld %ld\n", gaps[2 * i], gaps[2 * i + 1]);
    printf("now %ld\n", now);
    pvm_exit();
    return 0;
}

static int labour(int me, unsigned units)
{
    uint32_t x = (uint32_t)me;
    int parent = pvm_parent();
    if (parent < 0)
        return 2;
    long watched[2] = { last = now_us(CLOCK_REALTIME), 0 };
    for (unsigned unit = 0; unit < units; unit++)
        for (unsigned done = 0; done < STEPS_PER_UNIT; done += STEPS_PER_LOOK) {
            x = steps(x, STEPS_PER_LOOK);
            look();
        }
    watched[1] = last;
    pack_gaps();
    pvm_pklong(watched, 2, 1);
    pvm_pkuint(&x, 1, 1);
    return pvm_send(parent, TAG_DONE) < 0 ? 3 : 0;
}

static int farm(int number, char *units)
{
    char *args[] = { "work", units, NULL };
    int tids[FARM_MAX];
    if (number < 1 || number > FARM_MAX || pvm_spawn("busy", args, PvmTaskDefault, "", number, tids) != number)
        return 4;
    for (int i = 0; i < number; i++)
        printf("spawned t%x\n", tids[i]);
    fflush(stdout);
    for (int done = 0; done < number; done++) {
        int buf = pvm_recv(-1, TAG_DONE), len, tag, tid;
        long watched[2];
        unsigned result;
        if (buf < 0 || pvm_bufinfo(buf, &len, &tag, &tid) < 0 || unpack_gaps() || pvm_upklong(watched, 2, 1) < 0
            || pvm_upkuint(&result, 1, 1) < 0)
            return 3;
        printf("watched t%x %ld %ld\n", tid, watched[0], watched[1]);
        for (int i = 0; i < count; i++)
            printf("gap t%x %ld %ld\n", tid, gaps[2 * i], gaps[2 * i + 1]);
        int right = result == expected((uint32_t)tid, (unsigned)atoi(units));
        printf("task t%x %s\n", tid, right ? "right" : "wrong");
        fflush(stdout);
    }
    printf("farm %d\n", number);
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    int me = pvm_mytid();
    if (me < 0)
        return 2;
    if (argc == 4 && strcmp(argv[1], "farm") == 0)
        return farm(atoi(argv[2]), argv[3]);
    if (argc == 3 && strcmp(argv[1], "work") == 0)
        return labour(me, (unsigned)atoi(argv[2]));
    if (argc == 3)
        return ask((int)strtoul(argv[2] + (argv[2][0] == 't'), NULL, 16));
    if (argc == 2 && !start(atoi(argv[1])))
        return 4;
    return serve();
}
