/* Calls all functions of sempa_work.h in one process and checks what they do. Prints "ok". */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sempa_work.h"

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition,        \
                    sempa_work_last_error());                                              \
            exit(1);                                                                       \
        }                                                                                  \
    } while (0)

enum { PLAIN, RETURNING, FAILING, WAITING, TASK_MAX = 32 };

/* Content of a task. */
struct work {
    int kind;
    int number;
};

/* What the driver has seen. */
struct seen {
    int order[TASK_MAX];
    int count;
    int partial_count, quarantined_count, ready_count, closed_count;
    char reason[200];
    sempa_run *run;
    sempa_context *context;
    uint64_t ids[8];
    int pruned, init_count;
};

static sempa_task task_of(struct work *work, double key)
{
    sempa_task task = {work, sizeof *work, key, 0};
    return task;
}

static void count_pruned(void *user, uint64_t task)
{
    struct seen *seen = user;
    CHECK(task == seen->ids[4]);
    ++seen->pruned;
}

static int sum_keys(void *user, const sempa_open_task *task)
{
    CHECK(task->length == sizeof(struct work) && !task->is_running && task->groups == UINT64_MAX);
    *(double *)user += task->key;
    return 0;
}

static int stop_visit(void *user, const sempa_open_task *task)
{
    (void)task;
    ++*(int *)user;
    return 1;
}

static int use_run(void *user, const sempa_open_task *task)
{
    (void)task;
    size_t wanted;
    CHECK(sempa_run_wanted_tasks(((struct seen *)user)->run, &wanted) == SEMPA_WORK_ERR_STATE);
    return 0;
}

static void check_settings(sempa_run *run)
{
    sempa_settings settings = {0};
    CHECK(sempa_run_get_settings(run, &settings) == SEMPA_WORK_ERR_ARGUMENT);
    settings.size = sizeof settings;
    CHECK(sempa_run_get_settings(run, &settings) == SEMPA_WORK_OK);
    CHECK(settings.attempts_max == 2 && settings.pause_policy == SEMPA_PAUSE_DUPLICATE);
    settings.pause_policy = SEMPA_PAUSE_REASSIGN;
    settings.reassign_after_s = 1.5;
    CHECK(sempa_run_set_settings(run, &settings) == SEMPA_WORK_OK);
    settings.reassign_after_s = 0;
    CHECK(sempa_run_get_settings(run, &settings) == SEMPA_WORK_OK);
    CHECK(settings.reassign_after_s == 1.5);
    settings.pause_policy = 77;
    CHECK(sempa_run_set_settings(run, &settings) == SEMPA_WORK_ERR_ARGUMENT);
    CHECK(strstr(sempa_work_last_error(), "77"));
}

