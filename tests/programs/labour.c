/*
 * A farm of tasks with different amounts of work.
 *
 *   labour UNITS                 as a task: does this number of units of work, then sends its parent the result
 *   labour farm SECONDS UNITS... from a command line: spawns a task for each amount; SECONDS is what a unit takes an ordinary
 *                                processor, and with more than 0 each spawn says what its task will need. Prints
 *                                "task TID UNITS US right|wrong" for each, US being microseconds from the first spawn until it
 *                                was heard of, then "farm US"
 *   labour unit                  without a virtual machine: prints the microseconds of processor time that a unit takes
 */
#include <pvm3.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "steps.h"

#define UNITS_MEASURED 200u
#define TASKS_MAX 64
#define TAG_DONE 1

/* The result of this number of units for a number, step by step. */
static uint32_t work(uint32_t x, unsigned units)
{
    for (unsigned unit = 0; unit < units; unit++)
        x = steps(x, STEPS_PER_UNIT);
    return x;
}

static int serve(unsigned units)
{
    int me = pvm_mytid(), parent = pvm_parent();
    if (me < 0 || parent < 0)
        return 2;
    unsigned result = work((uint32_t)me, units);
    pvm_initsend(PvmDataDefault);
    pvm_pkuint(&result, 1, 1);
    return pvm_send(parent, TAG_DONE) < 0 ? 3 : 0;
}

static int spawn(double seconds, char *units)
{
    static char wants[64];
    char *args[] = { units, NULL };
    int tid;
    if (seconds > 0) {
        snprintf(wants, sizeof wants, "SEMPA_WANTS=work = %.3f", seconds * atof(units));
        putenv(wants);
        putenv("PVM_EXPORT=SEMPA_WANTS");
    }
    if (pvm_spawn("labour", args, PvmTaskDefault, "", 1, &tid) != 1) {
        fprintf(stderr, "labour: not spawned: %d\n", tid);
        exit(1);
    }
    return tid;
}

static int farm(double seconds, int count, char **units)
{
    int tids[TASKS_MAX], done = 0;
    if (pvm_mytid() < 0 || count > TASKS_MAX)
        return 2;
    int64_t begin = now_us(CLOCK_MONOTONIC);
    for (int i = 0; i < count; i++) {
        tids[i] = spawn(seconds, units[i]);
        printf("spawned t%x %s\n", tids[i], units[i]);
    }
    fflush(stdout);
    for (; done < count; done++) {
        int buf = pvm_recv(-1, TAG_DONE), len, tag, tid, i = 0;
        unsigned result;
        if (buf < 0 || pvm_bufinfo(buf, &len, &tag, &tid) < 0 || pvm_upkuint(&result, 1, 1) < 0)
            return 3;
        while (i < count && tids[i] != tid)
            i++;
        if (i == count)
            return 4;
        int right = result == expected((uint32_t)tid, (unsigned)atoi(units[i]));
        printf("task t%x %s %ld %s\n", tid, units[i], (long)(now_us(CLOCK_MONOTONIC) - begin), right ? "right" : "wrong");
        fflush(stdout);
    }
    printf("farm %ld\n", (long)(now_us(CLOCK_MONOTONIC) - begin));
    pvm_exit();
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 3 && strcmp(argv[1], "farm") == 0)
        return farm(atof(argv[2]), argc - 3, argv + 3);
    if (argc == 2 && strcmp(argv[1], "unit") == 0) {
        int64_t begin = now_us(CLOCK_PROCESS_CPUTIME_ID);
        if (work(1, UNITS_MEASURED) != expected(1, UNITS_MEASURED))
            return 1;
        printf("%ld\n", (long)((now_us(CLOCK_PROCESS_CPUTIME_ID) - begin) / UNITS_MEASURED));
        return 0;
    }
    return argc == 2 ? serve((unsigned)atoi(argv[1])) : 2;
}
