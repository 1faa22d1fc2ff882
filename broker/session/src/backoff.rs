//! Waiting times between attempts to connect.

use crate::ids::Millis;

/// Waiting time before the second attempt.
const FIRST_DELAY: Millis = Millis(100);
/// Largest waiting time before an attempt.
const DELAY_MAX: Millis = Millis(10_000);

/// Number of doublings after which the largest waiting time is reached.
const DOUBLINGS_MAX: u32 = 7;

/// Waiting times that double up to a limit. A random part keeps many members apart.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failed_attempts: u32,
}

impl Backoff {
    /// Returns the time to wait after a failed attempt: half of it is fixed, half is chosen by
    /// `random`.
    pub fn next_delay(&mut self, random: u32) -> Millis {
        let doubled = (FIRST_DELAY.0 << self.failed_attempts).min(DELAY_MAX.0);
        self.failed_attempts = (self.failed_attempts + 1).min(DOUBLINGS_MAX);
        let half = doubled / 2;
        Millis(half + u64::from(random) % (half + 1))
    }

    /// Starts again with the first waiting time, after a success.
    pub fn reset(&mut self) {
        self.failed_attempts = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The delays double up to the limit, and the random part stays in the upper half.
    #[test]
    fn delays_grow_to_the_limit() {
        let mut backoff = Backoff::default();
        assert_eq!(backoff.next_delay(0), Millis(50));
        assert_eq!(backoff.next_delay(0), Millis(100));
        for random in 0..40 {
            let delay = backoff.next_delay(random * 7919);
            assert!(delay <= DELAY_MAX && delay.0 >= 100, "{delay:?}");
        }
        assert_eq!(backoff.next_delay(0), Millis(5_000));
        backoff.reset();
        assert_eq!(backoff.next_delay(50), Millis(100));
    }
}
