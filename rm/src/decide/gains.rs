//! Compares the predicted gain of rebalancing migrations with the actual gain, and corrects later
//! predictions.
//!
//! A predicted gain depends on two guesses: the rate of the task at the target, and its remaining
//! work. Each is compared with the observed value, and later gains are multiplied by the learned
//! ratios. If migrations bring less than predicted, fewer are made. Nothing new is learned then, so
//! the correction fades over some hours, and migrations are tried again.

use super::predict::Estimates;
use super::{HostId, Shift};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of migrations that are tracked at once. Further ones are not tracked.
pub const PROMISES_MAX: usize = 4096;
/// Range of the factor by which computed gains are multiplied.
pub const TRUST: std::ops::RangeInclusive<f64> = 0.1..=1.5;
/// Half-life of the correction if no new observation confirms it.
pub const TRUST_HALF: Micros = Micros::from_secs(2 * 3600);
/// Time between the arrival of a task at its target and the measurement of its rate.
const LOOK_AFTER: Micros = Micros::from_secs(30);
/// Minimum time at the target for a measurement of the rate, if the task ends before
/// [`LOOK_AFTER`].
const RATE_AFTER: Micros = Micros::from_secs(5);
/// Maximum recorded ratio of actual to predicted values. Tracking ends when a task has done its
/// predicted work times this factor.
const MORE: f64 = 2.0;
/// Minimum weight of the newest observation.
const NEWEST: f64 = 0.1;
/// Weight of the initial ratio 1, as a number of migrations.
const PRIOR: f64 = 3.0;

/// Mean ratio of actual to predicted values.
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

/// Learned corrections of predicted gains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Gains {
    /// Ratio of the actual to the predicted gain in rate at the target.
    rate: Ratio,
    /// Ratios of the actual to the predicted remaining work: index 0 for estimated work, 1 for
    /// declared work.
    work: [Ratio; 2],
    /// Time of the last observation.
    heard: Micros,
}

impl Gains {
    /// Returns the factor by which a computed gain is multiplied. `told`: the gain was computed
    /// from declared work.
    pub(super) fn trust(&self, now: Micros, told: bool) -> f64 {
        let learned = (self.rate.mean * self.work[usize::from(told)].mean)
            .clamp(*TRUST.start(), *TRUST.end());
        let age = now.since(self.heard).0 as f64 / TRUST_HALF.0 as f64;
        learned.powf(0.5_f64.powf(age))
    }

    /// Returns the same corrections, with the time of the last observation set to the start of a
    /// new clock.
    pub(super) fn on_new_clock(self) -> Gains {
        Gains {
            heard: Micros::default(),
            ..self
        }
    }

    /// Returns a counter that rises with every observation.
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

/// Prediction about a migration that is tracked.
#[derive(Clone, Copy, Debug)]
struct Promise {
    from: HostId,
    to: HostId,
    /// Rate at the source, in thousandths of an ordinary processor.
    has: f64,
    /// Predicted rate at the target, in thousandths of an ordinary processor.
    gets: f64,
    /// Predicted remaining work, in seconds of an ordinary processor.
    left: f64,
    told: bool,
    /// Computed gain, before the correction by experience.
    reckoned: Micros,
    /// Gain after the correction by experience.
    gain: Micros,
    cost: Micros,
    arrived: Option<Arrived>,
    /// Ratio of the actual to the predicted gain in rate; `None` until it was measured.
    rate: Option<f64>,
}

/// Arrival of a task at its target.
#[derive(Clone, Copy, Debug)]
struct Arrived {
    at: Micros,
    /// Work that the task had done before its arrival.
    done: Micros,
    /// Actual cost of the migration.
    cost: Micros,
}

/// Result of a rebalancing migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
    /// Predicted (gain, cost).
    pub expected: (Micros, Micros),
    /// Actual (gain, cost). The gain is computed from the observed rate and work of the task.
    pub came: (Micros, Micros),
}

/// Rebalancing migrations whose actual gain is not known yet.
#[derive(Clone, Debug, Default)]
pub struct Promises {
    open: BTreeMap<Tid, Promise>,
}

impl Promise {
    /// Returns the ratio of the actual to the predicted time saved per unit of work. The task has
    /// done `work` seconds of work in `span` seconds.
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
    /// Starts tracking an ordered migration. A task that becomes slower, because it makes room for
    /// another one, is not tracked.
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

    /// Records the arrival of a task at `to`. `done`: work done before the arrival; `cost`: cost of
    /// the migration. Discards the prediction if `to` is not the predicted target or the task had
    /// arrived before, because the gain of that migration cannot be determined.
    pub fn arrived(&mut self, at: Micros, tid: Tid, to: HostId, (done, cost): (Micros, Micros)) {
        match self.open.get_mut(&tid) {
            Some(promise) if promise.to == to && promise.arrived.is_none() => {
                promise.arrived = Some(Arrived { at, done, cost });
            }
            _ => self.dropped(tid),
        }
    }

    /// Discards the prediction about a task, because it did not migrate, was suspended, or has left
    /// the virtual machine.
    pub fn dropped(&mut self, tid: Tid) {
        self.open.remove(&tid);
    }

    /// Returns the tasks whose migrations are tracked.
    pub fn tasks(&self) -> Vec<Tid> {
        self.open.keys().copied().collect()
    }

    /// Measures the rate of a running task that has done `done` work. Returns the result of its
    /// migration when tracking ends.
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

    /// Ends tracking of a task that ended after `done` work. Returns the result of its migration,
    /// if the task had arrived at the target.
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

    /// Returns a migration from host 1 to host 2 that is predicted to double the rate, with `left`
    /// seconds of remaining work.
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

    /// Tracks a migration with 100 seconds of predicted remaining work and returns its result. The
    /// task does `work` seconds of work at the rate `rate`, in thousandths of an ordinary
    /// processor.
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

    /// A result that equals the prediction is reported and leaves the factor at 1.
    #[test]
    fn accurate_prediction_keeps_confidence_at_one() {
        let mut estimates = Estimates::default();
        let outcome = follow(&mut estimates, 0, 1000, 100).expect("it has ended");
        let seconds = |pair: (Micros, Micros)| (pair.0.0 / 1_000_000, pair.1.0 / 1_000_000);
        assert_eq!(
            (seconds(outcome.expected), seconds(outcome.came)),
            ((100, 1), (100, 2))
        );
        assert!((estimates.trust(Micros::from_secs(100), false) - 1.0).abs() < 0.001);
    }

    /// Predicted gains are multiplied by the ratio learned from earlier migrations. The correction
    /// fades with time.
    #[test]
    fn confidence_follows_results_and_fades() {
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

    /// If a task arrives at another host than predicted, or becomes slower to make room for others,
    /// nothing is learned from it.
    #[test]
    fn unmeasurable_migrations_teach_nothing() {
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
        /// For any observations the factor stays within its bounds, and an actual gain is at most
        /// four times the predicted one.
        #[test]
        fn confidence_stays_within_bounds(rate in 1_u64..3000, work in 1_u64..500, told in any::<bool>()) {
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
