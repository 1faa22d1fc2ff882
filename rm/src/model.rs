//! The resource manager's view of hosts and tasks, updated by host tables, task lists, events and
//! load reports. Pure: every call receives the time, on a monotonic clock.
//!
//! Messages may arrive twice or in another order (an acknowledgement from a host, the event from
//! the master), so every update is idempotent. Entries of the event log are numbered without gaps;
//! a gap requires a fresh task list.

use crate::decide::{
    Estimates, ForeignMean, HostView, Hosts, Journey, Outcome, Owner, Policy, Promises, Sampled,
    Snapshot, StayReason, TaskView, Terms, Until, Wants, Way, foreign_demand,
};
use crate::recent::Recent;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::load::{LoadReport, is_load_watcher};
use sempa_proto::table::{HostTable, TASK_FORKED, TASK_SERVICE_FLAGS, TaskInfo};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

mod closed;
mod moving;
mod reports;
mod starting;
mod work;

/// Maximum number of ended tasks that are remembered, so that late messages about them do not add
/// them again.
const ENDED_MAX: usize = 65_536;
/// Timeout for news of a migration. After it, a task list is requested.
pub const MOVE_SILENT_MAX: Micros = Micros::from_secs(60);
/// A task list that says "not migrating" counts only if the migration began longer ago than this.
/// Otherwise the list may be older than the migration.
const MOVE_YOUNG: Micros = Micros::from_secs(3);
/// Time for which a host is excluded as a target of a task after one failure. Doubles with each
/// further failure, up to [`REFUSED_MAX`].
pub const REFUSED_MIN: Micros = Micros::from_secs(2);
/// Time for which a host is excluded as a target of a task if it has refused the task for a lasting
/// reason or has failed often.
pub const REFUSED_MAX: Micros = Micros::from_secs(60);
/// Delay before the next attempt to migrate a task that has not connected yet.
pub const NOT_YET: Micros = Micros::from_millis(500);

/// Maximum number of remembered migrations per task.
const MOVES_MAX: usize = 6;
/// Minimum interval between two updates of the work of all tasks, because an update examines all
/// hosts.
const ACCOUNT_PAUSE: Micros = Micros::from_millis(500);

/// Labels that the administrator gave the hosts, by host name.
pub type Labels = BTreeMap<String, Arc<BTreeMap<String, String>>>;

#[derive(Debug)]
struct Host {
    name: String,
    arch: String,
    zone: u32,
    labels: Arc<BTreeMap<String, String>>,
    speed: i32,
    cores: u32,
    sample: Option<Sampled>,
    foreign_mean: Option<ForeignMean>,
    /// Memory that spawns have requested, as (request time, bytes).
    promised: VecDeque<(Micros, u64)>,
    owner: Owner,
    /// When the last owner left, on the model's clock.
    left: Option<Micros>,
    terms: Terms,
    /// Task that requested the drain.
    drained: Option<Tid>,
    /// True if the absence of guests was reported already.
    clean_told: bool,
    no_moves: Option<Until>,
}

#[derive(Debug)]
struct Task {
    host: HostId,
    job: Tid,
    /// `None` until an event or a list describes the task.
    parent: Option<Tid>,
    uid: u32,
    name: Arc<str>,
    since: Micros,
    /// True if `since` is the start time. Otherwise `since` is the time when the task was first
    /// seen.
    born: bool,
    done: Micros,
    bytes: u64,
    named: bool,
    wants: Option<Arc<Wants>>,
    shifts: VecDeque<Micros>,
    pinned: bool,
    moving: Option<Going>,
    suspended: bool,
    moves: VecDeque<Micros>,
    held: Option<Until>,
    refused: BTreeMap<HostId, (Until, u32)>,
    told: Option<std::mem::Discriminant<StayReason>>,
}

#[derive(Clone, Copy, Debug)]
struct Going {
    to: Option<HostId>,
    at: Micros,
}

