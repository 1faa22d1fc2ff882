//! State of one attempt to dump a task, and the delay before the next attempt. A dump may need
//! several attempts because it can collide with other dumps.

use checkpoint::dump_retry::DumpRetry;
use checkpoint::engine::{CancelHandle, SentPages};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The parameters and the retry state of one attempt to dump a task.
#[derive(Clone, Debug)]
pub(crate) struct DumpAttempt {
    pub(crate) dir: PathBuf,
    /// With post-copy: the socket on which the target will request the memory. `None` without
    /// post-copy.
    pub(crate) page_socket: Option<Arc<OwnedFd>>,
    /// The pages that pre-copy has already sent on `page_socket`.
    pub(crate) pre_copied: Option<Arc<SentPages>>,
    pub(crate) first_started_at: Instant,
    /// True for the first attempt, which has a shorter time limit.
    pub(crate) is_first: bool,
    /// Delays before further attempts of this dump.
    pub(crate) retry_backoff: DumpRetry,
}

impl DumpAttempt {
    /// Creates the first attempt, which starts now.
    pub(crate) fn first(
        dir: PathBuf,
        page_socket: Option<Arc<OwnedFd>>,
        pre_copied: Option<Arc<SentPages>>,
    ) -> DumpAttempt {
        DumpAttempt {
            dir,
            page_socket,
            pre_copied,
            first_started_at: Instant::now(),
            is_first: true,
            retry_backoff: DumpRetry::default(),
        }
    }
}

/// Sleeps for `duration`, or until `cancel` fires.
pub(crate) fn sleep_unless_cancelled(cancel: &CancelHandle, duration: Duration) {
    let until = Instant::now() + duration;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        let mut fds = [PollFd::new(cancel.fd(), PollFlags::POLLIN)];
        let rounded_up =
            PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, rounded_up).is_ok_and(|ready| ready > 0) {
            return;
        }
    }
}

/// Returns a random number, for delays.
pub(crate) fn random_number() -> u64 {
    // Each `RandomState` has new random keys.
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_lasts_until_cancelled() {
        let cancel = CancelHandle::new().expect("a descriptor");
        let begun = Instant::now();
        sleep_unless_cancelled(&cancel, Duration::from_millis(20));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        cancel.fire();
        sleep_unless_cancelled(&cancel, Duration::from_secs(3600));
        assert!(begun.elapsed() < Duration::from_secs(3600));
    }

    #[test]
    fn two_random_numbers_differ() {
        assert_ne!(random_number(), random_number());
    }
}
