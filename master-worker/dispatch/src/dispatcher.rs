//! The dispatcher: which worker gets which task.

use crate::held::HeldAttempt;
use crate::pool::WorkerPool;
use crate::progress::Progress;
use crate::statistics::{RunStatistics, StatisticsReport};
use crate::target::{ClassStatus, Targets};
use crate::task_table::{Copies, OpenTask, QuarantinedTask, RunningCopy, Stage, TaskTable};
use crate::waiting::{Place, WaitingTasks};
use crate::worker::{MovingAverage, Worker, WorkerStage, WorkerView};
use crate::{
    AttemptId, AttemptRecord, ClassId, Event, Groups, Key, Micros, NewTask, Output, Settings,
    TaskId, WorkerId,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use thiserror::Error;

/// Interval of the checks that examine all workers.
pub(crate) const CHECK_INTERVAL: Micros = 100_000;
/// Time for the workers of an earlier master to return, before new ones are requested.
const RETURN_TIME: Micros = 2_000_000;
/// Greatest time of the shell that the look-ahead allows for.
const SHELL_DELAY_MAX: Micros = 2_000_000;
/// Part of the allowance for the shell that each check leaves: half of it after 7 s.
const SHELL_DELAY_DECAY: f64 = 0.99;
/// Tasks that last longer than this many times the look-ahead are sent one by one: the round trip
/// to the master is small compared to them, and an idle worker can get the next one.
const LOOK_AHEAD_RATIO: f64 = 50.0;

/// New tasks that exceed a limit; none of them was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RefusedTasks {
    #[error("{open} tasks are open and {new} are new, but a run may have {limit} open tasks")]
    TooMany {
        open: usize,
        new: usize,
        limit: usize,
    },
    #[error("the open tasks would have more than {limit} different sets of groups")]
    TooManyGroupSets { limit: usize },
    #[error(
        "task {0} was added before: the number of a task must be greater than all earlier ones"
    )]
    OldId(TaskId),
}

/// Decides which worker gets which task, and which result counts.
#[derive(Debug)]
pub struct Dispatcher {
    pub(crate) settings: Settings,
    generation: u32,
    attempt_count: u32,
    pub(crate) tasks: TaskTable,
    pub(crate) waiting: WaitingTasks,
    /// Tasks that wait again at a time.
    pub(crate) delayed: BTreeSet<(Micros, TaskId)>,
    pub(crate) running_keys: BTreeSet<(Key, TaskId)>,
    pub(crate) pool: WorkerPool,
    pub(crate) targets: Targets,
    /// No worker is requested before this time.
    first_request_at: Micros,
    pub(crate) statistics: RunStatistics,
    /// Duration of a task at a worker with the factor 1.
    pub(crate) durations: MovingAverage,
    pub(crate) outputs: VecDeque<Output>,
    first_position: i64,
    last_position: i64,
    pub(crate) next_check: Micros,
    /// A worker was not served because the waiting tasks avoid it.
    has_unserved_worker: bool,
    reported_all_closed: bool,
    /// Time for which a message of a worker may wait for the shell, in microseconds.
    shell_delay: f64,
}

impl Dispatcher {
    /// Creates the dispatcher of a master. `generation` is the number of the master's start, which
    /// counts from 1. `statistics` are those of the earlier masters.
    pub fn new(
        settings: Settings,
        generation: u32,
        mut statistics: RunStatistics,
        now: Micros,
    ) -> Self {
        statistics.begin(now);
        Self {
            settings,
            generation,
            attempt_count: 0,
            tasks: TaskTable::default(),
            waiting: WaitingTasks::default(),
            delayed: BTreeSet::new(),
            running_keys: BTreeSet::new(),
            pool: WorkerPool::default(),
            targets: Targets::default(),
            first_request_at: now + if generation > 1 { RETURN_TIME } else { 0 },
            statistics,
            durations: MovingAverage::default(),
            outputs: VecDeque::new(),
            first_position: 0,
            last_position: 0,
            next_check: now,
            has_unserved_worker: false,
            reported_all_closed: false,
            shell_delay: 0.0,
        }
    }

