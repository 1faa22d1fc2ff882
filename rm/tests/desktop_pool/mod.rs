//! Simulates a pool of desktop machines in virtual time. Owners arrive and leave. Jobs of equal
//! processes wait, run and migrate as the decisions under test require.
//!
//! The durations of migrations are drawn from measurements. They do not depend on the predictions
//! in the decisions. The seed determines the whole run.

use crate::desktop::{desktop_host, host_id};
use crate::rng::Rng;
use pvm_rm::decide::{
    FairShare, HostList, OwnerState, PlacementPolicy, PlacementRequest, QueuedRequest, Snapshot,
    TaskLimits, TaskView, UpDownRates, place, plan_evictions, plan_rebalances, select_victims,
};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

pub(crate) const HOUR_S: f64 = 3600.0;
pub(crate) const DAY_S: f64 = 24.0 * HOUR_S;
/// Interval between two rebalancing decisions, in seconds.
const REBALANCE_INTERVAL_S: f64 = 300.0;
/// Memory size of a process in bytes.
const PROCESS_BYTES: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PoolEvent {
    OwnerChange(u16),
    TaskEnd { task: Tid, version: u64 },
    MigrationEnd { task: Tid },
    Rebalance,
    DecideAgain,
    JobArrival(usize),
}

struct PoolTask {
    host: u16,
    remaining_s: f64,
    updated_at_s: f64,
    rate: f64,
    rate_version: u64,
    job_index: usize,
    /// Total work in seconds.
    work_s: f64,
    /// Target of the running migration, which stops the task; `None` if the task does not migrate.
    migration_target: Option<u16>,
    /// True if the task was preempted for a task of another user on the same host.
    suspended: bool,
}

/// A job of equal processes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolJob {
    pub(crate) user: u32,
    pub(crate) arrival_s: f64,
    pub(crate) process_count: u32,
    /// Mean work of each process in seconds.
    pub(crate) work_s: f64,
    pub(crate) started_at_s: Option<f64>,
    pub(crate) ended_at_s: Option<f64>,
    running_count: u32,
}

impl PoolJob {
    pub(crate) fn new(user: u32, arrival_s: f64, process_count: u32, work_s: f64) -> Self {
        Self {
            user,
            arrival_s,
            process_count,
            work_s,
            started_at_s: None,
            ended_at_s: None,
            running_count: 0,
        }
    }
}

/// Durations measured on real hosts, in seconds. The simulation draws each duration from one of
/// these lists.
#[derive(Clone, Debug)]
pub(crate) struct MeasuredTimes {
    /// Time from the record of an owner's login until a guest is stopped.
    pub(crate) stop_s: Vec<f64>,
    /// Time from the record of an owner's login until no guest is left on the host.
    pub(crate) clear_s: Vec<f64>,
    /// Time for which a rebalancing migration pauses its task.
    pub(crate) freeze_s: Vec<f64>,
    /// Duration of a rebalancing migration.
    pub(crate) migration_s: Vec<f64>,
}

/// Statistics of a run.
#[derive(Default)]
pub(crate) struct PoolStatistics {
    /// Time for which each guest ran after the owner of its host had arrived, in seconds.
    pub(crate) runs_beside_owner_s: Vec<f64>,
    /// Time from an owner's first activity until the eviction of each guest, in seconds.
    pub(crate) eviction_delays_s: Vec<f64>,
    /// Time from an owner's first activity until the last guest had left the host, for each host
    /// with guests, in seconds.
    pub(crate) clear_times_s: Vec<f64>,
    pub(crate) eviction_count: usize,
    pub(crate) rebalance_count: usize,
    /// Total time for which tasks were paused by migrations, in seconds.
    pub(crate) paused_seconds: f64,
    /// Total time for which tasks were paused because of owners and no host had room for them, in
    /// seconds. The time of a task ends when its migration begins.
    pub(crate) stuck_seconds: f64,
    /// Completed work in seconds.
    pub(crate) work_seconds: f64,
    /// Total time for which hosts had no owner present, in seconds. The completed work cannot
    /// exceed this time.
    pub(crate) free_seconds: f64,
    pub(crate) free_hosts_max: usize,
    pub(crate) migrations_by_hour: BTreeMap<u64, usize>,
    /// (mean number of free hosts, mean number of running tasks) for each hour since the beginning.
    pub(crate) means_by_hour: BTreeMap<u64, (f64, f64)>,
}

