/* MWMap: the shortest form of a program, a function that the workers apply to many tasks. */
#ifndef SEMPA_MWMAP_H
#define SEMPA_MWMAP_H

#include "MWDriver.h"

#include <stdexcept>
#include <type_traits>
#include <vector>

/* A task with its place among the tasks. */
template <class Task, class Result> struct MWMapTask : MWTask {
    MWMapTask() : place(0), task(), result() {}
    MWMapTask(unsigned long place, const Task &task) : place(place), task(task), result() {}
    void pack_work()
    {
        RMC->pack(&place, 1);
        RMC->pack(reinterpret_cast<const char *>(&task), sizeof task);
    }
    void unpack_work()
    {
        RMC->unpack(&place, 1);
        RMC->unpack(reinterpret_cast<char *>(&task), sizeof task);
    }
    void pack_results() { RMC->pack(reinterpret_cast<const char *>(&result), sizeof result); }
    void unpack_results() { RMC->unpack(reinterpret_cast<char *>(&result), sizeof result); }

    unsigned long place;
    Task task;
    Result result;
};

template <class Task, class Result> struct MWMapWorker : MWWorker {
    explicit MWMapWorker(Result (*function)(Task)) : function(function) {}
    MWTask *gimme_a_task() { return new MWMapTask<Task, Result>; }
    MWReturn unpack_init_data() { return OK; }
    void execute_task(MWTask *task)
    {
        MWMapTask<Task, Result> *mapped = static_cast<MWMapTask<Task, Result> *>(task);
        mapped->result = function(mapped->task);
    }

    Result (*function)(Task);
};

template <class Task, class Result> struct MWMapDriver : MWDriver {
    MWMapDriver(Result (*function)(Task), const std::vector<Task> &tasks, int workers)
        : function(function), tasks(tasks), workers(workers), has_result(tasks.size()), results(tasks.size())
    {
    }
    MWTask *gimme_a_task() { return new MWMapTask<Task, Result>; }
    MWWorker *new_worker() { return new MWMapWorker<Task, Result>(function); }
    MWReturn get_userinfo(int, char *[])
    {
        set_target_num_workers(workers);
        return OK;
    }
    MWReturn setup_initial_tasks(int *, MWTask ***)
    {
        for (size_t place = 0; place < tasks.size(); ++place)
            addTask(new MWMapTask<Task, Result>(place, tasks[place]));
        return OK;
    }
    MWReturn pack_worker_init_data() { return OK; }
    MWReturn act_on_completed_task(MWTask *task)
    {
        MWMapTask<Task, Result> *mapped = static_cast<MWMapTask<Task, Result> *>(task);
        results.at(mapped->place) = mapped->result;
        has_result.at(mapped->place) = 1;
        return OK;
    }
    void write_master_state(FILE *file)
    {
        size_t count = results.size();
        std::fwrite(&count, sizeof count, 1, file);
        std::fwrite(has_result.data(), 1, count, file);
        std::fwrite(results.data(), sizeof(Result), count, file);
    }
    void read_master_state(FILE *file)
    {
        size_t count = 0;
        if (std::fread(&count, sizeof count, 1, file) != 1 || count != results.size() ||
            std::fread(has_result.data(), 1, count, file) != count ||
            std::fread(results.data(), sizeof(Result), count, file) != count)
            throw std::runtime_error("the journal is that of a run with another number of tasks");
    }

    Result (*function)(Task);
    const std::vector<Task> &tasks;
    int workers;
    // 1 for each task with a result.
    std::vector<char> has_result;
    std::vector<Result> results;
};

/*
 * Applies a function to each task, on the workers of a run, and returns the results in the order of
 * the tasks. The workers are further processes of this program, which come to this call and exit at
 * its end. Tasks and results travel as their bytes, so they must not contain pointers.
 *
 * With the environment variable SEMPA_WORK_IN_PROCESS the run needs no virtual machine;
 * SEMPA_WORK_JOURNAL names the directory of a journal, with which a stopped run continues at the
 * next start. The program exits with status 1 if the run fails or is stopped.
 *
 * Places of tasks that are not tried again, because too many of their attempts have failed, are
 * added to *failed. Without it, the program exits with status 1 if there are such tasks, and the
 * results of the others are lost, because the run is finished.
 */
template <class Task, class Result>
std::vector<Result> MWMap(const char *run_name, Result (*function)(Task),
                          const std::vector<Task> &tasks, int workers = 4,
                          std::vector<size_t> *failed = 0)
{
    static_assert(std::is_trivially_copyable<Task>::value &&
                      std::is_trivially_copyable<Result>::value,
                  "tasks and results travel as their bytes");
    MWMapDriver<Task, Result> driver(function, tasks, workers);
    driver.set_run_name(run_name);
    driver.go();
    size_t missing = 0;
    for (size_t place = 0; place < tasks.size(); ++place)
        if (!driver.has_result[place]) {
            ++missing;
            if (failed && driver.is_finished())
                failed->push_back(place);
        }
    if (!driver.is_finished() || (missing > 0 && !failed)) {
        std::fprintf(stderr, "master: %lu of %lu tasks have no result: %s\n",
                     static_cast<unsigned long>(missing),
                     static_cast<unsigned long>(tasks.size()),
                     driver.is_finished() ? "all their attempts failed" : "the run was stopped");
        std::exit(1);
    }
    return driver.results;
}

#endif
