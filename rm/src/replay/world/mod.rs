//! The simulated virtual machine for a replay. It implements the calls that the service makes. It
//! generates events from the recording and from the simulated tasks.

mod api;
mod inputs;
mod recorded;
mod vacated;

use super::progress::{Observer, ReplayProgress};
use super::{ReplayResult, UserResult};
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
pub const TAIL_TIME_MAX: Micros = Micros::from_secs(3600);
/// Maximum interval between two reports of a load watcher.
const REPORT_INTERVAL: Micros = Micros::from_secs(5);
/// Size in bytes of the images of every task.
const IMAGE_BYTES: u64 = 64 << 20;
/// Time for which a migration stops its task. This time equals the predicted time for
/// [`IMAGE_BYTES`] before anything was learned.
const MIGRATION_DURATION: Micros = Micros::from_millis(400);
/// First number of tasks that are started in the replay. It is greater than the task numbers in the
/// recording.
const FIRST_TASK_NUMBER: u32 = 0x1_0000;

#[derive(Clone, Debug)]
struct ReplayTask {
    host: HostId,
    program: String,
    parent: Tid,
    user: u32,
    /// Remaining work in seconds of an ordinary processor; infinite for tasks whose end was not
    /// recorded.
    work_left_s: f64,
    /// Time at which the task last requested a spawn in the recording. The task does not end before
    /// this time.
    last_spawn_at: Micros,
    started_at: Micros,
    migration: Option<(Micros, HostId, MigrationCause)>,
    suspensions: suspend::Suspensions,
}

impl ReplayTask {
    /// True if the task uses processor time: it has work left, and is neither suspended nor
    /// migrating.
    fn computes(&self) -> bool {
        self.migration.is_none() && !self.suspensions.is_suspended() && self.has_work()
    }

    /// True if at least a microsecond of work remains.
    fn has_work(&self) -> bool {
        self.work_left_s >= 1e-6
    }
}

/// A requesting task that was not spawned in the replay: a console, or a program that a user has
/// started by hand. It uses no processor time.
#[derive(Clone, Copy, Debug)]
struct Spawner {
    host: HostId,
    parent: Tid,
    user: u32,
}

/// A spawn without a reply, with the recorded work of its tasks that are not started yet.
#[derive(Debug)]
struct OpenSpawn {
    request_id: (Tid, i32),
    program: String,
    task_work: VecDeque<RecordedWork>,
}

#[derive(Debug, Default)]
struct WorldState {
    now: Micros,
    started_at: Micros,
    last_input_at: Micros,
    /// True if the policy changes in the recording are replayed.
    replays_policy_changes: bool,
    inputs: VecDeque<RecordingEntry>,
    inbox: VecDeque<Message>,
    host_table: HostTable,
    /// Latest recorded report of each host, with the external load in threads.
    reports: BTreeMap<HostId, (LoadReport, f32)>,
    watchers: BTreeMap<HostId, Tid>,
    next_report_at: Micros,
    tasks: BTreeMap<Tid, ReplayTask>,
    spawners: BTreeMap<Tid, Spawner>,
    recorded_task_work: HashMap<(Tid, i32), VecDeque<RecordedWork>>,
    /// Tasks of each spawn in the recording, by the spawn's requesting task and wait id.
    recorded_tasks: HashMap<(Tid, i32), Vec<Tid>>,
    /// Tasks of the replay, by the corresponding task in the recording.
    replayed_tids: HashMap<Tid, Tid>,
    /// Jobs that are being vacated, each with the time at which its checkpoint is complete.
    vacates_due: BTreeMap<Tid, Micros>,
    /// Tasks of vacated jobs, by the name of the checkpoint.
    checkpoints: BTreeMap<String, Vec<(Tid, ReplayTask)>>,
    open_spawns: Vec<OpenSpawn>,
    requested_at: HashMap<(Tid, i32), Micros>,
    last_task_numbers: HashMap<HostId, u32>,
    last_event_number: u64,
    last_wait_id: i32,
    /// Times from spawn requests to their replies, as (user, seconds).
    wait_times: Vec<(u32, f64)>,
    /// Run times of tasks that did all their work, as (user, seconds).
    run_times: Vec<(u32, f64)>,
    result_so_far: ReplayResult,
    observer: Observer,
}

/// The simulated virtual machine. All clones share its state.
#[derive(Clone, Debug)]
pub(super) struct World(Rc<RefCell<WorldState>>);

fn seconds(duration: Micros) -> f64 {
    duration.0 as f64 / 1e6
}

