//! Limit of the total rate at which all transfers send images from this host.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Lowest rate that the user can set, in bytes per second.
const BYTES_PER_SECOND_MIN: u64 = 1_000_000;

/// A rate limit shared by several threads. Each thread waits for its slot before it sends a piece.
///
/// Slots are assigned in the order of requests, so threads that wait get equal shares.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    /// Bytes per second; `None` if the rate is unlimited.
    bytes_per_second_max: Option<u64>,
    /// The earliest time at which the next piece may be sent; `None` before the first piece.
    next_slot: Mutex<Option<Instant>>,
}

/// Error: the value of `SEMPA_MOVE_RATE` is not a valid rate.
#[derive(Debug, Error)]
#[error("SEMPA_MOVE_RATE={text:?} is not a number of bytes per second from {min} on", min = BYTES_PER_SECOND_MIN)]
pub(crate) struct InvalidRate {
    text: String,
}

impl RateLimit {
    /// Parses the value of `SEMPA_MOVE_RATE`. If `text` is `None`, the rate is unlimited.
    ///
    /// # Errors
    /// The value is not a number of bytes per second of at least [`BYTES_PER_SECOND_MIN`].
    pub(crate) fn parse(text: Option<&str>) -> Result<Self, InvalidRate> {
        let Some(text) = text else {
            return Ok(Self::default());
        };
        match text.parse() {
            Ok(bytes_per_second) if bytes_per_second >= BYTES_PER_SECOND_MIN => Ok(Self {
                bytes_per_second_max: Some(bytes_per_second),
                next_slot: Mutex::default(),
            }),
            _ => Err(InvalidRate { text: text.into() }),
        }
    }

    /// Sleeps until `bytes` bytes may be sent.
    pub(crate) fn wait_for_slot(&self, bytes: usize) {
        let delay = self.reserve(bytes, Instant::now());
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
    }

    /// Reserves a slot for `bytes` bytes and returns the time from `now` to the start of the slot;
    /// 0 if the rate is unlimited.
    fn reserve(&self, bytes: usize, now: Instant) -> Duration {
        let Some(bytes_per_second) = self.bytes_per_second_max else {
            return Duration::ZERO;
        };
        let mut next_slot = self
            .next_slot
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let slot_start = next_slot.map_or(now, |next_slot| next_slot.max(now));
        *next_slot =
            Some(slot_start + Duration::from_secs_f64(bytes as f64 / bytes_per_second as f64));
        slot_start.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces are sent at the configured rate. Unused capacity does not accumulate: after a pause,
    /// only the next piece is sent without a wait.
    #[test]
    fn pieces_are_spaced_and_unused_slots_expire() {
        let rate = RateLimit::parse(Some("1000000")).expect("a rate");
        let started_at = Instant::now();
        let delays: Vec<Duration> = (0..4).map(|_| rate.reserve(250_000, started_at)).collect();
        assert_eq!(delays, [0, 250, 500, 750].map(Duration::from_millis));
        let later_time = started_at + Duration::from_secs(60);
        assert_eq!(
            [
                rate.reserve(500_000, later_time),
                rate.reserve(1, later_time)
            ],
            [0, 500].map(Duration::from_millis)
        );
    }

    /// Without a limit there is no wait. A malformed value yields an error that contains the value.
    #[test]
    fn no_limit_means_no_wait_and_bad_values_are_refused() {
        let unlimited_rate = RateLimit::parse(None).expect("no rate");
        assert_eq!(
            (0..9)
                .map(|_| unlimited_rate.reserve(usize::MAX, Instant::now()))
                .max(),
            Some(Duration::ZERO)
        );
        for invalid_text in ["fast", "0", "999999", "-1", "1e9"] {
            let error_text = RateLimit::parse(Some(invalid_text))
                .expect_err("no rate")
                .to_string();
            assert!(
                error_text.contains("SEMPA_MOVE_RATE") && error_text.contains(invalid_text),
                "{error_text}"
            );
        }
    }
}
