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
//! A message that carries marks of its own receiver is not settled by its acknowledgement, because
//! the receiver may hold it back. It is settled by [`OrderMessage::Arrived`].
//!
//! No circle of tasks waits for each other: a mark names a message that was sent before the message
//! that carries the mark.

mod arrivals;
mod mark;
mod order;
mod peers;
mod restart;
#[cfg(test)]
mod tests;
mod unsettled;

pub use arrivals::Arrivals;
pub use mark::{CTX_ORDER, Mark, OrderMessage, Past};
pub use order::CausalOrder;
pub use peers::Position;
pub use restart::Restart;

/// Size in bytes of the stamp that precedes each message on a link.
pub const STAMP_BYTES: usize = 8;
/// Largest stamp that a task adopts. A peer that violates the protocol cannot make the clock of
/// another task overflow.
pub const STAMP_MAX: u64 = 1 << 62;
/// Number of marks of a task from which its sends by routes that need a mark wait, and maximum
/// number of marks that a task accepts from another one.
pub const MARKS_MAX: usize = 4096;
/// Number of marks from which a sender asks each receiver to acknowledge at once.
pub const MARKS_BEFORE_PROMPT_ACK: usize = 16;