    /// Returns the next output; `None` if there is nothing to do before the next event.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Handles an event that happened at `now`.
    pub fn handle(&mut self, now: Micros, event: Event) {
        match event {
            Event::WorkerStarted {
                worker,
                class,
                groups,
                host,
            } => {
                self.add_worker(now, Worker::new(worker, class, groups, host, now));
            }
            Event::WorkerReady { worker, benchmark } => self.mark_ready(now, worker, benchmark),
            Event::WorkerReturned {
                worker,
                class,
                groups,
                host,
                benchmark,
                held_attempts,
            } => {
                if self.add_worker(now, Worker::new(worker, class, groups, host, now)) {
                    self.mark_ready(now, worker, benchmark);
                    self.adopt_attempts(now, worker, &held_attempts);
                }
            }
            Event::WorkerLost { worker, reason } => self.lose_worker(now, worker, reason),
            Event::WorkerPaused { worker, cause } => self.pause_worker(now, worker, cause),
            Event::WorkerResumed { worker } => self.resume_worker(now, worker),
            Event::WorkerMigrated { worker, host } => self.migrate_worker(worker, host),
            Event::WorkerUnwanted { worker } => self.retire_worker(now, worker),
            Event::StartFailed { class, count } => {
                self.targets.start_failed(class, count, now, &self.settings);
            }
            Event::HostAvailable => self.targets.end_delays(now),
            Event::Attempt { worker, report } => self.handle_report(now, worker, report),
            Event::TasksReturned { worker, attempts } => {
                self.take_back(now, worker, &attempts);
            }
            Event::Tick => {}
        }
        self.settle(now);
    }

    /// Adds tasks behind those of equal key.
    ///
    /// # Errors
    /// The tasks exceed a limit or have old numbers; none was added.
    pub fn add_tasks(&mut self, now: Micros, tasks: &[NewTask]) -> Result<(), RefusedTasks> {
        self.check_new_tasks(tasks)?;
        for task in tasks {
            self.last_position += 1;
            self.insert_task(task, self.last_position);
        }
        self.finish_adding(now, tasks.len());
        Ok(())
    }

    /// Adds tasks in front of those of equal key; the first of `tasks` becomes the first.
    ///
    /// # Errors
    /// As [`Dispatcher::add_tasks`].
    pub fn add_tasks_in_front(
        &mut self,
        now: Micros,
        tasks: &[NewTask],
    ) -> Result<(), RefusedTasks> {
        self.check_new_tasks(tasks)?;
        for task in tasks.iter().rev() {
            self.first_position -= 1;
            self.insert_task(task, self.first_position);
        }
        self.finish_adding(now, tasks.len());
        Ok(())
    }

    fn check_new_tasks(&self, tasks: &[NewTask]) -> Result<(), RefusedTasks> {
        let (open, new, limit) = (
            self.tasks.open.len(),
            tasks.len(),
            self.settings.limits.tasks,
        );
        if new > limit.saturating_sub(open) {
            return Err(RefusedTasks::TooMany { open, new, limit });
        }
        let mut greatest_id = self.tasks.greatest_id;
        for task in tasks {
            if greatest_id.is_some_and(|greatest| task.id <= greatest) {
                return Err(RefusedTasks::OldId(task.id));
            }
            greatest_id = Some(task.id);
        }
        let limit = self.settings.limits.group_sets;
        let is_new = |groups: &Groups| !self.tasks.group_sets.contains_key(groups);
        let new_sets: BTreeSet<_> = tasks.iter().map(|t| t.groups).filter(is_new).collect();
        if self.tasks.group_sets.len() + new_sets.len() > limit {
            return Err(RefusedTasks::TooManyGroupSets { limit });
        }
        Ok(())
    }

    fn insert_task(&mut self, task: &NewTask, position: i64) {
        let place = Place {
            key: task.key,
            position,
            task: task.id,
        };
        self.waiting.insert(task.groups, place);
        self.tasks.insert(OpenTask {
            groups: task.groups,
            place,
            stage: Stage::Waiting,
            trouble: None,
        });
    }

    fn finish_adding(&mut self, now: Micros, count: usize) {
        self.statistics.counts.tasks_added += count as u64;
        self.reported_all_closed = false;
        self.settle(now);
    }

    /// Adds the open tasks of an earlier master in their order. Tasks that were running wait again.
    pub fn restore_tasks(&mut self, now: Micros, tasks: &[NewTask], greatest_id: Option<TaskId>) {
        for task in tasks {
            self.last_position += 1;
            self.insert_task(task, self.last_position);
        }
        self.tasks.greatest_id = self.tasks.greatest_id.max(greatest_id);
        self.settle(now);
    }

