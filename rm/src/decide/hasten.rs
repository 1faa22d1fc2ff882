//! Migrations that reduce the completion time of a whole job (its makespan), for jobs with declared
//! work.
//!
//! A candidate migrates a task that would end last to a host where it ends sooner. Alternatively it
//! exchanges the task with another one, or migrates a task that shares the host with it. Each
//! candidate is evaluated by simulating the hosts with it and without it ([`super::farm`]).

use super::balance::{
    GAIN_MIN, Plan, Shift, ShiftWhy, may_shift, micros, rests_until, seconds, shifts_left, worth,
};
use super::farm::{Future, Machine, Outcome, Piece};
use super::moves::unfit;
use super::{Snapshot, TaskView, slowness};
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

/// Maximum number of tasks on the hosts of the plan. If there are more, a single task has little
/// effect, and only [`super::balance`] plans migrations.
const TASKS_MAX: usize = 64;
/// Maximum number of tasks examined: those that would end last.
const LAST_MAX: usize = 8;
/// Number of the examined tasks for which an exchange with another task is also tried.
const EXCHANGES_MAX: usize = 2;
/// Maximum fluctuation of a host's external load, in threads. Above it the load is unpredictable,
/// and the host is neither source nor target.
const UNSTEADY: f64 = 1.0;
/// A job counts as delayed if its end is later by at least this factor.
const DELAY: f64 = 1.001;
/// Minimum reduction of the job's remaining time, as a fraction of that time.
const SOONER: f64 = 0.03;
/// Maximum number of simulation steps for the search for migrations in one plan.
const STEPS_MAX: usize = 700;
/// Maximum number of simulation steps in one plan, including the checks whether migrations delay a
/// job. After them, tasks of jobs with declared work do not migrate.
const ALL_STEPS_MAX: usize = 2 * STEPS_MAX;

/// Simulation of all hosts and tasks of the plan, with the migrations planned so far.
pub(super) struct Farm<'a> {
    hosts: Vec<HostId>,
    tasks: Vec<&'a TaskView>,
    start: Future,
    /// Cost of a migration in seconds, and for this cost the time when each task ends if the plan
    /// gets no further migration.
    ends: Option<(f64, Vec<f64>)>,
    /// Simulation in which candidates are tried. Its memory is reused.
    tried: Future,
}

/// A candidate: the migration of one task, and optionally a second one in exchange. Each migration
/// is a pair (index of the task, index of the target).
#[derive(Clone, Copy, Debug)]
struct Step {
    first: (usize, usize),
    other: Option<(usize, usize)>,
}

impl Step {
    fn moves(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        [Some(self.first), self.other].into_iter().flatten()
    }
}

impl Farm<'_> {
    /// Selects the job whose completion time is optimized. Returns the outcome without a further
    /// migration.
    fn ask(&mut self, job: Tid, snapshot: &Snapshot) -> Outcome {
        // Estimates the cost of migrations that the simulation itself makes. Their hosts are
        // unknown, so the mean processor share per task is used.
        let all: f64 = self
            .start
            .machines()
            .iter()
            .map(|machine| machine.processors * machine.speed)
            .sum();
        let share = 1e3 * all / self.tasks.len().max(1) as f64;
        let of_job = self.tasks.iter().filter(|task| task.job == job);
        let estimates = &snapshot.estimates;
        let bytes = of_job.map(|task| estimates.bytes(&task.name, task.bytes));
        let costs = bytes.map(|bytes| seconds(estimates.cost(bytes, slowness(share, share), None)));
        let cost = costs.fold(0.0, f64::max);
        self.start.ask(|i| self.tasks[i].job == job, cost);
        if self.ends.as_ref().is_none_or(|(of, _)| *of != cost) {
            let ends = self.tried([]).ends().to_vec();
            self.ends = Some((cost, ends));
        }
        let ends = self
            .ends
            .iter()
            .flat_map(|(_, ends)| ends)
            .zip(self.start.pieces());
        ends.fold(Outcome::default(), |sum, (ends, piece)| {
            match piece.counts {
                true => Outcome {
                    end: sum.end.max(*ends),
                    ..sum
                },
                false => Outcome {
                    others: sum.others + ends,
                    ..sum
                },
            }
        })
    }

    /// Returns a simulation in which these migrations are made at the start.
    fn tried(&mut self, moves: impl IntoIterator<Item = (usize, usize)>) -> &mut Future {
        self.tried.become_like(&self.start);
        moves
            .into_iter()
            .for_each(|(task, to)| self.tried.go(task, to));
        &mut self.tried
    }

    /// Adds a migration of the plan to the simulation.
    pub(super) fn take(&mut self, task: Tid, to: HostId) {
        let i = self.tasks.iter().position(|t| t.tid == task);
        let to = self.hosts.iter().position(|host| *host == to);
        i.zip(to)
            .into_iter()
            .for_each(|(i, to)| self.start.has_gone(i, to));
        self.ends = None;
    }
}

