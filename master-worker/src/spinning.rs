//! Decides whether a master that waits for messages may spin.
//!
//! A waiting task spins for some microseconds before it sleeps, which saves a wake-up if a message
//! arrives soon. If messages arrive further apart, each spin takes the processor from the workers
//! of this host for nothing.

use std::time::Duration;

/// Mean time between messages above which spinning ends: several times the duration of a spin.
const WAIT_MAX: Duration = Duration::from_micros(200);
/// Weight of the latest wait in the mean.
const WEIGHT: f64 = 1.0 / 32.0;

/// The mean wait of a master.
#[derive(Debug, Default)]
pub(crate) struct SpinDecision {
    mean_wait_us: f64,
    has_ended: bool,
}

impl SpinDecision {
    /// Notes the duration of a wait. Returns true if the master must spin no longer; returns true
    /// once only.
    pub(crate) fn note_wait(&mut self, wait: Duration) -> bool {
        // A pause of the whole run must not decide alone.
        let wait_us = wait.min(4 * WAIT_MAX).as_secs_f64() * 1e6;
        self.mean_wait_us += (wait_us - self.mean_wait_us) * WEIGHT;
        let ends = !self.has_ended && self.mean_wait_us > WAIT_MAX.as_secs_f64() * 1e6;
        self.has_ended |= ends;
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_ends_when_messages_arrive_far_apart() {
        let mut decision = SpinDecision::default();
        let close = Duration::from_micros(20);
        assert!((0..1_000).all(|_| !decision.note_wait(close)));
        assert!(!decision.note_wait(Duration::from_secs(60)));
        assert!((0..1_000).all(|_| !decision.note_wait(close)));
        let far = Duration::from_micros(500);
        assert_eq!((0..100).filter(|_| decision.note_wait(far)).count(), 1);
        assert!(!decision.note_wait(far));
    }
}
