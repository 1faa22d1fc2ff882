//! Implements `pvm_packf`, `pvm_unpackf` and the log's `printf`.
//!
//! Rust cannot define variadic functions. The exported functions jump to `csrc/variadic.c` with all
//! registers unchanged. The C code calls the functions of this module with a `va_list`.

#![allow(unsafe_code)]

use super::packing::{pack_array_with, unpack_array_with};
use super::trace_items::c_string_item;
use super::{buffers, zero_on_success};
use crate::format::{Conversion, CountOrStride, FormatItem, FormatItems};
use crate::memory::{ProgramStr, Strided, write_c_string};
use crate::pack::{self, Packable};
use crate::session::{self, lock, value_or_report};
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
        target: *mut c_char,
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

/// The variadic arguments that follow a format.
struct VaArgs(*mut c_void);

impl VaArgs {
    fn next_int(&self) -> i32 {
        // SAFETY: the caller guarantees that the arguments fit the format, and the next conversion
        // takes an int.
        unsafe { sempa_va_int(self.0) }
    }

    fn next_long(&self) -> i64 {
        // SAFETY: as in `next_int`, for a long.
        unsafe { sempa_va_long(self.0) }
    }

    fn next_double(&self) -> f64 {
        // SAFETY: as in `next_int`, for a double.
        unsafe { sempa_va_double(self.0) }
    }

    fn next_pointer<T>(&self) -> *mut T {
        // SAFETY: as in `next_int`, for a pointer.
        unsafe { sempa_va_pointer(self.0).cast() }
    }

    fn next_count_or_stride(&self, count_or_stride: Option<CountOrStride>) -> i32 {
        match count_or_stride {
            None => 1,
            Some(CountOrStride::Literal(value)) => value,
            Some(CountOrStride::Argument) => self.next_int(),
        }
    }

    fn next_text<'a>(&self) -> PvmResult<ProgramStr<'a>> {
        // SAFETY: the next conversion takes a string.
        unsafe { ProgramStr::new(self.next_pointer()) }
    }

    fn next_array<T: Copy>(&self, count: i32, stride: i32) -> PvmResult<Strided<T>> {
        // SAFETY: the next conversion takes an array with these elements.
        unsafe { Strided::new(self.next_pointer(), count, stride) }
    }
}

fn pack_scalar<T: Packable>(value: T) -> PvmResult<i32> {
    zero_on_success(pack::pack_value(lock().send_buffer()?, value))
}

fn pack_byte(value: u8) -> PvmResult<i32> {
    let mut session = lock();
    let buffer = session.send_buffer()?;
    if let Some(segments) = buffer.segments() {
        segments.push(crate::buffers::Segment::CopiedBytes(vec![value]));
        return Ok(0);
    }
    zero_on_success(pack::pack_bytes(buffer, &Strided::from_slice(&[value])))
}

fn pack_by_value(kind: Conversion, args: &VaArgs) -> PvmResult<i32> {
    match kind {
        // C promotes arguments smaller than an int to int, and floats to doubles.
        Conversion::Byte => pack_byte(args.next_int() as u8),
        Conversion::Short => pack_scalar(args.next_int() as i16),
        Conversion::UShort => pack_scalar(args.next_int() as u16),
        Conversion::Int => pack_scalar(args.next_int()),
        Conversion::UInt => pack_scalar(args.next_int() as u32),
        Conversion::Long => pack_scalar(args.next_long()),
        Conversion::ULong => pack_scalar(args.next_long() as u64),
        Conversion::Float => pack_scalar(args.next_double() as f32),
        Conversion::Double => pack_scalar(args.next_double()),
        Conversion::Complex | Conversion::DoubleComplex | Conversion::Str => {
            pack_array(kind, args, 1, 1)
        }
    }
}

fn pack_array(kind: Conversion, args: &VaArgs, count: i32, stride: i32) -> PvmResult<i32> {
    match kind {
        Conversion::Byte => pack_array_with(args.next_array(count, stride), pack::pack_bytes),
        Conversion::Short => {
            pack_array_with(args.next_array::<i16>(count, stride), pack::pack_numbers)
        }
        Conversion::UShort => {
            pack_array_with(args.next_array::<u16>(count, stride), pack::pack_numbers)
        }
        Conversion::Int => {
            pack_array_with(args.next_array::<i32>(count, stride), pack::pack_numbers)
        }
        Conversion::UInt => {
            pack_array_with(args.next_array::<u32>(count, stride), pack::pack_numbers)
        }
        Conversion::Long => {
            pack_array_with(args.next_array::<i64>(count, stride), pack::pack_numbers)
        }
        Conversion::ULong => {
            pack_array_with(args.next_array::<u64>(count, stride), pack::pack_numbers)
        }
        Conversion::Float => {
            pack_array_with(args.next_array::<f32>(count, stride), pack::pack_numbers)
        }
        Conversion::Double => {
            pack_array_with(args.next_array::<f64>(count, stride), pack::pack_numbers)
        }
        Conversion::Complex => pack_array_with(
            args.next_array::<[f32; 2]>(count, stride),
            pack::pack_numbers,
        ),
        Conversion::DoubleComplex => pack_array_with(
            args.next_array::<[f64; 2]>(count, stride),
            pack::pack_numbers,
        ),
        Conversion::Str => {
            let text = args.next_text()?;
            zero_on_success(pack::pack_str_value(lock().send_buffer()?, text.to_bytes()))
        }
    }
}

