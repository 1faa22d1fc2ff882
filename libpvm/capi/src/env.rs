//! The environment of the process, and the numbers and lists kept in it.

// Changing the environment is a call of the C library; Rust's own is unsafe as well.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::sync::atomic::Ordering::Relaxed;

/// Variable with the names of variables to send to spawned tasks, separated by colons.
const EXPORT: &str = "PVM_EXPORT";

/// A variable of the environment, when it is set and not empty.
pub(crate) fn get(name: &str) -> Option<String> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(|value| value.to_string_lossy().into_owned())
}

/// Sets a variable; strings with a NUL are ignored.
pub(crate) fn set(name: &str, value: &str) {
    if let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) {
        set_c(&name, &value);
    }
}

/// Sets a variable.
pub(crate) fn set_c(name: &CStr, value: &CStr) {
    // SAFETY: both are strings; as in every C program, no other thread may read the environment meanwhile.
    unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
}

/// A number as PVM reads it: decimal, `0x` hexadecimal, `0` octal; what follows is ignored, nothing gives 0.
pub(crate) fn number(text: &[u8]) -> i32 {
    let text = text.trim_ascii_start();
    let (negative, text) = match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    };
    let (base, digits) = match text {
        [b'0', b'x' | b'X', rest @ ..] => (16, rest),
        [b'0', rest @ ..] => (8, rest),
        _ => (10, text),
    };
    let value = digits_of(digits, base);
    if negative {
        value.wrapping_neg()
    } else {
        value
    }
}

/// A hexadecimal number, with or without `0x`.
pub(crate) fn hex(text: &[u8]) -> i32 {
    let text = text.trim_ascii_start();
    digits_of(
        text.strip_prefix(b"0x")
            .or(text.strip_prefix(b"0X"))
            .unwrap_or(text),
        16,
    )
}

fn digits_of(digits: &[u8], base: u32) -> i32 {
    let digits = digits
        .iter()
        .map_while(|byte| char::from(*byte).to_digit(base));
    digits.fold(0u32, |value, digit| {
        value.wrapping_mul(base).wrapping_add(digit)
    }) as i32
}

fn exported() -> Vec<String> {
    let list = get(EXPORT).unwrap_or_default();
    list.split(':')
        .filter(|name| !name.is_empty())
        .map(str::to_string)
        .collect()
}

/// Adds a variable to those sent to spawned tasks.
pub(crate) fn export(name: &str) {
    let mut names = exported();
    if !name.is_empty() && !names.iter().any(|have| have == name) {
        names.push(name.to_string());
        set(EXPORT, &names.join(":"));
    }
}

/// Takes a variable from those sent to spawned tasks.
pub(crate) fn unexport(name: &str) {
    let mut names = exported();
    if names.iter().any(|have| have == name) {
        names.retain(|have| have != name);
        set(EXPORT, &names.join(":"));
    }
}

/// What a spawned task gets: trace settings, context, and the exported variables with their values of now.
pub(crate) fn for_children() -> Vec<Vec<u8>> {
    use crate::data::{pvmctrc, pvmmyctx};
    let mask = pvmctrc.mask();
    let mask = mask.split(|byte| *byte == 0).next().unwrap_or_default();
    let mut out = vec![
        [b"PVMTMASK=", mask].concat(),
        format!("PVMTRCBUF={}", pvmctrc.trace_buf.load(Relaxed)).into_bytes(),
        format!("PVMTRCOPT={}", pvmctrc.trace_opt.load(Relaxed)).into_bytes(),
        format!("PVMCTX=0x{:x}", pvmmyctx.load(Relaxed)).into_bytes(),
    ];
    if let Some(list) = get(EXPORT) {
        out.push(format!("{EXPORT}={list}").into_bytes());
        for name in exported() {
            if let Some(value) = std::env::var_os(&name) {
                use std::os::unix::ffi::OsStrExt;
                out.push([name.as_bytes(), b"=", value.as_bytes()].concat());
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_pvm_reads_them() {
        assert_eq!(number(b"12"), 12);
        assert_eq!(number(b"0x1F"), 31);
        assert_eq!(number(b"010"), 8);
        assert_eq!(number(b"-5"), -5);
        assert_eq!(number(b""), 0);
        assert_eq!(number(b"0x80030005"), 0x8003_0005_u32 as i32);
        assert_eq!(number(b"7 dwarfs"), 7);
        assert_eq!(hex(b"40001"), 0x40001);
        assert_eq!(hex(b"0x40001"), 0x40001);
    }
}
