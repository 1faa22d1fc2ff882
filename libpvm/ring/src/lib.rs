//! Shared memory between two tasks of one host: a byte ring for each direction, and per task one
//! doorbell that all its peers notify. For large messages each task has a shared pool, in which
//! peers read them in place.
//!
//! [`ring`], [`doorbell`] and [`block_allocator`] contain the rules, over atomics that `loom` can replace. Only
//! [`shared_memory`], [`shared_pool`] and [`futex`] use addresses and system calls. The content of a ring comes
//! from another process and can be anything: the reader copies bytes before it interprets them, and
//! an impossible position or length is an error of that ring only.

pub mod block_allocator;
pub mod doorbell;
#[cfg(not(feature = "loom"))]
pub mod futex;
pub mod ring;
#[cfg(not(feature = "loom"))]
pub mod shared_memory;
#[cfg(not(feature = "loom"))]
pub mod shared_pool;
mod sync;
