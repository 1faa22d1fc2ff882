//! Rebalancing: migrates a task if it and the tasks on its source and target finish sooner, and if
//! the time saved exceeds the cost of the migration by a margin.
//!
//! **Unit.** Gain and cost are sums of task time. The task gains what it finishes sooner; tasks
//! left at the source gain, tasks at the target lose. The tasks of a job with barriers wait for the
//! slowest one. Such a job gains what its slowest task gains, once for each task, and each
//! migration costs all its tasks.
//!
//! **Declared work.** If a program has declared the work of its tasks ([`super::Wants::work`]), the
//! end of the whole job is optimized first ([`super::hasten`]): the remaining work is not a guess
//! then.
//!
//! **Stability.** These rules prevent migrations back and forth:
//!
//! - External load counts at the source as the smaller, at the target as the larger of its current
//!   value and its mean, widened by its fluctuation. A host must be bad, or good, both at present
//!   and nearly always.
//! - The task must become faster by a fifth.
//! - After a migration a cooldown applies, longer each time, and the number of migrations per hour
//!   is limited.
//!
//! A pool whose tasks were placed by load offers no task a faster host, so it is left alone.

use super::farm::{FASTER, Machine};
use super::hasten::Farm;
use super::load::Load;
use super::moves::unfit;
use super::{HostView, MOVES_AT_ONCE_MAX, Owner, Snapshot, TaskView, Together, slowness};
use sempa_proto::{HostId, Micros, Tid};
use std::cell::{LazyCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Maximum number of rebalancing migrations of one task within [`SHIFTS_SPAN`].
pub const SHIFTS_MAX: usize = 4;
/// Time window in which [`SHIFTS_MAX`] applies.
pub const SHIFTS_SPAN: Micros = Micros::from_secs(3600);
/// Cooldown of a task after its start and after each migration, whatever the cause.
pub const REST: Micros = Micros::from_secs(20);
/// Cooldown after a rebalancing migration. Doubles after each further one within [`SHIFTS_SPAN`].
pub const SHIFT_REST: Micros = Micros::from_secs(30);
/// Cooldown before a migration to a host without computing tasks. Shorter, because it slows down no
/// other task and the tasks at the source get more. Doubles after each further migration, too.
pub const SHIFT_REST_TO_EMPTY: Micros = Micros::from_secs(10);
/// A host whose owner left less than this ago gets no task by rebalancing.
pub const OWNER_AWAY_MIN: Micros = Micros::from_secs(300);
/// Minimum ratio of gain to cost, unless the policy sets another one.
pub const MARGIN: f64 = 1.5;
/// Minimum gain in addition to the margin.
pub(super) const GAIN_MIN: Micros = Micros::from_secs(1);
/// Maximum number of sources examined: the hosts with the slowest tasks.
const SOURCES_MAX: usize = 16;
/// Maximum number of targets examined: the best hosts.
const TARGETS_MAX: usize = 8;
/// Maximum number of tasks examined per host.
const TASKS_MAX: usize = 64;

/// Why a task is rebalanced: rates, gain and cost.
#[derive(Clone, Debug, PartialEq)]
pub struct ShiftWhy {
    /// Rate at the source, in thousandths of an ordinary processor.
    pub has: u64,
    /// Predicted rate at the target, in thousandths of an ordinary processor.
    pub gets: u64,
    /// Time that all affected tasks save, corrected by experience.
    pub gain: Micros,
    pub cost: Micros,
    /// The job's tasks wait for each other at barriers.
    pub barrier: bool,
    /// Time by which the whole job ends sooner. Set if the end of the job was optimized.
    pub sooner: Option<Micros>,
    /// Assumed remaining work of the task, in time of an ordinary processor.
    pub left: Micros,
    /// The program declared the remaining work; otherwise it is estimated.
    pub told: bool,
    /// The computed gain before the correction by experience.
    pub reckoned: Micros,
}

impl fmt::Display for ShiftWhy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = |n: u64| n as f64 / 1e3;
        let seconds = |span: Micros| span.0 as f64 / 1e6;
        write!(
            f,
            "{:.2} of a processor instead of {:.2}",
            per(self.gets),
            per(self.has)
        )?;
        let (gain, cost) = (seconds(self.gain), seconds(self.cost));
        if let Some(sooner) = self.sooner {
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
pub struct Shift {
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
    pub why: ShiftWhy,
}

/// State of one host during planning.
#[derive(Clone, Debug)]
pub(super) struct Place<'a> {
    pub(super) host: &'a HostView,
    pub(super) load: Load,
    /// Lower and upper estimate of the external load, in threads.
    pub(super) foreign: (f64, f64),
    pub(super) foreign_mean: f64,
    /// Remaining work of each own task on the host, in seconds of an ordinary processor, in
    /// ascending order.
    left: Vec<f64>,
    /// Sum of the tasks' completion times in seconds, with the lower and with the upper external
    /// load.
    flows: (f64, f64),
    /// Rate of each task with the lower external load, in thousandths of an ordinary processor.
    pub(super) has: f64,
    /// Rate of each task with one more task and the upper external load.
    pub(super) gets: f64,
}

/// A task that may migrate.
struct Mover<'a> {
    task: &'a TaskView,
    from: HostId,
    left: f64,
    /// The task may also go to hosts with other tasks, because its longer cooldown has passed.
    rested: bool,
}

