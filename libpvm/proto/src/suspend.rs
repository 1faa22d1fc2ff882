//! Suspension of tasks by users and by the resource manager. A suspended task stays stopped, also
//! through migrations, until it is resumed.

use crate::ids::Tid;
use crate::text::{self, truncate};
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

/// The suspensions of a task that are in force. The task may run if no suspension is in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspensions {
    /// The task that requested the suspension of this task or of its job; `None` if no suspension
    /// was requested.
    pub requested_by: Option<Tid>,
    /// True if the resource manager preempted the task in favor of another user. The preemption
    /// also ends when that resource manager ends, because no other task can end the preemption.
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
    pub fn apply_order(self, order: &SuspendOrder) -> Self {
        match (&order.cause, order.suspend) {
            // This arm also applies if the task is not preempted: a user may have resumed the task
            // and suspended it again since the preemption.
            (SuspendCause::Preempted { .. }, is_suspension) => Self {
                preempted: is_suspension,
                ..self
            },
            (
                SuspendCause::Requested { requested_by }
                | SuspendCause::JobRequested { requested_by },
                true,
            ) => Self {
                requested_by: Some(*requested_by),
                ..self
            },
            (SuspendCause::JobRequested { .. }, false) => Self {
                requested_by: None,
                ..self
            },
            (SuspendCause::Requested { .. }, false) => Self::default(),
        }
    }
}

/// Maximum size, in bytes, of the reason in [`SuspendCause::Preempted`]; longer reasons are
/// truncated.
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
    pub fn with_truncated_reason(mut self) -> Self {
        if let Self::Preempted { why } = &mut self {
            why.truncate(truncate(why, REASON_BYTES_MAX).len());
        }
        self
    }
}

impl fmt::Display for SuspendCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested { requested_by } => write!(f, "requested by {requested_by}"),
            Self::JobRequested { requested_by } => {
                write!(f, "requested by {requested_by} for its whole job")
            }
            Self::Preempted { why } => write!(f, "preempted: {}", text::reason(why)),
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
        let requester = Tid::from_raw(0x40001);
        let (task_request, job_request, preemption) = (
            SuspendCause::Requested {
                requested_by: requester,
            },
            SuspendCause::JobRequested {
                requested_by: requester,
            },
            SuspendCause::Preempted { why: String::new() },
        );
        let apply_all = |orders: &[(bool, &SuspendCause)]| {
            orders.iter().fold(
                Suspensions::default(),
                |suspensions, (is_suspension, cause)| {
                    suspensions.apply_order(&SuspendOrder {
                        tid: requester,
                        suspend: *is_suspension,
                        cause: (*cause).clone(),
                    })
                },
            )
        };
        assert!(
            apply_all(&[
                (true, &preemption),
                (true, &task_request),
                (false, &preemption)
            ])
            .is_suspended()
        );
        assert!(
            apply_all(&[
                (true, &preemption),
                (true, &job_request),
                (false, &job_request)
            ])
            .is_suspended()
        );
        assert!(
            !apply_all(&[
                (true, &preemption),
                (true, &job_request),
                (false, &task_request)
            ])
            .is_suspended()
        );
        assert!(
            !apply_all(&[
                (true, &preemption),
                (true, &job_request),
                (false, &job_request),
                (false, &preemption)
            ])
            .is_suspended()
        );
        assert!(!apply_all(&[(true, &job_request), (false, &job_request)]).is_suspended());
        let request_during_preemption = [
            (true, &preemption),
            (false, &task_request),
            (true, &task_request),
            (false, &preemption),
        ];
        assert_eq!(
            apply_all(&request_during_preemption),
            Suspensions {
                requested_by: Some(requester),
                preempted: false
            }
        );
        assert_eq!(
            apply_all(&[(true, &job_request), (false, &preemption)]),
            Suspensions {
                requested_by: Some(requester),
                preempted: false
            }
        );
    }
}
