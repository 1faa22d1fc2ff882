//! The resource manager's view of hosts and tasks, updated by host tables, task lists, events and
//! load reports. Pure: every call receives the time, on a monotonic clock.
//!
//! Messages may arrive twice or in another order (an acknowledgement from a host, the event from
//! the master), so every update is idempotent. Entries of the event log are numbered without gaps;
//! a gap requires a fresh task list.

use crate::decide::{
    Constraints, Estimates, ExternalMean, GuestPolicy, HostList, HostPair, HostView,
    MigrationSample, Obstacle, OwnerState, PendingPredictions, PlacementPolicy, PredictionOutcome,
    Snapshot, StayReason, TaskView, TimedSample, external_demand,
};
use crate::recent::RecentSet;
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

/// Maximum number of ended tasks that are remembered, so that late messages about them do not add
/// them again.
const ENDED_MAX: usize = 65_536;
/// Timeout for news of a migration. After it, a task list is requested.
pub const MIGRATION_SILENCE_MAX: Micros = Micros::from_secs(60);
/// A task list that says "not migrating" counts only if the migration began longer ago than this.
/// Otherwise the list may be older than the migration.
const MIGRATION_LIST_DELAY: Micros = Micros::from_secs(3);
/// Time for which a host is excluded as a target of a task after one failure. Doubles with each
/// further failure, up to [`TARGET_RETRY_MAX`].
pub const TARGET_RETRY_MIN: Micros = Micros::from_secs(2);
/// Time for which a host is excluded as a target of a task if it has refused the task for a lasting
/// reason or has failed often.
pub const TARGET_RETRY_MAX: Micros = Micros::from_secs(60);
/// Delay before the next attempt to migrate a task that has not connected yet.
pub const NOT_CONNECTED_DELAY: Micros = Micros::from_millis(500);

/// Maximum number of remembered migrations per task.
const RECENT_MIGRATIONS_MAX: usize = 6;
/// Minimum interval between two updates of the work of all tasks, because an update examines all
/// hosts.
const ACCOUNTING_INTERVAL: Micros = Micros::from_millis(500);

/// Labels that the administrator gave the hosts, by host name.
pub type Labels = BTreeMap<String, Arc<BTreeMap<String, String>>>;

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
    /// Memory that spawns have requested, as (request time, bytes).
    memory_promises: VecDeque<(Micros, u64)>,
    owner: OwnerState,
    /// When the last owner left, on the model's clock.
    owner_left_at: Option<Micros>,
    guest_policy: GuestPolicy,
    /// Task that requested the drain.
    drained_by: Option<Tid>,
    /// True if the absence of guests was reported already.
    clean_reported: bool,
    migration_obstacle: Option<Obstacle>,
}

#[derive(Debug)]
struct TaskState {
    host: HostId,
    job: Tid,
    /// `None` until an event or a list describes the task.
    parent: Option<Tid>,
    uid: u32,
    name: Arc<str>,
    started_at: Micros,
    /// True if `since` is the start time. Otherwise `since` is the time when the task was first
    /// seen.
    start_known: bool,
    work_done: Micros,
    memory_bytes: u64,
    host_named: bool,
    constraints: Option<Arc<Constraints>>,
    recent_rebalances: VecDeque<Micros>,
    pinned: bool,
    migrating: Option<MigrationStatus>,
    suspended: bool,
    recent_migrations: VecDeque<Micros>,
    obstacle: Option<Obstacle>,
    refused_by: BTreeMap<HostId, (Obstacle, u32)>,
    reported_stay: Option<std::mem::Discriminant<StayReason>>,
}

#[derive(Clone, Copy, Debug)]
struct MigrationStatus {
    target: Option<HostId>,
    heard_at: Micros,
}

