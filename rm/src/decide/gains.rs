//! Whether moves for the sake of the load brought what was expected of them, and what follows for the next ones.
//!
//! A move's gain rests on two guesses: what the task gets at the target, and how much work it has left. Each is compared with
//! what came, and gains are taken for what they have been worth. Moves that do not pay are not made any more; because nothing is
//! learned then, what was learned fades, and after some hours a move is tried again.

use super::predict::Estimates;
use super::{HostId, Shift};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Moves that are followed at one time; of more, the new ones are not.
pub const PROMISES_MAX: usize = 4096;
/// Gains are taken for so much of what is reckoned at least, and at most.
pub const TRUST: std::ops::RangeInclusive<f64> = 0.1..=1.5;
/// What was learned counts half after this, if nothing confirms it.
pub const TRUST_HALF: Micros = Micros::from_secs(2 * 3600);
/// What a task gets is looked at when it has been at its target for so long.
const LOOK_AFTER: Micros = Micros::from_secs(30);
/// A task that ends sooner says nothing of what it got.
const RATE_AFTER: Micros = Micros::from_secs(5);
/// Work that comes to so many times what was expected is known to be more; the rest is not waited for.
const MORE: f64 = 2.0;
/// Weight of what happened last.
const NEWEST: f64 = 0.1;
/// So many moves are taken to have come as expected before any was seen.
const PRIOR: f64 = 3.0;

/// The mean of what came over what was expected.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Ratio {
    mean: f64,
    seen: u64,
}

impl Default for Ratio {
    fn default() -> Ratio {
        Ratio { mean: 1.0, seen: 0 }
    }
}

impl Ratio {
    fn came(&mut self, ratio: f64) {
        self.seen += 1;
        let weight = NEWEST.max(1.0 / (self.seen as f64 + PRIOR));
        self.mean += weight * (ratio - self.mean);
    }
}

/// What was learned of gains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Gains {
    /// Of what tasks get at their targets.
    rate: Ratio,
    /// Of the work that they have left: guessed, and told by their programs.
    work: [Ratio; 2],
    /// When something was learned last.
    heard: Micros,
}

impl Gains {
    /// What a reckoned gain is worth.
    pub(super) fn trust(&self, now: Micros, told: bool) -> f64 {
        let learned = (self.rate.mean * self.work[usize::from(told)].mean)
            .clamp(*TRUST.start(), *TRUST.end());
        let age = now.since(self.heard).0 as f64 / TRUST_HALF.0 as f64;
        learned.powf(0.5_f64.powf(age))
    }

    /// The same on a clock that begins now.
    pub(super) fn on_new_clock(self) -> Gains {
        Gains {
            heard: Micros::default(),
            ..self
        }
    }

    /// Rises with all that is learned.
    pub(super) fn lessons(&self) -> u64 {
        self.rate.seen + self.work.iter().map(|work| work.seen).sum::<u64>()
    }

    pub(super) fn is_sound(&self) -> bool {
        [self.rate, self.work[0], self.work[1]]
            .iter()
            .all(|ratio| ratio.mean.is_finite())
    }

    pub(super) fn rate_came(&mut self, now: Micros, ratio: f64) {
        self.heard = now;
        self.rate.came(ratio);
    }

    pub(super) fn work_came(&mut self, now: Micros, told: bool, ratio: f64) {
        self.heard = now;
        self.work[usize::from(told)].came(ratio);
    }
}

/// A move that is followed.
#[derive(Clone, Copy, Debug)]
struct Promise {
    from: HostId,
    to: HostId,
    /// Thousandths of an ordinary processor that it had, and was to get.
    has: f64,
    gets: f64,
    /// Work that it was to have left, in seconds of an ordinary processor.
    left: f64,
    told: bool,
    /// What the move was to save, as reckoned, and as it was expected after what was learned.
    reckoned: Micros,
    gain: Micros,
    cost: Micros,
    arrived: Option<Arrived>,
    /// What it got over what it was to get, once that was looked at.
    rate: Option<f64>,
}

/// A task is at its target.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    at: Micros,
    /// The work that it had done by then.
    done: Micros,
    /// What the move cost.
    cost: Micros,
}

/// What came of a move for the sake of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The task.
    pub tid: Tid,
    /// Where it was.
    pub from: HostId,
    /// Where it went.
    pub to: HostId,
    /// What it was expected to save, and to cost.
    pub expected: (Micros, Micros),
    /// What it saved, as far as what the task got and did tells, and what it cost.
    pub came: (Micros, Micros),
}

/// Moves for the sake of the load whose gain is not known yet.
#[derive(Clone, Debug, Default)]
pub struct Promises {
    open: BTreeMap<Tid, Promise>,
}

