//! Rebalancing: migrates a task if the task and the other tasks on its source and target finish
//! sooner in total, and if the time saved exceeds the cost of the migration by a margin.
//!
//! **Unit.** Gain and cost are sums of task time. The gain of a migration is the time by which the
//! task finishes sooner, plus the time that tasks at the source save, minus the time that tasks at
//! the target lose. In a job with barriers all tasks wait for the slowest one. The gain of such a
//! job is the gain of its slowest task times the number of tasks, and each migration delays all
//! tasks of the job.
//!
//! **Declared work.** If a program has declared the work of its tasks
//! ([`super::Constraints::work`]), the remaining work of these tasks is known. In this case the
//! completion time of the whole job is optimized first ([`super::makespan_moves`]).
//!
//! **Stability.** These rules prevent migrations back and forth:
//!
//! - Each external load is estimated by its current value and by its mean with the fluctuation
//!   subtracted or added. The smaller value applies to the source, the larger to the target. A
//!   brief change of load therefore causes no migration.
//! - The task must become faster by a fifth.
//! - A cooldown follows every migration and becomes longer each time. The number of migrations per
//!   hour is limited.
//!
//! If all tasks were placed by load, no task finds a faster host, so rebalancing changes nothing.

use super::evictions::target_exclusion;
use super::host_load::{HostLoad, external_threads};
use super::makespan_moves::JobSim;
use super::makespan_sim::SPEEDUP_FACTOR_MIN;
use super::rebalance_plan::{
    ExpectedWork, GAIN_MIN, PlannedHost, RebalancePlan, cooldown_end, corrected_gain,
    may_rebalance, may_rebalance_to_idle, micros, seconds,
};
use super::{
    CONCURRENT_MIGRATIONS_MAX, HostView, OwnerState, Rebalance, RebalanceReason, Snapshot,
    TaskView, slowness,
};
use sempa_proto::{HostId, Micros, Tid};
use std::cell::{LazyCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};

/// Time after an owner's departure in which the host is neither source nor target of rebalancing.
pub const OWNER_ABSENCE_MIN: Micros = Micros::from_secs(300);
/// Minimum ratio of gain to cost, unless the policy sets another minimum.
pub const GAIN_MARGIN: f64 = 1.5;
/// Maximum number of source hosts that are examined: the hosts with the slowest tasks.
const SOURCES_MAX: usize = 16;
/// Maximum number of target hosts that are examined: the hosts with the largest shares.
const TARGETS_MAX: usize = 8;
/// Maximum number of tasks of each host that are examined.
const TASKS_PER_HOST_MAX: usize = 64;

/// A task that may migrate.
struct Candidate<'a> {
    task: &'a TaskView,
    source: HostId,
    work_left_s: f64,
    /// True if the longer cooldown of the task has ended. Otherwise the task may migrate only to a
    /// host without computing tasks.
    cooled_down: bool,
}

/// A possible migration that saves more than it costs.
struct CandidateMigration {
    /// Gain minus the cost times the margin, in seconds.
    net_gain_s: f64,
    /// Index in the list of candidate tasks.
    candidate_index: usize,
    target: HostId,
    reason: RebalanceReason,
    /// True if a simulation has shown that the migration delays the end of the task's job.
    delays_job: bool,
}

/// Returns the expected remaining work of a task, from its declaration or from the learned values.
fn expected_work(snapshot: &Snapshot, task: &TaskView) -> ExpectedWork {
    let declared_work = task
        .constraints
        .as_ref()
        .and_then(|constraints_of_task| constraints_of_task.work);
    // A task slightly beyond its declared work probably ends soon. If the task exceeds the declared
    // work by a quarter, the declaration is ignored.
    match declared_work.filter(|work| task.work_done.0 < work.0.saturating_mul(5) / 4) {
        Some(work) => ExpectedWork {
            work_left_s: seconds(Micros(work.0.saturating_sub(task.work_done.0))),
            declared: true,
        },
        None => ExpectedWork {
            work_left_s: seconds(snapshot.estimates.work_left(&task.name, task.work_done)),
            declared: false,
        },
    }
}

/// True if rebalancing may use the host as source or target: its load is known, and its owner has
/// been away for [`OWNER_ABSENCE_MIN`].
fn may_participate(now: Micros, host: &HostView) -> bool {
    host.recent_sample(now).is_some()
        && match host.owner {
            OwnerState::Present { .. }
            | OwnerState::Closed { .. }
            | OwnerState::Drained { .. }
            | OwnerState::Unknown => false,
            // External load is taken into account as load. A host with an idle login is not used,
            // because the user may return at any moment.
            OwnerState::PossiblyPresent {
                idle_login: has_idle_login,
                ..
            } => !has_idle_login,
            OwnerState::Absent { left_at: departure } => {
                departure.is_none_or(|departure| now.since(departure) >= OWNER_ABSENCE_MIN)
            }
        }
}

