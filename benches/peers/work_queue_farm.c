/*
 * The master of the measurement of Work Queue. Each task is the program work_loop. Workers are started here.
 *
 *   work_queue_farm TASKS GRAIN_US WORKERS FOLDER      FOLDER: contains work_loop; for files of this run
 */
#include "work_loop.h"
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <work_queue.h>

enum { WORKERS_MAX = 64, WARM_UP_TASKS = 4, WAIT_S = 60 };

static pid_t start_worker(int port)
{
    char text[16];
    snprintf(text, sizeof text, "%d", port);
    pid_t pid = fork();
    if (pid == 0) {
        execlp("work_queue_worker", "work_queue_worker", "--cores", "1", "127.0.0.1", text, (char *)NULL);
        _exit(127);
    }
    return pid;
}

/* Executes tasks. Returns the seconds until the end of the last one. */
static double run(struct work_queue *queue, int tasks, const char *command)
{
    double start = clock_s(CLOCK_MONOTONIC);
    for (int i = 0; i < tasks; i++) {
        struct work_queue_task *task = work_queue_task_create(command);
        work_queue_task_specify_cores(task, 1);
        work_queue_submit(queue, task);
    }
    while (!work_queue_empty(queue)) {
        struct work_queue_task *task = work_queue_wait(queue, WAIT_S);
        if (!task || task->return_status != 0) {
            fprintf(stderr, "work_queue_farm: a task failed or took more than %d s\n", WAIT_S);
            exit(3);
        }
        work_queue_task_delete(task);
    }
    return clock_s(CLOCK_MONOTONIC) - start;
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    int tasks = atoi(argv[1]), workers = atoi(argv[3]);
    pid_t pids[WORKERS_MAX];
    struct work_queue *queue = work_queue_create(0);
    if (!queue || workers > WORKERS_MAX)
        return 3;
    for (int i = 0; i < workers; i++)
        pids[i] = start_worker(work_queue_port(queue));
    char command[4096];
    snprintf(command, sizeof command, "%s/work_loop %s %s/ends", argv[4], argv[2], argv[4]);
    struct work_queue_stats stats;
    do {
        run(queue, WARM_UP_TASKS, command);
        work_queue_get_stats(queue, &stats);
    } while (stats.workers_connected < workers);
    double cpu = machine_cpu_s();
    double seconds = run(queue, tasks, command);
    print_figures(tasks, workers, atof(argv[2]), seconds, machine_cpu_s() - cpu);
    work_queue_shut_down_workers(queue, 0);
    work_queue_delete(queue);
    for (int i = 0; i < workers; i++) {
        kill(pids[i], SIGTERM);
        waitpid(pids[i], NULL, 0);
    }
    return 0;
}
