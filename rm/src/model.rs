//! What the resource manager knows of hosts and tasks, kept up to date by host tables, task lists, events and load
//! reports. Pure: every call is told the time, on a clock that never jumps.
//!
//! What it hears may come twice or in another order (an acknowledgement from a host, the event from the master), so every
//! update may be repeated. Entries of the event log are numbered without gaps; a gap asks for a fresh task list.

use crate::decide::{
    HostView, MOVES_PER_MINUTE_MAX, MOVES_SPAN, Moves, Owner, Policy, Sampled, Snapshot, StayReason, TaskView, Until,
};
use crate::recent::Recent;
use libpvm::MigrateError;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::load::{LoadReport, OwnerVerdict};
use sempa_proto::migration::{Cause, Failure, Refusal};
use sempa_proto::table::{HostTable, TASK_FORKED, TASK_HOSTER, TASK_RM, TASK_TASKER, TaskInfo};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::collections::{BTreeMap, HashSet, VecDeque};

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

#[derive(Debug)]
struct Host {
    name: String,
    arch: String,
    speed: i32,
    cores: u32,
    sample: Option<Sampled>,
    owner: Owner,
    /// That no guest is left has been said.
    clean_told: bool,
    no_moves: Option<Until>,
}

#[derive(Debug)]
struct Task {
    host: HostId,
    pinned: bool,
    asked: bool,
    moving: Option<Going>,
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
    fn on(host: HostId, pinned: bool) -> Task {
        let (moves, refused) = (VecDeque::new(), BTreeMap::new());
        Task { host, pinned, asked: false, moving: None, moves, held: None, refused, told: None }
    }
}

/// What is known.
#[derive(Debug)]
pub struct Model {
    policy: Policy,
    /// Where the rotation of round robin stands.
    pub rotation: HostId,
    hosts: BTreeMap<HostId, Host>,
    tasks: BTreeMap<Tid, Task>,
    ended: Recent<Tid>,
    last_event: Option<u64>,
    stale: bool,
}

impl Model {
    /// Knows nothing; `local` is the host of the resource manager, behind which round robin begins.
    pub fn new(policy: Policy, local: HostId) -> Model {
        Model {
            policy,
            rotation: local,
            hosts: BTreeMap::new(),
            tasks: BTreeMap::new(),
            ended: Recent::new(ENDED_MAX),
            last_event: None,
            stale: false,
        }
    }

    /// Takes a host table over. Answers the hosts that are new.
    pub fn set_hosts(&mut self, table: &HostTable) -> Vec<HostId> {
        let gone: Vec<HostId> = self.hosts.keys().copied().filter(|id| table.get(*id).is_none()).collect();
        for id in gone {
            self.host_gone(id);
        }
        let mut new = Vec::new();
        for entry in &table.hosts {
            let host = self.hosts.entry(entry.id).or_insert_with(|| {
                new.push(entry.id);
                Host {
                    name: String::new(),
                    arch: String::new(),
                    speed: 0,
                    cores: 1,
                    sample: None,
                    owner: Owner::Unknown,
                    clean_told: false,
                    no_moves: None,
                }
            });
            (host.name, host.arch, host.speed) = (entry.name.clone(), entry.arch.clone(), entry.speed);
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
            self.tasks.remove(&tid);
        }
        for info in tasks.iter().filter(|info| !self.ended.has(info.tid)) {
            let task = self.tasks.entry(info.tid).or_insert_with(|| Task::on(info.host, false));
            task.host = info.host;
            task.pinned |= is_pinned(info.flags, &info.name);
            match task.moving {
                _ if info.moving => task.moving = Some(Going { to: task.moving.and_then(|g| g.to), at: now }),
                Some(going) if now.since(going.at) >= MOVE_YOUNG => task.moving = None,
                _ => {}
            }
        }
    }

    /// A host has left, and with it all its tasks.
    pub fn host_gone(&mut self, id: HostId) {
        self.hosts.remove(&id);
        let lost: Vec<Tid> = self.tasks.iter().filter(|(_, t)| t.host == id).map(|(tid, _)| *tid).collect();
        for tid in lost {
            // A move away may have been committed; then an event says where the task is, and it is back.
            self.tasks.remove(&tid);
        }
    }

    /// A task has ended for good.
    pub fn task_ended(&mut self, tid: Tid) {
        self.tasks.remove(&tid);
        self.ended.put(tid);
    }

