//! The history in memory: usage, decisions and learned values.
//!
//! The history applies each entry of the event log exactly once. [`History::take_batch`] returns
//! the changes since the last batch, including the position up to which the event log was applied.
//! A batch is written completely or not at all. After a crash, reading continues in the event log
//! at the stored position, so no entry is applied twice or skipped.
//!
//! Every table has a maximum size. If it is exceeded, the oldest entries are removed. The totals of
//! users include removed entries.

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
    Decision, DecisionKind, JobUsage, SuspensionStart, TaskOutcome, TaskUsage, UsageTotals,
};
use sempa_proto::suspend;
use sempa_proto::{HostId, Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tables::tid_to_key;
use vacated::VacatedJob;

/// Maximum number of users with totals. If there are more, the user whose totals changed longest
/// ago is removed; users without running tasks come first.
pub const USERS_MAX: usize = 16_384;
/// Maximum number of jobs in the history, including running ones.
pub const JOBS_MAX: usize = 8_192;
/// Maximum number of tasks in the history, including running ones.
pub const TASKS_MAX: usize = 65_536;
/// Maximum number of decisions in the history. If there are more, the oldest one is removed.
pub const DECISIONS_MAX: usize = 20_000;

/// Totals of a user, and the user's Up-Down index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct UserRecord {
    totals: UsageTotals,
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
    users: BTreeMap<u32, UserRecord>,
    jobs: BTreeMap<u64, JobUsage>,
    tasks: BTreeMap<u64, TaskUsage>,
    decisions: BTreeMap<u64, Decision>,
    learned_values: BTreeMap<u64, Vec<u8>>,
    last_number: u64,
    /// Number of the newest job with each tid. Several jobs may have the same tid, because virtual
    /// machines reuse tids.
    job_numbers: HashMap<Tid, u64>,
    /// Number of the newest task with each tid.
    task_numbers: HashMap<Tid, u64>,
    host_names: BTreeMap<HostId, String>,
    /// Start time and user of each task that was started from a command line and has no children.
    childless_tasks: BTreeMap<Tid, (Micros, u32)>,
    /// Hosts that are being drained, each with the requesting task and the deadline as time of day
    /// (`None` without a deadline).
    drains: BTreeMap<HostId, (Tid, Option<Micros>)>,
    vacated_jobs: BTreeMap<u64, VacatedJob>,
    decision_sizes: size_limits::DecisionSizes,
    changed_keys: BTreeSet<(Table, u64)>,
    /// User to whom tasks belong if their user is not known.
    rm_user: u32,
    rm_task: Tid,
}

impl History {
    /// Creates an empty history. `rm_user`, `rm_task`: user and task of the resource manager.
    pub fn new(rm_user: u32, rm_task: Tid) -> Self {
        Self {
            rm_user,
            rm_task,
            ..Self::default()
        }
    }

