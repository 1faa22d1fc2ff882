//! State of one attempt to dump a task, and the delay before the next attempt. A dump may need
//! several attempts because it can collide with dumps of other tasks.

use crate::image_vault::ImageDir;
use checkpoint::dump_retry::DumpRetry;
use checkpoint::engine::{CancelHandle, DumpParams, SentPages, TaskNamespaces};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sempa_proto::migration::Failure;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The parameters and the retry state of one attempt to dump a task.
#[derive(Clone, Debug)]
pub(crate) struct DumpAttempt {
    pub(crate) image_dir: ImageDir,
    /// With post-copy: the socket on which the target will request the memory. `None` without
    /// post-copy.
    pub(crate) page_socket: Option<Arc<OwnedFd>>,
    /// The record of the pages that pre-copy has already sent on `page_socket`; `None` without
    /// pre-copy.
    pub(crate) pre_copied: Option<Arc<SentPages>>,
    pub(crate) first_started_at: Instant,
    /// True for the first attempt, which has a shorter time limit.
    pub(crate) is_first: bool,
    /// Determines the delays before further attempts of this dump.
    pub(crate) retry_backoff: DumpRetry,
}

impl DumpAttempt {
    /// Creates the first attempt, with the current time as its start.
    pub(crate) fn new_first(
        image_dir: ImageDir,
        page_socket: Option<Arc<OwnedFd>>,
        pre_copied: Option<Arc<SentPages>>,
    ) -> Self {
        Self {
            image_dir,
            page_socket,
            pre_copied,
            first_started_at: Instant::now(),
            is_first: true,
            retry_backoff: DumpRetry::default(),
        }
    }

    /// Returns the parameters for the dump of these processes. `pid_namespace` is the inode number
    /// of their PID namespace, and `inside` are the namespaces inside which the engine runs.
    pub(crate) fn dump_params(
        &self,
        root_pid: i32,
        processes: Vec<i32>,
        pid_namespace: u64,
        inside: Option<TaskNamespaces>,
    ) -> Result<DumpParams, Failure> {
        let page_socket = self
            .page_socket
            .as_ref()
            .map(|stream| stream.try_clone())
            .transpose();
        Ok(DumpParams {
            root_pid,
            processes,
            dir: self.image_dir.path().to_path_buf(),
            pid_namespace,
            inside,
            page_stream: page_socket.map_err(|e| Failure::Io(format!("no descriptor: {e}")))?,
            sent_pages: self.pre_copied.clone(),
        })
    }
}

/// Blocks for `duration`, or until `cancel` is triggered.
pub(crate) fn sleep_unless_cancelled(cancel: &CancelHandle, duration: Duration) {
    let deadline = Instant::now() + duration;
    loop {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        if remaining_time.is_zero() {
            return;
        }
        let mut fds = [PollFd::new(cancel.fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(remaining_time.as_micros().div_ceil(1000))
            .unwrap_or(PollTimeout::MAX);
        if poll(&mut fds, timeout).is_ok_and(|ready_count| ready_count > 0) {
            return;
        }
    }
}

/// Returns a random number of 64 bits, for delays and temporary file names. It is not suitable for
/// cryptography.
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
        let started_at = Instant::now();
        sleep_unless_cancelled(&cancel, Duration::from_millis(20));
        assert!(started_at.elapsed() >= Duration::from_millis(20));
        cancel.fire();
        sleep_unless_cancelled(&cancel, Duration::from_secs(3600));
        assert!(started_at.elapsed() < Duration::from_secs(3600));
    }

    #[test]
    fn two_random_numbers_differ() {
        assert_ne!(random_number(), random_number());
    }
}
