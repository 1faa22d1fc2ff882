/*
 * A task farm as one writes it by hand with PVM calls: no loss is handled.
 *
 *   farm TASKS GRAIN_US WORKERS AHEAD      AHEAD: tasks that each worker has in advance
 *
 * Each task and each result is a message. The same program runs on every PVM.
 */
#include "work_loop.h"
#include <pvm3.h>
#include <stdlib.h>

enum { TAG_READY = 1, TAG_TASK, TAG_RESULT, TAG_END };
enum { WORKERS_MAX = 64 };

static void check(int info, const char *doing)
{
    if (info >= 0)
        return;
    fprintf(stderr, "farm: %s: %d\n", doing, info);
    pvm_exit();
    exit(3);
}

static void send_task(int worker, int number)
{
    pvm_initsend(PvmDataRaw);
    pvm_pkint(&number, 1, 1);
    check(pvm_send(worker, TAG_TASK), "sending a task");
}

static void work(int master, double grain_us)
{
    pvm_setopt(PvmRoute, PvmRouteDirect);
    pvm_initsend(PvmDataRaw);
    check(pvm_send(master, TAG_READY), "reporting to the master");
    for (;;) {
        int number, tag;
        int buffer = pvm_recv(master, -1);
        check(buffer, "waiting for a task");
        pvm_bufinfo(buffer, NULL, &tag, NULL);
        if (tag == TAG_END)
            return;
        pvm_upkint(&number, 1, 1);
        use_processor(grain_us);
        pvm_initsend(PvmDataRaw);
        pvm_pkint(&number, 1, 1);
        check(pvm_send(master, TAG_RESULT), "sending a result");
    }
}

static void serve(char **argv, int tasks, double grain_us, int workers, int ahead)
{
    int tids[WORKERS_MAX], sent = 0, received = 0;
    pvm_setopt(PvmRoute, PvmRouteDirect);
    check(pvm_spawn(argv[0], argv + 1, PvmTaskDefault, NULL, workers, tids) == workers ? 0 : -1, "starting workers");
    for (int i = 0; i < workers; i++)
        check(pvm_recv(-1, TAG_READY), "waiting for the workers");
    double start = clock_s(CLOCK_MONOTONIC), cpu = machine_cpu_s();
    for (int round = 0; round <= ahead; round++)
        for (int i = 0; i < workers && sent < tasks; i++)
            send_task(tids[i], sent++);
    while (received < tasks) {
        int worker, number, buffer = pvm_recv(-1, TAG_RESULT);
        check(buffer, "waiting for a result");
        pvm_bufinfo(buffer, NULL, NULL, &worker);
        pvm_upkint(&number, 1, 1);
        received++;
        if (sent < tasks)
            send_task(worker, sent++);
    }
    print_figures(tasks, workers, grain_us, clock_s(CLOCK_MONOTONIC) - start, machine_cpu_s() - cpu);
    pvm_initsend(PvmDataRaw);
    check(pvm_mcast(tids, workers, TAG_END), "ending the workers");
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    int master = pvm_parent();
    double grain_us = atof(argv[2]);
    if (master >= 0)
        work(master, grain_us);
    else
        serve(argv, atoi(argv[1]), grain_us, atoi(argv[3]) < WORKERS_MAX ? atoi(argv[3]) : WORKERS_MAX, atoi(argv[4]));
    pvm_exit();
    return 0;
}
