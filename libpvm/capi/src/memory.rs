//! Safe access to memory of the calling program: arrays, strings and single values behind pointers
//! that C code passes.
//!
//! The `ffi` modules create these values. They check pointer and length as far as C permits (null,
//! negative counts) and otherwise rely on the caller. All other modules then use the values without
//! `unsafe`.

// This module exists to dereference pointers of C code.
#![allow(unsafe_code)]

use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;

/// An array of `count` elements in the program's memory. Successive elements have a distance of
/// `stride` elements.
pub(crate) struct Strided<T> {
    first_element: *mut T,
    count: usize,
    stride: isize,
}

impl<T: Copy> Strided<T> {
    /// Wraps an array of the program.
    ///
    /// # Errors
    /// `BadParam` for a negative count, or for a null pointer with a positive count.
    ///
    /// # Safety
    /// For every `i` below `count`, the element at index `i * stride` must be memory of the program
    /// for the life of this value. The memory is written only by [`Strided::set`] and
    /// [`Strided::fill_raw`].
    pub(crate) unsafe fn new(start: *const T, count: c_int, stride: c_int) -> PvmResult<Self> {
        let count = usize::try_from(count).map_err(|_| PvmError::BadParam)?;
        if start.is_null() && count > 0 {
            return Err(PvmError::BadParam);
        }
        Ok(Self {
            first_element: start.cast_mut(),
            count,
            stride: stride as isize,
        })
    }

    /// Wraps a contiguous array. Its count may exceed the range of an `int`.
    ///
    /// # Errors
    /// `BadParam` for a null pointer with a positive count.
    ///
    /// # Safety
    /// As for [`Strided::new`].
    pub(crate) unsafe fn contiguous(start: *const T, count: usize) -> PvmResult<Self> {
        match start.is_null() && count > 0 {
            true => Err(PvmError::BadParam),
            false => Ok(Self {
                first_element: start.cast_mut(),
                count,
                stride: 1,
            }),
        }
    }

    /// Wraps a Rust slice for reading only.
    pub(crate) fn from_slice(values: &[T]) -> Self {
        Self {
            first_element: values.as_ptr().cast_mut(),
            count: values.len(),
            stride: 1,
        }
    }

    /// Wraps the elements of a Rust slice at this distance, for reading only. The first and the
    /// last element of the slice belong to the array.
    #[cfg(test)]
    pub(crate) fn with_stride(values: &[T], stride: usize) -> Option<Self> {
        let last_index = values.len().checked_sub(1)?;
        (stride > 0 && last_index.is_multiple_of(stride)).then(|| Self {
            first_element: values.as_ptr().cast_mut(),
            count: last_index / stride + 1,
            stride: stride as isize,
        })
    }

