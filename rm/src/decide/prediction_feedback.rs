//! Compares the predicted gain of rebalancing migrations with the actual gain, and corrects later
//! predictions.
//!
//! A predicted gain depends on two guesses: the rate of the task at the target, and its remaining
//! work. Each is compared with the observed value, and later gains are multiplied by the learned
//! ratios (`gain_feedback`). If migrations bring less than predicted, fewer are made. Nothing new
//! is learned then, so the correction fades over some hours, and migrations are tried again.

use super::predict::Estimates;
use super::{HostId, Rebalance};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Maximum number of migrations that are tracked at once. Further ones are not tracked.
pub const PENDING_PREDICTIONS_MAX: usize = 4096;
/// Time between the arrival of a task at its target and the measurement of its rate.
const RATE_CHECK_DELAY: Micros = Micros::from_secs(30);
/// Minimum time at the target for a measurement of the rate, if the task ends before
/// [`RATE_CHECK_DELAY`].
const RATE_MEASURE_MIN: Micros = Micros::from_secs(5);
/// Maximum recorded ratio of actual to predicted values. Tracking ends when a task has done its
/// predicted work times this factor.
const RATIO_MAX: f64 = 2.0;

/// Prediction about a migration that is tracked.
#[derive(Clone, Copy, Debug)]
struct PendingPrediction {
    from: HostId,
    to: HostId,
    /// Rate at the source, in thousandths of an ordinary processor.
    source_rate: f64,
    /// Predicted rate at the target, in thousandths of an ordinary processor.
    target_rate: f64,
    /// Predicted remaining work, in seconds of an ordinary processor.
    work_left: f64,
    declared: bool,
    /// Computed gain, before the correction by experience.
    computed_gain: Micros,
    /// Gain after the correction by experience.
    gain: Micros,
    cost: Micros,
    arrived: Option<Arrival>,
    /// Ratio of the actual to the predicted gain in rate; `None` until it was measured.
    rate_ratio: Option<f64>,
}

/// Arrival of a task at its target.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    at: Micros,
    /// Work that the task had done before its arrival.
    work_done: Micros,
    /// Actual cost of the migration.
    cost: Micros,
}

/// Result of a rebalancing migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictionOutcome {
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
    /// Predicted gain and cost, in this order.
    pub predicted: (Micros, Micros),
    /// Actual gain and cost. The gain is computed from the observed rate and work of the task.
    pub actual: (Micros, Micros),
}

/// Rebalancing migrations whose actual gain is not known yet.
#[derive(Clone, Debug, Default)]
pub struct PendingPredictions {
    pending: BTreeMap<Tid, PendingPrediction>,
}

impl PendingPrediction {
    /// Returns the ratio of the actual to the predicted time saved per unit of work. The task has
    /// done `work` seconds of work in `span` seconds.
    fn measured_rate_ratio(&self, work: f64, span: f64) -> f64 {
        let time_saved = |rate: f64| 1.0 / self.source_rate.max(1.0) - 1.0 / rate.max(1.0);
        (time_saved(1e3 * work / span.max(1e-6)) / time_saved(self.target_rate))
            .clamp(0.0, RATIO_MAX)
    }

    fn outcome(&self, tid: Tid, arrived: &Arrival, work: f64) -> PredictionOutcome {
        let saved = self.computed_gain.0 as f64 * self.rate_ratio.unwrap_or(1.0) * work;
        let came = (Micros(saved as u64), arrived.cost);
        PredictionOutcome {
            tid,
            from: self.from,
            to: self.to,
            predicted: (self.gain, self.cost),
            actual: came,
        }
    }
}

impl PendingPredictions {
    /// Starts tracking an ordered migration. A task that becomes slower, because it makes room for
    /// another one, is not tracked.
    pub fn follow(&mut self, rebalance: &Rebalance) {
        let why = &rebalance.reason;
        let (has, gets, left) = (
            why.source_rate as f64,
            why.target_rate as f64,
            why.work_left.0 as f64 / 1e6,
        );
        if gets <= has || left <= 0.0 || self.pending.len() >= PENDING_PREDICTIONS_MAX {
            return self.discard(rebalance.tid);
        }
        let prediction = PendingPrediction {
            from: rebalance.from,
            to: rebalance.to,
            source_rate: has,
            target_rate: gets,
            work_left: left,
            declared: why.declared,
            computed_gain: why.computed_gain,
            gain: why.gain,
            cost: why.cost,
            arrived: None,
            rate_ratio: None,
        };
        self.pending.insert(rebalance.tid, prediction);
    }

