//! Reads and sets environment variables of the process, and parses the numbers and lists that they
//! contain.

// `setenv` is a call of the C library; `std::env::set_var` is unsafe as well.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::sync::atomic::Ordering::Relaxed;

/// Variable with the names of the variables that spawned tasks inherit, separated by colons
/// (`pvm_export`).
const EXPORT_VAR: &str = "PVM_EXPORT";

/// Returns the value of a variable; `None` if the variable is unset or empty.
pub(crate) fn read_var(name: &str) -> Option<String> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(|value| value.to_string_lossy().into_owned())
}

/// Sets a variable. Does nothing if name or value contains a NUL.
pub(crate) fn set_var(name: &str, value: &str) {
    if let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) {
        set_var_cstr(&name, &value);
    }
}

/// Sets a variable from C strings.
pub(crate) fn set_var_cstr(name: &CStr, value: &CStr) {
    // SAFETY: both pointers are C strings. As in every C program, no other thread may access the
    // environment during this call.
    unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
}

/// Parses a number as PVM does: decimal, hexadecimal with `0x`, or octal with `0`. Parsing stops at
/// the first character that is not a digit; a text without digits yields 0.
pub(crate) fn parse_number(text: &[u8]) -> i32 {
    let text = text.trim_ascii_start();
    let (is_negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    let (base, digits) = match text {
        [b'0', b'x' | b'X', rest @ ..] => (16, rest),
        [b'0', rest @ ..] => (8, rest),
        _ => (10, text),
    };
    let value = parse_digits(digits, base);
    if is_negative {
        value.wrapping_neg()
    } else {
        value
    }
}

/// Parses a hexadecimal number with or without `0x`.
pub(crate) fn parse_hex(text: &[u8]) -> i32 {
    let text = text.trim_ascii_start();
    parse_digits(
        text.strip_prefix(b"0x")
            .or(text.strip_prefix(b"0X"))
            .unwrap_or(text),
        16,
    )
}

fn parse_digits(digits: &[u8], base: u32) -> i32 {
    let digits = digits
        .iter()
        .map_while(|byte| char::from(*byte).to_digit(base));
    digits.fold(0u32, |value, digit| {
        value.wrapping_mul(base).wrapping_add(digit)
    }) as i32
}

fn exported_names() -> Vec<String> {
    let export_list = read_var(EXPORT_VAR).unwrap_or_default();
    export_list
        .split(':')
        .filter(|name| !name.is_empty())
        .map(str::to_string)
        .collect()
}

/// Adds a variable to the variables that spawned tasks inherit.
pub(crate) fn export_var(name: &str) {
    let mut names = exported_names();
    if !name.is_empty() && !names.iter().any(|exported_name| exported_name == name) {
        names.push(name.to_string());
        set_var(EXPORT_VAR, &names.join(":"));
    }
}

/// Removes a variable from the variables that spawned tasks inherit.
pub(crate) fn unexport_var(name: &str) {
    let mut names = exported_names();
    if names.iter().any(|exported_name| exported_name == name) {
        names.retain(|exported_name| exported_name != name);
        set_var(EXPORT_VAR, &names.join(":"));
    }
}

/// Returns the environment of a spawned task: trace settings, context, and the exported variables
/// with their current values.
pub(crate) fn child_environment() -> Vec<Vec<u8>> {
    use crate::data::{pvmctrc, pvmmyctx};
    let mask = pvmctrc.mask();
    let mask = mask.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut environment = vec![
        [b"PVMTMASK=", mask].concat(),
        format!("PVMTRCBUF={}", pvmctrc.trace_buf.load(Relaxed)).into_bytes(),
        format!("PVMTRCOPT={}", pvmctrc.trace_opt.load(Relaxed)).into_bytes(),
        format!("PVMCTX=0x{:x}", pvmmyctx.load(Relaxed)).into_bytes(),
    ];
    if let Some(export_list) = read_var(EXPORT_VAR) {
        environment.push(format!("{EXPORT_VAR}={export_list}").into_bytes());
        for name in exported_names() {
            if let Some(value) = std::env::var_os(&name) {
                use std::os::unix::ffi::OsStrExt;
                environment.push([name.as_bytes(), b"=", value.as_bytes()].concat());
            }
        }
    }
    environment
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decimal, hexadecimal and octal numbers are parsed as in PVM. A text without digits yields 0.
    #[test]
    fn numbers_are_parsed_as_in_pvm() {
        assert_eq!(parse_number(b"12"), 12);
        assert_eq!(parse_number(b"0x1F"), 31);
        assert_eq!(parse_number(b"010"), 8);
        assert_eq!(parse_number(b"-5"), -5);
        assert_eq!(parse_number(b""), 0);
        assert_eq!(parse_number(b"0x80030005"), 0x8003_0005_u32 as i32);
        assert_eq!(parse_number(b"7 dwarfs"), 7);
        assert_eq!(parse_hex(b"40001"), 0x40001);
        assert_eq!(parse_hex(b"0x40001"), 0x40001);
    }
}