/// A migration that saves more than it costs.
struct Offer {
    /// Gain less cost times margin, in seconds.
    net: f64,
    /// Index in the list of candidate tasks.
    mover: usize,
    to: HostId,
    why: ShiftWhy,
    /// The migration is known to delay the end of the task's job.
    delays: bool,
}

impl Place<'_> {
    pub(super) fn rate(&self, own: u32, foreign: f64) -> f64 {
        let threads = f64::from(own) + foreign;
        self.load.speed as f64 * (self.load.processors() / threads.max(1e-9)).min(1.0)
    }

    /// Returns the host for a simulation. Tasks that arrive from hosts outside the plan are not
    /// known; each counts as an external thread.
    pub(super) fn machine(&self, foreign: f64) -> Machine {
        let unknown = f64::from(self.load.own) - self.left.len() as f64;
        Machine {
            processors: self.load.processors(),
            speed: self.load.speed as f64 / 1e3,
            foreign: foreign + unknown.max(0.0),
        }
    }

    /// Returns the sum of the tasks' completion times in seconds.
    fn flow(&self, foreign: f64) -> f64 {
        self.machine(foreign)
            .flow(self.left.len(), self.left.iter().copied())
    }

    /// Returns that sum without a task that has `gone` remaining work.
    fn flow_without(&self, foreign: f64, gone: f64) -> f64 {
        let Some(at) = self.left.iter().position(|left| *left == gone) else {
            return self.flow(foreign);
        };
        let left = self.left[..at].iter().chain(&self.left[at + 1..]);
        self.machine(foreign)
            .flow(self.left.len() - 1, left.copied())
    }

    /// Returns that sum with an additional task that has `more` remaining work.
    fn flow_with(&self, foreign: f64, more: f64) -> f64 {
        let (before, after) = self
            .left
            .split_at(self.left.partition_point(|left| *left < more));
        let left = before.iter().chain([&more]).chain(after);
        self.machine(foreign)
            .flow(self.left.len() + 1, left.copied())
    }

    /// Recomputes the derived values after the tasks have changed.
    fn count_again(&mut self) {
        self.flows = (self.flow(self.foreign.0), self.flow(self.foreign.1));
        self.has = self.rate(self.load.own, self.foreign.0);
        self.gets = self.rate(self.load.own + 1, self.foreign.1);
    }
}

/// The plan under construction.
pub(super) struct Plan<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) places: BTreeMap<HostId, Place<'a>>,
    /// Remaining work of each task on these hosts.
    pub(super) expected: BTreeMap<Tid, Expected>,
    /// Jobs whose work is declared for all tasks.
    pub(super) told: BTreeSet<Tid>,
    /// Jobs with barriers that would gain nothing: their tasks stay.
    pub(super) fixed: BTreeSet<Tid>,
    pub(super) moved: BTreeMap<Tid, HostId>,
    pub(super) shifts: Vec<Shift>,
    /// Cache: zones of the peers of a job's tasks on a host.
    peers: RefCell<BTreeMap<(HostId, Tid), BTreeSet<u32>>>,
}

/// Expected remaining work of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// In seconds of an ordinary processor.
    pub(super) left: f64,
    /// The program declared the work; otherwise it is estimated.
    pub(super) told: bool,
}

pub(super) fn seconds(span: Micros) -> f64 {
    span.0 as f64 / 1e6
}

pub(super) fn micros(seconds: f64) -> Micros {
    Micros((seconds.max(0.0) * 1e6) as u64)
}

