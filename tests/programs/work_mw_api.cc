/* Checks the functions of MW's classes in one process: packing, orders of tasks, keys, parts of
 * results, returned and failing tasks. Prints "ok". */
#include "MWDriver.h"

#include <climits>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);                  \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (0)

template <class T> static void check_numbers(T least, T greatest)
{
    T values[] = {least, 1, greatest, 0, T(7)}, read[5] = {0, 0, 0, 0, 0};
    MWPackScope packing(MWBase::RMC);
    CHECK(MWBase::RMC->pack(values, 5) == 0);
    CHECK(MWBase::RMC->pack(values, 3, 2) == 0);
    std::string packed = packing.packed();
    MWPackScope unpacking(MWBase::RMC, packed.data(), packed.size());
    CHECK(MWBase::RMC->unpack(read, 2) == 0 && MWBase::RMC->unpack(read + 2, 3) == 0);
    for (int i = 0; i < 5; ++i)
        CHECK(read[i] == values[i]);
    T every_second[5] = {9, 9, 9, 9, 9};
    CHECK(MWBase::RMC->unpack(every_second, 3, 2) == 0);
    CHECK(every_second[0] == least && every_second[2] == greatest && every_second[4] == T(7));
    CHECK(every_second[1] == T(9) && every_second[3] == T(9));
    unpacking.check("all numbers");
    CHECK(MWBase::RMC->unpack(read, 1) == -1 && read[0] == least);
    bool has_thrown = false;
    try {
        unpacking.check("one number more");
    } catch (const std::exception &) {
        has_thrown = true;
    }
    CHECK(has_thrown);
}

static void check_packing()
{
    check_numbers<char>(CHAR_MIN, CHAR_MAX);
    check_numbers<short>(SHRT_MIN, SHRT_MAX);
    check_numbers<unsigned short>(0, USHRT_MAX);
    check_numbers<int>(INT_MIN, INT_MAX);
    check_numbers<unsigned int>(0, UINT_MAX);
    check_numbers<long>(LONG_MIN, LONG_MAX);
    check_numbers<unsigned long>(0, ULONG_MAX);
    check_numbers<float>(-FLT_MAX, FLT_MIN);
    check_numbers<double>(-DBL_MAX, DBL_MIN);
    MWPackScope packing(MWBase::RMC);
    int one = 1;
    MWBase::RMC->pack("text");
    MWBase::RMC->pack(std::string("a\0b", 3));
    MWBase::RMC->pack(&one, 1);
    std::string packed = packing.packed();
    CHECK(packed.substr(packed.size() - 4) == std::string("\1\0\0\0", 4));
    MWPackScope unpacking(MWBase::RMC, packed.data(), packed.size());
    char text[8];
    std::string binary;
    CHECK(MWBase::RMC->unpack(text) == 0 && std::string(text) == "text");
    CHECK(MWBase::RMC->unpack(binary) == 0 && binary == std::string("a\0b", 3));
}

enum Kind { PLAIN, RETURNING, FAILING, GREEDY, INIT, PATIENT };

class ApiTask : public MWTask {
public:
    explicit ApiTask(int the_value = 0, Kind the_kind = PLAIN)
        : value(the_value), kind(the_kind), result(0), part(0) {}
    void pack_work()
    {
        int packed[2] = {value, kind};
        RMC->pack(packed, 2);
    }
    void unpack_work()
    {
        int packed[2] = {0, 0};
        RMC->unpack(packed, 2);
        value = packed[0];
        kind = Kind(packed[1]);
    }
    void pack_results() { RMC->pack(&result, 1); }
    void unpack_results()
    {
        RMC->unpack(&result, 1);
        if (kind == GREEDY)
            RMC->unpack(&result, 1);
    }
    void pack_subresults(int number)
    {
        int sum = number + value;
        RMC->pack(&sum, 1);
    }
    void unpack_subresults(int) { RMC->unpack(&part, 1); }
    int value;
    Kind kind;
    int result, part;
};

static MWKey ascending(MWTask *task) { return static_cast<ApiTask *>(task)->value; }
static MWKey descending(MWTask *task) { return -ascending(task); }

