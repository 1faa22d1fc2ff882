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
    if (!gimme_a_worker)
        fail("SEMPA_WORK_IN_PROCESS is set, but the program does not define gimme_a_worker");
    MWWorker *worker = gimme_a_worker();
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
        std::swap(tasks_[ids[i]], added[i]->task_id ? const_cast<MWTask *&>(added[i]) : tasks_[0]);
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

#endif
