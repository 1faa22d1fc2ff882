//! What the resource manager knows of hosts and tasks, kept up to date by host tables, task lists, events and load
//! reports. Pure: every call is told the time, on a clock that never jumps.
//!
//! What it hears may come twice or in another order (an acknowledgement from a host, the event from the master), so every
//! update may be repeated. Entries of the event log are numbered without gaps; a gap asks for a fresh task list.

use crate::decide::{
    Estimates, ForeignMean, HostView, Hosts, Owner, Policy, REST, SHIFTS_SPAN, Sampled, Snapshot, StayReason, TaskView,
    Terms, Until, Wants, foreign_demand,
};
use crate::recent::Recent;
use libpvm::MigrateError;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::load::{LoadReport, is_watcher};
use sempa_proto::migration::{Cause, Failure, Refusal};
use sempa_proto::table::{HostTable, TASK_FORKED, TASK_SERVES, TaskInfo};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

mod closed;
mod reports;
mod starting;

/// Ended tasks that are remembered, so that late news of them does not bring them back.
const ENDED_MAX: usize = 65_536;
/// A move is asked about when no news of it came for so long.
pub const MOVE_SILENT_MAX: Micros = Micros::from_secs(60);
/// A task list that says "not moving" is believed only when the move was begun longer ago than this: before, the list may
/// be older than the move.
const MOVE_YOUNG: Micros = Micros::from_secs(3);
/// A target that failed once is left out for this long, twice as long after each further failure, up to
/// [`REFUSED_MAX`].
pub const REFUSED_MIN: Micros = Micros::from_secs(2);
/// A target that refused for a lasting reason, or failed often, is left out for this long.
pub const REFUSED_MAX: Micros = Micros::from_secs(60);
/// A task that has just started is asked again after this: it has not connected yet.
pub const NOT_YET: Micros = Micros::from_millis(500);

/// Moves of a task that are remembered.
const MOVES_MAX: usize = 6;
/// What tasks have done is reckoned up at changes, but not more often than this: it looks at all hosts.
const ACCOUNT_PAUSE: Micros = Micros::from_millis(500);

/// What the administrator says of hosts, by their names.
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
    owner: Owner,
    /// When the last one left, on the model's clock.
    left: Option<Micros>,
    terms: Terms,
    /// Who has it emptied.
    drained: Option<Tid>,
    /// That no guest is left has been said.
    clean_told: bool,
    no_moves: Option<Until>,
}

#[derive(Debug)]
struct Task {
    host: HostId,
    job: Tid,
    /// Known when somebody has described it.
    parent: Option<Tid>,
    uid: u32,
    name: Arc<str>,
    since: Micros,
    /// `since` is when it started, and not only when it was first heard of.
    born: bool,
    done: Micros,
    bytes: u64,
    named: bool,
    wants: Option<Arc<Wants>>,
    shifts: VecDeque<Micros>,
    pinned: bool,
    asked: bool,
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
            asked: false,
            moving: None,
            suspended: false,
            moves: VecDeque::new(),
            held: None,
            refused: BTreeMap::new(),
            told: None,
        }
    }
}

/// What is known.
#[derive(Debug)]
pub struct Model {
    /// What decisions are made from; hosts in `touched` are not up to date in it.
    view: Snapshot,
    touched: BTreeSet<HostId>,
    labels: Labels,
    hosts: BTreeMap<HostId, Host>,
    tasks: BTreeMap<Tid, Task>,
    /// The tasks of each host.
    on: BTreeMap<HostId, BTreeSet<Tid>>,
    /// Tasks that are being started on each host.
    starting: BTreeMap<HostId, u32>,
    ended: Recent<Tid>,
    last_event: Option<u64>,
    stale: bool,
    accounted: Micros,
    user: u32,
}

impl Model {
    /// Knows nothing; `local` is the host of the resource manager, behind which round robin begins.
    pub fn new(policy: Policy, local: HostId, labels: Labels) -> Model {
        Model {
            view: Snapshot { rotation: local, ..Snapshot::new(Micros::default(), policy, Hosts::default()) },
            touched: BTreeSet::new(),
            labels,
            hosts: BTreeMap::new(),
            tasks: BTreeMap::new(),
            on: BTreeMap::new(),
            starting: BTreeMap::new(),
            ended: Recent::new(ENDED_MAX),
            last_event: None,
            stale: false,
            accounted: Micros::default(),
            user: 0,
        }
    }

