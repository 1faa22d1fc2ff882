//! Rebalancing: migrates a task if the task and the other tasks on its source and target finish
//! sooner in total, and if the time saved exceeds the cost of the migration by a margin.
//!
//! **Unit.** Gain and cost are sums of task time. The gain of a migration is the time by which the
//! task finishes sooner, plus the time that tasks at the source save, minus the time that tasks at
//! the target lose. In a job with barriers all tasks wait for the slowest one. The gain of such a
//! job is the gain of its slowest task times the number of tasks, and each migration delays all its
//! tasks.
//!
//! **Declared work.** If a program has declared the work of its tasks
//! ([`super::Constraints::work`]), their remaining work is known. In that case the completion time
//! of the whole job is optimized first ([`super::makespan_moves`]).
//!
//! **Stability.** These rules prevent migrations back and forth:
//!
//! - The external load at the source is the smaller, at the target the larger of two values: the
//!   current one, and the mean with its fluctuation subtracted or added. So a brief change of load
//!   causes no migration.
//! - The task must become faster by a fifth.
//! - A cooldown follows every migration and becomes longer each time. The number of migrations per
//!   hour is limited.
//!
//! If all tasks were placed by load, no task finds a faster host, so rebalancing changes nothing.

use super::evictions::target_exclusion;
use super::host_load::{HostLoad, external_threads};
use super::makespan_moves::JobSim;
use super::makespan_sim::SPEEDUP_MIN;
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

/// Time after an owner's departure in which rebalancing uses the host neither as source nor as
/// target.
pub const OWNER_AWAY_MIN: Micros = Micros::from_secs(300);
/// Minimum ratio of gain to cost, unless the policy sets another one.
pub const GAIN_MARGIN: f64 = 1.5;
/// Maximum number of sources examined: the hosts with the slowest tasks.
const SOURCES_MAX: usize = 16;
/// Maximum number of targets examined: the best hosts.
const TARGETS_MAX: usize = 8;
/// Maximum number of tasks examined per host.
const TASKS_MAX: usize = 64;

/// A task that may migrate.
struct Candidate<'a> {
    task: &'a TaskView,
    from: HostId,
    work_left: f64,
    /// True if the longer cooldown of the task has ended. Only then may it migrate to a host on
    /// which other tasks run.
    cooled_down: bool,
}

/// A possible migration that saves more than it costs.
struct CandidateMove {
    /// Gain less cost times margin, in seconds.
    net_gain: f64,
    /// Index in the list of candidate tasks.
    candidate: usize,
    to: HostId,
    reason: RebalanceReason,
    /// True if the migration was found to delay the end of the task's job.
    delays_job: bool,
}

/// Returns the expected remaining work of a task.
fn expected_work(snapshot: &Snapshot, task: &TaskView) -> ExpectedWork {
    let declared_work = task.constraints.as_ref().and_then(|wants| wants.work);
    // A task slightly beyond its declared work probably ends soon. If it exceeds the declared work
    // by a quarter, the declaration is ignored.
    match declared_work.filter(|work| task.work_done.0 < work.0.saturating_mul(5) / 4) {
        Some(work) => ExpectedWork {
            work_left: seconds(Micros(work.0.saturating_sub(task.work_done.0))),
            declared: true,
        },
        None => ExpectedWork {
            work_left: seconds(snapshot.estimates.work_left(&task.name, task.work_done)),
            declared: false,
        },
    }
}

/// True if rebalancing may use the host as source or target: its load is known, and its owner has
/// been away for [`OWNER_AWAY_MIN`].
fn may_participate(now: Micros, host: &HostView) -> bool {
    host.fresh_sample(now).is_some()
        && match host.owner {
            OwnerState::Present { .. }
            | OwnerState::Closed { .. }
            | OwnerState::Drained { .. }
            | OwnerState::Unknown => false,
            // External load is weighed as load. With an idle login the host is not used, because
            // the user may return at any moment.
            OwnerState::PossiblyPresent {
                idle_login: idle, ..
            } => !idle,
            OwnerState::Absent { left_at: left } => {
                left.is_none_or(|left| now.since(left) >= OWNER_AWAY_MIN)
            }
        }
}

