//! Builds items of trace records from data behind pointers of the program.

#![allow(unsafe_code)]

use crate::data;
use crate::memory::{ProgramStr, Strided, copy_strings};
use crate::session::lock;
use crate::trace::{address_item, text_list_item};
use sempa_proto::trace::{TraceItem, int_item, ints_item, text_item};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of values in one item; further values are omitted.
const ITEM_VALUES_MAX: c_int = 4096;

/// Builds an item that contains a text; null yields the empty text.
///
/// # Safety
/// `pointer` must be null or a string.
pub(super) unsafe fn c_string_item(name: &'static str, pointer: *const c_char) -> TraceItem {
    // SAFETY: by this function's contract.
    text_item(
        name,
        unsafe { ProgramStr::new(pointer) }
            .map_or_else(|_| Vec::new(), |text| text.to_bytes().to_vec()),
    )
}

/// Builds an item with at most [`ITEM_VALUES_MAX`] ints; null yields an item without values.
///
/// # Safety
/// `values` must be null or contain `count` ints.
pub(super) unsafe fn c_ints_item(
    name: &'static str,
    values: *const c_int,
    count: c_int,
) -> TraceItem {
    // SAFETY: by this function's contract.
    let numbers = unsafe { Strided::new(values, count.clamp(0, ITEM_VALUES_MAX), 1) };
    ints_item(
        name,
        numbers.map_or_else(|_| Vec::new(), |numbers| numbers.to_vec()),
    )
}

/// Builds an item with at most [`ITEM_VALUES_MAX`] texts; null yields an item without values.
///
/// # Safety
/// `texts` must be null or contain `count` strings.
pub(super) unsafe fn c_strings_item(
    name: &'static str,
    texts: *const *const c_char,
    count: c_int,
) -> TraceItem {
    let count = if texts.is_null() {
        0
    } else {
        count.clamp(0, ITEM_VALUES_MAX)
    };
    // SAFETY: by this function's contract.
    text_list_item(
        name,
        unsafe { copy_strings(texts, Some(count)) }.unwrap_or_default(),
    )
}

/// Reads an int that a call has stored in the program's memory; 0 for null.
///
/// # Safety
/// `pointer` must be null or point to an int.
pub(super) unsafe fn read_int(pointer: *const c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { pointer.as_ref() }.copied().unwrap_or(0)
}

pub(super) fn current_context() -> c_int {
    data::pvmmyctx.load(Relaxed)
}

/// Returns the length of the active send buffer in bytes; 0 if there is no active send buffer.
pub(super) fn send_buffer_len() -> c_int {
    lock()
        .send_buffer()
        .map_or(0, |buffer| buffer.len() as c_int)
}

/// Returns the items of the arguments of a receive call.
pub(super) fn receive_entry_items(tid: c_int, tag: c_int) -> Vec<TraceItem> {
    vec![
        int_item("RST", tid),
        int_item("RMC", tag),
        int_item("RCX", current_context()),
    ]
}

/// Returns the items of the result of a receive call. Without a message, length, tag and sender are
/// −1.
pub(super) fn receive_exit_items(mid: &c_int) -> Vec<TraceItem> {
    let session = lock();
    let (len, tag, ctx, src) = match session.buffers.get(*mid) {
        Ok(buffer) => (buffer.len() as c_int, buffer.tag, buffer.ctx, buffer.src),
        Err(_) => (-1, -1, 0, -1),
    };
    vec![
        int_item("MB", *mid),
        int_item("MNB", len),
        int_item("MC", tag),
        int_item("MCX", ctx),
        int_item("SRC", src),
    ]
}

/// Appends the items of the array argument of `pvm_psend` or `pvm_precv` to `items`.
pub(super) fn append_array_items(
    mut items: Vec<TraceItem>,
    address: *const c_void,
    count: c_int,
    kind: c_int,
) -> Vec<TraceItem> {
    items.extend([
        address_item("PDA", address),
        int_item("PC", count),
        int_item("PDT", kind),
    ]);
    items
}

/// Returns the items of the result of `pvm_precv`: code, length of the message, tag, context,
/// sender.
pub(super) fn precv_exit_items(code: c_int, len: c_int, tag: c_int, src: c_int) -> Vec<TraceItem> {
    vec![
        int_item("CC", code),
        int_item("MNB", len),
        int_item("MC", tag),
        int_item("MCX", current_context()),
        int_item("SRC", src),
    ]
}