impl Promise {
    /// What the task got and was to get, by how much sooner its work is done; what it does not have a measure for is as expected.
    fn rate(&self, work: f64, span: f64) -> f64 {
        let sooner = |rate: f64| 1.0 / self.has.max(1.0) - 1.0 / rate.max(1.0);
        (sooner(1e3 * work / span.max(1e-6)) / sooner(self.gets)).clamp(0.0, MORE)
    }

    fn outcome(&self, tid: Tid, arrived: &Arrived, work: f64) -> Outcome {
        let saved = self.reckoned.0 as f64 * self.rate.unwrap_or(1.0) * work;
        let came = (Micros(saved as u64), arrived.cost);
        Outcome {
            tid,
            from: self.from,
            to: self.to,
            expected: (self.gain, self.cost),
            came,
        }
    }
}

impl Promises {
    /// A task was told to go. One that makes room for another and gets less itself is not followed.
    pub fn made(&mut self, shift: &Shift) {
        let why = &shift.why;
        let (has, gets, left) = (why.has as f64, why.gets as f64, why.left.0 as f64 / 1e6);
        if gets <= has || left <= 0.0 || self.open.len() >= PROMISES_MAX {
            return self.dropped(shift.tid);
        }
        let (from, to, told) = (shift.from, shift.to, why.told);
        let (reckoned, gain, cost) = (why.reckoned, why.gain, why.cost);
        let promise = Promise {
            from,
            to,
            has,
            gets,
            left,
            told,
            reckoned,
            gain,
            cost,
            arrived: None,
            rate: None,
        };
        self.open.insert(shift.tid, promise);
    }

    /// The task has come to a host when it had done so much, which has cost so much. If that is another one, or it had come
    /// before, nobody can say any more what the move would have brought.
    pub fn arrived(&mut self, at: Micros, tid: Tid, to: HostId, (done, cost): (Micros, Micros)) {
        match self.open.get_mut(&tid) {
            Some(promise) if promise.to == to && promise.arrived.is_none() => {
                promise.arrived = Some(Arrived { at, done, cost });
            }
            _ => self.dropped(tid),
        }
    }

    /// The task did not move, or stands still, or is gone.
    pub fn dropped(&mut self, tid: Tid) {
        self.open.remove(&tid);
    }

    /// The tasks that are followed.
    pub fn tasks(&self) -> Vec<Tid> {
        self.open.keys().copied().collect()
    }

    /// The task runs, and has done so much. Answers what came of its move when that is known.
    pub fn look(
        &mut self,
        now: Micros,
        tid: Tid,
        done: Micros,
        estimates: &mut Estimates,
    ) -> Option<Outcome> {
        let promise = self.open.get_mut(&tid)?;
        let arrived = promise
            .arrived
            .filter(|arrived| now.since(arrived.at) >= LOOK_AFTER)?;
        let work = done.since(arrived.done).0 as f64 / 1e6;
        if promise.rate.is_none() {
            let rate = promise.rate(work, now.since(arrived.at).0 as f64 / 1e6);
            promise.rate = Some(rate);
            estimates.rate_came(now, rate);
        }
        if work < MORE * promise.left {
            return None;
        }
        estimates.work_came(now, promise.told, MORE);
        let outcome = promise.outcome(tid, &arrived, MORE);
        self.dropped(tid);
        Some(outcome)
    }

