//! Simulates a pool of desktop machines in virtual time. Owners arrive and leave. Jobs of equal
//! processes wait, run and migrate according to the decisions under test.
//!
//! The durations of migrations are drawn from measurements, independent of the predictions in the
//! decisions. The seed determines the whole run.

use crate::desktop::{desktop, host_id};
use crate::random::Rng;
use pvm_rm::decide::{
    FairShare, HostList, Limits, OwnerState, PlacementPolicy, PlacementRequest, QueuedRequest,
    Snapshot, TaskView, UpDownRates, place, plan_evictions, plan_rebalances, select_victims,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

pub(crate) const HOUR: f64 = 3600.0;
pub(crate) const DAY: f64 = 24.0 * HOUR;
/// Interval between two rebalancing decisions, in seconds.
const BALANCE_INTERVAL_S: f64 = 300.0;
/// Memory size of a process in bytes.
const PROCESS_BYTES: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PoolEvent {
    Owner(u16),
    Ends { task: Tid, version: u64 },
    Arrives { task: Tid },
    Balance,
    Decide,
    Job(usize),
}

struct PoolTask {
    host: u16,
    remaining: f64,
    updated_at: f64,
    rate: f64,
    version: u64,
    job: usize,
    /// Total work in seconds.
    work: f64,
    /// Target of the migration that stops the task at present.
    moving: Option<u16>,
    /// True if the task was preempted for another user's task on its host.
    suspended: bool,
}

/// A job of equal processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolJob {
    pub(crate) user: u32,
    pub(crate) arrives: f64,
    pub(crate) processes: u32,
    /// Mean seconds of work of each process.
    pub(crate) work: f64,
    pub(crate) started: Option<f64>,
    pub(crate) ended: Option<f64>,
    running: u32,
}

impl PoolJob {
    pub(crate) fn new(user: u32, arrives: f64, processes: u32, work: f64) -> PoolJob {
        PoolJob {
            user,
            arrives,
            processes,
            work,
            started: None,
            ended: None,
            running: 0,
        }
    }
}

/// Durations measured on real hosts, in seconds. The simulation draws from them at random.
#[derive(Clone, Debug)]
pub(crate) struct MeasuredTimes {
    /// Time from the record of an owner's login until a guest is stopped.
    pub(crate) stops: Vec<f64>,
    /// Time from the record of an owner's login until no guest is left on the host.
    pub(crate) clears: Vec<f64>,
    /// Time for which a rebalancing migration stops its task.
    pub(crate) freezes: Vec<f64>,
    /// Duration of a rebalancing migration.
    pub(crate) moves: Vec<f64>,
}

/// Statistics of a run.
#[derive(Default)]
pub(crate) struct Statistics {
    /// Time for which each guest ran after its host's owner had arrived, in seconds.
    pub(crate) runs_beside_owner: Vec<f64>,
    /// Time from an owner's first activity until the eviction of each guest, in seconds.
    pub(crate) eviction_delays: Vec<f64>,
    /// Time from an owner's first activity until the last guest had left, for each host with
    /// guests, in seconds.
    pub(crate) clear_times: Vec<f64>,
    pub(crate) evictions: usize,
    pub(crate) rebalances: usize,
    /// Total time for which tasks were paused by migrations, in seconds.
    pub(crate) paused_seconds: f64,
    /// Total time for which tasks were paused because of owners before a migration began, because
    /// no host had room, in seconds.
    pub(crate) stuck_seconds: f64,
    /// Completed work in seconds.
    pub(crate) work_seconds: f64,
    /// Total time for which hosts had no owner present, in seconds: an upper bound of the work.
    pub(crate) free_seconds: f64,
    pub(crate) free_max: usize,
    pub(crate) moves_by_hour: BTreeMap<u64, usize>,
    /// (mean number of free hosts, mean number of running tasks), by hour.
    pub(crate) by_hour: BTreeMap<u64, (f64, f64)>,
}

pub(crate) struct DesktopPool {
    pub(crate) now: f64,
    pub(crate) snapshot: Snapshot,
    pub(crate) jobs: Vec<PoolJob>,
    pub(crate) fair: FairShare,
    pub(crate) statistics: Statistics,
    rng: Rng,
    tasks: BTreeMap<Tid, PoolTask>,
    tasks_on: Vec<Vec<Tid>>,
    owned_since: Vec<Option<f64>>,
    events: BinaryHeap<Reverse<(u64, u64, PoolEvent)>>,
    event_count: u64,
    free_hosts: usize,
    empty_hosts: usize,
    running_tasks: usize,
    last_tid: u32,
    /// Probability that the owner of a host is present at a time. `None` means that the owner is
    /// always present.
    presence: fn(u16, f64) -> Option<f64>,
    times: MeasuredTimes,
}