    /// Removes the open tasks whose keys are greater than `bound`, and returns them. Running tasks
    /// remain unless `with_running` is true; the workers of those are requested to cancel them.
    pub fn prune(&mut self, now: Micros, bound: Key, with_running: bool) -> Vec<TaskId> {
        let mut pruned_tasks = self.waiting.remove_worse_than(bound);
        let is_worse = |id: &TaskId| {
            let task = self.tasks.open.get(id);
            task.is_some_and(|task| task.place.key > bound)
        };
        let delayed_tasks: Vec<_> = self.delayed.iter().map(|(_, id)| *id).collect();
        pruned_tasks.extend(delayed_tasks.iter().filter(|id| is_worse(id)));
        self.delayed.retain(|(_, id)| !is_worse(id));
        if with_running {
            let worse_keys = self.running_keys.iter().rev();
            let worse_keys = worse_keys.take_while(|(key, _)| *key > bound);
            pruned_tasks.extend(worse_keys.map(|(_, id)| *id));
        }
        for id in &pruned_tasks {
            self.close_task(*id, None);
        }
        self.statistics.counts.tasks_pruned += pruned_tasks.len() as u64;
        self.settle(now);
        pruned_tasks
    }

    /// Closes open tasks without results. The workers of running ones are requested to cancel them.
    /// Returns the tasks that were open.
    pub fn cancel(&mut self, now: Micros, tasks: &[TaskId]) -> Vec<TaskId> {
        let is_open = |id: &&TaskId| self.tasks.open.contains_key(id);
        let canceled: Vec<TaskId> = tasks.iter().filter(is_open).copied().collect();
        for id in &canceled {
            self.close_task(*id, None);
        }
        self.statistics.counts.tasks_pruned += canceled.len() as u64;
        self.settle(now);
        canceled
    }

    /// Returns the task that a worker executes, as far as the dispatcher knows; `None` if the
    /// worker holds no open task or is not part of the run.
    pub fn executing_task(&self, worker: WorkerId) -> Option<TaskId> {
        let held = &self.pool.get(worker)?.held;
        held.iter().find(|held| !held.is_abandoned).map(|h| h.task)
    }

    /// Returns all workers, also those without init data.
    pub fn worker_ids(&self) -> impl Iterator<Item = WorkerId> {
        self.pool.iter().map(|worker| worker.id)
    }

    /// Returns the workers of these groups that have their init data.
    pub fn initialized_workers(&self, groups: Groups) -> Vec<WorkerId> {
        let is_wanted = |worker: &&Worker| {
            worker.stage != WorkerStage::Starting && worker.groups.intersects(groups)
        };
        self.pool.iter().filter(is_wanted).map(|w| w.id).collect()
    }

    /// Changes the key of an open task. Returns false if the task is closed.
    pub fn set_key(&mut self, id: TaskId, key: Key) -> bool {
        let Some(task) = self.tasks.open.get_mut(&id) else {
            return false;
        };
        let old_place = task.place;
        let new_place = Place { key, ..old_place };
        task.place = new_place;
        match task.stage {
            Stage::Waiting => {
                let groups = task.groups;
                self.waiting.remove(groups, &old_place);
                self.waiting.insert(groups, new_place);
            }
            Stage::Delayed(_) => {}
            Stage::Running(_) => {
                self.running_keys.remove(&(old_place.key, id));
                self.running_keys.insert((key, id));
            }
        }
        true
    }

    /// Sets the number of workers that a class should have.
    pub fn set_target(&mut self, now: Micros, class: ClassId, target: u32) {
        let request_at = now.max(self.first_request_at);
        self.targets.set(class, target, request_at);
        self.settle(now);
    }