pub(crate) struct DesktopPool {
    pub(crate) now_s: f64,
    pub(crate) snapshot: Snapshot,
    pub(crate) jobs: Vec<PoolJob>,
    pub(crate) fair_share: FairShare,
    pub(crate) statistics: PoolStatistics,
    rng: Rng,
    tasks: BTreeMap<Tid, PoolTask>,
    tasks_by_host: Vec<Vec<Tid>>,
    /// Arrival time of the present owner of each host, in seconds; `None` if no owner is present.
    owner_arrivals_s: Vec<Option<f64>>,
    events: BinaryHeap<Reverse<(u64, u64, PoolEvent)>>,
    event_count: u64,
    free_host_count: usize,
    /// Number of hosts without a present owner and without tasks.
    empty_host_count: usize,
    running_task_count: usize,
    last_local: u32,
    /// Returns the probability that the owner of a host (index) is present at a time in seconds.
    /// `None`: the owner is always present.
    owner_presence: fn(u16, f64) -> Option<f64>,
    measured_times: MeasuredTimes,
}

fn to_micros(seconds: f64) -> Micros {
    Micros((seconds * 1e6) as u64)
}

/// Mean duration of an owner's presence in seconds.
const OWNER_VISIT_MEAN_S: f64 = 75.0 * 60.0;

impl DesktopPool {
    pub(crate) fn new(
        host_count: u16,
        seed: u64,
        owner_presence: fn(u16, f64) -> Option<f64>,
        jobs: Vec<PoolJob>,
        measured_times: MeasuredTimes,
    ) -> Self {
        let mut rng = Rng::new(seed);
        let has_owner: Vec<bool> = (1..=host_count)
            .map(|i| owner_presence(i, 0.0).is_none_or(|p| rng.next_uniform() < p))
            .collect();
        let owner_state = |has_owner: bool| match has_owner {
            true => OwnerState::Present {
                why: "at the keyboard".into(),
            },
            false => OwnerState::Absent { left_at: None },
        };
        let host_views: HostList = (1..=host_count)
            .zip(&has_owner)
            .map(|(i, has_owner)| desktop_host(i, owner_state(*has_owner)))
            .collect();
        let free_count = has_owner.iter().filter(|has_owner| !**has_owner).count();
        let mut pool = Self {
            now_s: 0.0,
            snapshot: Snapshot::new(Micros(0), PlacementPolicy::Load, host_views),
            jobs,
            fair_share: FairShare::new(UpDownRates::default()),
            statistics: PoolStatistics::default(),
            rng,
            tasks: BTreeMap::new(),
            tasks_by_host: vec![Vec::new(); usize::from(host_count) + 1],
            owner_arrivals_s: has_owner
                .iter()
                .map(|has_owner| has_owner.then_some(0.0))
                .collect(),
            events: BinaryHeap::new(),
            event_count: 0,
            free_host_count: free_count,
            empty_host_count: free_count,
            running_task_count: 0,
            last_local: 0,
            owner_presence,
            measured_times,
        };
        for host in 1..=host_count {
            pool.schedule_owner_change(host);
        }
        for job in 0..pool.jobs.len() {
            pool.schedule(pool.jobs[job].arrival_s, PoolEvent::JobArrival(job));
        }
        pool.schedule(REBALANCE_INTERVAL_S, PoolEvent::Rebalance);
        pool
    }

    fn schedule(&mut self, time_s: f64, event: PoolEvent) {
        self.event_count += 1;
        self.events
            .push(Reverse((to_micros(time_s).0, self.event_count, event)));
    }

    fn has_owner(&self, host: u16) -> bool {
        self.owner_arrivals_s[usize::from(host) - 1].is_some()
    }

    /// Returns the number of tasks that are not migrating and whose host has a present owner.
    pub(crate) fn count_tasks_beside_owners(&self) -> usize {
        self.tasks
            .values()
            .filter(|task| self.has_owner(task.host) && task.migration_target.is_none())
            .count()
    }