    /// A task was started on a host. `asked`: somebody named the host for it.
    pub fn task_started(&mut self, tid: Tid, host: HostId, pinned: bool, asked: bool) {
        if self.ended.has(tid) || !tid.is_task() {
            return;
        }
        let with_owner = self.hosts.get(&host).is_some_and(|h| h.owner.is_present());
        let task = self.tasks.entry(tid).or_insert_with(|| Task::on(host, pinned));
        task.pinned |= pinned;
        task.asked |= asked && with_owner;
    }

    /// True for a task that is known and has not ended.
    pub fn knows(&self, tid: Tid) -> bool {
        self.tasks.contains_key(&tid)
    }

    /// The host on which a task runs: as known, else where it was born.
    pub fn host_of(&self, tid: Tid) -> Option<HostId> {
        self.tasks.get(&tid).map(|t| t.host).or_else(|| tid.home())
    }

    /// True when the host is in the table.
    pub fn has_host(&self, id: HostId) -> bool {
        self.hosts.contains_key(&id)
    }

    /// The hosts by rising id.
    pub fn host_ids(&self) -> Vec<HostId> {
        self.hosts.keys().copied().collect()
    }

    /// Name of a host, or its number when it is not known.
    pub fn host_name(&self, id: HostId) -> String {
        self.hosts.get(&id).map_or_else(|| id.to_string(), |h| h.name.clone())
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
            EventKind::TaskStarted { tid, name, .. } => {
                self.task_started(*tid, event.host, name.is_empty() || is_watcher(name), false);
            }
            EventKind::TaskEnded { tid, .. } => self.task_ended(*tid),
            EventKind::Moving { tid, to, .. } => {
                if let Some(task) = self.tasks.get_mut(tid) {
                    task.moving = Some(Going { to: Some(*to), at: now });
                }
            }
            EventKind::Moved { tid, to, cause, .. } => self.moved(now, *tid, *to, cause),
            EventKind::MoveFailed { tid, to, why, .. } => self.move_failed(now, *tid, *to, why),
            _ => {}
        }
    }

    fn moved(&mut self, now: Micros, tid: Tid, to: HostId, cause: &Cause) {
        if self.ended.has(tid) {
            return;
        }
        let with_owner = self.hosts.get(&to).is_some_and(|h| h.owner.is_present());
        let task = self.tasks.entry(tid).or_insert_with(|| Task::on(to, false));
        (task.host, task.moving, task.held, task.told) = (to, None, None, None);
        task.asked = with_owner && matches!(cause, Cause::Asked { .. });
        task.refused.clear();
        if !matches!(cause, Cause::Asked { .. }) {
            task.moves.push_back(now);
            while task.moves.len() > MOVES_PER_MINUTE_MAX
                || task.moves.front().is_some_and(|at| now.since(*at) > MOVES_SPAN)
            {
                task.moves.pop_front();
            }
        }
    }

    /// A move that we asked for has begun.
    pub fn move_begun(&mut self, now: Micros, tid: Tid, to: HostId) {
        if let Some(task) = self.tasks.get_mut(&tid) {
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
        let Some(task) = self.tasks.get_mut(&tid) else { return };
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
                if let Some(task) = self.tasks.get_mut(&tid) {
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
            Refusal::Holds { .. } => self.hold(tid, now + REFUSED_MAX, &text),
            Refusal::NoEngine { host, .. } if *host == from => self.hold(tid, now + REFUSED_MAX, &text),
            Refusal::NoEngine { host, .. } => match self.hosts.get_mut(host) {
                Some(host) => host.no_moves = Some(Until { at: now + REFUSED_MAX, why: text }),
                None => self.target_failed(now, tid, to, REFUSED_MAX, &text),
            },
            Refusal::HostLost(host) if *host == from => self.hold(tid, now + REFUSED_MIN, &text),
            Refusal::HostLost(_) => self.target_failed(now, tid, to, REFUSED_MIN, &text),
            Refusal::CpuFeatures { .. } | Refusal::Kernel { .. } | Refusal::File { .. } | Refusal::Memory { .. } => {
                self.target_failed(now, tid, to, REFUSED_MAX, &text);
            }
        }
    }

    fn hold(&mut self, tid: Tid, until: Micros, why: &str) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.held = Some(Until { at: until, why: why.to_string() });
        }
    }

    /// Leaves a target out, longer each time. The same failure heard twice (as answer and as event) counts once.
    fn target_failed(&mut self, now: Micros, tid: Tid, to: HostId, first: Micros, why: &str) {
        let Some(task) = self.tasks.get_mut(&tid) else { return };
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
        let own = self.tasks.values().filter(|t| t.host == id && !t.pinned).count();
        let host = self.hosts.get_mut(&id)?;
        host.cores = report.sample.cores.max(1);
        let own = u32::try_from(own).unwrap_or(u32::MAX);
        host.sample = Some(Sampled { sample: report.sample, at: now, own });
        let was_present = host.owner.is_present();
        match &report.owner {
            OwnerVerdict::Present { since, seen } => {
                host.owner = Owner::Present { why: report.why.clone() };
                if was_present {
                    return None;
                }
                host.clean_told = false;
                let (since, seen, why) = (*since, *seen, report.why.clone());
                Some(EventKind::OwnerPresent { host: id, since, seen, why })
            }
            OwnerVerdict::Absent { .. } => {
                if !was_present {
                    host.owner = Owner::Absent { left: host.owner.left() };
                    return None;
                }
                host.owner = Owner::Absent { left: Some(now) };
                for task in self.tasks.values_mut().filter(|t| t.host == id) {
                    (task.asked, task.told) = (false, None);
                }
                Some(EventKind::OwnerAbsent { host: id, why: report.why.clone() })
            }
        }
    }

    /// All that decisions are made from.
    pub fn snapshot(&self, now: Micros) -> Snapshot {
        let mut hosts: Vec<HostView> = self.hosts.iter().map(|(id, host)| host.view(*id)).collect();
        for (tid, task) in &self.tasks {
            if let Ok(i) = hosts.binary_search_by_key(&task.host, |h| h.id) {
                hosts[i].tasks.push(task.view(*tid));
            }
        }
        Snapshot { now, policy: self.policy, rotation: self.rotation, hosts }
    }

    /// Hosts whose owner is there and that the last guest has left, or that had none; each is answered once, and again
    /// only when there were guests again.
    pub fn newly_clean(&mut self) -> Vec<HostId> {
        let guests = self.tasks.values().filter(|t| !t.pinned && !t.asked);
        let with_guests: HashSet<HostId> =
            guests.flat_map(|t| [Some(t.host), t.moving.and_then(|g| g.to)]).flatten().collect();
        let mut clean = Vec::new();
        for (id, host) in self.hosts.iter_mut().filter(|(_, host)| host.owner.is_present()) {
            let is_clean = !with_guests.contains(id);
            if is_clean && !host.clean_told {
                clean.push(*id);
            }
            host.clean_told = is_clean;
        }
        clean
    }

    /// Sentences about tasks that stay beside an owner, each once until its kind of reason changes.
    pub fn news(&mut self, snapshot: &Snapshot, moves: &Moves) -> Vec<String> {
        let mut news = Vec::new();
        for stay in moves.stay.iter().filter(|stay| stay.is_news(snapshot.now)) {
            let kind = Some(std::mem::discriminant(&stay.why));
            let Some(task) = self.tasks.get_mut(&stay.tid).filter(|t| t.told != kind) else { continue };
            task.told = kind;
            news.push(stay.sentence(snapshot));
        }
        news
    }

    /// True when a fresh host table and task list are needed: entries of the log were missed, or a move gives no news.
    pub fn is_stale(&self, now: Micros) -> bool {
        self.stale || self.tasks.values().any(|t| t.moving.is_some_and(|g| now.since(g.at) >= MOVE_SILENT_MAX))
    }
}

