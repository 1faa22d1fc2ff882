//! A plan of rebalancing migrations under construction: its hosts, the expected work of their
//! tasks, and the migrations planned so far. Also contains the rules by which a task may be
//! rebalanced.
//!
//! [`super::rebalance`] and [`super::makespan_moves`] add migrations to a plan.

use super::host_load::HostLoad;
use super::makespan_sim::SimHost;
use super::{Colocation, HostView, Snapshot, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Maximum number of rebalancing migrations of one task within [`REBALANCES_WINDOW`].
pub const REBALANCES_MAX: usize = 4;
/// Time window in which [`REBALANCES_MAX`] applies.
pub const REBALANCES_WINDOW: Micros = Micros::from_secs(3600);
/// Cooldown of a task after its start and after each migration of any cause.
pub const COOLDOWN: Micros = Micros::from_secs(20);
/// Cooldown after a rebalancing migration. Doubles with each further rebalancing migration within
/// [`REBALANCES_WINDOW`].
pub const REBALANCE_COOLDOWN: Micros = Micros::from_secs(30);
/// Cooldown before a migration to a host without computing tasks. It is shorter than
/// [`REBALANCE_COOLDOWN`], because such a migration slows down no other task and speeds up the
/// tasks at the source. Doubles with each further migration.
pub const IDLE_TARGET_COOLDOWN: Micros = Micros::from_secs(10);
/// Minimum of the gain minus the cost times the margin.
pub(super) const GAIN_MIN: Micros = Micros::from_secs(1);

/// Reason why a task is rebalanced: rates, gain and cost.
#[derive(Clone, Debug, PartialEq)]
pub struct RebalanceReason {
    /// Rate at the source, in thousandths of an ordinary processor.
    pub source_rate_permille: u64,
    /// Predicted rate at the target, in thousandths of an ordinary processor.
    pub target_rate_permille: u64,
    /// Time that all affected tasks save in total, corrected by the ratio learned from earlier
    /// predictions.
    pub gain: Micros,
    pub cost: Micros,
    /// True if gain and cost are those of a whole job whose tasks wait for each other at barriers.
    pub for_barrier_job: bool,
    /// Time by which the whole job ends sooner. `None` if the completion time of the job was not
    /// optimized.
    pub job_time_saved: Option<Micros>,
    /// Assumed remaining work of the task, in time of an ordinary processor.
    pub work_left: Micros,
    /// True if the remaining work follows from a declaration of the program; false if it is
    /// estimated.
    pub declared: bool,
    /// Computed gain, without the correction learned from earlier predictions.
    pub computed_gain: Micros,
}

impl fmt::Display for RebalanceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let processors = |n: u64| n as f64 / 1e3;
        let seconds = |duration: Micros| duration.0 as f64 / 1e6;
        write!(
            f,
            "{:.2} of a processor instead of {:.2}",
            processors(self.target_rate_permille),
            processors(self.source_rate_permille)
        )?;
        let (gain, cost) = (seconds(self.gain), seconds(self.cost));
        if let Some(reduction) = self.job_time_saved {
            let reduction = seconds(reduction);
            return write!(
                f,
                " lets its job end {reduction:.1} s sooner, saves its tasks {gain:.1} s and costs {cost:.1} s"
            );
        }
        let beneficiary = if self.for_barrier_job {
            "its job, whose tasks wait for each other,"
        } else {
            "tasks"
        };
        write!(f, " saves {beneficiary} {gain:.1} s and costs {cost:.1} s")
    }
}

/// A migration that makes tasks finish sooner.
#[derive(Clone, Debug, PartialEq)]
pub struct Rebalance {
    pub tid: Tid,
    pub source: HostId,
    pub target: HostId,
    pub reason: RebalanceReason,
}

/// State of one host during planning.
#[derive(Clone, Debug)]
pub(super) struct PlannedHost<'a> {
    pub(super) host: &'a HostView,
    pub(super) load: HostLoad,
    /// Lower and upper estimate of the external load, in threads.
    pub(super) external_range: (f64, f64),
    pub(super) external_mean: f64,
    /// Remaining work of each task of the virtual machine on the host, in seconds of an ordinary
    /// processor, in ascending order.
    pub(super) works_left_s: Vec<f64>,
    /// Sums of the tasks' completion times in seconds: with the lower external load, and with the
    /// upper one.
    pub(super) completion_sums: (f64, f64),
    /// Rate of each task with the lower external load, in thousandths of an ordinary processor.
    pub(super) source_rate_permille: f64,
    /// Rate of each task if one more task ran on the host, with the upper external load, in
    /// thousandths of an ordinary processor.
    pub(super) target_rate_permille: f64,
}

