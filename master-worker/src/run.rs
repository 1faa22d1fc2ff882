//! What a driver can do with its run.

use crate::protocol::{RawTask, Update};
use crate::raw::Failure;
use bytes::Bytes;
use rustc_hash::FxHashMap;
use sempa_work_dispatch::{
    ClassId, Dispatcher, Grain, Groups, Key, Micros, NewTask, Progress, QuarantinedTask, Settings,
    StatisticsReport, TaskId, WorkerId,
};
use std::collections::{BTreeMap, VecDeque};

/// A program that workers execute, and how many of them a run should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerProgram {
    /// Name of the program, as for `pvm_spawn`.
    pub program: String,
    pub arguments: Vec<String>,
    /// Architecture or host to which the workers are restricted.
    pub place: WorkerPlace,
    /// Number of workers that the run should have, or [`WorkerProgram::ONE_PER_HOST`].
    pub target: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkerPlace {
    #[default]
    Anywhere,
    Host(String),
    Architecture(String),
}

impl WorkerProgram {
    /// As many workers as the virtual machine has hosts, also when hosts come and go.
    pub const ONE_PER_HOST: u32 = u32::MAX;

    pub fn new(program: impl Into<String>, target: u32) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            place: WorkerPlace::Anywhere,
            target,
        }
    }
}

/// Whether changes by the driver take effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Live,
    /// A restart repeats a callback: changes are compared with the journal and not carried out.
    Replay,
}

/// A task that a callback added, with its position in the order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AddedTask {
    pub(crate) id: TaskId,
    pub(crate) task: RawTask,
    pub(crate) position: i64,
}

/// Content of a task, and its position among tasks of equal key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StoredPayload {
    pub(crate) task: RawTask,
    pub(crate) position: i64,
}

/// The present master's run: drivers add and prune tasks, set the number of workers and send
/// updates.
#[derive(Debug)]
pub struct Run {
    pub(crate) dispatcher: Dispatcher,
    /// Contents of the open and quarantined tasks.
    pub(crate) payloads: FxHashMap<TaskId, StoredPayload>,
    /// Tasks that the present callback has added.
    pub(crate) added: Vec<AddedTask>,
    /// Tasks that the present callback has pruned.
    pub(crate) pruned: Vec<TaskId>,
    /// Keys that the present callback has changed.
    pub(crate) changed_keys: Vec<(TaskId, f64)>,
    /// The newest update for all workers.
    pub(crate) update: Option<Update>,
    pub(crate) update_is_new: bool,
    /// Updates for single workers that the present callback sends.
    pub(crate) worker_updates: Vec<(WorkerId, Update)>,
    update_count: u64,
    /// New init data of the present callback, and the groups whose workers get them.
    pub(crate) refresh: Option<(Bytes, Option<Groups>)>,
    pub(crate) programs: BTreeMap<ClassId, WorkerProgram>,
    pub(crate) grain: Option<Grain>,
    host_count: u32,
    pub(crate) is_stopped: bool,
    pub(crate) mode: Mode,
    pub(crate) now: Micros,
    generation: u32,
    task_count: u32,
    first_position: i64,
    last_position: i64,
    /// Numbers of the tasks that a repeated callback adds.
    replayed_ids: VecDeque<TaskId>,
}

/// Returns the key with this value; 0 for a value that is not a number.
fn key_of(value: f64) -> Key {
    Key::new(value).unwrap_or_default()
}

impl Run {
    pub(crate) fn new(dispatcher: Dispatcher, generation: u32, now: Micros) -> Self {
        Self {
            dispatcher,
            payloads: FxHashMap::default(),
            added: Vec::new(),
            pruned: Vec::new(),
            changed_keys: Vec::new(),
            update: None,
            update_is_new: false,
            worker_updates: Vec::new(),
            update_count: 0,
            refresh: None,
            programs: BTreeMap::new(),
            grain: None,
            host_count: 1,
            is_stopped: false,
            mode: Mode::Live,
            now,
            generation,
            task_count: 0,
            first_position: 0,
            last_position: 0,
            replayed_ids: VecDeque::new(),
        }
    }

    /// Prepares the repetition of a callback that added tasks with these numbers.
    pub(crate) fn begin_replay(&mut self, ids: impl Iterator<Item = TaskId>) {
        self.added.clear();
        self.replayed_ids = ids.collect();
    }

    /// Restores the content and the position of a task.
    pub(crate) fn restore_payload(&mut self, id: TaskId, task: RawTask, position: i64) {
        self.first_position = self.first_position.min(position);
        self.last_position = self.last_position.max(position);
        self.payloads.insert(id, StoredPayload { task, position });
    }

