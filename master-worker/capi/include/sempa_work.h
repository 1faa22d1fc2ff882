/*
 * Master-worker programs on a Sempa virtual machine.
 *
 * A driver (the application's part of the master) creates tasks and handles their results; workers
 * on many hosts execute the tasks. Hosts and workers come and go: a lost worker gives its tasks
 * back, a worker that migrates keeps them, and the first result of each task counts, however often
 * the task was executed. With a journal, a master that is killed continues where it ended.
 *
 * Results. Functions return SEMPA_WORK_OK, a positive code that is no error (SEMPA_WORK_NONE), or
 * a negative code; sempa_work_last_error() then has the text. Callbacks return 0 for success; any
 * other value is a failure, whose text the callback sets before with sempa_work_set_error().
 *
 * Memory. The library never keeps a pointer of the caller after a call, except the `user` pointers
 * of the callbacks: they are used until the call that got them returns. What a callback gets
 * (payloads, results, strings) belongs to the library and is valid until the callback returns. What
 * a callback returns is appended to a sempa_buffer, which the library owns. Nothing is freed by
 * the caller.
 *
 * Handles. A sempa_run is the same in all callbacks of a master, and a sempa_context in all calls
 * of `execute` of a worker. Outside of these callbacks and inside of a visitor their functions
 * return SEMPA_WORK_ERR_STATE. A handle is invalid after the call that created it has returned.
 * Handles belong to one thread: the one that runs the callback.
 *
 * Structures. The field `size` must be set to the size of the structure before a call, so that
 * programs and newer libraries fit together. All other fields may be 0 unless the comment says
 * otherwise: `sempa_driver driver = {0}; driver.size = sizeof driver;`
 *
 * Callbacks. A C++ exception must not leave a callback, and a callback must not jump out of itself
 * (longjmp).
 *
 * PVM calls. This library joins the virtual machine by itself. A program that also calls functions
 * of libpvm3 is two tasks with two tids: sempa_work_tid() is the one of the run, pvm_mytid() the one
 * of libpvm3. Messages for one do not reach the other. The master may call both libraries in any
 * order. A worker must call sempa_work_worker() first, and functions of libpvm3 only in its
 * callbacks; otherwise libpvm3 takes the place of the worker in the run, and sempa_work_worker()
 * returns SEMPA_WORK_ERR_ENROLLED. In a worker pvm_parent() returns PvmNoParent. A worker that is
 * two tasks cannot migrate: when an owner comes back it is paused or ended, and its tasks are
 * executed by other workers.
 */
#ifndef SEMPA_WORK_H
#define SEMPA_WORK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- codes and errors */

#define SEMPA_WORK_OK 0
/* There is no such value: no update, no key, no benchmark, a closed task. */
#define SEMPA_WORK_NONE 1
/* A worker ended because its master was lost and no next one came. */
#define SEMPA_WORK_NO_MASTER 2
/* An argument has no meaning. Nothing was changed. */
#define SEMPA_WORK_ERR_ARGUMENT (-1)
/* A handle was used outside of its callback, or the process already carries out a run. */
#define SEMPA_WORK_ERR_STATE (-2)
/* The tasks exceed a limit of the run. None was added. */
#define SEMPA_WORK_ERR_LIMIT (-3)
/* The virtual machine cannot be reached, or the connection is lost. */
#define SEMPA_WORK_ERR_VM (-4)
/* The run did not begin. */
#define SEMPA_WORK_ERR_START (-5)
/* A callback of the driver failed. The run ended; its open tasks are in the journal. */
#define SEMPA_WORK_ERR_DRIVER (-6)
/* The journal cannot be written. The run ended; a restart repeats what was not stored. */
#define SEMPA_WORK_ERR_JOURNAL (-7)
/* Too many tasks are quarantined. The run ended. */
#define SEMPA_WORK_ERR_QUARANTINE (-8)
/* The worker did not find its run or could not use the init data. */
#define SEMPA_WORK_ERR_WORKER (-9)
/* libpvm3 has taken the place of the worker: see "PVM calls" above. */
#define SEMPA_WORK_ERR_ENROLLED (-10)
/* A bug in the library. */
#define SEMPA_WORK_ERR_PANIC (-11)

/* Returns the text of this thread's newest negative result or SEMPA_WORK_NO_MASTER. Valid until the
 * thread's next such result. */
const char *sempa_work_last_error(void);
/* Sets the reason of the failure that a callback is about to return. The text is copied. */
void sempa_work_set_error(const char *text);