impl TaskState {
    fn new(host: HostId, job: Tid, since: Micros) -> TaskState {
        TaskState {
            host,
            job,
            parent: None,
            uid: 0,
            name: Arc::from(""),
            started_at: since,
            start_known: false,
            work_done: Micros::default(),
            memory_bytes: 0,
            host_named: false,
            constraints: None,
            recent_rebalances: VecDeque::new(),
            pinned: false,
            migrating: None,
            suspended: false,
            recent_migrations: VecDeque::new(),
            obstacle: None,
            refused_by: BTreeMap::new(),
            reported_stay: None,
        }
    }
}

/// Known state of hosts and tasks.
#[derive(Debug)]
pub struct Model {
    /// Input of the decisions. Its entries for the hosts in `dirty_hosts` are out of date.
    snapshot: Snapshot,
    dirty_hosts: BTreeSet<HostId>,
    /// Hosts whose last guest may have left since the last check.
    maybe_clean: BTreeSet<HostId>,
    /// Migrating tasks, as of the last update of the view.
    migrating: BTreeSet<Tid>,
    labels: Labels,
    hosts: BTreeMap<HostId, HostState>,
    tasks: BTreeMap<Tid, TaskState>,
    tasks_by_host: BTreeMap<HostId, BTreeSet<Tid>>,
    /// Number of tasks that are being started, by host.
    starting: BTreeMap<HostId, u32>,
    ended_tasks: RecentSet<Tid>,
    last_event: Option<u64>,
    needs_refresh: bool,
    accounted_at: Micros,
    /// Rebalancing migrations whose gain is being measured.
    predictions: PendingPredictions,
    outcomes: Vec<PredictionOutcome>,
    default_user: u32,
}

impl Model {
    /// Creates an empty model. `local`: host of the resource manager, after which round robin
    /// starts.
    pub fn new(policy: PlacementPolicy, local: HostId, labels: Labels) -> Model {
        Model {
            snapshot: Snapshot {
                round_robin_last: local,
                ..Snapshot::new(Micros::default(), policy, HostList::default())
            },
            dirty_hosts: BTreeSet::new(),
            maybe_clean: BTreeSet::new(),
            migrating: BTreeSet::new(),
            labels,
            hosts: BTreeMap::new(),
            tasks: BTreeMap::new(),
            tasks_by_host: BTreeMap::new(),
            starting: BTreeMap::new(),
            ended_tasks: RecentSet::new(ENDED_MAX),
            last_event: None,
            needs_refresh: false,
            accounted_at: Micros::default(),
            predictions: PendingPredictions::default(),
            outcomes: Vec::new(),
            default_user: 0,
        }
    }

    pub fn set_policy(&mut self, policy: PlacementPolicy, margin: f64) {
        self.snapshot.policy = policy;
        self.snapshot.costs.margin_percent = (margin * 100.0).round() as u32;
    }

