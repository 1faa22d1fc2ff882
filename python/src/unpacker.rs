//! Unpacks PVM items that programs in C, Fortran or Python have packed.

use crate::array_header::{ArrayHeader, ElementOrder};
use crate::buffer::ExportedArray;
use crate::enrolled::lock;
use crate::errors;
use crate::packer::ElementType;
use bytes::Bytes;
use libpvm::proto::body::{Encoding, PackedNumber, Unpacker};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyList};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::CString;
use std::sync::Mutex;

/// Reads the items of a message in the order in which the sender packed them.
#[pyclass(name = "Unpacker", module = "sempa_pvm", frozen)]
pub(crate) struct PyUnpacker {
    unpacker: Mutex<Unpacker>,
    encoding: Encoding,
    /// Names the message in errors.
    description: String,
}

impl PyUnpacker {
    pub(crate) fn new(unpacker: Unpacker, encoding: Encoding, description: String) -> Self {
        Self {
            unpacker: Mutex::new(unpacker),
            encoding,
            description,
        }
    }

    /// Calls `read`, which reads items. After an error the read position is where it was.
    fn read<T>(
        &self,
        py: Python<'_>,
        read: impl FnOnce(&mut Unpacker) -> PvmResult<T>,
    ) -> PyResult<T> {
        self.read_or_stay(read).map_err(|code| {
            let description = &self.description;
            let reason = match code {
                PvmError::NoData => format!("{description} has no further item of this size"),
                _ => format!("{description} has no such item here: {code}"),
            };
            errors::from_code(py, code, reason)
        })
    }

    /// Calls `read` and advances the read position if `read` succeeds.
    fn read_or_stay<T>(&self, read: impl FnOnce(&mut Unpacker) -> PvmResult<T>) -> PvmResult<T> {
        let mut unpacker = lock(&self.unpacker);
        let mut advanced_unpacker = unpacker.clone();
        let value = read(&mut advanced_unpacker)?;
        *unpacker = advanced_unpacker;
        Ok(value)
    }

    /// Reads one number, or a list of `count` numbers.
    fn numbers<'py, T>(&self, py: Python<'py>, count: Option<usize>) -> PyResult<Bound<'py, PyAny>>
    where
        T: PackedNumber + IntoPyObject<'py>,
    {
        match count {
            None => self
                .read(py, Unpacker::read_item::<T>)?
                .into_bound_py_any(py),
            Some(count) => {
                let values = self.read(py, |unpacker| read_values::<T>(unpacker, count))?;
                PyList::new(py, values).map(Bound::into_any)
            }
        }
    }

    /// As [`PyUnpacker::numbers`], for complex numbers, which consist of two numbers.
    fn complex_numbers<'py, T>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>>
    where
        T: PackedNumber + Into<f64>,
    {
        let part_count = count.unwrap_or(1).saturating_mul(2);
        let parts = self.read(py, |unpacker| read_values::<T>(unpacker, part_count))?;
        let mut numbers = parts
            .chunks_exact(2)
            .map(|parts| PyComplex::from_doubles(py, parts[0].into(), parts[1].into()));
        match count {
            None => numbers.next().into_bound_py_any(py),
            Some(_) => PyList::new(py, numbers.collect::<Vec<_>>()).map(Bound::into_any),
        }
    }
}

/// Reads `count` numbers. The memory for them is reserved only if the message has as many bytes.
fn read_values<T: PackedNumber>(unpacker: &mut Unpacker, count: usize) -> PvmResult<Vec<T>> {
    // Every encoding needs at least as many bytes as two for a number.
    if count.saturating_mul(2) > unpacker.remaining() {
        return Err(PvmError::NoData);
    }
    (0..count).map(|_| unpacker.read_item()).collect()
}

/// Reads numbers and returns them in the machine's memory layout.
fn read_native<T: PackedNumber, const N: usize>(
    unpacker: &mut Unpacker,
    count: usize,
    to_bytes: fn(T) -> [u8; N],
) -> PvmResult<Bytes> {
    let values = read_values(unpacker, count)?;
    let mut bytes = Vec::with_capacity(count * N);
    for value in values {
        bytes.extend_from_slice(&to_bytes(value));
    }
    Ok(bytes.into())
}

#[pymethods]
impl PyUnpacker {
    /// Number of bytes that have not been read.
    #[getter]
    fn remaining(&self) -> usize {
        lock(&self.unpacker).remaining()
    }

