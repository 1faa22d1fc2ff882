//! Rebalancing on simulated hosts in virtual time. Tasks share processors equally, and a migration
//! pauses its task for the cost of the migration. The decisions get only the information that load
//! watchers report.

mod durations;
mod single_migrations;
mod stability;

use pvm_rm::decide::{
    Constraints, ExternalMean, GuestPolicy, HostView, OwnerState, PendingPredictions,
    PlacementPolicy, PlacementRequest, Rebalance, Snapshot, TaskView, TimedSample, external_demand,
    place, plan_rebalances,
};
use sempa_proto::load::LoadSample;
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Interval between decisions in seconds, as in the service.
const DECISION_INTERVAL_S: u64 = 10;
/// Maximum delay of the next decision after the end of a task, in seconds.
const DECISION_DELAY_AFTER_END_S: u64 = 1;
/// Simulated time in seconds after which a run ends even if tasks remain.
const RUN_TIME_S_MAX: u64 = 86_400;

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn job_tid() -> Tid {
    Tid::for_task(host_id(1), 1).expect("a task")
}

#[derive(Clone, Copy)]
struct SimHost {
    cores: u32,
    speed: i32,
}

struct SimTask {
    tid: Tid,
    host: HostId,
    /// Remaining work, in seconds on a processor of speed 1000.
    remaining_work_s: f64,
    started_at_s: u64,
    /// Work that the resource manager assumes to be done, in seconds on a processor of speed 1000.
    assumed_work_s: f64,
    /// Remaining time of the pause that a migration causes, in seconds.
    remaining_pause_s: f64,
    /// Times of the rebalancing migrations of the task.
    rebalance_times: Vec<Micros>,
    /// Constraints that the program has declared; `None` if it has declared none.
    constraints: Option<Arc<Constraints>>,
}

/// Hosts with the tasks of one job.
struct JobSim {
    hosts: Vec<SimHost>,
    tasks: Vec<SimTask>,
    now_s: u64,
    load1: Vec<f64>,
    /// Real duration of the pause that a migration causes, in seconds.
    migration_pause_s: f64,
    /// True if the job has barriers, so that all tasks progress at the rate of the slowest one.
    has_barriers: bool,
    /// All migrations so far, each with its time in seconds.
    rebalances: Vec<(u64, Rebalance)>,
    /// Time of the next decision, in seconds.
    next_decision_s: u64,
    snapshot: Snapshot,
    /// Mean external load of each host, in the order of `hosts`; `None` before the first report.
    external_means: Vec<Option<ExternalMean>>,
    /// Migrations whose actual gain is not known yet.
    predictions: PendingPredictions,
}

impl JobSim {
    /// Creates a task for each of these amounts of work in seconds, and places the tasks by the
    /// policy.
    fn new(hosts: &[SimHost], works_s: &[f64], policy: PlacementPolicy) -> Self {
        let view = |(i, m): (usize, &SimHost)| HostView {
            id: host_id(i as u16 + 1),
            name: format!("h{}", i + 1),
            arch: "LINUX64".into(),
            zone: 0,
            labels: Arc::default(),
            speed: m.speed,
            cores: m.cores,
            sample: Some(TimedSample {
                sample: LoadSample {
                    cores: m.cores,
                    ..LoadSample::default()
                },
                received_at: Micros(0),
                vm_task_count: 0,
            }),
            external_mean: None,
            promised_bytes: 0,
            owner: OwnerState::Absent { left_at: None },
            migration_obstacle: None,
            starting_task_count: 0,
            guest_policy: GuestPolicy::default(),
            tasks: Vec::new(),
        };
        let snapshot = Snapshot::new(
            Micros(0),
            policy,
            hosts.iter().enumerate().map(view).collect(),
        );
        let request = SpawnRequest {
            task_count: works_s.len() as u32,
            ..SpawnRequest::default()
        };
        let placement_request = PlacementRequest::new(0, &request, request.task_count, host_id(1));
        let placed_hosts = place(&snapshot, &placement_request).hosts;
        let task = |(i, (work_s, host)): (usize, (&f64, &Result<HostId, _>))| SimTask {
            tid: Tid::for_task(host_id(1), i as u32 + 10).expect("a task"),
            host: *host.as_ref().expect("all hosts are free"),
            remaining_work_s: *work_s,
            started_at_s: 0,
            assumed_work_s: 0.0,
            remaining_pause_s: 0.0,
            rebalance_times: Vec::new(),
            constraints: None,
        };
        let tasks = works_s
            .iter()
            .zip(&placed_hosts)
            .enumerate()
            .map(task)
            .collect();
        let load1 = vec![0.0; hosts.len()];
        let hosts = hosts.to_vec();
        let (migration_pause_s, external_means) = (1.0, vec![None; hosts.len()]);
        let (rebalances, predictions) = (Vec::new(), PendingPredictions::default());
        Self {
            hosts,
            tasks,
            now_s: 0,
            load1,
            migration_pause_s,
            has_barriers: false,
            rebalances,
            next_decision_s: 0,
            snapshot,
            external_means,
            predictions,
        }
    }

