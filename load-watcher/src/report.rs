//! Decides when the load is sampled and which samples are sent to the resource manager. Pure.

use sempa_proto::Micros;
use sempa_proto::load::{LoadSample, OwnerVerdict};

/// Interval of samples while the load changes.
pub const SAMPLE_INTERVAL_BUSY: Micros = Micros::from_secs(1);
/// Interval of samples while the load does not change.
pub const SAMPLE_INTERVAL_QUIET: Micros = Micros::from_secs(5);
/// Number of consecutive samples without a change after which the interval gets longer.
const QUIET_SAMPLES_MIN: u32 = 5;
/// Maximum interval of reports. The resource manager considers a sample valid for 15 s.
pub const REPORT_INTERVAL_MAX: Micros = Micros::from_secs(10);
/// Minimum difference of `busy` between two samples that counts as a change.
const BUSY_CHANGE_MIN: f32 = 0.1;
/// Difference of `cpu_limit` between two samples above which it counts as a change, in processors.
const CPU_LIMIT_CHANGE_MIN: f32 = 0.02;
/// Minimum difference of the number of runnable threads that counts as a change.
const RUNNING_CHANGE_MIN: u32 = 2;
/// Maximum number of logins in a report.
pub const REPORTED_LOGINS_MAX: usize = 64;

/// True if the difference of two samples is relevant to the resource manager.
fn differ_notably(a: &LoadSample, b: &LoadSample) -> bool {
    let memory = a.available_bytes.abs_diff(b.available_bytes);
    a.cores != b.cores
        || (a.cpu_limit - b.cpu_limit).abs() > CPU_LIMIT_CHANGE_MIN
        || (a.busy - b.busy).abs() >= BUSY_CHANGE_MIN
        || a.running.abs_diff(b.running) >= RUNNING_CHANGE_MIN
        || a.task_cpus.is_some() != b.task_cpus.is_some()
        || (a.task_cpus.unwrap_or(0.0) - b.task_cpus.unwrap_or(0.0)).abs()
            >= BUSY_CHANGE_MIN * a.processors()
        || memory > a.available_bytes.max(b.available_bytes) / 10
}

/// State of the reports: the last report and the last samples. Decides when the next sample and the
/// next report are due.
#[derive(Debug, Default)]
pub struct Reporter {
    last_report: Option<(Micros, LoadSample, OwnerVerdict, String)>,
    last_sample: Option<LoadSample>,
    unchanged_samples: u32,
}

impl Reporter {
    /// True if the owner verdict or its reason has changed since the last report.
    pub fn owner_changed(&self, owner: &OwnerVerdict, why: &str) -> bool {
        self.last_report
            .as_ref()
            .is_none_or(|(_, _, was, because)| was != owner || because != why)
    }

    /// True if this sample must be reported at `now` (monotonic clock), because the load has
    /// changed or the last report is too old.
    pub fn must_report_load(&self, now: Micros, sample: &LoadSample) -> bool {
        self.last_report.as_ref().is_none_or(|(at, last, ..)| {
            now.since(*at) >= REPORT_INTERVAL_MAX || differ_notably(last, sample)
        })
    }

    /// Records the content of a report that was sent at `now`.
    pub fn record_sent(
        &mut self,
        now: Micros,
        sample: LoadSample,
        owner: OwnerVerdict,
        why: String,
    ) {
        self.last_report = Some((now, sample, owner, why));
    }

    /// Returns the interval from this sample to the next one.
    pub fn interval_after(&mut self, sample: &LoadSample) -> Micros {
        let changed = self
            .last_sample
            .is_none_or(|before| differ_notably(&before, sample));
        self.last_sample = Some(*sample);
        self.unchanged_samples = if changed {
            0
        } else {
            self.unchanged_samples.saturating_add(1)
        };
        if self.unchanged_samples < QUIET_SAMPLES_MIN {
            SAMPLE_INTERVAL_BUSY
        } else {
            SAMPLE_INTERVAL_QUIET
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(busy: f32, running: u32) -> LoadSample {
        LoadSample {
            cores: 2,
            busy,
            running,
            available_bytes: 1 << 30,
            ..LoadSample::default()
        }
    }

    fn absent() -> OwnerVerdict {
        OwnerVerdict::Absent { since: None }
    }

    /// A changed owner verdict or a changed reason must be reported.
    #[test]
    fn changed_verdict_or_reason_is_reported() {
        let mut reporter = Reporter::default();
        assert!(reporter.owner_changed(&absent(), "nobody"));
        reporter.record_sent(Micros(0), sample(0.0, 0), absent(), "nobody".into());
        assert!(!reporter.owner_changed(&absent(), "nobody"));
        assert!(reporter.owner_changed(&absent(), "no file"));
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
        assert!(reporter.must_report_load(Micros(0), &sample(0.2, 1)));
        reporter.record_sent(Micros(0), sample(0.2, 1), absent(), String::new());
        let soon = Micros::from_secs(9);
        assert!(!reporter.must_report_load(soon, &sample(0.25, 2)));
        assert!(reporter.must_report_load(soon, &sample(0.4, 1)));
        assert!(reporter.must_report_load(soon, &sample(0.2, 3)));
        assert!(reporter.must_report_load(
            soon,
            &LoadSample {
                cores: 4,
                ..sample(0.2, 1)
            }
        ));
        assert!(reporter.must_report_load(
            soon,
            &LoadSample {
                task_cpus: Some(0.3),
                ..sample(0.2, 1)
            }
        ));
        assert!(reporter.must_report_load(
            soon,
            &LoadSample {
                available_bytes: 1 << 29,
                ..sample(0.2, 1)
            }
        ));
        assert!(reporter.must_report_load(Micros::from_secs(10), &sample(0.2, 1)));
    }

    /// The sample interval gets longer after several samples without a change, and short again
    /// after the first change.
    #[test]
    fn sample_interval_depends_on_changes() {
        let mut reporter = Reporter::default();
        let pauses: Vec<_> = (0..7)
            .map(|_| reporter.interval_after(&sample(0.0, 0)))
            .collect();
        assert_eq!(pauses[..5], [SAMPLE_INTERVAL_BUSY; 5]);
        assert_eq!(pauses[5..], [SAMPLE_INTERVAL_QUIET; 2]);
        assert_eq!(
            reporter.interval_after(&sample(0.9, 3)),
            SAMPLE_INTERVAL_BUSY
        );
    }
}
