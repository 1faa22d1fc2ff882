//! Suspension of tasks by users and by the resource manager. A suspended task stays stopped, also
//! through migrations, until it is resumed.

use crate::ids::Tid;
use crate::text::cut;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A request to suspend or resume a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub tid: Tid,
    /// False: resume the task.
    pub suspend: bool,
    pub cause: Cause,
}

/// The suspensions of a task. It runs when there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holds {
    /// The task that requested the suspension of this task or its job.
    pub asked: Option<Tid>,
    /// The resource manager preempted the task in favor of another user. The suspension ends when
    /// that resource manager is gone, because only it can lift it.
    pub gives_way: bool,
}

impl Holds {
    /// True while the task is suspended.
    #[must_use]
    pub fn any(self) -> bool {
        self.asked.is_some() || self.gives_way
    }

    /// Returns the suspensions after this request.
    ///
    /// - A request to resume this task lifts all suspensions.
    /// - A request to resume the whole job does not lift a preemption.
    /// - The end of a preemption does not lift a requested suspension.
    #[must_use]
    pub fn after(self, order: &Order) -> Holds {
        match (&order.cause, order.suspend) {
            // Valid without a preemption, too: a user may have resumed the task and suspended it
            // again since.
            (Cause::Share { .. }, suspend) => Holds {
                gives_way: suspend,
                ..self
            },
            (Cause::Asked { by } | Cause::Job { by }, true) => Holds {
                asked: Some(*by),
                ..self
            },
            (Cause::Job { .. }, false) => Holds {
                asked: None,
                ..self
            },
            (Cause::Asked { .. }, false) => Holds::default(),
        }
    }
}

/// Largest size of the sentence in [`Cause::Share`]; longer ones are truncated.
pub const WHY_BYTES_MAX: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A program requested it for this task.
    Asked {
        /// The task that sent the request.
        by: Tid,
    },
    /// A request for the whole job.
    Job {
        /// The task that sent the request.
        by: Tid,
    },
    /// The task was preempted for a user with a smaller share, or this preemption has ended.
    Share {
        /// The resource manager's reason, in one sentence.
        why: String,
    },
}

impl Cause {
    /// Truncates the sentence to [`WHY_BYTES_MAX`] bytes.
    #[must_use]
    pub fn cut(mut self) -> Cause {
        if let Cause::Share { why } = &mut self {
            why.truncate(cut(why, WHY_BYTES_MAX).len());
        }
        self
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Asked { by } => write!(f, "{by} asked for it"),
            Cause::Job { by } => write!(f, "{by} asked for its whole job"),
            Cause::Share { why } => write!(f, "shares of users: {why}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A task is suspended while any cause remains; a resume request for the task itself lifts all
    /// of them.
    #[test]
    fn direct_resume_lifts_all_suspensions() {
        let by = Tid::from_raw(0x40001);
        let (asked, job, share) = (
            Cause::Asked { by },
            Cause::Job { by },
            Cause::Share { why: String::new() },
        );
        let after = |words: &[(bool, &Cause)]| {
            words
                .iter()
                .fold(Holds::default(), |holds, (suspend, cause)| {
                    holds.after(&Order {
                        tid: by,
                        suspend: *suspend,
                        cause: (*cause).clone(),
                    })
                })
        };
        assert!(after(&[(true, &share), (true, &asked), (false, &share)]).any());
        assert!(after(&[(true, &share), (true, &job), (false, &job)]).any());
        assert!(!after(&[(true, &share), (true, &job), (false, &asked)]).any());
        assert!(!after(&[(true, &share), (true, &job), (false, &job), (false, &share)]).any());
        assert!(!after(&[(true, &job), (false, &job)]).any());
        let asked_since = [
            (true, &share),
            (false, &asked),
            (true, &asked),
            (false, &share),
        ];
        assert_eq!(
            after(&asked_since),
            Holds {
                asked: Some(by),
                gives_way: false
            }
        );
        assert_eq!(
            after(&[(true, &job), (false, &share)]),
            Holds {
                asked: Some(by),
                gives_way: false
            }
        );
    }
}
