//! The simulated virtual machine in which a recording is run.

mod parked;

use super::{Figures, OfUser, as_file};
use crate::api::VmApi;
use crate::decide::{Sampled, foreign_demand};
use crate::recording::{Entry, Input};
use crate::service::{TAG_EVENT, TAG_LOAD, TAG_POLICY};
use bytes::Bytes;
use libpvm::{Error, MigrateError};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::frame::to_bytes;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, LoadReport};
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::{MigrationCause, Usage};
use sempa_proto::owner::GuestAccess;
use sempa_proto::rm::{CTX_RM, RmQuery, TAG_QUERY, encode};
use sempa_proto::sm::{SM_EXECACK, SM_SPAWN, pack_spawn, pack_tids, unpack_tids};
use sempa_proto::suspend;
use sempa_proto::table::{HostEntry, HostTable, TASK_FORKED, TaskInfo};
use sempa_proto::task::{NotifySubjects, SPAWN_NO_PARENT, SpawnRequest};
use sempa_proto::{HostId, Message, Micros, MigrationId, PvmError, Tid};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

/// Time that tasks may still run after the end of a recording.
pub const TAIL_MAX: Micros = Micros::from_secs(3600);
/// Maximum interval between two reports of a load watcher.
const REPORT_PAUSE: Micros = Micros::from_secs(5);
/// Size of every task's image in bytes.
const IMAGE_BYTES: u64 = 64 << 20;
/// Time that a migration stops its task: the predicted time for an image of that size before
/// anything was learned.
const MOVE_TIME: Micros = Micros::from_millis(400);
/// First task number for tasks of the replay, above those of the recording.
const LOCAL_FIRST: u32 = 0x1_0000;

#[derive(Clone, Debug)]
struct Running {
    host: HostId,
    program: String,
    parent: Tid,
    user: u32,
    /// Remaining work in seconds of an ordinary processor; infinite for tasks whose end was not
    /// recorded.
    left: f64,
    /// Time of its last spawn in the recording; the task ends later than this.
    spawns_until: Micros,
    began: Micros,
    moving: Option<(Micros, HostId, MigrationCause)>,
    suspended: suspend::Suspensions,
}

impl Running {
    /// True if the task computes, as far as its host lets it.
    fn works(&self) -> bool {
        self.moving.is_none() && !self.suspended.is_suspended() && self.has_work()
    }

    /// Less than a microsecond of work counts as none.
    fn has_work(&self) -> bool {
        self.left >= 1e-6
    }
}

/// A requesting task that was not spawned in the replay: a console, or a program started by hand.
/// It does not compute.
#[derive(Clone, Copy, Debug)]
struct Spawner {
    host: HostId,
    parent: Tid,
    user: u32,
}

/// A spawn that is being carried out, with the work of its tasks.
#[derive(Debug)]
struct Open {
    number: (Tid, i32),
    file: String,
    work: VecDeque<Work>,
}

/// Work of a recorded task.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// In seconds of an ordinary processor.
    seconds: f64,
    /// Time of its last spawn.
    spawns_until: Micros,
}

#[derive(Debug, Default)]
struct State {
    now: Micros,
    begin: Micros,
    last_input: Micros,
    /// The policy changes when it did in the recording.
    policy_changes: bool,
    inputs: VecDeque<Entry>,
    inbox: VecDeque<Message>,
    table: HostTable,
    /// Latest report of each host, with the external load in threads.
    reports: BTreeMap<HostId, (LoadReport, f32)>,
    watchers: BTreeMap<HostId, Tid>,
    report_at: Micros,
    tasks: BTreeMap<Tid, Running>,
    spawners: BTreeMap<Tid, Spawner>,
    work: HashMap<(Tid, i32), VecDeque<Work>>,
    /// Recorded tasks of each spawn, and the replayed task for each recorded one.
    started: HashMap<(Tid, i32), Vec<Tid>>,
    here: HashMap<Tid, Tid>,
    /// Jobs that are being vacated, with the time when that is complete; and the tasks of vacated
    /// jobs by checkpoint.
    parking: BTreeMap<Tid, Micros>,
    sets: BTreeMap<String, Vec<(Tid, Running)>>,
    open: Vec<Open>,
    asked: HashMap<(Tid, i32), Micros>,
    locals: HashMap<HostId, u32>,
    numbers: u64,
    orders: i32,
    /// Times in seconds, each with its user.
    waits: Vec<(u32, f64)>,
    runs: Vec<(u32, f64)>,
    figures: Figures,
}

