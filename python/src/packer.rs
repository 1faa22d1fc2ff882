//! Packs PVM items for programs in C and Fortran.

use crate::buffer::with_contiguous_bytes;
use crate::content::copy_to_body;
use crate::enrolled::lock;
use libpvm::proto::body::{Encoding, PackedNumber, Packer};
use libpvm::{Body, Runtime};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyComplex, PyComplexMethods, PyTuple};
use std::sync::Mutex;

/// Element types of arrays, by their format in PEP 3118, and the PVM items as which they are
/// packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementType {
    Bytes,
    Short,
    UnsignedShort,
    Int,
    UnsignedInt,
    Long,
    UnsignedLong,
    Float,
    Double,
}

impl ElementType {
    /// Returns the type for a format, and the number of its values in one element: two for complex
    /// numbers.
    ///
    /// # Errors
    /// `ValueError` for a format that PVM has no items for.
    pub(crate) fn from_format(format: &str) -> PyResult<(Self, usize)> {
        let native_format = format
            .strip_prefix('@')
            .or_else(|| format.strip_prefix(NATIVE_BYTE_ORDER))
            .unwrap_or(format);
        Ok(match native_format {
            "b" | "B" | "c" => (Self::Bytes, 1),
            "h" => (Self::Short, 1),
            "H" => (Self::UnsignedShort, 1),
            "i" => (Self::Int, 1),
            "I" => (Self::UnsignedInt, 1),
            "l" | "q" => (Self::Long, 1),
            "L" | "Q" => (Self::UnsignedLong, 1),
            "f" => (Self::Float, 1),
            "d" => (Self::Double, 1),
            "Zf" => (Self::Float, 2),
            "Zd" => (Self::Double, 2),
            _ => {
                return Err(PyValueError::new_err(format!(
                    "PVM has no items of format '{format}'; it has b B h H i I l L q Q f d Zf Zd in the \
                     machine's byte order"
                )));
            }
        })
    }

    /// Returns the size of a value in bytes, in the machine's memory.
    pub(crate) fn value_bytes(self) -> usize {
        match self {
            Self::Bytes => 1,
            Self::Short | Self::UnsignedShort => 2,
            Self::Int | Self::UnsignedInt | Self::Float => 4,
            Self::Long | Self::UnsignedLong | Self::Double => 8,
        }
    }

    /// Appends values that are in the machine's memory layout.
    fn pack_values(self, packer: &mut Packer, values: &[u8]) {
        macro_rules! pack {
            ($number:ty) => {
                packer.pack_items(values.chunks_exact(size_of::<$number>()).map(|chunk| {
                    let mut value = [0; size_of::<$number>()];
                    value.copy_from_slice(chunk);
                    <$number>::from_ne_bytes(value)
                }))
            };
        }
        match self {
            Self::Bytes => packer.pack_bytes(values),
            Self::Short => pack!(i16),
            Self::UnsignedShort => pack!(u16),
            Self::Int => pack!(i32),
            Self::UnsignedInt => pack!(u32),
            Self::Long => pack!(i64),
            Self::UnsignedLong => pack!(u64),
            Self::Float => pack!(f32),
            Self::Double => pack!(f64),
        };
    }
}

/// Prefix of formats in this machine's byte order. Sempa runs on x86-64 only.
const NATIVE_BYTE_ORDER: char = '<';

/// PVM items for a message. Each method appends items and returns the packer.
#[pyclass(name = "Packer", module = "sempa_pvm", frozen)]
pub(crate) struct PyPacker {
    packer: Mutex<Packer>,
}

impl PyPacker {
    /// Returns the items as the body of a message.
    pub(crate) fn body(&self, runtime: Option<&Runtime>) -> Body {
        let packer = lock(&self.packer);
        Body {
            enc: packer.encoding().enc_field(),
            bytes: copy_to_body(runtime, &[], packer.as_slice()),
        }
    }

    fn append<T: PackedNumber>(slf: Bound<'_, Self>, values: Vec<T>) -> Bound<'_, Self> {
        lock(&slf.get().packer).pack_items(values);
        slf
    }
}

/// Extracts all values before any of them is packed.
fn extract_all<'py, T>(values: &Bound<'py, PyTuple>) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    values.iter().map(|value| value.extract()).collect()
}

/// Returns the parts of complex numbers, two numbers each.
fn complex_parts(values: &Bound<'_, PyTuple>) -> PyResult<Vec<f64>> {
    let complex_type = values.py().get_type::<PyComplex>();
    let mut parts = Vec::with_capacity(values.len() * 2);
    for value in values.iter() {
        let complex = complex_type.call1((value,))?;
        let complex = complex.cast::<PyComplex>()?;
        parts.extend([complex.real(), complex.imag()]);
    }
    Ok(parts)
}

