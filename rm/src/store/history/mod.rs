//! The history in memory: usage, decisions and learned values.
//!
//! The history applies each entry of the event log exactly once. [`History::take_batch`] returns
//! the changes since the last batch, including the position up to which the event log was applied.
//! A batch is written completely or not at all. After a crash, reading continues in the event log
//! at the stored position, so no entry is applied twice or skipped.
//!
//! Every table has a maximum size. If it is exceeded, the oldest entries are dropped. The totals of
//! users include dropped entries.

mod answers;
mod events;
mod size_limits;
mod tables;
mod tasks;
pub mod vacated;

pub use size_limits::{ATTEMPTS_MAX, DECISIONS_BYTES_MAX, PROGRAM_BYTES_MAX};
pub use tables::{Batch, Change, LogPosition, Table};

use sempa_proto::migration::Usage;
use sempa_proto::rm::{
    Decision, DecisionKind, JobUsage, SuspensionInfo, TaskOutcome, TaskUsage, UsageTotals,
};
use sempa_proto::suspend;
use sempa_proto::{HostId, Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tables::key_of_tid;
use vacated::VacatedJob;

/// Maximum number of users with totals. Beyond it, the user with the oldest change is dropped.
pub const USERS_MAX: usize = 16_384;
/// Maximum number of jobs.
pub const JOBS_MAX: usize = 8_192;
/// Maximum number of tasks, including running ones.
pub const TASKS_MAX: usize = 65_536;
/// Maximum number of decisions.
pub const DECISIONS_MAX: usize = 20_000;

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
        let (mut history, mut bad) = (History::new(own_user, own_task), 0);
        for (table, key, value) in entries {
            if history.read_one(table, key, &value).is_none() {
                bad += 1;
            }
        }
        history.job_numbers = history
            .jobs
            .iter()
            .map(|(number, job)| (job.job, *number))
            .collect();
        history.task_numbers = history
            .tasks
            .iter()
            .map(|(number, task)| (task.tid, *number))
            .collect();
        let History {
            jobs,
            tasks,
            decisions,
            vacated,
            ..
        } = &history;
        let keys = [
            jobs.keys().last(),
            tasks.keys().last(),
            decisions.keys().last(),
            vacated.keys().last(),
        ];
        history.last_number = keys.into_iter().flatten().copied().max().unwrap_or(0);
        (history, bad)
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
        let changes = dirty.into_iter().map(|(table, key)| Change {
            table,
            key,
            value: self.encode_entry(table, key),
        });
        let mut batch = changes.collect();
        self.drop_oldest_decisions(&mut batch);
        batch
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

    fn job(&self, job: Tid) -> Option<&JobUsage> {
        self.job_numbers
            .get(&job)
            .and_then(|number| self.jobs.get(number))
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