/// The simulated virtual machine, shared by its clones.
#[derive(Clone, Debug)]
pub(super) struct World(Rc<RefCell<State>>);

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

/// Returns the recorded tasks of each spawn, in their order.
fn recorded_tasks(entries: &[Entry]) -> HashMap<(Tid, i32), Vec<Tid>> {
    let started = |entry: &Entry| match &entry.input {
        Input::Started { number, tids } => Some((*number, tids.clone())),
        _ => None,
    };
    entries.iter().filter_map(started).collect()
}

/// Returns the recorded work of the tasks of each spawn. A task without a recorded end runs
/// forever.
fn recorded_work(entries: &[Entry]) -> HashMap<(Tid, i32), VecDeque<Work>> {
    let mut all = HashMap::<(Tid, i32), VecDeque<Work>>::new();
    // Task numbers are reused. The end of a short task may be recorded before the answer to its
    // spawn.
    let (mut current, mut early) = (
        HashMap::<Tid, ((Tid, i32), usize)>::new(),
        HashMap::<Tid, f64>::new(),
    );
    for entry in entries {
        match &entry.input {
            Input::Started { number, tids } => {
                for (i, tid) in tids.iter().enumerate() {
                    let seconds = early.remove(tid).unwrap_or(f64::INFINITY);
                    all.entry(*number).or_default().push_back(Work {
                        seconds,
                        ..Work::default()
                    });
                    current.insert(*tid, (*number, i));
                }
            }
            Input::Ended { tid, used } => {
                let used = seconds(used.user + used.system);
                match current
                    .get(tid)
                    .and_then(|(number, i)| all.get_mut(number)?.get_mut(*i))
                {
                    // A job that restarted from a checkpoint has ended more than once.
                    Some(work) if work.seconds.is_finite() => work.seconds += used,
                    Some(work) => work.seconds = used,
                    None => drop(early.insert(*tid, used)),
                }
            }
            Input::Spawn {
                number: (src, _), ..
            } => {
                if let Some(work) = current
                    .get(src)
                    .and_then(|(number, i)| all.get_mut(number)?.get_mut(*i))
                {
                    work.spawns_until = entry.at;
                }
            }
            _ => {}
        }
    }
    all
}

impl World {
    pub(super) fn new(entries: &[Entry], policy_changes: bool) -> World {
        let begin = entries.first().map_or(Micros(0), |entry| entry.at);
        let mut state = State {
            inputs: entries.iter().cloned().collect(),
            last_input: super::span(entries),
            policy_changes,
            work: recorded_work(entries),
            started: recorded_tasks(entries),
            now: begin,
            begin,
            ..State::default()
        };
        // The service requests the hosts at its start.
        if let Some(Input::Hosts(table)) = entries
            .iter()
            .map(|e| &e.input)
            .find(|i| matches!(i, Input::Hosts(_)))
        {
            state.table = table.clone();
        }
        World(Rc::new(RefCell::new(state)))
    }

    pub(super) fn figures(&self) -> Figures {
        let state = self.0.borrow();
        let (waits_s, runs_s) = (
            state.waits.iter().map(|w| w.1),
            state.runs.iter().map(|r| r.1),
        );
        let (all, users) = (
            OfUser::of(waits_s.collect(), runs_s.collect(), 0),
            state.of_users(),
        );
        let OfUser {
            waited_mean_s,
            waited_most_s,
            finished,
            run_mean_s,
            ..
        } = all;
        Figures {
            waited_mean_s,
            waited_most_s,
            finished,
            run_mean_s,
            users,
            ..state.figures.clone()
        }
    }
}

