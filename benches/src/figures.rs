//! Parses the times that measured programs print, and combines repetitions.

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
    pub const ALL: [System; 4] = [System::Pvm, System::Sempa, System::OpenMpi, System::Mpich];

    /// Returns the name of the system in the table.
    pub fn name(self) -> &'static str {
        match self {
            System::Pvm => "PVM 3.4.6",
            System::Sempa => "Sempa",
            System::OpenMpi => "Open MPI",
            System::Mpich => "MPICH",
        }
    }

    /// True for the systems that run the measuring program with PVM calls.
    pub(crate) fn is_pvm(self) -> bool {
        matches!(self, System::Pvm | System::Sempa)
    }
}

/// A measurement that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MeasurementFailure {
    pub(crate) system: System,
    /// The name of the measurement and the reason of the failure.
    pub(crate) text: String,
}

impl Serialize for MeasurementFailure {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

/// Summary of the times that one program run has measured, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct TimeSummary {
    /// Number of times that are summarized.
    pub(crate) count: u64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    /// The shortest of the times.
    pub(crate) least_us: f64,
}

impl TimeSummary {
    /// Creates the summary of a single time `us`.
    pub(crate) fn one(us: f64) -> TimeSummary {
        TimeSummary {
            count: 1,
            median_us: us,
            p99_us: us,
            least_us: us,
        }
    }
}

/// The summaries of one program run, by name of the time.
pub(crate) type TimeSummaries = BTreeMap<String, TimeSummary>;

/// Parses the lines `sample NAME COUNT MEDIAN P99 LEAST` in a program's output.
///
/// # Errors
/// Fails if there is no such line or one of them is malformed.
pub(crate) fn parse_samples(output: &str) -> Result<TimeSummaries> {
    let mut all = TimeSummaries::new();
    for line in output.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["sample", name, count, median, p99, least] = words[..] else {
            continue;
        };
        let number = |word: &str| {
            word.parse::<f64>()
                .with_context(|| format!("no number: {line}"))
        };
        let (median_us, p99_us, least_us) = (number(median)?, number(p99)?, number(least)?);
        all.insert(
            name.to_string(),
            TimeSummary {
                count: count.parse()?,
                median_us,
                p99_us,
                least_us,
            },
        );
    }
    if all.is_empty() {
        bail!("it said nothing to measure by: {}", output.trim());
    }
    Ok(all)
}

/// Combines the summaries of the time `name` in all repetitions: takes the median of the medians,
/// of the p99 values, and of the shortest times. `None` if no repetition has the time.
pub(crate) fn combine_repetitions(all: &[TimeSummaries], name: &str) -> Option<TimeSummary> {
    let own: Vec<TimeSummary> = all
        .iter()
        .filter_map(|samples| samples.get(name))
        .copied()
        .collect();
    let middle = |pick: fn(&TimeSummary) -> f64| median(own.iter().map(pick).collect());
    Some(TimeSummary {
        count: own.iter().map(|sample| sample.count).sum(),
        median_us: middle(|sample| sample.median_us)?,
        p99_us: middle(|sample| sample.p99_us)?,
        least_us: middle(|sample| sample.least_us)?,
    })
}

/// Returns the smallest and the largest median of the time `name` if the largest one exceeds the
/// smallest one by more than `factor`; otherwise `None`.
pub(crate) fn spread_above(all: &[TimeSummaries], name: &str, factor: f64) -> Option<(f64, f64)> {
    let medians = || {
        all.iter()
            .filter_map(|samples| samples.get(name))
            .map(|sample| sample.median_us)
    };
    let (least, most) = (
        medians().fold(f64::INFINITY, f64::min),
        medians().fold(0.0, f64::max),
    );
    (most > factor * least).then_some((least, most))
}

/// Returns the median; `None` if there are no values. For an even number of values, the median is
/// the mean of the two in the middle.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = values.get(middle)?;
    Some(if values.len() % 2 == 1 {
        *upper
    } else {
        (values[middle - 1] + upper) / 2.0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sample lines are parsed, others are not.
    #[test]
    fn only_sample_lines_are_parsed() {
        let all =
            parse_samples("libpvm: hello\nsample rtt 3 1.5 2.5 1.0\nend\n").expect("one sample");
        assert_eq!(
            all["rtt"],
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

    /// Repetitions are combined to their median.
    #[test]
    fn repetitions_combine_to_median() {
        let one = |us| TimeSummaries::from([("rtt".to_string(), TimeSummary::one(us))]);
        let all = combine_repetitions(&[one(1.0), one(100.0), one(2.0)], "rtt").expect("three");
        assert_eq!((all.median_us, all.count), (2.0, 3));
        assert_eq!(combine_repetitions(&[one(1.0)], "other"), None);
        assert_eq!(median(vec![1.0, 3.0]), Some(2.0));
    }

    /// Medians that differ much are reported.
    #[test]
    fn large_spread_is_reported() {
        let one = |us| TimeSummaries::from([("rtt".to_string(), TimeSummary::one(us))]);
        let all = [one(169.0), one(400.0), one(170.0)];
        assert_eq!(spread_above(&all, "rtt", 1.5), Some((169.0, 400.0)));
        assert_eq!(spread_above(&all, "rtt", 3.0), None);
        assert_eq!(spread_above(&all, "other", 1.5), None);
    }
}
