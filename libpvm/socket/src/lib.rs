//! Functions that the task library and the daemon share: reading sockets with descriptors, adaptive
//! spinning, socket buffers and scheduling latency.

mod receive;
mod sched_latency;
mod sockbuf;
mod spin;

pub use receive::{MessageFds, PendingFds, ReadOutcome, receive};
pub use sched_latency::{boost_priority, request_short_slice};
pub use sockbuf::enlarge_send_buffer;
pub use spin::{SenderDistance, SpinBudget};
