//! PVM's exported functions that make trace records.
//!
//! PVM's group library reports its calls through these functions: the group library calls
//! [`tev_begin`], adds items through the functions of [`PUT_ITEM_TABLE`], and calls [`tev_fin`].

#![allow(unsafe_code)]

use super::trace_items::{c_ints_item, c_string_item, c_strings_item};
use crate::trace::external;
use sempa_proto::PvmError;
use sempa_proto::trace::{ITEM_NAMES, TraceItem, int_item};
use std::ffi::{c_char, c_int, c_void};

/// Adds an item to a record. The arguments are the item's number, 0 for one value or 0x80 for an
/// array, the address of the values (for a single text the text itself), the count and the stride.
type PutItemFn = unsafe extern "C" fn(c_int, c_int, *const c_void, c_int, c_int) -> c_int;

/// Number of functions in the table. Each data type, from bytes to texts, has one function.
const DATA_TYPE_COUNT: usize = 12;
/// Index of the function for ints.
const INT_INDEX: usize = 5;
/// Index of the function for texts.
const TEXT_INDEX: usize = 11;

/// The table to which `pvmtrccodef` points. The group library's records contain only ints and
/// texts; other types are refused.
pub(crate) static PUT_ITEM_TABLE: [PutItemFn; DATA_TYPE_COUNT] = {
    let mut table: [PutItemFn; DATA_TYPE_COUNT] = [put_unsupported as PutItemFn; DATA_TYPE_COUNT];
    table[INT_INDEX] = put_ints;
    table[TEXT_INDEX] = put_texts;
    table
};

fn item_name(number: c_int) -> Option<&'static str> {
    ITEM_NAMES.get(usize::try_from(number).ok()?)?.to_str().ok()
}

fn add_item(item: TraceItem) -> c_int {
    if external::add_item(item) {
        0
    } else {
        PvmError::BadParam.code()
    }
}

/// Refuses an item of an unsupported type.
///
/// # Safety
/// Always safe: no argument is used.
unsafe extern "C" fn put_unsupported(
    _: c_int,
    _: c_int,
    _: *const c_void,
    _: c_int,
    _: c_int,
) -> c_int {
    PvmError::NotImpl.code()
}

/// Adds one int, or an array of ints if `is_array` is nonzero, to the current record.
///
/// # Safety
/// `values` must be null or point to one int, or with `is_array` to `count` ints.
unsafe extern "C" fn put_ints(
    number: c_int,
    is_array: c_int,
    values: *const c_void,
    count: c_int,
    stride: c_int,
) -> c_int {
    let (Some(name), false) = (item_name(number), stride != 1) else {
        return PvmError::BadParam.code();
    };
    let values = values.cast::<c_int>();
    if is_array != 0 {
        // SAFETY: the caller's contract: null or `count` ints.
        return add_item(unsafe { c_ints_item(name, values, count) });
    }
    // SAFETY: the caller's contract: null or an int.
    add_item(int_item(
        name,
        unsafe { values.as_ref() }.copied().unwrap_or(0),
    ))
}

/// Adds one string, or an array of strings if `is_array` is nonzero, to the current record.
///
/// # Safety
/// `values` must be null or a string, or with `is_array` point to `count` pointers that are null or
/// strings.
unsafe extern "C" fn put_texts(
    number: c_int,
    is_array: c_int,
    values: *const c_void,
    count: c_int,
    _: c_int,
) -> c_int {
    let Some(name) = item_name(number) else {
        return PvmError::BadParam.code();
    };
    if is_array != 0 {
        // SAFETY: the caller's contract: null or `count` strings.
        return add_item(unsafe { c_strings_item(name, values.cast::<*const c_char>(), count) });
    }
    // SAFETY: the caller's contract: null or a string.
    add_item(unsafe { c_string_item(name, values.cast()) })
}

/// Does nothing: this library needs no preparation for tracing.
#[unsafe(no_mangle)]
extern "C" fn tev_init() -> c_int {
    0
}

/// Starts a record of the entry (`entry_or_exit` = 0x4000) or the exit (`entry_or_exit` = 0x8000)
/// of a call. Returns 1, or 0 if the event is not enabled.
#[unsafe(no_mangle)]
extern "C" fn tev_begin(kind: c_int, entry_or_exit: c_int) -> c_int {
    c_int::from(external::begin_record(kind, entry_or_exit))
}

/// Completes the record that [`tev_begin`] started.
#[unsafe(no_mangle)]
extern "C" fn tev_fin() -> c_int {
    external::end_record();
    0
}

/// Sends the collected trace records.
#[unsafe(no_mangle)]
extern "C" fn tev_flush(_how: c_int) -> c_int {
    crate::trace::send_collected_records();
    0
}

/// Returns 1 if a tracer receives the trace and the tracer's mask selects this event, else 0.
#[unsafe(no_mangle)]
extern "C" fn tev_do_trace(kind: c_int, _which: c_int) -> c_int {
    c_int::from(external::is_enabled(kind))
}
