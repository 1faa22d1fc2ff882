//! Timer that wakes the I/O thread to send deferred wake-ups to peers.

use super::process::Own;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Maximum delay of the wake-up of a peer that shares the sender's CPU. Roughly the time in which
/// one peer reads a large message.
const PUT_OFF: Duration = Duration::from_micros(100);

/// Timer descriptor that the I/O thread watches.
#[derive(Debug)]
pub(crate) struct Alarm(Own<TimerFd>);

impl Alarm {
    /// Creates a disarmed timer.
    pub(super) fn new() -> io::Result<Alarm> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )?;
        Ok(Alarm(Own::fd(timer)))
    }

    /// Arms the timer. Returns false if that fails.
    pub(super) fn set(&self) -> bool {
        self.0
            .get()
            .set(
                Expiration::OneShot(PUT_OFF.into()),
                TimerSetTimeFlags::empty(),
            )
            .is_ok()
    }

    pub(super) fn unset(&self) {
        // An error costs at most one spurious wake-up.
        let _ = self.0.get().unset();
    }

    /// Clears an expiry, so that the descriptor can be watched again.
    pub(super) fn clear(&self) {
        let _ = self.0.get().wait();
    }

    /// True if the timer is armed or has just expired.
    #[cfg(test)]
    pub(super) fn is_on(&self) -> bool {
        self.0.get().get().is_ok_and(|set| set.is_some()) || self.0.get().wait().is_ok()
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get().as_fd()
    }
}