    /// Adds tasks behind those of equal key, and returns their numbers.
    ///
    /// # Errors
    /// The tasks exceed a limit of the run; none was added.
    pub fn add_tasks(&mut self, tasks: Vec<RawTask>) -> Result<Vec<TaskId>, Failure> {
        self.add(tasks, false)
    }

    /// Adds tasks in front of those of equal key, and returns their numbers.
    ///
    /// # Errors
    /// As [`Run::add_tasks`].
    pub fn add_tasks_in_front(&mut self, tasks: Vec<RawTask>) -> Result<Vec<TaskId>, Failure> {
        self.add(tasks, true)
    }

    fn add(&mut self, tasks: Vec<RawTask>, in_front: bool) -> Result<Vec<TaskId>, Failure> {
        if self.mode == Mode::Replay {
            return Ok(self.add_again(tasks));
        }
        let count = u32::try_from(tasks.len()).unwrap_or(u32::MAX);
        let Some(last) = self.task_count.checked_add(count) else {
            return Err("a master can add at most 4294967295 tasks; start it again".into());
        };
        let first = u64::from(self.generation) << 32 | u64::from(self.task_count);
        let ids: Vec<TaskId> = (1..=u64::from(count)).map(|n| TaskId(first + n)).collect();
        let new_task = |(id, task): (&TaskId, &RawTask)| NewTask {
            id: *id,
            key: key_of(task.key),
            groups: task.groups,
        };
        let new_tasks: Vec<NewTask> = ids.iter().zip(&tasks).map(new_task).collect();
        let first_position = if in_front {
            self.dispatcher.add_tasks_in_front(self.now, &new_tasks)?;
            self.first_position -= i64::from(count);
            self.first_position
        } else {
            self.dispatcher.add_tasks(self.now, &new_tasks)?;
            self.last_position += i64::from(count);
            self.last_position - i64::from(count) + 1
        };
        self.task_count = last;
        for ((id, task), position) in ids.iter().zip(tasks).zip(first_position..) {
            let stored = StoredPayload { task, position };
            self.payloads.insert(*id, stored.clone());
            let StoredPayload { task, position } = stored;
            self.added.push(AddedTask {
                id: *id,
                task,
                position,
            });
        }
        Ok(ids)
    }

    /// Notes the tasks that a repeated callback adds, under their numbers in the journal.
    fn add_again(&mut self, tasks: Vec<RawTask>) -> Vec<TaskId> {
        let mut ids = Vec::with_capacity(tasks.len());
        for task in tasks {
            // The caller reports tasks that the journal does not have.
            let id = self.replayed_ids.pop_front().unwrap_or(TaskId(0));
            ids.push(id);
            self.added.push(AddedTask {
                id,
                task,
                position: 0,
            });
        }
        ids
    }

    /// Removes the waiting tasks whose keys are greater than `bound`. With `with_running`, running
    /// ones are closed too, and their workers are requested to cancel them. Returns the number of
    /// removed tasks.
    pub fn prune(&mut self, bound: f64, with_running: bool) -> usize {
        self.prune_tasks(bound, with_running).len()
    }

    /// As [`Run::prune`]. Returns the removed tasks.
    pub fn prune_tasks(&mut self, bound: f64, with_running: bool) -> Vec<TaskId> {
        if self.mode == Mode::Replay {
            return Vec::new();
        }
        let pruned = self.dispatcher.prune(self.now, key_of(bound), with_running);
        for task in &pruned {
            self.payloads.remove(task);
        }
        self.pruned.extend(&pruned);
        pruned
    }

    /// Changes the key of an open task. Returns false if the task is closed.
    pub fn set_key(&mut self, task: TaskId, key: f64) -> bool {
        if self.mode == Mode::Replay || !self.dispatcher.set_key(task, key_of(key)) {
            return false;
        }
        if let Some(stored) = self.payloads.get_mut(&task) {
            stored.task.key = key_of(key).value();
        }
        self.changed_keys.push((task, key_of(key).value()));
        true
    }

    /// Returns the open tasks in no particular order: number, content, and true if an attempt of
    /// the task runs.
    pub fn open_tasks(&self) -> impl Iterator<Item = (TaskId, &RawTask, bool)> {
        self.payloads.iter().filter_map(|(id, stored)| {
            let is_running = self.dispatcher.is_running(*id)?;
            Some((*id, &stored.task, is_running))
        })
    }

    /// Sets the program of a class of workers and the number of workers that the run should have.
    pub fn set_workers(&mut self, class: ClassId, program: WorkerProgram) {
        let target = program.target;
        self.programs.insert(class, program);
        self.apply_target(class, target);
    }

    fn apply_target(&mut self, class: ClassId, target: u32) {
        let count = match target {
            WorkerProgram::ONE_PER_HOST => self.host_count,
            count => count,
        };
        if self.mode == Mode::Live {
            self.dispatcher.set_target(self.now, class, count);
        }
    }