fn micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6) as u64)
}

/// Mean duration of an owner's presence in seconds.
const VISIT_MEAN_S: f64 = 75.0 * 60.0;

impl DesktopPool {
    pub(crate) fn new(
        hosts: u16,
        seed: u64,
        presence: fn(u16, f64) -> Option<f64>,
        jobs: Vec<PoolJob>,
        times: MeasuredTimes,
    ) -> DesktopPool {
        let mut random = Rng::new(seed);
        let here: Vec<bool> = (1..=hosts)
            .map(|i| presence(i, 0.0).is_none_or(|p| random.uniform() < p))
            .collect();
        let owner = |here: bool| match here {
            true => OwnerState::Present {
                why: "at the keyboard".into(),
            },
            false => OwnerState::Absent { left_at: None },
        };
        let views: HostList = (1..=hosts)
            .zip(&here)
            .map(|(i, here)| desktop(i, owner(*here)))
            .collect();
        let free = here.iter().filter(|here| !**here).count();
        let mut pool = DesktopPool {
            now: 0.0,
            snapshot: Snapshot::new(Micros(0), PlacementPolicy::Load, views),
            jobs,
            fair: FairShare::new(UpDownRates::default()),
            statistics: Statistics::default(),
            rng: random,
            tasks: BTreeMap::new(),
            tasks_on: vec![Vec::new(); usize::from(hosts) + 1],
            owned_since: here.iter().map(|here| here.then_some(0.0)).collect(),
            events: BinaryHeap::new(),
            event_count: 0,
            free_hosts: free,
            empty_hosts: free,
            running_tasks: 0,
            last_tid: 0,
            presence,
            times,
        };
        for host in 1..=hosts {
            pool.schedule_owner_change(host);
        }
        for job in 0..pool.jobs.len() {
            pool.schedule(pool.jobs[job].arrives, PoolEvent::Job(job));
        }
        pool.schedule(BALANCE_INTERVAL_S, PoolEvent::Balance);
        pool
    }

    fn schedule(&mut self, time: f64, event: PoolEvent) {
        self.event_count += 1;
        self.events
            .push(Reverse((micros(time).0, self.event_count, event)));
    }

    fn is_owned(&self, host: u16) -> bool {
        self.owned_since[usize::from(host) - 1].is_some()
    }

    /// Returns the number of tasks that do not migrate although their host's owner is present.
    pub(crate) fn left_beside_owners(&self) -> usize {
        self.tasks
            .values()
            .filter(|task| self.is_owned(task.host) && task.moving.is_none())
            .count()
    }

    /// Schedules the next arrival or departure of a host's owner.
    fn schedule_owner_change(&mut self, host: u16) {
        let Some(present) = (self.presence)(host, self.now) else {
            return;
        };
        let mean = if self.is_owned(host) {
            VISIT_MEAN_S
        } else {
            VISIT_MEAN_S * (1.0 - present) / present.max(0.01)
        };
        // The next event is at most one hour later, because the probability depends on the time of
        // day.
        let wait = self.rng.exponential(mean);
        let at = self.now + wait.min(HOUR);
        self.schedule(
            at,
            PoolEvent::Owner(if wait > HOUR { host | 1 << 15 } else { host }),
        );
    }

