//! Why a task was suspended, or resumed: it stands still until somebody lets it go on, wherever it is moved meanwhile.

use crate::ids::Tid;
use crate::text::cut;
use serde::{Deserialize, Serialize};
use std::fmt;

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
