//! The history in memory: usage, decisions and learned values.
//!
//! The history applies each entry of the event log exactly once. [`History::take_batch`] returns
//! the changes since the last batch, including the position up to which the event log was applied.
//! A batch is written completely or not at all. After a crash, reading continues in the event log
//! at the stored position, so no entry is applied twice or skipped.
//!
//! Every table has a maximum size. If it is exceeded, the oldest entries are dropped. The totals of
//! users include dropped entries.

mod events;
mod size_limits;
pub mod vacated;

pub use size_limits::{ATTEMPTS_MAX, DECISIONS_BYTES_MAX, PROGRAM_BYTES_MAX};

use sempa_proto::event::Event;
use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    Decision, DecisionKind, JobUsage, REPLY_ENTRIES_MAX, RmQuery, RmReply, SuspensionInfo,
    TaskOutcome, TaskUsage, UsageTotals, UserUsage,
};
use sempa_proto::suspend;
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, Tid, frame};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use vacated::VacatedJob;

/// Maximum number of users with totals. Beyond it, the user with the oldest change is dropped.
pub const USERS_MAX: usize = 16_384;
/// Maximum number of jobs.
pub const JOBS_MAX: usize = 8_192;
/// Maximum number of tasks, including running ones.
pub const TASKS_MAX: usize = 65_536;
/// Maximum number of decisions.
pub const DECISIONS_MAX: usize = 20_000;
/// Tolerance for differing clocks of hosts.
const CLOCK_TOLERANCE: Micros = Micros::from_secs(1);
/// Maximum number of tasks that were started from a command line and have no children. Such a task
/// is not a job yet. Beyond it, the oldest is dropped.
const CHILDLESS_MAX: usize = 4_096;

/// A table of the history. The keys are consecutive numbers for jobs, tasks, decisions and vacated
/// jobs. For the other tables they are ids of users, hosts or tasks, unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// The position in the event log. The only key is 0.
    LogPosition,
    Users,
    Jobs,
    Tasks,
    Decisions,
    /// Learned values, each in an encoding of its own. The key identifies the kind of value.
    Learned,
    Hosts,
    /// Tasks from a command line without children: start time and user, by tid.
    Childless,
    /// Hosts that are being drained.
    Drains,
    /// Vacated jobs: checkpointed and ended, to be restarted when there is room.
    Vacated,
}

impl Table {
    pub const ALL: [Table; 10] = [
        Table::LogPosition,
        Table::Users,
        Table::Jobs,
        Table::Tasks,
        Table::Decisions,
        Table::Learned,
        Table::Hosts,
        Table::Childless,
        Table::Drains,
        Table::Vacated,
    ];
}

/// One change that must be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub table: Table,
    pub key: u64,
    /// The new value. `None` deletes the entry.
    pub value: Option<Vec<u8>>,
}

/// Changes that are written together.
pub type Batch = Vec<Change>;

/// Position up to which the event log was applied: number, time and host of the last entry. Time
/// and host show whether an event log belongs to the same virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogPosition {
    /// Number of the last entry; 0 if no entry was applied.
    pub number: u64,
    pub at: Micros,
    pub host: u16,
}

impl LogPosition {
    /// Returns the position after `event`.
    pub fn after(event: &Event) -> LogPosition {
        LogPosition {
            number: event.number,
            at: event.at,
            host: event.host.index(),
        }
    }
}

/// Totals of a user, and the user's Up-Down index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct UserSums {
    sums: UsageTotals,
    /// Time of the last change of the totals.
    changed_at: Micros,
    /// The user's Up-Down index at the time `indexed_at`.
    index: f64,
    indexed_at: Micros,
}

/// The history: usage, decisions and learned values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    log_position: LogPosition,
    users: BTreeMap<u32, UserSums>,
    jobs: BTreeMap<u64, JobUsage>,
    tasks: BTreeMap<u64, TaskUsage>,
    decisions: BTreeMap<u64, Decision>,
    learned: BTreeMap<u64, Vec<u8>>,
    last_number: u64,
    /// Number of the newest job with each tid. A tid may occur several times, because virtual
    /// machines reuse tids.
    job_numbers: HashMap<Tid, u64>,
    /// Number of the newest task with each tid.
    task_numbers: HashMap<Tid, u64>,
    hosts: BTreeMap<HostId, String>,
    /// Start time and user of each task from a command line without children.
    childless: BTreeMap<Tid, (Micros, u32)>,
    /// Hosts that are being drained, with the requesting task and the deadline as time of day.
    drains: BTreeMap<HostId, (Tid, Option<Micros>)>,
    vacated: BTreeMap<u64, VacatedJob>,
    decision_bytes: size_limits::DecisionSizes,
    dirty: BTreeSet<(Table, u64)>,
    /// User to whom tasks belong if their user is not known.
    own_user: u32,
    own_task: Tid,
}

