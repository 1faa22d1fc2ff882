//! Shared memory between two tasks of one host: a ring of bytes in each direction, and for each task one bell that all its
//! peers ring; for large messages each task's store, in which others read them where they lie.
//!
//! [`ring`], [`bell`] and [`blocks`] are the rules, over atomics that `loom` can take the place of; [`memory`], [`store`] and
//! [`futex`] are the only places that know about addresses and the kernel. What stands in a ring comes from another process and may be anything:
//! the reader copies before it looks, and an impossible position or length is an error of that ring alone.

pub mod bell;
pub mod blocks;
#[cfg(not(feature = "loom"))]
pub mod futex;
#[cfg(not(feature = "loom"))]
pub mod memory;
pub mod ring;
#[cfg(not(feature = "loom"))]
pub mod store;
mod sync;