impl State {
    fn post(&mut self, src: Tid, ctx: i32, tag: i32, wid: i32, enc: i32, body: Bytes) {
        self.inbox.push_back(Message {
            src,
            dst: own(),
            ctx,
            tag,
            wid,
            enc,
            body,
        });
    }

    fn event(&mut self, host: HostId, kind: EventKind) {
        self.numbers += 1;
        let event = Event {
            number: self.numbers,
            at: self.now,
            host,
            kind,
        };
        if let Ok(body) = to_bytes(&event) {
            self.post(
                Tid::MY_DAEMON,
                CTX_RM,
                TAG_EVENT,
                0,
                DSIG_X86_64,
                body.into(),
            );
        }
    }

    /// Returns the user of a task.
    fn user_of(&self, tid: Tid) -> u32 {
        let spawner = self.spawners.get(&tid).map(|spawner| spawner.user);
        self.tasks
            .get(&tid)
            .map(|task| task.user)
            .or(spawner)
            .unwrap_or(0)
    }

    /// Returns the figures of each user.
    fn of_users(&self) -> BTreeMap<u32, OfUser> {
        let open: Vec<u32> = self
            .asked
            .keys()
            .map(|(src, _)| self.user_of(*src))
            .collect();
        let known = self
            .waits
            .iter()
            .chain(&self.runs)
            .map(|of| of.0)
            .chain(open.iter().copied());
        let users: std::collections::BTreeSet<u32> = known.collect();
        let of = |user: u32| {
            let own = |list: &[(u32, f64)]| {
                list.iter()
                    .filter(|one| one.0 == user)
                    .map(|one| one.1)
                    .collect()
            };
            let unanswered = open.iter().filter(|other| **other == user).count() as u64;
            (
                user,
                OfUser::of(own(&self.waits), own(&self.runs), unanswered),
            )
        };
        users.into_iter().map(of).collect()
    }

    fn guests(&self, host: HostId) -> usize {
        self.tasks
            .values()
            .filter(|t| t.host == host && t.works())
            .count()
    }

    /// Returns what each task on a host gets, as a fraction of an ordinary processor.
    fn rate(&self, host: HostId) -> f64 {
        let speed = self
            .table
            .get(host)
            .map_or(0.0, |entry| f64::from(entry.speed) / 1e3);
        let Some((report, foreign)) = self.reports.get(&host) else {
            return speed;
        };
        if matches!(report.access, GuestAccess::Paused { .. }) {
            return 0.0;
        }
        let threads = self.guests(host) as f64 + f64::from(*foreign);
        speed * (f64::from(report.sample.processors()) / threads.max(1e-9)).min(1.0)
    }

    /// Returns the rates of all hosts that have tasks.
    fn rates(&self) -> BTreeMap<HostId, f64> {
        let hosts: std::collections::BTreeSet<HostId> =
            self.tasks.values().map(|t| t.host).collect();
        hosts
            .into_iter()
            .map(|host| (host, self.rate(host)))
            .collect()
    }

    /// Returns the time of the next event.
    fn next(&self) -> Micros {
        let rates = self.rates();
        let end = |task: &Running| match &task.moving {
            Some((at, ..)) => Some(*at),
            None if task.suspended.is_suspended() => None,
            None if !task.has_work() => {
                Some(task.spawns_until + Micros(1)).filter(|behind| *behind > self.now)
            }
            None => {
                let rate = rates.get(&task.host).copied().unwrap_or(0.0);
                let span = task.left / rate;
                (rate > 0.0 && span.is_finite())
                    .then(|| self.now + Micros((span * 1e6).ceil() as u64))
            }
        };
        let ends = self.tasks.values().filter_map(end);
        let parked = self.parking.values().copied();
        let inputs = self.inputs.front().map(|entry| entry.at);
        ends.chain(inputs)
            .chain(parked)
            .chain([self.report_at])
            .min()
            .unwrap_or(self.report_at)
    }

