//! Access to memory of the calling program: arrays, strings and structures.

#![allow(unsafe_code, reason = "C programs pass pointers")]

use crate::abi;
use crate::errors::{CallError, CallResult};
use master_worker::{Groups, RawTask};
use std::ffi::{CStr, c_char, c_void};

/// A structure whose first field is its size, as the program was compiled.
///
/// # Safety
/// The type is `repr(C)` and `Copy`, and its first field is a `usize`. Each value whose bytes come
/// partly from the program and partly from a valid value is valid.
pub(super) unsafe trait Versioned {}

macro_rules! versioned {
    ($($type:ty),*) => {
        $(
            // SAFETY: the type is `repr(C)` and begins with its size. Its fields are integers,
            // floats, raw pointers and optional function pointers.
            unsafe impl Versioned for $type {}
        )*
    };
}

versioned!(
    abi::Settings,
    abi::Workers,
    abi::Options,
    abi::Progress,
    abi::Statistics,
    abi::Outcome,
    super::driver::Callbacks,
    super::worker::Callbacks
);

/// Returns the size that the program has stored in a structure.
///
/// # Safety
/// `source` is null or points to a structure whose size field is set.
unsafe fn stored_size<T: Versioned>(name: &str, source: *const T) -> CallResult<usize> {
    if source.is_null() {
        return Err(CallError::argument(format!("{name} is NULL")));
    }
    // SAFETY: the first field of the structure is its size, by the contract of `Versioned`.
    let size = unsafe { source.cast::<usize>().read() };
    if size < size_of::<usize>() {
        let text = format!("{name}: the field size must be sizeof(*{name}), not {size}");
        return Err(CallError::argument(text));
    }
    Ok(size.min(size_of::<T>()))
}

/// Reads a structure. Fields that the program's version of the structure does not have are those of
/// `initial`.
///
/// # Errors
/// The pointer is null, or the size is not set.
///
/// # Safety
/// `source` is null or points to a structure of the size in its first field.
pub(super) unsafe fn read_struct<T: Versioned>(
    name: &str,
    source: *const T,
    initial: T,
) -> CallResult<T> {
    // SAFETY: by this function's contract.
    let size = unsafe { stored_size(name, source)? };
    let mut value = initial;
    // SAFETY: the source has `size` bytes, and `size` is at most that of the target. The result is
    // valid by the contract of `Versioned`.
    unsafe {
        std::ptr::copy_nonoverlapping(
            source.cast::<u8>(),
            std::ptr::from_mut(&mut value).cast::<u8>(),
            size,
        );
    }
    Ok(value)
}

/// Writes the fields of a structure that the program's version has.
///
/// # Errors
/// As [`read_struct`].
///
/// # Safety
/// As [`read_struct`], and the structure may be written.
pub(super) unsafe fn write_struct<T: Versioned>(
    name: &str,
    target: *mut T,
    value: &T,
) -> CallResult<()> {
    // SAFETY: by this function's contract.
    let size = unsafe { stored_size(name, target)? };
    let field = size_of::<usize>();
    // SAFETY: source and target have `size` bytes, and `size` is at least that of the first field,
    // which remains.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(field),
            target.cast::<u8>().add(field),
            size - field,
        );
    }
    Ok(())
}

/// Stores a value if the pointer is not null.
///
/// # Safety
/// `target` is null or valid for a write.
pub(super) unsafe fn store<T>(target: *mut T, value: T) {
    if !target.is_null() {
        // SAFETY: by this function's contract.
        unsafe { target.write(value) };
    }
}

/// Returns the elements of an array.
///
/// # Errors
/// The pointer is null although the array has elements.
///
/// # Safety
/// `start` is null or points to `count` elements, which nobody changes during `'a`.
pub(super) unsafe fn slice<'a, T>(
    name: &str,
    start: *const T,
    count: usize,
) -> CallResult<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if start.is_null() {
        let text = format!("{name} is NULL, but {count} elements were announced");
        return Err(CallError::argument(text));
    }
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(CallError::argument(format!(
            "{name}: {count} elements do not fit in memory"
        )));
    }
    // SAFETY: by this function's contract, and the size fits.
    Ok(unsafe { std::slice::from_raw_parts(start, count) })
}

