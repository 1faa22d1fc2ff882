//! Implements `pvm_packf`, `pvm_unpackf` and the log's `printf`.
//!
//! Rust cannot define variadic functions. The exported names jump, with all registers unchanged, to
//! `csrc/variadic.c`, which calls the functions of this module with a `va_list`.

#![allow(unsafe_code)]

use super::packing::{pack_with, unpack_with};
use super::trace_items::trace_text;
use super::{buffers, zero};
use crate::format::{Format, Item, Kind, Number};
use crate::memory::{Strided, Text, put_string};
use crate::pack::{self, Wire};
use crate::session::{self, answer, lock};
use crate::trace;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_char, c_double, c_int, c_long, c_void};

unsafe extern "C" {
    fn sempa_packf();
    fn sempa_unpackf();
    fn sempa_logprintf();
    fn sempa_va_int(list: *mut c_void) -> c_int;
    fn sempa_va_long(list: *mut c_void) -> c_long;
    fn sempa_va_double(list: *mut c_void) -> c_double;
    fn sempa_va_pointer(list: *mut c_void) -> *mut c_void;
    fn vsnprintf(
        place: *mut c_char,
        size: usize,
        format: *const c_char,
        list: *mut c_void,
    ) -> c_int;
}

macro_rules! jump {
    ($($(#[$doc:meta])* $name:ident to $target:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The arguments must fit the format.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            std::arch::naked_asm!("jmp {}", sym $target)
        }
    )*};
}

jump! {
    /// Packs by a format: `int pvm_packf(const char *format, ...)`.
    pvm_packf to sempa_packf;
    /// Unpacks by a format: `int pvm_unpackf(const char *format, ...)`.
    pvm_unpackf to sempa_unpackf;
    /// Writes a formatted line to the log: `int pvmlogprintf(const char *format, ...)`.
    pvmlogprintf to sempa_logprintf;
}

/// The variadic arguments after a format.
struct Arguments(*mut c_void);

impl Arguments {
    fn int(&self) -> i32 {
        // SAFETY: the caller promises that the arguments fit the format, and the next conversion
        // takes an int.
        unsafe { sempa_va_int(self.0) }
    }

    fn long(&self) -> i64 {
        // SAFETY: as in `int`, for a long.
        unsafe { sempa_va_long(self.0) }
    }

    fn double(&self) -> f64 {
        // SAFETY: as in `int`, for a double.
        unsafe { sempa_va_double(self.0) }
    }

    fn pointer<T>(&self) -> *mut T {
        // SAFETY: as in `int`, for a pointer.
        unsafe { sempa_va_pointer(self.0).cast() }
    }

    fn number(&self, number: Option<Number>) -> i32 {
        match number {
            None => 1,
            Some(Number::Is(value)) => value,
            Some(Number::Argument) => self.int(),
        }
    }

    fn text<'a>(&self) -> PvmResult<Text<'a>> {
        // SAFETY: the next conversion takes a string.
        unsafe { Text::new(self.pointer()) }
    }

    fn array<T: Copy>(&self, count: i32, stride: i32) -> PvmResult<Strided<T>> {
        // SAFETY: the next conversion takes an array with these elements.
        unsafe { Strided::new(self.pointer(), count, stride) }
    }
}

fn pack_one<T: Wire>(value: T) -> PvmResult<i32> {
    zero(pack::pack_value(lock().send_buffer()?, value))
}

fn pack_byte(value: u8) -> PvmResult<i32> {
    let mut session = lock();
    let buffer = session.send_buffer()?;
    if let Some(pieces) = buffer.pieces() {
        pieces.push(crate::buffers::Piece::Here(vec![value]));
        return Ok(0);
    }
    zero(pack::pack_bytes(buffer, &Strided::of(&[value])))
}

fn pack_plain(kind: Kind, from: &Arguments) -> PvmResult<i32> {
    match kind {
        // C promotes arguments smaller than an int to int, and floats to doubles.
        Kind::Byte => pack_byte(from.int() as u8),
        Kind::Short => pack_one(from.int() as i16),
        Kind::UShort => pack_one(from.int() as u16),
        Kind::Int => pack_one(from.int()),
        Kind::UInt => pack_one(from.int() as u32),
        Kind::Long => pack_one(from.long()),
        Kind::ULong => pack_one(from.long() as u64),
        Kind::Float => pack_one(from.double() as f32),
        Kind::Double => pack_one(from.double()),
        Kind::Complex | Kind::DoubleComplex | Kind::Text => pack_array(kind, from, 1, 1),
    }
}

