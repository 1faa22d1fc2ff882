//! Causal order: a message that was sent earlier is received earlier, also across senders.
//!
//! If task a sends to c and then to b, and b sends to c, then c receives the message of a first. A
//! link alone orders only the messages of its two tasks. Two rules do the rest:
//!
//! 1. *Within shared memory.* A message in a ring is visible to its receiver at once. Each message
//!    carries a Lamport clock; [`Arrivals`] sorts the messages that a look at the rings has found.
//! 2. *On all other routes.* A message is *settled* once its receiver has acknowledged it. A task
//!    remembers the messages in its past that may not be settled, its *marks*, and tells them to
//!    the task to which it sends next. A receiver holds a message back until the messages that its
//!    marks name have arrived.
//!
//! Proof of rule 2, by induction over the chain of messages from m1 (to c) to m2 (to c): when a
//! task of the chain has m2's predecessor, m1 is settled, or the task has a mark that names m1 or a
//! later message to c that was itself held back behind m1. With its next message the task tells
//! this mark. So c has m1, or c holds m2 back.
//!
//! A message that follows marks that may name its receiver is not settled by its acknowledgement,
//! because the receiver may hold it back. It is settled by [`OrderMessage::Arrived`].
//!
//! **Questions.** A receiver that cannot tell by positions whether the messages of a mark have
//! arrived asks their sender ([`OrderMessage::Ask`]). The sender answers at once. On the link the
//! answer follows everything that it had sent before, and a mark is told only after its messages
//! were sent. So when the answer has arrived, the messages have arrived, or they do not exist. A
//! receiver asks
//!
//! - if a mark is *folded*: a list with many marks of one sender names them together, by a stamp;
//! - if a mark is of an earlier incarnation: its message is void, or its sender sends it again with
//!   another number, before the answer;
//! - if a message is awaited for a while: it may not exist, or its sender may have ended. A daemon
//!   says so, behind the last messages of that sender.
//!
//! If a sender neither ends nor answers, the wait ends after [`HOLD_AGE_MAX`] calls of
//! [`CausalOrder::age_holds`].
//!
//! **No circle** of tasks or messages waits for each other. A list has a stamp that is larger than
//! those of its marks. What is held back behind a list waits for messages with smaller stamps, and
//! for answers, which wait for nothing.
//!
//! **Restarts.** After a restart from a checkpoint a link begins again, or continues with the
//! numbers of the checkpoint. What was received before is delivered first; the messages of the new
//! incarnation are queued behind it.

mod arrivals;
mod mark;
mod order;
mod peers;
mod receive;
mod restart;
#[cfg(test)]
mod tests;
mod unsettled;
mod waits;

pub use arrivals::Arrivals;
pub use mark::{CTX_ORDER, Mark, MarkKey, OrderMessage, Past};
pub use order::CausalOrder;
pub use peers::Position;
pub use restart::Restart;

/// Size in bytes of the stamp that precedes each message on a link.
pub const STAMP_BYTES: usize = 8;
/// Largest stamp that a task adopts. A peer that violates the protocol cannot make the clock of
/// another task overflow.
pub const STAMP_MAX: u64 = 1 << 62;
/// Number of marks of a task above which it remembers one mark for each sender of a list.
pub const MARKS_MAX: usize = 4096;
/// Maximum number of marks in a list that a task accepts. A list has at most one mark for each task
/// and [`EXACT_MARKS_MAX`] others.
pub const LIST_MARKS_MAX: usize = 1 << 14;
/// Number of marks of one sender above which a list has one folded mark for them.
pub const FOLD_MARKS_MIN: usize = 32;
/// Number of marks in a list above which it has one mark for each sender.
pub const EXACT_MARKS_MAX: usize = 1024;
/// Number of marks from which a sender asks each receiver to acknowledge at once.
pub const MARKS_BEFORE_PROMPT_ACK: usize = 16;
/// Number of calls of [`CausalOrder::age_holds`] that a message waits at most for messages of a
/// sender that neither ends nor answers.
pub const HOLD_AGE_MAX: u32 = 12;
