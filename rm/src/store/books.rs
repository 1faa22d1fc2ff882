//! The history in memory: usage, decisions and learned values.
//!
//! The history applies each entry of the event log exactly once. [`Books::batch`] returns the
//! changes since the last batch, including the position up to which the event log was applied. A
//! batch is written completely or not at all. After a crash, reading continues in the event log at
//! the stored position, so no entry is applied twice or skipped.
//!
//! Every table has a maximum size. If it is exceeded, the oldest entries are dropped. The totals of
//! users include dropped entries.

mod events;
pub mod parked;
mod room;

pub use room::{ATTEMPTS_MAX, DECISIONS_BYTES_MAX, PROGRAM_BYTES_MAX};

use parked::Parked;
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

/// Maximum number of users with totals. Beyond it, the user with the oldest change is dropped.
pub const USERS_MAX: usize = 16_384;
/// Maximum number of jobs.
pub const JOBS_MAX: usize = 8_192;
/// Maximum number of tasks, including running ones.
pub const TASKS_MAX: usize = 65_536;
/// Maximum number of decisions.
pub const DECISIONS_MAX: usize = 20_000;
/// Tolerance for differing clocks of hosts.
const SLACK: Micros = Micros::from_secs(1);
/// Maximum number of tasks that were started from a command line and have no children. Such a task
/// is not a job yet. Beyond it, the oldest is dropped.
const LONERS_MAX: usize = 4_096;

/// A table of the history. The keys are consecutive numbers for jobs, tasks, decisions and vacated
/// jobs. For the other tables they are ids of users, hosts or tasks, unless noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sheet {
    /// The position in the event log. The only key is 0.
    Place,
    Users,
    Jobs,
    Tasks,
    Decisions,
    /// Learned values, each in an encoding of its own. The key identifies the kind of value.
    Learned,
    Hosts,
    /// Tasks from a command line without children: start time and user, by tid.
    Loners,
    /// Hosts that are being drained.
    Drains,
    /// Vacated jobs: checkpointed and ended, to be restarted when there is room.
    Parked,
}

impl Sheet {
    pub const ALL: [Sheet; 10] = [
        Sheet::Place,
        Sheet::Users,
        Sheet::Jobs,
        Sheet::Tasks,
        Sheet::Decisions,
        Sheet::Learned,
        Sheet::Hosts,
        Sheet::Loners,
        Sheet::Drains,
        Sheet::Parked,
    ];
}

/// One change that must be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub sheet: Sheet,
    pub key: u64,
    /// The new value. `None` deletes the entry.
    pub value: Option<Vec<u8>>,
}

/// Changes that are written together.
pub type Batch = Vec<Change>;

/// Position up to which the event log was applied: number, time and host of the last entry. Time
/// and host show whether an event log belongs to the same virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Number of the last entry; 0 if no entry was applied.
    pub number: u64,
    pub at: Micros,
    pub host: u16,
}

impl Place {
    /// Returns the position after `event`.
    pub fn behind(event: &Event) -> Place {
        Place {
            number: event.number,
            at: event.at,
            host: event.host.index(),
        }
    }
}

/// Totals of a user, and the user's Up-Down index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct User {
    sums: UsageTotals,
    /// Time of the last change of the totals.
    changed: Micros,
    /// The user's Up-Down index at the time `indexed`.
    index: f64,
    indexed: Micros,
}