    /// Declares the work of each task, as its program would.
    fn with_declared_work(mut self) -> Self {
        for task in &mut self.tasks {
            let declared_work = Some(Micros((task.remaining_work_s * 1e6) as u64));
            task.constraints = Some(Arc::new(Constraints {
                work: declared_work,
                ..Constraints::default()
            }));
        }
        self
    }

    fn task_count_on(&self, host: HostId) -> usize {
        self.tasks.iter().filter(|w| w.host == host).count()
    }

    /// Returns the progress of each task on a host with this number of external threads, in seconds
    /// of work per second.
    fn task_rate(&self, host: HostId, external_threads: f64) -> f64 {
        let sim_host = self.hosts[usize::from(host.index()) - 1];
        let thread_count = self.task_count_on(host) as f64 + external_threads;
        f64::from(sim_host.speed) / 1e3 * (f64::from(sim_host.cores) / thread_count).min(1.0)
    }

    /// Advances the time by one second. `external_threads`: number of external threads on each
    /// host.
    fn advance_second(&mut self, external_threads: &[f64]) {
        let rates: Vec<f64> = self
            .tasks
            .iter()
            .map(|w| self.task_rate(w.host, external_threads[usize::from(w.host.index()) - 1]))
            .collect();
        let slowest_rate = rates.iter().copied().fold(f64::MAX, f64::min);
        let longest_pause_s = self
            .tasks
            .iter()
            .map(|w| w.remaining_pause_s)
            .fold(0.0, f64::max);
        for (task, rate) in self.tasks.iter_mut().zip(rates) {
            let (pause_s, rate) = if self.has_barriers {
                (longest_pause_s, slowest_rate)
            } else {
                (task.remaining_pause_s, rate)
            };
            task.remaining_work_s -= rate * (1.0 - pause_s.min(1.0));
            task.remaining_pause_s = (task.remaining_pause_s - 1.0).max(0.0);
        }
        self.now_s += 1;
        let estimates = &mut self.snapshot.estimates;
        for task in self.tasks.iter().filter(|w| w.remaining_work_s <= 0.0) {
            let assumed_work = Micros((task.assumed_work_s * 1e6) as u64);
            self.predictions.end_tracking(
                Micros::from_secs(self.now_s),
                task.tid,
                assumed_work,
                estimates,
            );
            estimates.record_completion(&Arc::from("worker"), assumed_work);
            self.next_decision_s = self
                .next_decision_s
                .min(self.now_s + DECISION_DELAY_AFTER_END_S);
        }
        self.tasks.retain(|w| w.remaining_work_s > 0.0);
        for (i, load1) in self.load1.iter_mut().enumerate() {
            let demand = self
                .tasks
                .iter()
                .filter(|w| w.host == host_id(i as u16 + 1))
                .count() as f64
                + external_threads[i];
            *load1 += (demand - *load1) / 60.0;
        }
        self.update_external_means(external_threads);
    }

    /// Updates the mean external load of all hosts, as reports of load watchers do.
    fn update_external_means(&mut self, external_threads: &[f64]) {
        for (i, external_threads) in external_threads.iter().enumerate() {
            let timed_sample = self.load_sample(i, *external_threads);
            let (sample_time, demand) = (timed_sample.received_at, external_demand(&timed_sample));
            let mean = self.external_means[i].map(|mean| mean.with_sample(sample_time, demand));
            self.external_means[i] =
                Some(mean.unwrap_or_else(|| ExternalMean::from_first_sample(sample_time, demand)));
        }
    }

    /// Returns the load sample of the host at position `i` of `hosts`, with this number of external
    /// threads.
    fn load_sample(&self, i: usize, external_threads: f64) -> TimedSample {
        let sim_host = self.hosts[i];
        let task_count = self.task_count_on(host_id(i as u16 + 1)) as u32;
        let demand = f64::from(task_count) + external_threads;
        let sample = LoadSample {
            cores: sim_host.cores,
            runnable_threads: demand.round() as u32,
            busy_share: (demand / f64::from(sim_host.cores)).min(1.0) as f32,
            one_minute_load: self.load1[i] as f32,
            ..LoadSample::default()
        };
        TimedSample {
            sample,
            received_at: Micros::from_secs(self.now_s),
            vm_task_count: task_count,
        }
    }

