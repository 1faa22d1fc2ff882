//! The resource manager's view of hosts and tasks, updated by host tables, task lists, events and
//! load reports. The model reads no clock: every call receives the time, on a monotonic clock.
//!
//! Messages may arrive twice or in another order than they were sent, for example a host's
//! acknowledgement and the master's event. Every update is therefore idempotent. Entries of the
//! event log are numbered without gaps. After a gap, a new task list is needed.

use crate::decide::{
    Constraints, Estimates, ExternalMean, GuestPolicy, HostList, HostPair, HostView,
    MigrationSample, Obstacle, OwnerState, PendingPredictions, PlacementPolicy, PredictionOutcome,
    Snapshot, StayReason, TaskView, TimedSample, external_demand,
};
use crate::recent_set::RecentSet;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::load::{LoadReport, is_load_watcher};
use sempa_proto::table::{HostTable, TASK_FORKED, TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

mod closed_hosts;
mod migrations;
mod reports;
mod starting_tasks;
mod work_accounting;

/// Maximum number of ended tasks that are remembered. A late message about a remembered task does
/// not add the task again.
const ENDED_TASKS_MAX: usize = 65_536;
/// Maximum time without an event about a migration. After this time a task list is requested.
pub const MIGRATION_SILENCE_MAX: Micros = Micros::from_secs(60);
/// Minimum age of a migration that is dropped when a task list states that the task is not
/// migrating. The list may be older than a more recent migration.
const MIGRATION_LIST_DELAY: Micros = Micros::from_secs(3);
/// Time for which a host is excluded as a target of a task after one failure. Doubles with each
/// further failure, up to [`TARGET_RETRY_MAX`].
pub const TARGET_RETRY_MIN: Micros = Micros::from_secs(2);
/// Time for which a host is excluded as a target of a task if it has refused the task for a lasting
/// reason or has failed often.
pub const TARGET_RETRY_MAX: Micros = Micros::from_secs(60);
/// Shortest delay before the next attempt to migrate a task that has not connected to its daemon
/// yet.
pub const NOT_CONNECTED_DELAY: Micros = Micros::from_millis(500);
/// Longest delay before the next attempt to migrate such a task. A program that has not connected
/// for long will probably never connect.
const NOT_CONNECTED_DELAY_MAX: Micros = Micros::from_secs(8);

/// Maximum number of migrations that are remembered for each task.
const RECENT_MIGRATIONS_MAX: usize = 6;
/// Minimum interval between two updates of the work of all tasks, because an update examines all
/// hosts.
const ACCOUNTING_INTERVAL: Micros = Micros::from_millis(500);

/// Labels that the administrator gave the hosts, by host name.
pub type HostLabels = BTreeMap<String, Arc<BTreeMap<String, String>>>;

#[derive(Debug)]
struct HostState {
    name: String,
    arch: String,
    zone: u32,
    labels: Arc<BTreeMap<String, String>>,
    speed: i32,
    cores: u32,
    sample: Option<TimedSample>,
    external_mean: Option<ExternalMean>,
    /// Memory that spawns have requested, as (time of the request, bytes).
    memory_promises: VecDeque<(Micros, u64)>,
    owner: OwnerState,
    /// Time at which the last owner left, on the model's clock; `None` if no owner was seen.
    owner_left_at: Option<Micros>,
    guest_policy: GuestPolicy,
    /// Task that requested the drain of the host; `None` if the host is not being drained.
    drain_requester: Option<Tid>,
    /// True if [`Model::newly_guest_free_hosts`] has returned this host.
    guest_free_reported: bool,
    migration_obstacle: Option<Obstacle>,
}

#[derive(Debug)]
struct TaskState {
    host: HostId,
    job: Tid,
    /// Parent of the task; `None` until an event or a list describes the task.
    parent: Option<Tid>,
    uid: u32,
    name: Arc<str>,
    started_at: Micros,
    /// True if `started_at` is the task's start time. Otherwise `started_at` is the time when the
    /// task was first seen.
    start_known: bool,
    work_done: Micros,
    memory_bytes: u64,
    host_named: bool,
    constraints: Option<Arc<Constraints>>,
    recent_rebalances: VecDeque<Micros>,
    pinned: bool,
    migration: Option<MigrationStatus>,
    suspended: bool,
    recent_migrations: VecDeque<Micros>,
    migration_obstacle: Option<Obstacle>,
    target_obstacles: BTreeMap<HostId, (Obstacle, u32)>,
    reported_stay_reason: Option<std::mem::Discriminant<StayReason>>,
}

#[derive(Clone, Copy, Debug)]
struct MigrationStatus {
    target: Option<HostId>,
    last_event_at: Micros,
}

impl TaskState {
    fn new(host: HostId, job: Tid, start_time: Micros) -> Self {
        Self {
            host,
            job,
            parent: None,
            uid: 0,
            name: Arc::from(""),
            started_at: start_time,
            start_known: false,
            work_done: Micros::default(),
            memory_bytes: 0,
            host_named: false,
            constraints: None,
            recent_rebalances: VecDeque::new(),
            pinned: false,
            migration: None,
            suspended: false,
            recent_migrations: VecDeque::new(),
            migration_obstacle: None,
            target_obstacles: BTreeMap::new(),
            reported_stay_reason: None,
        }
    }
}

/// Known state of hosts and tasks.
#[derive(Debug)]
pub struct Model {
    /// Input of the decisions. The entries for the hosts in `changed_hosts` are out of date.
    snapshot: Snapshot,
    changed_hosts: BTreeSet<HostId>,
    /// Hosts whose last guest may have left since the last call of
    /// [`Model::newly_guest_free_hosts`].
    guest_check_hosts: BTreeSet<HostId>,
    /// Migrating tasks, as of the last update of `snapshot`.
    migrating_tasks: BTreeSet<Tid>,
    /// Ended tasks that have left processes behind, each with the host of the processes.
    leftovers: BTreeSet<(HostId, Tid)>,
    labels: HostLabels,
    hosts: BTreeMap<HostId, HostState>,
    tasks: BTreeMap<Tid, TaskState>,
    tasks_by_host: BTreeMap<HostId, BTreeSet<Tid>>,
    /// Number of tasks that are being started, by host.
    starting_task_counts: BTreeMap<HostId, u32>,
    ended_tasks: RecentSet<Tid>,
    last_event_number: Option<u64>,
    needs_refresh: bool,
    work_accounted_at: Micros,
    /// Predictions about rebalancing migrations whose gain is being measured.
    pending_predictions: PendingPredictions,
    prediction_outcomes: Vec<PredictionOutcome>,
    default_user: u32,
}

impl Model {
    /// Creates an empty model. `local_host`: host of the resource manager. The first round-robin
    /// placement starts with the host after `local_host`.
    pub fn new(policy: PlacementPolicy, local_host: HostId, labels: HostLabels) -> Self {
        Self {
            snapshot: Snapshot {
                last_round_robin_host: local_host,
                ..Snapshot::new(Micros::default(), policy, HostList::default())
            },
            changed_hosts: BTreeSet::new(),
            guest_check_hosts: BTreeSet::new(),
            leftovers: BTreeSet::new(),
            migrating_tasks: BTreeSet::new(),
            labels,
            hosts: BTreeMap::new(),
            tasks: BTreeMap::new(),
            tasks_by_host: BTreeMap::new(),
            starting_task_counts: BTreeMap::new(),
            ended_tasks: RecentSet::new(ENDED_TASKS_MAX),
            last_event_number: None,
            needs_refresh: false,
            work_accounted_at: Micros::default(),
            pending_predictions: PendingPredictions::default(),
            prediction_outcomes: Vec::new(),
            default_user: 0,
        }
    }

    pub fn set_policy(&mut self, policy: PlacementPolicy, margin: f64) {
        self.snapshot.policy = policy;
        self.snapshot.costs.margin_percent = (margin * 100.0).round() as u32;
    }

    /// Returns the number of tasks on a host that are part of its load.
    pub fn computing_task_count(&self, host: HostId) -> u32 {
        u32::try_from(
            self.tasks_on(host)
                .filter(|(_, task)| task.computes())
                .count(),
        )
        .unwrap_or(u32::MAX)
    }

    /// Sets the user to whom tasks belong if their user is not known.
    pub fn set_default_user(&mut self, user: u32) {
        self.default_user = user;
    }

    /// Returns the values learned from tasks and migrations.
    pub fn estimates(&self) -> &Estimates {
        &self.snapshot.estimates
    }

    /// Replaces the learned values by values from the history.
    pub fn restore_estimates(&mut self, estimates: Estimates) {
        self.snapshot.estimates = estimates;
    }

    /// Restores the job and the start time of a task. Task lists contain neither.
    pub fn restore_task(&mut self, tid: Tid, job: Tid, start_time: Micros) {
        if let Some(task) = self.edit_task(tid) {
            (task.job, task.started_at, task.start_known) = (job, start_time, true);
        }
    }

    /// Sets the host after which the next round-robin placement starts.
    pub fn set_round_robin_last(&mut self, host: HostId) {
        self.snapshot.last_round_robin_host = host;
    }

    /// Returns a task for modification and marks its host as changed. The caller must not change
    /// the task's host.
    fn edit_task(&mut self, tid: Tid) -> Option<&mut TaskState> {
        let task = self.tasks.get_mut(&tid)?;
        self.changed_hosts.insert(task.host);
        Some(task)
    }

    /// Returns a host for modification and marks it as changed.
    fn edit_host(&mut self, id: HostId) -> Option<&mut HostState> {
        let host = self.hosts.get_mut(&id)?;
        self.changed_hosts.insert(id);
        Some(host)
    }

    /// Sets the host of a task; adds the task if it is unknown.
    fn set_task_host(&mut self, now: Micros, tid: Tid, host: HostId) -> &mut TaskState {
        let uid = self.default_user;
        let task = self.tasks.entry(tid).or_insert_with(|| TaskState {
            uid,
            ..TaskState::new(host, tid, now)
        });
        if let Some(tids) = self
            .tasks_by_host
            .get_mut(&task.host)
            .filter(|_| task.host != host)
        {
            tids.remove(&tid);
        }
        self.changed_hosts.extend([task.host, host]);
        task.host = host;
        self.tasks_by_host.entry(host).or_default().insert(tid);
        task
    }

    fn remove_task(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.remove(&tid) {
            self.changed_hosts.insert(task.host);
            if let Some(tids) = self.tasks_by_host.get_mut(&task.host) {
                tids.remove(&tid);
            }
        }
    }

    fn tasks_on(&self, host: HostId) -> impl Iterator<Item = (Tid, &TaskState)> {
        self.tasks_by_host
            .get(&host)
            .into_iter()
            .flatten()
            .filter_map(|tid| Some((*tid, self.tasks.get(tid)?)))
    }

    /// Returns the job of a task: the job of its parent, the parent itself if it is unknown, or the
    /// task itself if no task is its parent.
    fn job_of(&self, tid: Tid, parent: Tid) -> Tid {
        let job_if_parent_unknown = if parent.is_task() { parent } else { tid };
        self.tasks
            .get(&parent)
            .map_or(job_if_parent_unknown, |task| task.job)
    }

    /// Applies a host table. Returns the hosts that are new.
    pub fn set_hosts(&mut self, table: &HostTable) -> Vec<HostId> {
        let removed_hosts: Vec<HostId> = self
            .hosts
            .keys()
            .copied()
            .filter(|id| table.get(*id).is_none())
            .collect();
        for id in removed_hosts {
            self.remove_host(id);
        }
        let mut new_hosts = Vec::new();
        for entry in &table.hosts {
            self.changed_hosts.insert(entry.id);
            let host = self.hosts.entry(entry.id).or_insert_with(|| {
                new_hosts.push(entry.id);
                HostState {
                    name: String::new(),
                    arch: String::new(),
                    zone: 0,
                    labels: Arc::default(),
                    speed: 0,
                    cores: 1,
                    sample: None,
                    external_mean: None,
                    memory_promises: VecDeque::new(),
                    owner: OwnerState::Unknown,
                    owner_left_at: None,
                    guest_policy: GuestPolicy::default(),
                    drain_requester: None,
                    guest_free_reported: false,
                    migration_obstacle: None,
                }
            });
            (host.name, host.arch, host.speed) =
                (entry.name.clone(), entry.arch.clone(), entry.speed);
            host.zone = entry.network_zone();
            host.labels = self.labels.get(&entry.name).cloned().unwrap_or_default();
        }
        new_hosts
    }

    /// Applies a list of all tasks. `now`: time at which the list was requested.
    pub fn set_tasks(&mut self, now: Micros, tasks: &[TaskInfo]) {
        self.needs_refresh = false;
        self.set_leftovers(tasks);
        let tasks: Vec<&TaskInfo> = tasks.iter().filter(|task| !task.is_leftover()).collect();
        let listed_tids: HashSet<Tid> = tasks.iter().map(|info| info.tid).collect();
        let unlisted_tids: Vec<Tid> = self
            .tasks
            .keys()
            .copied()
            .filter(|tid| !listed_tids.contains(tid))
            .collect();
        for tid in unlisted_tids {
            // The task is not recorded as ended, because it may have started after the daemons made
            // the list.
            self.remove_task(tid);
        }
        let mut new_tasks = Vec::new();
        for info in tasks {
            if self.ended_tasks.contains(info.tid) {
                continue;
            }
            let job = self.job_of(info.tid, info.parent);
            let is_new = !self.tasks.contains_key(&info.tid);
            let task = self.set_task_host(now, info.tid, info.host);
            if is_new {
                task.uid = info.uid;
                new_tasks.push((info.tid, job));
            }
            task.pinned |= is_pinned(info.flags, &info.name);
            (task.job, task.parent, task.name) =
                (job, Some(info.parent), Arc::from(info.name.as_str()));
            task.suspended = info.suspended;
            match task.migration {
                _ if info.migrating => {
                    task.migration = Some(MigrationStatus {
                        target: task
                            .migration
                            .and_then(|previous_status| previous_status.target),
                        last_event_at: now,
                    })
                }
                Some(status) if now.since(status.last_event_at) >= MIGRATION_LIST_DELAY => {
                    task.migration = None
                }
                _ => {}
            }
        }
        for (tid, job) in new_tasks {
            // A daemon lists its own user as the user of each task. A spawned task belongs to the
            // user of the first task of its job.
            if let Some(user) = self.tasks.get(&job).map(|top_task| top_task.uid) {
                self.set_task_user(tid, user);
            }
        }
    }

    pub fn set_task_user(&mut self, tid: Tid, user: u32) {
        if let Some(task) = self.edit_task(tid) {
            task.uid = user;
        }
    }

    /// Removes a host that is no longer in the virtual machine, with all its tasks.
    pub fn remove_host(&mut self, id: HostId) {
        self.hosts.remove(&id);
        self.changed_hosts.insert(id);
        self.leftovers.retain(|(host, _)| *host != id);
        for tid in self.tasks_by_host.remove(&id).unwrap_or_default() {
            // A migration of the task to another host may have been committed. In that case an
            // event names the new host and adds the task again.
            self.tasks.remove(&tid);
        }
    }

    /// Removes a task that has ended, and remembers its tid so that late messages do not add it
    /// again.
    pub fn record_task_end(&mut self, tid: Tid) {
        self.conclude_prediction(tid);
        if let Some(task) = self.tasks.get(&tid) {
            let job = task.job;
            // If the task ended before its work was measured, its work is unknown and nothing is
            // learned from it.
            if task.start_known && !task.pinned && task.work_done > Micros::default() {
                self.snapshot
                    .estimates
                    .record_completion(&task.name, task.work_done);
            }
            if self.snapshot.barrier_jobs.contains(&job)
                && !self
                    .tasks
                    .iter()
                    .any(|(t, other)| *t != tid && other.job == job)
            {
                self.snapshot.barrier_jobs.remove(&job);
            }
        }
        self.remove_task(tid);
        self.ended_tasks.insert(tid);
    }

    /// Adds a task that was started on a host. Has no effect if the task has already ended.
    pub fn record_task_start(&mut self, now: Micros, tid: Tid, host: HostId, pinned: bool) {
        if self.ended_tasks.contains(tid) || !tid.is_task() {
            return;
        }
        if !self.tasks.contains_key(&tid) {
            self.set_task_host(now, tid, host).start_known = true;
        }
        if let Some(task) = self.edit_task(tid) {
            task.pinned |= pinned;
        }
    }

    /// Sets the job of a task whose parent is unknown. Has no effect after an event or a list has
    /// described the task.
    pub fn set_task_job(&mut self, tid: Tid, job: Tid) {
        if let Some(task) = self.edit_task(tid).filter(|task| task.parent.is_none()) {
            task.job = job;
        }
    }

    /// Records the constraints of a task's spawn. `spawn_named_host`: the spawn named the task's
    /// host.
    pub fn set_task_constraints(
        &mut self,
        tid: Tid,
        spawn_named_host: bool,
        spawn_constraints: Constraints,
    ) {
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        task.host_named |= spawn_named_host;
        let job = task.job;
        if spawn_constraints != Constraints::default() {
            task.constraints = Some(Arc::new(spawn_constraints.clone()));
        }
        if spawn_constraints.barrier {
            self.snapshot.barrier_jobs.insert(job);
        }
    }

    /// Records the parent and the program of a task. The task's user is that of its parent, on
    /// whatever host the task runs. If the parent is unknown, the task's user is `user`, the user
    /// of its daemon.
    fn set_task_origin(&mut self, tid: Tid, (parent, user): (Tid, u32), program: &str) {
        let job = self.job_of(tid, parent);
        let parent_uid = self.tasks.get(&parent).map(|task| task.uid);
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        task.uid = parent_uid.unwrap_or(user);
        let previous_job = std::mem::replace(&mut task.job, job);
        (task.parent, task.name) = (Some(parent), Arc::from(program));
        if previous_job == tid && job != tid {
            self.snapshot.barrier_jobs.remove(&previous_job);
        }
        let Some(task) = self.tasks.get(&tid) else {
            return;
        };
        if task
            .constraints
            .as_ref()
            .is_some_and(|task_constraints| task_constraints.barrier)
        {
            self.snapshot.barrier_jobs.insert(job);
        }
    }

    /// Records that a task was suspended or resumed. A suspension also discards the prediction
    /// about the task's migration.
    pub fn set_suspended(&mut self, tid: Tid, suspended: bool) {
        if suspended {
            self.pending_predictions.discard_prediction(tid);
        }
        if let Some(task) = self.edit_task(tid) {
            task.suspended = suspended;
        }
    }

    pub fn is_suspended(&self, tid: Tid) -> bool {
        self.tasks.get(&tid).is_some_and(|task| task.suspended)
    }

    pub fn job_tasks(&self, job: Tid) -> Vec<Tid> {
        self.tasks
            .iter()
            .filter(|(_, t)| t.job == job)
            .map(|(tid, _)| *tid)
            .collect()
    }

    /// True while any task of the job that contains `tid` is migrating or suspended.
    pub fn is_job_busy(&self, tid: Tid) -> bool {
        let Some(job) = self.tasks.get(&tid).map(|task| task.job) else {
            return false;
        };
        self.tasks
            .values()
            .any(|task| task.job == job && (task.migration.is_some() || task.suspended))
    }

    /// Returns the first task of the job that contains `tid`. A checkpoint of the job is requested
    /// with the tid of this task.
    ///
    /// Returns `None` if an ancestor of the task has ended or is unknown, because then some tasks
    /// of the job cannot be found from its first task. Also returns `None` if a user has started
    /// the first task by hand, because vacating the job would end a program that this user runs.
    pub fn checkpoint_root(&self, tid: Tid) -> Option<Tid> {
        let mut current_task = (tid, self.tasks.get(&tid)?);
        // A chain of parents is at most as long as the number of tasks.
        for _ in 0..self.tasks.len() {
            let parent_tid = current_task.1.parent?;
            if !parent_tid.is_task() {
                return Some(current_task.0);
            }
            current_task = (
                parent_tid,
                self.tasks
                    .get(&parent_tid)
                    .filter(|parent| !parent.pinned)?,
            );
        }
        None
    }

    /// Returns the tasks of a job that are part of the load of their hosts: neither pinned nor
    /// suspended.
    pub fn computing_job_tasks(&self, job: Tid) -> Vec<Tid> {
        let is_computing = |tid: &Tid| self.tasks.get(tid).is_some_and(TaskState::computes);
        self.job_tasks(job)
            .into_iter()
            .filter(is_computing)
            .collect()
    }

    /// True for a known task that has not ended.
    pub fn has_task(&self, tid: Tid) -> bool {
        self.tasks.contains_key(&tid)
    }

    /// True for a known task that is not pinned.
    pub fn is_guest(&self, tid: Tid) -> bool {
        self.tasks.get(&tid).is_some_and(|task| !task.pinned)
    }

    /// Returns the host of a task. For an unknown task, returns the birth host in its tid.
    pub fn host_of(&self, tid: Tid) -> Option<HostId> {
        self.tasks
            .get(&tid)
            .map(|t| t.host)
            .or_else(|| tid.birth_host())
    }

    /// Returns the user and the job of a task. An unknown task belongs to the default user and is
    /// its own job.
    pub fn user_and_job(&self, tid: Tid) -> (u32, Tid) {
        self.tasks
            .get(&tid)
            .map_or((self.default_user, tid), |task| (task.uid, task.job))
    }

    pub fn has_host(&self, id: HostId) -> bool {
        self.hosts.contains_key(&id)
    }

    /// Returns all hosts by ascending id.
    pub fn host_ids(&self) -> Vec<HostId> {
        self.hosts.keys().copied().collect()
    }

    /// Returns the expected cost of migrating a task, as of the latest snapshot.
    pub fn migration_cost(&self, tid: Tid, (source, target): (HostId, HostId)) -> Micros {
        let (name, bytes) = self
            .tasks
            .get(&tid)
            .map_or(("", 0), |task| (&*task.name, task.memory_bytes));
        let (estimates, slowness) = (
            &self.snapshot.estimates,
            self.snapshot.slowness(source, target),
        );
        estimates.migration_cost(
            estimates.expected_bytes(name, bytes),
            slowness,
            self.host_pair(source, target),
        )
    }

    fn host_pair(&self, source: HostId, target: HostId) -> Option<HostPair> {
        Some(HostPair::between(
            self.snapshot.host(source)?,
            self.snapshot.host(target)?,
        ))
    }

    /// Returns the name of a host, or the host's number if the host is unknown.
    pub fn host_name(&self, id: HostId) -> String {
        self.hosts
            .get(&id)
            .map_or_else(|| id.to_string(), |h| h.name.clone())
    }

    pub fn host_by_name(&self, name: &str) -> Option<HostId> {
        self.hosts
            .iter()
            .find(|(_, host)| host.name == name)
            .map(|(id, _)| *id)
    }

    /// Records that the event with this number was applied. Requests new lists if earlier events
    /// were missed.
    fn record_event_number(&mut self, number: u64) {
        match self.last_event_number {
            Some(last_number) if number <= last_number => {}
            Some(last_number) if number == last_number + 1 => self.last_event_number = Some(number),
            None => self.last_event_number = Some(number),
            Some(_) => {
                self.needs_refresh = true;
                self.last_event_number = Some(number);
            }
        }
    }

    /// Applies an entry of the event log. If earlier entries were missed, new lists of hosts and
    /// tasks are needed ([`Model::is_stale`]).
    pub fn apply_event(&mut self, now: Micros, event: &Event) {
        self.record_event_number(event.number);
        match &event.kind {
            EventKind::HostGone { host, .. } => self.remove_host(*host),
            EventKind::ProcessesLeft { host, left } => self.record_leftover(*host, left.tid, true),
            EventKind::LeftProcessesEnded { host, tid } => self.record_leftover(*host, *tid, false),
            EventKind::TaskStarted {
                tid,
                parent,
                name,
                user,
            } => {
                self.record_task_start(
                    now,
                    *tid,
                    event.host,
                    name.is_empty() || is_load_watcher(name),
                );
                self.set_task_origin(*tid, (*parent, *user), name);
            }
            EventKind::TaskEnded {
                tid, used: usage, ..
            } => {
                if let Some(task) = self.tasks.get(tid).filter(|task| !task.pinned) {
                    self.snapshot
                        .estimates
                        .record_size(&task.name, usage.resident_max_bytes);
                }
                self.record_task_end(*tid);
            }
            EventKind::Restarted { tasks, .. } => {
                // The restarted tasks may be recorded as ended. Removes these records; a new task
                // list describes the tasks.
                tasks
                    .iter()
                    .for_each(|(tid, _)| self.ended_tasks.remove(*tid));
                self.needs_refresh = true;
            }
            EventKind::MigrationStep {
                tid,
                to: target_host,
                ..
            } => {
                if let Some(task) = self.edit_task(*tid) {
                    task.migration = Some(MigrationStatus {
                        target: Some(*target_host),
                        last_event_at: now,
                    });
                }
            }
            EventKind::Migrated {
                tid,
                from: source,
                to: target_host,
                cause,
                bytes,
                resident: memory_size_bytes,
                frozen: freeze_duration,
                transfer_time: time_until_complete,
                ..
            } => {
                let sample = MigrationSample {
                    pair: self.host_pair(*source, *target_host),
                    slowness: self.snapshot.slowness(*source, *target_host),
                    image_bytes: *bytes,
                    resident_bytes: *memory_size_bytes,
                    freeze_time: *freeze_duration,
                    time_until_complete: *time_until_complete,
                };
                self.record_measured_migration(now, *tid, *target_host, cause, &sample);
            }
            EventKind::MigrationFailed {
                tid,
                to: target_host,
                why: failure,
                ..
            } => self.record_migration_failure(now, *tid, *target_host, failure),
            EventKind::Suspended { tid, .. } => self.set_suspended(*tid, true),
            EventKind::Resumed { tid, .. } => self.set_suspended(*tid, false),
            _ => {}
        }
    }

    /// Applies a load watcher's report. Returns an event to record if the report changes whether
    /// the host accepts guests, or changes the kind of reason for which the host excludes guests.
    pub fn apply_report(&mut self, now: Micros, report: &LoadReport) -> Option<EventKind> {
        let id = report.host;
        let vm_task_count = self.computing_task_count(id);
        let host = self.edit_host(id)?;
        host.cores = report.sample.cores.max(1);
        let timed_sample = TimedSample {
            sample: report.sample,
            received_at: now,
            vm_task_count,
        };
        let demand = external_demand(&timed_sample);
        let mean = host.external_mean.map(|mean| mean.with_sample(now, demand));
        host.external_mean =
            Some(mean.unwrap_or_else(|| ExternalMean::from_first_sample(now, demand)));
        host.sample = Some(timed_sample);
        reports::expire_promises(&mut host.memory_promises, now);
        host.guest_policy = reports::guest_policy_from_report(now, report, &host.guest_policy);
        let previous_owner = std::mem::replace(
            &mut host.owner,
            reports::owner_from_report(report, host.owner_left_at),
        );
        if !reports::is_recorded_change(&previous_owner, &host.owner) {
            return None;
        }
        if host.owner.excludes_guests() {
            host.guest_free_reported = false;
        } else {
            host.owner_left_at = Some(now);
            host.owner = reports::owner_from_report(report, host.owner_left_at);
            for tid in self.tasks_by_host.get(&id).into_iter().flatten() {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.reported_stay_reason = None;
                }
            }
        }
        Some(reports::owner_change_event(&previous_owner, report))
    }

    /// Brings the input of the decisions up to date as of `now` and returns it. The computing time
    /// depends on the number of hosts changed since the last call.
    pub fn update_snapshot(&mut self, now: Micros) -> &Snapshot {
        for id in std::mem::take(&mut self.changed_hosts) {
            self.guest_check_hosts.insert(id);
            self.update_migrating_tasks(id);
            match self.hosts.get(&id) {
                None => self.snapshot.hosts.remove(id),
                Some(host) => {
                    let tasks: Vec<TaskView> = self
                        .tasks_on(id)
                        .map(|(tid, task)| task.view(tid))
                        .collect();
                    let starting_count = self.starting_task_counts.get(&id).copied().unwrap_or(0);
                    let view = HostView {
                        starting_task_count: starting_count,
                        ..host.view(id, tasks)
                    };
                    self.snapshot.hosts.insert(view);
                }
            }
        }
        self.snapshot.hosts.refresh(now);
        self.snapshot.now = now;
        &self.snapshot
    }

    /// Updates the set of migrating tasks for the tasks of one host. The targets of these
    /// migrations must be checked for guests again.
    fn update_migrating_tasks(&mut self, id: HostId) {
        for tid in self.tasks_by_host.get(&id).into_iter().flatten() {
            match self.tasks.get(tid).and_then(|task| task.migration) {
                Some(status) => {
                    self.migrating_tasks.insert(*tid);
                    self.guest_check_hosts.extend(status.target);
                }
                None if self.migrating_tasks.is_empty() => {}
                None => drop(self.migrating_tasks.remove(tid)),
            }
        }
    }

    /// True if a new host table and task list are needed: entries of the event log were missed, or
    /// for [`MIGRATION_SILENCE_MAX`] no event about a migration arrived.
    pub fn is_stale(&self, now: Micros) -> bool {
        // Checks only the migrating tasks, which are few. A migration that has just started may be
        // missing in this set, but its timeout has not expired either.
        let is_overdue = |tid: &Tid| {
            self.tasks
                .get(tid)
                .and_then(|task| task.migration)
                .is_some_and(|status| now.since(status.last_event_at) >= MIGRATION_SILENCE_MAX)
        };
        self.needs_refresh || self.migrating_tasks.iter().any(is_overdue)
    }
}