static int start(void *user, sempa_run *run)
{
    struct seen *seen = user;
    seen->run = run;
    struct work work[] = {{PLAIN, 0}, {PLAIN, 1}, {PLAIN, 2}, {RETURNING, 3}, {PLAIN, 4}, {FAILING, 5}};
    sempa_task tasks[6];
    for (int i = 0; i < 6; ++i)
        tasks[i] = task_of(&work[i], i);
    CHECK(sempa_run_add_tasks(run, tasks, 6, seen->ids) == SEMPA_WORK_OK);
    CHECK(sempa_run_add_tasks(run, NULL, 1, NULL) == SEMPA_WORK_ERR_ARGUMENT);
    tasks[0].payload = NULL;
    CHECK(sempa_run_add_tasks(run, tasks, 1, NULL) == SEMPA_WORK_ERR_ARGUMENT);
    /* The content was copied. */
    memset(work, 0xff, sizeof work);

    struct work front = {PLAIN, 6};
    sempa_task front_task = task_of(&front, 0);
    CHECK(sempa_run_add_tasks_in_front(run, &front_task, 1, NULL) == SEMPA_WORK_OK);

    double key = -1, sum = 0;
    CHECK(sempa_run_best_waiting_key(run, &key) == SEMPA_WORK_OK && key == 0);
    CHECK(sempa_run_best_running_key(run, &key) == SEMPA_WORK_NONE);
    CHECK(sempa_run_each_task(run, sum_keys, &sum) == SEMPA_WORK_OK && sum == 15);
    int visited = 0;
    CHECK(sempa_run_each_task(run, stop_visit, &visited) == SEMPA_WORK_NONE && visited == 1);
    CHECK(sempa_run_each_task(run, use_run, seen) == SEMPA_WORK_OK);

    struct work canceled = {PLAIN, 9};
    sempa_task canceled_task = task_of(&canceled, 0);
    uint64_t canceled_id = 0;
    CHECK(sempa_run_add_tasks(run, &canceled_task, 1, &canceled_id) == SEMPA_WORK_OK);
    CHECK(sempa_run_cancel_task(run, canceled_id) == SEMPA_WORK_OK);
    CHECK(sempa_run_cancel_task(run, canceled_id) == SEMPA_WORK_NONE);
    CHECK(sempa_run_stop_work(run, 1, NULL) == SEMPA_WORK_NONE);

    /* Task 1 comes last, and task 4 is removed. */
    CHECK(sempa_run_set_key(run, seen->ids[1], 5.5) == SEMPA_WORK_OK);
    CHECK(sempa_run_set_key(run, seen->ids[4], 99) == SEMPA_WORK_OK);
    CHECK(sempa_run_set_key(run, 12345, 1) == SEMPA_WORK_NONE);
    size_t count = 0;
    CHECK(sempa_run_prune(run, 50, 1, count_pruned, seen, &count) == SEMPA_WORK_OK);
    CHECK(count == 1 && seen->pruned == 1);
    CHECK(sempa_run_prune(run, 50, 0, NULL, NULL, NULL) == SEMPA_WORK_OK);

    sempa_workers workers = {0};
    workers.size = sizeof workers;
    workers.target = 3;
    CHECK(sempa_run_set_workers(run, 7, &workers) == SEMPA_WORK_OK);
    CHECK(sempa_run_set_target(run, 7, 2) == SEMPA_WORK_OK);
    workers.place_kind = SEMPA_PLACE_HOST;
    CHECK(sempa_run_set_workers(run, 7, &workers) == SEMPA_WORK_ERR_ARGUMENT);
    check_settings(run);
    CHECK(sempa_run_set_grain(run, -1, 2) == SEMPA_WORK_ERR_ARGUMENT);
    /* All tasks have a time limit that is over at once. */
    CHECK(sempa_run_set_grain(run, 1e-6, 1e-6) == SEMPA_WORK_OK);
    return 0;
}

static int init_data(void *user, sempa_buffer *data)
{
    (void)user;
    CHECK(sempa_buffer_append(data, "wrong", 5) == SEMPA_WORK_OK && sempa_buffer_length(data) == 5);
    CHECK(sempa_buffer_clear(data) == SEMPA_WORK_OK && sempa_buffer_length(data) == 0);
    CHECK(sempa_buffer_append(data, NULL, 3) == SEMPA_WORK_ERR_ARGUMENT);
    return sempa_buffer_append(data, "init", 4);
}

static int benchmark(void *user, sempa_buffer *payload)
{
    (void)user;
    struct work work = {PLAIN, 31};
    return sempa_buffer_append(payload, &work, sizeof work);
}

static int on_result(void *user, sempa_run *run, const sempa_result *result)
{
    struct seen *seen = user;
    struct work work;
    CHECK(result->payload_length == sizeof work);
    memcpy(&work, result->payload, sizeof work);
    CHECK(result->length == sizeof(int) && *(const int *)result->data == 10 * work.number);
    CHECK(result->worker == 1 && result->wall_s >= 0 && result->cpu_s >= 0);
    CHECK(seen->count < TASK_MAX);
    seen->order[seen->count++] = work.number;
    if (work.number == 0) {
        CHECK(sempa_run_send_update(run, "old", 3) == SEMPA_WORK_OK);
        CHECK(sempa_run_send_update_to(run, 99, "other", 5) == SEMPA_WORK_OK);
        CHECK(sempa_run_send_update_to(run, 1, NULL, 5) == SEMPA_WORK_ERR_ARGUMENT);
        CHECK(sempa_run_send_update_to(run, 1, "bound", 5) == SEMPA_WORK_OK);
        CHECK(sempa_run_refresh_init_data(run, "new", 3, 77, 0) == SEMPA_WORK_ERR_ARGUMENT);
        CHECK(sempa_run_refresh_init_data(run, "new", 3, SEMPA_REFRESH_GROUPS, 0)
              == SEMPA_WORK_ERR_ARGUMENT);
        CHECK(sempa_run_refresh_init_data(run, "new", 3, SEMPA_REFRESH_NONE, 0) == SEMPA_WORK_OK);
        CHECK(seen->init_count == 1);
    }
    if (work.number == 3)
        CHECK(sempa_run_refresh_init_data(run, "newest", 6, SEMPA_REFRESH_GROUPS, 2) == SEMPA_WORK_OK);
    if (work.number == 8)
        /* The worker got the new data before its task, and once. */
        CHECK(seen->init_count == 2);
    sempa_progress progress = {0};
    progress.size = sizeof progress;
    CHECK(sempa_run_progress(run, &progress) == SEMPA_WORK_OK);
    CHECK(progress.workers == 1 && progress.finished >= 1);
    sempa_statistics statistics = {0};
    statistics.size = sizeof statistics;
    CHECK(sempa_run_statistics(run, &statistics) == SEMPA_WORK_OK);
    CHECK(statistics.results_accepted == progress.finished);
    size_t wanted;
    CHECK(sempa_run_wanted_tasks(run, &wanted) == SEMPA_WORK_OK);
    return 0;
}

