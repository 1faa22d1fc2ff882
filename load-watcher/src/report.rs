//! Decides when the load is sampled and which samples are sent to the resource manager. Pure.

use sempa_proto::Micros;
use sempa_proto::load::{LoadSample, OwnerVerdict};

/// Interval between samples while the load changes.
pub const SAMPLE_INTERVAL_CHANGING_LOAD: Micros = Micros::from_secs(1);
/// Interval between samples while the load does not change.
pub const SAMPLE_INTERVAL_STEADY_LOAD: Micros = Micros::from_secs(5);
/// Number of consecutive unchanged samples after which the interval becomes
/// [`SAMPLE_INTERVAL_STEADY_LOAD`].
const UNCHANGED_SAMPLES_MIN: u32 = 5;
/// Maximum interval between reports. The resource manager considers a sample valid for 15 s.
pub const REPORT_INTERVAL_MAX: Micros = Micros::from_secs(10);
/// Minimum difference of `busy_share`, a share from 0 to 1, that counts as a change. Also the
/// minimum difference of the processors that tasks use, as a share of the usable processors.
const BUSY_CHANGE_MIN: f32 = 0.1;
/// Difference of `cpu_limit`, in processors, above which the limit counts as changed.
const CPU_LIMIT_TOLERANCE_PROCESSORS: f32 = 0.02;
/// Minimum difference of the number of runnable threads that counts as a change.
const RUNNING_THREADS_CHANGE_MIN: u32 = 2;
/// Maximum number of logins in a report.
pub const REPORTED_LOGINS_MAX: usize = 64;

/// True if two samples differ so much that the resource manager needs the newer sample.
fn differ_notably(a: &LoadSample, b: &LoadSample) -> bool {
    let memory_difference = a.available_bytes.abs_diff(b.available_bytes);
    a.cores != b.cores
        || (a.cpu_limit - b.cpu_limit).abs() > CPU_LIMIT_TOLERANCE_PROCESSORS
        || (a.busy_share - b.busy_share).abs() >= BUSY_CHANGE_MIN
        || a.runnable_threads.abs_diff(b.runnable_threads) >= RUNNING_THREADS_CHANGE_MIN
        || a.task_cpus.is_some() != b.task_cpus.is_some()
        || (a.task_cpus.unwrap_or(0.0) - b.task_cpus.unwrap_or(0.0)).abs()
            >= BUSY_CHANGE_MIN * a.usable_processors()
        || memory_difference > a.available_bytes.max(b.available_bytes) / 10
}

/// Decides when the next sample and the next report are due, from the last report and the last
/// samples.
#[derive(Debug, Default)]
pub struct Reporter {
    /// Time and content of the last report; the string is the reason of the verdict. `None` before
    /// the first report.
    last_report: Option<(Micros, LoadSample, OwnerVerdict, String)>,
    last_sample: Option<LoadSample>,
    unchanged_sample_count: u32,
}

impl Reporter {
    /// True if the owner verdict or its reason has changed since the last report, or if no report
    /// was sent yet.
    pub fn owner_changed(&self, verdict: &OwnerVerdict, reason: &str) -> bool {
        self.last_report
            .as_ref()
            .is_none_or(|(_, _, reported_verdict, reported_reason)| {
                reported_verdict != verdict || reported_reason != reason
            })
    }

    /// True if this sample must be reported at the time `now` (monotonic clock): the load has
    /// changed since the last report, the last report is too old, or no report was sent yet.
    pub fn must_report_load(&self, now: Micros, sample: &LoadSample) -> bool {
        self.last_report
            .as_ref()
            .is_none_or(|(reported_at, last_sample, ..)| {
                now.since(*reported_at) >= REPORT_INTERVAL_MAX
                    || differ_notably(last_sample, sample)
            })
    }

    /// Records that a report with this content was sent at the time `now` (monotonic clock).
    pub fn record_report(
        &mut self,
        now: Micros,
        sample: LoadSample,
        verdict: OwnerVerdict,
        reason: String,
    ) {
        self.last_report = Some((now, sample, verdict, reason));
    }