    /// Creates a history from stored entries. Also returns the number of invalid entries, which are
    /// ignored.
    pub fn from_entries(
        rm_user: u32,
        rm_task: Tid,
        entries: impl IntoIterator<Item = (Table, u64, Vec<u8>)>,
    ) -> (Self, usize) {
        let (mut history, mut invalid_count) = (Self::new(rm_user, rm_task), 0);
        for (table, key, value) in entries {
            if history.read_entry(table, key, &value).is_none() {
                invalid_count += 1;
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
        let Self {
            jobs,
            tasks,
            decisions,
            vacated_jobs: vacated_entries,
            ..
        } = &history;
        let keys = [
            jobs.keys().last(),
            tasks.keys().last(),
            decisions.keys().last(),
            vacated_entries.keys().last(),
        ];
        history.last_number = keys.into_iter().flatten().copied().max().unwrap_or(0);
        (history, invalid_count)
    }

    /// Returns the position up to which the event log was applied.
    pub fn log_position(&self) -> LogPosition {
        self.log_position
    }

    /// True if there are changes that must be written.
    pub fn has_changes(&self) -> bool {
        !self.changed_keys.is_empty()
    }

    /// Returns the changes since the last call. Removes the oldest decisions if their total size
    /// exceeds [`DECISIONS_BYTES_MAX`].
    pub fn take_batch(&mut self) -> Batch {
        let changed_entries = std::mem::take(&mut self.changed_keys);
        let changes = changed_entries.into_iter().map(|(table, key)| Change {
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

    /// Stores a learned value. `value_key` is its key. The caller chooses the encoding.
    pub fn set_learned_value(&mut self, value_key: u64, value: Vec<u8>) {
        if self.learned_values.get(&value_key) != Some(&value) {
            self.learned_values.insert(value_key, value);
            self.changed_keys.insert((Table::LearnedValues, value_key));
        }
    }

    /// Returns the learned value with the key `value_key`; `None` if none is stored.
    pub fn learned_value(&self, value_key: u64) -> Option<&[u8]> {
        self.learned_values.get(&value_key).map(Vec::as_slice)
    }

    /// Records the names of hosts from the host table.
    pub fn set_host_names<'a>(&mut self, hosts: impl IntoIterator<Item = (HostId, &'a str)>) {
        hosts
            .into_iter()
            .for_each(|(id, name)| self.set_host_name(id, name));
    }

    fn set_host_name(&mut self, id: HostId, name: &str) {
        if self
            .host_names
            .get(&id)
            .is_none_or(|current_name| current_name != name)
        {
            self.host_names.insert(id, name.to_string());
            self.changed_keys
                .insert((Table::Hosts, u64::from(id.index())));
        }
    }

    fn add_childless_task(&mut self, tid: Tid, start_time: Micros, user: u32) {
        self.childless_tasks.insert(tid, (start_time, user));
        self.changed_keys
            .insert((Table::ChildlessTasks, tid_to_key(tid)));
    }

    fn remove_childless_task(&mut self, tid: Tid) -> Option<(Micros, u32)> {
        let start_and_user = self.childless_tasks.remove(&tid)?;
        self.changed_keys
            .insert((Table::ChildlessTasks, tid_to_key(tid)));
        Some(start_and_user)
    }

    /// Returns the name of a host, or its number if the host is unknown.
    pub fn host_name(&self, id: HostId) -> String {
        self.host_names
            .get(&id)
            .cloned()
            .unwrap_or_else(|| id.to_string())
    }

    /// Adds a decision. If there are more than [`DECISIONS_MAX`], removes the oldest one.
    pub fn record_decision(&mut self, at: Micros, decision_kind: DecisionKind) {
        let number = self.next_number();
        self.decisions.insert(
            number,
            Decision {
                number,
                at,
                kind: size_limits::truncate_attempts(decision_kind),
            },
        );
        self.changed_keys.insert((Table::Decisions, number));
        while self.decisions.len() > DECISIONS_MAX {
            let (oldest_number, _) = self.decisions.pop_first().expect("more than the limit");
            self.changed_keys.insert((Table::Decisions, oldest_number));
        }
    }

    /// Prepares for the event log of another virtual machine. Marks running tasks as lost, and
    /// removes the tids, hosts, drains and vacated jobs of the former virtual machine.
    pub fn start_new_vm(&mut self) {
        let running_numbers: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.end.is_none())
            .map(|(n, _)| *n)
            .collect();
        let lost_at = self.log_position.event_time;
        running_numbers
            .into_iter()
            .for_each(|number| self.end_task(number, lost_at, TaskOutcome::Lost, Usage::default()));
        self.log_position = LogPosition::default();
        self.changed_keys.insert((Table::LogPosition, 0));
        for numbers in [&mut self.job_numbers, &mut self.task_numbers] {
            numbers.clear();
        }
        let childless_tids: Vec<Tid> = self.childless_tasks.keys().copied().collect();
        for tid in childless_tids {
            self.remove_childless_task(tid);
        }
        self.changed_keys.extend(
            self.host_names
                .keys()
                .map(|host| (Table::Hosts, u64::from(host.index()))),
        );
        self.host_names.clear();
        let drains: Vec<HostId> = self.drains.keys().copied().collect();
        drains
            .into_iter()
            .for_each(|host| self.set_drain(host, None));
        // The checkpoints remain in their store. A user can restart them in the new virtual
        // machine.
        self.remove_vacated(|_| true);
    }

    /// Returns the name of a task's last known host, according to the event log; empty if the task
    /// is unknown.
    fn host_of(&self, tid: Tid) -> String {
        self.task(tid)
            .map(|task| task.host.clone())
            .unwrap_or_default()
    }

    /// Records that a task was suspended with this cause, or that it was resumed (`None`).
    fn set_suspended(
        &mut self,
        tid: Tid,
        change_time: Micros,
        cause: Option<suspend::SuspendCause>,
    ) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.end.is_none()) else {
            return;
        };
        let previous_suspension = task.suspension.take();
        task.suspended_time = task.suspended_time
            + previous_suspension.map_or(Micros::default(), |previous_suspension| {
                change_time.since(previous_suspension.since)
            });
        task.suspension = cause.map(|cause| SuspensionStart {
            since: change_time,
            cause,
        });
        self.changed_keys.insert((Table::Tasks, number));
    }

