//! A plan of rebalancing migrations under construction: its hosts, the expected work of their
//! tasks, and the migrations planned so far. Also the rules of when a task may be rebalanced.
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
/// Cooldown after a rebalancing migration. Doubles with each further one within
/// [`REBALANCES_WINDOW`].
pub const REBALANCE_COOLDOWN: Micros = Micros::from_secs(30);
/// Cooldown before a migration to a host without computing tasks. It is shorter, because such a
/// migration slows down no other task and speeds up the tasks at the source. Doubles with each
/// further migration.
pub const IDLE_TARGET_COOLDOWN: Micros = Micros::from_secs(10);
/// Minimum gain that remains after the cost times the margin is subtracted.
pub(super) const GAIN_MIN: Micros = Micros::from_secs(1);

/// Why a task is rebalanced: rates, gain and cost.
#[derive(Clone, Debug, PartialEq)]
pub struct RebalanceReason {
    /// Rate at the source, in thousandths of an ordinary processor.
    pub source_rate: u64,
    /// Predicted rate at the target, in thousandths of an ordinary processor.
    pub target_rate: u64,
    /// Time that all affected tasks save in total, corrected by the experience with earlier
    /// predictions.
    pub gain: Micros,
    pub cost: Micros,
    /// True if the job's tasks wait for each other at barriers.
    pub barrier: bool,
    /// Time by which the whole job ends sooner. Set only if the completion time of the job was
    /// optimized.
    pub job_ends_sooner_by: Option<Micros>,
    /// Assumed remaining work of the task, in time of an ordinary processor.
    pub work_left: Micros,
    /// True if the remaining work follows from a declaration of the program; false if it is
    /// estimated.
    pub declared: bool,
    /// Computed gain, before the correction by experience.
    pub computed_gain: Micros,
}

impl fmt::Display for RebalanceReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = |n: u64| n as f64 / 1e3;
        let seconds = |span: Micros| span.0 as f64 / 1e6;
        write!(
            f,
            "{:.2} of a processor instead of {:.2}",
            per(self.target_rate),
            per(self.source_rate)
        )?;
        let (gain, cost) = (seconds(self.gain), seconds(self.cost));
        if let Some(sooner) = self.job_ends_sooner_by {
            let sooner = seconds(sooner);
            return write!(
                f,
                " lets its job end {sooner:.1} s sooner, saves its tasks {gain:.1} s and costs {cost:.1} s"
            );
        }
        let of = if self.barrier {
            "its job, whose tasks wait for each other,"
        } else {
            "tasks"
        };
        write!(f, " saves {of} {gain:.1} s and costs {cost:.1} s")
    }
}

/// A migration for performance.
#[derive(Clone, Debug, PartialEq)]
pub struct Rebalance {
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
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
    pub(super) work_left: Vec<f64>,
    /// Sums of the tasks' completion times in seconds: with the lower external load, and with the
    /// upper one.
    pub(super) completion_sums: (f64, f64),
    /// Rate of each task with the lower external load, in thousandths of an ordinary processor.
    pub(super) source_rate: f64,
    /// Rate of each task if one more task ran on the host, with the upper external load, in
    /// thousandths of an ordinary processor.
    pub(super) target_rate: f64,
}

impl PlannedHost<'_> {
    pub(super) fn rate(&self, own: u32, foreign: f64) -> f64 {
        let threads = f64::from(own) + foreign;
        self.load.speed as f64 * (self.load.processors() / threads.max(1e-9)).min(1.0)
    }

    /// Returns the simulated host. Tasks that arrive from hosts outside the plan have unknown work;
    /// each of them counts as an external thread.
    pub(super) fn sim_host(&self, foreign: f64) -> SimHost {
        let unknown = f64::from(self.load.own_tasks) - self.work_left.len() as f64;
        SimHost {
            processors: self.load.processors(),
            speed: self.load.speed as f64 / 1e3,
            external_threads: foreign + unknown.max(0.0),
        }
    }

    /// Returns the sum of the completion times of the host's tasks in seconds.
    pub(super) fn completion_sum(&self, foreign: f64) -> f64 {
        self.sim_host(foreign)
            .completion_sum(self.work_left.len(), self.work_left.iter().copied())
    }

    /// Returns the sum of the completion times in seconds if a task with the remaining work
    /// `leaving_work` leaves the host.
    pub(super) fn completion_sum_without(&self, foreign: f64, leaving_work: f64) -> f64 {
        let Some(at) = self.work_left.iter().position(|left| *left == leaving_work) else {
            return self.completion_sum(foreign);
        };
        let left = self.work_left[..at].iter().chain(&self.work_left[at + 1..]);
        self.sim_host(foreign)
            .completion_sum(self.work_left.len() - 1, left.copied())
    }

    /// Returns the sum of the completion times in seconds if a task with the remaining work
    /// `arriving_work` joins the host.
    pub(super) fn completion_sum_with(&self, foreign: f64, arriving_work: f64) -> f64 {
        let (before, after) = self
            .work_left
            .split_at(self.work_left.partition_point(|left| *left < arriving_work));
        let left = before.iter().chain([&arriving_work]).chain(after);
        self.sim_host(foreign)
            .completion_sum(self.work_left.len() + 1, left.copied())
    }

    /// Updates sums and rates after the tasks of the host have changed.
    pub(super) fn recompute(&mut self) {
        self.completion_sums = (
            self.completion_sum(self.external_range.0),
            self.completion_sum(self.external_range.1),
        );
        self.source_rate = self.rate(self.load.own_tasks, self.external_range.0);
        self.target_rate = self.rate(self.load.own_tasks + 1, self.external_range.1);
    }
}

