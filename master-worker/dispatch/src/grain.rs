//! Time limit of tasks that return their unsearched work.

use crate::Micros;
use serde::{Deserialize, Serialize};

/// Waiting tasks per worker at which tasks get the shortest time limit.
const FEW_TASKS: f64 = 2.0;
/// Waiting tasks per worker at which tasks get the longest time limit.
const MANY_TASKS: f64 = 32.0;

/// Time limit of an attempt. If few tasks wait, workers must return work soon, so that others get
/// some. If many tasks wait, longer attempts cost the master less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grain {
    pub shortest: Micros,
    pub longest: Micros,
}

impl Grain {
    /// Returns the time limit of an attempt that begins while `waiting` tasks wait and `workers`
    /// workers compute.
    pub fn time_limit(self, waiting: usize, workers: usize) -> Micros {
        let shortest = self.shortest.max(1) as f64;
        let longest = self.longest.max(self.shortest).max(1) as f64;
        let tasks_per_worker = waiting as f64 / workers.max(1) as f64;
        let position = (tasks_per_worker / FEW_TASKS).max(1.0).ln() / (MANY_TASKS / FEW_TASKS).ln();
        (shortest * (longest / shortest).powf(position.min(1.0))).round() as Micros
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_waiting_tasks_give_longer_limits() {
        let grain = Grain {
            shortest: 100,
            longest: 10_000,
        };
        assert_eq!(grain.time_limit(0, 4), 100);
        assert_eq!(grain.time_limit(8, 4), 100);
        assert_eq!(grain.time_limit(32, 4), 1_000);
        assert_eq!(grain.time_limit(128, 4), 10_000);
        assert_eq!(grain.time_limit(1_000_000, 4), 10_000);
        assert_eq!(grain.time_limit(10, 0), grain.time_limit(10, 1));
    }

    #[test]
    fn wrong_order_of_the_limits_gives_the_shortest() {
        let grain = Grain {
            shortest: 500,
            longest: 100,
        };
        assert_eq!(grain.time_limit(1_000, 1), 500);
    }
}