/// The history: usage, decisions and learned values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Books {
    place: Place,
    users: BTreeMap<u32, User>,
    jobs: BTreeMap<u64, JobUsage>,
    tasks: BTreeMap<u64, TaskUsage>,
    decisions: BTreeMap<u64, Decision>,
    learned: BTreeMap<u64, Vec<u8>>,
    last: u64,
    /// Number of the newest job with each tid. A tid may occur several times, because virtual
    /// machines reuse tids.
    job_numbers: HashMap<Tid, u64>,
    /// Number of the newest task with each tid.
    task_numbers: HashMap<Tid, u64>,
    hosts: BTreeMap<HostId, String>,
    /// Start time and user of each task from a command line without children.
    loners: BTreeMap<Tid, (Micros, u32)>,
    /// Hosts that are being drained, with the requesting task and the deadline as time of day.
    drains: BTreeMap<HostId, (Tid, Option<Micros>)>,
    parked: BTreeMap<u64, Parked>,
    room: room::Room,
    dirty: BTreeSet<(Sheet, u64)>,
    /// User to whom tasks belong if their user is not known.
    own_user: u32,
    own_task: Tid,
}

impl Books {
    /// Creates an empty history. `own_user`, `own_task`: user and task of the resource manager.
    pub fn new(own_user: u32, own_task: Tid) -> Books {
        Books {
            own_user,
            own_task,
            ..Books::default()
        }
    }

    /// Creates a history from stored entries. Returns it with the number of invalid entries, which
    /// are ignored.
    pub fn read(
        own_user: u32,
        own_task: Tid,
        entries: impl IntoIterator<Item = (Sheet, u64, Vec<u8>)>,
    ) -> (Books, usize) {
        let (mut books, mut bad) = (Books::new(own_user, own_task), 0);
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
        let Books {
            jobs,
            tasks,
            decisions,
            parked,
            ..
        } = &books;
        let keys = [
            jobs.keys().last(),
            tasks.keys().last(),
            decisions.keys().last(),
            parked.keys().last(),
        ];
        books.last = keys.into_iter().flatten().copied().max().unwrap_or(0);
        (books, bad)
    }

    fn read_one(&mut self, sheet: Sheet, key: u64, value: &[u8]) -> Option<()> {
        match sheet {
            Sheet::Place => self.place = frame::from_bytes(value).ok()?,
            Sheet::Users => drop(
                self.users
                    .insert(u32::try_from(key).ok()?, frame::from_bytes(value).ok()?),
            ),
            Sheet::Jobs => drop(self.jobs.insert(key, frame::from_bytes(value).ok()?)),
            Sheet::Tasks => drop(self.tasks.insert(key, frame::from_bytes(value).ok()?)),
            Sheet::Decisions => {
                self.decisions.insert(key, frame::from_bytes(value).ok()?);
                self.room.put(key, Some(value.len()));
            }
            Sheet::Learned => drop(self.learned.insert(key, value.to_vec())),
            Sheet::Hosts => {
                self.hosts
                    .insert(host_of(key)?, String::from_utf8(value.to_vec()).ok()?);
            }
            Sheet::Loners => drop(
                self.loners
                    .insert(tid_of(key)?, frame::from_bytes(value).ok()?),
            ),
            Sheet::Drains => drop(
                self.drains
                    .insert(host_of(key)?, frame::from_bytes(value).ok()?),
            ),
            Sheet::Parked => drop(self.parked.insert(key, frame::from_bytes(value).ok()?)),
        }
        Some(())
    }

    /// Returns the position up to which the event log was applied.
    pub fn place(&self) -> Place {
        self.place
    }

    /// True if there are changes to write.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Returns the changes since the last call, and drops decisions that exceed the size limit.
    pub fn batch(&mut self) -> Batch {
        let dirty = std::mem::take(&mut self.dirty);
        let changes = dirty.into_iter().map(|(sheet, key)| Change {
            sheet,
            key,
            value: self.value(sheet, key),
        });
        let mut batch = changes.collect();
        self.make_room(&mut batch);
        batch
    }