    /// Records the arrival of a task at `to`. `done`: work done before the arrival; `cost`: cost
    /// of the migration. Discards the prediction if `to` is not the predicted target or
    /// the task had arrived before, because the gain of that migration cannot be determined.
    pub fn record_arrival(
        &mut self,
        at: Micros,
        tid: Tid,
        to: HostId,
        (done, cost): (Micros, Micros),
    ) {
        match self.pending.get_mut(&tid) {
            Some(prediction) if prediction.to == to && prediction.arrived.is_none() => {
                prediction.arrived = Some(Arrival {
                    at,
                    work_done: done,
                    cost,
                });
            }
            _ => self.discard(tid),
        }
    }

    /// Discards the prediction about a task, because it did not migrate, was suspended, or has left
    /// the virtual machine.
    pub fn discard(&mut self, tid: Tid) {
        self.pending.remove(&tid);
    }

    /// Returns the tasks whose migrations are tracked.
    pub fn tasks(&self) -> Vec<Tid> {
        self.pending.keys().copied().collect()
    }

    /// Measures the rate of a running task that has done `done` work. Returns the result of its
    /// migration when tracking ends.
    pub fn check(
        &mut self,
        now: Micros,
        tid: Tid,
        done: Micros,
        estimates: &mut Estimates,
    ) -> Option<PredictionOutcome> {
        let prediction = self.pending.get_mut(&tid)?;
        let arrived = prediction
            .arrived
            .filter(|arrived| now.since(arrived.at) >= RATE_CHECK_DELAY)?;
        let work = done.since(arrived.work_done).0 as f64 / 1e6;
        if prediction.rate_ratio.is_none() {
            let rate = prediction.measured_rate_ratio(work, now.since(arrived.at).0 as f64 / 1e6);
            prediction.rate_ratio = Some(rate);
            estimates.record_rate(now, rate);
        }
        if work < RATIO_MAX * prediction.work_left {
            return None;
        }
        estimates.record_work(now, prediction.declared, RATIO_MAX);
        let outcome = prediction.outcome(tid, &arrived, RATIO_MAX);
        self.discard(tid);
        Some(outcome)
    }