    /// Updates the progress and the rates of the tasks of a host, after its tasks have changed.
    fn update_host(&mut self, host: u16) {
        self.resume(host);
        let works = |t: &&Tid| self.tasks[*t].moving.is_none() && !self.tasks[*t].suspended;
        let working = self.tasks_on[usize::from(host)]
            .iter()
            .filter(works)
            .count();
        let rate = if self.is_owned(host) {
            0.0
        } else {
            1.0 / working.max(1) as f64
        };
        for tid in self.tasks_on[usize::from(host)].clone() {
            let now = self.now;
            let task = self.tasks.get_mut(&tid).expect("on a host");
            let done = task.rate * (now - task.updated_at);
            task.remaining -= done;
            self.statistics.work_seconds += done;
            (task.updated_at, task.rate) = (
                now,
                if task.moving.is_some() || task.suspended {
                    0.0
                } else {
                    rate
                },
            );
            task.version += 1;
            if task.rate > 0.0 {
                let (ends, event) = (
                    now + task.remaining.max(0.0) / task.rate,
                    PoolEvent::Ends {
                        task: tid,
                        version: task.version,
                    },
                );
                self.schedule(ends, event);
            }
        }
        let views = self.tasks_on[usize::from(host)]
            .iter()
            .map(|tid| self.view(*tid))
            .collect();
        self.snapshot
            .hosts
            .edit(host_id(host))
            .expect("a host of the pool")
            .tasks = views;
    }

    /// Resumes a preempted task on a host when no other task runs there.
    fn resume(&mut self, host: u16) {
        let tasks = &self.tasks_on[usize::from(host)];
        if tasks.iter().any(|t| !self.tasks[t].suspended) {
            return;
        }
        for tid in tasks {
            let task = self.tasks.get_mut(tid).expect("on a host");
            task.suspended = false;
            self.fair
                .acquire(micros(self.now), self.jobs[task.job].user, 1);
        }
    }

    /// Preempts tasks of users with a higher index so that a request gets slots. Returns true if
    /// tasks were preempted.
    fn preempt_for(&mut self, ask: &PlacementRequest<'_>) -> bool {
        let gives = select_victims(&self.snapshot, &self.fair, ask);
        for tid in gives.iter().map(|gives| gives.tid) {
            let task = self.tasks.get_mut(&tid).expect("it runs");
            task.suspended = true;
            self.fair
                .release(micros(self.now), self.jobs[task.job].user, 1);
            let host = self
                .snapshot
                .hosts
                .edit(host_id(task.host))
                .expect("a host of the pool");
            host.tasks
                .iter_mut()
                .find(|t| t.tid == tid)
                .expect("it runs there")
                .suspended = true;
        }
        self.snapshot.hosts.refresh(self.snapshot.now);
        !gives.is_empty()
    }

    fn view(&self, tid: Tid) -> TaskView {
        let task = &self.tasks[&tid];
        let job = Tid::task(host_id(1), task.job as u32 + 1).expect("few jobs");
        let before = self
            .snapshot
            .host(host_id(task.host))
            .and_then(|h| h.tasks.iter().find(|t| t.tid == tid))
            .cloned();
        let fresh = TaskView {
            job,
            name: Arc::from("worker"),
            memory_bytes: PROCESS_BYTES,
            ..TaskView::new(tid, micros(self.now))
        };
        let moving = task.moving.map(|to| Some(host_id(to)));
        let (done, user, suspended) = (
            micros(task.work - task.remaining),
            self.jobs[task.job].user,
            task.suspended,
        );
        TaskView {
            migrating: moving,
            work_done: done,
            user,
            suspended,
            ..before.unwrap_or(fresh)
        }
    }

    fn add_task(&mut self, tid: Tid, host: u16) {
        let on = &mut self.tasks_on[usize::from(host)];
        if on.is_empty() && self.owned_since[usize::from(host) - 1].is_none() {
            self.empty_hosts -= 1;
        }
        on.push(tid);
    }

    fn remove_task(&mut self, tid: Tid, host: u16) {
        let on = &mut self.tasks_on[usize::from(host)];
        on.retain(|other| *other != tid);
        if on.is_empty() {
            match self.owned_since[usize::from(host) - 1] {
                None => self.empty_hosts += 1,
                Some(since) => self.statistics.clear_times.push(self.now - since),
            }
        }
    }

    fn owner_changes(&mut self, host: u16) {
        let i = usize::from(host) - 1;
        let owned = self.owned_since[i].is_none();
        self.owned_since[i] = owned.then_some(self.now);
        let empty = usize::from(self.tasks_on[usize::from(host)].is_empty());
        let owner = if owned {
            (self.free_hosts, self.empty_hosts) = (self.free_hosts - 1, self.empty_hosts - empty);
            OwnerState::Present {
                why: "at the keyboard".into(),
            }
        } else {
            (self.free_hosts, self.empty_hosts) = (self.free_hosts + 1, self.empty_hosts + empty);
            OwnerState::Absent {
                left_at: Some(micros(self.now)),
            }
        };
        self.snapshot
            .hosts
            .edit(host_id(host))
            .expect("a host of the pool")
            .owner = owner;
        self.update_host(host);
    }

