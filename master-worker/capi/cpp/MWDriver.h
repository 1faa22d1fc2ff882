/* MWDriver: creates tasks and handles their results. */
#ifndef SEMPA_MWDRIVER_H
#define SEMPA_MWDRIVER_H

#include "MWTask.h"
#include "MWWorker.h"
#include "MWWorkerID.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <unordered_map>
#include <vector>

/*
 * Base class of the application's driver.
 *
 * A master that is killed continues with its journal (set_journal, set_checkpoint_frequency or
 * set_checkpoint_time): get_userinfo is called, then read_master_state with the newest state that
 * write_master_state has written, then act_on_completed_task again for each result after it. So
 * act_on_completed_task must depend only on the saved state and its task.
 */
class MWDriver : public MWBase {
public:
    MWDriver()
        : task_key(0), has_no_state_(false), add_mode_(ADD_AT_END), retrieval_mode_(GET_FROM_BEGIN),
          suspension_policy_(DEFAULT), ordering_policy_(NO_ORDER), benchmark_(0),
          checkpoint_frequency_(0), checkpoint_time_(0), timeout_(0), run_(0), outcome_()
    {
    }
    virtual ~MWDriver()
    {
        delete benchmark_;
        for (Tasks::iterator it = tasks_.begin(); it != tasks_.end(); ++it)
            delete it->second;
    }

    /* Carries out the run and calls printresults. In a process that a master has started, executes
     * tasks instead and exits. Exits with status 1 after a failure. With the environment variable
     * SEMPA_WORK_IN_PROCESS the run needs no virtual machine; the program must define
     * gimme_a_worker. */
    void go() { go(0, 0); }
    void go(int argc, char *argv[])
    {
        if (sempa_work_is_worker())
            work();
        MWReturn result = get_userinfo(argc, argv);
        if (result == QUIT)
            return;
        if (result != OK)
            fail("get_userinfo refused the arguments; no run was begun");
        if (run_name_.empty())
            run_name_ = name_of(argc > 0 ? argv[0] : "");
        int code = carry_out();
        if (code < 0)
            fail(sempa_work_last_error());
        printresults();
    }

    virtual void printresults() {}

    /* Name of the run; otherwise the name of the program. For get_userinfo. */
    void set_run_name(const char *name) { run_name_ = name; }
    /* Directory of the journal. For get_userinfo. */
    void set_journal(const char *directory) { journal_ = directory; }

    /* True after go if all tasks are finished; false if the run was stopped. */
    bool is_finished() const { return outcome_.is_finished != 0; }
    /* Returns the statistics: of the present run in a callback, of the whole run after go. */
    sempa_statistics statistics()
    {
        sempa_statistics present = outcome_.statistics;
        present.size = sizeof present;
        if (run_)
            sempa_mw_check(sempa_run_statistics(run_, &present));
        return present;
    }

    /* Adds tasks, which belong to the driver from then on. The array remains the caller's. */
    void addTask(MWTask *task) { addTasks(1, &task); }
    void addTasks(int count, MWTask **tasks)
    {
        std::vector<MWTask *> added(tasks, tasks + std::max(count, 0));
        bool in_front = add_mode_ == ADD_AT_BEGIN;
        // MW puts one task after the other in front: the last one is the first.
        if (in_front)
            std::reverse(added.begin(), added.end());
        add(added, in_front);
    }
    void addSortedTasks(int count, MWTask **tasks)
    {
        add(std::vector<MWTask *>(tasks, tasks + std::max(count, 0)), false);
    }

    /* Sets the function that returns the key of a task. Tasks that wait get their new keys. */
    void set_task_key_function(MWKey (*key)(MWTask *))
    {
        task_key = key;
        set_keys();
    }
    int set_task_add_mode(MWTaskAdditionMode mode)
    {
        add_mode_ = mode;
        set_keys();
        return 0;
    }
    int set_task_retrieve_mode(MWTaskRetrievalMode mode)
    {
        retrieval_mode_ = mode;
        set_keys();
        return 0;
    }
    /* Computes the keys of the open tasks again. Returns -1 unless tasks are ordered by key. */
    int sort_task_list()
    {
        if (!orders_by_key())
            return -1;
        set_keys();
        return 0;
    }

    /* Deletes the waiting tasks whose keys are greater. Running ones continue. Returns the number of
     * deleted tasks. */
    int delete_tasks_worse_than(MWKey bound);
    /* Return the lowest key of a waiting or running task; DBL_MAX if there is none. */
    MWKey return_best_todo_keyval() { return best_key(false); }
    MWKey return_best_running_keyval() { return best_key(true); }

    int get_number_tasks() { return static_cast<int>(progress().waiting + progress().delayed); }
    int get_number_running_tasks() { return static_cast<int>(progress().running); }
    bool is_TODO_empty() { return get_number_tasks() == 0; }
    int getNumWorkers() { return numWorkers(); }
    int numWorkers() { return static_cast<int>(progress().workers); }
    /* Prints the keys of the waiting tasks, in no particular order. */
    int print_task_keys();

