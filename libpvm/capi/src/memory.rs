//! Memory of the calling program: arrays, strings and single values behind pointers that C code gave us.
//!
//! The values are made in the `ffi` modules, which take the caller's word for pointer and length; what can be checked
//! (null, negative counts) is. Everything else uses them without `unsafe`.

// Reading and writing what C points to is what this module is for.
#![allow(unsafe_code)]

use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;

/// `count` elements of the program's memory, `stride` elements apart.
pub(crate) struct Strided<T> {
    first: *mut T,
    count: usize,
    stride: isize,
}

impl Strided<u8> {
    /// The bytes where they lie, if there are no gaps between them.
    pub(crate) fn slice(&self) -> Option<&[u8]> {
        if self.count == 0 {
            return Some(&[]);
        }
        // SAFETY: by the constructors' contract there are `count` bytes of the program's memory, and a stride of one
        // leaves no gaps.
        (self.stride == 1).then(|| unsafe { std::slice::from_raw_parts(self.first, self.count) })
    }
}

impl<T: Copy> Strided<T> {
    /// The program's array.
    ///
    /// # Errors
    /// `BadParam` for a negative count, or a null pointer with elements.
    ///
    /// # Safety
    /// For every `i` below `count`, `first[i * stride]` must be the program's memory for the life of this value; it is
    /// written only when [`Strided::set`] is called.
    pub(crate) unsafe fn new(
        first: *const T,
        count: c_int,
        stride: c_int,
    ) -> PvmResult<Strided<T>> {
        let count = usize::try_from(count).map_err(|_| PvmError::BadParam)?;
        if first.is_null() && count > 0 {
            return Err(PvmError::BadParam);
        }
        Ok(Strided {
            first: first.cast_mut(),
            count,
            stride: stride as isize,
        })
    }

    /// Elements that lie side by side, more of them than an `int` can say.
    ///
    /// # Errors
    /// `BadParam` for a null pointer with elements.
    ///
    /// # Safety
    /// As for [`Strided::new`].
    pub(crate) unsafe fn run(first: *const T, count: usize) -> PvmResult<Strided<T>> {
        match first.is_null() && count > 0 {
            true => Err(PvmError::BadParam),
            false => Ok(Strided {
                first: first.cast_mut(),
                count,
                stride: 1,
            }),
        }
    }

    /// Elements of a Rust slice, only to be read.
    pub(crate) fn of(values: &[T]) -> Strided<T> {
        Strided {
            first: values.as_ptr().cast_mut(),
            count: values.len(),
            stride: 1,
        }
    }

    /// Elements of a Rust slice that may be set.
    #[cfg(test)]
    pub(crate) fn of_mut(values: &mut [T]) -> Strided<T> {
        Strided {
            first: values.as_mut_ptr(),
            count: values.len(),
            stride: 1,
        }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Distance of the elements.
    pub(crate) fn stride(&self) -> isize {
        self.stride
    }

    fn at(&self, i: usize) -> *mut T {
        assert!(i < self.count, "an element of the array");
        self.first.wrapping_offset(i as isize * self.stride)
    }

    /// Element `i`, which must be below `len`.
    pub(crate) fn get(&self, i: usize) -> T {
        // SAFETY: by the contract of `new` the element is there; it may be badly aligned, hence unaligned access.
        unsafe { self.at(i).read_unaligned() }
    }

    /// Sets element `i`, which must be below `len`.
    pub(crate) fn set(&self, i: usize, value: T) {
        // SAFETY: as in `get`.
        unsafe { self.at(i).write_unaligned(value) }
    }

    /// The elements as they lie in memory.
    pub(crate) fn append_raw(&self, out: &mut Vec<u8>) {
        let size = size_of::<T>();
        out.reserve(self.count * size);
        if self.stride == 1 && self.count > 0 {
            // SAFETY: the elements lie side by side, so they are one run of `count * size` bytes.
            out.extend_from_slice(unsafe {
                std::slice::from_raw_parts(self.first.cast::<u8>(), self.count * size)
            });
            return;
        }
        for i in 0..self.count {
            // SAFETY: the element is `size` bytes of the program's memory.
            out.extend_from_slice(unsafe {
                std::slice::from_raw_parts(self.at(i).cast::<u8>(), size)
            });
        }
    }

    /// Fills elements from the front with raw bytes and answers how many were complete.
    pub(crate) fn fill_raw(&self, bytes: &[u8]) -> usize {
        let size = size_of::<T>();
        let whole = (bytes.len() / size).min(self.count);
        if self.stride == 1 {
            if whole > 0 {
                // SAFETY: `whole` elements lie side by side in the program's memory; `bytes` is ours.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        bytes.as_ptr(),
                        self.first.cast::<u8>(),
                        whole * size,
                    )
                };
            }
            return whole;
        }
        for (i, chunk) in bytes.chunks_exact(size).take(whole).enumerate() {
            // SAFETY: the element is `size` bytes of the program's memory, and `chunk` has that length.
            unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), self.at(i).cast::<u8>(), size) };
        }
        whole
    }

    /// All elements in a vector.
    pub(crate) fn to_vec(&self) -> Vec<T> {
        (0..self.count).map(|i| self.get(i)).collect()
    }
}