    /// Returns a randomly drawn measurement.
    fn draw(&mut self, of: fn(&MeasuredTimes) -> &Vec<f64>) -> f64 {
        let at = self.rng.uniform();
        let all = of(&self.times);
        all[((all.len() as f64 * at) as usize).min(all.len() - 1)]
    }

    /// Begins the migration of a task, because of an owner or for rebalancing.
    fn begin_migration(&mut self, tid: Tid, to: HostId) {
        let task = self
            .tasks
            .get_mut(&tid)
            .expect("only tasks that run are moved");
        task.moving = Some(to.index());
        let (host, runs) = (task.host, !task.suspended);
        let span = match self.owned_since[usize::from(host) - 1] {
            Some(since) => {
                let (clear, stop) = (self.draw(|t| &t.clears), self.draw(|t| &t.stops));
                // A preempted task was already paused, so it did not run after the owner's arrival.
                self.statistics
                    .runs_beside_owner
                    .extend(runs.then_some(stop));
                self.statistics.stuck_seconds += self.now - since;
                self.statistics.eviction_delays.push(self.now - since);
                // The task counts as paused until the end of the migration, although a real task
                // resumes slightly earlier.
                self.statistics.paused_seconds += (clear - stop).max(0.0);
                clear
            }
            None => {
                self.statistics.paused_seconds += self.draw(|t| &t.freezes);
                self.draw(|t| &t.moves)
            }
        };
        *self
            .statistics
            .moves_by_hour
            .entry((self.now / HOUR) as u64)
            .or_default() += 1;
        self.update_host(host);
        self.schedule(self.now + span, PoolEvent::Arrives { task: tid });
    }

    fn end_migration(&mut self, tid: Tid) {
        let task = self
            .tasks
            .get_mut(&tid)
            .expect("a task on its way does not end");
        let (from, to) = (task.host, task.moving.take().expect("it was on its way"));
        if std::mem::take(&mut self.tasks.get_mut(&tid).expect("as before").suspended) {
            self.fair
                .acquire(micros(self.now), self.jobs[self.tasks[&tid].job].user, 1);
        }
        let mut view = self.view(tid);
        view.migrating = None;
        view.recent_migrations
            .retain(|at| micros(self.now).since(*at) < Micros::from_secs(60));
        view.recent_migrations.push(micros(self.now));
        self.tasks.get_mut(&tid).expect("as before").host = to;
        self.remove_task(tid, from);
        self.add_task(tid, to);
        self.snapshot
            .hosts
            .edit(host_id(to))
            .expect("a host of the pool")
            .tasks
            .push(view);
        self.update_host(from);
        self.update_host(to);
    }

    fn end_task(&mut self, tid: Tid) {
        let host = self.tasks[&tid].host;
        self.update_host(host);
        let task = self.tasks.remove(&tid).expect("it was running");
        self.remove_task(tid, host);
        self.update_host(host);
        self.running_tasks -= 1;
        let job = &mut self.jobs[task.job];
        job.running -= 1;
        let user = job.user;
        if job.running == 0 {
            job.ended = Some(self.now);
        }
        self.fair.release(micros(self.now), user, 1);
    }

    /// Starts waiting jobs in the order of service, as long as there is a free host for each
    /// process. `may_stop`: tasks may be preempted for them.
    fn start_jobs(&mut self, may_stop: bool) {
        while self.fair.queue_len() > 0 {
            let now = micros(self.now);
            let turn = self
                .fair
                .next_per_user(now)
                .first()
                .map(|(_, waiting)| *waiting)
                .expect("somebody waits");
            let number = turn.number as usize;
            let PoolJob {
                processes, user, ..
            } = self.jobs[number];
            let request = SpawnRequest {
                count: processes,
                place: "?spread; free >= 1".into(),
                ..SpawnRequest::default()
            };
            let ask = PlacementRequest::new(user, &request, processes, host_id(1));
            if self.empty_hosts < processes as usize && !(may_stop && self.preempt_for(&ask)) {
                return;
            }
            let placed = place(&self.snapshot, &ask).hosts;
            if placed.iter().any(Result::is_err)
                || Limits::default()
                    .allow(self.fair.held(user), 0, processes)
                    .is_err()
            {
                return;
            }
            let hosts: Vec<u16> = placed.into_iter().flatten().map(HostId::index).collect();
            self.start_job(number, turn.number, &hosts);
        }
    }

