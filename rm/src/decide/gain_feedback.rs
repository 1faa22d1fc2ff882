//! Learned corrections of predicted gains: the mean ratios of actual to predicted values, and the
//! factor that follows from them.

use sempa_proto::Micros;
use serde::{Deserialize, Serialize};

/// Range of the factor by which computed gains are multiplied.
pub const CONFIDENCE_RANGE: std::ops::RangeInclusive<f64> = 0.1..=1.5;
/// Half-life of the correction if no new observation confirms it.
pub const CONFIDENCE_HALF_LIFE: Micros = Micros::from_secs(2 * 3600);
/// Minimum weight of the newest observation.
const NEWEST_WEIGHT: f64 = 0.1;
/// Weight of the initial ratio 1, as a number of migrations.
const PRIOR_WEIGHT: f64 = 3.0;

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
    fn record(&mut self, ratio: f64) {
        self.seen += 1;
        let weight = NEWEST_WEIGHT.max(1.0 / (self.seen as f64 + PRIOR_WEIGHT));
        self.mean += weight * (ratio - self.mean);
    }
}

/// Learned corrections of predicted gains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct GainFeedback {
    /// Ratio of the actual to the predicted gain in rate at the target.
    rate: Ratio,
    /// Ratios of the actual to the predicted remaining work: index 0 for estimated work, 1 for
    /// declared work.
    work: [Ratio; 2],
    /// Time of the last observation.
    heard: Micros,
}

impl GainFeedback {
    /// Returns the factor by which a computed gain is multiplied. `declared`: the gain was computed
    /// from declared work.
    pub(super) fn confidence(&self, now: Micros, declared: bool) -> f64 {
        let learned = (self.rate.mean * self.work[usize::from(declared)].mean)
            .clamp(*CONFIDENCE_RANGE.start(), *CONFIDENCE_RANGE.end());
        let age = now.since(self.heard).0 as f64 / CONFIDENCE_HALF_LIFE.0 as f64;
        learned.powf(0.5_f64.powf(age))
    }

    /// Returns the same corrections, with the time of the last observation set to the start of a
    /// new clock.
    pub(super) fn on_new_clock(self) -> GainFeedback {
        GainFeedback {
            heard: Micros::default(),
            ..self
        }
    }

    /// Returns a counter that rises with every observation.
    pub(super) fn observations(&self) -> u64 {
        self.rate.seen + self.work.iter().map(|work| work.seen).sum::<u64>()
    }

    pub(super) fn is_valid(&self) -> bool {
        [self.rate, self.work[0], self.work[1]]
            .iter()
            .all(|ratio| ratio.mean.is_finite())
    }

    pub(super) fn record_rate(&mut self, now: Micros, ratio: f64) {
        self.heard = now;
        self.rate.record(ratio);
    }

    pub(super) fn record_work(&mut self, now: Micros, declared: bool, ratio: f64) {
        self.heard = now;
        self.work[usize::from(declared)].record(ratio);
    }
}
