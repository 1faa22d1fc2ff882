//! Contents of messages that Python programs send: bytes, packed items, arrays, pickled objects.

use crate::array_header::{ArrayHeader, ElementOrder};
use crate::buffer::with_contiguous_bytes;
use crate::packer::PyPacker;
use bytes::Bytes;
use libpvm::proto::body::Encoding;
use libpvm::{Body, Runtime};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// First bytes of a message with a pickled object.
pub(crate) const OBJECT_MAGIC: [u8; 8] = *b"SempaOb1";
/// Protocol of pickles. All supported versions of Python read it.
const PICKLE_PROTOCOL: i32 = 5;
/// Size in bytes from which a copy is made without the interpreter's lock.
const UNLOCKED_COPY_BYTES_MIN: usize = 64 << 10;

/// A message content that can be sent several times.
#[pyclass(name = "Content", module = "sempa_pvm", frozen)]
pub(crate) struct PyContent {
    body: Body,
}

#[pymethods]
impl PyContent {
    /// Returns the content of a message for which `Message.array` returns `array`.
    #[staticmethod]
    fn array(py: Python<'_>, array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let body = array_body(py, None, array)?;
        Ok(Self { body })
    }

    /// Returns the content of a message for which `Message.object` returns a copy of `value`.
    #[staticmethod]
    fn object(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let body = object_body(None, value)?;
        Ok(Self { body })
    }

    fn __len__(&self) -> usize {
        self.body.bytes.len()
    }

    fn __repr__(&self) -> String {
        format!("<Content of {} bytes>", self.body.bytes.len())
    }
}

/// Returns the body for a content that a program passes: nothing, an object with the buffer
/// protocol, a `Content` or a `Packer`. Large contents are copied once, into memory that tasks on
/// this host read in place if `runtime` has such memory.
///
/// # Errors
/// `TypeError` for another type.
pub(crate) fn body_of(
    py: Python<'_>,
    runtime: Option<&Runtime>,
    data: &Bound<'_, PyAny>,
) -> PyResult<Body> {
    if data.is_none() {
        return Ok(Body::empty());
    }
    if let Ok(content) = data.cast::<PyContent>() {
        return Ok(content.get().body.clone());
    }
    if let Ok(packer) = data.cast::<PyPacker>() {
        return Ok(packer.get().body(runtime));
    }
    if data.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(
            "a str has no bytes of its own: send text.encode(), or Packer().pack_str(text) to a \
             program in C",
        ));
    }
    let buffer = PyUntypedBuffer::get(data).map_err(|error| {
        PyTypeError::new_err(format!(
            "a message content is None, a Packer, a Content, or an object with the buffer protocol, \
             not {}: {error}",
            data.get_type()
        ))
    })?;
    copy_in_c_order(py, runtime, &[], data, &buffer)
}

/// Returns the body of a message with an array: a header with format and shape, and the elements.
/// An array in Fortran order keeps its order.
///
/// # Errors
/// The object does not have the buffer protocol, or the protocol cannot describe its elements.
pub(crate) fn array_body(
    py: Python<'_>,
    runtime: Option<&Runtime>,
    array: &Bound<'_, PyAny>,
) -> PyResult<Body> {
    let buffer = PyUntypedBuffer::get(array)?;
    let order = match !buffer.is_c_contiguous() && buffer.is_fortran_contiguous() {
        true => ElementOrder::Fortran,
        false => ElementOrder::C,
    };
    let header = ArrayHeader {
        order,
        element_bytes: buffer.item_size(),
        shape: buffer.shape().to_vec(),
        format: buffer.format().into(),
    };
    let head = header.encode().map_err(PyValueError::new_err)?;
    match order {
        ElementOrder::C => copy_in_c_order(py, runtime, &head, array, &buffer),
        ElementOrder::Fortran => {
            let copy = with_contiguous_bytes(&buffer, |bytes| copy(py, runtime, &head, bytes));
            copy.ok_or_else(|| PyValueError::new_err("the array is not contiguous"))
        }
    }
}

/// Returns the body of a message with a pickled object.
///
/// # Errors
/// The object cannot be pickled.
pub(crate) fn object_body(runtime: Option<&Runtime>, value: &Bound<'_, PyAny>) -> PyResult<Body> {
    let py = value.py();
    let pickle = py
        .import("pickle")?
        .call_method1("dumps", (value, PICKLE_PROTOCOL))?;
    let pickle = pickle.cast::<PyBytes>()?;
    Ok(copy(py, runtime, &OBJECT_MAGIC, pickle.as_bytes()))
}

/// Copies head and bytes into memory for a message body.
pub(crate) fn copy_to_body(runtime: Option<&Runtime>, head: &[u8], bytes: &[u8]) -> Bytes {
    let body_bytes = head.len() + bytes.len();
    let shared_memory = runtime.and_then(|runtime| runtime.allocate_body(body_bytes));
    if let Some(mut shared_memory) = shared_memory
        && shared_memory.append(head)
        && shared_memory.append(bytes)
    {
        return shared_memory.freeze();
    }
    let mut body = Vec::with_capacity(body_bytes);
    body.extend_from_slice(head);
    body.extend_from_slice(bytes);
    body.into()
}

fn copy(py: Python<'_>, runtime: Option<&Runtime>, head: &[u8], bytes: &[u8]) -> Body {
    let bytes = match head.len() + bytes.len() < UNLOCKED_COPY_BYTES_MIN {
        true => copy_to_body(runtime, head, bytes),
        false => py.detach(|| copy_to_body(runtime, head, bytes)),
    };
    let enc = Encoding::Raw.enc_field();
    Body { enc, bytes }
}

/// Copies head and elements. Elements that are not contiguous in C order are copied twice.
fn copy_in_c_order(
    py: Python<'_>,
    runtime: Option<&Runtime>,
    head: &[u8],
    object: &Bound<'_, PyAny>,
    buffer: &PyUntypedBuffer,
) -> PyResult<Body> {
    if buffer.is_c_contiguous()
        && let Some(body) = with_contiguous_bytes(buffer, |bytes| copy(py, runtime, head, bytes))
    {
        return Ok(body);
    }
    let contiguous_copy = pyo3::types::PyMemoryView::from(object)?.call_method0("tobytes")?;
    let contiguous_copy = contiguous_copy.cast::<PyBytes>()?;
    Ok(copy(py, runtime, head, contiguous_copy.as_bytes()))
}
