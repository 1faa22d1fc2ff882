/*
 * The busy loop of a task: uses a given processor time. All systems of `bench work` execute this loop. The master-worker
 * program of Sempa has the same loop in Rust.
 */
#ifndef WORK_LOOP_H
#define WORK_LOOP_H

#include <stdio.h>
#include <time.h>

/* Number of additions between two looks at the processor clock, which is a system call. */
enum { ADDITIONS_PER_LOOK = 500 };

static double clock_s(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static inline void use_processor(double microseconds)
{
    if (microseconds <= 0)
        return;
    double end = clock_s(CLOCK_THREAD_CPUTIME_ID) + microseconds / 1e6;
    volatile unsigned long state = 1;
    while (clock_s(CLOCK_THREAD_CPUTIME_ID) < end)
        for (int i = 0; i < ADDITIONS_PER_LOOK; i++)
            state = state * 6364136223846793005ul + 1;
}

/* Returns the processor time of all processes of the machine in seconds. */
static inline double machine_cpu_s(void)
{
    unsigned long user = 0, nice = 0, system = 0, idle, iowait, irq = 0, softirq = 0;
    FILE *file = fopen("/proc/stat", "r");
    if (!file)
        return 0;
    int count = fscanf(file, "cpu %lu %lu %lu %lu %lu %lu %lu", &user, &nice, &system, &idle, &iowait, &irq, &softirq);
    fclose(file);
    return count == 7 ? (user + nice + system + irq + softirq) / 100.0 : 0;
}

static inline void print_figures(long tasks, int workers, double grain_us, double seconds, double cpu_s)
{
    printf("{\"tasks\": %ld, \"seconds\": %.6f, \"tasks_per_second\": %.1f, \"efficiency\": %.4f, \"machine_us_per_task\": %.2f}\n",
           tasks, seconds, tasks / seconds, tasks * grain_us / 1e6 / (workers * seconds), cpu_s * 1e6 / tasks);
}

#endif
