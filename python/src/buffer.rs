//! Python's buffer protocol: reading the memory of Python objects, and exporting received memory.
#![allow(unsafe_code)] // The buffer protocol hands over raw pointers.

use crate::array_header::{ArrayHeader, ElementOrder};
use bytes::Bytes;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CString, c_int, c_void};
use std::ptr;

/// Calls `read` with the bytes of a contiguous buffer, in the order in which they are in memory.
/// Returns `None` for a buffer that is not contiguous.
///
/// A Python thread that changes the buffer during the call gives `read` old or new bytes, as it
/// does for other C functions that run without the interpreter's lock, such as those of hashlib.
pub(crate) fn with_contiguous_bytes<R>(
    buffer: &PyUntypedBuffer,
    read: impl FnOnce(&[u8]) -> R,
) -> Option<R> {
    if !buffer.is_c_contiguous() && !buffer.is_fortran_contiguous() {
        return None;
    }
    if buffer.len_bytes() == 0 {
        return Some(read(&[]));
    }
    // SAFETY: the exporter guarantees `len_bytes` readable bytes at `buf_ptr` for a contiguous
    // buffer, and keeps them until the buffer is released, which `buffer` does when it is dropped.
    let bytes =
        unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast::<u8>(), buffer.len_bytes()) };
    Some(read(bytes))
}

/// Read-only elements in a received message. Python reads them in place.
#[pyclass(name = "Array", module = "sempa_pvm._native", frozen)]
pub(crate) struct ExportedArray {
    elements: Bytes,
    format: CString,
    element_bytes: isize,
    order: ElementOrder,
    shape: Vec<isize>,
    strides: Vec<isize>,
}

impl ExportedArray {
    /// Exports the elements of an array. `elements` has the size that the header describes.
    pub(crate) fn new(header: ArrayHeader, elements: Bytes) -> Self {
        let strides = header.strides();
        let shape: Vec<isize> = header.shape.iter().map(|length| *length as isize).collect();
        let element_bytes = header.element_bytes as isize;
        let element_count: isize = match shape.contains(&0) {
            true => 0,
            false => shape.iter().product(),
        };
        assert_eq!(
            element_count * element_bytes,
            elements.len() as isize,
            "the header was checked"
        );
        Self {
            elements,
            format: header.format,
            element_bytes,
            order: header.order,
            shape,
            strides,
        }
    }

    /// Exports bytes as one-dimensional elements.
    pub(crate) fn from_bytes(bytes: Bytes) -> Self {
        let header = ArrayHeader {
            order: ElementOrder::C,
            element_bytes: 1,
            shape: vec![bytes.len()],
            format: c"B".into(),
        };
        Self::new(header, bytes)
    }

    /// Returns a `memoryview` of the elements.
    ///
    /// # Errors
    /// The interpreter has no memory.
    pub(crate) fn into_memoryview(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let array = Bound::new(py, self)?;
        pyo3::types::PyMemoryView::from(array.as_any()).map(Bound::into_any)
    }

    /// True if the elements are in the order that a consumer with these flags expects.
    fn satisfies(&self, flags: c_int) -> bool {
        let wants = |flag: c_int| flags & flag == flag;
        let is_c = self.order == ElementOrder::C || self.shape.len() <= 1;
        let is_fortran = self.order == ElementOrder::Fortran || self.shape.len() <= 1;
        // Without strides a consumer assumes C order.
        let needs_c = !wants(ffi::PyBUF_STRIDES) || wants(ffi::PyBUF_C_CONTIGUOUS);
        (is_c || !needs_c) && (is_fortran || !wants(ffi::PyBUF_F_CONTIGUOUS))
    }
}

#[pymethods]
impl ExportedArray {
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no place for the buffer"));
        }
        // SAFETY: the consumer passes a `Py_buffer` that this function may write.
        let view = unsafe { &mut *view };
        view.obj = ptr::null_mut();
        if flags & ffi::PyBUF_WRITABLE != 0 {
            return Err(PyBufferError::new_err(
                "a received message is read-only: copy it to change it",
            ));
        }
        let array = slf.get();
        if !array.satisfies(flags) {
            return Err(PyBufferError::new_err(
                "the array is in another order than the one requested",
            ));
        }
        let wants = |flag: c_int| flags & flag == flag;
        let pointer_if = |is_wanted: bool, pointer: *const isize| match is_wanted {
            true => pointer.cast_mut(),
            false => ptr::null_mut(),
        };
        view.buf = array.elements.as_ptr().cast_mut().cast::<c_void>();
        view.len = array.elements.len() as isize;
        view.readonly = 1;
        view.itemsize = array.element_bytes;
        view.format = match wants(ffi::PyBUF_FORMAT) {
            true => array.format.as_ptr().cast_mut(),
            false => ptr::null_mut(),
        };
        // The number of dimensions is at most 64.
        view.ndim = array.shape.len() as c_int;
        view.shape = pointer_if(wants(ffi::PyBUF_ND), array.shape.as_ptr());
        view.strides = pointer_if(wants(ffi::PyBUF_STRIDES), array.strides.as_ptr());
        view.suboffsets = ptr::null_mut();
        view.internal = ptr::null_mut();
        // `view.obj` keeps the array, which never changes, and thereby all memory to which the view
        // points. The consumer releases this reference.
        view.obj = slf.into_any().into_ptr();
        Ok(())
    }
}