impl Owner {
    fn left(&self) -> Option<Micros> {
        match self {
            Owner::Absent { left } => *left,
            _ => None,
        }
    }
}

impl Host {
    fn view(&self, id: HostId) -> HostView {
        HostView {
            id,
            name: self.name.clone(),
            arch: self.arch.clone(),
            speed: self.speed,
            cores: self.cores,
            sample: self.sample.clone(),
            owner: self.owner.clone(),
            no_moves: self.no_moves.clone(),
            tasks: Vec::new(),
        }
    }
}

impl Task {
    fn view(&self, tid: Tid) -> TaskView {
        TaskView {
            tid,
            pinned: self.pinned,
            asked: self.asked,
            moving: self.moving.map(|g| g.to),
            moves: self.moves.iter().copied().collect(),
            held: self.held.clone(),
            refused: self.refused.iter().map(|(id, (until, _))| (*id, until.clone())).collect(),
        }
    }
}

/// Program of the load watchers.
pub const WATCHER_PROGRAM: &str = "pvm-load-watcher";

fn is_watcher(name: &str) -> bool {
    name.rsplit('/').next() == Some(WATCHER_PROGRAM)
}

/// Tasks that nobody can move, or that serve their host: started from a command line, resource managers, hosters,
/// taskers, load watchers.
fn is_pinned(flags: i32, name: &str) -> bool {
    flags & TASK_FORKED == 0 || flags & (TASK_RM | TASK_HOSTER | TASK_TASKER) != 0 || is_watcher(name)
}
