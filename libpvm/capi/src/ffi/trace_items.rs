//! Items of trace records that are read through pointers of the program.

#![allow(unsafe_code)]

use crate::data;
use crate::memory::{Strided, Text, strings};
use crate::session::lock;
use crate::trace::{address, texts};
use sempa_proto::trace::{Item, int, ints, text};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

/// Numbers of one item at most.
const NUMBERS_MAX: c_int = 4096;

/// A text; nothing for null.
///
/// # Safety
/// `place` is null or a string.
pub(super) unsafe fn trace_text(name: &'static str, place: *const c_char) -> Item {
    // SAFETY: by this function's contract.
    text(
        name,
        unsafe { Text::new(place) }.map_or_else(|_| Vec::new(), |text| text.bytes().to_vec()),
    )
}

/// Numbers; none for null, and no more than a limit.
///
/// # Safety
/// `place` is null or holds `count` ints.
pub(super) unsafe fn trace_ints(name: &'static str, place: *const c_int, count: c_int) -> Item {
    // SAFETY: by this function's contract.
    let numbers = unsafe { Strided::new(place, count.clamp(0, NUMBERS_MAX), 1) };
    ints(
        name,
        numbers.map_or_else(|_| Vec::new(), |numbers| numbers.to_vec()),
    )
}

/// Texts; none for null, and no more than a limit.
///
/// # Safety
/// `place` is null or holds `count` strings.
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

/// What a call has left in an int of the program; 0 for null.
///
/// # Safety
/// `place` is null or an int.
pub(super) unsafe fn left_in(place: *const c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { place.as_ref() }.copied().unwrap_or(0)
}

/// The current context.
pub(super) fn context() -> c_int {
    data::pvmmyctx.load(Relaxed)
}

/// Bytes of the active send buffer.
pub(super) fn active_bytes() -> c_int {
    lock()
        .send_buffer()
        .map_or(0, |buffer| buffer.len() as c_int)
}

/// What a receive asks for.
pub(super) fn wanted_items(tid: c_int, tag: c_int) -> Vec<Item> {
    vec![int("RST", tid), int("RMC", tag), int("RCX", context())]
}

/// What a receive answered.
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

/// The array of `pvm_psend` and `pvm_precv`, behind other items.
pub(super) fn array_items(
    mut items: Vec<Item>,
    place: *const c_void,
    count: c_int,
    kind: c_int,
) -> Vec<Item> {
    items.extend([address("PDA", place), int("PC", count), int("PDT", kind)]);
    items
}

/// What `pvm_precv` answered: length of what came, tag, sender.
pub(super) fn apart_items(code: c_int, len: c_int, tag: c_int, src: c_int) -> Vec<Item> {
    vec![
        int("CC", code),
        int("MNB", len),
        int("MC", tag),
        int("MCX", context()),
        int("SRC", src),
    ]
}
