//! Migrations that reduce the completion time of a whole job (its makespan), for jobs with declared
//! work.
//!
//! A candidate migrates a task that would end last to a host where it ends sooner. Alternatively it
//! exchanges the task with another one, or migrates a task that shares the host with it. Each
//! candidate is evaluated by simulating the hosts with it and without it ([`super::makespan_sim`]).

use super::evictions::target_exclusion;
use super::makespan_sim::{SimHost, SimOutcome, SimTask, Simulation};
use super::rebalance_plan::{
    GAIN_MIN, RebalancePlan, cooldown_end, corrected_gain, may_rebalance, micros, rebalances_left,
    seconds,
};
use super::{Rebalance, RebalanceReason, Snapshot, TaskView, slowness};
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

/// Maximum number of tasks on the hosts of the plan. If there are more, a single task has little
/// effect, and only [`super::rebalance`] plans migrations.
const SIM_TASKS_MAX: usize = 64;
/// Maximum number of tasks examined: those that would end last.
const LAST_TASKS_MAX: usize = 8;
/// Number of the examined tasks for which an exchange with another task is also tried.
const EXCHANGES_MAX: usize = 2;
/// Maximum fluctuation of a host's external load, in threads. Above it the load is unpredictable,
/// and the host is neither source nor target.
const EXTERNAL_SPREAD_MAX: f64 = 1.0;
/// A job counts as delayed if its end is later by at least this factor.
const DELAY_FACTOR: f64 = 1.001;
/// Minimum reduction of the job's remaining time, as a fraction of that time.
const REDUCTION_MIN: f64 = 0.03;
/// Maximum number of simulation steps for the search for migrations in one plan.
const SEARCH_STEPS_MAX: usize = 700;
/// Maximum number of simulation steps in one plan, including the checks whether migrations delay a
/// job. After them, tasks of jobs with declared work do not migrate.
const TOTAL_STEPS_MAX: usize = 2 * SEARCH_STEPS_MAX;

/// Simulation of all hosts and tasks of the plan, with the migrations planned so far.
pub(super) struct JobSim<'a> {
    hosts: Vec<HostId>,
    tasks: Vec<&'a TaskView>,
    baseline: Simulation,
    /// Cost of a migration in seconds, and for this cost the time when each task ends if the plan
    /// gets no further migration.
    baseline_ends: Option<(f64, Vec<f64>)>,
    /// Simulation in which candidates are tried. Its memory is reused.
    trial: Simulation,
}

/// A candidate: the migration of one task, and optionally a second one in exchange. Each migration
/// is a pair (index of the task, index of the target).
#[derive(Clone, Copy, Debug)]
struct MoveStep {
    first: (usize, usize),
    exchange: Option<(usize, usize)>,
}

impl MoveStep {
    fn moves(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        [Some(self.first), self.exchange].into_iter().flatten()
    }
}

impl JobSim<'_> {
    /// Selects the job whose completion time is optimized. Returns the outcome without a further
    /// migration.
    fn select_job(&mut self, job: Tid, snapshot: &Snapshot) -> SimOutcome {
        // Estimates the cost of migrations that the simulation itself makes. Their hosts are
        // unknown, so the mean processor share per task is used.
        let all: f64 = self
            .baseline
            .hosts()
            .iter()
            .map(|machine| machine.processors * machine.speed)
            .sum();
        let share = 1e3 * all / self.tasks.len().max(1) as f64;
        let of_job = self.tasks.iter().filter(|task| task.job == job);
        let estimates = &snapshot.estimates;
        let bytes = of_job.map(|task| estimates.expected_bytes(&task.name, task.memory_bytes));
        let costs = bytes
            .map(|bytes| seconds(estimates.migration_cost(bytes, slowness(share, share), None)));
        let cost = costs.fold(0.0, f64::max);
        self.baseline.select_job(|i| self.tasks[i].job == job, cost);
        if self
            .baseline_ends
            .as_ref()
            .is_none_or(|(of, _)| *of != cost)
        {
            let ends = self.simulate([]).run_to_end().to_vec();
            self.baseline_ends = Some((cost, ends));
        }
        let ends = self
            .baseline_ends
            .iter()
            .flat_map(|(_, ends)| ends)
            .zip(self.baseline.tasks());
        ends.fold(SimOutcome::default(), |sum, (ends, piece)| {
            match piece.in_job {
                true => SimOutcome {
                    job_end: sum.job_end.max(*ends),
                    ..sum
                },
                false => SimOutcome {
                    other_ends: sum.other_ends + ends,
                    ..sum
                },
            }
        })
    }

    /// Returns a simulation in which these migrations are made at the start.
    fn simulate(&mut self, moves: impl IntoIterator<Item = (usize, usize)>) -> &mut Simulation {
        self.trial.reset_from(&self.baseline);
        moves
            .into_iter()
            .for_each(|(task, to)| self.trial.migrate(task, to));
        &mut self.trial
    }

    /// Adds a migration of the plan to the simulation.
    pub(super) fn apply(&mut self, task: Tid, to: HostId) {
        let i = self.tasks.iter().position(|t| t.tid == task);
        let to = self.hosts.iter().position(|host| *host == to);
        i.zip(to)
            .into_iter()
            .for_each(|(i, to)| self.baseline.apply_planned(i, to));
        self.baseline_ends = None;
    }
}

