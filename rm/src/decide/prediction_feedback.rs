//! Compares the predicted gain of rebalancing migrations with the actual gain, and corrects later
//! predictions.
//!
//! A predicted gain depends on two estimates: the rate of the task at the target, and its remaining
//! work. Each estimate is compared with the observed value, and later gains are multiplied by the
//! learned ratios (`gain_feedback`). If migrations gain less than predicted, fewer migrations are
//! made. Nothing new is learned while no task migrates. The correction therefore fades over some
//! hours, and migrations are tried again.

use super::predict::Estimates;
use super::{HostId, Rebalance};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Maximum number of migrations that are tracked at once. Further migrations are not tracked.
pub const PENDING_PREDICTIONS_MAX: usize = 4096;
/// Time between the arrival of a task at its target and the measurement of its rate.
const RATE_CHECK_DELAY: Micros = Micros::from_secs(30);
/// Minimum time at the target for a measurement of the rate, if the task ends before
/// `RATE_CHECK_DELAY`.
const RATE_MEASURE_TIME_MIN: Micros = Micros::from_secs(5);
/// Maximum recorded ratio of actual to predicted values. Tracking ends when a task has done its
/// predicted work multiplied by this maximum.
const RATIO_MAX: f64 = 2.0;

/// Prediction about a tracked migration.
#[derive(Clone, Copy, Debug)]
struct PendingPrediction {
    source: HostId,
    target: HostId,
    /// Rate at the source, in thousandths of an ordinary processor.
    source_rate_permille: f64,
    /// Predicted rate at the target, in thousandths of an ordinary processor.
    target_rate_permille: f64,
    /// Predicted remaining work, in seconds of an ordinary processor.
    work_left_s: f64,
    declared: bool,
    /// Computed gain, without the correction that was learned from earlier migrations.
    computed_gain: Micros,
    /// Gain with the correction that was learned from earlier migrations.
    gain: Micros,
    cost: Micros,
    arrival: Option<Arrival>,
    /// Ratio of the actual to the predicted gain in rate; `None` until the rate was measured.
    rate_ratio: Option<f64>,
}

/// Arrival of a task at its target.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    arrived_at: Micros,
    /// Work that the task had done before its arrival.
    work_done: Micros,
    /// Actual cost of the migration.
    cost: Micros,
}

/// Result of a rebalancing migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictionOutcome {
    pub tid: Tid,
    pub source: HostId,
    pub target: HostId,
    /// Predicted gain and cost, in this order.
    pub predicted_gain_and_cost: (Micros, Micros),
    /// Actual gain and cost, in this order. The gain is computed from the observed rate and work of
    /// the task.
    pub actual_gain_and_cost: (Micros, Micros),
}

/// Rebalancing migrations whose actual gain is not known yet.
#[derive(Clone, Debug, Default)]
pub struct PendingPredictions {
    by_task: BTreeMap<Tid, PendingPrediction>,
}

impl PendingPrediction {
    /// Returns the ratio of the actual to the predicted time saved per unit of work, from 0 to
    /// `RATIO_MAX`. The task has done `work_seconds` seconds of work in `seconds` seconds.
    fn measured_rate_ratio(&self, work_seconds: f64, seconds: f64) -> f64 {
        let time_saved = |rate: f64| 1.0 / self.source_rate_permille.max(1.0) - 1.0 / rate.max(1.0);
        (time_saved(1e3 * work_seconds / seconds.max(1e-6)) / time_saved(self.target_rate_permille))
            .clamp(0.0, RATIO_MAX)
    }

    fn outcome(&self, tid: Tid, arrival: &Arrival, work_ratio: f64) -> PredictionOutcome {
        let actual_gain = self.computed_gain.0 as f64 * self.rate_ratio.unwrap_or(1.0) * work_ratio;
        let gain_and_cost = (Micros(actual_gain as u64), arrival.cost);
        PredictionOutcome {
            tid,
            source: self.source,
            target: self.target,
            predicted_gain_and_cost: (self.gain, self.cost),
            actual_gain_and_cost: gain_and_cost,
        }
    }
}

impl PendingPredictions {
    /// Starts tracking a migration that was ordered. A task that becomes slower, because it makes
    /// room for another task, is not tracked. A task without remaining work and a migration beyond
    /// [`PENDING_PREDICTIONS_MAX`] are not tracked either.
    pub fn track(&mut self, rebalance: &Rebalance) {
        let why = &rebalance.reason;
        let (source_rate, target_rate, remaining_seconds) = (
            why.source_rate_permille as f64,
            why.target_rate_permille as f64,
            why.work_left.0 as f64 / 1e6,
        );
        if target_rate <= source_rate
            || remaining_seconds <= 0.0
            || self.by_task.len() >= PENDING_PREDICTIONS_MAX
        {
            return self.discard_prediction(rebalance.tid);
        }
        let prediction = PendingPrediction {
            source: rebalance.source,
            target: rebalance.target,
            source_rate_permille: source_rate,
            target_rate_permille: target_rate,
            work_left_s: remaining_seconds,
            declared: why.declared,
            computed_gain: why.computed_gain,
            gain: why.gain,
            cost: why.cost,
            arrival: None,
            rate_ratio: None,
        };
        self.by_task.insert(rebalance.tid, prediction);
    }

