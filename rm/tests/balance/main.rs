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
const DECISION_INTERVAL: u64 = 10;
/// Delay of a decision after the end of a task, in seconds.
const DECISION_DELAY_AFTER_END: u64 = 1;
/// Maximum simulated time in seconds.
const RUN_TIME_MAX: u64 = 86_400;

fn host_id(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn job_tid() -> Tid {
    Tid::task(host_id(1), 1).expect("a task")
}

#[derive(Clone, Copy)]
struct SimHost {
    cores: u32,
    speed: i32,
}

struct SimTask {
    tid: Tid,
    host: HostId,
    /// Remaining work, in seconds of an ordinary processor.
    remaining: f64,
    since: u64,
    /// Work that the resource manager assumes to be done, in seconds.
    done: f64,
    /// Remaining time of the pause by a migration, in seconds.
    paused_for: f64,
    shifts: Vec<Micros>,
    /// Constraints declared by the program.
    constraints: Option<Arc<Constraints>>,
}

/// Hosts with the tasks of one job.
struct JobSim {
    hosts: Vec<SimHost>,
    tasks: Vec<SimTask>,
    now: u64,
    load1: Vec<f64>,
    /// Real cost of a migration, in seconds.
    cost: f64,
    barrier: bool,
    rebalances: Vec<(u64, Rebalance)>,
    /// Time of the next decision, in seconds.
    next_decision: u64,
    snapshot: Snapshot,
    /// Mean external load of each host, by host index.
    means: Vec<Option<ExternalMean>>,
    /// Migrations whose actual gain is not known yet.
    predictions: PendingPredictions,
}

impl JobSim {
    /// Creates tasks with these amounts of work in seconds, and places them by the policy.
    fn new(machines: &[SimHost], sizes: &[f64], policy: PlacementPolicy) -> JobSim {
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
                own_tasks: 0,
            }),
            external_mean: None,
            promised_bytes: 0,
            owner: OwnerState::Absent { left_at: None },
            migration_obstacle: None,
            starting_tasks: 0,
            guest_policy: GuestPolicy::default(),
            tasks: Vec::new(),
        };
        let snapshot = Snapshot::new(
            Micros(0),
            policy,
            machines.iter().enumerate().map(view).collect(),
        );
        let request = SpawnRequest {
            count: sizes.len() as u32,
            ..SpawnRequest::default()
        };
        let ask = PlacementRequest::new(0, &request, request.count, host_id(1));
        let placed = place(&snapshot, &ask).hosts;
        let task = |(i, (size, host)): (usize, (&f64, &Result<HostId, _>))| SimTask {
            tid: Tid::task(host_id(1), i as u32 + 10).expect("a task"),
            host: *host.as_ref().expect("all hosts are free"),
            remaining: *size,
            since: 0,
            done: 0.0,
            paused_for: 0.0,
            shifts: Vec::new(),
            constraints: None,
        };
        let work = sizes.iter().zip(&placed).enumerate().map(task).collect();
        let load1 = vec![0.0; machines.len()];
        let machines = machines.to_vec();
        let (cost, means) = (1.0, vec![None; machines.len()]);
        let (shifts, promises) = (Vec::new(), PendingPredictions::default());
        JobSim {
            hosts: machines,
            tasks: work,
            now: 0,
            load1,
            cost,
            barrier: false,
            rebalances: shifts,
            next_decision: 0,
            snapshot,
            means,
            predictions: promises,
        }
    }

    /// Declares the work of each task, as its program would.
    fn with_declared_work(mut self) -> JobSim {
        for work in &mut self.tasks {
            let declared = Some(Micros((work.remaining * 1e6) as u64));
            work.constraints = Some(Arc::new(Constraints {
                work: declared,
                ..Constraints::default()
            }));
        }
        self
    }

    fn count_on(&self, host: HostId) -> usize {
        self.tasks.iter().filter(|w| w.host == host).count()
    }

    /// Returns the rate of each task on a host with this number of external threads.
    fn rate(&self, host: HostId, foreign: f64) -> f64 {
        let machine = self.hosts[usize::from(host.index()) - 1];
        let threads = self.count_on(host) as f64 + foreign;
        f64::from(machine.speed) / 1e3 * (f64::from(machine.cores) / threads).min(1.0)
    }

    /// Advances the time by one second.
    fn advance_second(&mut self, foreign: &[f64]) {
        let rates: Vec<f64> = self
            .tasks
            .iter()
            .map(|w| self.rate(w.host, foreign[usize::from(w.host.index()) - 1]))
            .collect();
        let slowest = rates.iter().copied().fold(f64::MAX, f64::min);
        let stopped = self.tasks.iter().map(|w| w.paused_for).fold(0.0, f64::max);
        for (work, rate) in self.tasks.iter_mut().zip(rates) {
            let (frozen, rate) = if self.barrier {
                (stopped, slowest)
            } else {
                (work.paused_for, rate)
            };
            work.remaining -= rate * (1.0 - frozen.min(1.0));
            work.paused_for = (work.paused_for - 1.0).max(0.0);
        }
        self.now += 1;
        let estimates = &mut self.snapshot.estimates;
        for work in self.tasks.iter().filter(|w| w.remaining <= 0.0) {
            let done = Micros((work.done * 1e6) as u64);
            self.predictions
                .conclude(Micros::from_secs(self.now), work.tid, done, estimates);
            estimates.record_completion(&Arc::from("worker"), done);
            self.next_decision = self.next_decision.min(self.now + DECISION_DELAY_AFTER_END);
        }
        self.tasks.retain(|w| w.remaining > 0.0);
        for (i, load1) in self.load1.iter_mut().enumerate() {
            let demand = self
                .tasks
                .iter()
                .filter(|w| w.host == host_id(i as u16 + 1))
                .count() as f64
                + foreign[i];
            *load1 += (demand - *load1) / 60.0;
        }
        self.report(foreign);
    }

    /// Reports the load of all hosts, as load watchers do every second while the load changes.
    fn report(&mut self, foreign: &[f64]) {
        for (i, foreign) in foreign.iter().enumerate() {
            let sampled = self.sampled(i, *foreign);
            let (at, demand) = (sampled.received_at, external_demand(&sampled));
            let mean = self.means[i].map(|mean| mean.updated(at, demand));
            self.means[i] = Some(mean.unwrap_or_else(|| ExternalMean::first(at, demand)));
        }
    }

    /// Returns the load sample of the host with this index.
    fn sampled(&self, i: usize, foreign: f64) -> TimedSample {
        let machine = self.hosts[i];
        let own = self.count_on(host_id(i as u16 + 1)) as u32;
        let demand = f64::from(own) + foreign;
        let sample = LoadSample {
            cores: machine.cores,
            running: demand.round() as u32,
            busy: (demand / f64::from(machine.cores)).min(1.0) as f32,
            load1: self.load1[i] as f32,
            ..LoadSample::default()
        };
        TimedSample {
            sample,
            received_at: Micros::from_secs(self.now),
            own_tasks: own,
        }
    }

    /// Updates the snapshot from the reports of load watchers and daemons.
    fn update_snapshot(&mut self, foreign: &[f64]) {
        let now = Micros::from_secs(self.now);
        for work in &mut self.tasks {
            work.done +=
                self.snapshot.rate(work.host) / 1e3 * now.since(self.snapshot.now).0 as f64 / 1e6;
            let done = Micros((work.done * 1e6) as u64);
            self.predictions
                .check(now, work.tid, done, &mut self.snapshot.estimates);
        }
        self.report(foreign);
        for (i, foreign) in foreign.iter().enumerate() {
            let (id, sampled) = (host_id(i as u16 + 1), self.sampled(i, *foreign));
            let task = |w: &SimTask| TaskView {
                job: job_tid(),
                name: Arc::from("worker"),
                work_done: Micros((w.done * 1e6) as u64),
                recent_rebalances: w.shifts.clone(),
                recent_migrations: w.shifts.clone(),
                constraints: w.constraints.clone(),
                ..TaskView::new(w.tid, Micros::from_secs(w.since))
            };
            let tasks = self
                .tasks
                .iter()
                .filter(|w| w.host == id)
                .map(task)
                .collect();
            let host = self.snapshot.hosts.edit(id).expect("one of the farm");
            host.external_mean = self.means[i];
            (host.sample, host.tasks) = (Some(sampled), tasks);
        }
        self.snapshot.hosts.refresh(now);
        self.snapshot.now = now;
        self.snapshot.barrier_jobs = if self.barrier {
            BTreeSet::from([job_tid()])
        } else {
            BTreeSet::new()
        };
    }

    /// Makes a rebalancing decision and carries out its migrations.
    fn rebalance(&mut self, foreign: &[f64]) {
        self.update_snapshot(foreign);
        for shift in plan_rebalances(&self.snapshot) {
            let work = self
                .tasks
                .iter_mut()
                .find(|w| w.tid == shift.tid)
                .expect("tasks that run are moved");
            assert_eq!(work.host, shift.from);
            (work.host, work.paused_for) = (shift.to, self.cost);
            work.shifts.push(self.snapshot.now);
            self.predictions.follow(&shift);
            let (now, done) = (self.snapshot.now, Micros((work.done * 1e6) as u64));
            self.predictions.record_arrival(
                now,
                shift.tid,
                shift.to,
                (done, Micros((self.cost * 1e6) as u64)),
            );
            self.rebalances.push((self.now, shift));
        }
    }

    /// Runs until all tasks have ended, with rebalancing if `balanced` is true. Returns the time in
    /// seconds.
    fn finish(&mut self, balanced: bool) -> u64 {
        let foreign = vec![0.0; self.hosts.len()];
        while !self.tasks.is_empty() && self.now < RUN_TIME_MAX {
            if balanced && self.now >= self.next_decision {
                self.next_decision = self.now + DECISION_INTERVAL;
                self.rebalance(&foreign);
            }
            self.advance_second(&foreign);
        }
        self.now
    }
}

fn random(seed: &mut u64) -> f64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 11) as f64 / (1_u64 << 53) as f64
}

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
