//! What is worth a message to the resource manager, and how often to look. Pure.

use sempa_proto::Micros;
use sempa_proto::load::{LoadSample, OwnerVerdict};

/// Pause between samples while things change.
pub const PAUSE_BUSY: Micros = Micros::from_secs(1);
/// Pause between samples while nothing changes.
pub const PAUSE_QUIET: Micros = Micros::from_secs(5);
/// Samples without a change before the pause gets longer.
const QUIET_SAMPLES: u32 = 5;
/// A report is sent at least this often; the resource manager believes a sample for 15 s.
pub const SIGN_OF_LIFE: Micros = Micros::from_secs(10);
/// Difference in used processor time that is a change.
const BUSY_CHANGE: f32 = 0.1;
/// Difference in processors left by a limit that is a change.
const SHARE_CHANGE: f32 = 0.02;
/// Difference in runnable threads that is a change.
const RUNNING_CHANGE: u32 = 2;
/// Logins that a report lists at most.
pub const LOGINS_MAX: usize = 64;

/// True when a resource manager would want to know the difference.
fn differ(a: &LoadSample, b: &LoadSample) -> bool {
    let memory = a.available_bytes.abs_diff(b.available_bytes);
    a.cores != b.cores
        || (a.share - b.share).abs() > SHARE_CHANGE
        || (a.busy - b.busy).abs() >= BUSY_CHANGE
        || a.running.abs_diff(b.running) >= RUNNING_CHANGE
        || a.ours.is_some() != b.ours.is_some()
        || (a.ours.unwrap_or(0.0) - b.ours.unwrap_or(0.0)).abs() >= BUSY_CHANGE * a.processors()
        || memory > a.available_bytes.max(b.available_bytes) / 10
}

/// Decides when to sample and what to send.
#[derive(Debug, Default)]
pub struct Reporter {
    sent: Option<(Micros, LoadSample, OwnerVerdict, String)>,
    before: Option<LoadSample>,
    quiet: u32,
}

impl Reporter {
    /// True when the owner's verdict, or the reason for it, is news.
    pub fn owner_is_news(&self, owner: &OwnerVerdict, why: &str) -> bool {
        self.sent
            .as_ref()
            .is_none_or(|(_, _, was, because)| was != owner || because != why)
    }

    /// True when this sample is to be sent at `now` (a clock that never jumps).
    pub fn load_is_news(&self, now: Micros, sample: &LoadSample) -> bool {
        self.sent
            .as_ref()
            .is_none_or(|(at, last, ..)| now.since(*at) >= SIGN_OF_LIFE || differ(last, sample))
    }

    /// Remembers what was sent.
    pub fn sent(&mut self, now: Micros, sample: LoadSample, owner: OwnerVerdict, why: String) {
        self.sent = Some((now, sample, owner, why));
    }

    /// The pause until the sample after this one.
    pub fn pause_after(&mut self, sample: &LoadSample) -> Micros {
        let changed = self.before.is_none_or(|before| differ(&before, sample));
        self.before = Some(*sample);
        self.quiet = if changed {
            0
        } else {
            self.quiet.saturating_add(1)
        };
        if self.quiet < QUIET_SAMPLES {
            PAUSE_BUSY
        } else {
            PAUSE_QUIET
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

    #[test]
    fn the_owner_is_news_when_verdict_or_reason_changes() {
        let mut reporter = Reporter::default();
        assert!(reporter.owner_is_news(&absent(), "nobody"));
        reporter.sent(Micros(0), sample(0.0, 0), absent(), "nobody".into());
        assert!(!reporter.owner_is_news(&absent(), "nobody"));
        assert!(reporter.owner_is_news(&absent(), "no file"));
        assert!(reporter.owner_is_news(
            &OwnerVerdict::Present {
                since: Micros(1),
                seen: Micros(2)
            },
            "nobody"
        ));
    }

    #[test]
    fn load_is_news_when_it_changes_and_every_ten_seconds() {
        let mut reporter = Reporter::default();
        assert!(reporter.load_is_news(Micros(0), &sample(0.2, 1)));
        reporter.sent(Micros(0), sample(0.2, 1), absent(), String::new());
        let soon = Micros::from_secs(9);
        assert!(!reporter.load_is_news(soon, &sample(0.25, 2)));
        assert!(reporter.load_is_news(soon, &sample(0.4, 1)));
        assert!(reporter.load_is_news(soon, &sample(0.2, 3)));
        assert!(reporter.load_is_news(
            soon,
            &LoadSample {
                cores: 4,
                ..sample(0.2, 1)
            }
        ));
        assert!(reporter.load_is_news(
            soon,
            &LoadSample {
                ours: Some(0.3),
                ..sample(0.2, 1)
            }
        ));
        assert!(reporter.load_is_news(
            soon,
            &LoadSample {
                available_bytes: 1 << 29,
                ..sample(0.2, 1)
            }
        ));
        assert!(reporter.load_is_news(Micros::from_secs(10), &sample(0.2, 1)));
    }

    #[test]
    fn the_pause_is_long_when_nothing_changes_and_short_again_at_the_first_change() {
        let mut reporter = Reporter::default();
        let pauses: Vec<_> = (0..7)
            .map(|_| reporter.pause_after(&sample(0.0, 0)))
            .collect();
        assert_eq!(pauses[..5], [PAUSE_BUSY; 5]);
        assert_eq!(pauses[5..], [PAUSE_QUIET; 2]);
        assert_eq!(reporter.pause_after(&sample(0.9, 3)), PAUSE_BUSY);
    }
}