    /// Sets the number of hosts, which some targets follow.
    pub(crate) fn set_host_count(&mut self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        if std::mem::replace(&mut self.host_count, count) == count {
            return;
        }
        let follows = |(class, program): (&ClassId, &WorkerProgram)| {
            (program.target == WorkerProgram::ONE_PER_HOST).then_some(*class)
        };
        let classes: Vec<ClassId> = self.programs.iter().filter_map(follows).collect();
        for class in classes {
            self.apply_target(class, WorkerProgram::ONE_PER_HOST);
        }
    }

    /// Changes the number of workers of a class.
    pub fn set_target(&mut self, class: ClassId, target: u32) {
        if let Some(program) = self.programs.get_mut(&class) {
            program.target = target;
        }
        self.apply_target(class, target);
    }

    /// Sends data to all workers, also to running ones. A newer update replaces an older one.
    pub fn send_update(&mut self, data: Bytes) {
        self.update = Some(self.new_update(data));
        self.update_is_new = true;
    }

    /// Sends data to one worker. The data replace an older update of this worker.
    pub fn send_update_to(&mut self, worker: WorkerId, data: Bytes) {
        let update = self.new_update(data);
        self.worker_updates.push((worker, update));
    }

    fn new_update(&mut self, data: Bytes) -> Update {
        self.update_count += 1;
        let number = self.update_count;
        Update { number, data }
    }

    /// Replaces the init data: workers that start later get `data`, and present workers of `groups`
    /// before their next task. `None`: present workers keep theirs. After a restart of the master,
    /// all workers get what the driver's `init_data` returns, which must be the newest data.
    pub fn refresh_init_data(&mut self, data: Bytes, groups: Option<Groups>) {
        if self.mode == Mode::Replay {
            return;
        }
        // Workers of an earlier refresh in this callback need the newest data, too.
        let earlier = self.refresh.take().and_then(|(_, groups)| groups);
        let groups = match (earlier, groups) {
            (Some(earlier), Some(groups)) => Some(earlier.union(groups)),
            (earlier, groups) => earlier.or(groups),
        };
        self.refresh = Some((data, groups));
    }

    /// Closes an open task without a result. If the task runs, its worker is requested to cancel
    /// it. Returns false if the task is closed.
    pub fn cancel_task(&mut self, task: TaskId) -> bool {
        if self.mode == Mode::Replay {
            return false;
        }
        let canceled = self.dispatcher.cancel(self.now, &[task]);
        for task in &canceled {
            self.payloads.remove(task);
        }
        self.pruned.extend(&canceled);
        !canceled.is_empty()
    }

    /// Abandons the task that a worker executes: the task is closed without a result, and the
    /// worker is requested to cancel it. Tasks that the worker holds ahead remain. Returns the
    /// task; `None` if the worker executes none.
    pub fn stop_work(&mut self, worker: WorkerId) -> Option<TaskId> {
        let task = self.dispatcher.executing_task(worker)?;
        self.cancel_task(task).then_some(task)
    }

    /// Sets the time limit after which tasks should return their remaining work; `None` for no
    /// limit. The limit follows the number of waiting tasks.
    pub fn set_grain(&mut self, grain: Option<Grain>) {
        self.grain = grain;
    }

    /// Ends the run after the present callback. Open tasks stay in the journal, if there is one.
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    pub fn settings(&self) -> &Settings {
        self.dispatcher.settings()
    }

    pub fn set_settings(&mut self, settings: Settings) {
        if self.mode == Mode::Live {
            self.dispatcher.set_settings(self.now, settings);
        }
    }

    /// Returns the lowest key of a waiting task.
    pub fn best_waiting_key(&self) -> Option<f64> {
        self.dispatcher.best_waiting_key().map(Key::value)
    }

    /// Returns the lowest key of a running task. The lower of both keys is the lower bound of a
    /// tree search.
    pub fn best_running_key(&self) -> Option<f64> {
        self.dispatcher.best_running_key().map(Key::value)
    }

    /// Returns how many tasks should be added so that no worker becomes idle; 0 if enough wait.
    pub fn wanted_tasks(&self) -> usize {
        let wanted = 2 * self.dispatcher.computing_worker_count().max(4);
        wanted.saturating_sub(self.dispatcher.waiting_task_count())
    }

    pub fn progress(&self) -> Progress {
        self.dispatcher.progress()
    }

    pub fn statistics(&self) -> StatisticsReport {
        self.dispatcher.report(self.now)
    }

    pub fn quarantined_tasks(&self) -> Vec<QuarantinedTask> {
        self.dispatcher.quarantined_tasks().collect()
    }
}