impl HostState {
    fn view(&self, id: HostId, tasks: Vec<TaskView>) -> HostView {
        HostView {
            id,
            name: self.name.clone(),
            arch: self.arch.clone(),
            zone: self.zone,
            labels: self.labels.clone(),
            speed: self.speed,
            cores: self.cores,
            sample: self.sample.clone(),
            external_mean: self.external_mean,
            promised_bytes: self
                .memory_promises
                .iter()
                .fold(0, |sum, (_, bytes)| bytes.saturating_add(sum)),
            owner: self.effective_owner(),
            guest_policy: self.guest_policy.clone(),
            migration_obstacle: self.migration_obstacle.clone(),
            starting_task_count: 0,
            tasks,
        }
    }
}

impl TaskState {
    /// True if the task is part of its host's load: neither pinned nor suspended.
    fn computes(&self) -> bool {
        !self.pinned && !self.suspended
    }

    fn view(&self, tid: Tid) -> TaskView {
        TaskView {
            tid,
            pinned: self.pinned,
            migration: self.migration.map(|status| status.target),
            suspended: self.suspended,
            user: self.uid,
            job: self.job,
            name: self.name.clone(),
            started_at: self.started_at,
            work_done: self.work_done,
            memory_bytes: self.memory_bytes,
            host_named: self.host_named,
            constraints: self.constraints.clone(),
            recent_rebalances: self.recent_rebalances.iter().copied().collect(),
            recent_migrations: self.recent_migrations.iter().copied().collect(),
            migration_obstacle: self.migration_obstacle.clone(),
            target_obstacles: self
                .target_obstacles
                .iter()
                .map(|(id, (target_obstacle, _))| (*id, target_obstacle.clone()))
                .collect(),
        }
    }
}

/// True for tasks that cannot migrate or that serve their host: tasks started from a command line,
/// resource managers, hosters, taskers and load watchers.
fn is_pinned(flags: i32, name: &str) -> bool {
    flags & TASK_FORKED == 0 || flags & TASK_SERVICE_FLAGS != 0 || is_load_watcher(name)
}
