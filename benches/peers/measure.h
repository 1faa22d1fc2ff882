/*
 * Shared by the program with PVM calls and the one with MPI calls: options, clock, and output of samples.
 */
#ifndef MEASURE_H
#define MEASURE_H

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct options {
    const char *what;
    long size;    /* bytes per message */
    int rounds;   /* number of samples */
    int warm;     /* unmeasured rounds before the first sample */
    int batch;    /* messages per sample, in one direction */
    int tasks;    /* number of other tasks */
    int idle;     /* additional tasks that only wait */
    int direct;   /* PVM: 0 the default route, 1 request a direct route, 2 forbid direct routes */
    int keep;     /* do not delete added hosts */
    int pause;    /* PVM: milliseconds before each spawn */
    int xdr;      /* PVM: use the portable encoding */
    int way;      /* PVM: 1 for pvm_psend and pvm_precv, 2 for data packed in place */
    int cores[2]; /* cores of the first and the second task; -1: any */
    const char *host;
};

/* Sets an option from `name=value`. Returns 0 if the name is unknown or the value malformed. */
static int set_option(struct options *o, const char *name, char *value)
{
    struct { const char *name; int *place; } numbers[] = {
        { "rounds", &o->rounds }, { "warm", &o->warm },     { "batch", &o->batch }, { "tasks", &o->tasks },
        { "idle", &o->idle },     { "direct", &o->direct }, { "keep", &o->keep },   { "xdr", &o->xdr },
        { "pause", &o->pause },   { "way", &o->way },
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(name, numbers[i].name)) {
            *numbers[i].place = atoi(value);
            return 1;
        }
    if (!strcmp(name, "size"))
        o->size = atol(value);
    else if (!strcmp(name, "host"))
        o->host = value;
    else
        return !strcmp(name, "cores") && sscanf(value, "%d,%d", &o->cores[0], &o->cores[1]) == 2;
    return 1;
}

static struct options options_of(int argc, char **argv)
{
    struct options o = { .what = argc > 1 ? argv[1] : "", .size = 8, .rounds = 1000, .warm = 100, .batch = 1,
                         .tasks = 1, .cores = { -1, -1 }, .host = "" };
    for (int i = 2; i < argc; i++) {
        char name[16] = "";
        char *value = strchr(argv[i], '=');
        if (value && value - argv[i] < (long)sizeof name)
            memcpy(name, argv[i], value - argv[i]);
        if (!value || !set_option(&o, name, value + 1)) {
            fprintf(stderr, "no such option: %s\n", argv[i]);
            exit(2);
        }
    }
    return o;
}

static inline double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void stay_on(int core)
{
    if (core < 0)
        return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof set, &set) < 0) {
        perror("sched_setaffinity");
        exit(2);
    }
}

/* Samples in microseconds. */
struct samples {
    double *us;
    int count, room;
};

static struct samples samples_for(int rounds)
{
    struct samples s = { malloc(sizeof(double) * (rounds > 0 ? rounds : 1)), 0, rounds };
    if (!s.us)
        exit(2);
    return s;
}

static inline void note(struct samples *s, double us)
{
    if (s->count < s->room)
        s->us[s->count++] = us;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints one line: name, number of samples, median, 99th percentile, minimum. */
static void tell(const char *name, struct samples *s)
{
    if (s->count == 0)
        return;
    qsort(s->us, s->count, sizeof(double), by_size);
    printf("sample %s %d %.4f %.4f %.4f\n", name, s->count, s->us[s->count / 2], s->us[(s->count - 1) * 99L / 100],
           s->us[0]);
    fflush(stdout);
    free(s->us);
}

static char *block_of(long size)
{
    char *block = malloc(size > 0 ? size : 1);
    if (!block)
        exit(2);
    memset(block, 7, size);
    return block;
}

/* Copies of shorter messages do not measure memory. */
#define COPY_MIN (64 << 10)
#define COPIES 100

/* Measures one copy of a message without any library. A round trip of large messages consists mostly of copies; this
 * shows whether memory was slow during the run. */
static inline void tell_copy(long size)
{
    if (size < COPY_MIN)
        return;
    char *from = block_of(size), *to = block_of(size);
    struct samples copies = samples_for(COPIES);
    for (int i = 0; i < COPIES; i++) {
        double begun = now_us();
        memcpy(to, from, size);
        __asm__ volatile("" : : "r"(to) : "memory"); /* prevents removal of the copy */
        note(&copies, now_us() - begun);
    }
    tell("copy", &copies);
    free(from);
    free(to);
}

#endif
