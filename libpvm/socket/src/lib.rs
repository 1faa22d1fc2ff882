//! Functions that several programs share: finding the runtime directory, reading sockets with
//! descriptors, connecting to local sockets, adaptive spinning, socket buffers, scheduling latency,
//! and an exchange with the tasker service.

mod local_connect;
mod receive;
mod runtime_root;
mod sched_latency;
mod service_exchange;
mod sockbuf;
mod spin;

pub use local_connect::connect_without_waiting;
pub use receive::{MessageFds, PendingFds, ReadOutcome, receive, receive_into_capacity};
pub use runtime_root::{find_or_create_root, find_runtime_paths};
pub use sched_latency::{boost_priority, request_short_slice};
pub use service_exchange::{ExchangeError, ask_tasker_service};
pub use sockbuf::enlarge_send_buffer;
pub use spin::{SenderDistance, SpinBudget, WaitPlan, YIELDS_MAX, has_one_cpu};