impl<'a> RebalancePlan<'a> {
    /// Creates a plan without migrations. Its hosts are those with the slowest tasks and those with
    /// the largest shares.
    fn new(snapshot: &'a Snapshot, jobs_without_gain: BTreeSet<Tid>) -> Self {
        let index = snapshot.hosts.index(snapshot.now);
        let participant = |id: HostId| {
            let host = snapshot
                .host(id)
                .filter(|h| may_participate(snapshot.now, h))?;
            Some((host, index.load(id)?))
        };
        let sources = index
            .hosts_slowest_first()
            .filter_map(participant)
            .take(SOURCES_MAX);
        let targets = index
            .hosts_best_first()
            .filter_map(participant)
            .take(TARGETS_MAX);
        let hosts: BTreeMap<HostId, (&HostView, HostLoad)> = sources
            .chain(targets)
            .map(|(host, load)| (host.id, (host, load)))
            .collect();
        let tasks = hosts
            .values()
            .flat_map(|(host, _)| &host.tasks)
            .filter(|task| task.computes());
        let expected_works: BTreeMap<Tid, ExpectedWork> = tasks
            .map(|task| (task.tid, expected_work(snapshot, task)))
            .collect();
        let planned_host = |(host, load): &(&'a HostView, HostLoad)| {
            let current_load = f64::from(external_threads(host, snapshot.now));
            let mean_and_spread = host
                .external_mean
                .map(|mean| (f64::from(mean.mean_threads), f64::from(mean.deviation)));
            let (mean, spread) = mean_and_spread.unwrap_or((current_load, 0.0));
            let load_range = (
                current_load.min(mean - spread).max(0.0),
                current_load.max(mean + spread),
            );
            let (no_work, zero_sums) = (Vec::new(), (0.0, 0.0));
            (
                host.id,
                PlannedHost {
                    host,
                    load: *load,
                    external_range: load_range,
                    external_mean: mean,
                    works_left_s: no_work,
                    completion_sums: zero_sums,
                    source_rate_permille: 0.0,
                    target_rate_permille: 0.0,
                },
            )
        };
        let mut planned_hosts: BTreeMap<HostId, PlannedHost<'_>> =
            hosts.values().map(planned_host).collect();
        for (host, _) in hosts.values() {
            for task in host.tasks.iter().filter(|task| task.computes()) {
                let host_id = task.migration.flatten().unwrap_or(host.id);
                planned_hosts
                    .get_mut(&host_id)
                    .into_iter()
                    .for_each(|planned_host| {
                        planned_host
                            .works_left_s
                            .push(expected_works[&task.tid].work_left_s)
                    });
            }
        }
        for planned_host in planned_hosts.values_mut() {
            planned_host.works_left_s.sort_unstable_by(f64::total_cmp);
            planned_host.recompute();
        }
        let (no_jobs, no_migrations, no_rebalances, zone_cache) = (
            BTreeSet::new(),
            BTreeMap::new(),
            Vec::new(),
            RefCell::default(),
        );
        RebalancePlan {
            snapshot,
            hosts: planned_hosts,
            expected_work: expected_works,
            declared_jobs: no_jobs,
            fixed_jobs: jobs_without_gain,
            targets_by_task: no_migrations,
            rebalances: no_rebalances,
            peer_zones: zone_cache,
        }
    }

