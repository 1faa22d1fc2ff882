/*
 * A master-worker program that also calls PVM's functions: work_pvm [MILLISECONDS | late]
 *
 * Each task takes the given processor time and sends its number as a PVM message to the
 * driver's PVM task. Prints the sum and the identities of the master. With `late`, a worker calls pvm_mytid before sempa_work_worker, which
 * must refuse.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "pvm3.h"
#include "sempa_work.h"

enum { TASKS = 20, NUMBER_TAG = 5 };

struct work {
    int number;
    int pvm_tid;
    int milliseconds;
};

struct driver {
    int sum;
    int milliseconds;
};

static int start(void *user, sempa_run *run)
{
    struct driver *state = user;
    for (int i = 1; i <= TASKS; ++i) {
        struct work work = {i, pvm_mytid(), state->milliseconds};
        sempa_task task = {&work, sizeof work, 0, 0};
        if (sempa_run_add_tasks(run, &task, 1, NULL) != SEMPA_WORK_OK)
            return 1;
    }
    return 0;
}

static int on_result(void *user, sempa_run *run, const sempa_result *result)
{
    (void)run;
    int number;
    /* The worker has sent the message before the result. */
    if (pvm_recv(-1, NUMBER_TAG) < 0 || pvm_upkint(&number, 1, 1) < 0 || result->length != 0)
        return 1;
    ((struct driver *)user)->sum += number;
    return 0;
}

static int execute(void *user, sempa_context *context, const void *payload, size_t length,
                   sempa_buffer *result)
{
    (void)user, (void)context, (void)result;
    struct work work;
    if (length != sizeof work)
        return 1;
    memcpy(&work, payload, sizeof work);
    if (pvm_mytid() == sempa_work_tid() || sempa_work_tid() <= 0 || pvm_parent() != PvmNoParent) {
        sempa_work_set_error("the worker is not two tasks");
        return 1;
    }
    clock_t end = clock() + work.milliseconds * (CLOCKS_PER_SEC / 1000);
    while (clock() < end)
        ;
    pvm_initsend(PvmDataDefault);
    pvm_pkint(&work.number, 1, 1);
    return pvm_send(work.pvm_tid, NUMBER_TAG) < 0;
}

int main(int argc, char **argv)
{
    sempa_worker worker = {0};
    worker.size = sizeof worker;
    worker.execute = execute;
    if (argc > 1 && strcmp(argv[1], "late") == 0) {
        if (pvm_mytid() < 0)
            return 2;
        int code = sempa_work_worker(&worker);
        printf("%d %s\n", code, sempa_work_last_error());
        return 0;
    }
    if (sempa_work_is_worker()) {
        int code = sempa_work_worker(&worker);
        pvm_exit();
        return code != SEMPA_WORK_OK;
    }
    int mytid = pvm_mytid();
    struct driver state = {0, argc > 1 ? atoi(argv[1]) : 0};
    sempa_workers workers = {0};
    workers.size = sizeof workers;
    workers.target = 2;
    sempa_options options = {0};
    options.size = sizeof options;
    options.run_name = "pvm";
    options.workers = &workers;
    sempa_driver driver = {0};
    driver.size = sizeof driver;
    driver.user = &state;
    driver.start = start;
    driver.on_result = on_result;
    if (sempa_work_master(&options, &driver, NULL) != SEMPA_WORK_OK) {
        fprintf(stderr, "master: %s\n", sempa_work_last_error());
        return 1;
    }
    /* The task of libpvm3 continues after the run. */
    printf("sum %d, same task %d, tid of the run %d\n", state.sum, mytid == pvm_mytid(),
           sempa_work_tid());
    pvm_exit();
    return 0;
}