    /// Starts a job on these hosts.
    fn start_job(&mut self, number: usize, waiting: u64, hosts: &[u16]) {
        let PoolJob { work, user, .. } = self.jobs[number];
        let now = micros(self.now);
        self.fair.dequeue(now, user, waiting);
        self.fair.acquire(now, user, hosts.len() as u32);
        for host in hosts.iter().copied() {
            self.last_tid += 1;
            let tid = Tid::task(host_id(1), self.last_tid).expect("few tasks");
            let work = work * (0.75 + 0.5 * self.rng.uniform());
            let (job, at) = (number, self.now);
            let task = PoolTask {
                host,
                remaining: work,
                updated_at: at,
                rate: 0.0,
                version: 0,
                job,
                work,
                moving: None,
                suspended: false,
            };
            self.tasks.insert(tid, task);
            self.add_task(tid, host);
            self.update_host(host);
        }
        self.running_tasks += hosts.len();
        (self.jobs[number].started, self.jobs[number].running) =
            (Some(self.now), hosts.len() as u32);
        self.snapshot.hosts.refresh(now);
    }

    fn decide(&mut self) {
        let decided = plan_evictions(&self.snapshot);
        if let Some(again) = decided.retry_at() {
            self.schedule(again.0 as f64 / 1e6, PoolEvent::Decide);
        }
        self.statistics.evictions += decided.evictions.len();
        for step in decided.evictions {
            self.begin_migration(step.tid, step.to);
        }
    }

    fn handle(&mut self, event: PoolEvent) {
        match event {
            PoolEvent::Owner(host) => {
                let (host, same) = (host & !(1 << 15), host >> 15 == 1);
                if !same {
                    self.owner_changes(host);
                }
                self.schedule_owner_change(host);
            }
            PoolEvent::Ends { task, version } => {
                if self.tasks.get(&task).is_some_and(|t| t.version == version) {
                    self.end_task(task);
                }
            }
            PoolEvent::Arrives { task } => self.end_migration(task),
            PoolEvent::Balance => {
                self.schedule(self.now + BALANCE_INTERVAL_S, PoolEvent::Balance);
                for shift in plan_rebalances(&self.snapshot) {
                    let host = self
                        .snapshot
                        .hosts
                        .edit(shift.from)
                        .expect("a host of the pool");
                    let task = host
                        .tasks
                        .iter_mut()
                        .find(|t| t.tid == shift.tid)
                        .expect("it runs there");
                    task.recent_rebalances.push(micros(self.now));
                    self.statistics.rebalances += 1;
                    self.begin_migration(shift.tid, shift.to);
                }
            }
            PoolEvent::Decide => {}
            PoolEvent::Job(number) => {
                let user = self.jobs[number].user;
                let job = Tid::task(host_id(1), number as u32 + 1).expect("few jobs");
                let waiting = QueuedRequest {
                    number: number as u64,
                    user,
                    job,
                    since: micros(self.now),
                };
                self.fair
                    .enqueue(micros(self.now), waiting)
                    .expect("there is room in the queue");
            }
        }
    }

    /// Runs the simulation until the time `end`, in seconds.
    pub(crate) fn run(&mut self, end: f64) {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            let at = (at as f64 / 1e6).min(end);
            let span = at - self.now;
            self.statistics.free_seconds += span * self.free_hosts as f64;
            self.statistics.free_max = self.statistics.free_max.max(self.free_hosts);
            let hour = self
                .statistics
                .by_hour
                .entry((self.now / HOUR) as u64)
                .or_default();
            (hour.0, hour.1) = (
                hour.0 + span * self.free_hosts as f64 / HOUR,
                hour.1 + span * self.running_tasks as f64 / HOUR,
            );
            self.now = at;
            if self.now >= end {
                return;
            }
            let may_stop = matches!(event, PoolEvent::Job(_) | PoolEvent::Balance);
            self.handle(event);
            self.snapshot.now = micros(self.now);
            self.snapshot.hosts.refresh(self.snapshot.now);
            self.decide();
            self.snapshot.hosts.refresh(self.snapshot.now);
            self.start_jobs(may_stop);
        }
    }
}
