//! How fast images may leave this host, over all transfers.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The lowest rate that can be set, in bytes per second.
const RATE_MIN: u64 = 1_000_000;

/// A limit that several threads share: each waits for its turn before it sends a piece. Nobody has more than one turn before
/// another one that waits has had one, so they get equal parts.
#[derive(Debug, Default)]
pub(crate) struct Rate {
    /// Bytes per second; none: as fast as possible.
    limit: Option<u64>,
    /// When the next piece may leave.
    next: Mutex<Option<Instant>>,
}

impl Rate {
    /// The limit that `SEMPA_MOVE_RATE` says, if it says one.
    ///
    /// # Errors
    /// One sentence when that is not a rate.
    pub(crate) fn of(text: Option<&str>) -> Result<Rate, String> {
        let Some(text) = text else {
            return Ok(Rate::default());
        };
        match text.parse() {
            Ok(limit) if limit >= RATE_MIN => Ok(Rate {
                limit: Some(limit),
                next: Mutex::default(),
            }),
            _ => Err(format!(
                "SEMPA_MOVE_RATE={text:?} is not a number of bytes per second from {RATE_MIN} on"
            )),
        }
    }

    /// Waits until so many bytes may leave.
    pub(crate) fn wait(&self, bytes: usize) {
        let pause = self.pause(bytes, Instant::now());
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }

    /// How long to wait until so many bytes may leave.
    fn pause(&self, bytes: usize, now: Instant) -> Duration {
        let Some(limit) = self.limit else {
            return Duration::ZERO;
        };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = next.map_or(now, |next| next.max(now));
        *next = Some(turn + Duration::from_secs_f64(bytes as f64 / limit as f64));
        turn.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_leave_at_the_rate_that_was_set_and_what_was_not_used_is_not_made_up_for() {
        let rate = Rate::of(Some("1000000")).expect("a rate");
        let begin = Instant::now();
        let pauses: Vec<Duration> = (0..4).map(|_| rate.pause(250_000, begin)).collect();
        assert_eq!(pauses, [0, 250, 500, 750].map(Duration::from_millis));
        let late = begin + Duration::from_secs(60);
        assert_eq!(
            [rate.pause(500_000, late), rate.pause(1, late)],
            [0, 500].map(Duration::from_millis)
        );
    }

    #[test]
    fn without_a_limit_nobody_waits_and_a_wrong_one_is_told() {
        let none = Rate::of(None).expect("no rate");
        assert_eq!(
            (0..9).map(|_| none.pause(usize::MAX, Instant::now())).max(),
            Some(Duration::ZERO)
        );
        for wrong in ["fast", "0", "999999", "-1", "1e9"] {
            let why = Rate::of(Some(wrong)).expect_err("no rate");
            assert!(
                why.contains("SEMPA_MOVE_RATE") && why.contains(wrong),
                "{why}"
            );
        }
    }
}