    /// Unpacks bytes that one call has packed (pvm_upkbyte).
    fn unpack_bytes<'py>(&self, py: Python<'py>, count: usize) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.read(py, |unpacker| unpacker.read_bytes(count))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Unpacks a 16-bit integer, or a list of `count` (pvm_upkshort).
    #[pyo3(signature = (count = None))]
    fn unpack_short<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<i16>(py, count)
    }

    /// Unpacks an unsigned 16-bit integer, or a list of `count` (pvm_upkushort).
    #[pyo3(signature = (count = None))]
    fn unpack_ushort<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<u16>(py, count)
    }

    /// Unpacks a 32-bit integer, or a list of `count` (pvm_upkint).
    #[pyo3(signature = (count = None))]
    fn unpack_int<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<i32>(py, count)
    }

    /// Unpacks an unsigned 32-bit integer, or a list of `count` (pvm_upkuint).
    #[pyo3(signature = (count = None))]
    fn unpack_uint<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<u32>(py, count)
    }

    /// Unpacks a 64-bit integer, or a list of `count` (pvm_upklong).
    #[pyo3(signature = (count = None))]
    fn unpack_long<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<i64>(py, count)
    }

    /// Unpacks an unsigned 64-bit integer, or a list of `count` (pvm_upkulong).
    #[pyo3(signature = (count = None))]
    fn unpack_ulong<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<u64>(py, count)
    }

    /// Unpacks a number in single precision, or a list of `count` (pvm_upkfloat).
    #[pyo3(signature = (count = None))]
    fn unpack_float<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<f32>(py, count)
    }

    /// Unpacks a number in double precision, or a list of `count` (pvm_upkdouble).
    #[pyo3(signature = (count = None))]
    fn unpack_double<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.numbers::<f64>(py, count)
    }

    /// Unpacks a complex number in single precision, or a list of `count` (pvm_upkcplx).
    #[pyo3(signature = (count = None))]
    fn unpack_complex_float<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.complex_numbers::<f32>(py, count)
    }

    /// Unpacks a complex number in double precision, or a list of `count` (pvm_upkdcplx).
    #[pyo3(signature = (count = None))]
    fn unpack_complex_double<'py>(
        &self,
        py: Python<'py>,
        count: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.complex_numbers::<f64>(py, count)
    }

    /// Unpacks a string (pvm_upkstr). Bytes that are not UTF-8 become surrogate escapes.
    fn unpack_str<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bytes = self.read(py, Unpacker::read_str)?;
        PyBytes::new(py, &bytes).call_method1("decode", ("utf-8", "surrogateescape"))
    }

    /// Unpacks `count` elements of a format such as "d" into a one-dimensional memoryview.
    fn unpack_array<'py>(
        &self,
        py: Python<'py>,
        format: &str,
        count: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (element_type, values_per_element) = ElementType::from_format(format)?;
        let value_count = count.saturating_mul(values_per_element);
        let value_bytes = element_type.value_bytes();
        let elements = self.read(py, |unpacker| match (self.encoding, element_type) {
            (_, ElementType::Bytes) => unpacker.read_bytes(value_count),
            (Encoding::Raw, _) => unpacker.read_unpadded(value_count.saturating_mul(value_bytes)),
            (Encoding::Xdr, ElementType::Short) => {
                read_native(unpacker, value_count, i16::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::UnsignedShort) => {
                read_native(unpacker, value_count, u16::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::Int) => {
                read_native(unpacker, value_count, i32::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::UnsignedInt) => {
                read_native(unpacker, value_count, u32::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::Long) => {
                read_native(unpacker, value_count, i64::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::UnsignedLong) => {
                read_native(unpacker, value_count, u64::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::Float) => {
                read_native(unpacker, value_count, f32::to_ne_bytes)
            }
            (Encoding::Xdr, ElementType::Double) => {
                read_native(unpacker, value_count, f64::to_ne_bytes)
            }
        })?;
        let header = ArrayHeader {
            order: ElementOrder::C,
            element_bytes: value_bytes * values_per_element,
            shape: vec![count],
            format: CString::new(format)
                .map_err(|_| PyValueError::new_err("the format contains a NUL character"))?,
        };
        ExportedArray::new(header, elements).into_memoryview(py)
    }

    fn __repr__(&self) -> String {
        format!("<Unpacker with {} bytes left>", self.remaining())
    }
}