impl World {
    pub(super) fn new(
        entries: &[RecordingEntry],
        policy_changes: bool,
        observer: Observer,
    ) -> Self {
        let start_time = entries.first().map_or(Micros(0), |entry| entry.at);
        let mut state = WorldState {
            inputs: entries.iter().cloned().collect(),
            last_input_at: super::last_entry_time(entries),
            replays_policy_changes: policy_changes,
            recorded_task_work: recorded_work(entries),
            recorded_tasks: recorded_tasks(entries),
            now: start_time,
            started_at: start_time,
            observer,
            ..WorldState::default()
        };
        // The service requests the host table at its start, so the table must be set before.
        if let Some(RecordedInput::Hosts(table)) = entries
            .iter()
            .map(|e| &e.input)
            .find(|i| matches!(i, RecordedInput::Hosts(_)))
        {
            state.host_table = table.clone();
        }
        Self(Rc::new(RefCell::new(state)))
    }

    pub(super) fn replay_result(&self) -> ReplayResult {
        let state = self.0.borrow();
        let (waits_s, runs_s) = (
            state.wait_times.iter().map(|w| w.1),
            state.run_times.iter().map(|r| r.1),
        );
        let (totals, users) = (
            UserResult::new(waits_s.collect(), runs_s.collect(), 0),
            state.results_by_user(),
        );
        let UserResult {
            waited_mean_s,
            waited_most_s,
            finished,
            run_mean_s,
            ..
        } = totals;
        ReplayResult {
            waited_mean_s,
            waited_most_s,
            finished,
            run_mean_s,
            users,
            ..state.result_so_far.clone()
        }
    }
}