    /// Ends tracking of a task that ended after `done` work. Returns the result of its migration,
    /// if the task had arrived at the target.
    pub fn conclude(
        &mut self,
        now: Micros,
        tid: Tid,
        done: Micros,
        estimates: &mut Estimates,
    ) -> Option<PredictionOutcome> {
        let mut prediction = self.pending.remove(&tid)?;
        let arrived = prediction.arrived?;
        let (work, span) = (
            done.since(arrived.work_done).0 as f64 / 1e6,
            now.since(arrived.at),
        );
        if prediction.rate_ratio.is_none() && span >= RATE_MEASURE_MIN {
            let rate = prediction.measured_rate_ratio(work, span.0 as f64 / 1e6);
            prediction.rate_ratio = Some(rate);
            estimates.record_rate(now, rate);
        }
        let ratio = (work / prediction.work_left).min(RATIO_MAX);
        estimates.record_work(now, prediction.declared, ratio);
        Some(prediction.outcome(tid, &arrived, ratio))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::{CONFIDENCE_HALF_LIFE, CONFIDENCE_RANGE, RebalanceReason};
    use proptest::prelude::*;

    fn tid() -> Tid {
        Tid::from_raw(0x40001)
    }

    fn host(index: u16) -> HostId {
        HostId::new(index).expect("an index")
    }

    /// Returns a migration from host 1 to host 2 that is predicted to double the rate, with
    /// `left` seconds of remaining work.
    fn shift(left: u64) -> Rebalance {
        let (reckoned, cost) = (Micros::from_secs(left), Micros::from_secs(1));
        let left = Micros::from_secs(left);
        let why = RebalanceReason {
            source_rate: 500,
            target_rate: 1000,
            gain: reckoned,
            cost,
            barrier: false,
            job_ends_sooner_by: None,
            work_left: left,
            declared: false,
            computed_gain: reckoned,
        };
        Rebalance {
            tid: tid(),
            from: host(1),
            to: host(2),
            reason: why,
        }
    }

    /// Tracks a migration with 100 seconds of predicted remaining work and returns its result. The
    /// task does `work` seconds of work at the rate `rate`, in thousandths of an ordinary
    /// processor.
    fn follow(
        estimates: &mut Estimates,
        at: u64,
        rate: u64,
        work: u64,
    ) -> Option<PredictionOutcome> {
        let (mut predictions, at) = (PendingPredictions::default(), Micros::from_secs(at));
        predictions.follow(&shift(100));
        predictions.record_arrival(
            at,
            tid(),
            host(2),
            (Micros::from_secs(7), Micros::from_secs(2)),
        );
        let span = Micros(work * 1_000_000 * 1000 / rate);
        let done = |span: Micros| Micros(7_000_000 + span.0 * rate / 1000);
        if span > RATE_CHECK_DELAY {
            let looked = predictions.check(
                at + RATE_CHECK_DELAY,
                tid(),
                done(RATE_CHECK_DELAY),
                estimates,
            );
            assert_eq!(looked, None);
        }
        predictions.conclude(at + span, tid(), done(span), estimates)
    }

    /// A result that equals the prediction is reported and leaves the factor at 1.
    #[test]
    fn accurate_prediction_keeps_confidence_at_one() {
        let mut estimates = Estimates::default();
        let outcome = follow(&mut estimates, 0, 1000, 100).expect("it has ended");
        let seconds = |pair: (Micros, Micros)| (pair.0.0 / 1_000_000, pair.1.0 / 1_000_000);
        assert_eq!(
            (seconds(outcome.predicted), seconds(outcome.actual)),
            ((100, 1), (100, 2))
        );
        assert!((estimates.confidence(Micros::from_secs(100), false) - 1.0).abs() < 0.001);
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
            let trust = estimates.confidence(now, false);
            assert!(
                (0.28..0.40).contains(&trust),
                "a third of what was expected came: {trust}"
            );
            let later =
                |n: u64| estimates.confidence(now + Micros(n * CONFIDENCE_HALF_LIFE.0), false);
            assert!(
                later(1) > trust && later(4) > 0.9 && later(4) < 1.0,
                "{} {}",
                later(1),
                later(4)
            );
            let kept = Estimates::restore(estimates.to_learned_costs());
            assert!(
                (kept.confidence(Micros(0), false) - trust).abs() < 0.05,
                "it outlives its keeper"
            );
        }
    }

    /// If a task arrives at another host than predicted, or becomes slower to make room for others,
    /// nothing is learned from it.
    #[test]
    fn unmeasurable_migrations_teach_nothing() {
        let (mut predictions, mut estimates) =
            (PendingPredictions::default(), Estimates::default());
        let far = Micros::from_secs(1000);
        predictions.follow(&Rebalance {
            reason: RebalanceReason {
                target_rate: 400,
                ..shift(9).reason
            },
            ..shift(9)
        });
        assert!(predictions.tasks().is_empty());
        predictions.follow(&shift(9));
        assert_eq!(
            predictions.conclude(far, tid(), far, &mut estimates),
            None,
            "it never arrived"
        );
        predictions.follow(&shift(9));
        predictions.record_arrival(Micros(0), tid(), host(2), (Micros(0), Micros(0)));
        predictions.record_arrival(Micros(1), tid(), host(3), (Micros(0), Micros(0)));
        assert_eq!(
            predictions.conclude(far, tid(), far, &mut estimates),
            None,
            "an owner came"
        );
        assert_eq!(estimates.confidence(far, false), 1.0);
    }

    proptest! {
        /// For any observations the factor stays within its bounds, and an actual gain is at most
        /// four times the predicted one.
        #[test]
        fn confidence_stays_within_bounds(rate in 1_u64..3000, work in 1_u64..500, declared in any::<bool>()) {
            let mut estimates = Estimates::default();
            for n in 0..80 {
                if let Some(outcome) = follow(&mut estimates, n, rate, work) {
                    prop_assert!(outcome.actual.0.0 <= outcome.predicted.0.0 * 4);
                }
                let trust = estimates.confidence(Micros::from_secs(n), declared);
                prop_assert!((*CONFIDENCE_RANGE.start() - 1e-9..=*CONFIDENCE_RANGE.end() + 1e-9).contains(&trust), "{}", trust);
            }
        }
    }
}
