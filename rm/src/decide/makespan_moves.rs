//! Migrations that reduce the completion time of a whole job (its makespan), for jobs with declared
//! work.
//!
//! A candidate migrates a task that would end last to a host where the task ends sooner.
//! Alternatively, the candidate exchanges this task with another task, or migrates another task of
//! the same host. Each candidate is evaluated by two simulations of the hosts: with the candidate
//! and without it ([`super::makespan_sim`]).

use super::evictions::target_exclusion;
use super::makespan_sim::{SimHost, SimOutcome, SimTask, Simulation};
use super::rebalance_plan::{
    GAIN_MIN, RebalancePlan, cooldown_end, corrected_gain, may_rebalance, micros, rebalances_left,
    seconds,
};
use super::{Rebalance, RebalanceReason, Snapshot, TaskView, slowness};
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

/// Maximum number of tasks on the hosts of the plan. If there are more tasks, a single task has
/// little effect, and only [`super::rebalance`] plans migrations.
const SIM_TASKS_MAX: usize = 64;
/// Maximum number of tasks of a job that are examined. The examined tasks are those that would end
/// last.
const EXAMINED_TASKS_MAX: usize = 8;
/// Number of the examined tasks for which an exchange with another task is also tried.
const EXCHANGES_MAX: usize = 2;
/// Maximum fluctuation of a host's external load, in threads. A host with a greater fluctuation is
/// neither source nor target, because its load is unpredictable.
const EXTERNAL_SPREAD_THREADS_MAX: f64 = 1.0;
/// A job counts as delayed if its end is later by at least this factor.
const DELAY_FACTOR_MIN: f64 = 1.001;
/// Minimum reduction of the job's remaining time, as a fraction of that time.
const REDUCTION_FRACTION_MIN: f64 = 0.03;
/// Maximum number of simulation steps for the search for migrations in one plan.
const SEARCH_STEPS_MAX: usize = 700;
/// Maximum number of simulation steps in one plan, including the steps of the checks whether
/// migrations delay a job. After these steps, tasks of jobs with declared work do not migrate.
const TOTAL_STEPS_MAX: usize = 2 * SEARCH_STEPS_MAX;

/// Simulation of all hosts and tasks of the plan, with the migrations planned so far.
pub(super) struct JobSim<'a> {
    hosts: Vec<HostId>,
    tasks: Vec<&'a TaskView>,
    baseline: Simulation,
    /// Cost of a migration in seconds, and the end times of all tasks for this cost if the plan
    /// gets no further migration. `None` if these times must be simulated again.
    baseline_ends: Option<(f64, Vec<f64>)>,
    /// Simulation in which candidates are tried. Its memory is reused for each candidate.
    trial: Simulation,
}

/// A candidate: the migration of one task, and optionally a second migration in exchange. Each
/// migration is a pair (index of the task, index of the target).
#[derive(Clone, Copy, Debug)]
struct JobCandidate {
    migration: (usize, usize),
    exchange: Option<(usize, usize)>,
}

impl JobCandidate {
    fn migrations(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        [Some(self.migration), self.exchange].into_iter().flatten()
    }
}

