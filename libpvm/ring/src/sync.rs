//! The atomics: those of the language, or those of the model checker.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Keeps what two processors write out of each other's cache lines.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub(crate) struct Apart<T>(pub(crate) T);