    void set_target_num_workers(int count) { RMC->set_target_num_workers(count); }

    void set_suspension_policy(MWSuspensionPolicy policy)
    {
        suspension_policy_ = policy;
        send_settings();
    }
    int set_machine_ordering_policy(MWMachineOrderingPolicy policy)
    {
        ordering_policy_ = policy;
        send_settings();
        return 0;
    }
    int set_worker_ordering(MWMachineOrderingPolicy policy)
    {
        return set_machine_ordering_policy(policy);
    }
    /* A task whose attempt lasts longer waits again. 0: no limit. */
    void set_worker_timeout_limit(double seconds, int = 0)
    {
        timeout_ = seconds;
        send_settings();
    }

    /* The benchmark task belongs to the driver. For get_userinfo. */
    void register_benchmark_task(MWTask *task)
    {
        delete benchmark_;
        benchmark_ = task;
    }
    MWTask *get_benchmark_task() { return benchmark_; }

    /* A positive value requests a journal. Each result is in the journal, so the value itself does
     * not matter. Return the previous value. For get_userinfo. */
    int set_checkpoint_frequency(int count)
    {
        std::swap(count, checkpoint_frequency_);
        return count;
    }
    int set_checkpoint_time(int seconds)
    {
        std::swap(seconds, checkpoint_time_);
        return seconds;
    }
    /* Does nothing: the journal has each result. */
    void checkpoint() {}

    /* State of the driver for a restart. A run with a journal needs both functions. */
    virtual void write_master_state(FILE *) { has_no_state_ = true; }
    virtual void read_master_state(FILE *) {}

    /* Returns a new task of the application's class. */
    virtual MWTask *gimme_a_task() = 0;
    /* Returns a new worker of the application's class; NULL if this program has none. The program
     * defines gimme_a_worker, or the driver defines this function. */
    virtual MWWorker *new_worker() { return gimme_a_worker ? gimme_a_worker() : 0; }

    /* Number of work classes. Only for information: tasks and workers name their groups. */
    void workClasses_set(int count) { RMC->set_num_exec_classes(count); }
    int workClasses_get() { return RMC->get_num_exec_classes(); }

protected:
    /* Called at each start, also before a restart. */
    virtual MWReturn get_userinfo(int argc, char *argv[]) = 0;
    /* Stores the first tasks of a new run. The array remains the application's. */
    virtual MWReturn setup_initial_tasks(int *count, MWTask ***tasks) = 0;
    /* Handles the first result of a task. The driver deletes the task afterwards. */
    virtual MWReturn act_on_completed_task(MWTask *task) = 0;
    /* Packs what each worker gets once, before its first task. Called once for each master. */
    virtual MWReturn pack_worker_init_data() = 0;

    virtual MWReturn act_on_starting_worker(MWWorkerID *) { return OK; }
    /* Handles a part of a result. */
    virtual MWReturn act_on_completed_subtask(MWTask *) { return OK; }
    /* Packs data that a task gets when the task is added. */
    virtual void pack_driver_task_data() {}
    /* Packs what send_update_message sends. */
    virtual void pack_update() {}
    /* Handles a task that is not tried again, because too many attempts have failed. */
    virtual MWReturn act_on_quarantined_task(MWTask *task, const sempa_quarantined *facts)
    {
        MWprintf(10, "Task %d is quarantined after %lu attempts\n", task->number,
                 static_cast<unsigned long>(facts->attempt_count));
        return OK;
    }
    /* Handles a change of hosts or workers. */
    virtual MWReturn act_on_pool_event(const sempa_pool_event *) { return OK; }

    /* Sends what pack_update packs to all workers, also to running ones. */
    int send_update_message()
    {
        MWPackScope scope(RMC);
        pack_update();
        return run_ ? sempa_run_send_update(run_, scope.packed().data(), scope.packed().size()) : -1;
    }
    /* Sends what pack_update packs to one worker. Returns -1 outside of the driver's functions. */
    int send_update_message_to(MWWorkerID *worker) { return send_update_message_to(worker->get_id1()); }
    int send_update_message_to(int tid)
    {
        MWPackScope scope(RMC);
        pack_update();
        return run_ ? sempa_run_send_update_to(run_, worker_number(tid), scope.packed().data(),
                                               scope.packed().size())
                    : -1;
    }
    /* Packs new init data with pack_worker_init_data. Workers that start later get them, and the
     * selected present workers before their next task. */
    void refreshWorkers(int group, MWRefreshType type);
    /* Abandons what a worker computes: the task is deleted without a result, and is_canceled is true
     * in the worker. Returns false if the worker executes no task. */
    bool stop_work(MWWorkerID *worker) { return stop_work(worker->get_id1()); }
    bool stop_work(int tid);
    /* Returns the present workers. The objects live until the workers leave. */
    std::vector<MWWorkerID *> workers();
    /* Ends the run after the present callback. Open tasks stay in the journal. */
    void stop_run()
    {
        if (run_)
            sempa_mw_check(sempa_run_stop(run_));
    }
    /* The present run in a callback, otherwise NULL. */
    sempa_run *run() { return run_; }

