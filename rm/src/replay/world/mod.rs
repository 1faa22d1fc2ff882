//! The simulated virtual machine for a replay. It implements the calls that the service makes, and
//! generates events from the recording and from the simulated tasks.

mod vacated;

use super::{Figures, UserFigures, policy_file_text};
use crate::api::VmApi;
use crate::decide::{TimedSample, external_demand};
use crate::recording::{RecordedInput, RecordingEntry};
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

/// Maximum time for which the replay continues after the end of the recording, so that tasks can
/// end.
pub const TAIL_MAX: Micros = Micros::from_secs(3600);
/// Maximum interval between two reports of a load watcher.
const REPORT_INTERVAL: Micros = Micros::from_secs(5);
/// Size of the image of every task in bytes.
const IMAGE_BYTES: u64 = 64 << 20;
/// Time for which a migration stops its task: the predicted time for [`IMAGE_BYTES`] before
/// anything was learned.
const MIGRATION_DURATION: Micros = Micros::from_millis(400);
/// First task number for tasks of the replay, above those of the recording.
const FIRST_TASK_NUMBER: u32 = 0x1_0000;

#[derive(Clone, Debug)]
struct ReplayTask {
    host: HostId,
    program: String,
    parent: Tid,
    user: u32,
    /// Remaining work in seconds of an ordinary processor; infinite for tasks whose end was not
    /// recorded.
    work_left: f64,
    /// Time of the task's last spawn in the recording. The task does not end before it.
    last_spawn_at: Micros,
    began_at: Micros,
    migrating: Option<(Micros, HostId, MigrationCause)>,
    suspended: suspend::Suspensions,
}

impl ReplayTask {
    /// True if the task can use processor time: it has work left, and is neither suspended nor
    /// migrating.
    fn computes(&self) -> bool {
        self.migrating.is_none() && !self.suspended.is_suspended() && self.has_work()
    }

    /// True if at least a microsecond of work remains.
    fn has_work(&self) -> bool {
        self.work_left >= 1e-6
    }
}

/// A requesting task that was not spawned in the replay: a console, or a program started by hand.
/// It uses no processor time.
#[derive(Clone, Copy, Debug)]
struct Spawner {
    host: HostId,
    parent: Tid,
    user: u32,
}

/// A spawn that is being carried out, with the work of its tasks.
#[derive(Debug)]
struct OpenSpawn {
    number: (Tid, i32),
    file: String,
    work: VecDeque<RecordedWork>,
}

/// Work of a recorded task.
#[derive(Clone, Copy, Debug, Default)]
struct RecordedWork {
    /// Work in seconds of an ordinary processor.
    seconds: f64,
    /// Time of the task's last spawn.
    last_spawn_at: Micros,
}

#[derive(Debug, Default)]
struct WorldState {
    now: Micros,
    began_at: Micros,
    last_input_at: Micros,
    /// True if recorded policy changes are replayed.
    policy_changes: bool,
    inputs: VecDeque<RecordingEntry>,
    inbox: VecDeque<Message>,
    table: HostTable,
    /// Latest recorded report of each host, with the external load in threads.
    reports: BTreeMap<HostId, (LoadReport, f32)>,
    watchers: BTreeMap<HostId, Tid>,
    report_at: Micros,
    tasks: BTreeMap<Tid, ReplayTask>,
    spawners: BTreeMap<Tid, Spawner>,
    work: HashMap<(Tid, i32), VecDeque<RecordedWork>>,
    /// Tasks of each spawn in the recording, by the spawn's requesting task and wait id.
    recorded_tasks: HashMap<(Tid, i32), Vec<Tid>>,
    /// Tasks of the replay, by the corresponding recorded task.
    replayed_tids: HashMap<Tid, Tid>,
    /// Jobs that are being vacated, with the time when the checkpoint is complete.
    vacates_due: BTreeMap<Tid, Micros>,
    /// Tasks of vacated jobs, by checkpoint.
    checkpoints: BTreeMap<String, Vec<(Tid, ReplayTask)>>,
    open_spawns: Vec<OpenSpawn>,
    asked_at: HashMap<(Tid, i32), Micros>,
    last_task_numbers: HashMap<HostId, u32>,
    last_event: u64,
    last_wait_id: i32,
    /// Times from spawns to their answers as (user, seconds).
    wait_times: Vec<(u32, f64)>,
    /// Running times of tasks that did all their work as (user, seconds).
    run_times: Vec<(u32, f64)>,
    figures: Figures,
}