    /// Another policy from now on.
    pub fn set_policy(&mut self, policy: Policy, margin: f64) {
        self.view.policy = policy;
        self.view.costs.margin_percent = (margin * 100.0).round() as u32;
    }

    /// Tasks of ours on a host that are part of its load.
    pub fn guests_on(&self, host: HostId) -> u32 {
        u32::try_from(self.tasks_on(host).filter(|(_, task)| task.is_load()).count()).unwrap_or(u32::MAX)
    }

    /// The user of tasks of whom nothing else is known.
    pub fn set_user(&mut self, user: u32) {
        self.user = user;
    }

    /// What was learned of tasks and moves.
    pub fn estimates(&self) -> &Estimates {
        &self.view.estimates
    }

    /// Goes on with what was learned before.
    pub fn recall_estimates(&mut self, estimates: Estimates) {
        self.view.estimates = estimates;
    }

    /// A task of which more is known than lists say: its job, and since when it runs.
    pub fn recall_task(&mut self, tid: Tid, job: Tid, since: Micros) {
        if let Some(task) = self.edit(tid) {
            (task.job, task.since, task.born) = (job, since, true);
        }
    }

    /// Where the rotation of round robin stands.
    pub fn set_rotation(&mut self, rotation: HostId) {
        self.view.rotation = rotation;
    }

    /// A task, to be changed; not its host.
    fn edit(&mut self, tid: Tid) -> Option<&mut Task> {
        let task = self.tasks.get_mut(&tid)?;
        self.touched.insert(task.host);
        Some(task)
    }

    /// A host, to be changed.
    fn edit_host(&mut self, id: HostId) -> Option<&mut Host> {
        let host = self.hosts.get_mut(&id)?;
        self.touched.insert(id);
        Some(host)
    }