impl Task {
    fn new(host: HostId, job: Tid, since: Micros) -> Task {
        Task {
            host,
            job,
            parent: None,
            uid: 0,
            name: Arc::from(""),
            since,
            born: false,
            done: Micros::default(),
            bytes: 0,
            named: false,
            wants: None,
            shifts: VecDeque::new(),
            pinned: false,
            moving: None,
            suspended: false,
            moves: VecDeque::new(),
            held: None,
            refused: BTreeMap::new(),
            told: None,
        }
    }
}

/// Known state of hosts and tasks.
#[derive(Debug)]
pub struct Model {
    /// Input of the decisions. Its entries for the hosts in `touched` are out of date.
    view: Snapshot,
    touched: BTreeSet<HostId>,
    /// Hosts whose last guest may have left since the last check.
    maybe_clean: BTreeSet<HostId>,
    /// Migrating tasks, as of the last update of the view.
    moving: BTreeSet<Tid>,
    labels: Labels,
    hosts: BTreeMap<HostId, Host>,
    tasks: BTreeMap<Tid, Task>,
    on: BTreeMap<HostId, BTreeSet<Tid>>,
    /// Number of tasks that are being started, by host.
    starting: BTreeMap<HostId, u32>,
    ended: Recent<Tid>,
    last_event: Option<u64>,
    stale: bool,
    accounted: Micros,
    /// Rebalancing migrations whose gain is being measured.
    promises: Promises,
    outcomes: Vec<Outcome>,
    user: u32,
}

impl Model {
    /// Creates an empty model. `local`: host of the resource manager, after which round robin
    /// starts.
    pub fn new(policy: Policy, local: HostId, labels: Labels) -> Model {
        Model {
            view: Snapshot {
                rotation: local,
                ..Snapshot::new(Micros::default(), policy, Hosts::default())
            },
            touched: BTreeSet::new(),
            maybe_clean: BTreeSet::new(),
            moving: BTreeSet::new(),
            labels,
            hosts: BTreeMap::new(),
            tasks: BTreeMap::new(),
            on: BTreeMap::new(),
            starting: BTreeMap::new(),
            ended: Recent::new(ENDED_MAX),
            last_event: None,
            stale: false,
            accounted: Micros::default(),
            promises: Promises::default(),
            outcomes: Vec::new(),
            user: 0,
        }
    }

    pub fn set_policy(&mut self, policy: Policy, margin: f64) {
        self.view.policy = policy;
        self.view.costs.margin_percent = (margin * 100.0).round() as u32;
    }

    /// Returns the number of tasks of the virtual machine that are part of a host's load.
    pub fn guests_on(&self, host: HostId) -> u32 {
        u32::try_from(
            self.tasks_on(host)
                .filter(|(_, task)| task.is_load())
                .count(),
        )
        .unwrap_or(u32::MAX)
    }

    /// Sets the user to whom tasks belong if their user is not known.
    pub fn set_user(&mut self, user: u32) {
        self.user = user;
    }

    /// Returns the values learned from tasks and migrations.
    pub fn estimates(&self) -> &Estimates {
        &self.view.estimates
    }

    /// Replaces the learned values by values from the history.
    pub fn recall_estimates(&mut self, estimates: Estimates) {
        self.view.estimates = estimates;
    }

    /// Restores the job and the start time of a task; task lists lack both.
    pub fn recall_task(&mut self, tid: Tid, job: Tid, since: Micros) {
        if let Some(task) = self.edit(tid) {
            (task.job, task.since, task.born) = (job, since, true);
        }
    }

    /// Sets the host after which the next round-robin placement starts.
    pub fn set_rotation(&mut self, rotation: HostId) {
        self.view.rotation = rotation;
    }

    /// Returns a task for modification and marks its host as changed. The caller must not change
    /// the task's host.
    fn edit(&mut self, tid: Tid) -> Option<&mut Task> {
        let task = self.tasks.get_mut(&tid)?;
        self.touched.insert(task.host);
        Some(task)
    }