    /// Returns the net gain of a migration in seconds, with its explanation; `None` if the
    /// migration is not worthwhile. `sum_at_source` returns the sum of the completion times of the
    /// tasks that remain at the source.
    fn evaluate_migration(
        &self,
        candidate: &Candidate<'_>,
        source: &PlannedHost<'_>,
        target: &PlannedHost<'_>,
        sum_at_source: impl Fn() -> f64,
    ) -> Option<(f64, RebalanceReason)> {
        let (source_rate, target_rate) = (source.source_rate_permille, target.target_rate_permille);
        if target.load.vm_task_count > 0 && !candidate.cooled_down {
            return None;
        }
        // A task waits longer for messages if its host is not in the zone of its peers.
        let (source_weight, target_weight) = self.zone_weights(candidate, source, target);
        if target_rate * target_weight < source_rate * source_weight * SPEEDUP_FACTOR_MIN {
            return None;
        }
        let current_sum = source.completion_sums.0 + target.completion_sums.1;
        let message_wait = |rate: f64, source_weight: f64| {
            1e3 * candidate.work_left_s / rate.max(1.0) * (1.0 / source_weight - 1.0)
        };
        let computed_gain = current_sum
            - sum_at_source()
            - target.completion_sum_with(target.external_range.1, candidate.work_left_s);
        let computed_gain = computed_gain + message_wait(source_rate, source_weight)
            - message_wait(target_rate, target_weight);
        let declared = self
            .expected_work
            .get(&candidate.task.tid)
            .is_some_and(|work_estimate| work_estimate.declared);
        let gain = corrected_gain(computed_gain, self.snapshot.confidence(declared));
        let cost = self.snapshot.migration_cost(
            candidate.task,
            source.host,
            target.host,
            slowness(source_rate, target_rate),
        );
        if gain < self.snapshot.costs.margin_ratio() * seconds(cost) + seconds(GAIN_MIN) {
            return None;
        }
        let (gain, computed_gain, remaining_work) = (
            micros(gain),
            micros(computed_gain),
            micros(candidate.work_left_s),
        );
        let (source_rate, target_rate) = (source_rate as u64, target_rate as u64);
        let rebalance_reason = RebalanceReason {
            source_rate_permille: source_rate,
            target_rate_permille: target_rate,
            gain,
            cost,
            for_barrier_job: false,
            job_time_saved: None,
            work_left: remaining_work,
            declared,
            computed_gain,
        };
        Some((
            seconds(gain) - self.snapshot.costs.margin_ratio() * seconds(cost),
            rebalance_reason,
        ))
    }

    /// Returns the weights of a processor share for the task at its source and at its target. A
    /// weight of 1 means that the peers of the task are in the zone of the host. If source and
    /// target are in the same zone, both weights are 1.
    fn zone_weights(
        &self,
        candidate: &Candidate<'_>,
        source: &PlannedHost<'_>,
        target: &PlannedHost<'_>,
    ) -> (f64, f64) {
        if source.host.zone == target.host.zone {
            return (1.0, 1.0);
        }
        let mut zone_cache = self.peer_zones.borrow_mut();
        let find_peer_zones = || self.snapshot.peer_zones(source.host.id, candidate.task);
        let zones = zone_cache
            .entry((source.host.id, candidate.task.job))
            .or_insert_with(find_peer_zones);
        let zone_weight = |zone| f64::from(self.snapshot.zone_weight_permille(zone, zones)) / 1e3;
        (zone_weight(source.host.zone), zone_weight(target.host.zone))
    }