class ApiWorker : public MWWorker {
public:
    ApiWorker() : driver_word(0), word(0), update(0) {}
    MWTask *gimme_a_task() { return new ApiTask; }

protected:
    MWReturn unpack_init_data()
    {
        int number = 0;
        RMC->unpack(&number, 1);
        word = number;
        return word >= 77 ? OK : ABORT;
    }
    void unpack_update() { RMC->unpack(&update, 1); }
    void unpack_driver_task_data() { RMC->unpack(&driver_word, 1); }
    void execute_task(MWTask *t)
    {
        ApiTask *task = static_cast<ApiTask *>(t);
        CHECK(driver_word == 55 && task->number == int(task->task_id & INT_MAX));
        if (task->kind == FAILING)
            throw std::runtime_error("a wrong task");
        if (task->kind == RETURNING) {
            send_subresults(task, 3);
            return_task(new ApiTask(task->value + 100), task->value + 100);
        }
        if (task->kind == PATIENT)
            while (!receive_update())
                ;
        task->result = task->kind == INIT ? word : task->kind == PATIENT ? update : 2 * task->value;
    }

private:
    int driver_word, word, update;
};

MWWorker *gimme_a_worker() { return new ApiWorker; }

class ApiDriver : public MWDriver {
public:
    ApiDriver() : quarantined(0), part(0), word(77) {}
    MWTask *gimme_a_task() { return new ApiTask; }
    std::vector<int> order;
    int quarantined, part, word;

protected:
    MWReturn get_userinfo(int, char **) { return OK; }
    MWReturn pack_worker_init_data()
    {
        RMC->pack(&word, 1);
        return OK;
    }
    void pack_driver_task_data()
    {
        int word = 55;
        RMC->pack(&word, 1);
    }
    MWReturn act_on_completed_task(MWTask *t)
    {
        ApiTask *task = static_cast<ApiTask *>(t);
        CHECK(task->result == 2 * task->value && task->working_time >= 0);
        order.push_back(task->value);
        return OK;
    }
    MWReturn act_on_completed_subtask(MWTask *task)
    {
        part = static_cast<ApiTask *>(task)->part;
        return OK;
    }
    MWReturn act_on_quarantined_task(MWTask *task, const sempa_quarantined *facts)
    {
        CHECK(static_cast<ApiTask *>(task)->kind == FAILING && facts->attempt_count == 1);
        ++quarantined;
        return OK;
    }
    void add_values(int count)
    {
        std::vector<MWTask *> tasks;
        for (int i = 1; i <= count; ++i)
            tasks.push_back(new ApiTask(i));
        addTasks(count, &tasks[0]);
    }
    /* One attempt per task, and one task per worker at a time. */
    void set_short_limits()
    {
        sempa_settings settings = sempa_settings();
        settings.size = sizeof settings;
        sempa_mw_check(sempa_run_get_settings(run(), &settings));
        settings.attempts_max = 1;
        settings.look_ahead_s = 0;
        sempa_mw_check(sempa_run_set_settings(run(), &settings));
    }
};

/* Tasks in the order of their addition, or the newest first. */
class ListDriver : public ApiDriver {
public:
    explicit ListDriver(MWTaskAdditionMode the_mode) : mode(the_mode) {}

protected:
    MWReturn setup_initial_tasks(int *, MWTask ***)
    {
        set_task_add_mode(mode);
        set_task_key_function(ascending);
        add_values(5);
        CHECK(get_number_tasks() == 5 && get_number_running_tasks() == 0 && !is_TODO_empty());
        CHECK(return_best_todo_keyval() == 1 && return_best_running_keyval() == DBL_MAX);
        CHECK(sort_task_list() == -1);
        CHECK(delete_tasks_worse_than(4) == 1 && get_number_tasks() == 4);
        return OK;
    }

private:
    MWTaskAdditionMode mode;
};

/* Tasks in the order of their keys. The key function changes in the middle of the run. */
class KeyDriver : public ApiDriver {
protected:
    MWReturn setup_initial_tasks(int *, MWTask ***)
    {
        set_short_limits();
        set_task_add_mode(ADD_BY_KEY);
        set_task_key_function(ascending);
        add_values(6);
        CHECK(return_best_todo_keyval() == 1 && sort_task_list() == 0);
        CHECK(delete_tasks_worse_than(5) == 1);
        return OK;
    }
    MWReturn act_on_completed_task(MWTask *task)
    {
        if (order.size() == 1) {
            set_task_key_function(descending);
            CHECK(return_best_todo_keyval() == -5);
        }
        return ApiDriver::act_on_completed_task(task);
    }
};