impl<'a> Plan<'a> {
    /// Returns the simulation of the plan's hosts and tasks. `None` if no job has declared work or
    /// there are more than [`TASKS_MAX`] tasks.
    pub(super) fn farm(&mut self) -> Option<Farm<'a>> {
        self.told = self.told_jobs();
        if self.told.is_empty() {
            return None;
        }
        let hosts: Vec<HostId> = self.places.keys().copied().collect();
        let machines: Vec<Machine> = self
            .places
            .values()
            .map(|place| place.machine(place.foreign_mean))
            .collect();
        let now = self.snapshot.now;
        let (mut pieces, mut tasks) = (Vec::new(), Vec::new());
        for place in self.places.values() {
            for task in place.host.tasks.iter().filter(|task| task.computes()) {
                let at = task.moving.flatten().unwrap_or(place.host.id);
                let Ok(at) = hosts.binary_search(&at) else {
                    continue;
                };
                let moves = if self.fixed.contains(&task.job) {
                    0
                } else {
                    shifts_left(now, task)
                };
                let rests = seconds(rests_until(now, task).since(now));
                pieces.push(Piece {
                    at,
                    left: self.left(task.tid),
                    moves,
                    rests,
                    counts: false,
                });
                tasks.push(task);
            }
        }
        let few = pieces.len() <= TASKS_MAX;
        let (start, tried) = (Future::of(machines, pieces), Future::default());
        few.then_some(Farm {
            hosts,
            tasks,
            start,
            ends: None,
            tried,
        })
    }

    /// Returns the jobs whose work is declared for all tasks, except jobs with barriers.
    fn told_jobs(&self) -> BTreeSet<Tid> {
        let tasks = || {
            self.places
                .values()
                .flat_map(|p| &p.host.tasks)
                .filter(|t| t.computes())
        };
        let untold: BTreeSet<Tid> = tasks()
            .filter(|t| !self.expected.get(&t.tid).is_some_and(|e| e.told))
            .map(|t| t.job)
            .collect();
        let fits = |job: &Tid| !untold.contains(job) && !self.snapshot.barriers.contains(job);
        tasks().map(|t| t.job).filter(fits).collect()
    }

    /// True if a migration delays the end of the task's job. False for jobs without declared work.
    pub(super) fn delays(&self, farm: &mut Farm<'a>, task: &TaskView, to: HostId) -> bool {
        if !self.told.contains(&task.job) {
            return false;
        }
        let i = farm.tasks.iter().position(|t| t.tid == task.tid);
        let (Some(i), Ok(to)) = (i, farm.hosts.binary_search(&to)) else {
            return false;
        };
        if farm.tried.steps() >= ALL_STEPS_MAX {
            return true;
        }
        let before = farm.ask(task.job, self.snapshot);
        farm.tried([(i, to)]).ends_after(before.end * DELAY)
    }

    /// Adds migrations to the plan that reduce the completion time of jobs. `room`: maximum number
    /// of migrations in the plan.
    pub(super) fn hasten(&mut self, farm: &mut Farm<'a>, room: usize) {
        let jobs: Vec<Tid> = self.told.iter().copied().collect();
        for (i, job) in jobs.iter().enumerate() {
            // Each job gets an equal part of the remaining simulation steps.
            let done = farm.tried.steps();
            let most = done + STEPS_MAX.saturating_sub(done) / (jobs.len() - i);
            while self.shifts.len() + 2 <= room {
                let Some(shifts) = self.hasten_once(farm, *job, most) else {
                    break;
                };
                shifts
                    .into_iter()
                    .for_each(|shift| self.take(shift, Some(&mut *farm)));
            }
        }
    }

    fn hasten_once(&self, farm: &mut Farm<'a>, job: Tid, most_steps: usize) -> Option<Vec<Shift>> {
        let (before, margin) = (farm.ask(job, self.snapshot), self.snapshot.costs.margin());
        let count = farm.start.pieces().iter().filter(|p| p.counts).count() as f64;
        let trust = self.snapshot.trust(true);
        let mut best = None::<(f64, Step, (f64, f64), f64)>;
        for step in self.steps(farm, job) {
            if farm.tried.steps() >= most_steps {
                break;
            }
            if !self.fits(farm, &step) {
                continue;
            }
            let cost: f64 = step.moves().map(|(i, to)| self.cost(farm, i, to)).sum();
            let most = best.map(|(most, ..)| most);
            // Every task of the job gains the time by which the job ends sooner. Tasks of other
            // jobs at the target lose time.
            let gain =
                |after: Outcome| count * (before.end - after.end) + before.others - after.others;
            let is_best = |after: Outcome| {
                let net = worth(gain(after), trust) - margin * cost;
                let pays =
                    net >= seconds(GAIN_MIN) && before.end - after.end >= SOONER * before.end;
                pays && most.is_none_or(|most| net > most)
            };
            let after = farm
                .tried(step.moves())
                .outcome_unless(|after| !is_best(after));
            let Some(after) = after else { continue };
            best = Some((
                worth(gain(after), trust) - margin * cost,
                step,
                (gain(after), cost),
                before.end - after.end,
            ));
        }
        best.map(|(_, step, weighed, sooner)| self.shifts_of(farm, &step, weighed, sooner))
    }

    /// Returns the cost in seconds of migrating task `i` to host `to`; both are indices.
    fn cost(&self, farm: &Farm<'_>, i: usize, to: usize) -> f64 {
        let (from, to) = (farm.hosts[farm.start.pieces()[i].at], farm.hosts[to]);
        let (has, gets) = self.rates(from, to);
        let (source, target) = (self.places[&from].host, self.places[&to].host);
        seconds(
            self.snapshot
                .cost(farm.tasks[i], source, target, slowness(has, gets)),
        )
    }

    /// Returns the rate of a task at its source and the predicted rate at its target, in
    /// thousandths of an ordinary processor.
    fn rates(&self, from: HostId, to: HostId) -> (f64, f64) {
        (self.places[&from].has, self.places[&to].gets)
    }

    fn shifts_of(
        &self,
        farm: &Farm<'_>,
        step: &Step,
        (gain, cost): (f64, f64),
        sooner: f64,
    ) -> Vec<Shift> {
        let shift = |(i, to): (usize, usize)| {
            let (from, to) = (farm.hosts[farm.start.pieces()[i].at], farm.hosts[to]);
            let (has, gets) = self.rates(from, to);
            let (has, gets) = (has as u64, gets as u64);
            let (reckoned, cost, sooner) = (micros(gain), micros(cost), Some(micros(sooner)));
            let (left, told) = (micros(farm.start.pieces()[i].left), true);
            let gain = micros(worth(gain, self.snapshot.trust(told)));
            let why = ShiftWhy {
                has,
                gets,
                gain,
                cost,
                barrier: false,
                sooner,
                left,
                told,
                reckoned,
            };
            Shift {
                tid: farm.tasks[i].tid,
                from,
                to,
                why,
            }
        };
        step.moves().map(shift).collect()
    }

    /// Returns the candidates for a job, the most promising first.
    ///
    /// A task that would end last migrates alone or in exchange for another task, or a task that
    /// shares its host migrates.
    fn steps(&self, farm: &Farm<'_>, job: Tid) -> Vec<Step> {
        let pieces = farm.start.pieces();
        let mut on = vec![Vec::new(); farm.hosts.len()];
        pieces
            .iter()
            .enumerate()
            .for_each(|(i, piece)| on[piece.at].push(i));
        let of_job = |i: &usize| farm.tasks[*i].job == job;
        let ends = |i: usize| {
            let piece = pieces[i];
            // The host also does the work of shorter tasks until they end.
            let before: f64 = on[piece.at]
                .iter()
                .map(|other| pieces[*other].left.min(piece.left))
                .sum();
            let machine = farm.start.machines()[piece.at];
            (before / (machine.speed * machine.processors).max(1e-9))
                .max(piece.left / machine.speed.max(1e-9))
        };
        let ends: Vec<f64> = (0..pieces.len())
            .map(|i| if of_job(&i) { ends(i) } else { 0.0 })
            .collect();
        let now = self.snapshot.now;
        let free = |i: &usize| {
            let task = farm.tasks[*i];
            of_job(i) && may_shift(now, task) && !self.moved.contains_key(&task.tid)
        };
        let mut last: Vec<usize> = (0..pieces.len()).filter(of_job).collect();
        last.sort_by(|a, b| ends[*b].total_cmp(&ends[*a]));
        last.truncate(LAST_MAX);
        let mut movers = last.clone();
        let beside = |i: &usize| last.iter().any(|l| pieces[*l].at == pieces[*i].at);
        movers.extend(
            (0..pieces.len())
                .filter(|i| !last.contains(i))
                .filter(beside),
        );
        let steady = |at: usize| {
            let (least, most) = self.places[&farm.hosts[at]].foreign;
            most - least <= UNSTEADY
        };
        let steady: Vec<bool> = (0..farm.hosts.len()).map(steady).collect();
        let goes = |i: usize, to: usize| to != pieces[i].at && steady[to] && steady[pieces[i].at];
        // Time until the task ends on the host, if all other tasks stay and share the host with it
        // until then.
        let there = |i: usize, to: usize, tasks: usize| {
            pieces[i].left / farm.start.machines()[to].rate(tasks)
        };
        let mut steps = Vec::new();
        for i in movers.into_iter().filter(free) {
            for to in (0..farm.hosts.len()).filter(|to| goes(i, *to)) {
                steps.push((
                    ends[i] - there(i, to, on[to].len() + 1),
                    Step {
                        first: (i, to),
                        other: None,
                    },
                ));
                if !last.iter().take(EXCHANGES_MAX).any(|l| *l == i) {
                    continue;
                }
                let from = pieces[i].at;
                for o in on[to].iter().copied().filter(|o| free(o) && goes(*o, from)) {
                    let later = there(i, to, on[to].len()).max(there(o, from, on[from].len()));
                    steps.push((
                        ends[i] - later,
                        Step {
                            first: (i, to),
                            other: Some((o, from)),
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
    fn fits(&self, farm: &Farm<'_>, step: &Step) -> bool {
        let host = |at: usize| self.places[&farm.hosts[at]].host;
        let from = |i: usize| host(farm.start.pieces()[i].at);
        step.moves()
            .all(|(i, to)| unfit(self.snapshot, host(to), from(i), farm.tasks[i], true).is_none())
    }
}