    /// Wraps a Rust slice for reading and writing.
    #[cfg(test)]
    pub(crate) fn from_mut_slice(values: &mut [T]) -> Self {
        Self {
            first_element: values.as_mut_ptr(),
            count: values.len(),
            stride: 1,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns the number of bytes of all elements.
    pub(crate) fn byte_len(&self) -> usize {
        self.count.saturating_mul(size_of::<T>())
    }

    /// Returns the bytes of the elements if the elements are contiguous.
    pub(crate) fn as_bytes(&self) -> Option<&[u8]> {
        if self.count == 0 {
            return Some(&[]);
        }
        // SAFETY: by the constructors' contract there are `count` elements of the program's memory,
        // and a stride of one leaves no gaps.
        (self.stride == 1).then(|| unsafe {
            std::slice::from_raw_parts(self.first_element.cast::<u8>(), self.count * size_of::<T>())
        })
    }

    /// Returns the elements from index `start` on, at most `count`.
    pub(crate) fn range(&self, start: usize, count: usize) -> Self {
        let start = start.min(self.count);
        Self {
            first_element: self
                .first_element
                .wrapping_offset(start as isize * self.stride),
            count: count.min(self.count - start),
            stride: self.stride,
        }
    }

    /// Returns the distance of successive elements, in elements.
    pub(crate) fn stride(&self) -> isize {
        self.stride
    }

    fn element(&self, i: usize) -> *mut T {
        assert!(i < self.count, "an element of the array");
        self.first_element.wrapping_offset(i as isize * self.stride)
    }

    /// Returns element `i`. `i` must be less than [`Strided::len`].
    pub(crate) fn get(&self, i: usize) -> T {
        // SAFETY: by the contract of `new` the element exists. It may be misaligned, hence the
        // unaligned access.
        unsafe { self.element(i).read_unaligned() }
    }

    /// Sets element `i`. `i` must be less than [`Strided::len`].
    pub(crate) fn set(&self, i: usize, value: T) {
        // SAFETY: as in `get`.
        unsafe { self.element(i).write_unaligned(value) }
    }

    /// Appends the bytes of the elements in memory order, without the gaps between elements.
    pub(crate) fn append_raw(&self, out: &mut Vec<u8>) {
        let element_bytes = size_of::<T>();
        out.reserve(self.count * element_bytes);
        if self.stride == 1 && self.count > 0 {
            // SAFETY: the elements are contiguous, so they are one run of `count * size` bytes.
            out.extend_from_slice(unsafe {
                std::slice::from_raw_parts(
                    self.first_element.cast::<u8>(),
                    self.count * element_bytes,
                )
            });
            return;
        }
        for i in 0..self.count {
            // SAFETY: the element is `element_bytes` bytes of the program's memory.
            out.extend_from_slice(unsafe {
                std::slice::from_raw_parts(self.element(i).cast::<u8>(), element_bytes)
            });
        }
    }

    /// Copies raw bytes into the elements, beginning with the first element. Returns the number of
    /// complete elements.
    pub(crate) fn fill_raw(&self, bytes: &[u8]) -> usize {
        let element_bytes = size_of::<T>();
        let complete_elements = (bytes.len() / element_bytes).min(self.count);
        if self.stride == 1 {
            if complete_elements > 0 {
                // SAFETY: `complete_elements` contiguous elements exist in the program's memory,
                // and `bytes` belongs to this library, so the two do not overlap.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        bytes.as_ptr(),
                        self.first_element.cast::<u8>(),
                        complete_elements * element_bytes,
                    )
                };
            }
            return complete_elements;
        }
        for (i, chunk) in bytes
            .chunks_exact(element_bytes)
            .take(complete_elements)
            .enumerate()
        {
            // SAFETY: the element is `element_bytes` bytes of the program's memory, and `chunk` has
            // that length.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    chunk.as_ptr(),
                    self.element(i).cast::<u8>(),
                    element_bytes,
                )
            };
        }
        complete_elements
    }

    pub(crate) fn to_vec(&self) -> Vec<T> {
        (0..self.count).map(|i| self.get(i)).collect()
    }
}

/// Bytes of the program that are read only when a message is sent (`PvmDataInPlace`).
#[derive(Clone, Copy)]
pub(crate) struct ProgramBytes {
    start: *const u8,
    len: usize,
}

// SAFETY: by packing in place, the program promises that the memory stays readable until the buffer
// is freed, and any of its threads may send the buffer.
unsafe impl Send for ProgramBytes {}