/* ---------------------------------------------------------------- handles */

/* What a driver can do with its run. */
typedef struct sempa_run sempa_run;
/* What a worker can do while it executes a task. */
typedef struct sempa_context sempa_context;
/* Bytes that a callback returns. */
typedef struct sempa_buffer sempa_buffer;

/* Appends a copy of the data. */
int sempa_buffer_append(sempa_buffer *buffer, const void *data, size_t length);
/* Removes all bytes. */
int sempa_buffer_clear(sempa_buffer *buffer);
size_t sempa_buffer_length(const sempa_buffer *buffer);

/* ---------------------------------------------------------------- tasks and results */

/* A task that a driver or a worker creates. */
typedef struct sempa_task {
    const void *payload;
    size_t length;
    /* Tasks with lower keys are dispatched first, tasks of equal key in the order in which they
     * were added. NaN counts as 0. */
    double key;
    /* Groups of the task, one bit each; 0 for all. A task goes only to workers of its groups. */
    uint64_t groups;
} sempa_task;

/* An open task of a run. */
typedef struct sempa_open_task {
    uint64_t id;
    const void *payload;
    size_t length;
    double key;
    uint64_t groups;
    int is_running;
} sempa_open_task;

/* The first result of a task. */
typedef struct sempa_result {
    uint64_t task;
    /* 0 if a restart repeats the result. */
    uint64_t worker;
    double cpu_s;
    double wall_s;
    const void *payload;
    size_t payload_length;
    const void *data;
    size_t length;
} sempa_result;

/* Part of the result of a running task. */
typedef struct sempa_partial_result {
    uint64_t task;
    const void *payload;
    size_t payload_length;
    const void *data;
    size_t length;
} sempa_partial_result;

/* An attempt that ended without a result. */
typedef struct sempa_attempt {
    uint64_t worker;
    const char *host;
    /* The reason as a sentence. */
    const char *reason;
    double duration_s;
    /* 1 if the attempt counts against the task. */
    int counts;
} sempa_attempt;

/* A task that is not tried again. */
typedef struct sempa_quarantined {
    uint64_t task;
    /* NULL in visitors of sempa_run_each_quarantined. */
    const void *payload;
    size_t payload_length;
    /* The newest attempts, oldest first. */
    const sempa_attempt *attempts;
    size_t attempt_count;
} sempa_quarantined;

#define SEMPA_HOST_ADDED 0
#define SEMPA_HOST_LOST 1
#define SEMPA_WORKER_READY 2
#define SEMPA_WORKER_PAUSED 3
#define SEMPA_WORKER_RESUMED 4
#define SEMPA_WORKER_MIGRATED 5
#define SEMPA_WORKER_LOST 6

/* Causes of SEMPA_WORKER_PAUSED. */
#define SEMPA_PAUSED_FOR_OWNER 1
#define SEMPA_PAUSED_BY_USER 2

/* A change of hosts or workers. The library has already reacted. */
typedef struct sempa_pool_event {
    int kind;
    int cause;
    uint64_t worker;
    /* The host, or the new host of a worker that has migrated; otherwise empty. */
    const char *host;
    /* Reason of SEMPA_WORKER_LOST; otherwise empty. */
    const char *reason;
} sempa_pool_event;

/* ---------------------------------------------------------------- settings */

/* What happens to the tasks of a worker that is paused. */
#define SEMPA_PAUSE_KEEP 0      /* The worker keeps its tasks. */
#define SEMPA_PAUSE_MOVE 1      /* The worker is migrated with its tasks. */
#define SEMPA_PAUSE_REASSIGN 2  /* The tasks wait again after reassign_after_s. */
#define SEMPA_PAUSE_DUPLICATE 3 /* An idle worker gets a second copy. */

#define SEMPA_ORDER_BY_ID 0
#define SEMPA_ORDER_BY_FACTOR 1 /* Fastest worker first, by the benchmark. */

/* What an application decides about a run, with the limits of the run. Fill the structure with
 * sempa_work_default_settings() or sempa_run_get_settings(), then change fields. Times are in
 * seconds. */
