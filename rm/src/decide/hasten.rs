//! Moves that make a whole job end sooner: where the work of its tasks is known, those that would end last go where they end
//! sooner, or others make room for them. Each move is weighed by letting time pass with it and without ([`super::farm`]).

use super::balance::{GAIN_MIN, Plan, Shift, ShiftWhy, may_shift, rests_until, seconds, shifts_left};
use super::farm::{Machine, Outcome, Piece, outcome, outcome_unless};
use super::moves::unfit;
use super::{TaskView, slowness};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Jobs on hosts with more tasks than this are left to [`super::balance`]: with so many each counts little.
const TASKS_MAX: usize = 64;
/// Tasks that would end last that are looked at.
const LAST_MAX: usize = 8;
/// Of those, as many are exchanged for another task.
const EXCHANGES_MAX: usize = 2;
/// Where load that is not ours is so many threads off its mean, nobody knows what it will be, and tasks neither come nor go.
const UNSTEADY: f64 = 1.0;
/// A later end than this many times the other one is a later end.
const DELAY: f64 = 1.001;
/// The job must end sooner by this part of the time that it has left.
const SOONER: f64 = 0.03;

/// What time passes in: all hosts of the plan and all their tasks; what a move costs a task of the job, in seconds.
struct Farm<'a> {
    hosts: Vec<HostId>,
    machines: Vec<Machine>,
    pieces: Vec<Piece>,
    tasks: Vec<&'a TaskView>,
    cost: f64,
}

/// One or two moves, as places in the lists of tasks and of hosts.
type Step = Vec<(usize, usize)>;

impl Farm<'_> {
    fn with(&self, step: &[(usize, usize)]) -> Outcome {
        outcome(&self.machines, &self.pieces_with(step), self.cost)
    }

    fn pieces_with(&self, step: &[(usize, usize)]) -> Vec<Piece> {
        let mut pieces = self.pieces.clone();
        for (task, to) in step {
            let there = pieces.iter().filter(|piece| piece.at == *to).count();
            pieces[*task].go(*to, self.cost * self.machines[*to].rate(there + 1), 0.0);
        }
        pieces
    }
}