    /// The task is on this host; it is taken up when it was not known.
    fn settle(&mut self, now: Micros, tid: Tid, host: HostId) -> &mut Task {
        let uid = self.user;
        let task = self.tasks.entry(tid).or_insert_with(|| Task { uid, ..Task::new(host, tid, now) });
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

    /// The tasks on a host.
    fn tasks_on(&self, host: HostId) -> impl Iterator<Item = (Tid, &Task)> {
        self.on.get(&host).into_iter().flatten().filter_map(|tid| Some((*tid, self.tasks.get(tid)?)))
    }

    /// The job of a task whose parent is known: that of the parent.
    fn job_of(&self, tid: Tid, parent: Tid) -> Tid {
        let top = if parent.is_task() { parent } else { tid };
        self.tasks.get(&parent).map_or(top, |task| task.job)
    }

    /// Takes a host table over. Answers the hosts that are new.
    pub fn set_hosts(&mut self, table: &HostTable) -> Vec<HostId> {
        let gone: Vec<HostId> = self.hosts.keys().copied().filter(|id| table.get(*id).is_none()).collect();
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
                    owner: Owner::Unknown,
                    left: None,
                    terms: Terms::default(),
                    drained: None,
                    clean_told: false,
                    no_moves: None,
                }
            });
            (host.name, host.arch, host.speed) = (entry.name.clone(), entry.arch.clone(), entry.speed);
            host.zone = entry.zone();
            host.labels = self.labels.get(&entry.name).cloned().unwrap_or_default();
        }
        new
    }

    /// Takes a list of all tasks over, taken at `now`.
    pub fn set_tasks(&mut self, now: Micros, tasks: &[TaskInfo]) {
        self.stale = false;
        let listed: HashSet<Tid> = tasks.iter().map(|info| info.tid).collect();
        let gone: Vec<Tid> = self.tasks.keys().copied().filter(|tid| !listed.contains(tid)).collect();
        for tid in gone {
            // Not counted as ended: it may have been started after the list was made.
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
            (task.job, task.parent, task.name) = (job, Some(info.parent), Arc::from(info.name.as_str()));
            task.suspended = info.suspended;
            match task.moving {
                _ if info.moving => task.moving = Some(Going { to: task.moving.and_then(|g| g.to), at: now }),
                Some(going) if now.since(going.at) >= MOVE_YOUNG => task.moving = None,
                _ => {}
            }
        }
        for (tid, job) in new {
            // A daemon lists its own user; whose program it is, the top of its job tells.
            if let Some(user) = self.tasks.get(&job).map(|top| top.uid) {
                self.belongs(tid, user);
            }
        }
    }

    /// A task is this user's.
    pub fn belongs(&mut self, tid: Tid, user: u32) {
        if let Some(task) = self.edit(tid) {
            task.uid = user;
        }
    }

    /// A host has left, and with it all its tasks.
    pub fn host_gone(&mut self, id: HostId) {
        self.hosts.remove(&id);
        self.touched.insert(id);
        for tid in self.on.remove(&id).unwrap_or_default() {
            // A move away may have been committed; then an event says where the task is, and it is back.
            self.tasks.remove(&tid);
        }
    }

    /// A task has ended for good.
    pub fn task_ended(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get(&tid) {
            let job = task.job;
            // What ended before anything was counted says nothing.
            if task.born && !task.pinned && task.done > Micros::default() {
                self.view.estimates.ended(&task.name, task.done);
            }
            if self.view.barriers.contains(&job) && !self.tasks.iter().any(|(t, other)| *t != tid && other.job == job) {
                self.view.barriers.remove(&job);
            }
        }
        self.remove(tid);
        self.ended.put(tid);
    }

    /// A task was started on a host. `asked`: somebody named the host for it.
    pub fn task_started(&mut self, now: Micros, tid: Tid, host: HostId, pinned: bool, asked: bool) {
        if self.ended.has(tid) || !tid.is_task() {
            return;
        }
        let with_owner = self.hosts.get(&host).is_some_and(|h| h.owner.is_present());
        if !self.tasks.contains_key(&tid) {
            self.settle(now, tid, host).born = true;
        }
        if let Some(task) = self.edit(tid) {
            task.pinned |= pinned;
            task.asked |= asked && with_owner;
        }
    }

    /// What the spawn of a task required. `named`: it named the host.
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

    /// Whose child a task is, and what it runs. It is its parent's user's, wherever it runs; without one its own daemon's user's.
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
        let Some(task) = self.tasks.get(&tid) else { return };
        if task.wants.as_ref().is_some_and(|wants| wants.barrier) {
            self.view.barriers.insert(job);
        }
    }

    /// A task stands still until somebody lets it go on, or goes on.
    pub fn task_suspended(&mut self, tid: Tid, suspended: bool) {
        if let Some(task) = self.edit(tid) {
            task.suspended = suspended;
        }
    }

    /// Whether a task is suspended.
    pub fn is_suspended(&self, tid: Tid) -> bool {
        self.tasks.get(&tid).is_some_and(|task| task.suspended)
    }

    /// The tasks of a job.
    pub fn tasks_of(&self, job: Tid) -> Vec<Tid> {
        self.tasks.iter().filter(|(_, t)| t.job == job).map(|(tid, _)| *tid).collect()
    }

    /// True while a task of the family of this one moves, or stands still because its user wants that.
    pub fn is_busy(&self, head: Tid) -> bool {
        let Some(job) = self.tasks.get(&head).map(|task| task.job) else { return false };
        self.tasks.values().any(|task| task.job == job && (task.moving.is_some() || task.suspended))
    }

    /// The first task of a job that can be checkpointed: the one without a parent above this one. `None` when one between them has
    /// ended, because the others are not found from there; when one is not known yet; and when somebody has started the first
    /// one by hand, who would see its children end.
    pub fn head_of(&self, tid: Tid) -> Option<Tid> {
        let mut at = (tid, self.tasks.get(&tid)?);
        // A family is no deeper than there are tasks.
        for _ in 0..self.tasks.len() {
            let above = at.1.parent?;
            if !above.is_task() {
                return Some(at.0);
            }
            at = (above, self.tasks.get(&above).filter(|parent| !parent.pinned)?);
        }
        None
    }

    /// Those of them that are part of the load of their hosts.
    pub fn running_of(&self, job: Tid) -> Vec<Tid> {
        let runs = |tid: &Tid| self.tasks.get(tid).is_some_and(Task::is_load);
        self.tasks_of(job).into_iter().filter(runs).collect()
    }

    /// True for a task that is known and has not ended.
    pub fn knows(&self, tid: Tid) -> bool {
        self.tasks.contains_key(&tid)
    }

    /// True for a task of ours that is known and does not belong to its host.
    pub fn is_guest(&self, tid: Tid) -> bool {
        self.tasks.get(&tid).is_some_and(|task| !task.pinned)
    }

    /// The host on which a task runs: as known, else where it was born.
    pub fn host_of(&self, tid: Tid) -> Option<HostId> {
        self.tasks.get(&tid).map(|t| t.host).or_else(|| tid.home())
    }

    /// User and job of a task. Of one that is not known, the own user and its own job.
    pub fn user_and_job(&self, tid: Tid) -> (u32, Tid) {
        self.tasks.get(&tid).map_or((self.user, tid), |task| (task.uid, task.job))
    }

    /// True when the host is in the table.
    pub fn has_host(&self, id: HostId) -> bool {
        self.hosts.contains_key(&id)
    }

    /// The hosts by rising id.
    pub fn host_ids(&self) -> Vec<HostId> {
        self.hosts.keys().copied().collect()
    }

    /// Bytes of a task's newest image; 0 when nobody knows.
    pub fn bytes_of(&self, tid: Tid) -> u64 {
        self.tasks.get(&tid).map_or(0, |task| task.bytes)
    }

    /// How slow the hosts of a move are for its own work, as of the newest snapshot.
    pub fn slowness(&self, from: HostId, to: HostId) -> f64 {
        self.view.slowness(from, to)
    }

    /// Name of a host, or its number when it is not known.
    pub fn host_name(&self, id: HostId) -> String {
        self.hosts.get(&id).map_or_else(|| id.to_string(), |h| h.name.clone())
    }

    /// The host of this name.
    pub fn host_called(&self, name: &str) -> Option<HostId> {
        self.hosts.iter().find(|(_, host)| host.name == name).map(|(id, _)| *id)
    }

    /// Takes an entry of the event log in.
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
            EventKind::TaskStarted { tid, parent, name, user } => {
                self.task_started(now, *tid, event.host, name.is_empty() || is_watcher(name), false);
                self.task_described(*tid, (*parent, *user), name);
            }
            EventKind::TaskEnded { tid, .. } => self.task_ended(*tid),
            EventKind::Restarted { tasks, .. } => {
                // They had ended, and live again; what they are a fresh list says.
                tasks.iter().for_each(|(tid, _)| self.ended.forget(*tid));
                self.stale = true;
            }
            EventKind::Moving { tid, to, .. } => {
                if let Some(task) = self.edit(*tid) {
                    task.moving = Some(Going { to: Some(*to), at: now });
                }
            }
            EventKind::Moved { tid, from, to, cause, bytes, frozen, .. } => {
                let slowness = self.slowness(*from, *to);
                self.view.estimates.moved(*bytes, *frozen, slowness);
                self.moved(now, *tid, *to, cause, *bytes);
            }
            EventKind::MoveFailed { tid, to, why, .. } => self.move_failed(now, *tid, *to, why),
            EventKind::Suspended { tid, .. } => self.task_suspended(*tid, true),
            EventKind::Resumed { tid, .. } => self.task_suspended(*tid, false),
            _ => {}
        }
    }

    fn moved(&mut self, now: Micros, tid: Tid, to: HostId, cause: &Cause, bytes: u64) {
        if self.ended.has(tid) {
            return;
        }
        let with_owner = self.hosts.get(&to).is_some_and(|h| h.owner.is_present());
        let task = self.settle(now, tid, to);
        (task.moving, task.held, task.told, task.bytes) = (None, None, None, bytes);
        task.asked = with_owner && matches!(cause, Cause::Asked { .. });
        task.refused.clear();
        task.named |= matches!(cause, Cause::Asked { .. });
        if matches!(cause, Cause::Load { .. }) {
            task.shifts.push_back(now);
            while task.shifts.front().is_some_and(|at| now.since(*at) > SHIFTS_SPAN) {
                task.shifts.pop_front();
            }
        }
        if !matches!(cause, Cause::Asked { .. }) {
            task.moves.push_back(now);
            while task.moves.len() > MOVES_MAX || task.moves.front().is_some_and(|at| now.since(*at) > REST) {
                task.moves.pop_front();
            }
        }
    }

    /// A move that we asked for has begun.
    pub fn move_begun(&mut self, now: Micros, tid: Tid, to: HostId) {
        if let Some(task) = self.edit(tid) {
            task.moving = Some(Going { to: Some(to), at: now });
        }
    }

    /// The master did not begin a move that we asked for.
    pub fn move_not_begun(&mut self, now: Micros, tid: Tid, to: HostId, error: &MigrateError) {
        let refused = match error {
            MigrateError::Failed(error) => return self.move_failed(now, tid, to, &error.why),
            MigrateError::Refused(error) => error,
        };
        match refused.code {
            PvmError::NoTask => self.task_ended(tid),
            PvmError::NoHost | PvmError::HostFail => self.target_failed(now, tid, to, REFUSED_MIN, &refused.reason),
            PvmError::Already => self.hold(tid, now + NOT_YET, &refused.reason),
            PvmError::OutOfRes => self.hold(tid, now + REFUSED_MIN, &refused.reason),
            PvmError::NotImpl | PvmError::SysErr | PvmError::DSysErr => {
                self.hold(tid, now + REFUSED_MAX, &refused.reason)
            }
            _ => self.target_failed(now, tid, to, REFUSED_MIN, &refused.reason),
        }
    }

    /// A move has failed; the task goes on where it was.
    pub fn move_failed(&mut self, now: Micros, tid: Tid, to: HostId, why: &Failure) {
        let Some(task) = self.edit(tid) else { return };
        task.moving = None;
        let from = task.host;
        match why {
            // The event that says so is on its way.
            Failure::TaskEnded => self.hold(tid, now + NOT_YET, &why.to_string()),
            Failure::Refused(reasons) if reasons.is_empty() => {
                self.target_failed(now, tid, to, REFUSED_MIN, "it refused without a reason");
            }
            Failure::Refused(reasons) => reasons.iter().for_each(|r| self.refused(now, tid, from, to, r)),
            Failure::HostLost(host) if *host == from => self.hold(tid, now + REFUSED_MIN, &why.to_string()),
            other => self.target_failed(now, tid, to, REFUSED_MIN, &other.to_string()),
        }
    }

    fn refused(&mut self, now: Micros, tid: Tid, from: HostId, to: HostId, why: &Refusal) {
        let text = why.to_string();
        match why {
            Refusal::NoSuchTask => self.task_ended(tid),
            Refusal::NotSpawned | Refusal::Pinned => {
                if let Some(task) = self.edit(tid) {
                    task.pinned = true;
                }
            }
            // Our view is old; a fresh list says where it is.
            Refusal::AlreadyThere | Refusal::AlreadyMoving(_) | Refusal::NoSuchHost => {
                self.stale = true;
                self.hold(tid, now + NOT_YET, &text);
            }
            Refusal::NotConnected => self.hold(tid, now + NOT_YET, &text),
            Refusal::TooManyMoves { .. } => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::Suspended | Refusal::MayEndYet => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::Holds { .. }
            | Refusal::FilesStay { .. }
            | Refusal::FilesTooLarge { .. }
            | Refusal::NotByCriu { .. } => {
                self.hold(tid, now + REFUSED_MAX, &text);
            }
            Refusal::NoEngine { host, .. } if *host == from => self.hold(tid, now + REFUSED_MAX, &text),
            Refusal::NoEngine { host, .. } => match self.edit_host(*host) {
                Some(host) => host.no_moves = Some(Until { at: now + REFUSED_MAX, why: text }),
                None => self.target_failed(now, tid, to, REFUSED_MAX, &text),
            },
            Refusal::HostLost(host) if *host == from => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::HostLost(_) | Refusal::OwnerThere { .. } => self.target_failed(now, tid, to, REFUSED_MIN, &text),
            Refusal::CpuFeatures { .. }
            | Refusal::KernelFeatures { .. }
            | Refusal::File { .. }
            | Refusal::Memory { .. }
            | Refusal::Threads { .. } => {
                self.target_failed(now, tid, to, REFUSED_MAX, &text);
            }
        }
    }

    fn hold(&mut self, tid: Tid, until: Micros, why: &str) {
        if let Some(task) = self.edit(tid) {
            task.held = Some(Until { at: until, why: why.to_string() });
        }
    }

    /// Leaves a target out, longer each time. The same failure heard twice (as answer and as event) counts once.
    fn target_failed(&mut self, now: Micros, tid: Tid, to: HostId, first: Micros, why: &str) {
        let Some(task) = self.edit(tid) else { return };
        let tries = match task.refused.get(&to) {
            Some((until, _)) if until.at > now => return,
            Some((_, tries)) => tries + 1,
            None => 0,
        };
        let span = Micros((first.0 << tries.min(10)).min(REFUSED_MAX.0));
        task.refused.insert(to, (Until { at: now + span, why: why.to_string() }, tries));
    }

    /// Takes a watcher's report in. Answers what is to be recorded when the owner came or went.
    pub fn report(&mut self, now: Micros, report: &LoadReport) -> Option<EventKind> {
        let id = report.host;
        let own = self.guests_on(id);
        let host = self.edit_host(id)?;
        host.cores = report.sample.cores.max(1);
        let sampled = Sampled { sample: report.sample, at: now, own };
        let demand = foreign_demand(&sampled);
        let mean = host.foreign_mean.map(|mean| mean.after(now, demand));
        host.foreign_mean = Some(mean.unwrap_or_else(|| ForeignMean::first(now, demand)));
        host.sample = Some(sampled);
        host.terms = reports::terms(now, report, &host.terms);
        let was = std::mem::replace(&mut host.owner, reports::owner(report, host.left));
        match (was.is_present(), host.owner.is_present()) {
            (false, true) => host.clean_told = false,
            (true, false) => {
                host.left = Some(now);
                host.owner = reports::owner(report, host.left);
                for tid in self.on.get(&id).into_iter().flatten() {
                    if let Some(task) = self.tasks.get_mut(tid) {
                        (task.asked, task.told) = (false, None);
                    }
                }
            }
            _ => return None,
        }
        Some(reports::came_or_went(&self.host_name(id), &was, report))
    }

    /// All that decisions are made from, as of `now`. Costs what has changed since the last time.
    pub fn snapshot(&mut self, now: Micros) -> &Snapshot {
        for id in std::mem::take(&mut self.touched) {
            match self.hosts.get(&id) {
                None => self.view.hosts.remove(id),
                Some(host) => {
                    let mut tasks: Vec<TaskView> = self.tasks_on(id).map(|(tid, task)| task.view(tid)).collect();
                    if host.drained.is_some() {
                        // Who named the host meant to stay beside its owner.
                        tasks.iter_mut().for_each(|task| task.asked = false);
                    }
                    let starting = self.starting.get(&id).copied().unwrap_or(0);
                    let view = HostView { starting, ..host.view(id, tasks) };
                    self.view.hosts.put(view);
                }
            }
        }
        self.view.hosts.refresh(now);
        self.view.now = now;
        &self.view
    }

    /// The same when something changes of which the load of hosts depends, but not too often.
    pub fn account_change(&mut self, now: Micros) {
        if now.since(self.accounted) >= ACCOUNT_PAUSE {
            self.account(now);
        }
    }

    /// Adds what the tasks have done since the last time, as far as can be told from the load of their hosts.
    pub fn account(&mut self, now: Micros) {
        let span = now.since(self.accounted).0 as f64;
        self.accounted = now;
        let snapshot = self.snapshot(now);
        let rates: BTreeMap<HostId, f64> = snapshot.hosts.iter().map(|h| (h.id, snapshot.rate(h.id))).collect();
        for task in self.tasks.values_mut().filter(|t| t.is_load()) {
            let share = span.min(now.since(task.since).0 as f64);
            let rate = rates.get(&task.host).copied().unwrap_or(0.0);
            task.done = task.done + Micros((share * rate / 1e3) as u64);
            self.touched.insert(task.host);
        }
    }

    /// True when a fresh host table and task list are needed: entries of the log were missed, or a move gives no news.
    pub fn is_stale(&self, now: Micros) -> bool {
        self.stale || self.tasks.values().any(|t| t.moving.is_some_and(|g| now.since(g.at) >= MOVE_SILENT_MAX))
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
            owner: self.keeper(),
            terms: self.terms.clone(),
            no_moves: self.no_moves.clone(),
            starting: 0,
            tasks,
        }
    }
}

impl Task {
    /// True for one that is part of its host's load.
    fn is_load(&self) -> bool {
        !self.pinned && !self.suspended
    }

    fn view(&self, tid: Tid) -> TaskView {
        TaskView {
            tid,
            pinned: self.pinned,
            asked: self.asked,
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
            refused: self.refused.iter().map(|(id, (until, _))| (*id, until.clone())).collect(),
        }
    }
}

/// Tasks that nobody can move, or that serve their host: started from a command line, resource managers, hosters,
/// taskers, load watchers.
fn is_pinned(flags: i32, name: &str) -> bool {
    flags & TASK_FORKED == 0 || flags & TASK_SERVES != 0 || is_watcher(name)
}