    fn is_over(&self) -> bool {
        let parked = !self.sets.is_empty() || !self.parking.is_empty();
        let busy = self.tasks.values().any(|task| task.left.is_finite())
            || !self.asked.is_empty()
            || parked;
        self.inputs.is_empty() && (!busy || self.now.since(self.last_input) >= TAIL_MAX)
    }

    /// Advances the time and the work of the tasks.
    fn advance(&mut self, to: Micros) {
        let (span, rates) = (seconds(to.since(self.now)), self.rates());
        for task in self.tasks.values_mut() {
            let rate = if task.works() {
                rates.get(&task.host).copied().unwrap_or(0.0)
            } else {
                0.0
            };
            if rate == 0.0 {
                self.figures.stood_still_s += span;
            }
            task.left = (task.left - rate * span).max(0.0);
        }
        self.now = self.now.max(to);
    }

    /// Processes everything that is due.
    fn happen(&mut self) {
        // The end of one task may let another one end.
        while let Some(tid) = self.done() {
            let task = self.tasks.remove(&tid).expect("found a moment ago");
            self.runs
                .push((task.user, seconds(self.now.since(task.began))));
            self.figures.last_end_s = seconds(self.now.since(self.begin));
            self.event(
                task.host,
                EventKind::TaskEnded {
                    tid,
                    status: 0,
                    used: Usage::default(),
                },
            );
        }
        let now = self.now;
        let arrived = |t: &Running| t.moving.as_ref().is_some_and(|(at, ..)| *at <= now);
        let arrived: Vec<Tid> = self
            .tasks
            .iter()
            .filter(|(_, t)| arrived(t))
            .map(|(tid, _)| *tid)
            .collect();
        arrived.into_iter().for_each(|tid| self.arrive(tid));
        self.park();
        while self.inputs.front().is_some_and(|entry| entry.at <= now) {
            let entry = self.inputs.pop_front().expect("looked at a moment ago");
            self.input(entry.input);
        }
        if self.report_at <= now {
            self.report_at = now + REPORT_PAUSE;
            let hosts: Vec<HostId> = self.reports.keys().copied().collect();
            let mut guests = BTreeMap::<HostId, usize>::new();
            self.tasks
                .values()
                .filter(|t| t.works())
                .for_each(|t| *guests.entry(t.host).or_default() += 1);
            hosts
                .into_iter()
                .for_each(|host| self.report(host, guests.get(&host).copied().unwrap_or(0)));
        }
    }

    /// Returns a task without remaining work, without later spawns, and whose children have ended.
    fn done(&self) -> Option<Tid> {
        let waits = |tid: &Tid| {
            self.tasks
                .values()
                .any(|task| task.parent == *tid && task.left.is_finite())
        };
        let done = |(tid, task): &(&Tid, &Running)| {
            task.moving.is_none() && !task.has_work() && task.spawns_until < self.now && !waits(tid)
        };
        self.tasks.iter().find(done).map(|(tid, _)| *tid)
    }

    fn arrive(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let Some((_, to, cause)) = task.moving.take() else {
            return;
        };
        if self.table.get(to).is_none() {
            return;
        }
        let from = std::mem::replace(&mut task.host, to);
        match cause {
            MigrationCause::Load { .. } => self.figures.moves_load += 1,
            MigrationCause::Owner { .. }
            | MigrationCause::Requested { .. }
            | MigrationCause::Drain { .. } => self.figures.moves_owner += 1,
            // These causes do not migrate tasks.
            MigrationCause::Checkpoint | MigrationCause::Restart => {}
        }
        let id = MigrationId(self.numbers + 1);
        let (bytes, resident, frozen, whole) = (IMAGE_BYTES, IMAGE_BYTES, MOVE_TIME, MOVE_TIME);
        self.event(
            to,
            EventKind::Migrated {
                id,
                tid,
                from,
                to,
                cause,
                bytes,
                resident,
                frozen,
                transfer_time: whole,
            },
        );
    }