impl<'a> RebalancePlan<'a> {
    /// Returns the simulation of the plan's hosts and tasks. `None` if no job has declared work or
    /// there are more than [`SIM_TASKS_MAX`] tasks.
    pub(super) fn job_sim(&mut self) -> Option<JobSim<'a>> {
        self.declared_jobs = self.find_declared_jobs();
        if self.declared_jobs.is_empty() {
            return None;
        }
        let hosts: Vec<HostId> = self.hosts.keys().copied().collect();
        let machines: Vec<SimHost> = self
            .hosts
            .values()
            .map(|place| place.sim_host(place.external_mean))
            .collect();
        let now = self.snapshot.now;
        let (mut pieces, mut tasks) = (Vec::new(), Vec::new());
        for place in self.hosts.values() {
            for task in place.host.tasks.iter().filter(|task| task.computes()) {
                let at = task.migrating.flatten().unwrap_or(place.host.id);
                let Ok(at) = hosts.binary_search(&at) else {
                    continue;
                };
                let moves = if self.fixed_jobs.contains(&task.job) {
                    0
                } else {
                    rebalances_left(now, task)
                };
                let rests = seconds(cooldown_end(now, task).since(now));
                pieces.push(SimTask {
                    host: at,
                    work_left: self.work_left(task.tid),
                    moves_left: moves,
                    cooldown_end: rests,
                    in_job: false,
                });
                tasks.push(task);
            }
        }
        let few = pieces.len() <= SIM_TASKS_MAX;
        let (start, tried) = (Simulation::new(machines, pieces), Simulation::default());
        few.then_some(JobSim {
            hosts,
            tasks,
            baseline: start,
            baseline_ends: None,
            trial: tried,
        })
    }

    /// Returns the jobs whose work is declared for all tasks, except jobs with barriers.
    fn find_declared_jobs(&self) -> BTreeSet<Tid> {
        let tasks = || {
            self.hosts
                .values()
                .flat_map(|p| &p.host.tasks)
                .filter(|t| t.computes())
        };
        let undeclared: BTreeSet<Tid> = tasks()
            .filter(|t| !self.expected.get(&t.tid).is_some_and(|e| e.declared))
            .map(|t| t.job)
            .collect();
        let fits =
            |job: &Tid| !undeclared.contains(job) && !self.snapshot.barrier_jobs.contains(job);
        tasks().map(|t| t.job).filter(fits).collect()
    }

    /// True if a migration delays the end of the task's job. False for jobs without declared work.
    pub(super) fn delays_job(&self, sim: &mut JobSim<'a>, task: &TaskView, to: HostId) -> bool {
        if !self.declared_jobs.contains(&task.job) {
            return false;
        }
        let i = sim.tasks.iter().position(|t| t.tid == task.tid);
        let (Some(i), Ok(to)) = (i, sim.hosts.binary_search(&to)) else {
            return false;
        };
        if sim.trial.steps() >= TOTAL_STEPS_MAX {
            return true;
        }
        let baseline = sim.select_job(task.job, self.snapshot);
        sim.simulate([(i, to)])
            .job_ends_after(baseline.job_end * DELAY_FACTOR)
    }

    /// Adds migrations to the plan that reduce the completion time of jobs. `room`: maximum
    /// number of migrations in the plan.
    pub(super) fn plan_makespan_moves(&mut self, sim: &mut JobSim<'a>, room: usize) {
        let jobs: Vec<Tid> = self.declared_jobs.iter().copied().collect();
        for (i, job) in jobs.iter().enumerate() {
            // Each job gets an equal part of the remaining simulation steps.
            let done = sim.trial.steps();
            let most = done + SEARCH_STEPS_MAX.saturating_sub(done) / (jobs.len() - i);
            while self.rebalances.len() + 2 <= room {
                let Some(rebalances) = self.best_makespan_move(sim, *job, most) else {
                    break;
                };
                for rebalance in rebalances {
                    sim.apply(rebalance.tid, rebalance.to);
                    self.apply(rebalance);
                }
            }
        }
    }

    fn best_makespan_move(
        &self,
        sim: &mut JobSim<'a>,
        job: Tid,
        most_steps: usize,
    ) -> Option<Vec<Rebalance>> {
        let (baseline, margin) = (
            sim.select_job(job, self.snapshot),
            self.snapshot.costs.margin(),
        );
        let count = sim.baseline.tasks().iter().filter(|p| p.in_job).count() as f64;
        let trust = self.snapshot.confidence(true);
        let mut best = None::<(f64, MoveStep, (f64, f64), f64)>;
        for step in self.candidate_steps(sim, job) {
            if sim.trial.steps() >= most_steps {
                break;
            }
            if !self.targets_accept(sim, &step) {
                continue;
            }
            let cost: f64 = step
                .moves()
                .map(|(i, to)| self.migration_cost(sim, i, to))
                .sum();
            let best_net = best.map(|(best_net, ..)| best_net);
            // Every task of the job gains the time by which the job ends sooner. Tasks of other
            // jobs at the target lose time.
            let gain = |after: SimOutcome| {
                count * (baseline.job_end - after.job_end) + baseline.other_ends - after.other_ends
            };
            let is_best = |after: SimOutcome| {
                let net = corrected_gain(gain(after), trust) - margin * cost;
                let pays = net >= seconds(GAIN_MIN)
                    && baseline.job_end - after.job_end >= REDUCTION_MIN * baseline.job_end;
                pays && best_net.is_none_or(|best_net| net > best_net)
            };
            let after = sim
                .simulate(step.moves())
                .run_unless(|after| !is_best(after));
            let Some(after) = after else { continue };
            best = Some((
                corrected_gain(gain(after), trust) - margin * cost,
                step,
                (gain(after), cost),
                baseline.job_end - after.job_end,
            ));
        }
        best.map(|(_, step, weighed, sooner)| self.rebalances_of(sim, &step, weighed, sooner))
    }

    /// Returns the cost in seconds of migrating task `i` to host `target`; both are indices.
    fn migration_cost(&self, sim: &JobSim<'_>, i: usize, to: usize) -> f64 {
        let (from, to) = (sim.hosts[sim.baseline.tasks()[i].host], sim.hosts[to]);
        let (source_rate, target_rate) = self.source_and_target_rate(from, to);
        let (source, target) = (self.hosts[&from].host, self.hosts[&to].host);
        seconds(self.snapshot.migration_cost(
            sim.tasks[i],
            source,
            target,
            slowness(source_rate, target_rate),
        ))
    }

    /// Returns the rate of a task at its source and the predicted rate at its target, in
    /// thousandths of an ordinary processor.
    fn source_and_target_rate(&self, from: HostId, to: HostId) -> (f64, f64) {
        (self.hosts[&from].source_rate, self.hosts[&to].target_rate)
    }

    fn rebalances_of(
        &self,
        sim: &JobSim<'_>,
        step: &MoveStep,
        (gain, cost): (f64, f64),
        job_ends_sooner_by: f64,
    ) -> Vec<Rebalance> {
        let shift = |(i, to): (usize, usize)| {
            let (from, to) = (sim.hosts[sim.baseline.tasks()[i].host], sim.hosts[to]);
            let (source_rate, target_rate) = self.source_and_target_rate(from, to);
            let (source_rate, target_rate) = (source_rate as u64, target_rate as u64);
            let (reckoned, cost, job_ends_sooner_by) =
                (micros(gain), micros(cost), Some(micros(job_ends_sooner_by)));
            let (left, told) = (micros(sim.baseline.tasks()[i].work_left), true);
            let gain = micros(corrected_gain(gain, self.snapshot.confidence(told)));
            let why = RebalanceReason {
                source_rate,
                target_rate,
                gain,
                cost,
                barrier: false,
                job_ends_sooner_by,
                work_left: left,
                declared: told,
                computed_gain: reckoned,
            };
            Rebalance {
                tid: sim.tasks[i].tid,
                from,
                to,
                reason: why,
            }
        };
        step.moves().map(shift).collect()
    }

    /// Returns the candidates for a job, the most promising first.
    ///
    /// A task that would end last migrates alone or in exchange for another task, or a task that
    /// shares its host migrates.
    fn candidate_steps(&self, sim: &JobSim<'_>, job: Tid) -> Vec<MoveStep> {
        let pieces = sim.baseline.tasks();
        let mut tasks_by_host = vec![Vec::new(); sim.hosts.len()];
        pieces
            .iter()
            .enumerate()
            .for_each(|(i, piece)| tasks_by_host[piece.host].push(i));
        let of_job = |i: &usize| sim.tasks[*i].job == job;
        let ends = |i: usize| {
            let piece = pieces[i];
            // The host also does the work of shorter tasks until they end.
            let before: f64 = tasks_by_host[piece.host]
                .iter()
                .map(|other| pieces[*other].work_left.min(piece.work_left))
                .sum();
            let machine = sim.baseline.hosts()[piece.host];
            (before / (machine.speed * machine.processors).max(1e-9))
                .max(piece.work_left / machine.speed.max(1e-9))
        };
        let ends: Vec<f64> = (0..pieces.len())
            .map(|i| if of_job(&i) { ends(i) } else { 0.0 })
            .collect();
        let now = self.snapshot.now;
        let free = |i: &usize| {
            let task = sim.tasks[*i];
            of_job(i) && may_rebalance(now, task) && !self.migrated.contains_key(&task.tid)
        };
        let mut last: Vec<usize> = (0..pieces.len()).filter(of_job).collect();
        last.sort_by(|a, b| ends[*b].total_cmp(&ends[*a]));
        last.truncate(LAST_TASKS_MAX);
        let mut candidates = last.clone();
        let shares_host = |i: &usize| last.iter().any(|l| pieces[*l].host == pieces[*i].host);
        candidates.extend(
            (0..pieces.len())
                .filter(|i| !last.contains(i))
                .filter(shares_host),
        );
        let steady = |at: usize| {
            let (least, most) = self.hosts[&sim.hosts[at]].external_range;
            most - least <= EXTERNAL_SPREAD_MAX
        };
        let steady: Vec<bool> = (0..sim.hosts.len()).map(steady).collect();
        let goes =
            |i: usize, to: usize| to != pieces[i].host && steady[to] && steady[pieces[i].host];
        // Time until the task ends on the host, if all other tasks stay and share the host with it
        // until then.
        let end_on = |i: usize, to: usize, tasks: usize| {
            pieces[i].work_left / sim.baseline.hosts()[to].rate(tasks)
        };
        let mut steps = Vec::new();
        for i in candidates.into_iter().filter(free) {
            for to in (0..sim.hosts.len()).filter(|to| goes(i, *to)) {
                steps.push((
                    ends[i] - end_on(i, to, tasks_by_host[to].len() + 1),
                    MoveStep {
                        first: (i, to),
                        exchange: None,
                    },
                ));
                if !last.iter().take(EXCHANGES_MAX).any(|l| *l == i) {
                    continue;
                }
                let from = pieces[i].host;
                for o in tasks_by_host[to]
                    .iter()
                    .copied()
                    .filter(|o| free(o) && goes(*o, from))
                {
                    let later = end_on(i, to, tasks_by_host[to].len()).max(end_on(
                        o,
                        from,
                        tasks_by_host[from].len(),
                    ));
                    steps.push((
                        ends[i] - later,
                        MoveStep {
                            first: (i, to),
                            exchange: Some((o, from)),
                        },
                    ));
                }
            }
        }
        // The most promising first, because the number of steps is limited.
        steps.sort_by(|a, b| b.0.total_cmp(&a.0));
        steps.into_iter().map(|(_, step)| step).collect()
    }

    /// True if every target of the candidate accepts its task.
    fn targets_accept(&self, sim: &JobSim<'_>, step: &MoveStep) -> bool {
        let host = |at: usize| self.hosts[&sim.hosts[at]].host;
        let from = |i: usize| host(sim.baseline.tasks()[i].host);
        step.moves().all(|(i, to)| {
            target_exclusion(self.snapshot, host(to), from(i), sim.tasks[i], true).is_none()
        })
    }
}