fn pack_array(kind: Kind, from: &Arguments, count: i32, stride: i32) -> PvmResult<i32> {
    match kind {
        Kind::Byte => pack_with(from.array(count, stride), pack::pack_bytes),
        Kind::Short => pack_with(from.array::<i16>(count, stride), pack::pack),
        Kind::UShort => pack_with(from.array::<u16>(count, stride), pack::pack),
        Kind::Int => pack_with(from.array::<i32>(count, stride), pack::pack),
        Kind::UInt => pack_with(from.array::<u32>(count, stride), pack::pack),
        Kind::Long => pack_with(from.array::<i64>(count, stride), pack::pack),
        Kind::ULong => pack_with(from.array::<u64>(count, stride), pack::pack),
        Kind::Float => pack_with(from.array::<f32>(count, stride), pack::pack),
        Kind::Double => pack_with(from.array::<f64>(count, stride), pack::pack),
        Kind::Complex => pack_with(from.array::<[f32; 2]>(count, stride), pack::pack),
        Kind::DoubleComplex => pack_with(from.array::<[f64; 2]>(count, stride), pack::pack),
        Kind::Text => {
            let text = from.text()?;
            zero(pack::pack_str_value(lock().send_buffer()?, text.bytes()))
        }
    }
}

fn unpack_array(kind: Kind, from: &Arguments, count: i32, stride: i32) -> PvmResult<i32> {
    match kind {
        Kind::Byte => unpack_with(from.array(count, stride), pack::unpack_bytes),
        Kind::Short => unpack_with(from.array::<i16>(count, stride), pack::unpack),
        Kind::UShort => unpack_with(from.array::<u16>(count, stride), pack::unpack),
        Kind::Int => unpack_with(from.array::<i32>(count, stride), pack::unpack),
        Kind::UInt => unpack_with(from.array::<u32>(count, stride), pack::unpack),
        Kind::Long => unpack_with(from.array::<i64>(count, stride), pack::unpack),
        Kind::ULong => unpack_with(from.array::<u64>(count, stride), pack::unpack),
        Kind::Float => unpack_with(from.array::<f32>(count, stride), pack::unpack),
        Kind::Double => unpack_with(from.array::<f64>(count, stride), pack::unpack),
        Kind::Complex => unpack_with(from.array::<[f32; 2]>(count, stride), pack::unpack),
        Kind::DoubleComplex => unpack_with(from.array::<[f64; 2]>(count, stride), pack::unpack),
        Kind::Text => {
            let place: *mut c_char = from.pointer();
            let text = pack::unpack_str(lock().receive_buffer()?)?;
            if place.is_null() {
                return Err(PvmError::BadParam);
            }
            // SAFETY: the conversion takes a buffer with room for the string.
            unsafe { put_string(place, &text) };
            Ok(0)
        }
    }
}

/// Packs by a format with the arguments in a `va_list`.
///
/// # Safety
/// `format` must be null or a string, and the arguments must fit it.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_vpackf(format: *const c_char, list: *mut c_void) -> c_int {
    let pack_all = || {
        // SAFETY: by this function's contract.
        let format = unsafe { Text::new(format) }?;
        let from = Arguments(list);
        for item in Format::new(format.bytes()) {
            match item? {
                Item::Begin => buffers::begin(from.int())?,
                Item::Data {
                    kind,
                    count: None,
                    stride: None,
                } => drop(pack_plain(kind, &from)?),
                Item::Data {
                    kind,
                    count,
                    stride,
                } => {
                    let (count, stride) = (from.number(count), from.number(stride));
                    pack_array(kind, &from, count, stride)?;
                }
            }
        }
        Ok(0)
    };
    // SAFETY: by this function's contract.
    let items = || vec![unsafe { trace_text("PF", format) }];
    trace::call(
        "packf",
        items,
        || answer("pvm_packf", pack_all()),
        trace::cc,
    )
}

/// Unpacks by a format with the destinations in a `va_list`.
///
/// # Safety
/// `format` must be null or a string, and the arguments must fit it.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_vunpackf(format: *const c_char, list: *mut c_void) -> c_int {
    let unpack_all = || {
        // SAFETY: by this function's contract.
        let format = unsafe { Text::new(format) }?;
        let from = Arguments(list);
        for item in Format::new(format.bytes()) {
            match item? {
                Item::Begin => return Err(PvmError::BadParam),
                Item::Data {
                    kind,
                    count,
                    stride,
                } => {
                    let (count, stride) = (from.number(count), from.number(stride));
                    unpack_array(kind, &from, count, stride)?;
                }
            }
        }
        Ok(0)
    };
    // SAFETY: by this function's contract.
    let items = || vec![unsafe { trace_text("PF", format) }];
    trace::call(
        "unpackf",
        items,
        || answer("pvm_unpackf", unpack_all()),
        trace::cc,
    )
}

/// Maximum length of a log line in bytes, including the NUL.
const LOG_LINE_BYTES_MAX: usize = 8192;

/// Writes a formatted line to the log of a task, which is its standard error.
///
/// # Safety
/// `format` must be null or a string, and the arguments must fit it.
#[unsafe(no_mangle)]
unsafe extern "C" fn vpvmlogprintf(format: *const c_char, list: *mut c_void) -> c_int {
    if format.is_null() {
        return 0;
    }
    let mut line = vec![0u8; LOG_LINE_BYTES_MAX];
    // SAFETY: the line has the size that is passed; the rest by this function's contract.
    let len = unsafe { vsnprintf(line.as_mut_ptr().cast(), line.len(), format, list) };
    line.truncate(
        usize::try_from(len)
            .unwrap_or(0)
            .min(LOG_LINE_BYTES_MAX - 1),
    );
    session::say(&String::from_utf8_lossy(&line), true);
    0
}