impl PlannedHost<'_> {
    pub(super) fn rate(&self, task_count: u32, external_load: f64) -> f64 {
        let threads = f64::from(task_count) + external_load;
        self.load.speed_permille as f64 * (self.load.processors() / threads.max(1e-9)).min(1.0)
    }

    /// Returns the host for the simulation. The remaining work of tasks that arrive from hosts
    /// outside the plan is not known. Each of these tasks counts as an external thread.
    pub(super) fn sim_host(&self, external_load: f64) -> SimHost {
        let unknown_task_count =
            f64::from(self.load.vm_task_count) - self.works_left_s.len() as f64;
        SimHost {
            processors: self.load.processors(),
            speed: self.load.speed_permille as f64 / 1e3,
            external_threads: external_load + unknown_task_count.max(0.0),
        }
    }

    /// Returns the sum of the completion times of the host's tasks in seconds.
    pub(super) fn completion_sum(&self, external_load: f64) -> f64 {
        self.sim_host(external_load)
            .completion_sum(self.works_left_s.len(), self.works_left_s.iter().copied())
    }

    /// Returns the sum of the completion times in seconds if a task with the remaining work
    /// `leaving_work` leaves the host.
    pub(super) fn completion_sum_without(&self, external_load: f64, leaving_work: f64) -> f64 {
        let Some(index) = self
            .works_left_s
            .iter()
            .position(|listed_work| *listed_work == leaving_work)
        else {
            return self.completion_sum(external_load);
        };
        let remaining_works_s = self.works_left_s[..index]
            .iter()
            .chain(&self.works_left_s[index + 1..]);
        self.sim_host(external_load)
            .completion_sum(self.works_left_s.len() - 1, remaining_works_s.copied())
    }

    /// Returns the sum of the completion times in seconds if a task with the remaining work
    /// `arriving_work` joins the host.
    pub(super) fn completion_sum_with(&self, external_load: f64, arriving_work: f64) -> f64 {
        let (shorter_works, longer_works) = self.works_left_s.split_at(
            self.works_left_s
                .partition_point(|works| *works < arriving_work),
        );
        let works = shorter_works
            .iter()
            .chain([&arriving_work])
            .chain(longer_works);
        self.sim_host(external_load)
            .completion_sum(self.works_left_s.len() + 1, works.copied())
    }

    /// Updates sums and rates after a change of the host's tasks.
    pub(super) fn recompute(&mut self) {
        self.completion_sums = (
            self.completion_sum(self.external_range.0),
            self.completion_sum(self.external_range.1),
        );
        self.source_rate_permille = self.rate(self.load.vm_task_count, self.external_range.0);
        self.target_rate_permille = self.rate(self.load.vm_task_count + 1, self.external_range.1);
    }
}

/// A plan of rebalancing migrations under construction, with the hosts between which the plan
/// migrates tasks.
pub(super) struct RebalancePlan<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) hosts: BTreeMap<HostId, PlannedHost<'a>>,
    /// Expected remaining work of each task on the hosts of the plan.
    pub(super) expected_work: BTreeMap<Tid, ExpectedWork>,
    /// Jobs without barriers in which all tasks have declared work.
    pub(super) declared_jobs: BTreeSet<Tid>,
    /// Jobs with barriers that gain nothing from migrations, so their tasks stay.
    pub(super) fixed_jobs: BTreeSet<Tid>,
    pub(super) targets_by_task: BTreeMap<Tid, HostId>,
    pub(super) rebalances: Vec<Rebalance>,
    /// Cache of the zones of a task's peers, by the task's host and job.
    pub(super) peer_zones: RefCell<BTreeMap<(HostId, Tid), BTreeSet<u32>>>,
}

impl RebalancePlan<'_> {
    pub(super) fn work_left(&self, tid: Tid) -> f64 {
        self.expected_work
            .get(&tid)
            .map_or(0.0, |work_estimate| work_estimate.work_left_s)
    }

    /// Adds a migration to the plan. If there is a simulation of the plan's jobs, the caller must
    /// add the migration to the simulation too.
    pub(super) fn add_rebalance(&mut self, rebalance: Rebalance) {
        let task_work = self.work_left(rebalance.tid);
        for (id, is_target) in [(rebalance.source, false), (rebalance.target, true)] {
            let planned_host = self
                .hosts
                .get_mut(&id)
                .expect("the plan migrates tasks between its own hosts");
            if is_target {
                planned_host.load.vm_task_count += 1;
                planned_host.works_left_s.insert(
                    planned_host
                        .works_left_s
                        .partition_point(|l| *l < task_work),
                    task_work,
                );
            } else {
                planned_host.load.vm_task_count -= 1;
                if let Some(index) = planned_host
                    .works_left_s
                    .iter()
                    .position(|l| *l == task_work)
                {
                    planned_host.works_left_s.remove(index);
                }
            }
            planned_host.recompute();
        }
        self.targets_by_task.insert(rebalance.tid, rebalance.target);
        self.rebalances.push(rebalance);
    }
}