impl ProgramBytes {
    /// Wraps the bytes of an array with contiguous elements.
    pub(crate) fn from_strided<T: Copy>(items: &Strided<T>) -> Self {
        Self {
            start: items.first_element.cast(),
            len: items.count * size_of::<T>(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the current content of the memory.
    pub(crate) fn as_slice(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the program keeps the memory readable, see `Send` above.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

/// Memory of the program for one result. A null pointer means that the caller does not need the
/// result.
pub(crate) struct OutParam<T>(*mut T);

impl<T> OutParam<T> {
    /// Wraps a pointer of the caller.
    ///
    /// # Safety
    /// `target` must be null, or valid for writing one `T`.
    pub(crate) unsafe fn new(target: *mut T) -> Self {
        Self(target)
    }

    /// Stores the result unless the pointer is null.
    pub(crate) fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so it is valid for writing one `T`.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// True if the caller passed a null pointer, that is, if the caller does not need the result.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// A C string of the program.
#[derive(Clone, Copy)]
pub(crate) struct ProgramStr<'a>(&'a CStr);

impl<'a> ProgramStr<'a> {
    /// Wraps a string of the caller.
    ///
    /// # Errors
    /// `BadParam` for null.
    ///
    /// # Safety
    /// `text` must be null, or a NUL-terminated string that stays unchanged for `'a`.
    pub(crate) unsafe fn new(text: *const c_char) -> PvmResult<Self> {
        if text.is_null() {
            return Err(PvmError::BadParam);
        }
        // SAFETY: not null, so a string by the contract.
        Ok(ProgramStr(unsafe { CStr::from_ptr(text) }))
    }

    /// Returns the bytes without the NUL.
    pub(crate) fn to_bytes(self) -> &'a [u8] {
        self.0.to_bytes()
    }

    /// Returns the text; invalid UTF-8 is replaced.
    pub(crate) fn to_string_lossy(self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

/// Copies the strings of an array with `count` entries. If `count` is `None`, a null pointer ends
/// the array.
///
/// # Errors
/// `BadParam` for a null entry at an index below `count`, or a null array with a positive `count`.
///
/// # Safety
/// `list` must be null or an array as described, and its entries null or NUL-terminated strings.
pub(crate) unsafe fn copy_strings(
    list: *const *const c_char,
    count: Option<c_int>,
) -> PvmResult<Vec<Vec<u8>>> {
    let string_count = match count {
        Some(count) => usize::try_from(count).map_err(|_| PvmError::BadParam)?,
        None => usize::MAX,
    };
    if list.is_null() {
        return if count.is_some_and(|n| n > 0) {
            Err(PvmError::BadParam)
        } else {
            Ok(Vec::new())
        };
    }
    let mut strings = Vec::new();
    while strings.len() < string_count {
        // SAFETY: the index is in the array: before its null entry, or below `count`.
        let entry = unsafe { *list.add(strings.len()) };
        if entry.is_null() && count.is_none() {
            break;
        }
        // SAFETY: an entry of the array is null or a string.
        strings.push(unsafe { ProgramStr::new(entry)? }.to_bytes().to_vec());
    }
    Ok(strings)
}

/// Writes a string and its NUL to `target`.
///
/// # Safety
/// `target` must not be null, and must have space for the string and its NUL.
pub(crate) unsafe fn write_c_string(target: *mut c_char, text: &[u8]) {
    // SAFETY: there is enough space by this function's contract, and the source belongs to this
    // library.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), target.cast::<u8>(), text.len());
        target.add(text.len()).write(0);
    }
}

/// A value whose memory C code accesses through pointers. This library never reads the value; this
/// library only owns the memory until the value is dropped.
pub(crate) struct COwnedMemory<T>(pub(crate) T);

// SAFETY: the raw pointers inside refer to memory that the same value owns, and this library does
// not dereference them.
unsafe impl<T> Send for COwnedMemory<T> {}

/// A C stream of the program (`FILE *`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(usize, PhantomData<*mut libc::FILE>);

// SAFETY: all threads may use stdio streams.
unsafe impl Send for Stream {}

impl Stream {
    /// Wraps the caller's stream; `None` for null.
    ///
    /// # Safety
    /// `file` must be null, or a stream that stays open while this value is used.
    pub(crate) unsafe fn new(file: *mut libc::FILE) -> Option<Self> {
        (!file.is_null()).then_some(Self(file as usize, PhantomData))
    }

    /// Writes the bytes and flushes the stream.
    pub(crate) fn write(&self, bytes: &[u8]) {
        let file = self.0 as *mut libc::FILE;
        // SAFETY: an open stream by the contract of `new`.
        unsafe {
            libc::fwrite(bytes.as_ptr().cast(), 1, bytes.len(), file);
            libc::fflush(file);
        }
    }
}

/// Flushes all output streams of the program.
pub(crate) fn flush_stdio() {
    // SAFETY: a null stream means all streams.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stride is counted in elements, and skipped elements are not copied.
    #[test]
    fn stride_is_counted_in_elements() {
        let values = [1i32, 2, 3, 4, 5, 6];
        // SAFETY: elements 0, 2 and 4 of a live array.
        let odd_values = unsafe { Strided::new(values.as_ptr(), 3, 2) }.expect("good");
        assert_eq!(odd_values.to_vec(), [1, 3, 5]);
        let mut raw_bytes = Vec::new();
        odd_values.append_raw(&mut raw_bytes);
        assert_eq!(raw_bytes.len(), 12);
    }

    /// Null pointers with elements, negative counts and null strings are bad parameters.
    #[test]
    fn null_pointers_and_negative_counts_are_refused() {
        // SAFETY: all pointers are null, so nothing is dereferenced.
        unsafe {
            assert_eq!(
                Strided::<i32>::new(std::ptr::null(), 1, 1).err(),
                Some(PvmError::BadParam)
            );
            assert_eq!(
                Strided::<i32>::new(std::ptr::null(), -1, 1).err(),
                Some(PvmError::BadParam)
            );
            assert!(Strided::<i32>::new(std::ptr::null(), 0, 1).is_ok());
            assert_eq!(
                copy_strings(std::ptr::null(), Some(2)),
                Err(PvmError::BadParam)
            );
            assert_eq!(copy_strings(std::ptr::null(), None), Ok(Vec::new()));
            assert_eq!(
                ProgramStr::new(std::ptr::null()).err(),
                Some(PvmError::BadParam)
            );
        }
    }
}