    /// Returns a host for modification and marks it as changed.
    fn edit_host(&mut self, id: HostId) -> Option<&mut Host> {
        let host = self.hosts.get_mut(&id)?;
        self.touched.insert(id);
        Some(host)
    }

    /// Sets the host of a task; adds the task if it is unknown.
    fn settle(&mut self, now: Micros, tid: Tid, host: HostId) -> &mut Task {
        let uid = self.user;
        let task = self.tasks.entry(tid).or_insert_with(|| Task {
            uid,
            ..Task::new(host, tid, now)
        });
        if let Some(tids) = self.on.get_mut(&task.host).filter(|_| task.host != host) {
            tids.remove(&tid);
        }
        self.touched.extend([task.host, host]);
        task.host = host;
        self.on.entry(host).or_default().insert(tid);
        task
    }

    fn remove(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.remove(&tid) {
            self.touched.insert(task.host);
            if let Some(tids) = self.on.get_mut(&task.host) {
                tids.remove(&tid);
            }
        }
    }

    fn tasks_on(&self, host: HostId) -> impl Iterator<Item = (Tid, &Task)> {
        self.on
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
            self.touched.insert(entry.id);
            let host = self.hosts.entry(entry.id).or_insert_with(|| {
                new.push(entry.id);
                Host {
                    name: String::new(),
                    arch: String::new(),
                    zone: 0,
                    labels: Arc::default(),
                    speed: 0,
                    cores: 1,
                    sample: None,
                    foreign_mean: None,
                    promised: VecDeque::new(),
                    owner: Owner::Unknown,
                    left: None,
                    terms: Terms::default(),
                    drained: None,
                    clean_told: false,
                    no_moves: None,
                }
            });
            (host.name, host.arch, host.speed) =
                (entry.name.clone(), entry.arch.clone(), entry.speed);
            host.zone = entry.zone();
            host.labels = self.labels.get(&entry.name).cloned().unwrap_or_default();
        }
        new
    }

    /// Applies a list of all tasks that was requested at `now`.
    pub fn set_tasks(&mut self, now: Micros, tasks: &[TaskInfo]) {
        self.stale = false;
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
            self.remove(tid);
        }
        let mut new = Vec::new();
        for info in tasks {
            if self.ended.has(info.tid) {
                continue;
            }
            let job = self.job_of(info.tid, info.parent);
            let is_new = !self.tasks.contains_key(&info.tid);
            let task = self.settle(now, info.tid, info.host);
            if is_new {
                task.uid = info.uid;
                new.push((info.tid, job));
            }
            task.pinned |= is_pinned(info.flags, &info.name);
            (task.job, task.parent, task.name) =
                (job, Some(info.parent), Arc::from(info.name.as_str()));
            task.suspended = info.suspended;
            match task.moving {
                _ if info.migrating => {
                    task.moving = Some(Going {
                        to: task.moving.and_then(|g| g.to),
                        at: now,
                    })
                }
                Some(going) if now.since(going.at) >= MOVE_YOUNG => task.moving = None,
                _ => {}
            }
        }
        for (tid, job) in new {
            // A daemon lists its own user as the owner of each task. A spawned task belongs to the
            // user of its job's top task.
            if let Some(user) = self.tasks.get(&job).map(|top| top.uid) {
                self.belongs(tid, user);
            }
        }
    }

    /// Sets the user of a task.
    pub fn belongs(&mut self, tid: Tid, user: u32) {
        if let Some(task) = self.edit(tid) {
            task.uid = user;
        }
    }

    /// Removes a host that has left, with all its tasks.
    pub fn host_gone(&mut self, id: HostId) {
        self.hosts.remove(&id);
        self.touched.insert(id);
        for tid in self.on.remove(&id).unwrap_or_default() {
            // A migration of the task to another host may have been committed. In that case an
            // event names the new host and adds the task again.
            self.tasks.remove(&tid);
        }
    }

    /// Removes a task that has ended for good.
    pub fn task_ended(&mut self, tid: Tid) {
        self.promise_ended(tid);
        if let Some(task) = self.tasks.get(&tid) {
            let job = task.job;
            // If the task ended before its work was measured, nothing can be learned from it.
            if task.born && !task.pinned && task.done > Micros::default() {
                self.view.estimates.ended(&task.name, task.done);
            }
            if self.view.barriers.contains(&job)
                && !self
                    .tasks
                    .iter()
                    .any(|(t, other)| *t != tid && other.job == job)
            {
                self.view.barriers.remove(&job);
            }
        }
        self.remove(tid);
        self.ended.put(tid);
    }

    /// Adds a task that was started on a host.
    pub fn task_started(&mut self, now: Micros, tid: Tid, host: HostId, pinned: bool) {
        if self.ended.has(tid) || !tid.is_task() {
            return;
        }
        if !self.tasks.contains_key(&tid) {
            self.settle(now, tid, host).born = true;
        }
        if let Some(task) = self.edit(tid) {
            task.pinned |= pinned;
        }
    }

    /// Sets the job of a task whose parent is unknown. Has no effect after an event or a list has
    /// described the task.
    pub fn task_of(&mut self, tid: Tid, job: Tid) {
        if let Some(task) = self.edit(tid).filter(|task| task.parent.is_none()) {
            task.job = job;
        }
    }

    /// Records the constraints of a task's spawn. `named`: the spawn named the task's host.
    pub fn task_wanted(&mut self, tid: Tid, named: bool, wants: Wants) {
        let Some(task) = self.edit(tid) else { return };
        task.named |= named;
        let job = task.job;
        if wants != Wants::default() {
            task.wants = Some(Arc::new(wants.clone()));
        }
        if wants.barrier {
            self.view.barriers.insert(job);
        }
    }

    /// Records the parent and the program of a task. The task belongs to its parent's user, on
    /// whatever host it runs; without a known parent, to its daemon's user.
    fn task_described(&mut self, tid: Tid, (parent, user): (Tid, u32), name: &str) {
        let job = self.job_of(tid, parent);
        let uid = self.tasks.get(&parent).map(|task| task.uid);
        let Some(task) = self.edit(tid) else { return };
        task.uid = uid.unwrap_or(user);
        let before = std::mem::replace(&mut task.job, job);
        (task.parent, task.name) = (Some(parent), Arc::from(name));
        if before == tid && job != tid {
            self.view.barriers.remove(&before);
        }
        let Some(task) = self.tasks.get(&tid) else {
            return;
        };
        if task.wants.as_ref().is_some_and(|wants| wants.barrier) {
            self.view.barriers.insert(job);
        }
    }

    /// Records that a task was suspended or resumed.
    pub fn task_suspended(&mut self, tid: Tid, suspended: bool) {
        if suspended {
            self.promises.dropped(tid);
        }
        if let Some(task) = self.edit(tid) {
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
    pub fn is_busy(&self, head: Tid) -> bool {
        let Some(job) = self.tasks.get(&head).map(|task| task.job) else {
            return false;
        };
        self.tasks
            .values()
            .any(|task| task.job == job && (task.moving.is_some() || task.suspended))
    }

    /// Returns the top task of the job that contains `tid`, by which the job can be checkpointed.
    ///
    /// `None` if an ancestor of the task has ended or is unknown, because some tasks of the job
    /// cannot be found from the top task then. Also `None` if the top task was started by hand,
    /// because its user would see the job end.
    pub fn head_of(&self, tid: Tid) -> Option<Tid> {
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
    pub fn running_of(&self, job: Tid) -> Vec<Tid> {
        let runs = |tid: &Tid| self.tasks.get(tid).is_some_and(Task::is_load);
        self.tasks_of(job).into_iter().filter(runs).collect()
    }

    /// True for a known task that has not ended.
    pub fn knows(&self, tid: Tid) -> bool {
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
            .map_or((self.user, tid), |task| (task.uid, task.job))
    }

    pub fn has_host(&self, id: HostId) -> bool {
        self.hosts.contains_key(&id)
    }

    /// Returns all hosts by ascending id.
    pub fn host_ids(&self) -> Vec<HostId> {
        self.hosts.keys().copied().collect()
    }

    /// Returns the expected cost of migrating a task, as of the latest snapshot.
    pub fn cost(&self, tid: Tid, (from, to): (HostId, HostId)) -> Micros {
        let (name, bytes) = self
            .tasks
            .get(&tid)
            .map_or(("", 0), |task| (&*task.name, task.bytes));
        let (estimates, slowness) = (&self.view.estimates, self.view.slowness(from, to));
        estimates.cost(estimates.bytes(name, bytes), slowness, self.way(from, to))
    }

    fn way(&self, from: HostId, to: HostId) -> Option<Way> {
        Some(Way::between(self.view.host(from)?, self.view.host(to)?))
    }

    /// Returns the name of a host, or its number if it is unknown.
    pub fn host_name(&self, id: HostId) -> String {
        self.hosts
            .get(&id)
            .map_or_else(|| id.to_string(), |h| h.name.clone())
    }

    pub fn host_called(&self, name: &str) -> Option<HostId> {
        self.hosts
            .iter()
            .find(|(_, host)| host.name == name)
            .map(|(id, _)| *id)
    }

    /// Applies an entry of the event log.
    pub fn event(&mut self, now: Micros, event: &Event) {
        match self.last_event {
            Some(last) if event.number <= last => {}
            Some(last) if event.number == last + 1 => self.last_event = Some(event.number),
            None => self.last_event = Some(event.number),
            Some(_) => {
                self.stale = true;
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
                self.task_described(*tid, (*parent, *user), name);
            }
            EventKind::TaskEnded { tid, used, .. } => {
                if let Some(task) = self.tasks.get(tid).filter(|task| !task.pinned) {
                    self.view
                        .estimates
                        .sized(&task.name, used.resident_max_bytes);
                }
                self.task_ended(*tid);
            }
            EventKind::Restarted { tasks, .. } => {
                // These tasks had ended and have been restarted. A new task list describes them.
                tasks.iter().for_each(|(tid, _)| self.ended.forget(*tid));
                self.stale = true;
            }
            EventKind::MigrationStep { tid, to, .. } => {
                if let Some(task) = self.edit(*tid) {
                    task.moving = Some(Going {
                        to: Some(*to),
                        at: now,
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
                let (way, slowness) = (self.way(*from, *to), self.view.slowness(*from, *to));
                let (images, resident, frozen, whole) = (*bytes, *resident, *frozen, *whole);
                self.view.estimates.moved(&Journey {
                    way,
                    slowness,
                    images,
                    resident,
                    frozen,
                    whole,
                });
                self.moved(now, *tid, *to, cause, resident);
                if let Some(task) = self.tasks.get(tid) {
                    let cost = self.view.estimates.came(resident, whole);
                    self.promises.arrived(now, *tid, *to, (task.done, cost));
                }
            }
            EventKind::MigrationFailed { tid, to, why, .. } => {
                self.move_failed(now, *tid, *to, why)
            }
            EventKind::Suspended { tid, .. } => self.task_suspended(*tid, true),
            EventKind::Resumed { tid, .. } => self.task_suspended(*tid, false),
            _ => {}
        }
    }

    /// Applies a load watcher's report. Returns an event to record if the report changes whether
    /// the host accepts guests, or the kind of reason why not.
    pub fn report(&mut self, now: Micros, report: &LoadReport) -> Option<EventKind> {
        let id = report.host;
        let own = self.guests_on(id);
        let host = self.edit_host(id)?;
        host.cores = report.sample.cores.max(1);
        let sampled = Sampled {
            sample: report.sample,
            at: now,
            own,
        };
        let demand = foreign_demand(&sampled);
        let mean = host.foreign_mean.map(|mean| mean.after(now, demand));
        host.foreign_mean = Some(mean.unwrap_or_else(|| ForeignMean::first(now, demand)));
        host.sample = Some(sampled);
        reports::keep_promises(&mut host.promised, now);
        host.terms = reports::terms(now, report, &host.terms);
        let was = std::mem::replace(&mut host.owner, reports::owner(report, host.left));
        if !reports::is_news(&was, &host.owner) {
            return None;
        }
        if host.owner.is_present() {
            host.clean_told = false;
        } else {
            host.left = Some(now);
            host.owner = reports::owner(report, host.left);
            for tid in self.on.get(&id).into_iter().flatten() {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.told = None;
                }
            }
        }
        Some(reports::came_or_went(&was, report))
    }

    /// Brings the input of the decisions up to date as of `now` and returns it. The computing time
    /// depends on the number of hosts changed since the last call.
    pub fn snapshot(&mut self, now: Micros) -> &Snapshot {
        for id in std::mem::take(&mut self.touched) {
            self.maybe_clean.insert(id);
            self.know_moving(id);
            match self.hosts.get(&id) {
                None => self.view.hosts.remove(id),
                Some(host) => {
                    let tasks: Vec<TaskView> = self
                        .tasks_on(id)
                        .map(|(tid, task)| task.view(tid))
                        .collect();
                    let starting = self.starting.get(&id).copied().unwrap_or(0);
                    let view = HostView {
                        starting,
                        ..host.view(id, tasks)
                    };
                    self.view.hosts.put(view);
                }
            }
        }
        self.view.hosts.refresh(now);
        self.view.now = now;
        &self.view
    }

    /// Updates the set of migrating tasks for the tasks of one host. The targets of these
    /// migrations must be checked for guests again.
    fn know_moving(&mut self, id: HostId) {
        for tid in self.on.get(&id).into_iter().flatten() {
            match self.tasks.get(tid).and_then(|task| task.moving) {
                Some(going) => {
                    self.moving.insert(*tid);
                    self.maybe_clean.extend(going.to);
                }
                None if self.moving.is_empty() => {}
                None => drop(self.moving.remove(tid)),
            }
        }
    }

    /// True if a new host table and task list are needed, because entries of the event log were
    /// missed or no news of a migration arrived for [`MOVE_SILENT_MAX`].
    pub fn is_stale(&self, now: Micros) -> bool {
        // Few tasks migrate at a time. A migration that has just begun may be missing in `moving`,
        // but its timeout has not expired either.
        let silent = |tid: &Tid| {
            self.tasks
                .get(tid)
                .and_then(|t| t.moving)
                .is_some_and(|g| now.since(g.at) >= MOVE_SILENT_MAX)
        };
        self.stale || self.moving.iter().any(silent)
    }
}

impl Host {
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
            foreign_mean: self.foreign_mean,
            promised: self
                .promised
                .iter()
                .fold(0, |sum, (_, bytes)| bytes.saturating_add(sum)),
            owner: self.keeper(),
            terms: self.terms.clone(),
            no_moves: self.no_moves.clone(),
            starting: 0,
            tasks,
        }
    }
}

impl Task {
    /// True if the task is part of its host's load.
    fn is_load(&self) -> bool {
        !self.pinned && !self.suspended
    }

    fn view(&self, tid: Tid) -> TaskView {
        TaskView {
            tid,
            pinned: self.pinned,
            moving: self.moving.map(|g| g.to),
            suspended: self.suspended,
            user: self.uid,
            job: self.job,
            name: self.name.clone(),
            since: self.since,
            done: self.done,
            bytes: self.bytes,
            named: self.named,
            wants: self.wants.clone(),
            shifts: self.shifts.iter().copied().collect(),
            moves: self.moves.iter().copied().collect(),
            held: self.held.clone(),
            refused: self
                .refused
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