/// Returns the bytes of an array.
///
/// # Errors
/// As [`slice()`].
///
/// # Safety
/// As [`slice()`].
pub(super) unsafe fn bytes<'a>(
    name: &str,
    start: *const c_void,
    length: usize,
) -> CallResult<&'a [u8]> {
    // SAFETY: by this function's contract.
    unsafe { slice(name, start.cast::<u8>(), length) }
}

/// Returns a copy of a string; `None` for a null pointer.
///
/// # Errors
/// The string is not UTF-8.
///
/// # Safety
/// `text` is null or a string that ends with a zero byte.
pub(super) unsafe fn optional_text(name: &str, text: *const c_char) -> CallResult<Option<String>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: by this function's contract.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    let text = text.map_err(|_| CallError::argument(format!("{name} is not UTF-8")))?;
    Ok(Some(text.to_string()))
}

/// Returns copies of the strings of an array that ends with a null pointer; none for a null
/// pointer.
///
/// # Errors
/// A string is not UTF-8.
///
/// # Safety
/// `texts` is null or such an array.
pub(super) unsafe fn text_list(
    name: &str,
    mut texts: *const *const c_char,
) -> CallResult<Vec<String>> {
    let mut list = Vec::new();
    if texts.is_null() {
        return Ok(list);
    }
    loop {
        // SAFETY: the array ends with a null pointer, so the element exists.
        let text = unsafe { optional_text(name, *texts)? };
        let Some(text) = text else {
            return Ok(list);
        };
        list.push(text);
        // SAFETY: the element was not the last one.
        texts = unsafe { texts.add(1) };
    }
}

/// Returns a copy of a task.
///
/// # Errors
/// As [`slice()`].
///
/// # Safety
/// The payload has the length in the task.
pub(super) unsafe fn raw_task(task: &abi::Task) -> CallResult<RawTask> {
    // SAFETY: by this function's contract.
    let payload = unsafe { bytes("payload", task.payload, task.length)? };
    Ok(RawTask {
        key: task.key,
        groups: groups(task.groups),
        payload: payload.to_vec().into(),
    })
}

/// Returns the set with these bits; all groups for 0.
pub(super) fn groups(bits: u64) -> Groups {
    Groups::from_bits(bits).unwrap_or(Groups::ALL)
}

/// Returns the address of bytes; null if there are none.
pub(super) fn address(bytes: &[u8]) -> *const c_void {
    match bytes {
        [] => std::ptr::null(),
        bytes => bytes.as_ptr().cast(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(size: usize) -> abi::Progress {
        let mut progress = abi::Progress::new(&master_worker::Progress::default());
        progress.size = size;
        progress
    }

    #[test]
    fn shorter_structure_keeps_the_other_fields() {
        let full = size_of::<abi::Progress>();
        let mut short = progress(3 * size_of::<u64>());
        (short.finished, short.running, short.waiting) = (1, 2, 3);
        let mut initial = progress(full);
        initial.waiting = 9;
        // SAFETY: the structure has more bytes than its size says.
        let read = unsafe { read_struct("progress", &short, initial) }.expect("a structure");
        assert_eq!((read.finished, read.running, read.waiting), (1, 2, 9));

        // SAFETY: as above.
        unsafe { write_struct("progress", &mut short, &progress(full)) }.expect("written");
        assert_eq!((short.size, short.finished), (3 * size_of::<u64>(), 0));
        assert_eq!(short.waiting, 3, "a field behind the size is not written");
    }

    #[test]
    fn structure_without_size_is_refused() {
        let unset = progress(0);
        // SAFETY: a structure, and a null pointer.
        unsafe {
            assert!(read_struct("progress", &unset, unset).is_err());
            assert!(read_struct("progress", std::ptr::null(), unset).is_err());
        }
    }
}
