//! Parses the times that measuring programs print, and combines repetitions.

use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::collections::BTreeMap;

/// A measured message-passing system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    /// PVM 3.4.6 from Debian.
    Pvm,
    Sempa,
    OpenMpi,
    Mpich,
}

impl System {
    /// All systems, in the order of the columns of the table.
    pub const ALL: [Self; 4] = [Self::Pvm, Self::Sempa, Self::OpenMpi, Self::Mpich];

    /// Returns the name of the system in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pvm => "PVM 3.4.6",
            Self::Sempa => "Sempa",
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
        }
    }

    /// True for the systems whose measuring program uses PVM calls.
    pub(crate) fn uses_pvm_calls(self) -> bool {
        matches!(self, Self::Pvm | Self::Sempa)
    }
}

/// A measurement that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MeasurementFailure {
    pub(crate) system: System,
    /// The name of the measurement and the reason for the failure.
    pub(crate) text: String,
}

impl Serialize for MeasurementFailure {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

/// Summary of the times that one run of a program has measured, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct TimeSummary {
    /// Number of measured times in this summary.
    pub(crate) count: u64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) least_us: f64,
}

impl TimeSummary {
    /// Creates the summary of a single time of `us` microseconds.
    pub(crate) fn of_single_time(us: f64) -> Self {
        Self {
            count: 1,
            median_us: us,
            p99_us: us,
            least_us: us,
        }
    }
}

/// The summaries of one run of a program, by name of the time.
pub(crate) type TimeSummaries = BTreeMap<String, TimeSummary>;

/// Parses the lines `sample NAME COUNT MEDIAN P99 LEAST` in a program's output.
///
/// # Errors
/// There is no such line, or such a line is malformed.
pub(crate) fn parse_samples(output: &str) -> Result<TimeSummaries> {
    let mut summaries = TimeSummaries::new();
    for line in output.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let ["sample", name, count, median, p99, shortest] = fields[..] else {
            continue;
        };
        let parse_number = |text: &str| {
            text.parse::<f64>()
                .with_context(|| format!("no number: {line}"))
        };
        let (median_us, p99_us, least_us) = (
            parse_number(median)?,
            parse_number(p99)?,
            parse_number(shortest)?,
        );
        summaries.insert(
            name.to_string(),
            TimeSummary {
                count: count.parse()?,
                median_us,
                p99_us,
                least_us,
            },
        );
    }
    if summaries.is_empty() {
        bail!("no samples in its output: {}", output.trim());
    }
    Ok(summaries)
}

/// Combines the summaries of the time `time_name` in all repetitions: computes the sum of the
/// counts, and the median of the medians, of the p99 values, and of the shortest times. Returns
/// `None` if no repetition has the time.
pub(crate) fn combine_repetitions(
    repetitions: &[TimeSummaries],
    time_name: &str,
) -> Option<TimeSummary> {
    let summaries: Vec<TimeSummary> = repetitions
        .iter()
        .filter_map(|run_summaries| run_summaries.get(time_name))
        .copied()
        .collect();
    let median_of =
        |select: fn(&TimeSummary) -> f64| median(summaries.iter().map(select).collect());
    Some(TimeSummary {
        count: summaries.iter().map(|sample| sample.count).sum(),
        median_us: median_of(|sample| sample.median_us)?,
        p99_us: median_of(|sample| sample.p99_us)?,
        least_us: median_of(|sample| sample.least_us)?,
    })
}

/// Returns the smallest and the largest median of the time `time_name` if the largest median
/// exceeds the smallest median by more than the factor `factor`; otherwise `None`.
pub(crate) fn median_range_above(
    repetitions: &[TimeSummaries],
    time_name: &str,
    factor: f64,
) -> Option<(f64, f64)> {
    let medians = || {
        repetitions
            .iter()
            .filter_map(|summaries| summaries.get(time_name))
            .map(|sample| sample.median_us)
    };
    let (smallest_us, largest_us) = (
        medians().fold(f64::INFINITY, f64::min),
        medians().fold(0.0, f64::max),
    );
    (largest_us > factor * smallest_us).then_some((smallest_us, largest_us))
}

/// Returns the median; `None` if there are no values. For an even number of values, the median is
/// the mean of the two middle values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle_index = values.len() / 2;
    let upper_value = values.get(middle_index)?;
    Some(if values.len() % 2 == 1 {
        *upper_value
    } else {
        (values[middle_index - 1] + upper_value) / 2.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sample_lines_are_parsed() {
        let summaries =
            parse_samples("libpvm: hello\nsample rtt 3 1.5 2.5 1.0\nend\n").expect("one sample");
        assert_eq!(
            summaries["rtt"],
            TimeSummary {
                count: 3,
                median_us: 1.5,
                p99_us: 2.5,
                least_us: 1.0
            }
        );
        assert!(parse_samples("nothing\n").is_err());
        assert!(parse_samples("sample rtt 3 x 2.5 1.0\n").is_err());
    }

    #[test]
    fn repetitions_combine_to_median() {
        let single_time =
            |us| TimeSummaries::from([("rtt".to_string(), TimeSummary::of_single_time(us))]);
        let combined_summary = combine_repetitions(
            &[single_time(1.0), single_time(100.0), single_time(2.0)],
            "rtt",
        )
        .expect("three");
        assert_eq!(
            (combined_summary.median_us, combined_summary.count),
            (2.0, 3)
        );
        assert_eq!(combine_repetitions(&[single_time(1.0)], "other"), None);
        assert_eq!(median(vec![1.0, 3.0]), Some(2.0));
    }

    #[test]
    fn large_spread_is_reported() {
        let single_time =
            |us| TimeSummaries::from([("rtt".to_string(), TimeSummary::of_single_time(us))]);
        let repetitions = [single_time(169.0), single_time(400.0), single_time(170.0)];
        assert_eq!(
            median_range_above(&repetitions, "rtt", 1.5),
            Some((169.0, 400.0))
        );
        assert_eq!(median_range_above(&repetitions, "rtt", 3.0), None);
        assert_eq!(median_range_above(&repetitions, "other", 1.5), None);
    }
}