impl History {
    /// Creates an empty history. `own_user`, `own_task`: user and task of the resource manager.
    pub fn new(own_user: u32, own_task: Tid) -> History {
        History {
            own_user,
            own_task,
            ..History::default()
        }
    }

    /// Creates a history from stored entries. Returns it with the number of invalid entries, which
    /// are ignored.
    pub fn read(
        own_user: u32,
        own_task: Tid,
        entries: impl IntoIterator<Item = (Table, u64, Vec<u8>)>,
    ) -> (History, usize) {
        let (mut books, mut bad) = (History::new(own_user, own_task), 0);
        for (sheet, key, value) in entries {
            if books.read_one(sheet, key, &value).is_none() {
                bad += 1;
            }
        }
        books.job_numbers = books
            .jobs
            .iter()
            .map(|(number, job)| (job.job, *number))
            .collect();
        books.task_numbers = books
            .tasks
            .iter()
            .map(|(number, task)| (task.tid, *number))
            .collect();
        let History {
            jobs,
            tasks,
            decisions,
            vacated: parked,
            ..
        } = &books;
        let keys = [
            jobs.keys().last(),
            tasks.keys().last(),
            decisions.keys().last(),
            parked.keys().last(),
        ];
        books.last_number = keys.into_iter().flatten().copied().max().unwrap_or(0);
        (books, bad)
    }

    fn read_one(&mut self, sheet: Table, key: u64, value: &[u8]) -> Option<()> {
        match sheet {
            Table::LogPosition => self.log_position = frame::from_bytes(value).ok()?,
            Table::Users => drop(
                self.users
                    .insert(u32::try_from(key).ok()?, frame::from_bytes(value).ok()?),
            ),
            Table::Jobs => drop(self.jobs.insert(key, frame::from_bytes(value).ok()?)),
            Table::Tasks => drop(self.tasks.insert(key, frame::from_bytes(value).ok()?)),
            Table::Decisions => {
                self.decisions.insert(key, frame::from_bytes(value).ok()?);
                self.decision_bytes.set(key, Some(value.len()));
            }
            Table::Learned => drop(self.learned.insert(key, value.to_vec())),
            Table::Hosts => {
                self.hosts
                    .insert(host_of(key)?, String::from_utf8(value.to_vec()).ok()?);
            }
            Table::Childless => drop(
                self.childless
                    .insert(tid_of_key(key)?, frame::from_bytes(value).ok()?),
            ),
            Table::Drains => drop(
                self.drains
                    .insert(host_of(key)?, frame::from_bytes(value).ok()?),
            ),
            Table::Vacated => drop(self.vacated.insert(key, frame::from_bytes(value).ok()?)),
        }
        Some(())
    }

    /// Returns the position up to which the event log was applied.
    pub fn log_position(&self) -> LogPosition {
        self.log_position
    }

    /// True if there are changes to write.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Returns the changes since the last call, and drops decisions that exceed the size limit.
    pub fn take_batch(&mut self) -> Batch {
        let dirty = std::mem::take(&mut self.dirty);
        let changes = dirty.into_iter().map(|(sheet, key)| Change {
            table: sheet,
            key,
            value: self.encode_entry(sheet, key),
        });
        let mut batch = changes.collect();
        self.drop_oldest_decisions(&mut batch);
        batch
    }