typedef struct sempa_settings {
    size_t size;
    int pause_policy;
    int worker_order;
    double reassign_after_s;
    /* Counted attempts after which a task is quarantined; at least 1. */
    uint32_t attempts_max;
    /* 1: idle workers get second copies of tasks that take long. */
    int second_copies;
    /* Delay after the first counted attempt. The delay doubles up to the maximum. */
    double retry_delay_s;
    double retry_delay_max_s;
    /* Time for which a task avoids the host of its last counted attempt. */
    double host_exclusion_s;
    /* Time that the tasks which a worker holds should last; 0: one task per worker. */
    double look_ahead_s;
    /* Tasks of at least this duration are reported one by one. */
    double report_interval_s;
    /* Longest attempt; 0: no limit. */
    double attempt_timeout_s;
    /* A second copy starts when an attempt has lasted this many times the mean. */
    double straggler_ratio;
    double straggler_age_min_s;
    /* Workers that are requested at once for one class. */
    uint32_t request_step;
    uint32_t starting_workers_max;
    double request_delay_s;
    double request_delay_max_s;
    uint64_t tasks_max;
    uint64_t workers_max;
    uint64_t group_sets_max;
    uint64_t history_max;
    /* Quarantined tasks at which the run ends. */
    uint64_t quarantined_max;
    uint64_t tasks_per_worker_max;
} sempa_settings;

/* Writes the default settings. `size` must be set. */
int sempa_work_default_settings(sempa_settings *settings);

#define SEMPA_PLACE_ANYWHERE 0
#define SEMPA_PLACE_HOST 1
#define SEMPA_PLACE_ARCHITECTURE 2

/* Number of workers: one for each host, also when hosts come and go. */
#define SEMPA_TARGET_ONE_PER_HOST UINT32_MAX

/* A program that workers execute, and how many of them a run should have. */
typedef struct sempa_workers {
    size_t size;
    /* Name as for pvm_spawn; NULL for the program of this process. */
    const char *program;
    /* Arguments, ended by NULL; NULL for none. */
    const char *const *arguments;
    /* Number of workers, or SEMPA_TARGET_ONE_PER_HOST. */
    uint32_t target;
    int place_kind;
    const char *place;
} sempa_workers;

/* How a run is carried out. */
typedef struct sempa_options {
    size_t size;
    /* Name by which `pvm work` and workers find the run; required. */
    const char *run_name;
    /* Directory of the journal. NULL: a run whose master is killed is lost. */
    const char *journal;
    /* NULL for the default settings. */
    const sempa_settings *settings;
    /* Workers of class 0, unless the driver sets workers itself. */
    const sempa_workers *workers;
    /* Time for which workers wait for the next master; 0 for 600 s. */
    double master_wait_s;
    /* Interval of the progress line on standard error; 0 for no line. */
    double progress_interval_s;
} sempa_options;

/* ---------------------------------------------------------------- reports */

/* How far a run is. Times in seconds; NaN if there is no estimate. */
typedef struct sempa_progress {
    size_t size;
    uint64_t finished;
    uint64_t running;
    uint64_t waiting;
    /* Tasks that wait for the end of a delay after a failed attempt. */
    uint64_t delayed;
    uint64_t quarantined;
    uint64_t workers;
    uint64_t computing_workers;
    double remaining_s;
    double spread_s;
} sempa_progress;

/* Statistics of a run over all its masters. Times in seconds; NaN for a quotient whose divisor is
 * 0. */
typedef struct sempa_statistics {
    size_t size;
    double wall_s;       /* W: duration of the run */
    double cpu_s;        /* T: processor time of the accepted tasks */
    double normalized_s; /* N: T, each task weighted with the factor of its worker */
    double pool_performance;
    double average_workers;
    double average_workers_with_paused;
    double efficiency;
    double normalized_per_wall;
    double working_share;
    double factor_mean;
    double factor_min;
    double factor_max;
    double task_cpu_mean_s;
    double task_cpu_min_s;
    double task_cpu_max_s;
    uint64_t tasks_added;
    uint64_t results_accepted;
    uint64_t results_discarded;
    uint64_t attempts;
    uint64_t attempts_lost;
    uint64_t attempts_failed;
    uint64_t tasks_pruned;
    uint64_t tasks_quarantined;
    uint64_t second_copies;
    uint64_t tasks_recalled;
    uint64_t workers_started;
    uint64_t workers_lost;
    uint64_t worker_migrations;
    uint64_t worker_pauses;
} sempa_statistics;

/* Result of a run. */
typedef struct sempa_outcome {
    size_t size;
    /* 0 if the run was stopped: open tasks are in the journal. */
    int is_finished;
    /* Number of masters that the run has had. */
    uint64_t generation;
    /* Results of earlier masters that were repeated for the driver at the start. */
    uint64_t repeated_results;
    sempa_statistics statistics;
} sempa_outcome;

