//! The calls `pvm_pk*` and `pvm_upk*`.

#![allow(unsafe_code)]

use super::zero_on_success;
use crate::memory::{ProgramStr, Strided, write_c_string};
use crate::pack;
use crate::session::{lock, value_or_report};
use crate::trace;
use sempa_proto::trace::{TraceItem, int_item};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_char, c_double, c_float, c_int, c_long, c_short, c_uint, c_ulong, c_ushort};

/// Packs an array into the active send buffer with the function `pack`.
pub(super) fn pack_array_with<T: Copy>(
    items: PvmResult<Strided<T>>,
    pack: impl FnOnce(&mut crate::buffers::Buffer, &Strided<T>) -> PvmResult<()>,
) -> PvmResult<i32> {
    let items = items?;
    let mut session = lock();
    if items.byte_len() >= pack::POOLED_PIECE_BYTES_MIN {
        session.prepare_large_body(&items);
    }
    zero_on_success(pack(session.send_buffer()?, &items))
}

/// Unpacks an array from the active receive buffer with the function `unpack`.
pub(super) fn unpack_array_with<T: Copy>(
    items: PvmResult<Strided<T>>,
    unpack: impl FnOnce(&mut crate::buffers::Buffer, &Strided<T>) -> PvmResult<()>,
) -> PvmResult<i32> {
    let items = items?;
    zero_on_success(unpack(lock().receive_buffer()?, &items))
}

/// Returns the name of the trace event of a function: the function's name without `pvm_`.
fn trace_event_name(function: &'static str) -> &'static str {
    function.strip_prefix("pvm_").unwrap_or(function)
}

/// Returns the trace items of an array argument.
fn array_argument_items<T>(address: *const T, count: c_int, stride: c_int) -> Vec<TraceItem> {
    vec![
        trace::address_item("PDA", address),
        int_item("PC", count),
        int_item("PSD", stride),
    ]
}

macro_rules! packing {
    ($($pk:ident $upk:ident $pointer:ty, $item:ty, $pack:path, $unpack:path;)*) => {$(
        /// Packs `count` elements at a distance of `stride` elements.
        ///
        /// # Safety
        /// `items` must be an array with these elements.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $pk(items: *const $pointer, count: c_int, stride: c_int) -> c_int {
            // SAFETY: by this function's contract.
            let (first, items) = (items, unsafe { Strided::<$item>::new(items.cast(), count, stride) });
            let packing = || value_or_report(stringify!($pk), pack_array_with(items, $pack));
            trace::traced_leaf_call(trace_event_name(stringify!($pk)), || array_argument_items(first, count, stride), packing, trace::return_code_items)
        }

        /// Unpacks `count` elements and stores them at a distance of `stride` elements.
        ///
        /// # Safety
        /// `items` must be an array with space for these elements.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $upk(items: *mut $pointer, count: c_int, stride: c_int) -> c_int {
            // SAFETY: by this function's contract.
            let (first, items) = (items.cast_const(), unsafe { Strided::<$item>::new(items.cast(), count, stride) });
            let unpacking = || value_or_report(stringify!($upk), unpack_array_with(items, $unpack));
            trace::traced_leaf_call(trace_event_name(stringify!($upk)), || array_argument_items(first, count, stride), unpacking, trace::return_code_items)
        }
    )*};
}

packing! {
    pvm_pkbyte pvm_upkbyte c_char, u8, pack::pack_bytes, pack::unpack_bytes;
    pvm_pkcplx pvm_upkcplx c_float, [f32; 2], pack::pack_numbers, pack::unpack_numbers;
    pvm_pkdcplx pvm_upkdcplx c_double, [f64; 2], pack::pack_numbers, pack::unpack_numbers;
    pvm_pkdouble pvm_upkdouble c_double, f64, pack::pack_numbers, pack::unpack_numbers;
    pvm_pkfloat pvm_upkfloat c_float, f32, pack::pack_numbers, pack::unpack_numbers;
    pvm_pkint pvm_upkint c_int, i32, pack::pack_numbers, pack::unpack_numbers;
    pvm_pkuint pvm_upkuint c_uint, u32, pack::pack_numbers, pack::unpack_numbers;
    pvm_pklong pvm_upklong c_long, i64, pack::pack_numbers, pack::unpack_numbers;
    pvm_pkulong pvm_upkulong c_ulong, u64, pack::pack_numbers, pack::unpack_numbers;
    pvm_pkshort pvm_upkshort c_short, i16, pack::pack_numbers, pack::unpack_numbers;
    pvm_pkushort pvm_upkushort c_ushort, u16, pack::pack_numbers, pack::unpack_numbers;
}

/// Packs a string: its length including the NUL, then the characters and the NUL. Fails with
/// `PvmNotImpl` in a buffer packed in place.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_pkstr(text: *const c_char) -> c_int {
    trace::traced_call(
        "pkstr",
        || vec![trace::address_item("PDA", text)],
        || {
            // SAFETY: by this function's contract.
            let text = unsafe { ProgramStr::new(text) };
            value_or_report(
                "pvm_pkstr",
                text.and_then(|text| {
                    zero_on_success(pack::pack_str(lock().send_buffer()?, text.to_bytes()))
                }),
            )
        },
        trace::return_code_items,
    )
}

/// Unpacks a string with its NUL.
///
/// # Safety
/// `target` must be null or have space for the string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_upkstr(target: *mut c_char) -> c_int {
    trace::traced_call(
        "upkstr",
        || vec![trace::address_item("PDA", target)],
        || {
            let unpack_text = || {
                let text = pack::unpack_str(lock().receive_buffer()?)?;
                if target.is_null() {
                    return Err(PvmError::BadParam);
                }
                // SAFETY: by this function's contract.
                unsafe { write_c_string(target, &text) };
                Ok(0)
            };
            value_or_report("pvm_upkstr", unpack_text())
        },
        trace::return_code_items,
    )
}

/// Unpacks a string into memory that the caller releases with `free`.
///
/// # Safety
/// `target` must be null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvmupkstralloc(target: *mut *mut c_char) -> c_int {
    let unpack_text = || {
        let text = pack::unpack_str(lock().receive_buffer()?)?;
        if target.is_null() {
            return Err(PvmError::BadParam);
        }
        // SAFETY: `malloc` returns room for the text and its NUL, or null; `target` is valid by
        // this function's contract.
        unsafe {
            let copy = libc::malloc(text.len() + 1).cast::<c_char>();
            if copy.is_null() {
                return Err(PvmError::NoMem);
            }
            write_c_string(copy, &text);
            *target = copy;
        }
        Ok(0)
    };
    unpack_text().unwrap_or_else(PvmError::code)
}