    fn value(&self, sheet: Sheet, key: u64) -> Option<Vec<u8>> {
        let bytes = match sheet {
            Sheet::Place => frame::to_bytes(&self.place),
            Sheet::Users => frame::to_bytes(self.users.get(&u32::try_from(key).ok()?)?),
            Sheet::Jobs => frame::to_bytes(self.jobs.get(&key)?),
            Sheet::Tasks => frame::to_bytes(self.tasks.get(&key)?),
            Sheet::Decisions => frame::to_bytes(self.decisions.get(&key)?),
            Sheet::Learned => return self.learned.get(&key).cloned(),
            Sheet::Hosts => {
                return self
                    .hosts
                    .get(&host_of(key)?)
                    .map(|name| name.clone().into_bytes());
            }
            Sheet::Loners => frame::to_bytes(self.loners.get(&tid_of(key)?)?),
            Sheet::Drains => frame::to_bytes(self.drains.get(&host_of(key)?)?),
            Sheet::Parked => frame::to_bytes(self.parked.get(&key)?),
        };
        // Encoding cannot fail: these are plain records of numbers and short texts.
        bytes.ok()
    }

    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Stores a learned value of this kind. The caller chooses the encoding.
    pub fn learn(&mut self, kind: u64, value: Vec<u8>) {
        if self.learned.get(&kind) != Some(&value) {
            self.learned.insert(kind, value);
            self.dirty.insert((Sheet::Learned, kind));
        }
    }

    /// Returns the learned value of this kind; `None` if none is stored.
    pub fn learned(&self, kind: u64) -> Option<&[u8]> {
        self.learned.get(&kind).map(Vec::as_slice)
    }