/// The simulated virtual machine, shared by its clones.
#[derive(Clone, Debug)]
pub(super) struct World(Rc<RefCell<WorldState>>);

fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

/// Returns the recorded tasks of each spawn in task order, by the spawn's requesting task and wait
/// id.
fn recorded_tasks(entries: &[RecordingEntry]) -> HashMap<(Tid, i32), Vec<Tid>> {
    let started = |entry: &RecordingEntry| match &entry.input {
        RecordedInput::Started { number, tids } => Some((*number, tids.clone())),
        _ => None,
    };
    entries.iter().filter_map(started).collect()
}

/// Returns the recorded work of the tasks of each spawn, by the spawn's requesting task and wait
/// id. The work of a task without a recorded end is infinite.
fn recorded_work(entries: &[RecordingEntry]) -> HashMap<(Tid, i32), VecDeque<RecordedWork>> {
    let mut all = HashMap::<(Tid, i32), VecDeque<RecordedWork>>::new();
    // Tids are reused, so the current spawn of each tid is tracked. The end of a short task may be
    // recorded before the answer to its spawn.
    let (mut current, mut early_ends) = (
        HashMap::<Tid, ((Tid, i32), usize)>::new(),
        HashMap::<Tid, f64>::new(),
    );
    for entry in entries {
        match &entry.input {
            RecordedInput::Started { number, tids } => {
                for (i, tid) in tids.iter().enumerate() {
                    let seconds = early_ends.remove(tid).unwrap_or(f64::INFINITY);
                    all.entry(*number).or_default().push_back(RecordedWork {
                        seconds,
                        ..RecordedWork::default()
                    });
                    current.insert(*tid, (*number, i));
                }
            }
            RecordedInput::Ended { tid, used } => {
                let used = seconds(used.user + used.system);
                match current
                    .get(tid)
                    .and_then(|(number, i)| all.get_mut(number)?.get_mut(*i))
                {
                    // A task of a job that was restarted from a checkpoint has several recorded
                    // ends.
                    Some(work) if work.seconds.is_finite() => work.seconds += used,
                    Some(work) => work.seconds = used,
                    None => drop(early_ends.insert(*tid, used)),
                }
            }
            RecordedInput::Spawn {
                number: (src, _), ..
            } => {
                if let Some(work) = current
                    .get(src)
                    .and_then(|(number, i)| all.get_mut(number)?.get_mut(*i))
                {
                    work.last_spawn_at = entry.at;
                }
            }
            _ => {}
        }
    }
    all
}

impl World {
    pub(super) fn new(entries: &[RecordingEntry], policy_changes: bool) -> World {
        let begin = entries.first().map_or(Micros(0), |entry| entry.at);
        let mut state = WorldState {
            inputs: entries.iter().cloned().collect(),
            last_input_at: super::last_entry_time(entries),
            policy_changes,
            work: recorded_work(entries),
            recorded_tasks: recorded_tasks(entries),
            now: begin,
            began_at: begin,
            ..WorldState::default()
        };
        // The service requests the host table when it starts.
        if let Some(RecordedInput::Hosts(table)) = entries
            .iter()
            .map(|e| &e.input)
            .find(|i| matches!(i, RecordedInput::Hosts(_)))
        {
            state.table = table.clone();
        }
        World(Rc::new(RefCell::new(state)))
    }

