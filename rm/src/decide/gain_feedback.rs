//! Learned corrections of predicted gains: the mean ratios of actual to predicted values, and the
//! factor that follows from them.

use sempa_proto::Micros;
use serde::{Deserialize, Serialize};

/// Range of the factor by which computed gains are multiplied.
pub const CONFIDENCE_RANGE: std::ops::RangeInclusive<f64> = 0.1..=1.5;
/// Time in which the logarithm of a correction falls to half if there is no new observation.
pub const CONFIDENCE_HALF_LIFE: Micros = Micros::from_secs(2 * 3600);
/// Minimum weight of the newest observation.
const NEWEST_WEIGHT: f64 = 0.1;
/// Weight of the initial ratio 1, as a number of migrations.
const PRIOR_WEIGHT: f64 = 3.0;

/// Mean ratio of actual to predicted values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Ratio {
    mean: f64,
    observation_count: u64,
}

impl Default for Ratio {
    fn default() -> Self {
        Self {
            mean: 1.0,
            observation_count: 0,
        }
    }
}

impl Ratio {
    fn record(&mut self, ratio: f64) {
        self.observation_count += 1;
        let weight = NEWEST_WEIGHT.max(1.0 / (self.observation_count as f64 + PRIOR_WEIGHT));
        self.mean += weight * (ratio - self.mean);
    }
}

/// Learned corrections of predicted gains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct GainFeedback {
    /// Ratio of the actual to the predicted gain in rate at the target.
    rate_ratio: Ratio,
    /// Ratios of the actual to the predicted remaining work: index 0 for estimated work, 1 for
    /// declared work.
    work_ratios: [Ratio; 2],
    /// Time of the last observation.
    observed_at: Micros,
}

impl GainFeedback {
    /// Returns the factor by which a computed gain is multiplied. `declared`: the gain was computed
    /// from declared work.
    pub(super) fn confidence(&self, now: Micros, declared: bool) -> f64 {
        let learned_ratio = (self.rate_ratio.mean * self.work_ratios[usize::from(declared)].mean)
            .clamp(*CONFIDENCE_RANGE.start(), *CONFIDENCE_RANGE.end());
        let age_half_lives = now.since(self.observed_at).0 as f64 / CONFIDENCE_HALF_LIFE.0 as f64;
        learned_ratio.powf(0.5_f64.powf(age_half_lives))
    }

    /// Returns the same corrections for use with a new clock. The time of the last observation
    /// becomes the start of that clock.
    pub(super) fn with_clock_reset(self) -> Self {
        Self {
            observed_at: Micros::default(),
            ..self
        }
    }

    /// Returns the total number of observations.
    pub(super) fn observation_count(&self) -> u64 {
        self.rate_ratio.observation_count
            + self
                .work_ratios
                .iter()
                .map(|ratio| ratio.observation_count)
                .sum::<u64>()
    }

    pub(super) fn is_valid(&self) -> bool {
        [self.rate_ratio, self.work_ratios[0], self.work_ratios[1]]
            .iter()
            .all(|ratio| ratio.mean.is_finite())
    }

    pub(super) fn record_rate(&mut self, now: Micros, ratio: f64) {
        self.observed_at = now;
        self.rate_ratio.record(ratio);
    }

    pub(super) fn record_work(&mut self, now: Micros, declared: bool, ratio: f64) {
        self.observed_at = now;
        self.work_ratios[usize::from(declared)].record(ratio);
    }
}