impl JobSim<'_> {
    /// Returns the time in seconds until task `i` ends if all tasks of its host stay there.
    /// `host_tasks`: indices of the tasks of this host.
    fn end_on_shared_host(&self, i: usize, host_tasks: &[usize]) -> f64 {
        let sim_tasks = self.baseline.tasks();
        let sim_task = sim_tasks[i];
        // Until task `i` ends, the host also does work of its other tasks: of each one at most as
        // much as the work of task `i`.
        let shared_work: f64 = host_tasks
            .iter()
            .map(|other| sim_tasks[*other].work_left_s.min(sim_task.work_left_s))
            .sum();
        let sim_host = self.baseline.hosts()[sim_task.host];
        (shared_work / (sim_host.speed * sim_host.processors).max(1e-9))
            .max(sim_task.work_left_s / sim_host.speed.max(1e-9))
    }

    /// Selects the job whose completion time is optimized. Returns the outcome of the simulation
    /// without a further migration.
    fn select_job(&mut self, job: Tid, snapshot: &Snapshot) -> SimOutcome {
        // Estimates the cost of migrations that the simulation itself makes. The hosts of these
        // migrations are unknown, so the mean processor share per task is used.
        let total_speed: f64 = self
            .baseline
            .hosts()
            .iter()
            .map(|sim_host| sim_host.processors * sim_host.speed)
            .sum();
        let share = 1e3 * total_speed / self.tasks.len().max(1) as f64;
        let job_tasks = self.tasks.iter().filter(|task| task.job == job);
        let estimates = &snapshot.estimates;
        let bytes = job_tasks.map(|task| estimates.expected_bytes(&task.name, task.memory_bytes));
        let costs = bytes
            .map(|bytes| seconds(estimates.migration_cost(bytes, slowness(share, share), None)));
        let cost = costs.fold(0.0, f64::max);
        self.baseline.select_job(|i| self.tasks[i].job == job, cost);
        if self
            .baseline_ends
            .as_ref()
            .is_none_or(|(baseline_cost, _)| *baseline_cost != cost)
        {
            let end_times = self.simulate([]).run_to_end().to_vec();
            self.baseline_ends = Some((cost, end_times));
        }
        let end_times = self
            .baseline_ends
            .iter()
            .flat_map(|(_, end_times)| end_times)
            .zip(self.baseline.tasks());
        end_times.fold(
            SimOutcome::default(),
            |outcome, (end_times, sim_task)| match sim_task.in_job {
                true => SimOutcome {
                    job_end_s: outcome.job_end_s.max(*end_times),
                    ..outcome
                },
                false => SimOutcome {
                    other_ends_sum_s: outcome.other_ends_sum_s + end_times,
                    ..outcome
                },
            },
        )
    }

    /// Resets the trial simulation and makes these migrations at its start. Returns the simulation.
    fn simulate(
        &mut self,
        migrations: impl IntoIterator<Item = (usize, usize)>,
    ) -> &mut Simulation {
        self.trial.reset_from(&self.baseline);
        migrations
            .into_iter()
            .for_each(|(task, target)| self.trial.migrate(task, target));
        &mut self.trial
    }

    /// Adds a migration of the plan to the baseline, from which the further simulations start.
    pub(super) fn apply_migration(&mut self, migrated_tid: Tid, target: HostId) {
        let i = self.tasks.iter().position(|t| t.tid == migrated_tid);
        let target = self.hosts.iter().position(|host| *host == target);
        i.zip(target)
            .into_iter()
            .for_each(|(i, target)| self.baseline.apply_planned(i, target));
        self.baseline_ends = None;
    }
}