    /* Functions of MW that do not exist here. A program that defines one must be changed; see
     * the porting guide. */
    virtual void unpack_worker_initinfo(MWWorkerID *) final {}
    virtual MWReturn handle_benchmark(MWWorkerID *) final { return OK; }
    virtual void handle_hostdel() final {}
    virtual void handle_hostsuspend() final {}
    virtual void handle_hostresume() final {}
    virtual void handle_taskexit() final {}
    virtual void handle_checksum() final {}

    MWKey (*task_key)(MWTask *);

private:
    typedef std::unordered_map<uint64_t, MWTask *> Tasks;
    typedef std::map<uint64_t, MWWorkerID> Workers;
    typedef MWKey (MWDriver::*KeyOfTask)(MWTask *) const;

    /* An open task with a number that was computed for the task. */
    struct KeyedTask {
        uint64_t id;
        MWKey key;
        bool is_running;
    };
    /* Argument of visit_key. */
    struct KeyList {
        MWDriver *driver;
        KeyOfTask key;
        std::vector<KeyedTask> entries;
    };

    static uint64_t worker_number(int tid) { return static_cast<uint32_t>(tid); }
    void note_worker(const sempa_pool_event *event);
    MWDriver(const MWDriver &);
    MWDriver &operator=(const MWDriver &);

    static std::string name_of(const std::string &path)
    {
        std::string name = path.substr(path.find_last_of('/') + 1);
        return name.empty() ? std::string("mw") : name;
    }
    static void fail(const std::string &text)
    {
        std::fflush(stdout);
        std::fprintf(stderr, "master: %s\n", text.c_str());
        std::exit(1);
    }
    void work()
    {
        MWWorker *worker = new_worker();
        if (!worker)
            fail("this program is no worker: define gimme_a_worker, or name a program with "
                 "RMC->add_executable");
        worker->go();
        delete worker;
        std::exit(0);
    }

    int carry_out();
    sempa_driver callbacks();
    void read_settings(sempa_settings *settings) const;
    void send_settings();
    void send_all();
    void add(const std::vector<MWTask *> &added, bool in_front);
    void set_keys();
    std::vector<KeyedTask> keys(KeyOfTask key);
    MWKey best_key(bool is_running);
    static int visit_key(void *user, const sempa_open_task *open);
    static void delete_task(void *user, uint64_t id);
    MWTask *find(uint64_t id, const void *payload, size_t size, bool takes);

    bool orders_by_key() const
    {
        return task_key && (add_mode_ == ADD_BY_KEY || retrieval_mode_ == GET_FROM_KEY);
    }
    MWKey user_key(MWTask *task) const { return task_key(task); }
    /* Key by which a task is dispatched. Tasks in the order of their addition have equal keys. */
    MWKey dispatch_key(MWTask *task) const { return orders_by_key() ? task_key(task) : 0; }

    sempa_progress progress()
    {
        sempa_progress present = sempa_progress();
        present.size = sizeof present;
        if (run_)
            sempa_mw_check(sempa_run_progress(run_, &present));
        return present;
    }

    /* Calls `f` while `run` is the present run. */
    template <class F> int in_run(sempa_run *run, F f)
    {
        run_ = RMC->state().run = run;
        int code = sempa_mw_guarded(f);
        run_ = RMC->state().run = 0;
        return code;
    }
    /* Returns the code of a callback whose function returned `result`. */
    int finish(MWReturn result, const char *function)
    {
        if (result == ABORT)
            throw std::runtime_error(std::string(function) + " returned ABORT");
        if (result == QUIT)
            stop_run();
        return 0;
    }

    static int start(void *user, sempa_run *run);
    static int configure(void *user, sempa_run *run);
    static int save(void *user, sempa_buffer *state);
    static int restore(void *user, const void *state, size_t size);
    static int init_data(void *user, sempa_buffer *data);
    static int pack_benchmark(void *user, sempa_buffer *payload);
    static int on_result(void *user, sempa_run *run, const sempa_result *result);
    static int on_partial_result(void *user, sempa_run *run, const sempa_partial_result *part);
    static int on_quarantined(void *user, sempa_run *run, const sempa_quarantined *facts);
    static int on_pool_event(void *user, sempa_run *run, const sempa_pool_event *event);

    bool has_no_state_;
    MWTaskAdditionMode add_mode_;
    MWTaskRetrievalMode retrieval_mode_;
    MWSuspensionPolicy suspension_policy_;
    MWMachineOrderingPolicy ordering_policy_;
    MWTask *benchmark_;
    int checkpoint_frequency_, checkpoint_time_;
    double timeout_;
    std::string run_name_, journal_;
    /* The master's objects of open tasks. Tasks that an earlier master or a worker has added are
     * created from their content when they are needed. */
    Tasks tasks_;
    Workers workers_;
    sempa_run *run_;
    sempa_outcome outcome_;
};

#include "MWDriverParts.h"

#endif
