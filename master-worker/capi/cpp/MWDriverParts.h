/* Functions of MWDriver. Included by MWDriver.h. */
#ifndef SEMPA_MWDRIVERPARTS_H
#define SEMPA_MWDRIVERPARTS_H

inline int MWDriver::carry_out()
{
    const char *in_process = std::getenv("SEMPA_WORK_IN_PROCESS");
    const char *journal = std::getenv("SEMPA_WORK_JOURNAL");
    if (journal)
        journal_ = journal;
    if (journal_.empty() && (checkpoint_frequency_ > 0 || checkpoint_time_ > 0))
        journal_ = run_name_ + ".journal";
    sempa_settings settings = sempa_settings();
    settings.size = sizeof settings;
    sempa_work_default_settings(&settings);
    read_settings(&settings);
    sempa_options options = sempa_options();
    options.size = sizeof options;
    options.run_name = run_name_.c_str();
    options.journal = journal_.empty() ? 0 : journal_.c_str();
    options.settings = &settings;
    sempa_driver driver = callbacks();
    outcome_.size = sizeof outcome_;
    if (!in_process)
        return sempa_work_master(&options, &driver, &outcome_);
    MWWorker *worker = new_worker();
    if (!worker)
        fail("SEMPA_WORK_IN_PROCESS is set, but the program does not define gimme_a_worker");
    sempa_worker worker_callbacks = worker->callbacks();
    int code = sempa_work_in_process(&options, &driver, &worker_callbacks, &outcome_);
    delete worker;
    return code;
}

inline sempa_driver MWDriver::callbacks()
{
    sempa_driver driver = sempa_driver();
    driver.size = sizeof driver;
    driver.user = this;
    driver.start = start;
    driver.configure = configure;
    driver.save = save;
    driver.restore = restore;
    driver.init_data = init_data;
    driver.benchmark = pack_benchmark;
    driver.on_result = on_result;
    driver.on_partial_result = on_partial_result;
    driver.on_quarantined = on_quarantined;
    driver.on_pool_event = on_pool_event;
    return driver;
}

/* Sets those settings that the application has chosen. */
inline void MWDriver::read_settings(sempa_settings *settings) const
{
    static const int policies[] = {SEMPA_PAUSE_DUPLICATE, SEMPA_PAUSE_REASSIGN, SEMPA_PAUSE_KEEP,
                                   SEMPA_PAUSE_MOVE};
    settings->pause_policy = policies[suspension_policy_];
    settings->worker_order = ordering_policy_ == NO_ORDER ? SEMPA_ORDER_BY_ID : SEMPA_ORDER_BY_FACTOR;
    settings->attempt_timeout_s = timeout_;
    settings->request_step = static_cast<uint32_t>(RMC->get_worker_increment());
}

inline void MWDriver::send_settings()
{
    if (!run_)
        return;
    sempa_settings settings = sempa_settings();
    settings.size = sizeof settings;
    sempa_mw_check(sempa_run_get_settings(run_, &settings));
    read_settings(&settings);
    sempa_mw_check(sempa_run_set_settings(run_, &settings));
}

/* Sets the workers of all classes. Without a class, this program is the worker program. */
inline void MWDriver::send_all()
{
    if (RMC->state().classes.empty())
        RMC->set_target_num_workers(1);
    const std::map<int, MWRMComm::Class> &classes = RMC->state().classes;
    for (std::map<int, MWRMComm::Class>::const_iterator it = classes.begin(); it != classes.end(); ++it)
        sempa_mw_check(RMC->send_class(it->first));
}