#[pymethods]
impl PyPacker {
    /// Creates an empty packer. The encoding is "xdr", which every machine reads, or "raw", the
    /// memory layout of this machine.
    #[new]
    #[pyo3(signature = (encoding = "xdr"))]
    fn new(encoding: &str) -> PyResult<Self> {
        let encoding = match encoding {
            "xdr" => Encoding::Xdr,
            "raw" => Encoding::Raw,
            other => {
                return Err(PyValueError::new_err(format!(
                    "the encoding is 'xdr' or 'raw', not '{other}'"
                )));
            }
        };
        let packer = Mutex::new(Packer::new(encoding));
        Ok(Self { packer })
    }

    /// Packs bytes (pvm_pkbyte). The receiver must know their number.
    fn pack_bytes<'py>(
        slf: Bound<'py, Self>,
        data: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, Self>> {
        let bytes = pyo3::types::PyMemoryView::from(data)?.call_method0("tobytes")?;
        lock(&slf.get().packer).pack_bytes(bytes.cast::<PyBytes>()?.as_bytes());
        Ok(slf)
    }

    /// Packs 16-bit integers (pvm_pkshort).
    #[pyo3(signature = (*values))]
    fn pack_short<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<i16>(values)?))
    }

    /// Packs unsigned 16-bit integers (pvm_pkushort).
    #[pyo3(signature = (*values))]
    fn pack_ushort<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<u16>(values)?))
    }

    /// Packs 32-bit integers (pvm_pkint).
    #[pyo3(signature = (*values))]
    fn pack_int<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<i32>(values)?))
    }

    /// Packs unsigned 32-bit integers (pvm_pkuint).
    #[pyo3(signature = (*values))]
    fn pack_uint<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<u32>(values)?))
    }

    /// Packs 64-bit integers (pvm_pklong).
    #[pyo3(signature = (*values))]
    fn pack_long<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<i64>(values)?))
    }

    /// Packs unsigned 64-bit integers (pvm_pkulong).
    #[pyo3(signature = (*values))]
    fn pack_ulong<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<u64>(values)?))
    }

    /// Packs numbers in single precision (pvm_pkfloat).
    #[pyo3(signature = (*values))]
    fn pack_float<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<f32>(values)?))
    }

    /// Packs numbers in double precision (pvm_pkdouble).
    #[pyo3(signature = (*values))]
    fn pack_double<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, extract_all::<f64>(values)?))
    }

    /// Packs complex numbers in single precision (pvm_pkcplx).
    #[pyo3(signature = (*values))]
    fn pack_complex_float<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        let parts = complex_parts(values)?;
        let parts = parts.into_iter().map(|part| part as f32).collect();
        Ok(Self::append(slf, parts))
    }

    /// Packs complex numbers in double precision (pvm_pkdcplx).
    #[pyo3(signature = (*values))]
    fn pack_complex_double<'py>(
        slf: Bound<'py, Self>,
        values: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, Self>> {
        Ok(Self::append(slf, complex_parts(values)?))
    }

    /// Packs a string (pvm_pkstr) in UTF-8. Surrogate escapes become the bytes that they stand for.
    fn pack_str<'py>(
        slf: Bound<'py, Self>,
        text: &Bound<'py, pyo3::types::PyString>,
    ) -> PyResult<Bound<'py, Self>> {
        let bytes = text.call_method1("encode", ("utf-8", "surrogateescape"))?;
        let bytes = bytes.cast::<PyBytes>()?.as_bytes();
        if bytes.contains(&0) {
            return Err(PyValueError::new_err(
                "the string contains a NUL character, which ends a string in C",
            ));
        }
        if i32::try_from(bytes.len() + 1).is_err() {
            return Err(PyOverflowError::new_err(
                "a packed string has at most 2147483646 bytes",
            ));
        }
        lock(&slf.get().packer).pack_str(bytes);
        Ok(slf)
    }

    /// Packs the elements of an array in C order, such as a numpy array of doubles as pvm_pkdouble
    /// does. The receiver must know their number.
    fn pack_array<'py>(
        slf: Bound<'py, Self>,
        array: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, Self>> {
        let buffer = PyUntypedBuffer::get(array)?;
        let format = buffer.format().to_string_lossy();
        let (element_type, value_count) = ElementType::from_format(&format)?;
        if element_type.value_bytes() * value_count != buffer.item_size() {
            return Err(PyValueError::new_err(format!(
                "an element of format '{format}' has {} bytes, which PVM's items do not have",
                buffer.item_size()
            )));
        }
        let pack = |values: &[u8]| element_type.pack_values(&mut lock(&slf.get().packer), values);
        let is_packed = buffer.is_c_contiguous() && with_contiguous_bytes(&buffer, pack).is_some();
        if !is_packed {
            let bytes = pyo3::types::PyMemoryView::from(array)?.call_method0("tobytes")?;
            element_type.pack_values(
                &mut lock(&slf.get().packer),
                bytes.cast::<PyBytes>()?.as_bytes(),
            );
        }
        Ok(slf)
    }

    fn __len__(&self) -> usize {
        lock(&self.packer).len()
    }

    fn __repr__(&self) -> String {
        format!("<Packer with {} bytes>", lock(&self.packer).len())
    }
}
