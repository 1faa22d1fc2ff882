//! PVM's own names for making trace records. PVM's group library tells by them of its calls: it asks [`tev_begin`], puts the
//! items in through the functions of a table, and calls [`tev_fin`].

#![allow(unsafe_code)]

use super::trace_items::{trace_ints, trace_text, trace_texts};
use crate::trace::foreign;
use sempa_proto::PvmError;
use sempa_proto::trace::{DATA_IDS, Item, int};
use std::ffi::{c_char, c_int, c_void};

/// Puts an item into a record: its number, 0 for one value or 0x80 for an array, the place of the values (for one text the
/// text itself), how many, every how many-th.
type Put = unsafe extern "C" fn(c_int, c_int, *const c_void, c_int, c_int) -> c_int;

/// Functions of the table: one for each type of data, from bytes to texts.
const TYPES: usize = 12;
/// The place of the one for ints.
const INT: usize = 5;
/// The place of the one for texts.
const TEXT: usize = 11;

/// What `pvmtrccodef` points to. The records of the group library have ints and texts; other types are refused.
pub(crate) static TABLE: [Put; TYPES] = {
    let mut table: [Put; TYPES] = [put_nothing as Put; TYPES];
    table[INT] = put_ints;
    table[TEXT] = put_texts;
    table
};

fn name(number: c_int) -> Option<&'static str> {
    DATA_IDS.get(usize::try_from(number).ok()?)?.to_str().ok()
}

fn put(item: Item) -> c_int {
    if foreign::add(item) {
        0
    } else {
        PvmError::BadParam.code()
    }
}

/// In the place of what cannot be recorded.
///
/// # Safety
/// None is needed: it looks at nothing.
unsafe extern "C" fn put_nothing(
    _: c_int,
    _: c_int,
    _: *const c_void,
    _: c_int,
    _: c_int,
) -> c_int {
    PvmError::NotImpl.code()
}

/// Records one int, or an array of them.
///
/// # Safety
/// `place` is null, or leads to an int, or (`array`) to `count` of them.
unsafe extern "C" fn put_ints(
    number: c_int,
    array: c_int,
    place: *const c_void,
    count: c_int,
    stride: c_int,
) -> c_int {
    let (Some(name), false) = (name(number), stride != 1) else {
        return PvmError::BadParam.code();
    };
    let place = place.cast::<c_int>();
    if array != 0 {
        // SAFETY: the caller's contract: null or `count` ints.
        return put(unsafe { trace_ints(name, place, count) });
    }
    // SAFETY: the caller's contract: null or an int.
    put(int(name, unsafe { place.as_ref() }.copied().unwrap_or(0)))
}

/// Records one string, or an array of them.
///
/// # Safety
/// `place` is null, or a string, or (`array`) leads to `count` pointers that are null or strings.
unsafe extern "C" fn put_texts(
    number: c_int,
    array: c_int,
    place: *const c_void,
    count: c_int,
    _: c_int,
) -> c_int {
    let Some(name) = name(number) else {
        return PvmError::BadParam.code();
    };
    if array != 0 {
        // SAFETY: the caller's contract: null or `count` strings.
        return put(unsafe { trace_texts(name, place.cast::<*const c_char>(), count) });
    }
    // SAFETY: the caller's contract: null or a string.
    put(unsafe { trace_text(name, place.cast()) })
}

/// Prepares tracing; there is nothing to prepare.
#[unsafe(no_mangle)]
extern "C" fn tev_init() -> c_int {
    0
}

/// Begins a record of a call's begin (0x4000) or end (0x8000); 0 when nobody wants it.
#[unsafe(no_mangle)]
extern "C" fn tev_begin(kind: c_int, which: c_int) -> c_int {
    c_int::from(foreign::begin(kind, which))
}

/// Ends the record that was begun.
#[unsafe(no_mangle)]
extern "C" fn tev_fin() -> c_int {
    foreign::end();
    0
}

/// Sends the trace records that were collected.
#[unsafe(no_mangle)]
extern "C" fn tev_flush(_how: c_int) -> c_int {
    crate::trace::flush();
    0
}

/// Would this event be traced?
#[unsafe(no_mangle)]
extern "C" fn tev_do_trace(kind: c_int, _which: c_int) -> c_int {
    c_int::from(foreign::wanted(kind))
}