    fn input(&mut self, input: Input) {
        match input {
            // As if the policy file had changed.
            Input::Policy(conduct) if self.policy_changes => {
                self.post(
                    own(),
                    CTX_RM,
                    TAG_POLICY,
                    0,
                    DSIG_X86_64,
                    as_file(&conduct).into(),
                );
            }
            Input::Policy(_) | Input::Labels(_) | Input::Started { .. } | Input::Ended { .. } => {}
            Input::Hosts(table) => self.hosts(table),
            Input::Report { report, own } => {
                let (host, at) = (report.host, self.now);
                let foreign = foreign_demand(&Sampled {
                    sample: report.sample,
                    at,
                    own,
                });
                self.reports.insert(host, (report, foreign));
                self.report(host, self.guests(host));
            }
            // The order is sent to the service as recorded; the answer is ignored.
            Input::Drain {
                host,
                by,
                begun,
                within,
            } => {
                let order = if begun {
                    RmQuery::Drain { host, within }
                } else {
                    RmQuery::Undrain { host }
                };
                if let Ok(body) = encode(&order) {
                    self.post(by, CTX_RM, TAG_QUERY, 0, DSIG_X86_64, body.into());
                }
            }
            Input::Spawn {
                number: (recorded, wid),
                caller,
                user,
                job,
                request,
            } => {
                self.figures.spawns += 1;
                let src = self.here.get(&recorded).copied().unwrap_or(recorded);
                if !self.tasks.contains_key(&src) && !self.spawners.contains_key(&src) {
                    let parent = if job == src { Tid::NONE } else { job };
                    self.spawners.insert(
                        src,
                        Spawner {
                            host: caller,
                            parent,
                            user,
                        },
                    );
                    // Without a program name, because the task was not spawned.
                    self.event(
                        caller,
                        EventKind::TaskStarted {
                            tid: src,
                            parent,
                            name: String::new(),
                            user,
                        },
                    );
                }
                self.asked.insert((src, wid), self.now);
                let work = self.work.remove(&(recorded, wid)).unwrap_or_default();
                self.open.push(Open {
                    number: (src, wid),
                    file: request.file.clone(),
                    work,
                });
                if let Some(tasks) = self.started.remove(&(recorded, wid)) {
                    self.started.insert((src, wid), tasks);
                }
                self.post(
                    src,
                    CTX_BASE,
                    SM_SPAWN,
                    wid,
                    ENC_XDR,
                    pack_spawn(&request, None),
                );
            }
        }
    }

    fn hosts(&mut self, table: HostTable) {
        let before = std::mem::replace(&mut self.table, table);
        let gone: Vec<&HostEntry> = before
            .hosts
            .iter()
            .filter(|host| self.table.get(host.id).is_none())
            .collect();
        for host in gone {
            let lost: Vec<Tid> = self
                .tasks
                .iter()
                .filter(|(_, t)| t.host == host.id)
                .map(|(tid, _)| *tid)
                .collect();
            self.figures.lost += lost.len() as u64;
            lost.iter().for_each(|tid| drop(self.tasks.remove(tid)));
            self.spawners.retain(|_, spawner| spawner.host != host.id);
            self.reports.remove(&host.id);
            self.watchers.remove(&host.id);
            let why = "as recorded".to_string();
            self.event(
                HostId::MASTER,
                EventKind::HostGone {
                    host: host.id,
                    name: host.name.clone(),
                    why,
                },
            );
        }
        for host in self
            .table
            .hosts
            .clone()
            .iter()
            .filter(|host| before.get(host.id).is_none())
        {
            self.event(
                HostId::MASTER,
                EventKind::HostAdded {
                    host: host.id,
                    name: host.name.clone(),
                },
            );
        }
    }