inline void MWDriver::add(const std::vector<MWTask *> &added, bool in_front)
{
    if (added.empty())
        return;
    if (!run_)
        throw std::runtime_error("tasks can be added only in functions that the driver calls");
    std::string driver_data;
    {
        MWPackScope scope(RMC);
        pack_driver_task_data();
        driver_data = scope.packed();
    }
    std::vector<std::string> payloads;
    std::vector<sempa_task> descriptions;
    std::vector<uint64_t> ids(added.size());
    payloads.reserve(added.size());
    for (size_t i = 0; i < added.size(); ++i) {
        payloads.push_back(MWPayload::pack(added[i], driver_data));
        sempa_task description = {payloads[i].data(), payloads[i].size(), dispatch_key(added[i]),
                                  added[i]->groups_};
        descriptions.push_back(description);
    }
    sempa_mw_check((in_front ? sempa_run_add_tasks_in_front : sempa_run_add_tasks)(
        run_, &descriptions[0], descriptions.size(), &ids[0]));
    for (size_t i = 0; i < added.size(); ++i) {
        added[i]->task_id = ids[i];
        added[i]->number = static_cast<int>(ids[i] & INT_MAX);
        // During a repetition a task without a number is not one of the run.
        if (ids[i] == 0)
            delete added[i];
        else
            tasks_[ids[i]] = added[i];
    }
}

/* Returns the master's object of a task; creates the object if there is none. With `takes`, the
 * caller deletes the object. */
inline MWTask *MWDriver::find(uint64_t id, const void *payload, size_t size, bool takes)
{
    Tasks::iterator known = tasks_.find(id);
    MWTask *task;
    if (known != tasks_.end()) {
        task = known->second;
    } else {
        task = gimme_a_task();
        try {
            MWPayload(payload, size).restore(task);
        } catch (...) {
            delete task;
            throw;
        }
        task->task_id = id;
        task->number = static_cast<int>(id & INT_MAX);
        tasks_[id] = task;
    }
    if (takes)
        tasks_.erase(id);
    return task;
}

inline int MWDriver::visit_key(void *user, const sempa_open_task *open)
{
    KeyList *list = static_cast<KeyList *>(user);
    MWDriver *driver = list->driver;
    return sempa_mw_guarded([&]() -> int {
        bool is_known = driver->tasks_.count(open->id) != 0;
        MWTask *task = driver->find(open->id, open->payload, open->length, !is_known);
        KeyedTask entry = {open->id, (driver->*list->key)(task), open->is_running != 0};
        list->entries.push_back(entry);
        if (!is_known)
            delete task;
        return 0;
    });
}

/* Returns the open tasks with a number for each. */
inline std::vector<MWDriver::KeyedTask> MWDriver::keys(KeyOfTask key)
{
    KeyList list = {this, key, std::vector<KeyedTask>()};
    int code = sempa_run_each_task(run_, visit_key, &list);
    sempa_mw_check(code);
    if (code != SEMPA_WORK_OK)
        throw std::runtime_error("the keys of the open tasks cannot be computed");
    return list.entries;
}

/* Gives each open task the key by which the present modes dispatch tasks. */
inline void MWDriver::set_keys()
{
    if (!run_)
        return;
    std::vector<KeyedTask> entries = keys(&MWDriver::dispatch_key);
    for (size_t i = 0; i < entries.size(); ++i)
        sempa_mw_check(sempa_run_set_key(run_, entries[i].id, entries[i].key));
}

inline void MWDriver::delete_task(void *user, uint64_t id)
{
    Tasks &tasks = static_cast<MWDriver *>(user)->tasks_;
    Tasks::iterator found = tasks.find(id);
    if (found == tasks.end())
        return;
    delete found->second;
    tasks.erase(found);
}

inline int MWDriver::delete_tasks_worse_than(MWKey bound)
{
    if (!run_ || !task_key)
        return 0;
    if (!orders_by_key()) {
        // All tasks have the key 0. The worse ones get a greater one, and are deleted with it.
        std::vector<KeyedTask> entries = keys(&MWDriver::user_key);
        for (size_t i = 0; i < entries.size(); ++i)
            if (!entries[i].is_running && entries[i].key > bound)
                sempa_mw_check(sempa_run_set_key(run_, entries[i].id, 1));
        bound = 0;
    }
    size_t count = 0;
    sempa_mw_check(sempa_run_prune(run_, bound, 0, delete_task, this, &count));
    return static_cast<int>(count);
}

