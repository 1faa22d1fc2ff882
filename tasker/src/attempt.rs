//! One dump may take several attempts: what the next one has to know, and the pause before it.

use checkpoint::again::Again;
use checkpoint::criu::SentAhead;
use checkpoint::engine::Cancel;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An attempt to dump a task.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    /// Where the images go.
    pub(crate) dir: PathBuf,
    /// Where the memory will be asked for, if it does not go there too.
    pub(crate) asked_on: Option<Arc<OwnedFd>>,
    /// What of it went ahead on the same way.
    pub(crate) sent: Option<Arc<SentAhead>>,
    /// When the first attempt began.
    pub(crate) begun: Instant,
    /// It is the first.
    pub(crate) is_first: bool,
    /// Pauses before further ones.
    pub(crate) again: Again,
}

impl Attempt {
    /// The first one, which begins now.
    pub(crate) fn first(
        dir: PathBuf,
        asked_on: Option<Arc<OwnedFd>>,
        sent: Option<Arc<SentAhead>>,
    ) -> Attempt {
        Attempt {
            dir,
            asked_on,
            sent,
            begun: Instant::now(),
            is_first: true,
            again: Again::default(),
        }
    }
}

/// Waits so long, or until it is called off.
pub(crate) fn rest(called_off: &Cancel, span: Duration) {
    let until = Instant::now() + span;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        let mut fds = [PollFd::new(called_off.fd(), PollFlags::POLLIN)];
        let rounded_up =
            PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, rounded_up).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

/// A random number, for pauses.
pub(crate) fn roll() -> u64 {
    // Each state has keys of its own.
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_lasts_as_long_as_it_should_unless_it_is_called_off() {
        let cancel = Cancel::new().expect("a descriptor");
        let begun = Instant::now();
        rest(&cancel, Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        cancel.fire();
        rest(&cancel, Duration::from_secs(3600));
        assert!(begun.elapsed() < Duration::from_secs(3600));
    }

    #[test]
    fn two_rolls_differ() {
        assert_ne!(roll(), roll());
    }
}