static int on_partial_result(void *user, sempa_run *run, const sempa_partial_result *part)
{
    (void)run;
    CHECK(part->length == 4 && memcmp(part->data, "part", 4) == 0);
    CHECK(part->payload_length == sizeof(struct work));
    ++((struct seen *)user)->partial_count;
    return 0;
}

static int count_quarantined(void *user, const sempa_quarantined *task)
{
    CHECK(task->attempt_count == 2 && task->payload == NULL);
    ++*(int *)user;
    return 0;
}

static int on_quarantined(void *user, sempa_run *run, const sempa_quarantined *task)
{
    struct seen *seen = user;
    CHECK(task->task == seen->ids[5] && task->payload_length == sizeof(struct work));
    CHECK(task->attempt_count == 2 && task->attempts[1].counts == 1);
    CHECK(strcmp(task->attempts[0].host, "localhost") == 0);
    snprintf(seen->reason, sizeof seen->reason, "%s", task->attempts[1].reason);
    ++seen->quarantined_count;
    int count = 0;
    CHECK(sempa_run_each_quarantined(run, count_quarantined, &count) == SEMPA_WORK_OK && count == 1);
    return 0;
}

static int on_pool_event(void *user, sempa_run *run, const sempa_pool_event *event)
{
    (void)run;
    CHECK(event->kind == SEMPA_WORKER_READY && strcmp(event->host, "localhost") == 0);
    ++((struct seen *)user)->ready_count;
    return 0;
}

static int on_all_closed(void *user, sempa_run *run)
{
    struct seen *seen = user;
    if (++seen->closed_count > 1)
        return 0;
    struct work work = {PLAIN, 8};
    sempa_task task = task_of(&work, 0);
    CHECK(sempa_run_add_tasks(run, &task, 1, NULL) == SEMPA_WORK_OK);
    return 0;
}

static int init(void *user, const void *data, size_t length)
{
    struct seen *seen = user;
    const char *expected = seen->init_count == 0 ? "init" : "newest";
    CHECK(length == strlen(expected) && memcmp(data, expected, length) == 0);
    ++seen->init_count;
    return 0;
}

static int execute(void *user, sempa_context *context, const void *payload, size_t length,
                   sempa_buffer *result)
{
    struct seen *seen = user;
    struct work work;
    CHECK(length == sizeof work);
    memcpy(&work, payload, sizeof work);
    seen->context = context;
    CHECK((sempa_context_task(context) == 0) == (work.number == 31));
    CHECK(sempa_context_poll(context) == SEMPA_WORK_OK);
    CHECK(sempa_context_is_canceled(context) == 0);
    if (work.kind == FAILING) {
        CHECK(sempa_context_attempt(context) != 0);
        sempa_work_set_error("no such number");
        return 5;
    }
    if (work.kind == RETURNING) {
        const void *update = NULL;
        size_t update_length = 0;
        while (sempa_context_is_time_over(context) == 0)
            ;
        /* The library looks for messages twice in a millisecond. */
        while (sempa_context_update(context, &update, &update_length) == SEMPA_WORK_NONE)
            ;
        CHECK(update_length == 5 && memcmp(update, "bound", 5) == 0);
        CHECK(sempa_context_update(context, &update, &update_length) == SEMPA_WORK_NONE);
        CHECK(sempa_context_send_partial(context, "part", 4) == SEMPA_WORK_OK);
        struct work rest = {PLAIN, 7};
        sempa_task task = task_of(&rest, 3);
        CHECK(sempa_context_return_task(context, NULL) == SEMPA_WORK_ERR_ARGUMENT);
        CHECK(sempa_context_return_task(context, &task) == SEMPA_WORK_OK);
    }
    int value = 10 * work.number;
    return sempa_buffer_append(result, &value, sizeof value);
}

