//! The simulated virtual machine for a replay. It implements the calls that the service makes, and
//! generates events from the recording and from the simulated tasks.

mod api;
mod inputs;
mod recorded;
mod vacated;

use super::{Figures, UserFigures};
use crate::recording::{RecordedInput, RecordingEntry};
use crate::service::TAG_EVENT;
use bytes::Bytes;
use recorded::{RecordedWork, recorded_tasks, recorded_work};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::frame::to_bytes;
use sempa_proto::load::{LOAD_WATCHER_PROGRAM, LoadReport};
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::{MigrationCause, Usage};
use sempa_proto::owner::GuestAccess;
use sempa_proto::rm::CTX_RM;
use sempa_proto::sm::{SM_EXECACK, pack_tids, unpack_tids};
use sempa_proto::suspend;
use sempa_proto::table::HostTable;
use sempa_proto::task::{SPAWN_NO_PARENT, SpawnRequest};
use sempa_proto::{HostId, Message, Micros, MigrationId, PvmError, Tid};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

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