    fn encode_entry(&self, sheet: Table, key: u64) -> Option<Vec<u8>> {
        let bytes = match sheet {
            Table::LogPosition => frame::to_bytes(&self.log_position),
            Table::Users => frame::to_bytes(self.users.get(&u32::try_from(key).ok()?)?),
            Table::Jobs => frame::to_bytes(self.jobs.get(&key)?),
            Table::Tasks => frame::to_bytes(self.tasks.get(&key)?),
            Table::Decisions => frame::to_bytes(self.decisions.get(&key)?),
            Table::Learned => return self.learned.get(&key).cloned(),
            Table::Hosts => {
                return self
                    .hosts
                    .get(&host_of(key)?)
                    .map(|name| name.clone().into_bytes());
            }
            Table::Childless => frame::to_bytes(self.childless.get(&tid_of_key(key)?)?),
            Table::Drains => frame::to_bytes(self.drains.get(&host_of(key)?)?),
            Table::Vacated => frame::to_bytes(self.vacated.get(&key)?),
        };
        // Encoding cannot fail: these are plain records of numbers and short texts.
        bytes.ok()
    }

    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Stores a learned value of this kind. The caller chooses the encoding.
    pub fn set_learned(&mut self, kind: u64, value: Vec<u8>) {
        if self.learned.get(&kind) != Some(&value) {
            self.learned.insert(kind, value);
            self.dirty.insert((Table::Learned, kind));
        }
    }

    /// Returns the learned value of this kind; `None` if none is stored.
    pub fn learned(&self, kind: u64) -> Option<&[u8]> {
        self.learned.get(&kind).map(Vec::as_slice)
    }

