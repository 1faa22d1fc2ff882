//! Shows the progress of a replay on standard error.

use pvm_rm::replay::ReplayProgress;
use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Interval between two displays at a terminal.
const TERMINAL_INTERVAL: Duration = Duration::from_millis(200);
/// Interval between two lines in a log. A shorter replay prints nothing.
const LOG_INTERVAL: Duration = Duration::from_secs(2);

/// The display for one replay.
#[derive(Debug)]
pub(crate) struct ReplayDisplay {
    /// The replayed policy, such as "recorded policy".
    subject: &'static str,
    is_terminal: bool,
    started_at: Instant,
    shown_at: Cell<Instant>,
}

impl ReplayDisplay {
    pub(crate) fn new(subject: &'static str) -> Self {
        let now = Instant::now();
        Self {
            subject,
            is_terminal: io::stderr().is_terminal(),
            started_at: now,
            shown_at: Cell::new(now),
        }
    }

    /// Shows the progress if the last display is old enough. A failure to write concerns only the
    /// display.
    pub(crate) fn show(&self, progress: ReplayProgress) {
        let interval = if self.is_terminal {
            TERMINAL_INTERVAL
        } else {
            LOG_INTERVAL
        };
        if self.shown_at.get().elapsed() < interval {
            return;
        }
        self.shown_at.set(Instant::now());
        let text = progress_text(self.subject, progress, self.started_at.elapsed());
        let _ = if self.is_terminal {
            write!(io::stderr().lock(), "\r\x1b[K{text}")
        } else {
            writeln!(io::stderr().lock(), "{text}")
        };
    }
}

impl Drop for ReplayDisplay {
    fn drop(&mut self) {
        if self.is_terminal {
            let _ = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

/// Returns a line such as "replay under the recorded policy: 1.5 of 6.0 h, about 9 s left".
fn progress_text(subject: &str, progress: ReplayProgress, elapsed: Duration) -> String {
    let hours = |micros: u64| micros as f64 / 3.6e9;
    let (replayed, recorded) = (progress.replayed.0, progress.recorded.0);
    let mut text = format!(
        "replay under the {subject}: {:.1} of {:.1} h",
        hours(replayed),
        hours(recorded)
    );
    if replayed >= recorded {
        text.push_str("; the last tasks still run");
    } else if replayed > 0 {
        let remaining_share = (recorded - replayed) as f64 / replayed as f64;
        let remaining_s = elapsed.as_secs_f64() * remaining_share;
        text.push_str(&format!(", about {remaining_s:.0} s left"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    #[test]
    fn progress_is_estimated() {
        let text = |replayed_s: u64| {
            let progress = ReplayProgress {
                replayed: Micros::from_secs(replayed_s),
                recorded: Micros::from_secs(7200),
            };
            progress_text("recorded policy", progress, Duration::from_secs(3))
        };
        assert_eq!(
            text(1800),
            "replay under the recorded policy: 0.5 of 2.0 h, about 9 s left"
        );
        assert_eq!(text(0), "replay under the recorded policy: 0.0 of 2.0 h");
        assert_eq!(
            text(7200),
            "replay under the recorded policy: 2.0 of 2.0 h; the last tasks still run"
        );
    }
}
