//! Shared memory between two tasks on the same host: a byte ring for each direction, and one
//! doorbell per task that all peers of the task notify. Large messages are stored in the sender's
//! shared pool, and the receiver reads these messages in place. [`biased_lock`] guards the state of
//! a task that uses rings.
//!
//! [`ring`], [`doorbell`] and [`block_allocator`] implement the protocols, with atomics that `loom`
//! can replace. Only [`shared_memory`], [`shared_pool`] and [`futex`] use addresses and system
//! calls. The content of a ring comes from another process and can be arbitrary: the reader copies
//! bytes before it interprets them, and an impossible position or length is an error of that ring
//! only.

pub mod biased_lock;
pub mod block_allocator;
pub mod doorbell;
#[cfg(not(feature = "loom"))]
pub mod futex;
mod owner_fence;
pub mod ring;
#[cfg(not(feature = "loom"))]
pub mod shared_memory;
#[cfg(not(feature = "loom"))]
pub mod shared_pool;
mod sync;