    /// Schedules the next arrival or departure of a host's owner. Schedules nothing if the owner is
    /// always present.
    fn schedule_owner_change(&mut self, host: u16) {
        let Some(presence) = (self.owner_presence)(host, self.now_s) else {
            return;
        };
        let mean_s = if self.has_owner(host) {
            OWNER_VISIT_MEAN_S
        } else {
            OWNER_VISIT_MEAN_S * (1.0 - presence) / presence.max(0.01)
        };
        // The next event is at most one hour later, because the probability depends on the time of
        // day. After an hour without a change, the event only draws a new waiting time. Bit 15 of
        // the host number in the event marks such an event.
        let wait_s = self.rng.next_exponential(mean_s);
        let event_time_s = self.now_s + wait_s.min(HOUR_S);
        self.schedule(
            event_time_s,
            PoolEvent::OwnerChange(if wait_s > HOUR_S {
                host | 1 << 15
            } else {
                host
            }),
        );
    }

    /// Updates the progress and the rates of all tasks of a host. Must be called after the tasks or
    /// the owner of the host have changed.
    fn update_host(&mut self, host: u16) {
        self.resume_preempted(host);
        let is_running =
            |t: &&Tid| self.tasks[*t].migration_target.is_none() && !self.tasks[*t].suspended;
        let running_count = self.tasks_by_host[usize::from(host)]
            .iter()
            .filter(is_running)
            .count();
        let rate = if self.has_owner(host) {
            0.0
        } else {
            1.0 / running_count.max(1) as f64
        };
        for tid in self.tasks_by_host[usize::from(host)].clone() {
            let now = self.now_s;
            let task = self.tasks.get_mut(&tid).expect("on a host");
            let work_s = task.rate * (now - task.updated_at_s);
            task.remaining_s -= work_s;
            self.statistics.work_seconds += work_s;
            (task.updated_at_s, task.rate) = (
                now,
                if task.migration_target.is_some() || task.suspended {
                    0.0
                } else {
                    rate
                },
            );
            task.rate_version += 1;
            if task.rate > 0.0 {
                let (end_s, event) = (
                    now + task.remaining_s.max(0.0) / task.rate,
                    PoolEvent::TaskEnd {
                        task: tid,
                        version: task.rate_version,
                    },
                );
                self.schedule(end_s, event);
            }
        }
        let task_views = self.tasks_by_host[usize::from(host)]
            .iter()
            .map(|tid| self.task_view(*tid))
            .collect();
        self.snapshot
            .hosts
            .edit(host_id(host))
            .expect("a host of the pool")
            .tasks = task_views;
    }

    /// Resumes the preempted tasks of a host if all tasks of the host are preempted.
    fn resume_preempted(&mut self, host: u16) {
        let tasks = &self.tasks_by_host[usize::from(host)];
        if tasks.iter().any(|t| !self.tasks[t].suspended) {
            return;
        }
        for tid in tasks {
            let task = self.tasks.get_mut(tid).expect("on a host");
            task.suspended = false;
            self.fair_share.add_processors(
                to_micros(self.now_s),
                self.jobs[task.job_index].user,
                1,
            );
        }
    }