    pub(super) fn figures(&self) -> Figures {
        let state = self.0.borrow();
        let (waits_s, runs_s) = (
            state.wait_times.iter().map(|w| w.1),
            state.run_times.iter().map(|r| r.1),
        );
        let (all, users) = (
            UserFigures::new(waits_s.collect(), runs_s.collect(), 0),
            state.figures_by_user(),
        );
        let UserFigures {
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

impl WorldState {
    fn post(&mut self, src: Tid, ctx: i32, tag: i32, wid: i32, enc: i32, body: Bytes) {
        self.inbox.push_back(Message {
            src,
            dst: service_tid(),
            ctx,
            tag,
            wid,
            enc,
            body,
        });
    }

    fn event(&mut self, host: HostId, kind: EventKind) {
        self.last_event += 1;
        let event = Event {
            number: self.last_event,
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

    /// Returns the figures of each user, by user.
    fn figures_by_user(&self) -> BTreeMap<u32, UserFigures> {
        let open: Vec<u32> = self
            .asked_at
            .keys()
            .map(|(src, _)| self.user_of(*src))
            .collect();
        let known = self
            .wait_times
            .iter()
            .chain(&self.run_times)
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
                UserFigures::new(own(&self.wait_times), own(&self.run_times), unanswered),
            )
        };
        users.into_iter().map(of).collect()
    }

    fn guests(&self, host: HostId) -> usize {
        self.tasks
            .values()
            .filter(|t| t.host == host && t.computes())
            .count()
    }

    /// Returns the rate of each task on a host, relative to an ordinary processor.
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

    /// Returns the rate of each host that has tasks.
    fn rates(&self) -> BTreeMap<HostId, f64> {
        let hosts: std::collections::BTreeSet<HostId> =
            self.tasks.values().map(|t| t.host).collect();
        hosts
            .into_iter()
            .map(|host| (host, self.rate(host)))
            .collect()
    }

    /// Returns the time of the next event in the simulation.
    fn next_event_at(&self) -> Micros {
        let rates = self.rates();
        let end = |task: &ReplayTask| match &task.migrating {
            Some((at, ..)) => Some(*at),
            None if task.suspended.is_suspended() => None,
            None if !task.has_work() => {
                Some(task.last_spawn_at + Micros(1)).filter(|behind| *behind > self.now)
            }
            None => {
                let rate = rates.get(&task.host).copied().unwrap_or(0.0);
                let span = task.work_left / rate;
                (rate > 0.0 && span.is_finite())
                    .then(|| self.now + Micros((span * 1e6).ceil() as u64))
            }
        };
        let ends = self.tasks.values().filter_map(end);
        let parked = self.vacates_due.values().copied();
        let inputs = self.inputs.front().map(|entry| entry.at);
        ends.chain(inputs)
            .chain(parked)
            .chain([self.report_at])
            .min()
            .unwrap_or(self.report_at)
    }

    fn is_over(&self) -> bool {
        let parked = !self.checkpoints.is_empty() || !self.vacates_due.is_empty();
        let busy = self.tasks.values().any(|task| task.work_left.is_finite())
            || !self.asked_at.is_empty()
            || parked;
        self.inputs.is_empty() && (!busy || self.now.since(self.last_input_at) >= TAIL_MAX)
    }

    /// Advances the time, and the work that the tasks have done.
    fn advance(&mut self, to: Micros) {
        let (span, rates) = (seconds(to.since(self.now)), self.rates());
        for task in self.tasks.values_mut() {
            let rate = if task.computes() {
                rates.get(&task.host).copied().unwrap_or(0.0)
            } else {
                0.0
            };
            if rate == 0.0 {
                self.figures.stood_still_s += span;
            }
            task.work_left = (task.work_left - rate * span).max(0.0);
        }
        self.now = self.now.max(to);
    }

    /// Processes everything that is due at the current time.
    fn process_due(&mut self) {
        // The end of a task may allow its parent to end.
        while let Some(tid) = self.find_finished() {
            let task = self.tasks.remove(&tid).expect("found a moment ago");
            self.run_times
                .push((task.user, seconds(self.now.since(task.began_at))));
            self.figures.last_end_s = seconds(self.now.since(self.began_at));
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
        let arrived = |t: &ReplayTask| t.migrating.as_ref().is_some_and(|(at, ..)| *at <= now);
        let arrived: Vec<Tid> = self
            .tasks
            .iter()
            .filter(|(_, t)| arrived(t))
            .map(|(tid, _)| *tid)
            .collect();
        arrived
            .into_iter()
            .for_each(|tid| self.complete_migration(tid));
        self.complete_vacates();
        while self.inputs.front().is_some_and(|entry| entry.at <= now) {
            let entry = self.inputs.pop_front().expect("looked at a moment ago");
            self.apply_input(entry.input);
        }
        if self.report_at <= now {
            self.report_at = now + REPORT_INTERVAL;
            let hosts: Vec<HostId> = self.reports.keys().copied().collect();
            let mut guests = BTreeMap::<HostId, usize>::new();
            self.tasks
                .values()
                .filter(|t| t.computes())
                .for_each(|t| *guests.entry(t.host).or_default() += 1);
            hosts
                .into_iter()
                .for_each(|host| self.send_report(host, guests.get(&host).copied().unwrap_or(0)));
        }
    }

    /// Returns a task that can end: it has no remaining work and no later spawns, and its children
    /// have ended.
    fn find_finished(&self) -> Option<Tid> {
        let waits = |tid: &Tid| {
            self.tasks
                .values()
                .any(|task| task.parent == *tid && task.work_left.is_finite())
        };
        let done = |(tid, task): &(&Tid, &ReplayTask)| {
            task.migrating.is_none()
                && !task.has_work()
                && task.last_spawn_at < self.now
                && !waits(tid)
        };
        self.tasks.iter().find(done).map(|(tid, _)| *tid)
    }

    fn complete_migration(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let Some((_, to, cause)) = task.migrating.take() else {
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
            // Migrations with these causes do not occur.
            MigrationCause::Checkpoint | MigrationCause::Restart => {}
        }
        let id = MigrationId(self.last_event + 1);
        let (bytes, resident, frozen, whole) = (
            IMAGE_BYTES,
            IMAGE_BYTES,
            MIGRATION_DURATION,
            MIGRATION_DURATION,
        );
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

    fn apply_input(&mut self, input: RecordedInput) {
        match input {
            // The service receives the new policy as after a change of the policy file.
            RecordedInput::Policy(conduct) if self.policy_changes => {
                self.post(
                    service_tid(),
                    CTX_RM,
                    TAG_POLICY,
                    0,
                    DSIG_X86_64,
                    policy_file_text(&conduct).into(),
                );
            }
            RecordedInput::Policy(_)
            | RecordedInput::Labels(_)
            | RecordedInput::Started { .. }
            | RecordedInput::Ended { .. } => {}
            RecordedInput::Hosts(table) => self.set_hosts(table),
            RecordedInput::Report { report, own } => {
                let (host, at) = (report.host, self.now);
                let foreign = external_demand(&TimedSample {
                    sample: report.sample,
                    received_at: at,
                    own_tasks: own,
                });
                self.reports.insert(host, (report, foreign));
                self.send_report(host, self.guests(host));
            }
            // The service receives the request as it was recorded. Its answer is ignored.
            RecordedInput::Drain {
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
            RecordedInput::Spawn {
                number: (recorded, wid),
                caller,
                user,
                job,
                request,
            } => {
                self.figures.spawns += 1;
                let src = self
                    .replayed_tids
                    .get(&recorded)
                    .copied()
                    .unwrap_or(recorded);
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
                    // The event contains no program name, because the task was not spawned.
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
                self.asked_at.insert((src, wid), self.now);
                let work = self.work.remove(&(recorded, wid)).unwrap_or_default();
                self.open_spawns.push(OpenSpawn {
                    number: (src, wid),
                    file: request.file.clone(),
                    work,
                });
                if let Some(tasks) = self.recorded_tasks.remove(&(recorded, wid)) {
                    self.recorded_tasks.insert((src, wid), tasks);
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

    fn set_hosts(&mut self, table: HostTable) {
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

    /// Sends a report of a host's load watcher. Owner and external load are as recorded; the load
    /// of the tasks is that of the replay.
    fn send_report(&mut self, host: HostId, guests: usize) {
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
        let local = self
            .last_task_numbers
            .entry(host)
            .or_insert(FIRST_TASK_NUMBER);
        *local += 1;
        Tid::task(host, *local)
    }

    /// Starts tasks on a host, as its daemon does for an order. Returns the wait id of the
    /// acknowledgement.
    fn exec(&mut self, host: HostId, parent: Tid, request: &SpawnRequest) -> i32 {
        self.last_wait_id += 1;
        let (wid, is_watcher) = (self.last_wait_id, request.file == LOAD_WATCHER_PROGRAM);
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
            let of = |open: &&mut OpenSpawn| {
                open.number.0 == parent && open.file == request.file && !open.work.is_empty()
            };
            // The work of a task that was not started in the recording is unknown.
            let work = self
                .open_spawns
                .iter_mut()
                .find(of)
                .and_then(|open| open.work.pop_front())
                .unwrap_or_default();
            let RecordedWork {
                seconds: left,
                last_spawn_at: spawns_until,
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
            let task = ReplayTask {
                host,
                program,
                parent,
                user,
                work_left: left,
                last_spawn_at: spawns_until,
                began_at: began,
                migrating: None,
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
            self.send_report(host, self.guests(host));
        }
        wid
    }

    fn record_answer(&mut self, number: (Tid, i32), body: Bytes) {
        let Some(asked) = self.asked_at.remove(&number) else {
            return;
        };
        self.wait_times
            .push((self.user_of(number.0), seconds(self.now.since(asked))));
        self.open_spawns.retain(|open| open.number != number);
        let results = unpack_tids(body).unwrap_or_default();
        let recorded = self.recorded_tasks.remove(&number).unwrap_or_default();
        let here: Vec<Tid> = results.iter().flatten().copied().collect();
        self.figures.started += here.len() as u64;
        self.figures.refused += (results.len() - here.len()) as u64;
        self.replayed_tids.extend(recorded.into_iter().zip(here));
    }
}

/// Returns the tid of the service.
fn service_tid() -> Tid {
    Tid::task(HostId::MASTER, 1).expect("a task")
}

impl VmApi for World {
    fn tid(&self) -> Tid {
        service_tid()
    }

    fn host(&self) -> HostId {
        HostId::MASTER
    }

    fn now(&self) -> Micros {
        self.0.borrow().now
    }

    fn wall_clock(&self) -> Micros {
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
            let next = state.next_event_at();
            if next > until {
                state.advance(until);
                return Ok(None);
            }
            state.advance(next);
            state.process_due();
        }
    }

    fn send(&self, to: Tid, tag: i32, wid: i32, body: Bytes) -> Result<(), Error> {
        if tag == SM_SPAWN {
            self.0.borrow_mut().record_answer((to, wid), body);
        }
        Ok(())
    }

    fn send_rm(&self, _to: Tid, _tag: i32, _wid: i32, _body: Bytes) -> Result<(), Error> {
        Ok(())
    }

    fn host_table(&self) -> Result<HostTable, Error> {
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
        let running = |(tid, task): (&Tid, &ReplayTask)| TaskInfo {
            flags: TASK_FORKED,
            name: task.program.clone(),
            migrating: task.migrating.is_some(),
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

    fn start_tasks(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        Ok(self.0.borrow_mut().exec(host, parent, request))
    }

    fn migrate(&self, tid: Tid, to: HostId, cause: MigrationCause) -> Result<(), MigrateError> {
        let mut state = self.0.borrow_mut();
        let at = state.now + MIGRATION_DURATION;
        match state.tasks.get_mut(&tid) {
            None => Err(Error::new(PvmError::NoTask, "it has ended").into()),
            Some(task) if task.migrating.is_some() => {
                Err(Error::new(PvmError::Already, "it is migrating").into())
            }
            Some(task) => {
                task.migrating = Some((at, to, cause));
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
        let at = state.now + MIGRATION_DURATION;
        state.vacates_due.insert(job, at);
        Ok(())
    }

    fn restart(&self, set: &str, on: &[String]) -> Result<(), Error> {
        self.0.borrow_mut().restart(set, on)
    }

    fn record_event(&self, _at: Micros, _kind: EventKind) -> Result<(), Error> {
        Ok(())
    }
}