/// Corrects a computed gain by experience. A loss counts in full.
pub(super) fn worth(gain: f64, trust: f64) -> f64 {
    if gain > 0.0 { gain * trust } else { gain }
}

/// Returns the expected remaining work of a task.
fn expected(snapshot: &Snapshot, task: &TaskView) -> Expected {
    let told = task.wants.as_ref().and_then(|wants| wants.work);
    // A task slightly beyond its declared work is still near its end. A quarter beyond, the
    // declaration is ignored.
    match told.filter(|work| task.done.0 < work.0.saturating_mul(5) / 4) {
        Some(work) => Expected {
            left: seconds(Micros(work.0.saturating_sub(task.done.0))),
            told: true,
        },
        None => Expected {
            left: seconds(snapshot.estimates.left(&task.name, task.done)),
            told: false,
        },
    }
}

/// Returns the number of rebalancing migrations that still count.
fn recent_shifts(now: Micros, task: &TaskView) -> usize {
    task.shifts
        .iter()
        .filter(|at| now.since(**at) < SHIFTS_SPAN)
        .count()
}

/// Returns the end of the task's cooldown after its start and its migrations.
pub(super) fn rests_until(now: Micros, task: &TaskView) -> Micros {
    rested(now, task, REST, SHIFT_REST)
}

/// Returns the end of the cooldown for a target without computing tasks.
fn rests_until_for_empty(now: Micros, task: &TaskView) -> Micros {
    rested(now, task, SHIFT_REST_TO_EMPTY, SHIFT_REST_TO_EMPTY)
}

fn rested(now: Micros, task: &TaskView, after_move: Micros, after_shift: Micros) -> Micros {
    let rest = Micros(after_shift.0 << recent_shifts(now, task).saturating_sub(1).min(SHIFTS_MAX));
    let after_moves = task.moves.iter().map(|at| *at + after_move);
    let after_shifts = task.shifts.iter().map(|at| *at + rest);
    after_moves
        .chain(after_shifts)
        .fold(task.since + REST, Micros::max)
}

/// Returns how many rebalancing migrations the task may still make; 0 if it must stay.
pub(super) fn shifts_left(now: Micros, task: &TaskView) -> usize {
    let together = task.wants.as_ref().map_or(Together::Any, |w| w.together);
    let stays = !task.computes() || task.named || together != Together::Any;
    if stays {
        0
    } else {
        SHIFTS_MAX.saturating_sub(recent_shifts(now, task))
    }
}

/// True if the task may be rebalanced at `now`.
pub(super) fn may_shift(now: Micros, task: &TaskView) -> bool {
    could_shift(now, task) && rests_until(now, task) <= now
}

/// True if the task may be rebalanced at `now` to a host without computing tasks.
fn may_shift_to_empty(now: Micros, task: &TaskView) -> bool {
    could_shift(now, task) && rests_until_for_empty(now, task) <= now
}

/// True if nothing but a cooldown prevents rebalancing.
fn could_shift(now: Micros, task: &TaskView) -> bool {
    task.moving.is_none()
        && task.held.as_ref().is_none_or(|held| held.at <= now)
        && shifts_left(now, task) > 0
}

/// True for a host whose load is known and whose owner has been away for some time.
fn may_give_or_take(now: Micros, host: &HostView) -> bool {
    host.fresh_sample(now).is_some()
        && match host.owner {
            Owner::Present { .. }
            | Owner::Closed { .. }
            | Owner::Drained { .. }
            | Owner::Unknown => false,
            // External load is weighed as load; an idle user may return at any moment.
            Owner::Maybe { idle, .. } => !idle,
            Owner::Absent { left } => left.is_none_or(|left| now.since(left) >= OWNER_AWAY_MIN),
        }
}

