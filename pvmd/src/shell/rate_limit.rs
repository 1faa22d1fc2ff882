//! Limits the rate at which images leave this host, over all transfers.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// The lowest rate that can be set, in bytes per second.
const RATE_MIN: u64 = 1_000_000;

/// A rate limit shared by several threads. Each thread waits for its slot before it sends a piece.
///
/// Slots are assigned in the order of requests, so waiting threads get equal shares.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    /// Bytes per second; `None` if the rate is unlimited.
    limit: Option<u64>,
    /// The earliest time at which the next piece may leave.
    next_slot: Mutex<Option<Instant>>,
}

/// The value of `SEMPA_MOVE_RATE` is not a rate.
#[derive(Debug, Error)]
#[error("SEMPA_MOVE_RATE={text:?} is not a number of bytes per second from {min} on", min = RATE_MIN)]
pub(crate) struct InvalidRate {
    text: String,
}

impl RateLimit {
    /// Parses the value of `SEMPA_MOVE_RATE`. Without a value the rate is unlimited.
    ///
    /// # Errors
    /// The value is not a rate.
    pub(crate) fn parse(text: Option<&str>) -> Result<RateLimit, InvalidRate> {
        let Some(text) = text else {
            return Ok(RateLimit::default());
        };
        match text.parse() {
            Ok(limit) if limit >= RATE_MIN => Ok(RateLimit {
                limit: Some(limit),
                next_slot: Mutex::default(),
            }),
            _ => Err(InvalidRate { text: text.into() }),
        }
    }

    /// Sleeps until `bytes` may leave.
    pub(crate) fn wait(&self, bytes: usize) {
        let delay = self.reserve(bytes, Instant::now());
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
    }

    /// Reserves a slot for `bytes` and returns the time until it begins.
    fn reserve(&self, bytes: usize, now: Instant) -> Duration {
        let Some(limit) = self.limit else {
            return Duration::ZERO;
        };
        let mut next = self
            .next_slot
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let slot = next.map_or(now, |next| next.max(now));
        *next = Some(slot + Duration::from_secs_f64(bytes as f64 / limit as f64));
        slot.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces leave at the configured rate, and unused capacity does not accumulate.
    #[test]
    fn pieces_are_spaced_and_unused_slots_expire() {
        let rate = RateLimit::parse(Some("1000000")).expect("a rate");
        let begin = Instant::now();
        let pauses: Vec<Duration> = (0..4).map(|_| rate.reserve(250_000, begin)).collect();
        assert_eq!(pauses, [0, 250, 500, 750].map(Duration::from_millis));
        let late = begin + Duration::from_secs(60);
        assert_eq!(
            [rate.reserve(500_000, late), rate.reserve(1, late)],
            [0, 500].map(Duration::from_millis)
        );
    }

    /// Without a limit there is no wait; a malformed value yields an error that names it.
    #[test]
    fn no_limit_means_no_wait_and_bad_values_are_refused() {
        let none = RateLimit::parse(None).expect("no rate");
        assert_eq!(
            (0..9)
                .map(|_| none.reserve(usize::MAX, Instant::now()))
                .max(),
            Some(Duration::ZERO)
        );
        for wrong in ["fast", "0", "999999", "-1", "1e9"] {
            let why = RateLimit::parse(Some(wrong))
                .expect_err("no rate")
                .to_string();
            assert!(
                why.contains("SEMPA_MOVE_RATE") && why.contains(wrong),
                "{why}"
            );
        }
    }
}