    fn set_job_suspended(&mut self, change_time: Micros, tid: Tid, requester: Tid, suspend: bool) {
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.suspension = suspend.then_some(SuspensionStart {
                since: change_time,
                cause: suspend::SuspendCause::JobRequested {
                    requested_by: requester,
                },
            });
            self.changed_keys.insert((Table::Jobs, number));
        }
        self.record_decision(
            change_time,
            DecisionKind::JobSuspended {
                job: tid,
                suspend,
                requested_by: requester,
            },
        );
    }

    fn set_drain(&mut self, host: HostId, drain: Option<(Tid, Option<Micros>)>) {
        let previous_drain = match drain {
            Some(drain) => self.drains.insert(host, drain),
            None => self.drains.remove(&host),
        };
        if previous_drain != drain {
            self.changed_keys
                .insert((Table::Drains, u64::from(host.index())));
        }
    }

    /// Returns the hosts that are being drained, each with the requesting task and the deadline as
    /// time of day.
    pub fn draining_hosts(&self) -> Vec<(HostId, Tid, Option<Micros>)> {
        self.drains
            .iter()
            .map(|(host, (requester, wall_deadline))| (*host, *requester, *wall_deadline))
            .collect()
    }

    /// Returns the job of a task. The tid of an unknown task is looked up as the tid of a job's
    /// first task.
    pub fn job_of(&self, tid: Tid) -> Option<&JobUsage> {
        self.job(self.task(tid).map_or(tid, |task| task.job))
    }

    /// True if a task is suspended according to the event log.
    pub fn is_suspended(&self, tid: Tid) -> bool {
        self.task(tid).is_some_and(|task| task.suspension.is_some())
    }

    /// Returns the suspended jobs, each with the task that requested its suspension.
    pub fn suspended_jobs(&self) -> impl Iterator<Item = (Tid, Tid)> {
        let is_newest_with_tid =
            |(number, job): &(&u64, &JobUsage)| self.job_numbers.get(&job.job) == Some(*number);
        let requester = |job: &JobUsage| match job
            .suspension
            .as_ref()
            .filter(|_| job.ended_at.is_none())?
            .cause
        {
            suspend::SuspendCause::Requested {
                requested_by: requesting_task,
            }
            | suspend::SuspendCause::JobRequested {
                requested_by: requesting_task,
            } => Some((job.job, requesting_task)),
            suspend::SuspendCause::Preempted { .. } => None,
        };
        self.jobs
            .iter()
            .filter(is_newest_with_tid)
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
    pub fn running_tasks(&self) -> impl Iterator<Item = &TaskUsage> {
        self.tasks.values().filter(|t| t.end.is_none())
    }

    /// Sets the users' Up-Down indices. `valid_at`: the time of day at which they are valid.
    pub fn set_user_indices(
        &mut self,
        valid_at: Micros,
        indices: impl IntoIterator<Item = (u32, f64)>,
    ) {
        for (user, index) in indices {
            let entry = self.users.entry(user).or_default();
            if entry.index != index {
                (entry.index, entry.indexed_at) = (index, valid_at);
                self.changed_keys.insert((Table::Users, u64::from(user)));
            }
        }
    }

    /// Returns the Up-Down indices as (user, index, time of day).
    pub fn user_indices(&self) -> impl Iterator<Item = (u32, f64, Micros)> {
        self.users
            .iter()
            .map(|(user, u)| (*user, u.index, u.indexed_at))
    }

    /// Removes entries beyond the maximum sizes of the tables, the oldest first. Ended tasks and
    /// jobs are removed before running ones.
    fn remove_excess_entries(&mut self) {
        while self.tasks.len() > TASKS_MAX {
            let Some((number, task)) = take_oldest(&mut self.tasks, |task| task.end.is_some())
            else {
                break;
            };
            if self.task_numbers.get(&task.tid) == Some(&number) {
                self.task_numbers.remove(&task.tid);
            }
            self.changed_keys.insert((Table::Tasks, number));
        }
        while self.jobs.len() > JOBS_MAX {
            let Some((number, job)) = take_oldest(&mut self.jobs, |job| job.ended_at.is_some())
            else {
                break;
            };
            if self.job_numbers.get(&job.job) == Some(&number) {
                self.job_numbers.remove(&job.job);
            }
            self.changed_keys.insert((Table::Jobs, number));
        }
        while self.users.len() > USERS_MAX {
            let oldest_user = self
                .users
                .iter()
                .min_by_key(|(_, u)| (u.totals.running_tasks > 0, u.changed_at))
                .map(|(id, _)| *id);
            let user = oldest_user.expect("more than the limit");
            self.users.remove(&user);
            self.changed_keys.insert((Table::Users, u64::from(user)));
        }
    }
}

/// Removes the oldest entry that has ended. If no entry has ended, removes the oldest entry.
/// Returns `None` if the table is empty.
fn take_oldest<T>(
    entries: &mut BTreeMap<u64, T>,
    has_ended: impl Fn(&T) -> bool,
) -> Option<(u64, T)> {
    let ended_number = entries
        .iter()
        .find(|(_, entry)| has_ended(entry))
        .map(|(number, _)| *number);
    let number = ended_number.or_else(|| entries.keys().next().copied())?;
    entries.remove_entry(&number)
}