/* ---------------------------------------------------------------- callbacks */

/*
 * The application's part of the master. NULL callbacks do nothing; start and on_result are required,
 * and save and restore if the run has a journal.
 *
 * A master that starts again with the journal restores the newest saved state, and repeats on_result
 * and on_quarantined for what happened after it. So these two must depend only on the state and
 * their arguments. During the repetition tasks are not added, removed or changed a second time.
 */
typedef struct sempa_driver {
    size_t size;
    void *user;
    /* Begins a new run: adds the first tasks. Not called on a restart. */
    int (*start)(void *user, sempa_run *run);
    /* Sets what is not part of the saved state. Called after each start and restart. */
    int (*configure)(void *user, sempa_run *run);
    /* Returns the state for a restart. */
    int (*save)(void *user, sempa_buffer *state);
    int (*restore)(void *user, const void *state, size_t length);
    /* Returns the data that each worker gets once before its first task. Called once for each master:
     * after a restart, it must return the newest data of sempa_run_refresh_init_data. */
    int (*init_data)(void *user, sempa_buffer *data);
    /* Returns the payload of the benchmark task, whose duration is a worker's factor.
     * SEMPA_WORK_NONE: no benchmark. */
    int (*benchmark)(void *user, sempa_buffer *payload);
    /* Handles the first result of a task. */
    int (*on_result)(void *user, sempa_run *run, const sempa_result *result);
    int (*on_partial_result)(void *user, sempa_run *run, const sempa_partial_result *part);
    /* Handles a task that is not tried again. */
    int (*on_quarantined)(void *user, sempa_run *run, const sempa_quarantined *task);
    int (*on_pool_event)(void *user, sempa_run *run, const sempa_pool_event *event);
    /* Handles the end of the last open task. The run is finished if no task is added. */
    int (*on_all_closed)(void *user, sempa_run *run);
} sempa_driver;

/* The application's part of a worker. */
typedef struct sempa_worker {
    size_t size;
    void *user;
    /* Groups of the worker, one bit each; 0 for all. */
    uint64_t groups;
    /* Takes the init data. Called again when the driver replaces them, and for a new master whose
     * init data differ. NULL: the data are ignored. A failure ends the worker. */
    int (*init)(void *user, const void *data, size_t length);
    /* Executes a task and appends its result; required. A failure counts against the task. The
     * benchmark has the task number 0. */
    int (*execute)(void *user, sempa_context *context, const void *payload, size_t length,
                   sempa_buffer *result);
} sempa_worker;

/* ---------------------------------------------------------------- carrying out a run */

/* 1 if a master has started this process as a worker. */
int sempa_work_is_worker(void);
/* Carries out a run as a task of the virtual machine, or continues the run of the journal. Returns
 * when the run is finished or stopped. `outcome` may be NULL. */
int sempa_work_master(const sempa_options *options, const sempa_driver *driver,
                      sempa_outcome *outcome);
/* Executes tasks until the run releases this worker. */
int sempa_work_worker(const sempa_worker *worker);
/* Carries out a run with one worker in this process and without a virtual machine, to debug. There
 * is no journal; of the options only the settings matter. */
int sempa_work_in_process(const sempa_options *options, const sempa_driver *driver,
                          const sempa_worker *worker, sempa_outcome *outcome);
/* Returns the tid of this process in its run; 0 if the process carries out no run, or one without
 * a virtual machine. */
int sempa_work_tid(void);

/* ---------------------------------------------------------------- the run, for drivers */

/* Adds copies of tasks behind those of equal key. Stores their numbers in `ids`, which has `count`
 * elements or is NULL. */
int sempa_run_add_tasks(sempa_run *run, const sempa_task *tasks, size_t count, uint64_t *ids);
/* Adds copies of tasks in front of those of equal key. */
int sempa_run_add_tasks_in_front(sempa_run *run, const sempa_task *tasks, size_t count,
                                 uint64_t *ids);
/* Removes the waiting tasks whose keys are greater than `bound`; with `with_running` also running
 * ones, whose workers are requested to cancel them. Calls `visit` for each removed task and stores
 * their number; both may be NULL. */
int sempa_run_prune(sempa_run *run, double bound, int with_running,
                    void (*visit)(void *user, uint64_t task), void *user, size_t *count);
/* Changes the key of an open task. SEMPA_WORK_NONE: the task is closed. */
int sempa_run_set_key(sempa_run *run, uint64_t task, double key);
/* Calls `visit` for each open task, in no particular order, until `visit` returns another value than
 * 0 (result SEMPA_WORK_NONE). The visitor must not use the run. */