impl WorldState {
    fn post_message(&mut self, src: Tid, ctx: i32, tag: i32, wid: i32, enc: i32, body: Bytes) {
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

    fn post_event(&mut self, host: HostId, kind: EventKind) {
        self.last_event_number += 1;
        let event = Event {
            number: self.last_event_number,
            at: self.now,
            host,
            kind,
        };
        if let Ok(body) = to_bytes(&event) {
            self.post_message(
                Tid::MY_DAEMON,
                CTX_RM,
                TAG_EVENT,
                0,
                DSIG_X86_64,
                body.into(),
            );
        }
    }

    /// Returns the user of a task; 0 for an unknown task.
    fn user_of(&self, tid: Tid) -> u32 {
        let spawner = self.spawners.get(&tid).map(|spawner| spawner.user);
        self.tasks
            .get(&tid)
            .map(|task| task.user)
            .or(spawner)
            .unwrap_or(0)
    }

    /// Returns the results of each user, by user.
    fn results_by_user(&self) -> BTreeMap<u32, UserResult> {
        let waiting_users: Vec<u32> = self
            .requested_at
            .keys()
            .map(|(src, _)| self.user_of(*src))
            .collect();
        let all_users = self
            .wait_times
            .iter()
            .chain(&self.run_times)
            .map(|user_entry| user_entry.0)
            .chain(waiting_users.iter().copied());
        let users: std::collections::BTreeSet<u32> = all_users.collect();
        let user_entry = |user: u32| {
            let seconds_of_user = |list: &[(u32, f64)]| {
                list.iter()
                    .filter(|measurement| measurement.0 == user)
                    .map(|measurement| measurement.1)
                    .collect()
            };
            let unanswered_count =
                waiting_users.iter().filter(|other| **other == user).count() as u64;
            (
                user,
                UserResult::new(
                    seconds_of_user(&self.wait_times),
                    seconds_of_user(&self.run_times),
                    unanswered_count,
                ),
            )
        };
        users.into_iter().map(user_entry).collect()
    }

    fn computing_task_count(&self, host: HostId) -> usize {
        self.tasks
            .values()
            .filter(|t| t.host == host && t.computes())
            .count()
    }

    /// Returns the rate of each task on a host, relative to an ordinary processor.
    fn task_rate(&self, host: HostId) -> f64 {
        let speed = self
            .host_table
            .get(host)
            .map_or(0.0, |entry| f64::from(entry.speed) / 1e3);
        let Some((report, external_threads)) = self.reports.get(&host) else {
            return speed;
        };
        if matches!(report.guest_access, GuestAccess::Paused { .. }) {
            return 0.0;
        }
        let threads = self.computing_task_count(host) as f64 + f64::from(*external_threads);
        speed * (f64::from(report.sample.usable_processors()) / threads.max(1e-9)).min(1.0)
    }

    /// Returns the rate of each host that has tasks.
    fn task_rates(&self) -> BTreeMap<HostId, f64> {
        let hosts: std::collections::BTreeSet<HostId> =
            self.tasks.values().map(|t| t.host).collect();
        hosts
            .into_iter()
            .map(|host| (host, self.task_rate(host)))
            .collect()
    }

    /// Returns the time at which the next event of the simulation is due.
    fn next_event_at(&self) -> Micros {
        let rates = self.task_rates();
        let task_event_time = |task: &ReplayTask| match &task.migration {
            Some((arrival, ..)) => Some(*arrival),
            None if task.suspensions.is_suspended() => None,
            None if !task.has_work() => {
                Some(task.last_spawn_at + Micros(1)).filter(|end_time| *end_time > self.now)
            }
            None => {
                let rate = rates.get(&task.host).copied().unwrap_or(0.0);
                let remaining_seconds = task.work_left_s / rate;
                (rate > 0.0 && remaining_seconds.is_finite())
                    .then(|| self.now + Micros((remaining_seconds * 1e6).ceil() as u64))
            }
        };
        let task_event_times = self.tasks.values().filter_map(task_event_time);
        let vacate_times = self.vacates_due.values().copied();
        let next_input_at = self.inputs.front().map(|entry| entry.at);
        task_event_times
            .chain(next_input_at)
            .chain(vacate_times)
            .chain([self.next_report_at])
            .min()
            .unwrap_or(self.next_report_at)
    }

    fn is_over(&self) -> bool {
        let has_vacated_jobs = !self.checkpoints.is_empty() || !self.vacates_due.is_empty();
        let has_open_work = self.tasks.values().any(|task| task.work_left_s.is_finite())
            || !self.requested_at.is_empty()
            || has_vacated_jobs;
        self.inputs.is_empty()
            && (!has_open_work || self.now.since(self.last_input_at) >= TAIL_TIME_MAX)
    }

    /// Advances the time to `time`: reduces the remaining work of the tasks that compute, and
    /// counts the time for which the other tasks do not run.
    fn advance_to(&mut self, time: Micros) {
        let (elapsed_seconds, rates) = (seconds(time.since(self.now)), self.task_rates());
        for task in self.tasks.values_mut() {
            let rate = if task.computes() {
                rates.get(&task.host).copied().unwrap_or(0.0)
            } else {
                0.0
            };
            if rate == 0.0 {
                self.result_so_far.stood_still_s += elapsed_seconds;
            }
            task.work_left_s = (task.work_left_s - rate * elapsed_seconds).max(0.0);
        }
        self.now = self.now.max(time);
        self.observer.report(ReplayProgress {
            replayed: self.now.since(self.started_at),
            recorded: self.last_input_at.since(self.started_at),
        });
    }

    /// Processes everything that is due at the current time: ends of tasks, migrations, vacates,
    /// recorded inputs and reports.
    fn process_due_events(&mut self) {
        // The end of a task may allow its parent to end.
        while let Some(tid) = self.find_finished_task() {
            let task = self.tasks.remove(&tid).expect("found a moment ago");
            self.run_times
                .push((task.user, seconds(self.now.since(task.started_at))));
            self.result_so_far.last_end_s = seconds(self.now.since(self.started_at));
            self.post_event(
                task.host,
                EventKind::TaskEnded {
                    tid,
                    status: 0,
                    used: Usage::default(),
                },
            );
        }
        let now = self.now;
        let has_arrived = |t: &ReplayTask| {
            t.migration
                .as_ref()
                .is_some_and(|(arrival, ..)| *arrival <= now)
        };
        let arrived_tids: Vec<Tid> = self
            .tasks
            .iter()
            .filter(|(_, t)| has_arrived(t))
            .map(|(tid, _)| *tid)
            .collect();
        arrived_tids
            .into_iter()
            .for_each(|tid| self.complete_migration(tid));
        self.complete_vacates();
        while self.inputs.front().is_some_and(|entry| entry.at <= now) {
            let entry = self.inputs.pop_front().expect("looked at a moment ago");
            self.apply_input(entry.input);
        }
        if self.next_report_at <= now {
            self.next_report_at = now + REPORT_INTERVAL;
            let hosts: Vec<HostId> = self.reports.keys().copied().collect();
            let mut guest_counts = BTreeMap::<HostId, usize>::new();
            self.tasks
                .values()
                .filter(|t| t.computes())
                .for_each(|t| *guest_counts.entry(t.host).or_default() += 1);
            hosts.into_iter().for_each(|host| {
                self.send_report(host, guest_counts.get(&host).copied().unwrap_or(0))
            });
        }
    }

    /// Returns a task that can end: it has no remaining work and no later spawns, and its children
    /// have ended.
    fn find_finished_task(&self) -> Option<Tid> {
        let has_running_child = |tid: &Tid| {
            self.tasks
                .values()
                .any(|task| task.parent == *tid && task.work_left_s.is_finite())
        };
        let can_end = |(tid, task): &(&Tid, &ReplayTask)| {
            task.migration.is_none()
                && !task.has_work()
                && task.last_spawn_at < self.now
                && !has_running_child(tid)
        };
        self.tasks.iter().find(can_end).map(|(tid, _)| *tid)
    }

    fn complete_migration(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let Some((_, target, cause)) = task.migration.take() else {
            return;
        };
        if self.host_table.get(target).is_none() {
            return;
        }
        let source = std::mem::replace(&mut task.host, target);
        match cause {
            MigrationCause::Load { .. } => self.result_so_far.moves_load += 1,
            MigrationCause::Owner { .. }
            | MigrationCause::Requested { .. }
            | MigrationCause::Drain { .. } => self.result_so_far.moves_owner += 1,
            // Migrations with these causes do not occur in a replay.
            MigrationCause::Checkpoint | MigrationCause::Restart => {}
        }
        let id = MigrationId(self.last_event_number + 1);
        let (image_size_bytes, memory_size_bytes, freeze_duration, total_time) = (
            IMAGE_BYTES,
            IMAGE_BYTES,
            MIGRATION_DURATION,
            MIGRATION_DURATION,
        );
        self.post_event(
            target,
            EventKind::Migrated {
                id,
                tid,
                from: source,
                to: target,
                cause,
                bytes: image_size_bytes,
                resident: memory_size_bytes,
                frozen: freeze_duration,
                transfer_time: total_time,
            },
        );
    }

    fn next_tid(&mut self, host: HostId) -> Option<Tid> {
        let number = self
            .last_task_numbers
            .entry(host)
            .or_insert(FIRST_TASK_NUMBER);
        *number += 1;
        Tid::for_task(host, *number)
    }

    /// Starts tasks on a host, as its daemon does for an order: adds the tasks, reports their
    /// starts, and sends the acknowledgement. A load watcher is only recorded. Returns the wait id
    /// of the acknowledgement.
    fn start_tasks_on(&mut self, host: HostId, parent: Tid, request: &SpawnRequest) -> i32 {
        self.last_wait_id += 1;
        let (wid, is_watcher) = (self.last_wait_id, request.program == LOAD_WATCHER_PROGRAM);
        let mut results = Vec::new();
        for _ in 0..request.task_count {
            let new_tid = self
                .host_table
                .get(host)
                .is_some()
                .then(|| self.next_tid(host))
                .flatten();
            results.push(new_tid.ok_or(PvmError::HostFail));
            let Some(tid) = new_tid else { continue };
            if is_watcher {
                self.watchers.insert(host, tid);
                continue;
            }
            let matches_order = |spawn: &&mut OpenSpawn| {
                spawn.request_id.0 == parent
                    && spawn.program == request.program
                    && !spawn.task_work.is_empty()
            };
            // The work of a task is unknown if the task was not started in the recording.
            let work = self
                .open_spawns
                .iter_mut()
                .find(matches_order)
                .and_then(|spawn| spawn.task_work.pop_front())
                .unwrap_or_default();
            let RecordedWork {
                work_s: work_seconds,
                last_spawn_at: last_spawn_time,
            } = work;
            let (program, start_time, no_suspensions) = (
                request.program.clone(),
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
                work_left_s: work_seconds,
                last_spawn_at: last_spawn_time,
                started_at: start_time,
                migration: None,
                suspensions: no_suspensions,
            };
            self.tasks.insert(tid, task);
            let name = self
                .host_table
                .get(host)
                .map_or_else(|| host.to_string(), |entry| entry.name.clone());
            *self.result_so_far.placed.entry(name).or_default() += 1;
            self.post_event(
                host,
                EventKind::TaskStarted {
                    tid,
                    parent,
                    name: request.program.clone(),
                    user,
                },
            );
        }
        self.post_message(
            host.daemon_tid(),
            CTX_BASE,
            SM_EXECACK,
            wid,
            ENC_XDR,
            pack_tids(&results),
        );
        if is_watcher {
            self.send_report(host, self.computing_task_count(host));
        }
        wid
    }

    fn record_spawn_reply(&mut self, request_id: (Tid, i32), body: Bytes) {
        let Some(request_time) = self.requested_at.remove(&request_id) else {
            return;
        };
        self.wait_times.push((
            self.user_of(request_id.0),
            seconds(self.now.since(request_time)),
        ));
        self.open_spawns
            .retain(|open_spawn| open_spawn.request_id != request_id);
        let results = unpack_tids(body).unwrap_or_default();
        let recorded_tids = self.recorded_tasks.remove(&request_id).unwrap_or_default();
        let started_tids: Vec<Tid> = results.iter().flatten().copied().collect();
        self.result_so_far.started += started_tids.len() as u64;
        self.result_so_far.refused += (results.len() - started_tids.len()) as u64;
        self.replayed_tids
            .extend(recorded_tids.into_iter().zip(started_tids));
    }
}

fn service_tid() -> Tid {
    Tid::for_task(HostId::MASTER, 1).expect("a task")
}
