/*
 * Counts the nodes of a random tree: work_count DEPTH MICROSECONDS [RUN JOURNAL WORKERS]
 *
 * Without a run, counts in one process and without tasks. A task counts up to 40 nodes, each of
 * which takes the given processor time. Of the rest, the worker returns every second node as a task,
 * and the driver makes tasks of the others, which are in the result.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sempa_work.h"

enum { NODES_PER_TASK = 40, STACK_MAX = 4096 };

struct node {
    uint64_t seed;
    uint32_t depth;
    uint32_t microseconds;
};

struct result {
    uint64_t nodes;
    uint32_t rest;
};

static uint64_t mix(uint64_t value)
{
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
    value = (value ^ value >> 27) * 0x94d049bb133111eb;
    return value ^ value >> 31;
}

static void compute(uint32_t microseconds)
{
    clock_t end = clock() + (clock_t)microseconds * (CLOCKS_PER_SEC / 1000000);
    while (clock() < end)
        ;
}

/* Counts at most `limit` nodes. Leaves the others on the stack. */
static uint64_t count(struct node *stack, size_t *height, uint64_t limit)
{
    uint64_t nodes = 0;
    while (*height > 0 && nodes < limit) {
        struct node node = stack[--*height];
        ++nodes;
        compute(node.microseconds);
        if (node.depth == 0)
            continue;
        uint64_t children = 1 + mix(node.seed) % 3;
        for (uint64_t i = 0; i < children && *height < STACK_MAX; ++i)
            stack[(*height)++] =
                (struct node){mix(node.seed + i + 1), node.depth - 1, node.microseconds};
    }
    return nodes;
}

struct counter {
    struct node root;
    uint64_t nodes;
    uint32_t workers;
    uint32_t configured, lost_workers;
};

static sempa_task task_of(const struct node *node)
{
    sempa_task task = {node, sizeof *node, -(double)node->depth, 0};
    return task;
}

static int start(void *user, sempa_run *run)
{
    struct counter *counter = user;
    sempa_task task = task_of(&counter->root);
    return sempa_run_add_tasks(run, &task, 1, NULL);
}

static int configure(void *user, sempa_run *run)
{
    struct counter *counter = user;
    ++counter->configured;
    sempa_workers workers = {0};
    workers.size = sizeof workers;
    workers.target = counter->workers;
    return sempa_run_set_workers(run, 3, &workers);
}

static int save(void *user, sempa_buffer *state)
{
    struct counter *counter = user;
    return sempa_buffer_append(state, &counter->nodes, sizeof counter->nodes);
}

static int restore(void *user, const void *state, size_t length)
{
    struct counter *counter = user;
    if (length != sizeof counter->nodes) {
        sempa_work_set_error("the state has another length");
        return 1;
    }
    memcpy(&counter->nodes, state, length);
    return 0;
}

static int init_data(void *user, sempa_buffer *data)
{
    (void)user;
    return sempa_buffer_append(data, "tree", 4);
}

static int on_result(void *user, sempa_run *run, const sempa_result *facts)
{
    struct counter *counter = user;
    struct result result;
    if (facts->length < sizeof result)
        return 1;
    memcpy(&result, facts->data, sizeof result);
    const struct node *rest = (const struct node *)((const char *)facts->data + sizeof result);
    counter->nodes += result.nodes;
    for (uint32_t i = 0; i < result.rest; ++i) {
        sempa_task task = task_of(&rest[i]);
        if (sempa_run_add_tasks(run, &task, 1, NULL) != SEMPA_WORK_OK)
            return 1;
    }
    return 0;
}

static int on_pool_event(void *user, sempa_run *run, const sempa_pool_event *event)
{
    (void)run;
    if (event->kind == SEMPA_WORKER_READY) {
        printf("ready %s\n", event->host);
        fflush(stdout);
    }
    ((struct counter *)user)->lost_workers += event->kind == SEMPA_WORKER_LOST;
    return 0;
}

static int init(void *user, const void *data, size_t length)
{
    (void)user;
    return length == 4 && memcmp(data, "tree", 4) == 0 ? 0 : 1;
}

static int execute(void *user, sempa_context *context, const void *payload, size_t length,
                   sempa_buffer *buffer)
{
    (void)user;
    static struct node stack[STACK_MAX], rest[STACK_MAX];
    if (length != sizeof stack[0])
        return 1;
    memcpy(stack, payload, length);
    size_t height = 1;
    struct result result = {count(stack, &height, NODES_PER_TASK), 0};
    for (size_t i = 0; i < height; ++i) {
        sempa_task task = task_of(&stack[i]);
        if (i % 2 == 0)
            rest[result.rest++] = stack[i];
        else if (sempa_context_return_task(context, &task) != SEMPA_WORK_OK)
            return 1;
    }
    if (sempa_buffer_append(buffer, &result, sizeof result) != SEMPA_WORK_OK)
        return 1;
    return sempa_buffer_append(buffer, rest, result.rest * sizeof rest[0]);
}

static int work(void)
{
    sempa_worker worker = {0};
    worker.size = sizeof worker;
    worker.init = init;
    worker.execute = execute;
    int code = sempa_work_worker(&worker);
    if (code != SEMPA_WORK_OK)
        fprintf(stderr, "worker: %s\n", sempa_work_last_error());
    return code < 0;
}

int main(int argc, char **argv)
{
    if (sempa_work_is_worker())
        return work();
    if (argc < 3)
        return 2;
    struct counter counter = {.root = {1, (uint32_t)atoi(argv[1]), (uint32_t)atoi(argv[2])}};
    if (argc < 6) {
        static struct node stack[STACK_MAX];
        size_t height = 1;
        stack[0] = counter.root;
        printf("nodes %llu\n", (unsigned long long)count(stack, &height, UINT64_MAX));
        return 0;
    }
    counter.workers = (uint32_t)atoi(argv[5]);
    sempa_options options = {0};
    options.size = sizeof options;
    options.run_name = argv[3];
    options.journal = argv[4][0] ? argv[4] : NULL;
    sempa_driver driver = {0};
    driver.size = sizeof driver;
    driver.user = &counter;
    driver.start = start;
    driver.configure = configure;
    driver.save = save;
    driver.restore = restore;
    driver.init_data = init_data;
    driver.on_result = on_result;
    driver.on_pool_event = on_pool_event;
    sempa_outcome outcome = {0};
    outcome.size = sizeof outcome;
    if (sempa_work_master(&options, &driver, &outcome) != SEMPA_WORK_OK) {
        fprintf(stderr, "master: %s\n", sempa_work_last_error());
        return 1;
    }
    printf("nodes %llu\n", (unsigned long long)counter.nodes);
    printf("finished %d\nmasters %llu\nrepeated %llu\nworkers_lost %llu\nlost_events %u\n"
           "configured %u\n",
           outcome.is_finished, (unsigned long long)outcome.generation,
           (unsigned long long)outcome.repeated_results,
           (unsigned long long)outcome.statistics.workers_lost, counter.lost_workers,
           counter.configured);
    return 0;
}
