//! Suspension of tasks by users and by the resource manager. A suspended task stays stopped, also
//! through migrations, until it is resumed.

use crate::ids::Tid;
use crate::text::truncate;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A request to suspend or resume a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspendOrder {
    pub tid: Tid,
    /// True to suspend the task, false to resume it.
    pub suspend: bool,
    pub cause: SuspendCause,
}

/// The suspensions of a task that are in force. The task may run if there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspensions {
    /// The task that requested the suspension of this task or of its job; `None` if no suspension
    /// was requested.
    pub requested_by: Option<Tid>,
    /// True if the resource manager preempted the task in favor of another user. The preemption
    /// also ends when that resource manager ends, because no other task can end it.
    pub preempted: bool,
}

impl Suspensions {
    #[must_use]
    pub fn is_suspended(self) -> bool {
        self.requested_by.is_some() || self.preempted
    }

    /// Returns the suspensions after the request `order`.
    ///
    /// - A request to resume this task ends all suspensions.
    /// - A request to resume the whole job does not end a preemption.
    /// - The end of a preemption does not end a requested suspension.
    #[must_use]
    pub fn apply(self, order: &SuspendOrder) -> Suspensions {
        match (&order.cause, order.suspend) {
            // Applies also if the task is not preempted: a user may have resumed the task and
            // suspended it again since the preemption.
            (SuspendCause::Preempted { .. }, suspend) => Suspensions {
                preempted: suspend,
                ..self
            },
            (
                SuspendCause::Requested { requested_by }
                | SuspendCause::JobRequested { requested_by },
                true,
            ) => Suspensions {
                requested_by: Some(*requested_by),
                ..self
            },
            (SuspendCause::JobRequested { .. }, false) => Suspensions {
                requested_by: None,
                ..self
            },
            (SuspendCause::Requested { .. }, false) => Suspensions::default(),
        }
    }
}

/// Maximum size of the reason in [`SuspendCause::Preempted`]; longer reasons are truncated.
pub const REASON_BYTES_MAX: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SuspendCause {
    /// A program requested the change for this task.
    #[serde(rename = "Asked")]
    Requested {
        /// The task that sent the request.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// A program requested the change for the whole job.
    #[serde(rename = "Job")]
    JobRequested {
        /// The task that sent the request.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// The task was preempted for a user with a smaller share, or this preemption has ended.
    #[serde(rename = "Share")]
    Preempted {
        /// The resource manager's reason, in one sentence.
        why: String,
    },
}

impl SuspendCause {
    /// Truncates the reason of a preemption to [`REASON_BYTES_MAX`] bytes.
    #[must_use]
    pub fn truncated(mut self) -> SuspendCause {
        if let SuspendCause::Preempted { why } = &mut self {
            why.truncate(truncate(why, REASON_BYTES_MAX).len());
        }
        self
    }
}

impl fmt::Display for SuspendCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SuspendCause::Requested { requested_by } => write!(f, "requested by {requested_by}"),
            SuspendCause::JobRequested { requested_by } => {
                write!(f, "requested by {requested_by} for its whole job")
            }
            SuspendCause::Preempted { why } => write!(f, "preempted: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task is suspended while any cause remains; a request to resume the task itself ends all
    /// suspensions.
    #[test]
    fn direct_resume_lifts_all_suspensions() {
        let by = Tid::from_raw(0x40001);
        let (asked, job, share) = (
            SuspendCause::Requested { requested_by: by },
            SuspendCause::JobRequested { requested_by: by },
            SuspendCause::Preempted { why: String::new() },
        );
        let after = |words: &[(bool, &SuspendCause)]| {
            words
                .iter()
                .fold(Suspensions::default(), |holds, (suspend, cause)| {
                    holds.apply(&SuspendOrder {
                        tid: by,
                        suspend: *suspend,
                        cause: (*cause).clone(),
                    })
                })
        };
        assert!(after(&[(true, &share), (true, &asked), (false, &share)]).is_suspended());
        assert!(after(&[(true, &share), (true, &job), (false, &job)]).is_suspended());
        assert!(!after(&[(true, &share), (true, &job), (false, &asked)]).is_suspended());
        assert!(
            !after(&[(true, &share), (true, &job), (false, &job), (false, &share)]).is_suspended()
        );
        assert!(!after(&[(true, &job), (false, &job)]).is_suspended());
        let asked_since = [
            (true, &share),
            (false, &asked),
            (true, &asked),
            (false, &share),
        ];
        assert_eq!(
            after(&asked_since),
            Suspensions {
                requested_by: Some(by),
                preempted: false
            }
        );
        assert_eq!(
            after(&[(true, &job), (false, &share)]),
            Suspensions {
                requested_by: Some(by),
                preempted: false
            }
        );
    }
}