    /// Records the names of hosts from the host table.
    pub fn know_hosts<'a>(&mut self, hosts: impl IntoIterator<Item = (HostId, &'a str)>) {
        hosts
            .into_iter()
            .for_each(|(id, name)| self.know_host(id, name));
    }

    fn know_host(&mut self, id: HostId, name: &str) {
        if self.hosts.get(&id).is_none_or(|known| known != name) {
            self.hosts.insert(id, name.to_string());
            self.dirty.insert((Sheet::Hosts, u64::from(id.index())));
        }
    }

    fn loner(&mut self, tid: Tid, began: Micros, user: u32) {
        self.loners.insert(tid, (began, user));
        self.dirty.insert((Sheet::Loners, key_of(tid)));
    }

    fn no_loner(&mut self, tid: Tid) -> Option<(Micros, u32)> {
        let known = self.loners.remove(&tid)?;
        self.dirty.insert((Sheet::Loners, key_of(tid)));
        Some(known)
    }

    /// Returns the name of a host, or its number if it is unknown.
    pub fn host(&self, id: HostId) -> String {
        self.hosts
            .get(&id)
            .cloned()
            .unwrap_or_else(|| id.to_string())
    }

    /// Adds a decision. Beyond the maximum number, drops the oldest.
    pub fn decided(&mut self, at: Micros, what: DecisionKind) {
        let number = self.number();
        self.decisions.insert(
            number,
            Decision {
                number,
                at,
                kind: room::shortened(what),
            },
        );
        self.dirty.insert((Sheet::Decisions, number));
        while self.decisions.len() > DECISIONS_MAX {
            let (oldest, _) = self.decisions.pop_first().expect("more than the limit");
            self.dirty.insert((Sheet::Decisions, oldest));
        }
    }

    /// Prepares for the event log of another virtual machine: marks running tasks as lost, and
    /// forgets tids, hosts, drains and vacated jobs of the former one.
    pub fn begin_anew(&mut self) {
        let running: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| t.ended.is_none())
            .map(|(n, _)| *n)
            .collect();
        let at = self.place.at;
        running
            .into_iter()
            .for_each(|number| self.end(number, at, TaskOutcome::Lost, Usage::default()));
        self.place = Place::default();
        self.dirty.insert((Sheet::Place, 0));
        for map in [&mut self.job_numbers, &mut self.task_numbers] {
            map.clear();
        }
        let loners: Vec<Tid> = self.loners.keys().copied().collect();
        for tid in loners {
            self.no_loner(tid);
        }
        self.dirty.extend(
            self.hosts
                .keys()
                .map(|host| (Sheet::Hosts, u64::from(host.index()))),
        );
        self.hosts.clear();
        let drains: Vec<HostId> = self.drains.keys().copied().collect();
        drains.into_iter().for_each(|host| self.drain(host, None));
        // The checkpoints remain in their store. A user can restart them in this virtual machine.
        self.unpark(|_| true);
    }

    /// Compares the history with a list of all tasks. Marks a task as lost if it runs according to
    /// the history but is not in the list. Corrects the hosts of the others.
    pub fn reconcile(&mut self, now: Micros, list: &[TaskInfo]) {
        let there: BTreeSet<Tid> = list.iter().map(|info| info.tid).collect();
        let gone = |t: &TaskUsage| t.ended.is_none() && !there.contains(&t.tid);
        let gone: Vec<u64> = self
            .tasks
            .iter()
            .filter(|(_, t)| gone(t))
            .map(|(n, _)| *n)
            .collect();
        gone.into_iter()
            .for_each(|number| self.end(number, now, TaskOutcome::Lost, Usage::default()));
        for info in list {
            let host = self.host(info.host);
            if let Some(number) = self.task_numbers.get(&info.tid).copied() {
                let task = self.tasks.get_mut(&number).expect("numbered");
                if task.host != host {
                    task.host = host;
                    self.dirty.insert((Sheet::Tasks, number));
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
            .for_each(|number| self.end(number, at, TaskOutcome::Lost, Usage::default()));
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
        if self.known(tid).is_some_and(|t| t.ended.is_none()) {
            return self.described(tid, name, host);
        }
        if name.is_empty() && !parent.is_task() {
            self.loner(tid, at, user);
            if self.loners.len() > LONERS_MAX {
                let oldest = self
                    .loners
                    .iter()
                    .min_by_key(|(_, (at, _))| *at)
                    .map(|(tid, _)| *tid);
                self.no_loner(oldest.expect("more than the limit"));
            }
            return;
        }
        if parent.is_task() && self.known(parent).is_none() {
            // If the start of the parent was not recorded, the start of the child is used.
            let (began, user) = self.no_loner(parent).unwrap_or((at, self.own_user));
            let home = parent
                .birth_host()
                .map(|home| self.host(home))
                .unwrap_or_default();
            self.take_up(began, parent, (parent, user), "", home);
        }
        let job = self.known(parent).map_or(tid, |p| p.job);
        let host = self.host(host);
        self.take_up(at, tid, (job, user), name, host);
    }

    /// Sets program and host of a task that was known only as a parent.
    fn described(&mut self, tid: Tid, name: &str, host: HostId) {
        let host = self.host(host);
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
        (task.program, task.host) = (room::program(name), host);
        self.dirty.insert((Sheet::Tasks, number));
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.program = room::program(name);
            self.dirty.insert((Sheet::Jobs, number));
        }
    }

    /// Merges the tasks of a restarted job into one job. Each host has reported its tasks
    /// separately, and some children before their parents. Such tasks were counted for an earlier
    /// run of the job or as separate jobs.
    fn restarted(&mut self, at: Micros, job: Tid, tasks: &[(Tid, HostId)]) {
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
        let job = self.known(job).map_or(job, |first| first.job);
        let Some(to) = self.job_numbers.get(&job).copied() else {
            return;
        };
        for number in numbers {
            let Some(from) = self.counted_to(number).filter(|from| *from != to) else {
                continue;
            };
            let Some(mut task) = self.tasks.remove(&number) else {
                continue;
            };
            task.job = job;
            let (tid, running) = (task.tid, u64::from(task.ended.is_none()));
            // The task gets a new number, because it must be greater than the number of its job.
            let behind = self.number();
            self.tasks.insert(behind, task);
            self.task_numbers.insert(tid, behind);
            self.dirty
                .extend([(Sheet::Tasks, number), (Sheet::Tasks, behind)]);
            self.recount(from, at, |sums| {
                sums.tasks = sums.tasks.saturating_sub(1);
                sums.running = sums.running.saturating_sub(running);
            });
            self.recount(to, at, |sums| {
                sums.tasks += 1;
                sums.running += running;
            });
        }
        if let Some(job) = self.jobs.get_mut(&to) {
            job.started = job.started.min(began);
        }
    }

    /// Changes the totals of a job. Deletes the job if it has no tasks.
    fn recount(&mut self, number: u64, at: Micros, change: impl Fn(&mut UsageTotals)) {
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
        self.dirty.insert((Sheet::Jobs, number));
    }

    /// Returns the name of a task's last known host, according to the event log; empty if the task
    /// is unknown.
    fn host_of(&self, tid: Tid) -> String {
        self.known(tid)
            .map(|task| task.host.clone())
            .unwrap_or_default()
    }

    /// Records that a task was suspended with this cause, or resumed (`None`).
    fn suspended(&mut self, tid: Tid, at: Micros, cause: Option<suspend::SuspendCause>) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        let before = task.suspended.take();
        task.suspended_total = task.suspended_total
            + before.map_or(Micros::default(), |before| at.since(before.since));
        task.suspended = cause.map(|cause| SuspensionInfo { since: at, cause });
        self.dirty.insert((Sheet::Tasks, number));
    }

    fn job_suspended(&mut self, at: Micros, tid: Tid, by: Tid, suspend: bool) {
        if let Some(number) = self.job_numbers.get(&tid).copied()
            && let Some(job) = self.jobs.get_mut(&number)
        {
            job.suspended = suspend.then_some(SuspensionInfo {
                since: at,
                cause: suspend::SuspendCause::JobRequested { requested_by: by },
            });
            self.dirty.insert((Sheet::Jobs, number));
        }
        self.decided(
            at,
            DecisionKind::JobSuspended {
                job: tid,
                suspend,
                requested_by: by,
            },
        );
    }

    fn drain(&mut self, host: HostId, drain: Option<(Tid, Option<Micros>)>) {
        let before = match drain {
            Some(drain) => self.drains.insert(host, drain),
            None => self.drains.remove(&host),
        };
        if before != drain {
            self.dirty.insert((Sheet::Drains, u64::from(host.index())));
        }
    }

    /// Returns the hosts that are being drained, each with the requesting task and the deadline as
    /// time of day.
    pub fn drained(&self) -> Vec<(HostId, Tid, Option<Micros>)> {
        self.drains
            .iter()
            .map(|(host, (by, until))| (*host, *by, *until))
            .collect()
    }

    /// Returns the job of a task. An unknown task is looked up as the top task of a job.
    pub fn job_of(&self, tid: Tid) -> Option<&JobUsage> {
        self.job(self.known(tid).map_or(tid, |task| task.job))
    }

    /// True if a task is suspended according to the event log.
    pub fn is_suspended(&self, tid: Tid) -> bool {
        self.known(tid).is_some_and(|task| task.suspended.is_some())
    }

    /// Returns the suspended jobs, each with the task that requested its suspension.
    pub fn suspended_jobs(&self) -> impl Iterator<Item = (Tid, Tid)> {
        let current =
            |(number, job): &(&u64, &JobUsage)| self.job_numbers.get(&job.job) == Some(*number);
        let who = |job: &JobUsage| match job
            .suspended
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
            .filter_map(move |(_, job)| who(job))
    }

    fn known(&self, tid: Tid) -> Option<&TaskUsage> {
        self.task_numbers
            .get(&tid)
            .and_then(|number| self.tasks.get(number))
    }

    /// Adds a task, and its job if the job is new. If the job exists, its user is also the user of
    /// the task.
    fn take_up(
        &mut self,
        began: Micros,
        tid: Tid,
        (job, user): (Tid, u32),
        program: &str,
        host: String,
    ) {
        let user = self.job(job).map_or(user, |j| j.user);
        if tid == job || self.job(job).is_none() {
            let number = self.number();
            let (sums, program) = (
                UsageTotals::default(),
                if tid == job {
                    room::program(program)
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
                    suspended: None,
                },
            );
            self.job_numbers.insert(job, number);
        }
        let number = self.number();
        let (used, program) = (Usage::default(), room::program(program));
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
            suspended: None,
            suspended_total: Micros::default(),
        };
        self.tasks.insert(number, task);
        self.task_numbers.insert(tid, number);
        self.dirty.insert((Sheet::Tasks, number));
        self.sum(self.job_numbers.get(&job).copied(), user, began, |sums| {
            sums.tasks += 1;
            sums.running += 1;
        });
        self.trim();
    }

    fn job(&self, job: Tid) -> Option<&JobUsage> {
        self.job_numbers
            .get(&job)
            .and_then(|number| self.jobs.get(number))
    }

    /// Returns the number of the job in whose totals a task was counted. Of the jobs with the same
    /// tid this is the last one with a smaller number than the task, because a restarted job gets a
    /// new number.
    fn counted_to(&self, number: u64) -> Option<u64> {
        let job = self.tasks.get(&number)?.job;
        self.jobs
            .range(..number)
            .rev()
            .find(|(_, entry)| entry.job == job)
            .map(|(number, _)| *number)
    }

    /// Changes the totals of a user and of a job.
    fn sum(&mut self, job: Option<u64>, user: u32, at: Micros, change: impl Fn(&mut UsageTotals)) {
        let entry = self.users.entry(user).or_default();
        entry.changed = entry.changed.max(at);
        change(&mut entry.sums);
        self.dirty.insert((Sheet::Users, u64::from(user)));
        if let Some(number) = job
            && let Some(job) = self.jobs.get_mut(&number)
        {
            change(&mut job.totals);
            job.ended = (job.totals.running == 0).then_some(at);
            self.dirty.insert((Sheet::Jobs, number));
        }
    }

    fn end(&mut self, number: u64, at: Micros, how: TaskOutcome, used: Usage) {
        if let Some(tid) = self
            .tasks
            .get(&number)
            .filter(|t| t.suspended.is_some())
            .map(|t| t.tid)
        {
            self.suspended(tid, at, None);
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
        self.dirty.insert((Sheet::Tasks, number));
        self.sum(self.counted_to(number), user, at, |sums| {
            sums.running = sums.running.saturating_sub(1);
            sums.failed += u64::from(!how.is_success());
            sums.used = sums.used.plus(used);
            sums.wall_time = sums.wall_time + wall;
        });
    }

    fn moved(&mut self, tid: Tid, to: String, eviction: bool) {
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
        self.dirty.insert((Sheet::Tasks, number));
        self.sum(self.counted_to(number), user, began, |sums| {
            sums.migrations += 1;
            sums.evictions += u64::from(eviction);
        });
    }

    /// Counts the eviction of a task that was ended instead of migrated.
    fn evicted(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        let Some(task) = self.tasks.get_mut(&number).filter(|t| t.ended.is_none()) else {
            return;
        };
        task.evictions += 1;
        let (user, began) = (task.user, task.started);
        self.dirty.insert((Sheet::Tasks, number));
        self.sum(self.counted_to(number), user, began, |sums| {
            sums.evictions += 1
        });
    }

    /// Marks a task as counted against the limits of its user and job.
    pub fn counts(&mut self, tid: Tid) {
        let Some(number) = self.task_numbers.get(&tid).copied() else {
            return;
        };
        if let Some(task) = self
            .tasks
            .get_mut(&number)
            .filter(|t| !t.counts_toward_limits)
        {
            task.counts_toward_limits = true;
            self.dirty.insert((Sheet::Tasks, number));
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
                (entry.index, entry.indexed) = (index, at);
                self.dirty.insert((Sheet::Users, u64::from(user)));
            }
        }
    }

    /// Returns the Up-Down indices as (user, index, time of day).
    pub fn indices(&self) -> impl Iterator<Item = (u32, f64, Micros)> {
        self.users
            .iter()
            .map(|(user, u)| (*user, u.index, u.indexed))
    }

    /// Drops entries beyond the maximum sizes of the tables. Ended tasks and jobs are dropped
    /// before running ones, the oldest first.
    fn trim(&mut self) {
        while self.tasks.len() > TASKS_MAX {
            let Some((number, task)) = take_oldest(&mut self.tasks, |task| task.ended.is_some())
            else {
                break;
            };
            if self.task_numbers.get(&task.tid) == Some(&number) {
                self.task_numbers.remove(&task.tid);
            }
            self.dirty.insert((Sheet::Tasks, number));
        }
        while self.jobs.len() > JOBS_MAX {
            let Some((number, job)) = take_oldest(&mut self.jobs, |job| job.ended.is_some()) else {
                break;
            };
            if self.job_numbers.get(&job.job) == Some(&number) {
                self.job_numbers.remove(&job.job);
            }
            self.dirty.insert((Sheet::Jobs, number));
        }
        while self.users.len() > USERS_MAX {
            let oldest = self
                .users
                .iter()
                .min_by_key(|(_, u)| (u.sums.running > 0, u.changed))
                .map(|(id, _)| *id);
            let user = oldest.expect("more than the limit");
            self.users.remove(&user);
            self.dirty.insert((Sheet::Users, u64::from(user)));
        }
    }

    /// Answers a query from the history.
    pub fn answer(&self, question: &RmQuery) -> RmReply {
        match question {
            RmQuery::TaskDecisions(tid) => {
                let task = self.known(*tid).cloned();
                let members = self.members(*tid);
                let about = |what: &DecisionKind| {
                    what.concerns_task(|one| one == *tid || members.contains(&one))
                };
                let decisions = self.decisions_about(about, self.began(*tid));
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
                let one = |(id, u): (&u32, &User)| UserUsage {
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
                RmReply::Jobs(newest(wanted))
            }
            RmQuery::Job(tid) => {
                let Some(job) = self.job_of(*tid).cloned() else {
                    return RmReply::NotFound;
                };
                let tasks = newest(
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

    /// Returns the tasks of the job whose top task is `tid`; empty if there is no such job.
    fn members(&self, tid: Tid) -> BTreeSet<Tid> {
        let job = self.job(tid).map(|job| job.started);
        let since = job.filter(|_| self.known(tid).is_none_or(|task| task.job == tid));
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
    fn began(&self, tid: Tid) -> Option<Micros> {
        let mut lives = self
            .tasks
            .values()
            .rev()
            .filter(|task| task.tid == tid)
            .map(|task| task.started);
        let mut began = lives.next()?;
        let again = |what: &DecisionKind| matches!(what, DecisionKind::Restarted { tasks, .. } if tasks.iter().any(|(t, _)| *t == tid));
        let again: Vec<Micros> = self
            .decisions
            .values()
            .filter(|d| again(&d.kind))
            .map(|d| d.at)
            .collect();
        let mut until = Micros(u64::MAX);
        for before in lives {
            if !again.iter().any(|at| *at + SLACK >= began && *at < until) {
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
        let new = |d: &&Decision| since.is_none_or(|since| d.at + SLACK >= since);
        newest(
            self.decisions
                .values()
                .filter(|d| wanted(&d.kind))
                .filter(new),
        )
    }
}

fn key_of(tid: Tid) -> u64 {
    u64::from(tid.raw().cast_unsigned())
}

fn host_of(key: u64) -> Option<HostId> {
    HostId::new(u16::try_from(key).ok()?)
}

fn tid_of(key: u64) -> Option<Tid> {
    u32::try_from(key)
        .ok()
        .map(|raw| Tid::from_raw(raw.cast_signed()))
}

/// Returns the newest entries up to the maximum of a reply, in ascending order of time.
fn newest<'a, T: Clone + 'a>(all: impl DoubleEndedIterator<Item = &'a T>) -> Vec<T> {
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
