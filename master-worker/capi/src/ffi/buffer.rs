//! `sempa_buffer`: bytes that a callback returns.

#![allow(
    unsafe_code,
    reason = "C programs pass pointers, and the names are exported"
)]

use super::memory;
use crate::errors::{CallError, CallResult, OK, guard};
use std::ffi::{c_int, c_void};

/// Bytes that a callback returns. The callback appends to the buffer; the library owns the memory.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    pub(super) fn into_bytes(self) -> bytes::Bytes {
        self.0.into()
    }
}

/// Calls `f` with the buffer behind a pointer.
///
/// # Safety
/// `buffer` is null or the buffer of a callback that has not returned.
unsafe fn with_buffer(
    buffer: *mut Buffer,
    f: impl FnOnce(&mut Vec<u8>) -> CallResult<i32>,
) -> c_int {
    guard(|| {
        // SAFETY: by this function's contract.
        let buffer = unsafe { buffer.as_mut() };
        f(&mut buffer
            .ok_or_else(|| CallError::argument("buffer is NULL"))?
            .0)
    })
}

/// # Safety
/// `buffer` is null or the buffer of a callback that has not returned; `data` has `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_buffer_append(
    buffer: *mut Buffer,
    data: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: by this function's contract.
    unsafe {
        with_buffer(buffer, |buffer| {
            buffer.extend_from_slice(memory::bytes("data", data, length)?);
            Ok(OK)
        })
    }
}

/// # Safety
/// `buffer` is null or the buffer of a callback that has not returned.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_buffer_clear(buffer: *mut Buffer) -> c_int {
    let clear = |buffer: &mut Vec<u8>| {
        buffer.clear();
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_buffer(buffer, clear) }
}

/// # Safety
/// `buffer` is null or the buffer of a callback that has not returned.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_buffer_length(buffer: *const Buffer) -> usize {
    // SAFETY: by this function's contract.
    unsafe { buffer.as_ref() }.map_or(0, |buffer| buffer.0.len())
}