    /// Returns the tasks that may migrate, by ascending host id.
    fn candidates(&self) -> Vec<Candidate<'a>> {
        let now = self.snapshot.now;
        let has_empty_host = self
            .hosts
            .values()
            .any(|planned_host| planned_host.load.vm_task_count == 0);
        let host_candidates = |planned_host: &PlannedHost<'a>| {
            let source = planned_host.host.id;
            let is_candidate = |t: &&TaskView| {
                let cooldown_allows = if has_empty_host {
                    may_rebalance_to_idle
                } else {
                    may_rebalance
                };
                cooldown_allows(now, t)
                    && !self.targets_by_task.contains_key(&t.tid)
                    && !self.fixed_jobs.contains(&t.job)
            };
            let tasks = planned_host
                .host
                .tasks
                .iter()
                .filter(is_candidate)
                .take(TASKS_PER_HOST_MAX);
            tasks
                .map(move |task| Candidate {
                    task,
                    source,
                    work_left_s: self.work_left(task.tid),
                    cooled_down: cooldown_end(now, task) <= now,
                })
                .collect::<Vec<_>>()
        };
        self.hosts
            .values()
            .filter(|p| p.load.vm_task_count > 0)
            .flat_map(host_candidates)
            .collect()
    }

    /// Appends the worthwhile migrations to `migration_list`. If `host_filter` is `Some`, appends
    /// only migrations from or to the two hosts in `host_filter`.
    fn collect_migrations(
        &self,
        candidates: &[Candidate<'_>],
        migration_list: &mut Vec<CandidateMigration>,
        host_filter: Option<[HostId; 2]>,
    ) {
        let all_hosts: Vec<&PlannedHost<'_>> = self.hosts.values().collect();
        let filtered_hosts: Vec<&PlannedHost<'_>> = host_filter
            .iter()
            .flatten()
            .map(|id| &self.hosts[id])
            .collect();
        for (i, candidate) in candidates
            .iter()
            .enumerate()
            .filter(|(_, candidate)| !self.targets_by_task.contains_key(&candidate.task.tid))
        {
            let source = &self.hosts[&candidate.source];
            let targets =
                if host_filter.is_none_or(|host_filter| host_filter.contains(&candidate.source)) {
                    &all_hosts
                } else {
                    &filtered_hosts
                };
            // The sum of the completion times without the task does not depend on the target. The
            // sum is computed only if a target needs it.
            let remaining_sum = LazyCell::new(|| {
                source.completion_sum_without(source.external_range.0, candidate.work_left_s)
            });
            for target in targets
                .iter()
                .filter(|target| target.host.id != candidate.source)
            {
                let gain_and_reason =
                    self.evaluate_migration(candidate, source, target, || *remaining_sum);
                migration_list.extend(gain_and_reason.map(|(net, why)| CandidateMigration {
                    net_gain_s: net,
                    candidate_index: i,
                    target: target.host.id,
                    reason: why,
                    delays_job: false,
                }));
            }
        }
    }

    /// Returns the migration with the largest net gain among the migrations that delay no job and
    /// whose target accepts the task. `None` if there is no such migration. Removes the returned
    /// migration and the migrations to refusing targets from `migrations`.
    fn take_best_migration(
        &self,
        candidates: &[Candidate<'_>],
        migrations: &mut Vec<CandidateMigration>,
        sim: Option<&mut JobSim<'a>>,
    ) -> Option<Rebalance> {
        let mut sim = sim;
        migrations
            .iter_mut()
            .for_each(|migration| migration.delays_job = false);
        loop {
            let compare_migrations = |a: &CandidateMigration, b: &CandidateMigration| {
                a.net_gain_s
                    .total_cmp(&b.net_gain_s)
                    .then((b.candidate_index, b.target).cmp(&(a.candidate_index, a.target)))
            };
            let undelayed_migrations = migrations
                .iter()
                .enumerate()
                .filter(|(_, migration)| !migration.delays_job);
            let index = undelayed_migrations
                .max_by(|a, b| compare_migrations(a.1, b.1))
                .map(|(index, _)| index)?;
            let (Candidate { task, source, .. }, target) = (
                &candidates[migrations[index].candidate_index],
                migrations[index].target,
            );
            if target_exclusion(
                self.snapshot,
                self.hosts[&target].host,
                self.hosts[source].host,
                task,
                true,
            )
            .is_some()
            {
                migrations.swap_remove(index);
            } else if sim
                .as_mut()
                .is_some_and(|sim| self.delays_job(sim, task, target))
            {
                migrations[index].delays_job = true;
            } else {
                return Some(Rebalance {
                    tid: task.tid,
                    source: *source,
                    target,
                    reason: migrations.swap_remove(index).reason,
                });
            }
        }
    }

    fn find_task(&self, rebalance: &Rebalance) -> Option<&'a TaskView> {
        self.snapshot
            .host(rebalance.source)?
            .tasks
            .iter()
            .find(|t| t.tid == rebalance.tid)
    }

    fn plan_task_migrations(&mut self, mut sim: Option<JobSim<'a>>, rebalances_max: usize) {
        let (candidates, mut migration_list) = (self.candidates(), Vec::new());
        self.collect_migrations(&candidates, &mut migration_list, None);
        while self.rebalances.len() < rebalances_max {
            let Some(rebalance) =
                self.take_best_migration(&candidates, &mut migration_list, sim.as_mut())
            else {
                break;
            };
            let (tid, changed_hosts) = (rebalance.tid, [rebalance.source, rebalance.target]);
            if let Some(sim) = &mut sim {
                sim.apply_migration(rebalance.tid, rebalance.target);
            }
            self.add_rebalance(rebalance);
            // Only migrations from or to the source and the target have changed.
            migration_list.retain(|migration| {
                let listed_candidate = &candidates[migration.candidate_index];
                listed_candidate.task.tid != tid
                    && !changed_hosts.contains(&listed_candidate.source)
                    && !changed_hosts.contains(&migration.target)
            });
            self.collect_migrations(&candidates, &mut migration_list, Some(changed_hosts));
        }
    }

    /// Returns for a job: the rate of its slowest task before the plan, the rate of its slowest
    /// task after the plan, the number of its tasks, and the longest remaining work in seconds.
    fn slowest_task_rates(&self, job: Tid) -> (f64, f64, usize, f64) {
        let index = self.snapshot.hosts.index(self.snapshot.now);
        let (mut rate_before, mut rate_after, mut task_count, mut longest_work) =
            (f64::MAX, f64::MAX, 0, 0.0_f64);
        let targets: BTreeMap<Tid, HostId> =
            self.rebalances.iter().map(|s| (s.tid, s.target)).collect();
        for (id, load) in index
            .job_hosts(job)
            .filter_map(|id| Some((id, index.load(id)?)))
        {
            let Some(planned_host) = self.hosts.get(&id) else {
                // The plan does not contain this host, so the rates there are the same before and
                // after the plan.
                (rate_before, rate_after) = (
                    rate_before.min(load.task_rate()),
                    rate_after.min(load.task_rate()),
                );
                task_count += index.computing_task_count(id, job);
                continue;
            };
            for task in planned_host
                .host
                .tasks
                .iter()
                .filter(|t| t.job == job && t.computes())
            {
                let target = targets
                    .get(&task.tid)
                    .and_then(|target| self.hosts.get(target));
                let rate = |target_host: &PlannedHost<'_>| {
                    target_host.rate(target_host.load.vm_task_count, target_host.external_range.1)
                };
                rate_before = rate_before
                    .min(planned_host.rate(load.vm_task_count, planned_host.external_range.0));
                rate_after = rate_after.min(target.map_or(planned_host.source_rate_permille, rate));
                (task_count, longest_work) =
                    (task_count + 1, longest_work.max(self.work_left(task.tid)));
            }
        }
        (rate_before, rate_after, task_count, longest_work)
    }

    /// Sets gain and cost of the migrations of each job with barriers to those of the whole job.
    /// Returns the jobs that gain too little.
    fn evaluate_barrier_jobs(&mut self) -> BTreeSet<Tid> {
        let mut costs = BTreeMap::<Tid, (f64, Vec<usize>)>::new();
        for (i, rebalance) in self.rebalances.iter().enumerate() {
            let job = self
                .find_task(rebalance)
                .map(|t| t.job)
                .filter(|job| self.snapshot.barrier_jobs.contains(job));
            if let Some(job) = job {
                let entry = costs.entry(job).or_default();
                entry.0 += seconds(rebalance.reason.cost);
                entry.1.push(i);
            }
        }
        let mut gainless_jobs = BTreeSet::new();
        for (job, (cost, rebalance_indices)) in costs {
            let (rate_before, rate_after, task_count, longest_work) = self.slowest_task_rates(job);
            let seconds_saved_per_task = longest_work * (1e3 / rate_before - 1e3 / rate_after);
            let (uncorrected_gain, cost) = (
                task_count as f64 * seconds_saved_per_task,
                task_count as f64 * cost,
            );
            let gain = corrected_gain(uncorrected_gain, self.snapshot.confidence(false));
            if gain < self.snapshot.costs.margin_ratio() * cost + seconds(GAIN_MIN) {
                gainless_jobs.insert(job);
            }
            for i in rebalance_indices {
                let rebalance_reason = &mut self.rebalances[i].reason;
                (
                    rebalance_reason.for_barrier_job,
                    rebalance_reason.gain,
                    rebalance_reason.cost,
                ) = (true, micros(gain), micros(cost));
                rebalance_reason.computed_gain = micros(uncorrected_gain);
            }
        }
        gainless_jobs
    }
}

/// Returns the migrations by which tasks save more time than the migrations cost. Empty if the
/// virtual machine is balanced.
pub fn plan_rebalances(snapshot: &Snapshot) -> Vec<Rebalance> {
    let migrating_count = snapshot.hosts.index(snapshot.now).migrating_task_count();
    let rebalances_max = CONCURRENT_MIGRATIONS_MAX.saturating_sub(migrating_count);
    let mut jobs_without_gain = BTreeSet::new();
    loop {
        let mut plan = RebalancePlan::new(snapshot, jobs_without_gain.clone());
        let mut sim = plan.job_sim();
        if let Some(sim) = &mut sim {
            plan.plan_makespan_migrations(sim, rebalances_max);
        }
        plan.plan_task_migrations(sim, rebalances_max);
        let gainless_jobs = plan.evaluate_barrier_jobs();
        if gainless_jobs.is_empty() {
            return plan.rebalances;
        }
        // The tasks of the jobs without gain stay, so another plan is made. Each round fixes at
        // least one job, so the loop ends.
        jobs_without_gain.extend(gainless_jobs);
    }
}