int sempa_run_each_task(sempa_run *run, int (*visit)(void *user, const sempa_open_task *task),
                        void *user);
/* As sempa_run_each_task, for quarantined tasks. */
int sempa_run_each_quarantined(sempa_run *run,
                               int (*visit)(void *user, const sempa_quarantined *task),
                               void *user);
/* Sets the program of a class of workers and the number of workers that the run should have. */
int sempa_run_set_workers(sempa_run *run, uint16_t class_id, const sempa_workers *workers);
/* Changes the number of workers of a class. */
int sempa_run_set_target(sempa_run *run, uint16_t class_id, uint32_t target);
/* Sends data to all workers, also to running ones. A newer update replaces an older one. */
int sempa_run_send_update(sempa_run *run, const void *data, size_t length);
/* Sends data to one worker. The data replace an older update of this worker. Nothing is sent if the
 * worker has left. */
int sempa_run_send_update_to(sempa_run *run, uint64_t worker, const void *data, size_t length);

/* Which present workers get new init data. */
#define SEMPA_REFRESH_NONE 0   /* None: workers that start later get them. */
#define SEMPA_REFRESH_GROUPS 1 /* The workers of the groups. */
#define SEMPA_REFRESH_ALL 2

/* Replaces the init data by a copy of `data`. Workers that start later get them, and selected present
 * workers before their next task. `groups`: one bit for each group of SEMPA_REFRESH_GROUPS. */
int sempa_run_refresh_init_data(sempa_run *run, const void *data, size_t length, int workers,
                                uint64_t groups);
/* Closes an open task without a result. If the task runs, its worker is requested to cancel it.
 * SEMPA_WORK_NONE: the task is closed. */
int sempa_run_cancel_task(sempa_run *run, uint64_t task);
/* Abandons the task that a worker executes: the task is closed without a result, and the worker is
 * requested to cancel it. Stores the number of the task; `task` may be NULL. SEMPA_WORK_NONE: the
 * worker executes no task. */
int sempa_run_stop_work(sempa_run *run, uint64_t worker, uint64_t *task);
/* Sets the time limit after which tasks should return their remaining work. The limit is between
 * these times and follows the number of waiting tasks. Both 0: no limit. */
int sempa_run_set_grain(sempa_run *run, double shortest_s, double longest_s);
/* Ends the run after the present callback. Open tasks stay in the journal. */
int sempa_run_stop(sempa_run *run);
int sempa_run_get_settings(sempa_run *run, sempa_settings *settings);
int sempa_run_set_settings(sempa_run *run, const sempa_settings *settings);
/* Stores the lowest key of a waiting or running task. The lower of both is the lower bound of a tree
 * search. SEMPA_WORK_NONE: there is no such task. */
int sempa_run_best_waiting_key(sempa_run *run, double *key);
int sempa_run_best_running_key(sempa_run *run, double *key);
/* Stores how many tasks should be added so that no worker becomes idle. */
int sempa_run_wanted_tasks(sempa_run *run, size_t *count);
int sempa_run_progress(sempa_run *run, sempa_progress *progress);
int sempa_run_statistics(sempa_run *run, sempa_statistics *statistics);

/* ---------------------------------------------------------------- the task, for workers */

/* Number of the task, which is the same in each attempt; 0 for the benchmark. */
uint64_t sempa_context_task(sempa_context *context);
/* Number of the attempt. */
uint64_t sempa_context_attempt(sempa_context *context);
/* Looks for messages of the master. May be called often: most calls only read a clock. */
int sempa_context_poll(sempa_context *context);
/* Stores the newest update if this attempt has not seen it; valid until the next call of this
 * function. SEMPA_WORK_NONE: there is none. */
int sempa_context_update(sempa_context *context, const void **data, size_t *length);
/* 1 if the master needs no result of this attempt. The task may then return any result. */
int sempa_context_is_canceled(sempa_context *context);
/* 1 if the task should return its result and its remaining work now. */
int sempa_context_is_time_over(sempa_context *context);
/* Returns work that this attempt does not do. It becomes a task if the result is accepted. */
int sempa_context_return_task(sempa_context *context, const sempa_task *task);
/* Sends part of the result to the driver at once. */
int sempa_context_send_partial(sempa_context *context, const void *data, size_t length);

#ifdef __cplusplus
}
#endif

#endif