fn unpack_array(kind: Conversion, args: &VaArgs, count: i32, stride: i32) -> PvmResult<i32> {
    match kind {
        Conversion::Byte => unpack_array_with(args.next_array(count, stride), pack::unpack_bytes),
        Conversion::Short => {
            unpack_array_with(args.next_array::<i16>(count, stride), pack::unpack_numbers)
        }
        Conversion::UShort => {
            unpack_array_with(args.next_array::<u16>(count, stride), pack::unpack_numbers)
        }
        Conversion::Int => {
            unpack_array_with(args.next_array::<i32>(count, stride), pack::unpack_numbers)
        }
        Conversion::UInt => {
            unpack_array_with(args.next_array::<u32>(count, stride), pack::unpack_numbers)
        }
        Conversion::Long => {
            unpack_array_with(args.next_array::<i64>(count, stride), pack::unpack_numbers)
        }
        Conversion::ULong => {
            unpack_array_with(args.next_array::<u64>(count, stride), pack::unpack_numbers)
        }
        Conversion::Float => {
            unpack_array_with(args.next_array::<f32>(count, stride), pack::unpack_numbers)
        }
        Conversion::Double => {
            unpack_array_with(args.next_array::<f64>(count, stride), pack::unpack_numbers)
        }
        Conversion::Complex => unpack_array_with(
            args.next_array::<[f32; 2]>(count, stride),
            pack::unpack_numbers,
        ),
        Conversion::DoubleComplex => unpack_array_with(
            args.next_array::<[f64; 2]>(count, stride),
            pack::unpack_numbers,
        ),
        Conversion::Str => {
            let target: *mut c_char = args.next_pointer();
            let text = pack::unpack_str(lock().receive_buffer()?)?;
            if target.is_null() {
                return Err(PvmError::BadParam);
            }
            // SAFETY: the conversion takes a buffer with enough space for the string.
            unsafe { write_c_string(target, &text) };
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
        let format = unsafe { ProgramStr::new(format) }?;
        let args = VaArgs(list);
        for item in FormatItems::new(format.to_bytes()) {
            match item? {
                FormatItem::NewBuffer => buffers::restart_send_buffer(args.next_int())?,
                FormatItem::Data {
                    kind,
                    count: None,
                    stride: None,
                } => drop(pack_by_value(kind, &args)?),
                FormatItem::Data {
                    kind,
                    count,
                    stride,
                } => {
                    let (count, stride) = (
                        args.next_count_or_stride(count),
                        args.next_count_or_stride(stride),
                    );
                    pack_array(kind, &args, count, stride)?;
                }
            }
        }
        Ok(0)
    };
    // SAFETY: by this function's contract.
    let items = || vec![unsafe { c_string_item("PF", format) }];
    trace::traced_call(
        "packf",
        items,
        || value_or_report("pvm_packf", pack_all()),
        trace::return_code_items,
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
        let format = unsafe { ProgramStr::new(format) }?;
        let args = VaArgs(list);
        for item in FormatItems::new(format.to_bytes()) {
            match item? {
                FormatItem::NewBuffer => return Err(PvmError::BadParam),
                FormatItem::Data {
                    kind,
                    count,
                    stride,
                } => {
                    let (count, stride) = (
                        args.next_count_or_stride(count),
                        args.next_count_or_stride(stride),
                    );
                    unpack_array(kind, &args, count, stride)?;
                }
            }
        }
        Ok(0)
    };
    // SAFETY: by this function's contract.
    let items = || vec![unsafe { c_string_item("PF", format) }];
    trace::traced_call(
        "unpackf",
        items,
        || value_or_report("pvm_unpackf", unpack_all()),
        trace::return_code_items,
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
    session::log_stderr(&String::from_utf8_lossy(&line), true);
    0
}