impl<'a> Plan<'a> {
    /// Selects the hosts with the slowest tasks, and the best hosts.
    fn new(snapshot: &'a Snapshot, fixed: BTreeSet<Tid>) -> Plan<'a> {
        let index = snapshot.hosts.index(snapshot.now);
        let known = |id: HostId| {
            let host = snapshot
                .host(id)
                .filter(|h| may_give_or_take(snapshot.now, h))?;
            Some((host, index.load(id)?))
        };
        let sources = index.slowest().filter_map(known).take(SOURCES_MAX);
        let targets = index.best().filter_map(known).take(TARGETS_MAX);
        let hosts: BTreeMap<HostId, (&HostView, Load)> = sources
            .chain(targets)
            .map(|(host, load)| (host.id, (host, load)))
            .collect();
        let tasks = hosts
            .values()
            .flat_map(|(host, _)| &host.tasks)
            .filter(|task| task.computes());
        let expected: BTreeMap<Tid, Expected> = tasks
            .map(|task| (task.tid, expected(snapshot, task)))
            .collect();
        let place = |(host, load): &(&'a HostView, Load)| {
            let now = f64::from(super::load::foreign(host, snapshot.now));
            let seen = host
                .foreign_mean
                .map(|mean| (f64::from(mean.threads), f64::from(mean.spread)));
            let (mean, spread) = seen.unwrap_or((now, 0.0));
            let foreign = (now.min(mean - spread).max(0.0), now.max(mean + spread));
            let (left, flows) = (Vec::new(), (0.0, 0.0));
            (
                host.id,
                Place {
                    host,
                    load: *load,
                    foreign,
                    foreign_mean: mean,
                    left,
                    flows,
                    has: 0.0,
                    gets: 0.0,
                },
            )
        };
        let mut places: BTreeMap<HostId, Place<'_>> = hosts.values().map(place).collect();
        for (host, _) in hosts.values() {
            for task in host.tasks.iter().filter(|task| task.computes()) {
                let at = task.moving.flatten().unwrap_or(host.id);
                places
                    .get_mut(&at)
                    .into_iter()
                    .for_each(|place| place.left.push(expected[&task.tid].left));
            }
        }
        for place in places.values_mut() {
            place.left.sort_unstable_by(f64::total_cmp);
            place.count_again();
        }
        let (told, moved, shifts, peers) = (
            BTreeSet::new(),
            BTreeMap::new(),
            Vec::new(),
            RefCell::default(),
        );
        Plan {
            snapshot,
            places,
            expected,
            told,
            fixed,
            moved,
            shifts,
            peers,
        }
    }

    pub(super) fn left(&self, task: Tid) -> f64 {
        self.expected
            .get(&task)
            .map_or(0.0, |expected| expected.left)
    }

    /// Returns why migrating this task is worthwhile, and the net gain in seconds; `None` if it is
    /// not. `left_behind`: sum of the completion times of the tasks that stay at the source.
    fn judge(
        &self,
        mover: &Mover<'_>,
        from: &Place<'_>,
        to: &Place<'_>,
        left_behind: impl Fn() -> f64,
    ) -> Option<(f64, ShiftWhy)> {
        let (has, gets) = (from.has, to.gets);
        if to.load.own > 0 && !mover.rested {
            return None;
        }
        // Far from its peers a task waits longer for messages.
        let (near, far) = self.near(mover, from, to);
        if gets * far < has * near * FASTER {
            return None;
        }
        let now = from.flows.0 + to.flows.1;
        let waits = |rate: f64, near: f64| 1e3 * mover.left / rate.max(1.0) * (1.0 / near - 1.0);
        let reckoned = now - left_behind() - to.flow_with(to.foreign.1, mover.left);
        let reckoned = reckoned + waits(has, near) - waits(gets, far);
        let told = self
            .expected
            .get(&mover.task.tid)
            .is_some_and(|expected| expected.told);
        let gain = worth(reckoned, self.snapshot.trust(told));
        let cost = self
            .snapshot
            .cost(mover.task, from.host, to.host, slowness(has, gets));
        if gain < self.snapshot.costs.margin() * seconds(cost) + seconds(GAIN_MIN) {
            return None;
        }
        let (gain, reckoned, left) = (micros(gain), micros(reckoned), micros(mover.left));
        let (has, gets) = (has as u64, gets as u64);
        let why = ShiftWhy {
            has,
            gets,
            gain,
            cost,
            barrier: false,
            sooner: None,
            left,
            told,
            reckoned,
        };
        Some((
            seconds(gain) - self.snapshot.costs.margin() * seconds(cost),
            why,
        ))
    }

    /// Returns the weight of a processor share for the task at its source and at its target.
    fn near(&self, mover: &Mover<'_>, from: &Place<'_>, to: &Place<'_>) -> (f64, f64) {
        if from.host.zone == to.host.zone {
            return (1.0, 1.0);
        }
        let mut peers = self.peers.borrow_mut();
        let of_peers = || self.snapshot.zones_of_peers(from.host.id, mover.task);
        let zones = peers
            .entry((from.host.id, mover.task.job))
            .or_insert_with(of_peers);
        let worth = |zone| f64::from(self.snapshot.permille(zone, zones)) / 1e3;
        (worth(from.host.zone), worth(to.host.zone))
    }

    /// Returns the tasks that may migrate, in the order of hosts.
    fn movers(&self) -> Vec<Mover<'a>> {
        let now = self.snapshot.now;
        let is_one_empty = self.places.values().any(|place| place.load.own == 0);
        let of_place = |place: &Place<'a>| {
            let from = place.host.id;
            let may_go = |t: &&TaskView| {
                let may = if is_one_empty {
                    may_shift_to_empty
                } else {
                    may_shift
                };
                may(now, t) && !self.moved.contains_key(&t.tid) && !self.fixed.contains(&t.job)
            };
            let tasks = place.host.tasks.iter().filter(may_go).take(TASKS_MAX);
            tasks
                .map(move |task| Mover {
                    task,
                    from,
                    left: self.left(task.tid),
                    rested: rests_until(now, task) <= now,
                })
                .collect::<Vec<_>>()
        };
        self.places
            .values()
            .filter(|p| p.load.own > 0)
            .flat_map(of_place)
            .collect()
    }

    /// Collects the worthwhile migrations: all, or only those from and to the two hosts in `only`.
    fn offer(&self, movers: &[Mover<'_>], offers: &mut Vec<Offer>, only: Option<[HostId; 2]>) {
        let all: Vec<&Place<'_>> = self.places.values().collect();
        let some: Vec<&Place<'_>> = only.iter().flatten().map(|id| &self.places[id]).collect();
        for (i, mover) in movers
            .iter()
            .enumerate()
            .filter(|(_, mover)| !self.moved.contains_key(&mover.task.tid))
        {
            let from = &self.places[&mover.from];
            let to = if only.is_none_or(|only| only.contains(&mover.from)) {
                &all
            } else {
                &some
            };
            // Independent of the target, and computed only if needed.
            let left_behind = LazyCell::new(|| from.flow_without(from.foreign.0, mover.left));
            for to in to.iter().filter(|to| to.host.id != mover.from) {
                let judged = self.judge(mover, from, to, || *left_behind);
                offers.extend(judged.map(|(net, why)| Offer {
                    net,
                    mover: i,
                    to: to.host.id,
                    why,
                    delays: false,
                }));
            }
        }
    }

    /// Returns the migration with the largest net gain whose target accepts the task and that
    /// delays no job.
    fn best(
        &self,
        movers: &[Mover<'_>],
        offers: &mut Vec<Offer>,
        farm: Option<&mut Farm<'a>>,
    ) -> Option<Shift> {
        let mut farm = farm;
        offers.iter_mut().for_each(|offer| offer.delays = false);
        loop {
            let order = |a: &Offer, b: &Offer| {
                a.net
                    .total_cmp(&b.net)
                    .then((b.mover, b.to).cmp(&(a.mover, a.to)))
            };
            let known = offers.iter().enumerate().filter(|(_, offer)| !offer.delays);
            let at = known.max_by(|a, b| order(a.1, b.1)).map(|(at, _)| at)?;
            let (Mover { task, from, .. }, to) = (&movers[offers[at].mover], offers[at].to);
            if unfit(
                self.snapshot,
                self.places[&to].host,
                self.places[from].host,
                task,
                true,
            )
            .is_some()
            {
                offers.swap_remove(at);
            } else if farm
                .as_mut()
                .is_some_and(|farm| self.delays(farm, task, to))
            {
                offers[at].delays = true;
            } else {
                return Some(Shift {
                    tid: task.tid,
                    from: *from,
                    to,
                    why: offers.swap_remove(at).why,
                });
            }
        }
    }

    pub(super) fn take(&mut self, shift: Shift, farm: Option<&mut Farm<'a>>) {
        if let Some(farm) = farm {
            farm.take(shift.tid, shift.to);
        }
        let left = self.left(shift.tid);
        for (id, one_more) in [(shift.from, false), (shift.to, true)] {
            let place = self
                .places
                .get_mut(&id)
                .expect("moves are between places of the plan");
            if one_more {
                place.load.own += 1;
                place
                    .left
                    .insert(place.left.partition_point(|l| *l < left), left);
            } else {
                place.load.own -= 1;
                if let Some(at) = place.left.iter().position(|l| *l == left) {
                    place.left.remove(at);
                }
            }
            place.count_again();
        }
        self.moved.insert(shift.tid, shift.to);
        self.shifts.push(shift);
    }

    fn task(&self, shift: &Shift) -> Option<&'a TaskView> {
        self.snapshot
            .host(shift.from)?
            .tasks
            .iter()
            .find(|t| t.tid == shift.tid)
    }

    fn fill(&mut self, mut farm: Option<Farm<'a>>, room: usize) {
        let (movers, mut offers) = (self.movers(), Vec::new());
        self.offer(&movers, &mut offers, None);
        while self.shifts.len() < room {
            let Some(shift) = self.best(&movers, &mut offers, farm.as_mut()) else {
                break;
            };
            let (tid, touched) = (shift.tid, [shift.from, shift.to]);
            self.take(shift, farm.as_mut());
            // Only migrations that involve these two hosts have changed.
            offers.retain(|offer| {
                let mover = &movers[offer.mover];
                mover.task.tid != tid
                    && !touched.contains(&mover.from)
                    && !touched.contains(&offer.to)
            });
            self.offer(&movers, &mut offers, Some(touched));
        }
    }

    /// Returns the rate of the job's slowest task before and after the plan, the number of its
    /// tasks, and the longest remaining work.
    fn slowest(&self, job: Tid) -> (f64, f64, usize, f64) {
        let index = self.snapshot.hosts.index(self.snapshot.now);
        let (mut before, mut after, mut count, mut longest) = (f64::MAX, f64::MAX, 0, 0.0_f64);
        let went: BTreeMap<Tid, HostId> = self.shifts.iter().map(|s| (s.tid, s.to)).collect();
        for (id, load) in index
            .hosts_of(job)
            .filter_map(|id| Some((id, index.load(id)?)))
        {
            let Some(place) = self.places.get(&id) else {
                // Tasks on hosts outside the plan stay there.
                (before, after) = (before.min(load.rate()), after.min(load.rate()));
                count += index.computing(id, job);
                continue;
            };
            for task in place
                .host
                .tasks
                .iter()
                .filter(|t| t.job == job && t.computes())
            {
                let to = went.get(&task.tid).and_then(|to| self.places.get(to));
                let rate = |there: &Place<'_>| there.rate(there.load.own, there.foreign.1);
                before = before.min(place.rate(load.own, place.foreign.0));
                after = after.min(to.map_or(place.has, rate));
                (count, longest) = (count + 1, longest.max(self.left(task.tid)));
            }
        }
        (before, after, count, longest)
    }

    /// Evaluates the migrations of each job with barriers together. Returns the jobs that gain
    /// nothing.
    fn judge_barriers(&mut self) -> BTreeSet<Tid> {
        let mut costs = BTreeMap::<Tid, (f64, Vec<usize>)>::new();
        for (i, shift) in self.shifts.iter().enumerate() {
            let job = self
                .task(shift)
                .map(|t| t.job)
                .filter(|job| self.snapshot.barriers.contains(job));
            if let Some(job) = job {
                let entry = costs.entry(job).or_default();
                entry.0 += seconds(shift.why.cost);
                entry.1.push(i);
            }
        }
        let mut useless = BTreeSet::new();
        for (job, (cost, moves)) in costs {
            let (before, after, count, longest) = self.slowest(job);
            let saved = longest * (1e3 / before - 1e3 / after);
            let (reckoned, cost) = (count as f64 * saved, count as f64 * cost);
            let gain = worth(reckoned, self.snapshot.trust(false));
            if gain < self.snapshot.costs.margin() * cost + seconds(GAIN_MIN) {
                useless.insert(job);
            }
            for i in moves {
                let why = &mut self.shifts[i].why;
                (why.barrier, why.gain, why.cost) = (true, micros(gain), micros(cost));
                why.reckoned = micros(reckoned);
            }
        }
        useless
    }
}

/// Returns the migrations that let tasks finish sooner by more than they cost. Empty if the virtual
/// machine is balanced.
pub fn balance(snapshot: &Snapshot) -> Vec<Shift> {
    let under_way = snapshot.hosts.index(snapshot.now).under_way();
    let room = MOVES_AT_ONCE_MAX.saturating_sub(under_way);
    let mut fixed = BTreeSet::new();
    loop {
        let mut plan = Plan::new(snapshot, fixed.clone());
        let mut farm = plan.farm();
        if let Some(farm) = &mut farm {
            plan.hasten(farm, room);
        }
        plan.fill(farm, room);
        let useless = plan.judge_barriers();
        if useless.is_empty() {
            return plan.shifts;
        }
        // The other migrations are evaluated again without these; each round fixes at least one
        // job.
        fixed.extend(useless);
    }
}
