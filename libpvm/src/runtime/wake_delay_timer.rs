//! Timer at whose expiry the I/O thread performs the deferred wake-ups of peers.

use super::process::ProcessOwned;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Maximum delay of the wake-up of a peer that shares the sender's CPU. A peer needs about this
/// time to read a large message.
const WAKE_DELAY_MAX: Duration = Duration::from_micros(100);

/// Timer descriptor that the I/O thread watches.
#[derive(Debug)]
pub(crate) struct WakeDelayTimer(ProcessOwned<TimerFd>);

impl WakeDelayTimer {
    /// Creates a disarmed timer.
    pub(super) fn new() -> io::Result<Self> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )?;
        Ok(Self(ProcessOwned::from_fd(timer)))
    }

    /// Arms the timer for [`WAKE_DELAY_MAX`]. Returns false if the timer cannot be armed.
    pub(super) fn arm(&self) -> bool {
        self.0
            .get()
            .set(
                Expiration::OneShot(WAKE_DELAY_MAX.into()),
                TimerSetTimeFlags::empty(),
            )
            .is_ok()
    }

    pub(super) fn disarm(&self) {
        // If the timer cannot be disarmed, the cost is at most one spurious wake-up.
        let _ = self.0.get().unset();
    }

    /// Reads a pending expiry, so that the descriptor is no longer readable.
    pub(super) fn clear_expiry(&self) {
        let _ = self.0.get().wait();
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get().as_fd()
    }
}