/// A plan of rebalancing migrations under construction, with the hosts that it considers.
pub(super) struct RebalancePlan<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) hosts: BTreeMap<HostId, PlannedHost<'a>>,
    /// Expected remaining work of each task on the hosts of the plan.
    pub(super) expected: BTreeMap<Tid, ExpectedWork>,
    /// Jobs without barriers in which all tasks have declared work.
    pub(super) declared_jobs: BTreeSet<Tid>,
    /// Jobs with barriers that gain nothing from migrations, so their tasks stay.
    pub(super) fixed_jobs: BTreeSet<Tid>,
    pub(super) migrated: BTreeMap<Tid, HostId>,
    pub(super) rebalances: Vec<Rebalance>,
    /// Cache of the zones of a task's peers, by the task's host and job.
    pub(super) peer_zones: RefCell<BTreeMap<(HostId, Tid), BTreeSet<u32>>>,
}

impl RebalancePlan<'_> {
    pub(super) fn work_left(&self, task: Tid) -> f64 {
        self.expected
            .get(&task)
            .map_or(0.0, |expected| expected.work_left)
    }

    /// Adds a migration to the plan. If there is a simulation of the plan's jobs, the caller adds
    /// the migration there too.
    pub(super) fn apply(&mut self, rebalance: Rebalance) {
        let left = self.work_left(rebalance.tid);
        for (id, one_more) in [(rebalance.from, false), (rebalance.to, true)] {
            let planned = self
                .hosts
                .get_mut(&id)
                .expect("the plan migrates tasks between its own hosts");
            if one_more {
                planned.load.own_tasks += 1;
                planned
                    .work_left
                    .insert(planned.work_left.partition_point(|l| *l < left), left);
            } else {
                planned.load.own_tasks -= 1;
                if let Some(at) = planned.work_left.iter().position(|l| *l == left) {
                    planned.work_left.remove(at);
                }
            }
            planned.recompute();
        }
        self.migrated.insert(rebalance.tid, rebalance.to);
        self.rebalances.push(rebalance);
    }
}

/// Expected remaining work of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedWork {
    /// Remaining work in seconds of an ordinary processor.
    pub(super) work_left: f64,
    /// True if the remaining work follows from a declaration of the program; false if it is
    /// estimated.
    pub(super) declared: bool,
}

pub(super) fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

pub(super) fn micros(seconds: f64) -> Micros {
    Micros((seconds.max(0.0) * 1e6) as u64)
}

/// Corrects a positive gain by the factor `confidence`. A loss is not reduced.
pub(super) fn corrected_gain(gain: f64, confidence: f64) -> f64 {
    if gain > 0.0 { gain * confidence } else { gain }
}

/// Returns the number of rebalancing migrations of the task within [`REBALANCES_WINDOW`].
fn recent_rebalances(now: Micros, task: &TaskView) -> usize {
    task.recent_rebalances
        .iter()
        .filter(|at| now.since(**at) < REBALANCES_WINDOW)
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
    after_move: Micros,
    after_shift: Micros,
) -> Micros {
    let rest = Micros(
        after_shift.0
            << recent_rebalances(now, task)
                .saturating_sub(1)
                .min(REBALANCES_MAX),
    );
    let after_moves = task.recent_migrations.iter().map(|at| *at + after_move);
    let after_shifts = task.recent_rebalances.iter().map(|at| *at + rest);
    after_moves
        .chain(after_shifts)
        .fold(task.started_at + COOLDOWN, Micros::max)
}

/// Returns the number of rebalancing migrations that the task may still make; 0 if it must stay.
pub(super) fn rebalances_left(now: Micros, task: &TaskView) -> usize {
    let together = task
        .constraints
        .as_ref()
        .map_or(Colocation::Any, |w| w.colocation);
    let stays = !task.computes() || task.host_named || together != Colocation::Any;
    if stays {
        0
    } else {
        REBALANCES_MAX.saturating_sub(recent_rebalances(now, task))
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

/// True if nothing but a cooldown prevents rebalancing.
fn may_rebalance_after_cooldown(now: Micros, task: &TaskView) -> bool {
    task.migrating.is_none()
        && task.obstacle.as_ref().is_none_or(|held| held.until <= now)
        && rebalances_left(now, task) > 0
}