    /// Records the arrival of a task at `target`. `work_before`: work done before the arrival;
    /// `cost`: cost of the migration. Discards the prediction if `target` is not the predicted
    /// target or the task had arrived before, because the gain of the first migration can no longer
    /// be determined.
    pub fn record_arrival(
        &mut self,
        arrival_time: Micros,
        tid: Tid,
        target: HostId,
        (work_before, cost): (Micros, Micros),
    ) {
        match self.by_task.get_mut(&tid) {
            Some(prediction) if prediction.target == target && prediction.arrival.is_none() => {
                prediction.arrival = Some(Arrival {
                    arrived_at: arrival_time,
                    work_done: work_before,
                    cost,
                });
            }
            _ => self.discard_prediction(tid),
        }
    }

    /// Discards the prediction about a task, because the task did not migrate, was suspended, or is
    /// no longer in the virtual machine.
    pub fn discard_prediction(&mut self, tid: Tid) {
        self.by_task.remove(&tid);
    }

    /// Returns the tasks whose migrations are tracked.
    pub fn tracked_tasks(&self) -> Vec<Tid> {
        self.by_task.keys().copied().collect()
    }

    /// Measures the rate of a running task that has done `total_work` work, when the task has been
    /// at the target for `RATE_CHECK_DELAY`. Ends tracking and returns the outcome of the
    /// migration if the task has done `RATIO_MAX` times the predicted work; otherwise returns
    /// `None`.
    pub fn check_prediction(
        &mut self,
        now: Micros,
        tid: Tid,
        total_work: Micros,
        estimates: &mut Estimates,
    ) -> Option<PredictionOutcome> {
        let prediction = self.by_task.get_mut(&tid)?;
        let arrival = prediction
            .arrival
            .filter(|arrival| now.since(arrival.arrived_at) >= RATE_CHECK_DELAY)?;
        let work_seconds = total_work.since(arrival.work_done).0 as f64 / 1e6;
        if prediction.rate_ratio.is_none() {
            let measured_ratio = prediction
                .measured_rate_ratio(work_seconds, now.since(arrival.arrived_at).0 as f64 / 1e6);
            prediction.rate_ratio = Some(measured_ratio);
            estimates.record_rate(now, measured_ratio);
        }
        if work_seconds < RATIO_MAX * prediction.work_left_s {
            return None;
        }
        estimates.record_work(now, prediction.declared, RATIO_MAX);
        let outcome = prediction.outcome(tid, &arrival, RATIO_MAX);
        self.discard_prediction(tid);
        Some(outcome)
    }