inline MWKey MWDriver::best_key(bool is_running)
{
    MWKey best = DBL_MAX;
    if (!run_ || !task_key)
        return best;
    if (orders_by_key()) {
        sempa_mw_check((is_running ? sempa_run_best_running_key : sempa_run_best_waiting_key)(
            run_, &best));
        return best;
    }
    std::vector<KeyedTask> entries = keys(&MWDriver::user_key);
    for (size_t i = 0; i < entries.size(); ++i)
        if (entries[i].is_running == is_running)
            best = std::min(best, entries[i].key);
    return best;
}

inline int MWDriver::print_task_keys()
{
    if (!run_ || !task_key)
        return -1;
    std::vector<KeyedTask> entries = keys(&MWDriver::user_key);
    for (size_t i = 0; i < entries.size(); ++i)
        if (!entries[i].is_running)
            MWprintf(10, "  Task %d: key %g\n", static_cast<int>(entries[i].id & INT_MAX),
                     entries[i].key);
    return 0;
}

inline void MWDriver::refreshWorkers(int group, MWRefreshType type)
{
    if (!run_)
        throw std::runtime_error("refreshWorkers can be called only in functions that the driver calls");
    if (type == MW_THIS && (group < 0 || group >= 64))
        throw std::runtime_error("refreshWorkers: a group has a number from 0 to 63");
    MWPackScope scope(RMC);
    if (pack_worker_init_data() != OK)
        throw std::runtime_error("pack_worker_init_data did not return OK");
    static const int workers[] = {SEMPA_REFRESH_NONE, SEMPA_REFRESH_GROUPS, SEMPA_REFRESH_ALL};
    uint64_t groups = type == MW_THIS ? uint64_t(1) << group : 0;
    sempa_mw_check(sempa_run_refresh_init_data(run_, scope.packed().data(), scope.packed().size(),
                                               workers[type], groups));
}

inline bool MWDriver::stop_work(int tid)
{
    if (!run_)
        return false;
    uint64_t task = 0;
    int code = sempa_run_stop_work(run_, worker_number(tid), &task);
    sempa_mw_check(code);
    if (code != SEMPA_WORK_OK)
        return false;
    delete_task(this, task);
    return true;
}

inline std::vector<MWWorkerID *> MWDriver::workers()
{
    std::vector<MWWorkerID *> present;
    for (Workers::iterator it = workers_.begin(); it != workers_.end(); ++it)
        present.push_back(&it->second);
    return present;
}

/* Keeps the list of workers. A worker that is lost is removed after the application's function. */
inline void MWDriver::note_worker(const sempa_pool_event *event)
{
    Workers::iterator known = workers_.find(event->worker);
    if (event->kind == SEMPA_WORKER_READY && known == workers_.end())
        workers_.insert(std::make_pair(event->worker, MWWorkerID(event->worker, event->host)));
    else if (event->kind == SEMPA_WORKER_MIGRATED && known != workers_.end())
        known->second.machine_ = event->host;
}

inline int MWDriver::start(void *user, sempa_run *run)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    return driver->in_run(run, [&]() -> int {
        int count = 0;
        MWTask **tasks = 0;
        if (driver->setup_initial_tasks(&count, &tasks) != OK)
            throw std::runtime_error("setup_initial_tasks did not return OK");
        driver->addTasks(count, tasks);
        if (driver->tasks_.empty())
            throw std::runtime_error("setup_initial_tasks created no task");
        return 0;
    });
}

inline int MWDriver::configure(void *user, sempa_run *run)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    return driver->in_run(run, [&]() -> int {
        driver->send_all();
        return 0;
    });
}