    /// Sends a report of a host's watcher: owner and external load as recorded, own tasks as they
    /// are in the replay.
    fn report(&mut self, host: HostId, guests: usize) {
        let Some(watcher) = self.watchers.get(&host).copied() else {
            return;
        };
        let own = guests as f32;
        let Some((report, foreign)) = self.reports.get(&host) else {
            return;
        };
        let mut report = report.clone();
        let (demand, cores) = (foreign + own, report.sample.processors());
        (report.sample.busy, report.sample.load1) = ((demand / cores).min(1.0), demand);
        (report.sample.running, report.sample.cpu_pressure) = (demand.round() as u32, 0.0);
        if let Ok(body) = to_bytes(&report) {
            self.post(watcher, CTX_RM, TAG_LOAD, 0, DSIG_X86_64, body.into());
        }
    }

    fn new_task(&mut self, host: HostId) -> Option<Tid> {
        let local = self.locals.entry(host).or_insert(LOCAL_FIRST);
        *local += 1;
        Tid::task(host, *local)
    }

    /// Starts tasks on a host, as its daemon does on an order.
    fn exec(&mut self, host: HostId, parent: Tid, request: &SpawnRequest) -> i32 {
        self.orders += 1;
        let (wid, is_watcher) = (self.orders, request.file == LOAD_WATCHER_PROGRAM);
        let mut results = Vec::new();
        for _ in 0..request.count {
            let started = self
                .table
                .get(host)
                .is_some()
                .then(|| self.new_task(host))
                .flatten();
            results.push(started.ok_or(PvmError::HostFail));
            let Some(tid) = started else { continue };
            if is_watcher {
                self.watchers.insert(host, tid);
                continue;
            }
            let of = |open: &&mut Open| {
                open.number.0 == parent && open.file == request.file && !open.work.is_empty()
            };
            // A task that was not started in the recording has no known work.
            let work = self
                .open
                .iter_mut()
                .find(of)
                .and_then(|open| open.work.pop_front())
                .unwrap_or_default();
            let Work {
                seconds: left,
                spawns_until,
            } = work;
            let (program, began, suspended) = (
                request.file.clone(),
                self.now,
                suspend::Suspensions::default(),
            );
            let user = self.user_of(parent);
            let parent = if request.flags & SPAWN_NO_PARENT != 0 {
                Tid::NONE
            } else {
                parent
            };
            let task = Running {
                host,
                program,
                parent,
                user,
                left,
                spawns_until,
                began,
                moving: None,
                suspended,
            };
            self.tasks.insert(tid, task);
            let name = self
                .table
                .get(host)
                .map_or_else(|| host.to_string(), |entry| entry.name.clone());
            *self.figures.placed.entry(name).or_default() += 1;
            self.event(
                host,
                EventKind::TaskStarted {
                    tid,
                    parent,
                    name: request.file.clone(),
                    user,
                },
            );
        }
        self.post(
            host.daemon_tid(),
            CTX_BASE,
            SM_EXECACK,
            wid,
            ENC_XDR,
            pack_tids(&results),
        );
        if is_watcher {
            self.report(host, self.guests(host));
        }
        wid
    }

    fn answered(&mut self, number: (Tid, i32), body: Bytes) {
        let Some(asked) = self.asked.remove(&number) else {
            return;
        };
        self.waits
            .push((self.user_of(number.0), seconds(self.now.since(asked))));
        self.open.retain(|open| open.number != number);
        let results = unpack_tids(body).unwrap_or_default();
        let recorded = self.started.remove(&number).unwrap_or_default();
        let here: Vec<Tid> = results.iter().flatten().copied().collect();
        self.figures.started += here.len() as u64;
        self.figures.refused += (results.len() - here.len()) as u64;
        self.here.extend(recorded.into_iter().zip(here));
    }
}

/// Returns the tid of the service.
fn own() -> Tid {
    Tid::task(HostId::MASTER, 1).expect("a task")
}

impl VmApi for World {
    fn tid(&self) -> Tid {
        own()
    }

    fn host(&self) -> HostId {
        HostId::MASTER
    }

    fn now(&self) -> Micros {
        self.0.borrow().now
    }

    fn wall(&self) -> Micros {
        self.now()
    }

