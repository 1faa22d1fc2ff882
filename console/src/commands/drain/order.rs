//! The parsed request of a `drain` command, and its conversion to the words with which the drain
//! process is started.

use std::time::Duration;

/// Maximum deadline. A longer deadline is refused as a typing error.
pub(super) const DEADLINE_MAX: Duration = Duration::from_secs(24 * 3600);

/// A request to drain a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DrainRequest {
    pub(super) host: String,
    /// Time within which the host must be empty.
    pub(super) deadline: Option<Duration>,
    /// True if a checkpointed job ends, and if all jobs that remain at the end of the drain are
    /// checkpointed and ended. False if checkpointed jobs continue.
    pub(super) checkpoints_all: bool,
}

impl DrainRequest {
    /// True if the drain may checkpoint jobs. Such a drain runs in a process of its own.
    pub(super) fn may_checkpoint(&self) -> bool {
        self.deadline.is_some() || self.checkpoints_all
    }

    /// Returns the words that parse to this request, starting with `drain`.
    pub(super) fn to_words(&self) -> Vec<String> {
        let mut words = vec!["drain".to_string(), self.host.clone()];
        words.extend(self.deadline.iter().flat_map(|time_limit| {
            [
                "--deadline".to_string(),
                format!("{}s", time_limit.as_secs()),
            ]
        }));
        words.extend(self.checkpoints_all.then(|| "--checkpoint".to_string()));
        words
    }
}
