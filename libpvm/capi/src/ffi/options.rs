//! Calls for options, trace masks, exported variables, error texts and the version.

#![allow(unsafe_code)]

use super::zero_on_success;
use crate::abi::{MASK_BYTES, Tracer};
use crate::data::{error_text, pvm_errno, pvmctrc, pvmtrc};
use crate::env;
use crate::memory::{ProgramStr, Strided};
use crate::options;
use crate::session::{lock, log_stderr, value_or_report};
use crate::trace;
use sempa_proto::trace::int_item;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering::Relaxed;

#[unsafe(no_mangle)]
extern "C" fn pvm_getopt(what: c_int) -> c_int {
    trace::traced_call(
        "getopt",
        || vec![int_item("OPT", what)],
        || {
            // The first lock creates the session, which reads options from the environment.
            drop(lock());
            value_or_report("pvm_getopt", options::read_option(what))
        },
        |value| vec![int_item("OPV", *value)],
    )
}

/// Sets an option and returns its previous value.
#[unsafe(no_mangle)]
extern "C" fn pvm_setopt(what: c_int, value: c_int) -> c_int {
    trace::traced_call(
        "setopt",
        || vec![int_item("OPT", what), int_item("OPV", value)],
        || {
            drop(lock());
            value_or_report("pvm_setopt", options::set_option(what, value))
        },
        |previous_value| vec![int_item("OPV", *previous_value)],
    )
}

fn tracer_settings(who: c_int) -> PvmResult<&'static Tracer> {
    drop(lock());
    match who {
        0 => Ok(&pvmtrc),
        1 => Ok(&pvmctrc),
        _ => Err(PvmError::BadParam),
    }
}

/// Copies the trace mask of this task (`who` = 0) or of its children (`who` = 1).
///
/// # Safety
/// `mask` must be null or have space for 36 bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_gettmask(who: c_int, mask: *mut c_char) -> c_int {
    let copy_mask = || {
        let tracer = tracer_settings(who)?;
        // SAFETY: by this function's contract.
        let target = unsafe { Strided::<u8>::new(mask.cast(), MASK_BYTES as c_int, 1)? };
        target.fill_raw(&tracer.mask());
        Ok(())
    };
    value_or_report("pvm_gettmask", zero_on_success(copy_mask()))
}

/// Sets the trace mask of this task (`who` = 0) or of its children (`who` = 1).
///
/// # Safety
/// `mask` must be null or contain 36 bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_settmask(who: c_int, mask: *const c_char) -> c_int {
    let set_mask = || {
        let tracer = tracer_settings(who)?;
        // SAFETY: by this function's contract.
        let mask = unsafe { Strided::<u8>::new(mask.cast(), MASK_BYTES as c_int, 1)? };
        tracer.set_mask(&mask.to_vec());
        Ok(())
    };
    value_or_report("pvm_settmask", zero_on_success(set_mask()))
}

/// Adds a variable to the environment that spawned tasks inherit.
///
/// # Safety
/// `name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_export(name: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let name = unsafe { ProgramStr::new(name) };
    value_or_report(
        "pvm_export",
        zero_on_success(name.map(|name| env::export_var(&name.to_string_lossy()))),
    )
}

/// Removes a variable from the environment that spawned tasks inherit.
///
/// # Safety
/// `name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_unexport(name: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let name = unsafe { ProgramStr::new(name) };
    value_or_report(
        "pvm_unexport",
        zero_on_success(name.map(|name| env::unexport_var(&name.to_string_lossy()))),
    )
}

/// Prints `text` and the text of the last error on standard error.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_perror(text: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    let text = unsafe { ProgramStr::new(text) }
        .map_or_else(|_| "(null)".to_string(), |text| text.to_string_lossy());
    log_stderr(
        &format!(
            "{text}: {}\n",
            error_text(pvm_errno.load(Relaxed)).to_string_lossy()
        ),
        false,
    );
    0
}

/// Returns the text of the last error.
#[unsafe(no_mangle)]
extern "C" fn pvm_strerror() -> *const c_char {
    error_text(pvm_errno.load(Relaxed)).as_ptr()
}

/// Returns the version of PVM whose interface this library implements.
#[unsafe(no_mangle)]
extern "C" fn pvm_version() -> *const c_char {
    c"3.4.6".as_ptr()
}