inline int MWDriver::save(void *user, sempa_buffer *state)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    return sempa_mw_guarded([&]() -> int {
        driver->has_no_state_ = false;
        MWOutputFile file;
        driver->write_master_state(file.file());
        std::string content = file.content();
        if (driver->has_no_state_)
            throw std::runtime_error("the run has a journal, but the driver does not define "
                                     "write_master_state and read_master_state; a restart would "
                                     "lose what the driver has computed");
        return sempa_buffer_append(state, content.data(), content.size());
    });
}

inline int MWDriver::restore(void *user, const void *state, size_t size)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    return sempa_mw_guarded([&]() -> int {
        MWInputFile file(static_cast<const char *>(state), size);
        driver->read_master_state(file.file());
        return 0;
    });
}

inline int MWDriver::init_data(void *user, sempa_buffer *data)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    return sempa_mw_guarded([&]() -> int {
        MWPackScope scope(RMC);
        if (driver->pack_worker_init_data() != OK)
            throw std::runtime_error("pack_worker_init_data did not return OK");
        return sempa_buffer_append(data, scope.packed().data(), scope.packed().size());
    });
}

inline int MWDriver::pack_benchmark(void *user, sempa_buffer *payload)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    if (!driver->benchmark_)
        return SEMPA_WORK_NONE;
    return sempa_mw_guarded([&]() -> int {
        std::string packed = MWPayload::pack(driver->benchmark_, std::string());
        return sempa_buffer_append(payload, packed.data(), packed.size());
    }) == 0 ? 0 : -1;
}

inline int MWDriver::on_result(void *user, sempa_run *run, const sempa_result *result)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    MWTask *task = 0;
    int code = driver->in_run(run, [&]() -> int {
        task = driver->find(result->task, result->payload, result->payload_length, true);
        task->working_time = result->wall_s;
        task->cpu_time = result->cpu_s;
        Workers::iterator known = driver->workers_.find(result->worker);
        task->worker = known != driver->workers_.end() ? &known->second : 0;
        {
            MWPackScope scope(RMC, result->data, result->length);
            task->unpack_results();
            scope.check("unpack_results");
        }
        return driver->finish(driver->act_on_completed_task(task), "act_on_completed_task");
    });
    delete task;
    return code;
}

inline int MWDriver::on_partial_result(void *user, sempa_run *run, const sempa_partial_result *part)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    return driver->in_run(run, [&]() -> int {
        MWTask *task = driver->find(part->task, part->payload, part->payload_length, false);
        {
            MWPackScope scope(RMC, part->data, part->length);
            int number = 0;
            RMC->unpack(&number, 1);
            task->unpack_subresults(number);
            scope.check("unpack_subresults");
        }
        return driver->finish(driver->act_on_completed_subtask(task), "act_on_completed_subtask");
    });
}

inline int MWDriver::on_quarantined(void *user, sempa_run *run, const sempa_quarantined *facts)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    MWTask *task = 0;
    int code = driver->in_run(run, [&]() -> int {
        task = driver->find(facts->task, facts->payload, facts->payload_length, true);
        return driver->finish(driver->act_on_quarantined_task(task, facts),
                              "act_on_quarantined_task");
    });
    delete task;
    return code;
}

inline int MWDriver::on_pool_event(void *user, sempa_run *run, const sempa_pool_event *event)
{
    MWDriver *driver = static_cast<MWDriver *>(user);
    int result = driver->in_run(run, [&]() -> int {
        driver->note_worker(event);
        if (event->kind == SEMPA_WORKER_READY) {
            MWWorkerID &worker = driver->workers_.find(event->worker)->second;
            int code = driver->finish(driver->act_on_starting_worker(&worker),
                                      "act_on_starting_worker");
            if (code != 0)
                return code;
        }
        return driver->finish(driver->act_on_pool_event(event), "act_on_pool_event");
    });
    if (event->kind == SEMPA_WORKER_LOST)
        driver->workers_.erase(event->worker);
    return result;
}

#endif