    fn recv(&self, span: Duration) -> Result<Option<Message>, Error> {
        let mut state = self.0.borrow_mut();
        let until = state.now + Micros(u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
        loop {
            if let Some(message) = state.inbox.pop_front() {
                return Ok(Some(message));
            }
            if state.is_over() {
                return Err(Error::new(PvmError::SysErr, "the record is over"));
            }
            let next = state.next();
            if next > until {
                state.advance(until);
                return Ok(None);
            }
            state.advance(next);
            state.happen();
        }
    }

    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        if tag == SM_SPAWN {
            self.0.borrow_mut().answered((to, wid), body);
        }
        Ok(())
    }

    fn answer(&self, _to: Tid, _tag: i32, _wid: i32, _body: Bytes) -> Result<(), Error> {
        Ok(())
    }

    fn config(&self) -> Result<HostTable, Error> {
        Ok(self.0.borrow().table.clone())
    }

    fn tasks(&self) -> Result<Vec<TaskInfo>, Error> {
        let state = self.0.borrow();
        let plain = |tid: Tid, parent, host, uid| TaskInfo {
            tid,
            parent,
            host,
            flags: 0,
            name: String::new(),
            pid: 0,
            uid,
            migrating: false,
            paused: false,
            suspended: false,
        };
        let spawner = |(tid, s): (&Tid, &Spawner)| plain(*tid, s.parent, s.host, s.user);
        let running = |(tid, task): (&Tid, &Running)| TaskInfo {
            flags: TASK_FORKED,
            name: task.program.clone(),
            migrating: task.moving.is_some(),
            suspended: task.suspended.is_suspended(),
            ..plain(*tid, task.parent, task.host, task.user)
        };
        Ok(state
            .spawners
            .iter()
            .map(spawner)
            .chain(state.tasks.iter().map(running))
            .collect())
    }

    fn register(&self) -> Result<Tid, Error> {
        Ok(Tid::NONE)
    }

    fn subscribe(&self, _ctx: i32, _tag: i32) -> Result<(), Error> {
        Ok(())
    }

    fn events(&self, _from: u64, _limit: u32) -> Result<Vec<Event>, Error> {
        Ok(Vec::new())
    }

    fn notify(&self, _what: NotifySubjects, _ctx: i32, _tag: i32) -> Result<(), Error> {
        Ok(())
    }

    fn exec(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        Ok(self.0.borrow_mut().exec(host, parent, request))
    }

    fn migrate(&self, tid: Tid, to: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        let mut state = self.0.borrow_mut();
        let at = state.now + MOVE_TIME;
        match state.tasks.get_mut(&tid) {
            None => Err(Error::new(PvmError::NoTask, "it has ended").into()),
            Some(task) if task.moving.is_some() => {
                Err(Error::new(PvmError::Already, "it is migrating").into())
            }
            Some(task) => {
                task.moving = Some((at, to, cause));
                Ok(())
            }
        }
    }

    fn signal(&self, tid: Tid, _signal: i32) -> Result<(), Error> {
        self.0.borrow_mut().tasks.remove(&tid);
        Ok(())
    }

    fn suspend(&self, tid: Tid, suspend: bool, cause: suspend::SuspendCause) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        let Some(task) = state.tasks.get_mut(&tid) else {
            return Err(Error::new(PvmError::NoTask, "it has ended"));
        };
        let (order, before, host) = (
            suspend::SuspendOrder {
                tid,
                suspend,
                cause,
            },
            task.suspended,
            task.host,
        );
        task.suspended = before.apply(&order);
        let change = before.change_event(task.suspended, &order);
        change
            .into_iter()
            .for_each(|event| state.event(host, event));
        Ok(())
    }

    fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        let mut state = self.0.borrow_mut();
        let at = state.now + MOVE_TIME;
        state.parking.insert(job, at);
        Ok(())
    }

    fn restart(&self, set: &str, on: &[String]) -> Result<(), Error> {
        self.0.borrow_mut().restart(set, on)
    }

    fn record(&self, _at: Micros, _kind: EventKind) -> Result<(), Error> {
        Ok(())
    }
}