    /// Returns the number of tasks of the virtual machine that are part of a host's load.
    pub fn guests_on(&self, host: HostId) -> u32 {
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

    /// Restores the job and the start time of a task; task lists lack both.
    pub fn restore_task(&mut self, tid: Tid, job: Tid, since: Micros) {
        if let Some(task) = self.edit_task(tid) {
            (task.job, task.started_at, task.start_known) = (job, since, true);
        }
    }

    /// Sets the host after which the next round-robin placement starts.
    pub fn set_round_robin_last(&mut self, rotation: HostId) {
        self.snapshot.round_robin_last = rotation;
    }

    /// Returns a task for modification and marks its host as changed. The caller must not change
    /// the task's host.
    fn edit_task(&mut self, tid: Tid) -> Option<&mut TaskState> {
        let task = self.tasks.get_mut(&tid)?;
        self.dirty_hosts.insert(task.host);
        Some(task)
    }

    /// Returns a host for modification and marks it as changed.
    fn edit_host(&mut self, id: HostId) -> Option<&mut HostState> {
        let host = self.hosts.get_mut(&id)?;
        self.dirty_hosts.insert(id);
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
        self.dirty_hosts.extend([task.host, host]);
        task.host = host;
        self.tasks_by_host.entry(host).or_default().insert(tid);
        task
    }

    fn remove_task(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.remove(&tid) {
            self.dirty_hosts.insert(task.host);
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

    /// Returns the job of a task: the job of its parent, or the task itself if no task is its
    /// parent.
    fn job_of(&self, tid: Tid, parent: Tid) -> Tid {
        let top = if parent.is_task() { parent } else { tid };
        self.tasks.get(&parent).map_or(top, |task| task.job)
    }

    /// Applies a host table. Returns the hosts that are new.
    pub fn set_hosts(&mut self, table: &HostTable) -> Vec<HostId> {
        let gone: Vec<HostId> = self
            .hosts
            .keys()
            .copied()
            .filter(|id| table.get(*id).is_none())
            .collect();
        for id in gone {
            self.host_gone(id);
        }
        let mut new = Vec::new();
        for entry in &table.hosts {
            self.dirty_hosts.insert(entry.id);
            let host = self.hosts.entry(entry.id).or_insert_with(|| {
                new.push(entry.id);
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
                    drained_by: None,
                    clean_reported: false,
                    migration_obstacle: None,
                }
            });
            (host.name, host.arch, host.speed) =
                (entry.name.clone(), entry.arch.clone(), entry.speed);
            host.zone = entry.network_zone();
            host.labels = self.labels.get(&entry.name).cloned().unwrap_or_default();
        }
        new
    }

    /// Applies a list of all tasks that was requested at `now`.
    pub fn set_tasks(&mut self, now: Micros, tasks: &[TaskInfo]) {
        self.needs_refresh = false;
        let listed: HashSet<Tid> = tasks.iter().map(|info| info.tid).collect();
        let gone: Vec<Tid> = self
            .tasks
            .keys()
            .copied()
            .filter(|tid| !listed.contains(tid))
            .collect();
        for tid in gone {
            // The task is not recorded as ended, because it may have started after the list was
            // made.
            self.remove_task(tid);
        }
        let mut new = Vec::new();
        for info in tasks {
            if self.ended_tasks.contains(info.tid) {
                continue;
            }
            let job = self.job_of(info.tid, info.parent);
            let is_new = !self.tasks.contains_key(&info.tid);
            let task = self.set_task_host(now, info.tid, info.host);
            if is_new {
                task.uid = info.uid;
                new.push((info.tid, job));
            }
            task.pinned |= is_pinned(info.flags, &info.name);
            (task.job, task.parent, task.name) =
                (job, Some(info.parent), Arc::from(info.name.as_str()));
            task.suspended = info.suspended;
            match task.migrating {
                _ if info.migrating => {
                    task.migrating = Some(MigrationStatus {
                        target: task.migrating.and_then(|g| g.target),
                        heard_at: now,
                    })
                }
                Some(going) if now.since(going.heard_at) >= MIGRATION_LIST_DELAY => {
                    task.migrating = None
                }
                _ => {}
            }
        }
        for (tid, job) in new {
            // A daemon lists its own user as the owner of each task. A spawned task belongs to the
            // user of its job's top task.
            if let Some(user) = self.tasks.get(&job).map(|top| top.uid) {
                self.set_task_user(tid, user);
            }
        }
    }

    /// Sets the user of a task.
    pub fn set_task_user(&mut self, tid: Tid, user: u32) {
        if let Some(task) = self.edit_task(tid) {
            task.uid = user;
        }
    }

    /// Removes a host that has left, with all its tasks.
    pub fn host_gone(&mut self, id: HostId) {
        self.hosts.remove(&id);
        self.dirty_hosts.insert(id);
        for tid in self.tasks_by_host.remove(&id).unwrap_or_default() {
            // A migration of the task to another host may have been committed. In that case an
            // event names the new host and adds the task again.
            self.tasks.remove(&tid);
        }
    }

    /// Removes a task that has ended for good.
    pub fn task_ended(&mut self, tid: Tid) {
        self.conclude_prediction(tid);
        if let Some(task) = self.tasks.get(&tid) {
            let job = task.job;
            // If the task ended before its work was measured, nothing can be learned from it.
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

    /// Adds a task that was started on a host.
    pub fn task_started(&mut self, now: Micros, tid: Tid, host: HostId, pinned: bool) {
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

    /// Records the constraints of a task's spawn. `named`: the spawn named the task's host.
    pub fn set_task_constraints(&mut self, tid: Tid, named: bool, wants: Constraints) {
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        task.host_named |= named;
        let job = task.job;
        if wants != Constraints::default() {
            task.constraints = Some(Arc::new(wants.clone()));
        }
        if wants.barrier {
            self.snapshot.barrier_jobs.insert(job);
        }
    }

    /// Records the parent and the program of a task. The task belongs to its parent's user, on
    /// whatever host it runs; without a known parent, to its daemon's user.
    fn set_task_origin(&mut self, tid: Tid, (parent, user): (Tid, u32), name: &str) {
        let job = self.job_of(tid, parent);
        let uid = self.tasks.get(&parent).map(|task| task.uid);
        let Some(task) = self.edit_task(tid) else {
            return;
        };
        task.uid = uid.unwrap_or(user);
        let before = std::mem::replace(&mut task.job, job);
        (task.parent, task.name) = (Some(parent), Arc::from(name));
        if before == tid && job != tid {
            self.snapshot.barrier_jobs.remove(&before);
        }
        let Some(task) = self.tasks.get(&tid) else {
            return;
        };
        if task.constraints.as_ref().is_some_and(|wants| wants.barrier) {
            self.snapshot.barrier_jobs.insert(job);
        }
    }

    /// Records that a task was suspended or resumed.
    pub fn task_suspended(&mut self, tid: Tid, suspended: bool) {
        if suspended {
            self.predictions.discard(tid);
        }
        if let Some(task) = self.edit_task(tid) {
            task.suspended = suspended;
        }
    }

    pub fn is_suspended(&self, tid: Tid) -> bool {
        self.tasks.get(&tid).is_some_and(|task| task.suspended)
    }

    pub fn tasks_of(&self, job: Tid) -> Vec<Tid> {
        self.tasks
            .iter()
            .filter(|(_, t)| t.job == job)
            .map(|(tid, _)| *tid)
            .collect()
    }

    /// True while any task of the job of `head` migrates or is suspended.
    pub fn is_job_busy(&self, head: Tid) -> bool {
        let Some(job) = self.tasks.get(&head).map(|task| task.job) else {
            return false;
        };
        self.tasks
            .values()
            .any(|task| task.job == job && (task.migrating.is_some() || task.suspended))
    }

    /// Returns the top task of the job that contains `tid`, by which the job can be
    /// checkpointed.
    ///
    /// `None` if an ancestor of the task has ended or is unknown, because some tasks of the job
    /// cannot be found from the top task then. Also `None` if the top task was started by hand,
    /// because its user would see the job end.
    pub fn checkpoint_root(&self, tid: Tid) -> Option<Tid> {
        let mut at = (tid, self.tasks.get(&tid)?);
        // A chain of parents is at most as long as the number of tasks.
        for _ in 0..self.tasks.len() {
            let above = at.1.parent?;
            if !above.is_task() {
                return Some(at.0);
            }
            at = (
                above,
                self.tasks.get(&above).filter(|parent| !parent.pinned)?,
            );
        }
        None
    }

    /// Returns the tasks of a job that are part of the load of their hosts.
    pub fn computing_tasks_of(&self, job: Tid) -> Vec<Tid> {
        let runs = |tid: &Tid| self.tasks.get(tid).is_some_and(TaskState::computes);
        self.tasks_of(job).into_iter().filter(runs).collect()
    }

    /// True for a known task that has not ended.
    pub fn has_task(&self, tid: Tid) -> bool {
        self.tasks.contains_key(&tid)
    }

    /// True for a known task that is not pinned.
    pub fn is_guest(&self, tid: Tid) -> bool {
        self.tasks.get(&tid).is_some_and(|task| !task.pinned)
    }

    /// Returns the known host of a task. For an unknown task, returns the birth host in its tid.
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
    pub fn migration_cost(&self, tid: Tid, (from, to): (HostId, HostId)) -> Micros {
        let (name, bytes) = self
            .tasks
            .get(&tid)
            .map_or(("", 0), |task| (&*task.name, task.memory_bytes));
        let (estimates, slowness) = (&self.snapshot.estimates, self.snapshot.slowness(from, to));
        estimates.migration_cost(
            estimates.expected_bytes(name, bytes),
            slowness,
            self.host_pair(from, to),
        )
    }

    fn host_pair(&self, from: HostId, to: HostId) -> Option<HostPair> {
        Some(HostPair::between(
            self.snapshot.host(from)?,
            self.snapshot.host(to)?,
        ))
    }

    /// Returns the name of a host, or its number if it is unknown.
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

    /// Applies an entry of the event log.
    pub fn apply_event(&mut self, now: Micros, event: &Event) {
        match self.last_event {
            Some(last) if event.number <= last => {}
            Some(last) if event.number == last + 1 => self.last_event = Some(event.number),
            None => self.last_event = Some(event.number),
            Some(_) => {
                self.needs_refresh = true;
                self.last_event = Some(event.number);
            }
        }
        match &event.kind {
            EventKind::HostGone { host, .. } => self.host_gone(*host),
            EventKind::TaskStarted {
                tid,
                parent,
                name,
                user,
            } => {
                self.task_started(
                    now,
                    *tid,
                    event.host,
                    name.is_empty() || is_load_watcher(name),
                );
                self.set_task_origin(*tid, (*parent, *user), name);
            }
            EventKind::TaskEnded { tid, used, .. } => {
                if let Some(task) = self.tasks.get(tid).filter(|task| !task.pinned) {
                    self.snapshot
                        .estimates
                        .record_size(&task.name, used.resident_max_bytes);
                }
                self.task_ended(*tid);
            }
            EventKind::Restarted { tasks, .. } => {
                // These tasks had ended and have been restarted. A new task list describes them.
                tasks
                    .iter()
                    .for_each(|(tid, _)| self.ended_tasks.remove(*tid));
                self.needs_refresh = true;
            }
            EventKind::MigrationStep { tid, to, .. } => {
                if let Some(task) = self.edit_task(*tid) {
                    task.migrating = Some(MigrationStatus {
                        target: Some(*to),
                        heard_at: now,
                    });
                }
            }
            EventKind::Migrated {
                tid,
                from,
                to,
                cause,
                bytes,
                resident,
                frozen,
                transfer_time: whole,
                ..
            } => {
                let (way, slowness) = (
                    self.host_pair(*from, *to),
                    self.snapshot.slowness(*from, *to),
                );
                let (images, resident, frozen, whole) = (*bytes, *resident, *frozen, *whole);
                self.snapshot.estimates.record_migration(&MigrationSample {
                    pair: way,
                    slowness,
                    image_bytes: images,
                    resident_bytes: resident,
                    frozen,
                    complete_after: whole,
                });
                self.migration_completed(now, *tid, *to, cause, resident);
                if let Some(task) = self.tasks.get(tid) {
                    let cost = self.snapshot.estimates.actual_cost(resident, whole);
                    self.predictions
                        .record_arrival(now, *tid, *to, (task.work_done, cost));
                }
            }
            EventKind::MigrationFailed { tid, to, why, .. } => {
                self.migration_failed(now, *tid, *to, why)
            }
            EventKind::Suspended { tid, .. } => self.task_suspended(*tid, true),
            EventKind::Resumed { tid, .. } => self.task_suspended(*tid, false),
            _ => {}
        }
    }

    /// Applies a load watcher's report. Returns an event to record if the report changes whether
    /// the host accepts guests, or the kind of reason why not.
    pub fn apply_report(&mut self, now: Micros, report: &LoadReport) -> Option<EventKind> {
        let id = report.host;
        let own = self.guests_on(id);
        let host = self.edit_host(id)?;
        host.cores = report.sample.cores.max(1);
        let sampled = TimedSample {
            sample: report.sample,
            received_at: now,
            own_tasks: own,
        };
        let demand = external_demand(&sampled);
        let mean = host.external_mean.map(|mean| mean.updated(now, demand));
        host.external_mean = Some(mean.unwrap_or_else(|| ExternalMean::first(now, demand)));
        host.sample = Some(sampled);
        reports::expire_promises(&mut host.memory_promises, now);
        host.guest_policy = reports::guest_policy_from_report(now, report, &host.guest_policy);
        let was = std::mem::replace(
            &mut host.owner,
            reports::owner_from_report(report, host.owner_left_at),
        );
        if !reports::is_recorded_change(&was, &host.owner) {
            return None;
        }
        if host.owner.excludes_guests() {
            host.clean_reported = false;
        } else {
            host.owner_left_at = Some(now);
            host.owner = reports::owner_from_report(report, host.owner_left_at);
            for tid in self.tasks_by_host.get(&id).into_iter().flatten() {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.reported_stay = None;
                }
            }
        }
        Some(reports::owner_change_event(&was, report))
    }

    /// Brings the input of the decisions up to date as of `now` and returns it. The computing time
    /// depends on the number of hosts changed since the last call.
    pub fn snapshot(&mut self, now: Micros) -> &Snapshot {
        for id in std::mem::take(&mut self.dirty_hosts) {
            self.maybe_clean.insert(id);
            self.update_migrating(id);
            match self.hosts.get(&id) {
                None => self.snapshot.hosts.remove(id),
                Some(host) => {
                    let tasks: Vec<TaskView> = self
                        .tasks_on(id)
                        .map(|(tid, task)| task.view(tid))
                        .collect();
                    let starting = self.starting.get(&id).copied().unwrap_or(0);
                    let view = HostView {
                        starting_tasks: starting,
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
    fn update_migrating(&mut self, id: HostId) {
        for tid in self.tasks_by_host.get(&id).into_iter().flatten() {
            match self.tasks.get(tid).and_then(|task| task.migrating) {
                Some(going) => {
                    self.migrating.insert(*tid);
                    self.maybe_clean.extend(going.target);
                }
                None if self.migrating.is_empty() => {}
                None => drop(self.migrating.remove(tid)),
            }
        }
    }

    /// True if a new host table and task list are needed, because entries of the event log were
    /// missed or no news of a migration arrived for [`MIGRATION_SILENCE_MAX`].
    pub fn is_stale(&self, now: Micros) -> bool {
        // Few tasks migrate at a time. A migration that has just begun may be missing in
        // `migrations`, but its timeout has not expired either.
        let silent = |tid: &Tid| {
            self.tasks
                .get(tid)
                .and_then(|t| t.migrating)
                .is_some_and(|g| now.since(g.heard_at) >= MIGRATION_SILENCE_MAX)
        };
        self.needs_refresh || self.migrating.iter().any(silent)
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
            starting_tasks: 0,
            tasks,
        }
    }
}

impl TaskState {
    /// True if the task is part of its host's load.
    fn computes(&self) -> bool {
        !self.pinned && !self.suspended
    }

    fn view(&self, tid: Tid) -> TaskView {
        TaskView {
            tid,
            pinned: self.pinned,
            migrating: self.migrating.map(|g| g.target),
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
            obstacle: self.obstacle.clone(),
            refused_by: self
                .refused_by
                .iter()
                .map(|(id, (until, _))| (*id, until.clone()))
                .collect(),
        }
    }
}

/// True for tasks that cannot migrate or that serve their host: tasks started from a command line,
/// resource managers, hosters, taskers, load watchers.
fn is_pinned(flags: i32, name: &str) -> bool {
    flags & TASK_FORKED == 0 || flags & TASK_SERVICE_FLAGS != 0 || is_load_watcher(name)
}