    /// Records the names of hosts from the host table.
    pub fn set_host_names<'a>(&mut self, hosts: impl IntoIterator<Item = (HostId, &'a str)>) {
        hosts
            .into_iter()
            .for_each(|(id, name)| self.set_host_name(id, name));
    }

    fn set_host_name(&mut self, id: HostId, name: &str) {
        if self.hosts.get(&id).is_none_or(|known| known != name) {
            self.hosts.insert(id, name.to_string());
            self.dirty.insert((Table::Hosts, u64::from(id.index())));
        }
    }

    fn add_childless(&mut self, tid: Tid, began: Micros, user: u32) {
        self.childless.insert(tid, (began, user));
        self.dirty.insert((Table::Childless, key_of_tid(tid)));
    }

    fn remove_childless(&mut self, tid: Tid) -> Option<(Micros, u32)> {
        let known = self.childless.remove(&tid)?;
        self.dirty.insert((Table::Childless, key_of_tid(tid)));
        Some(known)
    }

    /// Returns the name of a host, or its number if it is unknown.
    pub fn host_name(&self, id: HostId) -> String {
        self.hosts
            .get(&id)
            .cloned()
            .unwrap_or_else(|| id.to_string())
    }

    /// Adds a decision. Beyond the maximum number, drops the oldest.
    pub fn record_decision(&mut self, at: Micros, what: DecisionKind) {
        let number = self.next_number();
        self.decisions.insert(
            number,
            Decision {
                number,
                at,
                kind: size_limits::limit_attempts(what),
            },
        );
        self.dirty.insert((Table::Decisions, number));
        while self.decisions.len() > DECISIONS_MAX {
            let (oldest, _) = self.decisions.pop_first().expect("more than the limit");
            self.dirty.insert((Table::Decisions, oldest));
        }
    }

    /// Prepares for the event log of another virtual machine: marks running tasks as lost, and
    /// forgets tids, hosts, drains and vacated jobs of the former one.
    pub fn start_new_vm(&mut self) {
        let running: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.ended.is_none())
            .map(|(n, _)| *n)
            .collect();
        let at = self.log_position.at;
        running
            .into_iter()
            .for_each(|number| self.end_task(number, at, TaskOutcome::Lost, Usage::default()));
        self.log_position = LogPosition::default();
        self.dirty.insert((Table::LogPosition, 0));
        for map in [&mut self.job_numbers, &mut self.task_numbers] {
            map.clear();
        }
        let loners: Vec<Tid> = self.childless.keys().copied().collect();
        for tid in loners {
            self.remove_childless(tid);
        }
        self.dirty.extend(
            self.hosts
                .keys()
                .map(|host| (Table::Hosts, u64::from(host.index()))),
        );
        self.hosts.clear();
        let drains: Vec<HostId> = self.drains.keys().copied().collect();
        drains
            .into_iter()
            .for_each(|host| self.set_drain(host, None));
        // The checkpoints remain in their store. A user can restart them in this virtual machine.
        self.remove_vacated(|_| true);
    }

    /// Compares the history with a list of all tasks. Marks a task as lost if it runs according to
    /// the history but is not in the list. Corrects the hosts of the others.
    pub fn reconcile(&mut self, now: Micros, list: &[TaskInfo]) {
        let running_tids: BTreeSet<Tid> = list.iter().map(|info| info.tid).collect();
        let gone = |t: &TaskUsage| t.ended.is_none() && !running_tids.contains(&t.tid);
        let gone: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| gone(t))
            .map(|(n, _)| *n)
            .collect();
        gone.into_iter()
            .for_each(|number| self.end_task(number, now, TaskOutcome::Lost, Usage::default()));
        for info in list {
            let host = self.host_name(info.host);
            if let Some(number) = self.task_numbers.get(&info.tid).copied() {
                let task = self.tasks.get_mut(&number).expect("numbered");
                if task.host != host {
                    task.host = host;
                    self.dirty.insert((Table::Tasks, number));
                }
            }
        }
    }

    fn host_gone(&mut self, at: Micros, name: &str) {
        let on = |t: &TaskUsage| t.ended.is_none() && t.host == name;
        let lost: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| on(t))
            .map(|(n, _)| *n)
            .collect();
        lost.into_iter()
            .for_each(|number| self.end_task(number, at, TaskOutcome::Lost, Usage::default()));
    }

    fn task_started(
        &mut self,
        at: Micros,
        tid: Tid,
        (parent, user): (Tid, u32),
        name: &str,
        host: HostId,
    ) {
        let serves = sempa_proto::load::is_load_watcher(name)
            || tid == self.own_task
            || !tid.is_task()
            || tid == parent;
        if serves {
            return;
        }
        if self.task(tid).is_some_and(|t| t.ended.is_none()) {
            return self.set_program(tid, name, host);
        }
        if name.is_empty() && !parent.is_task() {
            self.add_childless(tid, at, user);
            if self.childless.len() > CHILDLESS_MAX {
                let oldest = self
                    .childless
                    .iter()
                    .min_by_key(|(_, (at, _))| *at)
                    .map(|(tid, _)| *tid);
                self.remove_childless(oldest.expect("more than the limit"));
            }
            return;
        }
        if parent.is_task() && self.task(parent).is_none() {
            // If the start of the parent was not recorded, the start of the child is used.
            let (began, user) = self.remove_childless(parent).unwrap_or((at, self.own_user));
            let home = parent
                .birth_host()
                .map(|home| self.host_name(home))
                .unwrap_or_default();
            self.insert_task(began, parent, (parent, user), "", home);
        }
        let job = self.task(parent).map_or(tid, |p| p.job);
        let host = self.host_name(host);
        self.insert_task(at, tid, (job, user), name, host);
    }

    /// Sets program and host of a task that was known only as a parent.
    fn set_program(&mut self, tid: Tid, name: &str, host: HostId) {
        let host = self.host_name(host);
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self
            .tasks
            .get_mut(&number)
            .filter(|t| t.program.is_empty() && !name.is_empty())
        else {
            return;
        };
        (task.program, task.host) = (size_limits::limit_program_name(name), host);
        self.dirty.insert((Table::Tasks, number));
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.program = size_limits::limit_program_name(name);
            self.dirty.insert((Table::Jobs, number));
        }
    }

    /// Merges the tasks of a restarted job into one job. Each host has reported its tasks
    /// separately, and some children before their parents. Such tasks were counted for an earlier
    /// run of the job or as separate jobs.
    fn merge_restarted(&mut self, at: Micros, job: Tid, tasks: &[(Tid, HostId)]) {
        let numbers: Vec<u64> = tasks
            .iter()
            .filter_map(|(tid, _)| self.task_numbers.get(tid).copied())
            .collect();
        let Some(began) = numbers
            .iter()
            .filter_map(|number| self.tasks.get(number))
            .map(|task| task.started)
            .min()
        else {
            return;
        };
        // A task outside the checkpoint may have spawned the first task. The job is then that
        // task's job.
        let job = self.task(job).map_or(job, |first| first.job);
        let Some(to) = self.job_numbers.get(&job).copied() else {
            return;
        };
        for number in numbers {
            let Some(from) = self.job_number_of(number).filter(|from| *from != to) else {
                continue;
            };
            let Some(mut task) = self.tasks.remove(&number) else {
                continue;
            };
            task.job = job;
            let (tid, running) = (task.tid, u64::from(task.ended.is_none()));
            // The task gets a new number, because it must be greater than the number of its job.
            let new_number = self.next_number();
            self.tasks.insert(new_number, task);
            self.task_numbers.insert(tid, new_number);
            self.dirty
                .extend([(Table::Tasks, number), (Table::Tasks, new_number)]);
            self.change_job_sums(from, at, |sums| {
                sums.tasks = sums.tasks.saturating_sub(1);
                sums.running = sums.running.saturating_sub(running);
            });
            self.change_job_sums(to, at, |sums| {
                sums.tasks += 1;
                sums.running += running;
            });
        }
        if let Some(job) = self.jobs.get_mut(&to) {
            job.started = job.started.min(began);
        }
    }

    /// Changes the totals of a job. Deletes the job if it has no tasks.
    fn change_job_sums(&mut self, number: u64, at: Micros, change: impl Fn(&mut UsageTotals)) {
        let Some(job) = self.jobs.get_mut(&number) else {
            return;
        };
        change(&mut job.totals);
        job.ended = (job.totals.running == 0).then_some(job.ended.unwrap_or(at));
        if job.totals.tasks == 0 {
            let tid = job.job;
            self.jobs.remove(&number);
            if self.job_numbers.get(&tid) == Some(&number) {
                self.job_numbers.remove(&tid);
            }
        }
        self.dirty.insert((Table::Jobs, number));
    }

    /// Returns the name of a task's last known host, according to the event log; empty if the task
    /// is unknown.
    fn host_of(&self, tid: Tid) -> String {
        self.task(tid)
            .map(|task| task.host.clone())
            .unwrap_or_default()
    }

    /// Records that a task was suspended with this cause, or resumed (`None`).
    fn set_suspended(&mut self, tid: Tid, at: Micros, cause: Option<suspend::SuspendCause>) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        let before = task.suspension.take();
        task.suspended_total = task.suspended_total
            + before.map_or(Micros::default(), |before| at.since(before.since));
        task.suspension = cause.map(|cause| SuspensionInfo { since: at, cause });
        self.dirty.insert((Table::Tasks, number));
    }

    fn set_job_suspended(&mut self, at: Micros, tid: Tid, by: Tid, suspend: bool) {
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.suspension = suspend.then_some(SuspensionInfo {
                since: at,
                cause: suspend::SuspendCause::JobRequested { requested_by: by },
            });
            self.dirty.insert((Table::Jobs, number));
        }
        self.record_decision(
            at,
            DecisionKind::JobSuspended {
                job: tid,
                suspend,
                requested_by: by,
            },
        );
    }

    fn set_drain(&mut self, host: HostId, drain: Option<(Tid, Option<Micros>)>) {
        let before = match drain {
            Some(drain) => self.drains.insert(host, drain),
            None => self.drains.remove(&host),
        };
        if before != drain {
            self.dirty.insert((Table::Drains, u64::from(host.index())));
        }
    }

    /// Returns the hosts that are being drained, each with the requesting task and the deadline as
    /// time of day.
    pub fn draining_hosts(&self) -> Vec<(HostId, Tid, Option<Micros>)> {
        self.drains
            .iter()
            .map(|(host, (by, until))| (*host, *by, *until))
            .collect()
    }

    /// Returns the job of a task. An unknown task is looked up as the top task of a job.
    pub fn job_of(&self, tid: Tid) -> Option<&JobUsage> {
        self.job(self.task(tid).map_or(tid, |task| task.job))
    }

    /// True if a task is suspended according to the event log.
    pub fn is_suspended(&self, tid: Tid) -> bool {
        self.task(tid).is_some_and(|task| task.suspension.is_some())
    }

    /// Returns the suspended jobs, each with the task that requested its suspension.
    pub fn suspended_jobs(&self) -> impl Iterator<Item = (Tid, Tid)> {
        let current =
            |(number, job): &(&u64, &JobUsage)| self.job_numbers.get(&job.job) == Some(*number);
        let requester = |job: &JobUsage| match job
            .suspension
            .as_ref()
            .filter(|_| job.ended.is_none())?
            .cause
        {
            suspend::SuspendCause::Requested { requested_by: by }
            | suspend::SuspendCause::JobRequested { requested_by: by } => Some((job.job, by)),
            suspend::SuspendCause::Preempted { .. } => None,
        };
        self.jobs
            .iter()
            .filter(current)
            .filter_map(move |(_, job)| requester(job))
    }

    fn task(&self, tid: Tid) -> Option<&TaskUsage> {
        self.task_numbers
            .get(&tid)
            .and_then(|number| self.tasks.get(number))
    }

    /// Adds a task, and its job if the job is new. If the job exists, its user is also the user of
    /// the task.
    fn insert_task(
        &mut self,
        began: Micros,
        tid: Tid,
        (job, user): (Tid, u32),
        program: &str,
        host: String,
    ) {
        let user = self.job(job).map_or(user, |j| j.user);
        if tid == job || self.job(job).is_none() {
            let number = self.next_number();
            let (sums, program) = (
                UsageTotals::default(),
                if tid == job {
                    size_limits::limit_program_name(program)
                } else {
                    String::new()
                },
            );
            self.jobs.insert(
                number,
                JobUsage {
                    job,
                    user,
                    program,
                    started: began,
                    ended: None,
                    totals: sums,
                    suspension: None,
                },
            );
            self.job_numbers.insert(job, number);
        }
        let number = self.next_number();
        let (used, program) = (Usage::default(), size_limits::limit_program_name(program));
        let task = TaskUsage {
            tid,
            job,
            user,
            program,
            host,
            started: began,
            ended: None,
            used,
            migrations: 0,
            evictions: 0,
            counts_toward_limits: false,
            suspension: None,
            suspended_total: Micros::default(),
        };
        self.tasks.insert(number, task);
        self.task_numbers.insert(tid, number);
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_numbers.get(&job).copied(), user, began, |sums| {
            sums.tasks += 1;
            sums.running += 1;
        });
        self.enforce_limits();
    }

    fn job(&self, job: Tid) -> Option<&JobUsage> {
        self.job_numbers
            .get(&job)
            .and_then(|number| self.jobs.get(number))
    }

    /// Returns the number of the job in whose totals a task was counted. Of the jobs with the same
    /// tid this is the last one with a smaller number than the task, because a restarted job gets a
    /// new number.
    fn job_number_of(&self, number: u64) -> Option<u64> {
        let job = self.tasks.get(&number)?.job;
        self.jobs
            .range(..number)
            .rev()
            .find(|(_, entry)| entry.job == job)
            .map(|(number, _)| *number)
    }

    /// Changes the totals of a user and of a job.
    fn change_sums(
        &mut self,
        job: Option<u64>,
        user: u32,
        at: Micros,
        change: impl Fn(&mut UsageTotals),
    ) {
        let entry = self.users.entry(user).or_default();
        entry.changed_at = entry.changed_at.max(at);
        change(&mut entry.sums);
        self.dirty.insert((Table::Users, u64::from(user)));
        if let Some(number) = job
            && let Some(job) = self.jobs.get_mut(&number)
        {
            change(&mut job.totals);
            job.ended = (job.totals.running == 0).then_some(at);
            self.dirty.insert((Table::Jobs, number));
        }
    }

    fn end_task(&mut self, number: u64, at: Micros, how: TaskOutcome, used: Usage) {
        if let Some(tid) = self
            .tasks
            .get(&number)
            .filter(|t| t.suspension.is_some())
            .map(|t| t.tid)
        {
            self.set_suspended(tid, at, None);
        }
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        (task.ended, task.used) = (Some((at, how)), used);
        let wall = Micros(
            at.since(task.started)
                .0
                .saturating_sub(task.suspended_total.0),
        );
        let user = task.user;
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_number_of(number), user, at, |sums| {
            sums.running = sums.running.saturating_sub(1);
            sums.failed += u64::from(!how.is_success());
            sums.used = sums.used.plus(used);
            sums.wall_time = sums.wall_time + wall;
        });
    }

    fn record_migration(&mut self, tid: Tid, to: String, eviction: bool) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        task.migrations += 1;
        task.evictions += u32::from(eviction);
        task.host = to;
        let (user, began) = (task.user, task.started);
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_number_of(number), user, began, |sums| {
            sums.migrations += 1;
            sums.evictions += u64::from(eviction);
        });
    }

    /// Counts the eviction of a task that was ended instead of migrated.
    fn record_eviction(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        task.evictions += 1;
        let (user, began) = (task.user, task.started);
        self.dirty.insert((Table::Tasks, number));
        self.change_sums(self.job_number_of(number), user, began, |sums| {
            sums.evictions += 1
        });
    }

    /// Marks a task as counted against the limits of its user and job.
    pub fn mark_counted(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        if let Some(task) = self
            .tasks
            .get_mut(&number)
            .filter(|t| !t.counts_toward_limits)
        {
            task.counts_toward_limits = true;
            self.dirty.insert((Table::Tasks, number));
        }
    }

    /// Returns the tasks that run according to the history.
    pub fn running(&self) -> impl Iterator<Item = &TaskUsage> {
        self.tasks.values().filter(|t| t.ended.is_none())
    }

    /// Sets the users' Up-Down indices. `at`: the time of day for which they are valid.
    pub fn set_indices(&mut self, at: Micros, indices: impl IntoIterator<Item = (u32, f64)>) {
        for (user, index) in indices {
            let entry = self.users.entry(user).or_default();
            if entry.index != index {
                (entry.index, entry.indexed_at) = (index, at);
                self.dirty.insert((Table::Users, u64::from(user)));
            }
        }
    }

    /// Returns the Up-Down indices as (user, index, time of day).
    pub fn indices(&self) -> impl Iterator<Item = (u32, f64, Micros)> {
        self.users
            .iter()
            .map(|(user, u)| (*user, u.index, u.indexed_at))
    }

    /// Drops entries beyond the maximum sizes of the tables. Ended tasks and jobs are dropped
    /// before running ones, the oldest first.
    fn enforce_limits(&mut self) {
        while self.tasks.len() > TASKS_MAX {
            let Some((number, task)) = take_oldest(&mut self.tasks, |task| task.ended.is_some())
            else {
                break;
            };
            if self.task_numbers.get(&task.tid) == Some(&number) {
                self.task_numbers.remove(&task.tid);
            }
            self.dirty.insert((Table::Tasks, number));
        }
        while self.jobs.len() > JOBS_MAX {
            let Some((number, job)) = take_oldest(&mut self.jobs, |job| job.ended.is_some()) else {
                break;
            };
            if self.job_numbers.get(&job.job) == Some(&number) {
                self.job_numbers.remove(&job.job);
            }
            self.dirty.insert((Table::Jobs, number));
        }
        while self.users.len() > USERS_MAX {
            let oldest = self
                .users
                .iter()
                .min_by_key(|(_, u)| (u.sums.running > 0, u.changed_at))
                .map(|(id, _)| *id);
            let user = oldest.expect("more than the limit");
            self.users.remove(&user);
            self.dirty.insert((Table::Users, u64::from(user)));
        }
    }

    /// Answers a query from the history.
    pub fn answer(&self, question: &RmQuery) -> RmReply {
        match question {
            RmQuery::TaskDecisions(tid) => {
                let task = self.task(*tid).cloned();
                let members = self.tasks_of_job(*tid);
                let about = |what: &DecisionKind| {
                    what.concerns_task(|one| one == *tid || members.contains(&one))
                };
                let decisions = self.decisions_about(about, self.first_start(*tid));
                let unknown = task.is_none() && decisions.is_empty();
                if unknown {
                    RmReply::NotFound
                } else {
                    RmReply::Decisions {
                        task,
                        decisions,
                        host_state: None,
                    }
                }
            }
            RmQuery::HostDecisions(name) => {
                let decisions = self.decisions_about(|what| what.concerns_host(name), None);
                let known = self.hosts.values().any(|host| host == name);
                let unknown = !known && decisions.is_empty();
                if unknown {
                    RmReply::NotFound
                } else {
                    RmReply::Decisions {
                        task: None,
                        decisions,
                        host_state: None,
                    }
                }
            }
            RmQuery::Users { user } => {
                let wanted = self
                    .users
                    .iter()
                    .filter(|(id, _)| user.is_none_or(|user| user == **id));
                let one = |(id, u): (&u32, &UserSums)| UserUsage {
                    user: *id,
                    totals: u.sums,
                    index: u.index,
                };
                RmReply::Users(wanted.map(one).take(REPLY_ENTRIES_MAX).collect())
            }
            RmQuery::Jobs { user } => {
                let wanted = self
                    .jobs
                    .values()
                    .filter(|j| user.is_none_or(|user| user == j.user));
                RmReply::Jobs(newest_entries(wanted))
            }
            RmQuery::Job(tid) => {
                let Some(job) = self.job_of(*tid).cloned() else {
                    return RmReply::NotFound;
                };
                let tasks = newest_entries(
                    self.tasks
                        .values()
                        .filter(|t| t.job == job.job && t.started >= job.started),
                );
                RmReply::Job { job, tasks }
            }
            // Commands, and queries that need the state of the service, are not answered here.
            RmQuery::Suspend { .. }
            | RmQuery::Drain { .. }
            | RmQuery::Undrain { .. }
            | RmQuery::DrainStatus { .. }
            | RmQuery::Kill(_)
            | RmQuery::KillStatus(_)
            | RmQuery::CancelVacated(_)
            | RmQuery::WaitingSpawns { .. } => RmReply::NotFound,
        }
    }

    /// Returns the tasks of the job whose top task is `task_id`; empty if there is no such job.
    fn tasks_of_job(&self, tid: Tid) -> BTreeSet<Tid> {
        let job = self.job(tid).map(|job| job.started);
        let since = job.filter(|_| self.task(tid).is_none_or(|task| task.job == tid));
        let Some(since) = since else {
            return BTreeSet::new();
        };
        self.tasks
            .values()
            .filter(|task| task.job == tid && task.started >= since)
            .map(|task| task.tid)
            .collect()
    }

    /// Returns the start time of the newest task with this tid. For a task that was restarted from
    /// a checkpoint, returns the time of its first start.
    fn first_start(&self, tid: Tid) -> Option<Micros> {
        let mut starts = self
            .tasks
            .values()
            .rev()
            .filter(|task| task.tid == tid)
            .map(|task| task.started);
        let mut began = starts.next()?;
        let restarts = |what: &DecisionKind| matches!(what, DecisionKind::Restarted { tasks, .. } if tasks.iter().any(|(t, _)| *t == tid));
        let restarts: Vec<Micros> = self
            .decisions
            .values()
            .filter(|d| restarts(&d.kind))
            .map(|d| d.at)
            .collect();
        let mut until = Micros(u64::MAX);
        for before in starts {
            if !restarts
                .iter()
                .any(|at| *at + CLOCK_TOLERANCE >= began && *at < until)
            {
                break;
            }
            (until, began) = (began, before);
        }
        Some(began)
    }

    /// Returns the newest decisions for which `wanted` is true. `since`: omits older decisions,
    /// which concern an earlier task with the same tid.
    fn decisions_about(
        &self,
        wanted: impl Fn(&DecisionKind) -> bool,
        since: Option<Micros>,
    ) -> Vec<Decision> {
        let new = |d: &&Decision| since.is_none_or(|since| d.at + CLOCK_TOLERANCE >= since);
        newest_entries(
            self.decisions
                .values()
                .filter(|d| wanted(&d.kind))
                .filter(new),
        )
    }
}

fn key_of_tid(tid: Tid) -> u64 {
    u64::from(tid.raw().cast_unsigned())
}

fn host_of(key: u64) -> Option<HostId> {
    HostId::new(u16::try_from(key).ok()?)
}

fn tid_of_key(key: u64) -> Option<Tid> {
    u32::try_from(key)
        .ok()
        .map(|raw| Tid::from_raw(raw.cast_signed()))
}

/// Returns the newest entries up to the maximum of a reply, in ascending order of time.
fn newest_entries<'a, T: Clone + 'a>(all: impl DoubleEndedIterator<Item = &'a T>) -> Vec<T> {
    let mut list: Vec<T> = all.rev().take(REPLY_ENTRIES_MAX).cloned().collect();
    list.reverse();
    list
}

/// Removes the oldest entry that has ended. If none has ended, removes the oldest entry.
fn take_oldest<T>(all: &mut BTreeMap<u64, T>, has_ended: impl Fn(&T) -> bool) -> Option<(u64, T)> {
    let ended = all
        .iter()
        .find(|(_, one)| has_ended(one))
        .map(|(number, _)| *number);
    let number = ended.or_else(|| all.keys().next().copied())?;
    all.remove_entry(&number)
}
