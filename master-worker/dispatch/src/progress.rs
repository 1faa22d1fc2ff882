//! How far a run is.

use crate::statistics::RunStatistics;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number of standard deviations of the estimate's spread.
const SPREAD_DEVIATIONS: f64 = 2.0;

/// Numbers of tasks and workers, and an estimate of the remaining time. The estimate assumes that
/// no further tasks are added.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    pub finished: u64,
    pub running: usize,
    pub waiting: usize,
    /// Tasks that wait for the end of a delay after a failed attempt.
    pub delayed: usize,
    pub quarantined: usize,
    pub workers: usize,
    pub computing_workers: usize,
    /// Remaining time in seconds; `None` before the first result or without a worker.
    pub remaining_s: Option<f64>,
    /// Uncertainty of the remaining time in seconds.
    pub spread_s: Option<f64>,
}

impl Progress {
    /// Adds the estimate from the durations of the accepted tasks.
    pub(crate) fn with_estimate(mut self, statistics: &RunStatistics) -> Self {
        if let Some((mean, deviation)) = statistics.task_duration()
            && self.computing_workers > 0
        {
            let open = (self.running + self.waiting + self.delayed) as f64;
            let workers = self.computing_workers as f64;
            self.remaining_s = Some(open * mean / workers);
            self.spread_s = Some(SPREAD_DEVIATIONS * deviation * open.sqrt() / workers);
        }
        self
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "{} finished, {} running, {} waiting",
            self.finished,
            self.running,
            self.waiting + self.delayed
        )?;
        if self.quarantined > 0 {
            write!(f, ", {} quarantined", self.quarantined)?;
        }
        write!(
            f,
            "; {} of {} workers compute",
            self.computing_workers, self.workers
        )?;
        if let (Some(remaining), Some(spread)) = (self.remaining_s, self.spread_s) {
            write!(f, "; {} left", duration_text(remaining, spread))?;
        }
        Ok(())
    }
}

/// Returns a duration with its spread in a unit that fits.
fn duration_text(seconds: f64, spread: f64) -> String {
    let (unit, name) = match seconds {
        s if s < 120.0 => (1.0, "s"),
        s if s < 7_200.0 => (60.0, "min"),
        _ => (3_600.0, "h"),
    };
    format!("{:.0} ± {:.0} {name}", seconds / unit, spread / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_an_estimate_only_if_there_is_one() {
        let mut progress = Progress {
            finished: 3,
            running: 2,
            waiting: 5,
            delayed: 1,
            workers: 4,
            computing_workers: 3,
            ..Progress::default()
        };
        let line = "3 finished, 2 running, 6 waiting; 3 of 4 workers compute";
        assert_eq!(progress.to_string(), line);
        progress.quarantined = 1;
        (progress.remaining_s, progress.spread_s) = (Some(600.0), Some(90.0));
        let line = "3 finished, 2 running, 6 waiting, 1 quarantined; 3 of 4 workers compute; \
                    10 ± 2 min left";
        assert_eq!(progress.to_string(), line);
    }
}
