//! Who wants a task to stand still, and why: it does until somebody lets it go on, wherever it is moved meanwhile.

use crate::event::EventKind;
use crate::ids::Tid;
use crate::text::cut;
use serde::{Deserialize, Serialize};
use std::fmt;

/// That somebody wants a task suspended, or to go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The task.
    pub tid: Tid,
    /// False: let it go on.
    pub suspend: bool,
    /// Why.
    pub cause: Cause,
}

/// For whom a task stands still. It goes on when it is for nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holds {
    /// Who asked for it, or for its whole job.
    pub asked: Option<Tid>,
    /// It gives way to another user: a resource manager's own decision, which ends when nobody can take it back any more.
    pub gives_way: bool,
}

impl Holds {
    /// True while the task is suspended.
    #[must_use]
    pub fn any(self) -> bool {
        self.asked.is_some() || self.gives_way
    }

    /// What holds after this order. Whoever asks for a task to go on is not told to wait for others; a whole job that goes on
    /// takes back nothing of what its tasks have given way, and the end of giving way nothing of what somebody asked for.
    #[must_use]
    pub fn after(self, order: &Order) -> Holds {
        match (&order.cause, order.suspend) {
            // Also when it does not give way any more: a user may have let it go on and suspended it since.
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

    /// What an order has changed, for the event log; `None` if the task stands still as before, or goes on as before.
    #[must_use]
    pub fn change(self, after: Holds, order: &Order) -> Option<EventKind> {
        let Order { tid, cause, .. } = order.clone();
        match (self.any(), after.any()) {
            (false, true) => Some(EventKind::Suspended { tid, cause }),
            (true, false) => Some(EventKind::Resumed { tid, cause }),
            // It gives way no more, and stands still all the same.
            (true, true) if self.gives_way && !after.gives_way => {
                after.asked.map(|by| EventKind::Suspended {
                    tid,
                    cause: Cause::Asked { by },
                })
            }
            _ => None,
        }
    }
}

/// Bytes of a sentence in [`Cause::Share`] at most; the rest is cut.
pub const WHY_BYTES_MAX: usize = 512;

/// Why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A program asked for this task.
    Asked {
        /// The task that asked.
        by: Tid,
    },
    /// Somebody asked for its whole job.
    Job {
        /// The task that asked.
        by: Tid,
    },
    /// It gives way to a user who has taken less, or need not any more.
    Share {
        /// The resource manager's sentence.
        why: String,
    },
}

impl Cause {
    /// With no more than [`WHY_BYTES_MAX`] bytes of a sentence.
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

    #[test]
    fn a_task_stands_still_while_anybody_wants_it_and_goes_on_at_once_for_who_asks_for_it_alone() {
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
