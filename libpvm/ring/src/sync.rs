//! Atomics of the standard library, or of the `loom` model checker.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Aligns a value to separate cache lines, so that two values that different processors write never
/// share a cache line.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);