    /// Changes the settings; they hold for all further events.
    pub fn set_settings(&mut self, now: Micros, settings: Settings) {
        self.settings = settings;
        let ids: Vec<WorkerId> = self.pool.iter().map(|worker| worker.id).collect();
        for id in ids {
            self.index(id);
        }
        self.settle(now);
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Adds a quarantined task to the waiting tasks again, with a new history. Returns false if the
    /// task is not quarantined.
    pub fn retry_quarantined(&mut self, now: Micros, task: &NewTask) -> bool {
        if self.tasks.quarantined.remove(&task.id).is_none() {
            return false;
        }
        self.last_position += 1;
        self.insert_task(task, self.last_position);
        self.reported_all_closed = false;
        self.settle(now);
        true
    }

    /// Restores attempts of an open task that ended without results under an earlier master.
    pub fn restore_attempts(&mut self, id: TaskId, history: Vec<AttemptRecord>) {
        let history_max = self.settings.limits.history.max(1);
        if let Some(task) = self.tasks.open.get_mut(&id) {
            let trouble = task.trouble.get_or_insert_default();
            let counted = history.iter().filter(|record| record.is_counted).count();
            trouble.counted_attempts += u32::try_from(counted).unwrap_or(u32::MAX);
            // An attempt of several suspects does not count, although its reason does.
            trouble.is_suspect |= history.iter().any(|record| record.reason.counts());
            trouble.history.extend(history);
            let oldest = trouble.history.len().saturating_sub(history_max);
            trouble.history.drain(..oldest);
        }
    }

    /// Restores a quarantined task of an earlier master.
    pub fn restore_quarantined(&mut self, task: QuarantinedTask) {
        self.tasks.greatest_id = self.tasks.greatest_id.max(Some(task.task));
        self.tasks.quarantined.insert(task.task, task.history);
    }

    /// Releases all workers: the run has ended.
    pub fn release_all(&mut self, now: Micros) {
        self.targets = Targets::default();
        let ids: Vec<WorkerId> = self.pool.iter().map(|worker| worker.id).collect();
        for id in ids {
            self.release(now, id);
        }
    }

    /// Carries out what the last change makes possible.
    pub(crate) fn settle(&mut self, now: Micros) {
        while let Some((at, id)) = self.delayed.first().copied()
            && at <= now
        {
            self.delayed.pop_first();
            self.make_waiting(id);
        }
        self.release_surplus(now);
        for (class, count) in self.targets.take_requests(now, &self.settings) {
            self.outputs
                .push_back(Output::StartWorkers { class, count });
        }
        if now >= self.next_check {
            self.next_check = now + CHECK_INTERVAL;
            self.shell_delay *= SHELL_DELAY_DECAY;
            self.check_attempts(now);
        }
        self.fill_workers(now);
        self.recall_tasks();
        if self.tasks.open.is_empty() && !self.reported_all_closed {
            self.reported_all_closed = true;
            self.outputs.push_back(Output::AllTasksClosed);
        }
    }

    /// Moves an open task to the waiting tasks.
    pub(crate) fn make_waiting(&mut self, id: TaskId) {
        if let Some(task) = self.tasks.open.get_mut(&id) {
            task.stage = Stage::Waiting;
            self.waiting.insert(task.groups, task.place);
        }
    }

    /// Notes that the shell has handled no event for a time, for example during a callback of the
    /// driver. From then on, workers hold tasks for such a time, too. The allowance decays.
    pub fn note_busy(&mut self, busy: Micros) {
        self.shell_delay = self.shell_delay.max(busy.min(SHELL_DELAY_MAX) as f64);
    }

    /// Returns the number of tasks that a worker should hold.
    pub(crate) fn capacity(&self, worker: &Worker) -> usize {
        // A batch is refilled when half of it is left, and must last while the shell is busy.
        let look_ahead = self.settings.look_ahead as f64 + 2.0 * self.shell_delay;
        let Some(duration) = worker.expected_duration(self.durations.mean()) else {
            return 1;
        };
        if worker.held.has_suspect()
            || self.settings.look_ahead == 0
            || duration > look_ahead * LOOK_AHEAD_RATIO
        {
            return 1;
        }
        let count = (look_ahead / duration.max(0.1)).ceil() as usize;
        count.clamp(2, self.settings.limits.tasks_per_worker.max(2))
    }

    /// Updates the pool's index after a change of a worker.
    pub(crate) fn index(&mut self, id: WorkerId) {
        let capacity = self.pool.get(id).map_or(0, |worker| self.capacity(worker));
        self.pool.index(id, self.settings.worker_order, capacity);
    }

    /// Gives waiting tasks to workers that can take some.
    fn fill_workers(&mut self, now: Micros) {
        let mut skipped_workers = Vec::new();
        while !self.waiting.is_empty() {
            let waiting = &self.waiting;
            let next = self.pool.next_hungry(|groups| waiting.has_task_for(groups));
            let Some(id) = next else {
                break;
            };
            if !self.serve_worker(now, id) {
                skipped_workers.push(id);
                self.pool.index(id, self.settings.worker_order, 0);
            }
        }
        self.has_unserved_worker = !skipped_workers.is_empty();
        for id in skipped_workers {
            self.index(id);
        }
    }

    /// Dispatches tasks to a worker. Returns false if the waiting tasks must not run there now.
    fn serve_worker(&mut self, now: Micros, id: WorkerId) -> bool {
        let Some(worker) = self.pool.get(id) else {
            return false;
        };
        let (groups, host) = (worker.groups, worker.host.clone());
        let mut held_count = worker.held.len();
        // If few tasks wait, each worker gets its share.
        let share = self.waiting.len() / self.pool.computing_count().max(1) + 1;
        let capacity = self.capacity(worker).min(held_count + share);
        let duration = worker.expected_duration(self.durations.mean());
        let is_long = duration.is_none_or(|d| d >= self.settings.report_interval as f64);
        let mut attempts = Vec::new();
        let mut has_suspect = false;
        while held_count < capacity && !has_suspect {
            let Some(place) = self.take_task_for(now, groups, &host, held_count == 0) else {
                break;
            };
            has_suspect = self
                .tasks
                .open
                .get(&place.task)
                .is_some_and(OpenTask::is_suspect);
            let attempt = self.start_attempt(id, place);
            attempts.push((place.task, attempt));
            held_count += 1;
        }
        if attempts.is_empty() {
            return false;
        }
        if let Some(worker) = self.pool.get_mut(id) {
            worker.account(now);
            if worker.held.is_empty() {
                worker.restart_first(now);
            }
            for (task, attempt) in &attempts {
                worker.held.push(HeldAttempt {
                    task: *task,
                    attempt: *attempt,
                    report_each: is_long || has_suspect,
                    is_abandoned: false,
                    is_suspect: has_suspect,
                });
            }
        }
        self.index(id);
        self.outputs.push_back(Output::Dispatch {
            worker: id,
            attempts,
            report_each: is_long || has_suspect,
        });
        true
    }

    /// Removes the best waiting task for a worker and returns its place. `is_idle` is true if the
    /// worker holds no task, so that it may execute a suspect.
    fn take_task_for(
        &mut self,
        now: Micros,
        groups: Groups,
        host: &str,
        is_idle: bool,
    ) -> Option<Place> {
        let may_run = |id: TaskId| {
            let task = self.tasks.open.get(&id);
            task.is_some_and(|task| !task.avoids(host, now) && (is_idle || !task.is_suspect()))
        };
        let place = self.waiting.best_for(groups, may_run)?;
        let task = self.tasks.open.get(&place.task)?;
        let must_go_elsewhere = task.avoids(host, now) && self.pool.has_other_host(host);
        if must_go_elsewhere || (task.is_suspect() && !is_idle) {
            return None;
        }
        self.waiting.remove(task.groups, &place);
        Some(place)
    }

    /// Creates an attempt of a task that is not waiting any more.
    fn start_attempt(&mut self, worker: WorkerId, place: Place) -> AttemptId {
        let attempt = self.next_attempt();
        if let Some(task) = self.tasks.open.get_mut(&place.task) {
            task.stage = Stage::Running(Copies::One(RunningCopy { worker, attempt }));
        }
        self.running_keys.insert((place.key, place.task));
        attempt
    }

    /// Returns a new number for an attempt.
    pub(crate) fn next_attempt(&mut self) -> AttemptId {
        self.attempt_count += 1;
        self.statistics.counts.attempts += 1;
        AttemptId::new(self.generation, self.attempt_count)
    }

    /// Returns the time at which [`Event::Tick`] must arrive at the latest; `None` if no time is
    /// important.
    pub fn next_wakeup(&self) -> Option<Micros> {
        let delayed = self.delayed.first().map(|(at, _)| *at);
        let request = self.targets.next_request_at(&self.settings);
        let check = self.needs_checks().then_some(self.next_check);
        [delayed, request, check].into_iter().flatten().min()
    }

    /// True if running attempts must be examined from time to time.
    fn needs_checks(&self) -> bool {
        let has_idle_worker = || !self.pool.first_idle().is_empty();
        !self.running_keys.is_empty()
            && (self.settings.attempt_timeout.is_some()
                || self.has_unserved_worker
                || self.pool.has_paused_worker()
                || (self.settings.second_copies && self.waiting.is_empty() && has_idle_worker()))
            || self.has_unserved_worker
    }

    pub fn progress(&self) -> Progress {
        Progress {
            finished: self.statistics.counts.results_accepted,
            running: self.running_keys.len(),
            waiting: self.waiting.len(),
            delayed: self.delayed.len(),
            quarantined: self.tasks.quarantined.len(),
            workers: self.pool.len(),
            computing_workers: self.pool.computing_count(),
            remaining_s: None,
            spread_s: None,
        }
        .with_estimate(&self.statistics)
    }

    pub fn report(&self, now: Micros) -> StatisticsReport {
        self.statistics.report(now, &self.pool)
    }

    /// Returns the statistics for the next master.
    pub fn statistics_up_to(&self, now: Micros) -> RunStatistics {
        self.statistics.up_to(now, &self.pool)
    }

    /// Returns the lowest key of a waiting task.
    pub fn best_waiting_key(&self) -> Option<Key> {
        let delayed_keys = self.delayed.iter().filter_map(|(_, id)| {
            let task = self.tasks.open.get(id)?;
            Some(task.place.key)
        });
        self.waiting
            .best_key()
            .into_iter()
            .chain(delayed_keys)
            .min()
    }

    /// Returns the lowest key of a running task.
    pub fn best_running_key(&self) -> Option<Key> {
        self.running_keys.first().map(|(key, _)| *key)
    }

    /// True if an attempt of the task runs; `None` if the task is not open.
    pub fn is_running(&self, id: TaskId) -> Option<bool> {
        let task = self.tasks.open.get(&id)?;
        Some(matches!(task.stage, Stage::Running(_)))
    }

    pub fn open_task_count(&self) -> usize {
        self.tasks.open.len()
    }

    pub fn waiting_task_count(&self) -> usize {
        self.waiting.len()
    }

    pub fn computing_worker_count(&self) -> usize {
        self.pool.computing_count()
    }

    pub fn class_status(&self) -> BTreeMap<ClassId, ClassStatus> {
        self.targets.status()
    }

    pub fn quarantined_tasks(&self) -> impl Iterator<Item = QuarantinedTask> {
        self.tasks
            .quarantined
            .iter()
            .map(|(task, history)| QuarantinedTask {
                task: *task,
                history: history.clone(),
            })
    }

    /// Returns what is known about each worker.
    pub fn workers(&self, now: Micros) -> Vec<WorkerView> {
        let view = |worker: &Worker| WorkerView {
            worker: worker.id,
            class: worker.class,
            host: worker.host.clone(),
            stage: worker.stage,
            condition: worker.condition,
            factor: worker.factor,
            held_tasks: worker.live_task_count(),
            current_task: worker.held.first().map(|held| held.task),
            current_age: worker.held.first().map_or(0, |_| worker.first_age(now)),
            tasks_finished: worker.tasks_finished,
            times: worker.times_at(now),
        };
        self.pool.iter().map(view).collect()
    }

    /// Returns the factor of a worker; 1 for a worker that is not part of the run.
    pub fn worker_factor(&self, worker: WorkerId) -> f64 {
        self.pool.get(worker).map_or(1.0, |worker| worker.factor)
    }

    /// Returns the host of a worker; `None` for a worker that is not part of the run.
    pub fn worker_host(&self, worker: WorkerId) -> Option<Arc<str>> {
        self.pool.get(worker).map(|worker| worker.host.clone())
    }

    /// True if the worker is part of the run.
    pub fn has_worker(&self, worker: WorkerId) -> bool {
        self.pool.get(worker).is_some()
    }

    /// Adds a worker. Returns false if the run has too many workers; the worker is released then.
    fn add_worker(&mut self, now: Micros, worker: Worker) -> bool {
        let id = worker.id;
        if self.pool.get(id).is_some() {
            return false;
        }
        if self.pool.len() >= self.settings.limits.workers {
            self.outputs.push_back(Output::ReleaseWorker { worker: id });
            return false;
        }
        self.targets.add_present(worker.class);
        self.statistics.counts.workers_started += 1;
        self.pool.insert(worker);
        if let Some(worker) = self.pool.get_mut(id) {
            worker.account(now);
        }
        self.index(id);
        true
    }

    fn mark_ready(&mut self, now: Micros, id: WorkerId, benchmark: Option<Micros>) {
        let Some(worker) = self.pool.get_mut(id) else {
            return;
        };
        worker.account(now);
        if worker.stage == WorkerStage::Starting {
            worker.stage = WorkerStage::Ready;
        }
        worker.factor = self.statistics.factor_of(benchmark);
        self.index(id);
    }

    fn migrate_worker(&mut self, id: WorkerId, host: Arc<str>) {
        if let Some(worker) = self.pool.get_mut(id) {
            worker.host = host;
            self.statistics.counts.worker_migrations += 1;
        }
    }
}