/// Bytes of the program that are read when a message is sent, not before (`PvmDataInPlace`).
#[derive(Clone, Copy)]
pub(crate) struct Span {
    start: *const u8,
    len: usize,
}

// SAFETY: the program promises (by packing in place) that the memory stays readable until the buffer is gone; any thread
// of it may send.
unsafe impl Send for Span {}

impl Span {
    /// The bytes of an array whose elements lie side by side.
    pub(crate) fn of<T: Copy>(items: &Strided<T>) -> Span {
        Span {
            start: items.first.cast(),
            len: items.count * size_of::<T>(),
        }
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends what the memory holds now.
    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        if self.len > 0 {
            // SAFETY: see `Send` above.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(self.start, self.len) });
        }
    }
}

/// A place in the program's memory for one result; null means that the caller does not want it.
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// The caller's pointer.
    ///
    /// # Safety
    /// Null, or memory for one `T`.
    pub(crate) unsafe fn new(place: *mut T) -> Out<T> {
        Out(place)
    }

    /// Stores the result.
    pub(crate) fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so memory for one `T`.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// True when the caller does not want it.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

/// A C string of the program.
#[derive(Clone, Copy)]
pub(crate) struct Text<'a>(&'a CStr);

impl<'a> Text<'a> {
    /// The caller's string.
    ///
    /// # Errors
    /// `BadParam` for null.
    ///
    /// # Safety
    /// Null, or a string with its NUL that stays for `'a`.
    pub(crate) unsafe fn new(text: *const c_char) -> PvmResult<Text<'a>> {
        if text.is_null() {
            return Err(PvmError::BadParam);
        }
        // SAFETY: not null, so a string by the contract.
        Ok(Text(unsafe { CStr::from_ptr(text) }))
    }

    /// The bytes without the NUL.
    pub(crate) fn bytes(&self) -> &'a [u8] {
        self.0.to_bytes()
    }

    /// As text; what is not UTF-8 is replaced.
    pub(crate) fn string(&self) -> String {
        self.0.to_string_lossy().into_owned()
    }
}

/// Strings of an array that ends with a null pointer, or after `count` entries.
///
/// # Errors
/// `BadParam` for a null entry before `count`.
///
/// # Safety
/// `list` is null or an array as described.
pub(crate) unsafe fn strings(
    list: *const *const c_char,
    count: Option<c_int>,
) -> PvmResult<Vec<Vec<u8>>> {
    let wanted = match count {
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
    let mut out = Vec::new();
    while out.len() < wanted {
        // SAFETY: within the array: before its null, or below `count`.
        let entry = unsafe { *list.add(out.len()) };
        if entry.is_null() && count.is_none() {
            break;
        }
        // SAFETY: an entry of the array is null or a string.
        out.push(unsafe { Text::new(entry)? }.bytes().to_vec());
    }
    Ok(out)
}

/// Writes a string with its NUL to `place`, which must not be null.
///
/// # Safety
/// `place` has room for it.
pub(crate) unsafe fn put_string(place: *mut c_char, text: &[u8]) {
    // SAFETY: room by contract; the source is ours.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), place.cast::<u8>(), text.len());
        place.add(text.len()).write(0);
    }
}

/// Something that C code holds a pointer into. It is only looked at again to be dropped.
pub(crate) struct Lent<T>(pub(crate) T);

// SAFETY: the raw pointers inside point to memory that the same value owns, and are not used by us.
unsafe impl<T> Send for Lent<T> {}

/// A C stream of the program (`FILE *`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stream(usize, PhantomData<*mut libc::FILE>);

// SAFETY: stdio streams may be used by every thread.
unsafe impl Send for Stream {}

impl Stream {
    /// The caller's stream, or `None` for null.
    ///
    /// # Safety
    /// Null, or a stream that stays open as long as it is used here.
    pub(crate) unsafe fn new(file: *mut libc::FILE) -> Option<Stream> {
        (!file.is_null()).then_some(Stream(file as usize, PhantomData))
    }

    /// Writes and flushes.
    pub(crate) fn write(&self, bytes: &[u8]) {
        let file = self.0 as *mut libc::FILE;
        // SAFETY: an open stream by the contract of `new`.
        unsafe {
            libc::fwrite(bytes.as_ptr().cast(), 1, bytes.len(), file);
            libc::fflush(file);
        }
    }
}

/// Writes out what the program has printed so far.
pub(crate) fn flush_stdio() {
    // SAFETY: a null stream means all streams.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_count_in_elements() {
        let values = [1i32, 2, 3, 4, 5, 6];
        // SAFETY: elements 0, 2 and 4 of a live array.
        let odd = unsafe { Strided::new(values.as_ptr(), 3, 2) }.expect("good");
        assert_eq!(odd.to_vec(), [1, 3, 5]);
        let mut raw = Vec::new();
        odd.append_raw(&mut raw);
        assert_eq!(raw.len(), 12);
    }

    #[test]
    fn null_and_negative_are_bad_parameters() {
        // SAFETY: nothing is read.
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
            assert_eq!(strings(std::ptr::null(), Some(2)), Err(PvmError::BadParam));
            assert_eq!(strings(std::ptr::null(), None), Ok(Vec::new()));
            assert_eq!(Text::new(std::ptr::null()).err(), Some(PvmError::BadParam));
        }
    }
}