    /// The task has ended when it had done so much. Answers what came of its move.
    pub fn ended(
        &mut self,
        now: Micros,
        tid: Tid,
        done: Micros,
        estimates: &mut Estimates,
    ) -> Option<Outcome> {
        let mut promise = self.open.remove(&tid)?;
        let arrived = promise.arrived?;
        let (work, span) = (
            done.since(arrived.done).0 as f64 / 1e6,
            now.since(arrived.at),
        );
        if promise.rate.is_none() && span >= RATE_AFTER {
            let rate = promise.rate(work, span.0 as f64 / 1e6);
            promise.rate = Some(rate);
            estimates.rate_came(now, rate);
        }
        let ratio = (work / promise.left).min(MORE);
        estimates.work_came(now, promise.told, ratio);
        Some(promise.outcome(tid, &arrived, ratio))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::ShiftWhy;
    use proptest::prelude::*;

    fn tid() -> Tid {
        Tid::from_raw(0x40001)
    }

    fn host(index: u16) -> HostId {
        HostId::new(index).expect("an index")
    }

    /// Twice as fast from host 1 to host 2, with so many seconds of work left.
    fn shift(left: u64) -> Shift {
        let (reckoned, cost) = (Micros::from_secs(left), Micros::from_secs(1));
        let left = Micros::from_secs(left);
        let why = ShiftWhy {
            has: 500,
            gets: 1000,
            gain: reckoned,
            cost,
            barrier: false,
            sooner: None,
            left,
            told: false,
            reckoned,
        };
        Shift {
            tid: tid(),
            from: host(1),
            to: host(2),
            why,
        }
    }

    /// What comes of such a move if the task does so many thousandths of a second's work in each second, and so many seconds of it.
    fn follow(estimates: &mut Estimates, at: u64, rate: u64, work: u64) -> Option<Outcome> {
        let (mut promises, at) = (Promises::default(), Micros::from_secs(at));
        promises.made(&shift(100));
        promises.arrived(
            at,
            tid(),
            host(2),
            (Micros::from_secs(7), Micros::from_secs(2)),
        );
        let span = Micros(work * 1_000_000 * 1000 / rate);
        let done = |span: Micros| Micros(7_000_000 + span.0 * rate / 1000);
        if span > LOOK_AFTER {
            let looked = promises.look(at + LOOK_AFTER, tid(), done(LOOK_AFTER), estimates);
            assert_eq!(looked, None);
        }
        promises.ended(at + span, tid(), done(span), estimates)
    }

    #[test]
    fn what_comes_as_expected_is_told_and_changes_nothing() {
        let mut estimates = Estimates::default();
        let outcome = follow(&mut estimates, 0, 1000, 100).expect("it has ended");
        let seconds = |pair: (Micros, Micros)| (pair.0.0 / 1_000_000, pair.1.0 / 1_000_000);
        assert_eq!(
            (seconds(outcome.expected), seconds(outcome.came)),
            ((100, 1), (100, 2))
        );
        assert!((estimates.trust(Micros::from_secs(100), false) - 1.0).abs() < 0.001);
    }

    #[test]
    fn gains_are_taken_for_what_they_have_been_worth_until_that_is_long_ago() {
        for (rate, work) in [(600, 100), (1000, 33)] {
            let mut estimates = Estimates::default();
            for n in 0..60 {
                follow(&mut estimates, n * 1000, rate, work).expect("it has ended");
            }
            let now = Micros::from_secs(60_000);
            let trust = estimates.trust(now, false);
            assert!(
                (0.28..0.40).contains(&trust),
                "a third of what was expected came: {trust}"
            );
            let later = |n: u64| estimates.trust(now + Micros(n * TRUST_HALF.0), false);
            assert!(
                later(1) > trust && later(4) > 0.9 && later(4) < 1.0,
                "{} {}",
                later(1),
                later(4)
            );
            let kept = Estimates::recall(estimates.lessons());
            assert!(
                (kept.trust(Micros(0), false) - trust).abs() < 0.05,
                "it outlives its keeper"
            );
        }
    }

    #[test]
    fn a_task_that_goes_on_elsewhere_or_gets_less_for_the_sake_of_others_teaches_nothing() {
        let (mut promises, mut estimates) = (Promises::default(), Estimates::default());
        let far = Micros::from_secs(1000);
        promises.made(&Shift {
            why: ShiftWhy {
                gets: 400,
                ..shift(9).why
            },
            ..shift(9)
        });
        assert!(promises.tasks().is_empty());
        promises.made(&shift(9));
        assert_eq!(
            promises.ended(far, tid(), far, &mut estimates),
            None,
            "it never arrived"
        );
        promises.made(&shift(9));
        promises.arrived(Micros(0), tid(), host(2), (Micros(0), Micros(0)));
        promises.arrived(Micros(1), tid(), host(3), (Micros(0), Micros(0)));
        assert_eq!(
            promises.ended(far, tid(), far, &mut estimates),
            None,
            "an owner came"
        );
        assert_eq!(estimates.trust(far, false), 1.0);
    }

    proptest! {
        /// Whatever comes, gains are neither forgotten nor blown up; and if always the same part of them comes, they are
        /// taken for that.
        #[test]
        fn trust_is_bounded_and_follows_what_comes(rate in 1_u64..3000, work in 1_u64..500, told in any::<bool>()) {
            let mut estimates = Estimates::default();
            for n in 0..80 {
                if let Some(outcome) = follow(&mut estimates, n, rate, work) {
                    prop_assert!(outcome.came.0.0 <= outcome.expected.0.0 * 4);
                }
                let trust = estimates.trust(Micros::from_secs(n), told);
                prop_assert!((*TRUST.start() - 1e-9..=*TRUST.end() + 1e-9).contains(&trust), "{}", trust);
            }
        }
    }
}