impl<'a> RebalancePlan<'a> {
    /// Returns the simulation of the plan's hosts and tasks. Returns `None` if no job has declared
    /// work or if there are more than [`SIM_TASKS_MAX`] tasks.
    pub(super) fn job_sim(&mut self) -> Option<JobSim<'a>> {
        self.declared_jobs = self.find_declared_jobs();
        if self.declared_jobs.is_empty() {
            return None;
        }
        let hosts: Vec<HostId> = self.hosts.keys().copied().collect();
        let sim_hosts: Vec<SimHost> = self
            .hosts
            .values()
            .map(|planned_host| planned_host.sim_host(planned_host.external_mean))
            .collect();
        let now = self.snapshot.now;
        let (mut sim_tasks, mut tasks) = (Vec::new(), Vec::new());
        for planned_host in self.hosts.values() {
            for task in planned_host
                .host
                .tasks
                .iter()
                .filter(|task| task.computes())
            {
                let host_index = task.migration.flatten().unwrap_or(planned_host.host.id);
                let Ok(host_index) = hosts.binary_search(&host_index) else {
                    continue;
                };
                let migrations_left = if self.fixed_jobs.contains(&task.job) {
                    0
                } else {
                    rebalances_left(now, task)
                };
                let cooldown_seconds = seconds(cooldown_end(now, task).since(now));
                sim_tasks.push(SimTask {
                    host: host_index,
                    work_left_s: self.work_left(task.tid),
                    migrations_left,
                    cooldown_end_s: cooldown_seconds,
                    in_job: false,
                });
                tasks.push(task);
            }
        }
        let is_small_enough = sim_tasks.len() <= SIM_TASKS_MAX;
        let (initial_simulation, empty_trial) =
            (Simulation::new(sim_hosts, sim_tasks), Simulation::default());
        is_small_enough.then_some(JobSim {
            hosts,
            tasks,
            baseline: initial_simulation,
            baseline_ends: None,
            trial: empty_trial,
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
        let undeclared_jobs: BTreeSet<Tid> = tasks()
            .filter(|t| !self.expected_work.get(&t.tid).is_some_and(|e| e.declared))
            .map(|t| t.job)
            .collect();
        let is_declared_job =
            |job: &Tid| !undeclared_jobs.contains(job) && !self.snapshot.barrier_jobs.contains(job);
        tasks().map(|t| t.job).filter(is_declared_job).collect()
    }

    /// True if a migration delays the end of the task's job, or if no simulation steps remain to
    /// find this out. False for jobs without declared work.
    pub(super) fn delays_job(&self, sim: &mut JobSim<'a>, task: &TaskView, target: HostId) -> bool {
        if !self.declared_jobs.contains(&task.job) {
            return false;
        }
        let i = sim.tasks.iter().position(|t| t.tid == task.tid);
        let (Some(i), Ok(target)) = (i, sim.hosts.binary_search(&target)) else {
            return false;
        };
        if sim.trial.step_count() >= TOTAL_STEPS_MAX {
            return true;
        }
        let baseline = sim.select_job(task.job, self.snapshot);
        sim.simulate([(i, target)])
            .job_ends_after(baseline.job_end_s * DELAY_FACTOR_MIN)
    }

    /// Adds migrations to the plan that reduce the completion time of jobs. `rebalances_max`:
    /// maximum number of migrations in the plan.
    pub(super) fn plan_makespan_migrations(&mut self, sim: &mut JobSim<'a>, rebalances_max: usize) {
        let jobs: Vec<Tid> = self.declared_jobs.iter().copied().collect();
        for (i, job) in jobs.iter().enumerate() {
            // Each job gets an equal part of the remaining simulation steps.
            let used_step_count = sim.trial.step_count();
            let steps_max = used_step_count
                + SEARCH_STEPS_MAX.saturating_sub(used_step_count) / (jobs.len() - i);
            while self.rebalances.len() + 2 <= rebalances_max {
                let Some(rebalances) = self.best_makespan_candidate(sim, *job, steps_max) else {
                    break;
                };
                for rebalance in rebalances {
                    sim.apply_migration(rebalance.tid, rebalance.target);
                    self.add_rebalance(rebalance);
                }
            }
        }
    }

    fn best_makespan_candidate(
        &self,
        sim: &mut JobSim<'a>,
        job: Tid,
        steps_max: usize,
    ) -> Option<Vec<Rebalance>> {
        let (baseline, margin) = (
            sim.select_job(job, self.snapshot),
            self.snapshot.costs.margin_ratio(),
        );
        let job_task_count = sim.baseline.tasks().iter().filter(|p| p.in_job).count() as f64;
        let confidence_factor = self.snapshot.confidence(true);
        let mut best_candidate = None::<(f64, JobCandidate, (f64, f64), f64)>;
        for candidate in self.makespan_candidates(sim, job) {
            if sim.trial.step_count() >= steps_max {
                break;
            }
            if !self.targets_accept(sim, &candidate) {
                continue;
            }
            let cost: f64 = candidate
                .migrations()
                .map(|(i, target_index)| self.migration_cost(sim, i, target_index))
                .sum();
            let best_net = best_candidate.map(|(best_net, ..)| best_net);
            // Every task of the job gains the time by which the job ends sooner. Tasks of other
            // jobs at the target lose time.
            let gain = |outcome: SimOutcome| {
                job_task_count * (baseline.job_end_s - outcome.job_end_s)
                    + baseline.other_ends_sum_s
                    - outcome.other_ends_sum_s
            };
            let is_best = |outcome: SimOutcome| {
                let net = corrected_gain(gain(outcome), confidence_factor) - margin * cost;
                let is_worthwhile = net >= seconds(GAIN_MIN)
                    && baseline.job_end_s - outcome.job_end_s
                        >= REDUCTION_FRACTION_MIN * baseline.job_end_s;
                is_worthwhile && best_net.is_none_or(|best_net| net > best_net)
            };
            let outcome = sim
                .simulate(candidate.migrations())
                .run_unless_rejected(|outcome| !is_best(outcome));
            let Some(outcome) = outcome else { continue };
            best_candidate = Some((
                corrected_gain(gain(outcome), confidence_factor) - margin * cost,
                candidate,
                (gain(outcome), cost),
                baseline.job_end_s - outcome.job_end_s,
            ));
        }
        best_candidate.map(|(_, candidate, gain_and_cost, reduction)| {
            self.to_rebalances(sim, &candidate, gain_and_cost, reduction)
        })
    }

    /// Returns the cost in seconds of migrating task `i` to host `target_index`. Both are indices
    /// in the simulation.
    fn migration_cost(&self, sim: &JobSim<'_>, i: usize, target_index: usize) -> f64 {
        let (source_id, target_index) = (
            sim.hosts[sim.baseline.tasks()[i].host],
            sim.hosts[target_index],
        );
        let (source_rate, target_rate) = self.source_and_target_rates(source_id, target_index);
        let (source, target) = (self.hosts[&source_id].host, self.hosts[&target_index].host);
        seconds(self.snapshot.migration_cost(
            sim.tasks[i],
            source,
            target,
            slowness(source_rate, target_rate),
        ))
    }

    /// Returns the rate of a task at its source and the predicted rate at its target, in
    /// thousandths of an ordinary processor.
    fn source_and_target_rates(&self, source: HostId, target: HostId) -> (f64, f64) {
        (
            self.hosts[&source].source_rate_permille,
            self.hosts[&target].target_rate_permille,
        )
    }

    fn to_rebalances(
        &self,
        sim: &JobSim<'_>,
        candidate: &JobCandidate,
        (gain, cost): (f64, f64),
        job_time_reduction: f64,
    ) -> Vec<Rebalance> {
        let to_rebalance = |(i, target_host): (usize, usize)| {
            let (source_host, target_host) = (
                sim.hosts[sim.baseline.tasks()[i].host],
                sim.hosts[target_host],
            );
            let (source_rate, target_rate) = self.source_and_target_rates(source_host, target_host);
            let (source_rate, target_rate) = (source_rate as u64, target_rate as u64);
            let (uncorrected_gain, cost, job_time_reduction) =
                (micros(gain), micros(cost), Some(micros(job_time_reduction)));
            let (remaining_work, is_declared) = (micros(sim.baseline.tasks()[i].work_left_s), true);
            let gain = micros(corrected_gain(gain, self.snapshot.confidence(is_declared)));
            let rebalance_reason = RebalanceReason {
                source_rate_permille: source_rate,
                target_rate_permille: target_rate,
                gain,
                cost,
                for_barrier_job: false,
                job_time_saved: job_time_reduction,
                work_left: remaining_work,
                declared: is_declared,
                computed_gain: uncorrected_gain,
            };
            Rebalance {
                tid: sim.tasks[i].tid,
                source: source_host,
                target: target_host,
                reason: rebalance_reason,
            }
        };
        candidate.migrations().map(to_rebalance).collect()
    }

    /// Returns the candidates for a job, the most promising first.
    ///
    /// A candidate migrates a task that would end last, alone or in exchange for another task.
    /// Other candidates migrate a task that shares the host with such a task.
    fn makespan_candidates(&self, sim: &JobSim<'_>, job: Tid) -> Vec<JobCandidate> {
        let sim_tasks = sim.baseline.tasks();
        let mut tasks_by_host = vec![Vec::new(); sim.hosts.len()];
        sim_tasks
            .iter()
            .enumerate()
            .for_each(|(i, sim_task)| tasks_by_host[sim_task.host].push(i));
        let is_in_job = |i: &usize| sim.tasks[*i].job == job;
        let end_times: Vec<f64> = (0..sim_tasks.len())
            .map(|i| {
                if is_in_job(&i) {
                    sim.end_on_shared_host(i, &tasks_by_host[sim_tasks[i].host])
                } else {
                    0.0
                }
            })
            .collect();
        let now = self.snapshot.now;
        let may_migrate = |i: &usize| {
            let task = sim.tasks[*i];
            is_in_job(i)
                && may_rebalance(now, task)
                && !self.targets_by_task.contains_key(&task.tid)
        };
        let mut last_tasks: Vec<usize> = (0..sim_tasks.len()).filter(is_in_job).collect();
        last_tasks.sort_by(|a, b| end_times[*b].total_cmp(&end_times[*a]));
        last_tasks.truncate(EXAMINED_TASKS_MAX);
        let mut candidate_tasks = last_tasks.clone();
        let shares_host = |i: &usize| {
            last_tasks
                .iter()
                .any(|l| sim_tasks[*l].host == sim_tasks[*i].host)
        };
        candidate_tasks.extend(
            (0..sim_tasks.len())
                .filter(|i| !last_tasks.contains(i))
                .filter(shares_host),
        );
        let hosts_with_steady_load = self.hosts_with_steady_load(sim);
        let hosts_allow = |i: usize, target: usize| {
            target != sim_tasks[i].host
                && hosts_with_steady_load[target]
                && hosts_with_steady_load[sim_tasks[i].host]
        };
        // Returns the time until the task ends on the host if all other tasks stay and share the
        // host with it until then.
        let end_on = |i: usize, target: usize, task_count: usize| {
            sim_tasks[i].work_left_s / sim.baseline.hosts()[target].rate(task_count)
        };
        let mut rated_candidates = Vec::new();
        for i in candidate_tasks.into_iter().filter(may_migrate) {
            for target in (0..sim.hosts.len()).filter(|target| hosts_allow(i, *target)) {
                rated_candidates.push((
                    end_times[i] - end_on(i, target, tasks_by_host[target].len() + 1),
                    JobCandidate {
                        migration: (i, target),
                        exchange: None,
                    },
                ));
                if !last_tasks.iter().take(EXCHANGES_MAX).any(|l| *l == i) {
                    continue;
                }
                let source = sim_tasks[i].host;
                for exchanged_task in
                    tasks_by_host[target]
                        .iter()
                        .copied()
                        .filter(|exchanged_task| {
                            may_migrate(exchanged_task) && hosts_allow(*exchanged_task, source)
                        })
                {
                    let later_end = end_on(i, target, tasks_by_host[target].len()).max(end_on(
                        exchanged_task,
                        source,
                        tasks_by_host[source].len(),
                    ));
                    rated_candidates.push((
                        end_times[i] - later_end,
                        JobCandidate {
                            migration: (i, target),
                            exchange: Some((exchanged_task, source)),
                        },
                    ));
                }
            }
        }
        // The most promising candidates come first, because the number of simulation steps is
        // limited.
        rated_candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
        rated_candidates
            .into_iter()
            .map(|(_, candidate)| candidate)
            .collect()
    }

    /// Returns, for each host of the simulation, true if the load of other programs varies little.
    fn hosts_with_steady_load(&self, sim: &JobSim<'_>) -> Vec<bool> {
        let has_steady_load = |host: &HostId| {
            let (load_min, load_max) = self.hosts[host].external_range;
            load_max - load_min <= EXTERNAL_SPREAD_THREADS_MAX
        };
        sim.hosts.iter().map(has_steady_load).collect()
    }

    /// True if every target of the candidate accepts its task.
    fn targets_accept(&self, sim: &JobSim<'_>, candidate: &JobCandidate) -> bool {
        let host = |host_index: usize| self.hosts[&sim.hosts[host_index]].host;
        let source = |i: usize| host(sim.baseline.tasks()[i].host);
        candidate.migrations().all(|(i, target)| {
            target_exclusion(self.snapshot, host(target), source(i), sim.tasks[i], true).is_none()
        })
    }
}