    /// Preempts tasks of users with a higher index so that the request gets slots. Returns true if
    /// tasks were preempted.
    fn preempt_for(&mut self, request: &PlacementRequest<'_>) -> bool {
        let victims = select_victims(&self.snapshot, &self.fair_share, request);
        for tid in victims.iter().map(|victims| victims.tid) {
            let task = self.tasks.get_mut(&tid).expect("it runs");
            task.suspended = true;
            self.fair_share.remove_processors(
                to_micros(self.now_s),
                self.jobs[task.job_index].user,
                1,
            );
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
        !victims.is_empty()
    }

    fn task_view(&self, tid: Tid) -> TaskView {
        let task = &self.tasks[&tid];
        let job = Tid::for_task(host_id(1), task.job_index as u32 + 1).expect("few jobs");
        let previous_view = self
            .snapshot
            .host(host_id(task.host))
            .and_then(|h| h.tasks.iter().find(|t| t.tid == tid))
            .cloned();
        let new_view = TaskView {
            job,
            name: Arc::from("worker"),
            memory_bytes: PROCESS_BYTES,
            ..TaskView::new(tid, to_micros(self.now_s))
        };
        let migration_state = task.migration_target.map(|target| Some(host_id(target)));
        let (work_done, user, suspended) = (
            to_micros(task.work_s - task.remaining_s),
            self.jobs[task.job_index].user,
            task.suspended,
        );
        TaskView {
            migration: migration_state,
            work_done,
            user,
            suspended,
            ..previous_view.unwrap_or(new_view)
        }
    }

    fn add_task(&mut self, tid: Tid, host: u16) {
        let host_tasks = &mut self.tasks_by_host[usize::from(host)];
        if host_tasks.is_empty() && self.owner_arrivals_s[usize::from(host) - 1].is_none() {
            self.empty_host_count -= 1;
        }
        host_tasks.push(tid);
    }

    fn remove_task(&mut self, tid: Tid, host: u16) {
        let host_tasks = &mut self.tasks_by_host[usize::from(host)];
        host_tasks.retain(|other| *other != tid);
        if host_tasks.is_empty() {
            match self.owner_arrivals_s[usize::from(host) - 1] {
                None => self.empty_host_count += 1,
                Some(owner_arrival_s) => self
                    .statistics
                    .clear_times_s
                    .push(self.now_s - owner_arrival_s),
            }
        }
    }

    fn change_owner(&mut self, host: u16) {
        let i = usize::from(host) - 1;
        let has_owner = self.owner_arrivals_s[i].is_none();
        self.owner_arrivals_s[i] = has_owner.then_some(self.now_s);
        let empty_count = usize::from(self.tasks_by_host[usize::from(host)].is_empty());
        let owner = if has_owner {
            (self.free_host_count, self.empty_host_count) = (
                self.free_host_count - 1,
                self.empty_host_count - empty_count,
            );
            OwnerState::Present {
                why: "at the keyboard".into(),
            }
        } else {
            (self.free_host_count, self.empty_host_count) = (
                self.free_host_count + 1,
                self.empty_host_count + empty_count,
            );
            OwnerState::Absent {
                left_at: Some(to_micros(self.now_s)),
            }
        };
        self.snapshot
            .hosts
            .edit(host_id(host))
            .expect("a host of the pool")
            .owner = owner;
        self.update_host(host);
    }

    /// Returns a randomly drawn measurement of the selected list, in seconds.
    fn draw(&mut self, select: fn(&MeasuredTimes) -> &Vec<f64>) -> f64 {
        let fraction = self.rng.next_uniform();
        let measurements = select(&self.measured_times);
        measurements[((measurements.len() as f64 * fraction) as usize).min(measurements.len() - 1)]
    }

    /// Begins the migration of a task. If the owner of the source is present, the durations of
    /// evictions apply, otherwise those of rebalancing migrations.
    fn begin_migration(&mut self, tid: Tid, target: HostId) {
        let task = self
            .tasks
            .get_mut(&tid)
            .expect("only tasks that run are moved");
        task.migration_target = Some(target.index());
        let (host, was_running) = (task.host, !task.suspended);
        let duration_s = match self.owner_arrivals_s[usize::from(host) - 1] {
            Some(owner_arrival_s) => {
                let (clear_s, stop_s) = (self.draw(|t| &t.clear_s), self.draw(|t| &t.stop_s));
                // A preempted task was already paused when the owner arrived, so its run time after
                // the arrival is not recorded.
                self.statistics
                    .runs_beside_owner_s
                    .extend(was_running.then_some(stop_s));
                self.statistics.stuck_seconds += self.now_s - owner_arrival_s;
                self.statistics
                    .eviction_delays_s
                    .push(self.now_s - owner_arrival_s);
                // The task counts as paused until the end of the migration, although a real task
                // resumes slightly before the end.
                self.statistics.paused_seconds += (clear_s - stop_s).max(0.0);
                clear_s
            }
            None => {
                self.statistics.paused_seconds += self.draw(|t| &t.freeze_s);
                self.draw(|t| &t.migration_s)
            }
        };
        *self
            .statistics
            .migrations_by_hour
            .entry((self.now_s / HOUR_S) as u64)
            .or_default() += 1;
        self.update_host(host);
        self.schedule(
            self.now_s + duration_s,
            PoolEvent::MigrationEnd { task: tid },
        );
    }

    fn end_migration(&mut self, tid: Tid) {
        let task = self
            .tasks
            .get_mut(&tid)
            .expect("a task on its way does not end");
        let (source, target) = (
            task.host,
            task.migration_target.take().expect("it was on its way"),
        );
        if std::mem::take(&mut self.tasks.get_mut(&tid).expect("as before").suspended) {
            self.fair_share.add_processors(
                to_micros(self.now_s),
                self.jobs[self.tasks[&tid].job_index].user,
                1,
            );
        }
        let mut view = self.task_view(tid);
        view.migration = None;
        view.recent_migrations
            .retain(|at| to_micros(self.now_s).since(*at) < Micros::from_secs(60));
        view.recent_migrations.push(to_micros(self.now_s));
        self.tasks.get_mut(&tid).expect("as before").host = target;
        self.remove_task(tid, source);
        self.add_task(tid, target);
        self.snapshot
            .hosts
            .edit(host_id(target))
            .expect("a host of the pool")
            .tasks
            .push(view);
        self.update_host(source);
        self.update_host(target);
    }

    fn end_task(&mut self, tid: Tid) {
        let host = self.tasks[&tid].host;
        self.update_host(host);
        let task = self.tasks.remove(&tid).expect("it was running");
        self.remove_task(tid, host);
        self.update_host(host);
        self.running_task_count -= 1;
        let job = &mut self.jobs[task.job_index];
        job.running_count -= 1;
        let user = job.user;
        if job.running_count == 0 {
            job.ended_at_s = Some(self.now_s);
        }
        self.fair_share
            .remove_processors(to_micros(self.now_s), user, 1);
    }

    /// Starts waiting jobs in the order of service until one of them cannot get a free host for
    /// each process. `may_preempt`: tasks of other users may be preempted for these jobs.
    fn start_jobs(&mut self, may_preempt: bool) {
        while self.fair_share.queue_len() > 0 {
            let now = to_micros(self.now_s);
            let next_request = self
                .fair_share
                .next_requests(now)
                .first()
                .map(|(_, queued)| *queued)
                .expect("somebody waits");
            let job_index = next_request.number as usize;
            let PoolJob {
                process_count,
                user,
                ..
            } = self.jobs[job_index];
            let request = SpawnRequest {
                task_count: process_count,
                where_arg: "?spread; free >= 1".into(),
                ..SpawnRequest::default()
            };
            let placement_request =
                PlacementRequest::new(user, &request, process_count, host_id(1));
            if self.empty_host_count < process_count as usize
                && !(may_preempt && self.preempt_for(&placement_request))
            {
                return;
            }
            let placed_hosts = place(&self.snapshot, &placement_request).hosts;
            if placed_hosts.iter().any(Result::is_err)
                || TaskLimits::default()
                    .allow(self.fair_share.held_processors(user), 0, process_count)
                    .is_err()
            {
                return;
            }
            let hosts: Vec<u16> = placed_hosts
                .into_iter()
                .flatten()
                .map(HostId::index)
                .collect();
            self.start_job(job_index, next_request.number, &hosts);
        }
    }

    /// Removes the request `request_number` from the queue and starts a process of the job on each
    /// of these hosts.
    fn start_job(&mut self, job_index: usize, request_number: u64, hosts: &[u16]) {
        let PoolJob { work_s, user, .. } = self.jobs[job_index];
        let now = to_micros(self.now_s);
        self.fair_share.dequeue(now, user, request_number);
        self.fair_share
            .add_processors(now, user, hosts.len() as u32);
        for host in hosts.iter().copied() {
            self.last_local += 1;
            let tid = Tid::for_task(host_id(1), self.last_local).expect("few tasks");
            let work_s = work_s * (0.75 + 0.5 * self.rng.next_uniform());
            let (job, now_s) = (job_index, self.now_s);
            let task = PoolTask {
                host,
                remaining_s: work_s,
                updated_at_s: now_s,
                rate: 0.0,
                rate_version: 0,
                job_index: job,
                work_s,
                migration_target: None,
                suspended: false,
            };
            self.tasks.insert(tid, task);
            self.add_task(tid, host);
            self.update_host(host);
        }
        self.running_task_count += hosts.len();
        (
            self.jobs[job_index].started_at_s,
            self.jobs[job_index].running_count,
        ) = (Some(self.now_s), hosts.len() as u32);
        self.snapshot.hosts.refresh(now);
    }

    fn evict_guests(&mut self) {
        let plan = plan_evictions(&self.snapshot);
        if let Some(retry_time) = plan.retry_at() {
            self.schedule(retry_time.0 as f64 / 1e6, PoolEvent::DecideAgain);
        }
        self.statistics.eviction_count += plan.evictions.len();
        for eviction in plan.evictions {
            self.begin_migration(eviction.tid, eviction.target);
        }
    }

    fn handle_event(&mut self, event: PoolEvent) {
        match event {
            PoolEvent::OwnerChange(host) => {
                let (host, is_unchanged) = (host & !(1 << 15), host >> 15 == 1);
                if !is_unchanged {
                    self.change_owner(host);
                }
                self.schedule_owner_change(host);
            }
            PoolEvent::TaskEnd { task, version } => {
                if self
                    .tasks
                    .get(&task)
                    .is_some_and(|t| t.rate_version == version)
                {
                    self.end_task(task);
                }
            }
            PoolEvent::MigrationEnd { task } => self.end_migration(task),
            PoolEvent::Rebalance => {
                self.schedule(self.now_s + REBALANCE_INTERVAL_S, PoolEvent::Rebalance);
                for rebalance in plan_rebalances(&self.snapshot) {
                    let host = self
                        .snapshot
                        .hosts
                        .edit(rebalance.source)
                        .expect("a host of the pool");
                    let task = host
                        .tasks
                        .iter_mut()
                        .find(|t| t.tid == rebalance.tid)
                        .expect("it runs there");
                    task.recent_rebalances.push(to_micros(self.now_s));
                    self.statistics.rebalance_count += 1;
                    self.begin_migration(rebalance.tid, rebalance.target);
                }
            }
            PoolEvent::DecideAgain => {}
            PoolEvent::JobArrival(job_index) => {
                let user = self.jobs[job_index].user;
                let job = Tid::for_task(host_id(1), job_index as u32 + 1).expect("few jobs");
                let queued_request = QueuedRequest {
                    number: job_index as u64,
                    user,
                    job,
                    enqueued_at: to_micros(self.now_s),
                };
                self.fair_share
                    .enqueue(to_micros(self.now_s), queued_request)
                    .expect("there is room in the queue");
            }
        }
    }

    /// Runs the simulation until the time `end_s`, in seconds.
    pub(crate) fn run(&mut self, end_s: f64) {
        while let Some(Reverse((event_time_s, _, event))) = self.events.pop() {
            let event_time_s = (event_time_s as f64 / 1e6).min(end_s);
            let elapsed_s = event_time_s - self.now_s;
            self.statistics.free_seconds += elapsed_s * self.free_host_count as f64;
            self.statistics.free_hosts_max =
                self.statistics.free_hosts_max.max(self.free_host_count);
            let hour_means = self
                .statistics
                .means_by_hour
                .entry((self.now_s / HOUR_S) as u64)
                .or_default();
            (hour_means.0, hour_means.1) = (
                hour_means.0 + elapsed_s * self.free_host_count as f64 / HOUR_S,
                hour_means.1 + elapsed_s * self.running_task_count as f64 / HOUR_S,
            );
            self.now_s = event_time_s;
            if self.now_s >= end_s {
                return;
            }
            let may_preempt = matches!(event, PoolEvent::JobArrival(_) | PoolEvent::Rebalance);
            self.handle_event(event);
            self.snapshot.now = to_micros(self.now_s);
            self.snapshot.hosts.refresh(self.snapshot.now);
            self.evict_guests();
            self.snapshot.hosts.refresh(self.snapshot.now);
            self.start_jobs(may_preempt);
        }
    }
}
