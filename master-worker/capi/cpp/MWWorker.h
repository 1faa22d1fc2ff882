/* MWWorker: executes tasks. */
#ifndef SEMPA_MWWORKER_H
#define SEMPA_MWWORKER_H

#include "MWTask.h"

#include <unistd.h>

class MWWorker : public MWBase {
public:
    MWWorker() : groups_(0), context_(0)
    {
        mach_name[0] = '\0';
        gethostname(mach_name, sizeof mach_name - 1);
        mach_name[sizeof mach_name - 1] = '\0';
    }
    virtual ~MWWorker() {}

    /* Executes tasks until the run releases this worker. Exits the process with status 1 after a
     * failure. */
    void go(int, char **) { go(); }
    void go()
    {
        sempa_worker worker = callbacks();
        int code = sempa_work_worker(&worker);
        if (code != SEMPA_WORK_OK)
            std::fprintf(stderr, "worker: %s\n", sempa_work_last_error());
        if (code < 0)
            std::exit(1);
    }

    /* Name of the host on which the worker has started. */
    char mach_name[64];

    /* Returns a new task of the application's class. */
    virtual MWTask *gimme_a_task() = 0;

    /* The worker belongs to a group. Must be called before go; a worker without groups belongs to
     * all. */
    void addGroup(int group)
    {
        if (group >= 0 && group < 64)
            groups_ |= uint64_t(1) << group;
    }

protected:
    /* Unpacks what the driver's pack_worker_init_data has packed. */
    virtual MWReturn unpack_init_data() = 0;
    virtual void execute_task(MWTask *) = 0;
    /* Executes the benchmark task. Its duration is the worker's factor; the returned value is not
     * used. */
    virtual double benchmark(MWTask *task)
    {
        execute_task(task);
        return 0;
    }
    virtual void unpack_driver_task_data() {}
    /* Unpacks what the driver's pack_update has packed. receive_update calls this function. */
    virtual void unpack_update() {}

    /* Functions of MW that do not exist here. A program that defines one must be changed; see
     * the porting guide. */
    virtual void pack_worker_initinfo() final {}

    /* The following functions are for execute_task. */

    /* Calls unpack_update and returns true if there is an update that this task has not seen. */
    bool receive_update()
    {
        const void *data = 0;
        size_t size = 0;
        int code = sempa_context_update(context_, &data, &size);
        sempa_mw_check(code);
        if (code != SEMPA_WORK_OK)
            return false;
        MWPackScope scope(RMC, data, size);
        unpack_update();
        scope.check("unpack_update");
        return true;
    }

    /* True if the master needs no result of this task. */
    bool is_canceled()
    {
        int code = sempa_context_is_canceled(context_);
        sempa_mw_check(code);
        return code != 0;
    }

    /* True if the task should return its result and its remaining work now. */
    bool is_time_over() { return sempa_context_is_time_over(context_) > 0; }

    /* Returns work that this task does not do. The worker deletes `task`. */
    void return_task(MWTask *task, MWKey key = 0)
    {
        std::string payload = MWPayload::pack(task, std::string());
        sempa_task returned = {payload.data(), payload.size(), key, task->groups_};
        delete task;
        sempa_mw_check(sempa_context_return_task(context_, &returned));
    }

    /* Sends a part of the result, packed by pack_subresults(part). */
    void send_subresults(MWTask *task, int part)
    {
        MWPackScope scope(RMC);
        RMC->pack(&part, 1);
        task->pack_subresults(part);
        const std::string &data = scope.packed();
        sempa_mw_check(sempa_context_send_partial(context_, data.data(), data.size()));
    }

private:
    friend class MWDriver;

    uint64_t groups_;
    sempa_context *context_;

    sempa_worker callbacks()
    {
        sempa_worker worker = sempa_worker();
        worker.size = sizeof worker;
        worker.user = this;
        worker.groups = groups_;
        worker.init = init;
        worker.execute = execute;
        return worker;
    }

    static int init(void *user, const void *data, size_t size)
    {
        MWWorker *worker = static_cast<MWWorker *>(user);
        return sempa_mw_guarded([&]() -> int {
            MWPackScope scope(RMC, data, size);
            if (worker->unpack_init_data() != OK)
                throw std::runtime_error("unpack_init_data refused the data");
            scope.check("unpack_init_data");
            return 0;
        });
    }

    static int execute(void *user, sempa_context *context, const void *data, size_t size,
                       sempa_buffer *result)
    {
        MWWorker *worker = static_cast<MWWorker *>(user);
        worker->context_ = context;
        MWTask *task = 0;
        int code = sempa_mw_guarded([&]() -> int {
            task = worker->gimme_a_task();
            task->task_id = sempa_context_task(context);
            task->number = static_cast<int>(task->task_id & INT_MAX);
            worker->execute_payload(task, MWPayload(data, size));
            MWPackScope scope(RMC);
            task->pack_results();
            return sempa_buffer_append(result, scope.packed().data(), scope.packed().size());
        });
        delete task;
        return code;
    }

    void execute_payload(MWTask *task, const MWPayload &payload)
    {
        {
            MWPackScope scope(RMC, payload.driver_data, payload.driver_data_size);
            // The benchmark and tasks that workers return have no data of the driver.
            if (payload.driver_data_size > 0)
                unpack_driver_task_data();
            scope.check("unpack_driver_task_data");
        }
        payload.unpack_work(task);
        if (task->task_id == 0)
            benchmark(task);
        else
            execute_task(task);
    }
};

/* Returns a new worker of the application's class. A program that defines this function can be its
 * own worker, and can carry out a run in one process. */
extern MWWorker *gimme_a_worker() __attribute__((weak));

#endif