static int fail(void *user, sempa_run *run, const sempa_result *result)
{
    (void)user, (void)run, (void)result;
    sempa_work_set_error("the disk of the driver is full");
    return -3;
}

static int start_plain(void *user, sempa_run *run)
{
    (void)user;
    struct work work[] = {{PLAIN, 1}, {PLAIN, 2}};
    sempa_task tasks[] = {task_of(&work[0], 0), task_of(&work[1], 0)};
    return sempa_run_add_tasks(run, tasks, 2, NULL);
}

static int stop(void *user, sempa_run *run, const sempa_result *result)
{
    (void)user, (void)result;
    return sempa_run_stop(run);
}

int main(void)
{
    struct seen seen = {0};
    sempa_settings settings = {0};
    settings.size = sizeof settings;
    CHECK(sempa_work_default_settings(&settings) == SEMPA_WORK_OK);
    settings.attempts_max = 2;
    settings.retry_delay_s = settings.host_exclusion_s = 0;
    /* Each result reaches the driver before the next task. */
    settings.look_ahead_s = 0;
    sempa_options options = {0};
    options.size = sizeof options;
    options.settings = &settings;
    sempa_driver driver = {0};
    driver.user = &seen;
    driver.start = start;
    driver.init_data = init_data;
    driver.benchmark = benchmark;
    driver.on_result = on_result;
    driver.on_partial_result = on_partial_result;
    driver.on_quarantined = on_quarantined;
    driver.on_pool_event = on_pool_event;
    driver.on_all_closed = on_all_closed;
    sempa_worker worker = {0};
    worker.size = sizeof worker;
    worker.user = &seen;
    worker.init = init;
    worker.execute = execute;
    sempa_outcome outcome = {0};
    outcome.size = sizeof outcome;

    CHECK(sempa_work_is_worker() == 0 && sempa_work_tid() == 0);
    CHECK(sempa_work_in_process(&options, &driver, &worker, &outcome) == SEMPA_WORK_ERR_ARGUMENT);
    options.run_name = "api";
    CHECK(sempa_work_in_process(&options, &driver, &worker, &outcome) == SEMPA_WORK_ERR_ARGUMENT);
    driver.size = sizeof driver;
    options.journal = "/nowhere";
    CHECK(sempa_work_master(&options, &driver, NULL) == SEMPA_WORK_ERR_ARGUMENT);
    CHECK(strstr(sempa_work_last_error(), "save and restore"));
    options.journal = NULL;

    CHECK(sempa_work_in_process(&options, &driver, &worker, &outcome) == SEMPA_WORK_OK);
    CHECK(outcome.is_finished && outcome.generation == 1 && outcome.repeated_results == 0);
    CHECK(outcome.statistics.results_accepted == 7 && outcome.statistics.tasks_pruned == 2);
    CHECK(outcome.statistics.tasks_quarantined == 1 && outcome.statistics.efficiency > 0);
    /* Task 6 was added in front of task 0, 7 was returned by 3, 8 added when all were closed. */
    int order[] = {6, 0, 2, 3, 7, 1, 8};
    CHECK(seen.count == 7 && memcmp(seen.order, order, sizeof order) == 0);
    CHECK(seen.partial_count == 1 && seen.quarantined_count == 1 && seen.ready_count == 1);
    CHECK(seen.closed_count == 2 && strcmp(seen.reason, "the worker reported a failure") == 0);

    seen.init_count = 0;
    driver.start = start_plain;
    driver.on_result = fail;
    CHECK(sempa_work_in_process(&options, &driver, &worker, &outcome) == SEMPA_WORK_ERR_DRIVER);
    CHECK(strstr(sempa_work_last_error(), "the disk of the driver is full"));
    seen.init_count = 0;
    driver.on_result = stop;
    CHECK(sempa_work_in_process(&options, &driver, &worker, &outcome) == SEMPA_WORK_OK);
    CHECK(!outcome.is_finished);
    puts("ok");
    return 0;
}
