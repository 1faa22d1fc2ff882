//! Wakes the helper a moment later, for peers whose waking was put off.

use super::process::Own;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// How long who shares the sender's processor is left asleep, unless the sender needs it no more before that. About what one of
/// them takes to read a large message.
const PUT_OFF: Duration = Duration::from_micros(100);

/// A clock that the helper watches.
#[derive(Debug)]
pub(crate) struct Alarm(Own<TimerFd>);

impl Alarm {
    /// One that is not set.
    pub(super) fn new() -> io::Result<Alarm> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )?;
        Ok(Alarm(Own::fd(timer)))
    }

    /// The helper is to wake in a moment. False if it will not.
    pub(super) fn set(&self) -> bool {
        self.0
            .get()
            .set(
                Expiration::OneShot(PUT_OFF.into()),
                TimerSetTimeFlags::empty(),
            )
            .is_ok()
    }

    /// It need not any more.
    pub(super) fn unset(&self) {
        // At worst the helper wakes for nothing.
        let _ = self.0.get().unset();
    }

    /// Makes it ready to be watched again.
    pub(super) fn clear(&self) {
        let _ = self.0.get().wait();
    }

    /// True when it will wake the helper, or does so just now.
    #[cfg(test)]
    pub(super) fn is_on(&self) -> bool {
        self.0.get().get().is_ok_and(|set| set.is_some()) || self.0.get().wait().is_ok()
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get().as_fd()
    }
}