impl<'a> RebalancePlan<'a> {
    /// Creates an empty plan for the hosts with the slowest tasks and the best hosts.
    fn new(snapshot: &'a Snapshot, fixed: BTreeSet<Tid>) -> RebalancePlan<'a> {
        let index = snapshot.hosts.index(snapshot.now);
        let known = |id: HostId| {
            let host = snapshot
                .host(id)
                .filter(|h| may_participate(snapshot.now, h))?;
            Some((host, index.load(id)?))
        };
        let sources = index.slowest_first().filter_map(known).take(SOURCES_MAX);
        let targets = index.best_first().filter_map(known).take(TARGETS_MAX);
        let hosts: BTreeMap<HostId, (&HostView, HostLoad)> = sources
            .chain(targets)
            .map(|(host, load)| (host.id, (host, load)))
            .collect();
        let tasks = hosts
            .values()
            .flat_map(|(host, _)| &host.tasks)
            .filter(|task| task.computes());
        let expected: BTreeMap<Tid, ExpectedWork> = tasks
            .map(|task| (task.tid, expected_work(snapshot, task)))
            .collect();
        let place = |(host, load): &(&'a HostView, HostLoad)| {
            let now = f64::from(external_threads(host, snapshot.now));
            let seen = host
                .external_mean
                .map(|mean| (f64::from(mean.threads), f64::from(mean.spread)));
            let (mean, spread) = seen.unwrap_or((now, 0.0));
            let foreign = (now.min(mean - spread).max(0.0), now.max(mean + spread));
            let (left, flows) = (Vec::new(), (0.0, 0.0));
            (
                host.id,
                PlannedHost {
                    host,
                    load: *load,
                    external_range: foreign,
                    external_mean: mean,
                    work_left: left,
                    completion_sums: flows,
                    source_rate: 0.0,
                    target_rate: 0.0,
                },
            )
        };
        let mut places: BTreeMap<HostId, PlannedHost<'_>> = hosts.values().map(place).collect();
        for (host, _) in hosts.values() {
            for task in host.tasks.iter().filter(|task| task.computes()) {
                let at = task.migrating.flatten().unwrap_or(host.id);
                places
                    .get_mut(&at)
                    .into_iter()
                    .for_each(|place| place.work_left.push(expected[&task.tid].work_left));
            }
        }
        for place in places.values_mut() {
            place.work_left.sort_unstable_by(f64::total_cmp);
            place.recompute();
        }
        let (told, moved, shifts, peers) = (
            BTreeSet::new(),
            BTreeMap::new(),
            Vec::new(),
            RefCell::default(),
        );
        RebalancePlan {
            snapshot,
            hosts: places,
            expected,
            declared_jobs: told,
            fixed_jobs: fixed,
            migrated: moved,
            rebalances: shifts,
            peer_zones: peers,
        }
    }

    /// Returns the net gain of a migration in seconds, with its explanation; `None` if the
    /// migration is not worthwhile. `sum_at_source` computes the sum of the completion times of the
    /// tasks that remain at the source.
    fn evaluate(
        &self,
        candidate: &Candidate<'_>,
        from: &PlannedHost<'_>,
        to: &PlannedHost<'_>,
        sum_at_source: impl Fn() -> f64,
    ) -> Option<(f64, RebalanceReason)> {
        let (source_rate, target_rate) = (from.source_rate, to.target_rate);
        if to.load.own_tasks > 0 && !candidate.cooled_down {
            return None;
        }
        // A task waits longer for messages on a host that is far from its peers.
        let (near, far) = self.zone_weights(candidate, from, to);
        if target_rate * far < source_rate * near * SPEEDUP_MIN {
            return None;
        }
        let now = from.completion_sums.0 + to.completion_sums.1;
        let waits =
            |rate: f64, near: f64| 1e3 * candidate.work_left / rate.max(1.0) * (1.0 / near - 1.0);
        let computed_gain = now
            - sum_at_source()
            - to.completion_sum_with(to.external_range.1, candidate.work_left);
        let computed_gain = computed_gain + waits(source_rate, near) - waits(target_rate, far);
        let declared = self
            .expected
            .get(&candidate.task.tid)
            .is_some_and(|expected| expected.declared);
        let gain = corrected_gain(computed_gain, self.snapshot.confidence(declared));
        let cost = self.snapshot.migration_cost(
            candidate.task,
            from.host,
            to.host,
            slowness(source_rate, target_rate),
        );
        if gain < self.snapshot.costs.margin() * seconds(cost) + seconds(GAIN_MIN) {
            return None;
        }
        let (gain, computed_gain, left) = (
            micros(gain),
            micros(computed_gain),
            micros(candidate.work_left),
        );
        let (source_rate, target_rate) = (source_rate as u64, target_rate as u64);
        let why = RebalanceReason {
            source_rate,
            target_rate,
            gain,
            cost,
            barrier: false,
            job_ends_sooner_by: None,
            work_left: left,
            declared,
            computed_gain,
        };
        Some((
            seconds(gain) - self.snapshot.costs.margin() * seconds(cost),
            why,
        ))
    }

    /// Returns the weights of a processor share for the task at its source and at its target. 1
    /// means that its peers are near.
    fn zone_weights(
        &self,
        candidate: &Candidate<'_>,
        from: &PlannedHost<'_>,
        to: &PlannedHost<'_>,
    ) -> (f64, f64) {
        if from.host.zone == to.host.zone {
            return (1.0, 1.0);
        }
        let mut peers = self.peer_zones.borrow_mut();
        let of_peers = || self.snapshot.peer_zones(from.host.id, candidate.task);
        let zones = peers
            .entry((from.host.id, candidate.task.job))
            .or_insert_with(of_peers);
        let worth = |zone| f64::from(self.snapshot.zone_weight_permille(zone, zones)) / 1e3;
        (worth(from.host.zone), worth(to.host.zone))
    }

    /// Returns the tasks that may migrate, by ascending host id.
    fn candidates(&self) -> Vec<Candidate<'a>> {
        let now = self.snapshot.now;
        let is_one_empty = self.hosts.values().any(|place| place.load.own_tasks == 0);
        let of_place = |place: &PlannedHost<'a>| {
            let from = place.host.id;
            let may_go = |t: &&TaskView| {
                let may = if is_one_empty {
                    may_rebalance_to_idle
                } else {
                    may_rebalance
                };
                may(now, t)
                    && !self.migrated.contains_key(&t.tid)
                    && !self.fixed_jobs.contains(&t.job)
            };
            let tasks = place.host.tasks.iter().filter(may_go).take(TASKS_MAX);
            tasks
                .map(move |task| Candidate {
                    task,
                    from,
                    work_left: self.work_left(task.tid),
                    cooled_down: cooldown_end(now, task) <= now,
                })
                .collect::<Vec<_>>()
        };
        self.hosts
            .values()
            .filter(|p| p.load.own_tasks > 0)
            .flat_map(of_place)
            .collect()
    }

    /// Appends the worthwhile migrations to `moves`: all of them, or only those from or to the two
    /// hosts in `only`.
    fn collect_moves(
        &self,
        candidates: &[Candidate<'_>],
        moves: &mut Vec<CandidateMove>,
        only: Option<[HostId; 2]>,
    ) {
        let all: Vec<&PlannedHost<'_>> = self.hosts.values().collect();
        let some: Vec<&PlannedHost<'_>> = only.iter().flatten().map(|id| &self.hosts[id]).collect();
        for (i, mover) in candidates
            .iter()
            .enumerate()
            .filter(|(_, mover)| !self.migrated.contains_key(&mover.task.tid))
        {
            let from = &self.hosts[&mover.from];
            let to = if only.is_none_or(|only| only.contains(&mover.from)) {
                &all
            } else {
                &some
            };
            // This value does not depend on the target, and is computed only if it is needed.
            let left_behind = LazyCell::new(|| {
                from.completion_sum_without(from.external_range.0, mover.work_left)
            });
            for to in to.iter().filter(|to| to.host.id != mover.from) {
                let judged = self.evaluate(mover, from, to, || *left_behind);
                moves.extend(judged.map(|(net, why)| CandidateMove {
                    net_gain: net,
                    candidate: i,
                    to: to.host.id,
                    reason: why,
                    delays_job: false,
                }));
            }
        }
    }

    /// Returns the migration with the largest net gain. Its target must accept the task, and it
    /// must delay no job. `None` if there is none.
    fn best_move(
        &self,
        candidates: &[Candidate<'_>],
        moves: &mut Vec<CandidateMove>,
        sim: Option<&mut JobSim<'a>>,
    ) -> Option<Rebalance> {
        let mut sim = sim;
        moves.iter_mut().for_each(|offer| offer.delays_job = false);
        loop {
            let order = |a: &CandidateMove, b: &CandidateMove| {
                a.net_gain
                    .total_cmp(&b.net_gain)
                    .then((b.candidate, b.to).cmp(&(a.candidate, a.to)))
            };
            let known = moves
                .iter()
                .enumerate()
                .filter(|(_, offer)| !offer.delays_job);
            let at = known.max_by(|a, b| order(a.1, b.1)).map(|(at, _)| at)?;
            let (Candidate { task, from, .. }, to) =
                (&candidates[moves[at].candidate], moves[at].to);
            if target_exclusion(
                self.snapshot,
                self.hosts[&to].host,
                self.hosts[from].host,
                task,
                true,
            )
            .is_some()
            {
                moves.swap_remove(at);
            } else if sim
                .as_mut()
                .is_some_and(|sim| self.delays_job(sim, task, to))
            {
                moves[at].delays_job = true;
            } else {
                return Some(Rebalance {
                    tid: task.tid,
                    from: *from,
                    to,
                    reason: moves.swap_remove(at).reason,
                });
            }
        }
    }

    fn task(&self, rebalance: &Rebalance) -> Option<&'a TaskView> {
        self.snapshot
            .host(rebalance.from)?
            .tasks
            .iter()
            .find(|t| t.tid == rebalance.tid)
    }

    fn plan_task_moves(&mut self, mut sim: Option<JobSim<'a>>, room: usize) {
        let (candidates, mut moves) = (self.candidates(), Vec::new());
        self.collect_moves(&candidates, &mut moves, None);
        while self.rebalances.len() < room {
            let Some(shift) = self.best_move(&candidates, &mut moves, sim.as_mut()) else {
                break;
            };
            let (tid, touched) = (shift.tid, [shift.from, shift.to]);
            if let Some(sim) = &mut sim {
                sim.apply(shift.tid, shift.to);
            }
            self.apply(shift);
            // Only migrations from or to these two hosts have changed.
            moves.retain(|offer| {
                let mover = &candidates[offer.candidate];
                mover.task.tid != tid
                    && !touched.contains(&mover.from)
                    && !touched.contains(&offer.to)
            });
            self.collect_moves(&candidates, &mut moves, Some(touched));
        }
    }

    /// Returns for a job: the rate of its slowest task before the plan, that rate after the plan,
    /// the number of its tasks, and the longest remaining work.
    fn slowest_task(&self, job: Tid) -> (f64, f64, usize, f64) {
        let index = self.snapshot.hosts.index(self.snapshot.now);
        let (mut rate_before, mut rate_after, mut count, mut longest) =
            (f64::MAX, f64::MAX, 0, 0.0_f64);
        let targets: BTreeMap<Tid, HostId> =
            self.rebalances.iter().map(|s| (s.tid, s.to)).collect();
        for (id, load) in index
            .hosts_of(job)
            .filter_map(|id| Some((id, index.load(id)?)))
        {
            let Some(place) = self.hosts.get(&id) else {
                // The plan changes nothing on these hosts, so the rate there is the same before and
                // after it.
                (rate_before, rate_after) =
                    (rate_before.min(load.rate()), rate_after.min(load.rate()));
                count += index.computing_tasks(id, job);
                continue;
            };
            for task in place
                .host
                .tasks
                .iter()
                .filter(|t| t.job == job && t.computes())
            {
                let to = targets.get(&task.tid).and_then(|to| self.hosts.get(to));
                let rate = |there: &PlannedHost<'_>| {
                    there.rate(there.load.own_tasks, there.external_range.1)
                };
                rate_before = rate_before.min(place.rate(load.own_tasks, place.external_range.0));
                rate_after = rate_after.min(to.map_or(place.source_rate, rate));
                (count, longest) = (count + 1, longest.max(self.work_left(task.tid)));
            }
        }
        (rate_before, rate_after, count, longest)
    }

    /// Sets gain and cost of the migrations of each job with barriers to those of the whole job.
    /// Returns the jobs that gain too little.
    fn evaluate_barrier_jobs(&mut self) -> BTreeSet<Tid> {
        let mut costs = BTreeMap::<Tid, (f64, Vec<usize>)>::new();
        for (i, shift) in self.rebalances.iter().enumerate() {
            let job = self
                .task(shift)
                .map(|t| t.job)
                .filter(|job| self.snapshot.barrier_jobs.contains(job));
            if let Some(job) = job {
                let entry = costs.entry(job).or_default();
                entry.0 += seconds(shift.reason.cost);
                entry.1.push(i);
            }
        }
        let mut without_gain = BTreeSet::new();
        for (job, (cost, moves)) in costs {
            let (rate_before, rate_after, count, longest) = self.slowest_task(job);
            let saved = longest * (1e3 / rate_before - 1e3 / rate_after);
            let (reckoned, cost) = (count as f64 * saved, count as f64 * cost);
            let gain = corrected_gain(reckoned, self.snapshot.confidence(false));
            if gain < self.snapshot.costs.margin() * cost + seconds(GAIN_MIN) {
                without_gain.insert(job);
            }
            for i in moves {
                let why = &mut self.rebalances[i].reason;
                (why.barrier, why.gain, why.cost) = (true, micros(gain), micros(cost));
                why.computed_gain = micros(reckoned);
            }
        }
        without_gain
    }
}

/// Returns the migrations that let tasks finish sooner by more than they cost. Empty if the virtual
/// machine is balanced.
pub fn plan_rebalances(snapshot: &Snapshot) -> Vec<Rebalance> {
    let under_way = snapshot.hosts.index(snapshot.now).migrating_tasks();
    let room = CONCURRENT_MIGRATIONS_MAX.saturating_sub(under_way);
    let mut fixed = BTreeSet::new();
    loop {
        let mut plan = RebalancePlan::new(snapshot, fixed.clone());
        let mut sim = plan.job_sim();
        if let Some(sim) = &mut sim {
            plan.plan_makespan_moves(sim, room);
        }
        plan.plan_task_moves(sim, room);
        let without_gain = plan.evaluate_barrier_jobs();
        if without_gain.is_empty() {
            return plan.rebalances;
        }
        // The tasks of these jobs stay, so the plan is made again. Each round fixes at least one
        // job.
        fixed.extend(without_gain);
    }
}
