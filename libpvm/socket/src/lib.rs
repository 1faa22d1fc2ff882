//! Functions that the task library and the daemon share: finding the runtime directory, reading
//! sockets with descriptors, adaptive spinning, socket buffers and scheduling latency.

mod receive;
mod runtime_root;
mod sched_latency;
mod sockbuf;
mod spin;

pub use receive::{MessageFds, PendingFds, ReadOutcome, receive, receive_into_capacity};
pub use runtime_root::{find_or_create_root, find_runtime_paths};
pub use sched_latency::{boost_priority, request_short_slice};
pub use sockbuf::enlarge_send_buffer;
pub use spin::{SenderDistance, SpinBudget, WaitPlan, YIELDS_MAX, has_one_cpu};