    /// Records `sample` as the newest sample, and returns the interval until the next sample.
    pub fn next_sample_interval(&mut self, sample: &LoadSample) -> Micros {
        let has_changed = self
            .last_sample
            .is_none_or(|previous_sample| differ_notably(&previous_sample, sample));
        self.last_sample = Some(*sample);
        self.unchanged_sample_count = if has_changed {
            0
        } else {
            self.unchanged_sample_count.saturating_add(1)
        };
        if self.unchanged_sample_count < UNCHANGED_SAMPLES_MIN {
            SAMPLE_INTERVAL_CHANGING_LOAD
        } else {
            SAMPLE_INTERVAL_STEADY_LOAD
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load_sample(busy_share: f32, runnable_threads: u32) -> LoadSample {
        LoadSample {
            cores: 2,
            busy_share,
            runnable_threads,
            available_bytes: 1 << 30,
            ..LoadSample::default()
        }
    }

    fn absent_verdict() -> OwnerVerdict {
        OwnerVerdict::Absent { since: None }
    }

    /// A new owner verdict or a new reason must be reported.
    #[test]
    fn changed_verdict_or_reason_is_reported() {
        let mut reporter = Reporter::default();
        assert!(reporter.owner_changed(&absent_verdict(), "nobody"));
        reporter.record_report(
            Micros(0),
            load_sample(0.0, 0),
            absent_verdict(),
            "nobody".into(),
        );
        assert!(!reporter.owner_changed(&absent_verdict(), "nobody"));
        assert!(reporter.owner_changed(&absent_verdict(), "no file"));
        assert!(reporter.owner_changed(
            &OwnerVerdict::Present {
                since: Micros(1),
                detected_at: Micros(2)
            },
            "nobody"
        ));
    }

    /// The load must be reported when it changes, and at least every ten seconds.
    #[test]
    fn load_is_reported_on_change_and_every_ten_seconds() {
        let mut reporter = Reporter::default();
        assert!(reporter.must_report_load(Micros(0), &load_sample(0.2, 1)));
        reporter.record_report(
            Micros(0),
            load_sample(0.2, 1),
            absent_verdict(),
            String::new(),
        );
        let time_before_deadline = Micros::from_secs(9);
        assert!(!reporter.must_report_load(time_before_deadline, &load_sample(0.25, 2)));
        assert!(reporter.must_report_load(time_before_deadline, &load_sample(0.4, 1)));
        assert!(reporter.must_report_load(time_before_deadline, &load_sample(0.2, 3)));
        assert!(reporter.must_report_load(
            time_before_deadline,
            &LoadSample {
                cores: 4,
                ..load_sample(0.2, 1)
            }
        ));
        assert!(reporter.must_report_load(
            time_before_deadline,
            &LoadSample {
                task_cpus: Some(0.3),
                ..load_sample(0.2, 1)
            }
        ));
        assert!(reporter.must_report_load(
            time_before_deadline,
            &LoadSample {
                available_bytes: 1 << 29,
                ..load_sample(0.2, 1)
            }
        ));
        assert!(reporter.must_report_load(Micros::from_secs(10), &load_sample(0.2, 1)));
    }

    /// After several unchanged samples the sample interval gets longer. The first change makes the
    /// interval short again.
    #[test]
    fn sample_interval_depends_on_changes() {
        let mut reporter = Reporter::default();
        let intervals: Vec<_> = (0..7)
            .map(|_| reporter.next_sample_interval(&load_sample(0.0, 0)))
            .collect();
        assert_eq!(intervals[..5], [SAMPLE_INTERVAL_CHANGING_LOAD; 5]);
        assert_eq!(intervals[5..], [SAMPLE_INTERVAL_STEADY_LOAD; 2]);
        assert_eq!(
            reporter.next_sample_interval(&load_sample(0.9, 3)),
            SAMPLE_INTERVAL_CHANGING_LOAD
        );
    }
}
