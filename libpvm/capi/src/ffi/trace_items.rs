//! Builds items of trace records from data behind pointers of the program.

#![allow(unsafe_code)]

use crate::data;
use crate::memory::{Strided, Text, strings};
use crate::session::lock;
use crate::trace::{address, texts};
use sempa_proto::trace::{Item, int, ints, text};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of values of one item; further values are omitted.
const NUMBERS_MAX: c_int = 4096;

/// Builds an item with a text; empty for null.
///
/// # Safety
/// `place` must be null or a string.
pub(super) unsafe fn trace_text(name: &'static str, place: *const c_char) -> Item {
    // SAFETY: by this function's contract.
    text(
        name,
        unsafe { Text::new(place) }.map_or_else(|_| Vec::new(), |text| text.bytes().to_vec()),
    )
}

/// Builds an item with at most [`NUMBERS_MAX`] ints; none for null.
///
/// # Safety
/// `place` must be null or hold `count` ints.
pub(super) unsafe fn trace_ints(name: &'static str, place: *const c_int, count: c_int) -> Item {
    // SAFETY: by this function's contract.
    let numbers = unsafe { Strided::new(place, count.clamp(0, NUMBERS_MAX), 1) };
    ints(
        name,
        numbers.map_or_else(|_| Vec::new(), |numbers| numbers.to_vec()),
    )
}

/// Builds an item with at most [`NUMBERS_MAX`] texts; none for null.
///
/// # Safety
/// `place` must be null or hold `count` strings.
pub(super) unsafe fn trace_texts(
    name: &'static str,
    place: *const *const c_char,
    count: c_int,
) -> Item {
    let count = if place.is_null() {
        0
    } else {
        count.clamp(0, NUMBERS_MAX)
    };
    // SAFETY: by this function's contract.
    texts(
        name,
        unsafe { strings(place, Some(count)) }.unwrap_or_default(),
    )
}

/// Reads an int that a call has stored in the program's memory; 0 for null.
///
/// # Safety
/// `place` must be null or point to an int.
pub(super) unsafe fn left_in(place: *const c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { place.as_ref() }.copied().unwrap_or(0)
}

pub(super) fn context() -> c_int {
    data::pvmmyctx.load(Relaxed)
}

/// Returns the length of the active send buffer in bytes.
pub(super) fn active_bytes() -> c_int {
    lock()
        .send_buffer()
        .map_or(0, |buffer| buffer.len() as c_int)
}

/// Items of the arguments of a receive call.
pub(super) fn wanted_items(tid: c_int, tag: c_int) -> Vec<Item> {
    vec![int("RST", tid), int("RMC", tag), int("RCX", context())]
}

/// Items of the result of a receive call.
pub(super) fn received_items(mid: &c_int) -> Vec<Item> {
    let session = lock();
    let (len, tag, ctx, src) = match session.buffers.get(*mid) {
        Ok(buffer) => (buffer.len() as c_int, buffer.tag, buffer.ctx, buffer.src),
        Err(_) => (-1, -1, 0, -1),
    };
    vec![
        int("MB", *mid),
        int("MNB", len),
        int("MC", tag),
        int("MCX", ctx),
        int("SRC", src),
    ]
}

/// Appends the items of the array argument of `pvm_psend` or `pvm_precv`.
pub(super) fn array_items(
    mut items: Vec<Item>,
    place: *const c_void,
    count: c_int,
    kind: c_int,
) -> Vec<Item> {
    items.extend([address("PDA", place), int("PC", count), int("PDT", kind)]);
    items
}

/// Items of the result of `pvm_precv`: code, length of the message, tag, context, sender.
pub(super) fn apart_items(code: c_int, len: c_int, tag: c_int, src: c_int) -> Vec<Item> {
    vec![
        int("CC", code),
        int("MNB", len),
        int("MC", tag),
        int("MCX", context()),
        int("SRC", src),
    ]
}