    /// Updates the snapshot from the reports of load watchers and daemons, and the progress that
    /// the resource manager assumes.
    fn update_snapshot(&mut self, external_threads: &[f64]) {
        let now = Micros::from_secs(self.now_s);
        for sim_task in &mut self.tasks {
            sim_task.assumed_work_s += self.snapshot.task_rate(sim_task.host) / 1e3
                * now.since(self.snapshot.now).0 as f64
                / 1e6;
            let assumed_work = Micros((sim_task.assumed_work_s * 1e6) as u64);
            self.predictions.check_prediction(
                now,
                sim_task.tid,
                assumed_work,
                &mut self.snapshot.estimates,
            );
        }
        self.update_external_means(external_threads);
        for (i, external_threads) in external_threads.iter().enumerate() {
            let (id, timed_sample) = (
                host_id(i as u16 + 1),
                self.load_sample(i, *external_threads),
            );
            let task = |w: &SimTask| TaskView {
                job: job_tid(),
                name: Arc::from("worker"),
                work_done: Micros((w.assumed_work_s * 1e6) as u64),
                recent_rebalances: w.rebalance_times.clone(),
                recent_migrations: w.rebalance_times.clone(),
                constraints: w.constraints.clone(),
                ..TaskView::new(w.tid, Micros::from_secs(w.started_at_s))
            };
            let tasks = self
                .tasks
                .iter()
                .filter(|w| w.host == id)
                .map(task)
                .collect();
            let host = self.snapshot.hosts.edit(id).expect("one of the farm");
            host.external_mean = self.external_means[i];
            (host.sample, host.tasks) = (Some(timed_sample), tasks);
        }
        self.snapshot.hosts.refresh(now);
        self.snapshot.now = now;
        self.snapshot.barrier_jobs = if self.has_barriers {
            BTreeSet::from([job_tid()])
        } else {
            BTreeSet::new()
        };
    }

    /// Makes a rebalancing decision and carries out its migrations.
    fn rebalance(&mut self, external_threads: &[f64]) {
        self.update_snapshot(external_threads);
        for planned_rebalance in plan_rebalances(&self.snapshot) {
            let task = self
                .tasks
                .iter_mut()
                .find(|w| w.tid == planned_rebalance.tid)
                .expect("tasks that run are moved");
            assert_eq!(task.host, planned_rebalance.source);
            (task.host, task.remaining_pause_s) =
                (planned_rebalance.target, self.migration_pause_s);
            task.rebalance_times.push(self.snapshot.now);
            self.predictions.track(&planned_rebalance);
            let (now, assumed_work) = (
                self.snapshot.now,
                Micros((task.assumed_work_s * 1e6) as u64),
            );
            self.predictions.record_arrival(
                now,
                planned_rebalance.tid,
                planned_rebalance.target,
                (assumed_work, Micros((self.migration_pause_s * 1e6) as u64)),
            );
            self.rebalances.push((self.now_s, planned_rebalance));
        }
    }

    /// Runs until all tasks have ended or [`RUN_TIME_S_MAX`] is reached. Decides on rebalancing
    /// only if `with_rebalancing` is true. Returns the simulated time in seconds.
    fn run_to_end(&mut self, with_rebalancing: bool) -> u64 {
        let external_threads = vec![0.0; self.hosts.len()];
        while !self.tasks.is_empty() && self.now_s < RUN_TIME_S_MAX {
            if with_rebalancing && self.now_s >= self.next_decision_s {
                self.next_decision_s = self.now_s + DECISION_INTERVAL_S;
                self.rebalance(&external_threads);
            }
            self.advance_second(&external_threads);
        }
        self.now_s
    }
}

/// Returns a number that is uniformly distributed in [0, 1), and updates the seed.
fn next_random(seed: &mut u64) -> f64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 11) as f64 / (1_u64 << 53) as f64
}

/// Hosts with five processors altogether, whose speeds differ by up to a factor of five.
const UNEQUAL_HOSTS: [SimHost; 4] = [
    SimHost {
        cores: 1,
        speed: 400,
    },
    SimHost {
        cores: 2,
        speed: 1000,
    },
    SimHost {
        cores: 1,
        speed: 2000,
    },
    SimHost {
        cores: 1,
        speed: 800,
    },
];
