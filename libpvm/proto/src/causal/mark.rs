//! Marks: messages that a task knows of and that may not have arrived yet.

use crate::ids::Tid;
use crate::link::is_later_incarnation;
use serde::{Deserialize, Serialize};

/// Context of the messages by which the runtimes of two tasks tell each other marks. Programs
/// cannot use it: contexts of programs are not negative.
pub const CTX_ORDER: i32 = i32::MIN;

/// Names the messages of one task to another task that are in transit: all fragments of the link
/// from `sender` to `receiver` below number `end_seq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub receiver: Tid,
    pub sender: Tid,
    /// Incarnation of the link.
    pub incarnation: u16,
    pub end_seq: u64,
}

impl Mark {
    /// Returns the receiver and the sender. A list has one mark for each pair.
    pub(super) fn pair(&self) -> (Tid, Tid) {
        (self.receiver, self.sender)
    }

    /// True if everything that `other` names is named by this mark, too. Both marks must be about
    /// the same pair of tasks.
    pub fn covers(&self, other: &Self) -> bool {
        if self.incarnation == other.incarnation {
            self.end_seq >= other.end_seq
        } else {
            is_later_incarnation(self.incarnation, other.incarnation)
        }
    }
}

impl OrderMessage {
    /// True if the message is a list that names messages to `receiver`.
    pub fn names(&self, receiver: Tid) -> bool {
        match self {
            Self::Marks { marks, .. } => marks.iter().any(|mark| mark.receiver == receiver),
            Self::Arrived { .. } => false,
        }
    }
}

/// The past of a request to a service, of a spawn, or of the end of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// Lamport clock of the task.
    pub clock: u64,
    /// The messages that are in transit.
    pub marks: Vec<Mark>,
}

/// A message between the runtimes of two tasks. It travels on the link of the two tasks, in order
/// with the messages of the programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OrderMessage {
    /// Everything that follows on the link was sent later than the messages that these marks name.
    /// The list replaces the list of the previous such message.
    Marks {
        /// Number of this list, which the answer repeats.
        id: u64,
        marks: Vec<Mark>,
    },
    /// All messages that the list `id` names for the receiver of that list have arrived. Sent once
    /// for each list that names its receiver.
    Arrived { id: u64 },
}
