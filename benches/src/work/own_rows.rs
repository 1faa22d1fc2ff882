//! The rows of the table that only the framework has.

use super::{FarmFigures, WORKER_COUNT, WorkSettings};

/// The figures that a row must reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Goal {
    None,
    /// Minimum number of tasks per second.
    Rate(f64),
    /// Minimum share of the workers' time that their tasks use.
    Efficiency(f64),
    /// Minimum efficiency, and maximum of the 99th percentile of idle gaps in microseconds.
    EfficiencyAndGap(f64, f64),
}

impl Goal {
    /// Returns whether the figures meet the goal; `None` without a goal.
    pub(super) fn is_met(self, figures: &FarmFigures) -> Option<bool> {
        let has_gap_below = |limit| figures.gap_p99_us.is_some_and(|gap| gap <= limit);
        match self {
            Self::None => None,
            Self::Rate(rate) => Some(figures.tasks_per_second >= rate),
            Self::Efficiency(share) => Some(figures.efficiency >= share),
            Self::EfficiencyAndGap(share, gap_us) => {
                Some(figures.efficiency >= share && has_gap_below(gap_us))
            }
        }
    }

    pub(super) fn text(self) -> String {
        match self {
            Self::None => String::new(),
            Self::Rate(rate) => format!("{rate:.0}/s"),
            Self::Efficiency(share) => format!("efficiency {share}"),
            Self::EfficiencyAndGap(share, gap_us) => format!("efficiency {share}, gap {gap_us} us"),
        }
    }
}

/// A run of the framework and its row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnRow {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// Number of measured tasks in a full run.
    task_count: u64,
    /// Further arguments of the program `work-farm`.
    arguments: &'static [&'static str],
    pub(super) uses_two_hosts: bool,
    /// Number of waiting tasks, if the row belongs to the plot over this number.
    pub(super) waiting: Option<u64>,
    pub(super) goal: Goal,
}

impl OwnRow {
    const fn new(
        name: &'static str,
        title: &'static str,
        task_count: u64,
        arguments: &'static [&'static str],
        goal: Goal,
    ) -> Self {
        Self {
            name,
            title,
            task_count,
            arguments,
            uses_two_hosts: false,
            waiting: None,
            goal,
        }
    }

    const fn on_two_hosts(mut self) -> Self {
        self.uses_two_hosts = true;
        self
    }

    const fn with_waiting(name: &'static str, title: &'static str, waiting: u64) -> Self {
        let mut row = Self::new(name, title, 100_000, &[], GOAL_BATCHED);
        row.waiting = Some(waiting);
        row
    }

    /// Returns the arguments of the program `work-farm`.
    pub(super) fn arguments(&self, settings: &WorkSettings) -> Vec<String> {
        let mut arguments = vec![
            format!("tasks={}", settings.task_count(self.task_count)),
            format!("workers={WORKER_COUNT}"),
        ];
        arguments.extend(self.arguments.iter().map(|text| (*text).to_string()));
        if let Some(waiting) = self.waiting {
            arguments.push(format!("waiting={waiting}"));
        }
        arguments
    }
}

const GOAL_BATCHED: Goal = Goal::Rate(50_000.0);
const GOAL_SINGLE: Goal = Goal::Rate(20_000.0);
const TWO_HOSTS: &str = "hosts=h1,h2";

pub(super) const OWN_ROWS: [OwnRow; 21] = [
    OwnRow::new(
        "batched",
        "empty tasks, in batches",
        200_000,
        &[],
        GOAL_BATCHED,
    ),
    OwnRow::new(
        "single",
        "empty tasks, one per message",
        100_000,
        &["flow=single"],
        GOAL_SINGLE,
    ),
    OwnRow::new(
        "alone",
        "empty tasks, no look-ahead",
        50_000,
        &["flow=alone"],
        Goal::None,
    ),
    OwnRow::new(
        "data1k",
        "1 KiB each way, in batches",
        100_000,
        &["payload=1024"],
        Goal::None,
    ),
    OwnRow::new(
        "data64k",
        "64 KiB each way",
        20_000,
        &["payload=65536"],
        Goal::None,
    ),
    OwnRow::new(
        "journal",
        "empty tasks, in batches, journal",
        200_000,
        &["journal=/tmp/work-farm-journal"],
        Goal::None,
    ),
    OwnRow::new(
        "grain100us",
        "0.1 ms",
        50_000,
        &["grain_us=100"],
        Goal::None,
    ),
    OwnRow::new(
        "grain1ms",
        "1 ms",
        8_000,
        &["grain_us=1000"],
        Goal::EfficiencyAndGap(0.95, 10.0),
    ),
    OwnRow::new(
        "grain10ms",
        "10 ms",
        800,
        &["grain_us=10000"],
        Goal::Efficiency(0.99),
    ),
    OwnRow::new(
        "alone1ms",
        "1 ms, no look-ahead",
        8_000,
        &["grain_us=1000", "flow=alone"],
        Goal::None,
    ),
    OwnRow::new(
        "alone10ms",
        "10 ms, no look-ahead",
        800,
        &["grain_us=10000", "flow=alone"],
        Goal::None,
    ),
    OwnRow::new(
        "random1ms",
        "1 ms, exponential",
        8_000,
        &["grain_us=1000", "spread=exponential"],
        Goal::None,
    ),
    OwnRow::new(
        "random10ms",
        "10 ms, exponential",
        800,
        &["grain_us=10000", "spread=exponential"],
        Goal::None,
    ),
    OwnRow::with_waiting("waiting1k", "1,000 tasks wait", 1_000),
    OwnRow::with_waiting("waiting10k", "10,000 tasks wait", 10_000),
    OwnRow::with_waiting("waiting100k", "100,000 tasks wait", 100_000),
    OwnRow::with_waiting("waiting1m", "1,000,000 tasks wait", 1_000_000),
    OwnRow::new(
        "batched2",
        "two hosts: in batches",
        200_000,
        &[TWO_HOSTS],
        GOAL_BATCHED,
    )
    .on_two_hosts(),
    OwnRow::new(
        "single2",
        "two hosts: one per message",
        100_000,
        &[TWO_HOSTS, "flow=single"],
        GOAL_SINGLE,
    )
    .on_two_hosts(),
    OwnRow::new(
        "alone2",
        "two hosts: no look-ahead",
        50_000,
        &[TWO_HOSTS, "flow=alone"],
        Goal::None,
    )
    .on_two_hosts(),
    OwnRow::new(
        "grain1ms2",
        "two hosts: 1 ms",
        8_000,
        &[TWO_HOSTS, "grain_us=1000"],
        Goal::Efficiency(0.95),
    )
    .on_two_hosts(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_of_rows_differ() {
        let names: BTreeSet<&str> = OWN_ROWS.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), OWN_ROWS.len());
    }

    #[test]
    fn goal_needs_all_its_figures() {
        let figures = FarmFigures {
            tasks_per_second: 900.0,
            efficiency: 0.96,
            gap_p99_us: Some(11.0),
            ..FarmFigures::default()
        };
        assert_eq!(Goal::None.is_met(&figures), None);
        assert_eq!(Goal::Rate(901.0).is_met(&figures), Some(false));
        assert_eq!(Goal::Efficiency(0.95).is_met(&figures), Some(true));
        assert_eq!(
            Goal::EfficiencyAndGap(0.95, 10.0).is_met(&figures),
            Some(false)
        );
        assert_eq!(
            Goal::EfficiencyAndGap(0.95, 12.0).is_met(&figures),
            Some(true)
        );
    }
}