    /// Ends tracking of a task that ended after `total_work` work. Returns the outcome of the
    /// task's migration; `None` if the task had not arrived at the target.
    pub fn end_tracking(
        &mut self,
        now: Micros,
        tid: Tid,
        total_work: Micros,
        estimates: &mut Estimates,
    ) -> Option<PredictionOutcome> {
        let mut prediction = self.by_task.remove(&tid)?;
        let arrival = prediction.arrival?;
        let (work_seconds, time_at_target) = (
            total_work.since(arrival.work_done).0 as f64 / 1e6,
            now.since(arrival.arrived_at),
        );
        if prediction.rate_ratio.is_none() && time_at_target >= RATE_MEASURE_TIME_MIN {
            let measured_ratio =
                prediction.measured_rate_ratio(work_seconds, time_at_target.0 as f64 / 1e6);
            prediction.rate_ratio = Some(measured_ratio);
            estimates.record_rate(now, measured_ratio);
        }
        let ratio = (work_seconds / prediction.work_left_s).min(RATIO_MAX);
        estimates.record_work(now, prediction.declared, ratio);
        Some(prediction.outcome(tid, &arrival, ratio))
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
    /// `remaining_work` seconds of remaining work.
    fn doubling_rebalance(remaining_work: u64) -> Rebalance {
        let (predicted_gain, cost) = (Micros::from_secs(remaining_work), Micros::from_secs(1));
        let remaining_work = Micros::from_secs(remaining_work);
        let rebalance_reason = RebalanceReason {
            source_rate_permille: 500,
            target_rate_permille: 1000,
            gain: predicted_gain,
            cost,
            for_barrier_job: false,
            job_time_saved: None,
            work_left: remaining_work,
            declared: false,
            computed_gain: predicted_gain,
        };
        Rebalance {
            tid: tid(),
            source: host(1),
            target: host(2),
            reason: rebalance_reason,
        }
    }

    /// Tracks a migration with 100 seconds of predicted remaining work and returns its outcome. The
    /// task arrives at second `arrival_second` and does `work_seconds` seconds of work at the rate
    /// `rate`, in thousandths of an ordinary processor.
    fn follow(
        estimates: &mut Estimates,
        arrival_second: u64,
        rate: u64,
        work_seconds: u64,
    ) -> Option<PredictionOutcome> {
        let (mut predictions, arrival_second) = (
            PendingPredictions::default(),
            Micros::from_secs(arrival_second),
        );
        predictions.track(&doubling_rebalance(100));
        predictions.record_arrival(
            arrival_second,
            tid(),
            host(2),
            (Micros::from_secs(7), Micros::from_secs(2)),
        );
        let run_time = Micros(work_seconds * 1_000_000 * 1000 / rate);
        let work_after = |run_time: Micros| Micros(7_000_000 + run_time.0 * rate / 1000);
        if run_time > RATE_CHECK_DELAY {
            let check_result = predictions.check_prediction(
                arrival_second + RATE_CHECK_DELAY,
                tid(),
                work_after(RATE_CHECK_DELAY),
                estimates,
            );
            assert_eq!(check_result, None);
        }
        predictions.end_tracking(
            arrival_second + run_time,
            tid(),
            work_after(run_time),
            estimates,
        )
    }

    /// An outcome that equals the prediction leaves the correction factor at 1.
    #[test]
    fn accurate_prediction_keeps_confidence_at_one() {
        let mut estimates = Estimates::default();
        let outcome = follow(&mut estimates, 0, 1000, 100).expect("it has ended");
        let seconds = |pair: (Micros, Micros)| (pair.0.0 / 1_000_000, pair.1.0 / 1_000_000);
        assert_eq!(
            (
                seconds(outcome.predicted_gain_and_cost),
                seconds(outcome.actual_gain_and_cost)
            ),
            ((100, 1), (100, 2))
        );
        assert!((estimates.confidence(Micros::from_secs(100), false) - 1.0).abs() < 0.001);
    }

    /// Predicted gains are multiplied by the ratio learned from earlier migrations. This correction
    /// fades with time.
    #[test]
    fn confidence_follows_results_and_fades() {
        for (rate, work) in [(600, 100), (1000, 33)] {
            let mut estimates = Estimates::default();
            for n in 0..60 {
                follow(&mut estimates, n * 1000, rate, work).expect("it has ended");
            }
            let now = Micros::from_secs(60_000);
            let factor = estimates.confidence(now, false);
            assert!(
                (0.28..0.40).contains(&factor),
                "a third of what was expected came: {factor}"
            );
            let later_factor =
                |n: u64| estimates.confidence(now + Micros(n * CONFIDENCE_HALF_LIFE.0), false);
            assert!(
                later_factor(1) > factor && later_factor(4) > 0.9 && later_factor(4) < 1.0,
                "{} {}",
                later_factor(1),
                later_factor(4)
            );
            let restored_estimates = Estimates::restore(estimates.to_learned_costs());
            assert!(
                (restored_estimates.confidence(Micros(0), false) - factor).abs() < 0.05,
                "it outlives its keeper"
            );
        }
    }

    /// Nothing is learned from a task that becomes slower to make room for other tasks, that never
    /// arrives, or that migrates on to another host.
    #[test]
    fn unmeasurable_migrations_teach_nothing() {
        let (mut predictions, mut estimates) =
            (PendingPredictions::default(), Estimates::default());
        let late_time = Micros::from_secs(1000);
        predictions.track(&Rebalance {
            reason: RebalanceReason {
                target_rate_permille: 400,
                ..doubling_rebalance(9).reason
            },
            ..doubling_rebalance(9)
        });
        assert!(predictions.tracked_tasks().is_empty());
        predictions.track(&doubling_rebalance(9));
        assert_eq!(
            predictions.end_tracking(late_time, tid(), late_time, &mut estimates),
            None,
            "it never arrived"
        );
        predictions.track(&doubling_rebalance(9));
        predictions.record_arrival(Micros(0), tid(), host(2), (Micros(0), Micros(0)));
        predictions.record_arrival(Micros(1), tid(), host(3), (Micros(0), Micros(0)));
        assert_eq!(
            predictions.end_tracking(late_time, tid(), late_time, &mut estimates),
            None,
            "an owner came"
        );
        assert_eq!(estimates.confidence(late_time, false), 1.0);
    }

    proptest! {
        /// For any observations the factor stays within its bounds, and an actual gain is at most
        /// four times the predicted gain.
        #[test]
        fn confidence_stays_within_bounds(rate in 1_u64..3000, work in 1_u64..500, declared in any::<bool>()) {
            let mut estimates = Estimates::default();
            for n in 0..80 {
                if let Some(outcome) = follow(&mut estimates, n, rate, work) {
                    prop_assert!(outcome.actual_gain_and_cost.0.0 <= outcome.predicted_gain_and_cost.0.0 * 4);
                }
                let factor = estimates.confidence(Micros::from_secs(n), declared);
                prop_assert!((*CONFIDENCE_RANGE.start() - 1e-9..=*CONFIDENCE_RANGE.end() + 1e-9).contains(&factor), "{}", factor);
            }
        }
    }
}