/* Parts of results, returned tasks and failing tasks. */
class PartDriver : public ApiDriver {
protected:
    MWReturn setup_initial_tasks(int *count, MWTask ***tasks)
    {
        set_short_limits();
        static MWTask *first[2];
        first[0] = new ApiTask(1, RETURNING);
        first[1] = new ApiTask(2, FAILING);
        *count = 2;
        *tasks = first;
        return OK;
    }
};

/* New init data, updates of one worker, and tasks that are abandoned. */
class RefreshDriver : public ApiDriver {
public:
    RefreshDriver() : starts(0) {}
    int starts;

protected:
    MWReturn setup_initial_tasks(int *, MWTask ***)
    {
        set_short_limits();
        addTask(new ApiTask(1, INIT));
        return OK;
    }
    MWReturn act_on_starting_worker(MWWorkerID *worker)
    {
        CHECK(std::string(worker->machine_name()) == "localhost");
        ++starts;
        return OK;
    }
    void pack_update() { RMC->pack(&word, 1); }
    MWReturn act_on_completed_task(MWTask *t)
    {
        ApiTask *task = static_cast<ApiTask *>(t);
        order.push_back(task->result);
        CHECK(task->worker && workers().size() == 1 && workers()[0] == task->worker);
        // No other task runs.
        CHECK(!stop_work(task->worker));
        switch (order.size()) {
        case 1: // Only workers that start later get this word.
            word = 78;
            refreshWorkers(0, MW_NONE);
            addTask(new ApiTask(2, INIT));
            break;
        case 2:
            word = 79;
            refreshWorkers(3, MW_THIS);
            addTask(new ApiTask(3, INIT));
            break;
        case 3:
            word = 80;
            refreshWorkers(0, MW_ALL);
            addTask(new ApiTask(4, INIT));
            break;
        case 4:
            addTask(new ApiTask(5, PATIENT));
            word = 90;
            CHECK(send_update_message_to(task->worker) == 0);
            break;
        }
        return OK;
    }
};

/* A part of a result stops the task. */
class StopDriver : public PartDriver {
public:
    StopDriver() : stopped(0) {}
    int stopped;

protected:
    MWReturn act_on_completed_subtask(MWTask *)
    {
        stopped += stop_work(workers()[0]);
        return OK;
    }
};

/* A result that cannot be unpacked ends the run. */
class GreedyDriver : public ApiDriver {
protected:
    MWReturn setup_initial_tasks(int *, MWTask ***)
    {
        addTask(new ApiTask(1, GREEDY));
        return OK;
    }
};

int main(int argc, char **)
{
    set_MWprintf_level(20);
    if (argc > 1) {
        GreedyDriver greedy;
        greedy.go();
        return 0;
    }
    check_packing();
    ListDriver first(ADD_AT_END), last(ADD_AT_BEGIN);
    first.go();
    last.go();
    CHECK((first.order == std::vector<int>{1, 2, 3, 4}) && first.is_finished());
    CHECK((last.order == std::vector<int>{4, 3, 2, 1}));
    KeyDriver keys;
    keys.go();
    // The worker had task 3 when the key function changed.
    CHECK((keys.order == std::vector<int>{1, 2, 3, 5, 4}));
    CHECK(keys.statistics().results_accepted == 5 && keys.statistics().tasks_pruned == 1);
    PartDriver parts;
    parts.go();
    CHECK((parts.order == std::vector<int>{1, 101}));
    CHECK(parts.part == 4 && parts.quarantined == 1);
    RefreshDriver refresh;
    refresh.go();
    CHECK((refresh.order == std::vector<int>{77, 77, 79, 80, 90}) && refresh.starts == 1);
    StopDriver stop;
    stop.go();
    CHECK(stop.stopped == 1 && stop.order.empty() && stop.statistics().tasks_pruned == 1);
    std::puts("ok");
    return 0;
}