impl<'a> Plan<'a> {
    /// The hosts and tasks of the plan as they are with the moves planned so far; the end asked for is that of `job`.
    fn farm(&self, job: Tid) -> Option<Farm<'a>> {
        let hosts: Vec<HostId> = self.places.keys().copied().collect();
        let index: BTreeMap<HostId, usize> = hosts.iter().enumerate().map(|(i, id)| (*id, i)).collect();
        let machines: Vec<Machine> = self.places.values().map(|place| place.machine(place.foreign_mean)).collect();
        let now = self.snapshot.now;
        let (mut pieces, mut tasks) = (Vec::new(), Vec::new());
        for place in self.places.values() {
            for task in place.host.tasks.iter().filter(|task| task.computes()) {
                let at = task.moving.flatten().unwrap_or(place.host.id);
                let Some(at) = index.get(&at).copied() else { continue };
                let moves = if self.fixed.contains(&task.job) { 0 } else { shifts_left(now, task) };
                let rests = seconds(rests_until(now, task).since(now));
                let mut piece = Piece { at, left: self.left(task.tid), moves, rests, counts: task.job == job };
                if let Some(to) = self.moved.get(&task.tid) {
                    piece.go(index[to], 0.0, 0.0);
                }
                pieces.push(piece);
                tasks.push(task);
            }
        }
        // Of the moves that come later only this much is known.
        let all: f64 = machines.iter().map(|machine| machine.processors * machine.speed).sum();
        let share = 1e3 * all / pieces.len().max(1) as f64;
        let of_job = tasks.iter().filter(|t| t.job == job);
        let cost = of_job.map(|t| seconds(self.snapshot.estimates.cost(t.bytes, slowness(share, share))));
        let cost = cost.fold(0.0, f64::max);
        (pieces.len() <= TASKS_MAX).then_some(Farm { hosts, machines, pieces, tasks, cost })
    }

    /// Jobs that have all their work told.
    fn told_jobs(&self) -> BTreeSet<Tid> {
        let tasks = || self.places.values().flat_map(|p| &p.host.tasks).filter(|t| t.computes());
        let untold: BTreeSet<Tid> =
            tasks().filter(|t| !self.expected.get(&t.tid).is_some_and(|e| e.told)).map(|t| t.job).collect();
        let fits = |job: &Tid| !untold.contains(job) && !self.snapshot.barriers.contains(job);
        tasks().map(|t| t.job).filter(fits).collect()
    }

    /// True when a move delays the end of the task's job, of which all is known.
    pub(super) fn delays(&self, task: &TaskView, to: HostId) -> bool {
        if !self.told.contains(&task.job) {
            return false;
        }
        let Some(farm) = self.farm(task.job) else { return false };
        let place = |id: HostId| farm.hosts.iter().position(|h| *h == id);
        let (Some(i), Some(to)) = (farm.tasks.iter().position(|t| t.tid == task.tid), place(to)) else { return false };
        farm.with(&[(i, to)]).end > farm.with(&[]).end * DELAY
    }

    /// Moves for the sake of the ends of jobs.
    pub(super) fn hasten(&mut self, room: usize) {
        self.told = self.told_jobs();
        for job in self.told.clone() {
            while self.shifts.len() + 2 <= room {
                let Some(shifts) = self.hasten_once(job) else { break };
                shifts.into_iter().for_each(|shift| self.take(shift));
            }
        }
    }

    fn hasten_once(&self, job: Tid) -> Option<Vec<Shift>> {
        let farm = self.farm(job)?;
        let (before, margin) = (farm.with(&[]), self.snapshot.costs.margin());
        let count = farm.pieces.iter().filter(|p| p.counts).count() as f64;
        let cost_of = |&(i, to): &(usize, usize)| {
            let (has, gets) = self.rates(farm.hosts[farm.pieces[i].at], farm.hosts[to]);
            seconds(self.snapshot.estimates.cost(farm.tasks[i].bytes, slowness(has, gets)))
        };
        let mut best = None::<(f64, Vec<Shift>)>;
        for step in self.steps(&farm, job) {
            let cost = step.iter().map(cost_of).sum::<f64>();
            let most = best.as_ref().map(|(most, _)| *most);
            // Each task of the job has waited for its end; tasks of other jobs that it joins lose.
            let gain = |after: Outcome| count * (before.end - after.end) + before.others - after.others;
            let is_best = |after: Outcome| {
                let net = gain(after) - margin * cost;
                let worth = net >= seconds(GAIN_MIN) && before.end - after.end >= SOONER * before.end;
                worth && most.is_none_or(|most| net > most)
            };
            let pieces = farm.pieces_with(&step);
            let after = outcome_unless(&farm.machines, &pieces, farm.cost, |after| !is_best(after));
            let Some(after) = after else { continue };
            let (gain, sooner) = (gain(after), before.end - after.end);
            best = Some((gain - margin * cost, self.shifts_of(&farm, &step, (gain, cost), sooner)));
        }
        best.map(|(_, shifts)| shifts)
    }

    /// What a task has on one host and would get on the other, in thousandths of an ordinary processor.
    fn rates(&self, from: HostId, to: HostId) -> (f64, f64) {
        let (source, target) = (&self.places[&from], &self.places[&to]);
        let has = source.rate(source.load.own, source.foreign.0);
        (has, target.rate(target.load.own + 1, target.foreign.1))
    }

    fn shifts_of(&self, farm: &Farm<'_>, step: &Step, (gain, cost): (f64, f64), sooner: f64) -> Vec<Shift> {
        let micros = |seconds: f64| Micros((seconds.max(0.0) * 1e6) as u64);
        let shift = |&(i, to): &(usize, usize)| {
            let (from, to) = (farm.hosts[farm.pieces[i].at], farm.hosts[to]);
            let (has, gets) = self.rates(from, to);
            let (has, gets) = (has as u64, gets as u64);
            let (gain, cost, sooner) = (micros(gain), micros(cost), Some(micros(sooner)));
            Shift { tid: farm.tasks[i].tid, from, to, why: ShiftWhy { has, gets, gain, cost, barrier: false, sooner } }
        };
        step.iter().map(shift).collect()
    }

    /// What is tried: tasks that would end last go elsewhere, alone or in exchange for another one; those that share their
    /// hosts make room for them.
    fn steps(&self, farm: &Farm<'_>, job: Tid) -> Vec<Step> {
        let on: Vec<usize> =
            (0..farm.hosts.len()).map(|h| farm.pieces.iter().filter(|piece| piece.at == h).count()).collect();
        let ends = |i: &usize| {
            let piece = farm.pieces[*i];
            let at = |other: &&Piece| other.at == piece.at;
            // Those that are shorter take their share until they end.
            let before: f64 = farm.pieces.iter().filter(at).map(|other| other.left.min(piece.left)).sum();
            let machine = farm.machines[piece.at];
            (before / (machine.speed * machine.processors).max(1e-9)).max(piece.left / machine.speed.max(1e-9))
        };
        let now = self.snapshot.now;
        let free = |i: &usize| {
            let task = farm.tasks[*i];
            task.job == job && may_shift(now, task) && !self.moved.contains_key(&task.tid)
        };
        let mut last: Vec<usize> = (0..farm.pieces.len()).filter(|i| farm.tasks[*i].job == job).collect();
        last.sort_by(|a, b| ends(b).total_cmp(&ends(a)));
        last.truncate(LAST_MAX);
        let mut movers = last.clone();
        let beside = |i: &usize| last.iter().any(|l| farm.pieces[*l].at == farm.pieces[*i].at);
        movers.extend((0..farm.pieces.len()).filter(|i| !last.contains(i)).filter(beside));
        let steady = |at: usize| {
            let (least, most) = self.places[&farm.hosts[at]].foreign;
            most - least <= UNSTEADY
        };
        let fits = |i: usize, to: usize| {
            let host = |at: usize| self.places[&farm.hosts[at]].host;
            steady(to)
                && steady(farm.pieces[i].at)
                && to != farm.pieces[i].at
                && unfit(self.snapshot, host(to), host(farm.pieces[i].at), farm.tasks[i], true).is_none()
        };
        let mut steps = Vec::new();
        for i in movers.into_iter().filter(free) {
            for to in (0..farm.hosts.len()).filter(|to| fits(i, *to)) {
                steps.push(vec![(i, to)]);
                let exchanges = last.iter().take(EXCHANGES_MAX).any(|l| *l == i);
                if !exchanges || on[to] == 0 {
                    continue;
                }
                let other = |o: &usize| farm.pieces[*o].at == to && free(o) && fits(*o, farm.pieces[i].at);
                steps.extend((0..farm.pieces.len()).filter(other).map(|o| vec![(i, to), (o, farm.pieces[i].at)]));
            }
        }
        steps
    }
}