/// Expected remaining work of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedWork {
    /// Remaining work in seconds of an ordinary processor.
    pub(super) work_left_s: f64,
    /// True if the remaining work follows from a declaration of the program; false if it is
    /// estimated.
    pub(super) declared: bool,
}

pub(super) fn seconds(duration: Micros) -> f64 {
    duration.0 as f64 / 1e6
}

pub(super) fn micros(seconds: f64) -> Micros {
    Micros((seconds.max(0.0) * 1e6) as u64)
}

/// Multiplies a positive gain by the factor `confidence`. A loss is returned unchanged.
pub(super) fn corrected_gain(gain: f64, confidence: f64) -> f64 {
    if gain > 0.0 { gain * confidence } else { gain }
}

/// Returns the number of rebalancing migrations of the task within [`REBALANCES_WINDOW`].
fn recent_rebalance_count(now: Micros, task: &TaskView) -> usize {
    task.recent_rebalances
        .iter()
        .filter(|migrated_at| now.since(**migrated_at) < REBALANCES_WINDOW)
        .count()
}

/// Returns the time when the task's cooldown ends, for targets on which other tasks run.
pub(super) fn cooldown_end(now: Micros, task: &TaskView) -> Micros {
    latest_cooldown_end(now, task, COOLDOWN, REBALANCE_COOLDOWN)
}

/// Returns the time when the task's cooldown ends, for targets without computing tasks.
fn cooldown_end_for_idle_target(now: Micros, task: &TaskView) -> Micros {
    latest_cooldown_end(now, task, IDLE_TARGET_COOLDOWN, IDLE_TARGET_COOLDOWN)
}

fn latest_cooldown_end(
    now: Micros,
    task: &TaskView,
    migration_cooldown: Micros,
    rebalance_cooldown: Micros,
) -> Micros {
    let scaled_cooldown = Micros(
        rebalance_cooldown.0
            << recent_rebalance_count(now, task)
                .saturating_sub(1)
                .min(REBALANCES_MAX),
    );
    let migration_cooldown_ends = task
        .recent_migrations
        .iter()
        .map(|migrated_at| *migrated_at + migration_cooldown);
    let rebalance_cooldown_ends = task
        .recent_rebalances
        .iter()
        .map(|migrated_at| *migrated_at + scaled_cooldown);
    migration_cooldown_ends
        .chain(rebalance_cooldown_ends)
        .fold(task.started_at + COOLDOWN, Micros::max)
}

/// Returns the number of rebalancing migrations that the task may still make; 0 if the task must
/// stay on its host.
pub(super) fn rebalances_left(now: Micros, task: &TaskView) -> usize {
    let colocation_rule = task
        .constraints
        .as_ref()
        .map_or(Colocation::Any, |w| w.colocation);
    let is_fixed = !task.computes() || task.host_named || colocation_rule != Colocation::Any;
    if is_fixed {
        0
    } else {
        REBALANCES_MAX.saturating_sub(recent_rebalance_count(now, task))
    }
}

/// True if the task may be rebalanced at `now` to any host.
pub(super) fn may_rebalance(now: Micros, task: &TaskView) -> bool {
    may_rebalance_after_cooldown(now, task) && cooldown_end(now, task) <= now
}

/// True if the task may be rebalanced at `now` to a host without computing tasks.
pub(super) fn may_rebalance_to_idle(now: Micros, task: &TaskView) -> bool {
    may_rebalance_after_cooldown(now, task) && cooldown_end_for_idle_target(now, task) <= now
}

/// True if the task may be rebalanced as soon as its cooldown has ended.
fn may_rebalance_after_cooldown(now: Micros, task: &TaskView) -> bool {
    task.migration.is_none()
        && task
            .migration_obstacle
            .as_ref()
            .is_none_or(|migration_obstacle| migration_obstacle.until <= now)
        && rebalances_left(now, task) > 0
}
