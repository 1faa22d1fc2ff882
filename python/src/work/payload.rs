//! Payloads of tasks and results, as Python sees them.

use crate::buffer::ExportedArray;
use bytes::Bytes;
use master_worker::{Failure, Groups, RawTask};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

/// Size in bytes below which a copy costs less than a reference to the memory of the other side.
const COPIED_BYTES_MAX: usize = 4 << 10;

/// A task as the Python part passes it: payload, key, bits of the groups.
pub(crate) type TaskParts<'py> = (Bound<'py, PyBytes>, f64, u64);

/// Returns the bytes of a Python object. Large ones are not copied.
pub(crate) fn from_python(bytes: &Bound<'_, PyBytes>) -> Bytes {
    match bytes.as_bytes() {
        small if small.len() <= COPIED_BYTES_MAX => Bytes::copy_from_slice(small),
        _ => Bytes::from_owner(PyBackedBytes::from(bytes.clone())),
    }
}

/// Returns a Python object with these bytes: a `bytes`, or a read-only `memoryview` of the same
/// memory.
///
/// # Errors
/// The interpreter has no memory.
pub(crate) fn to_python<'py>(py: Python<'py>, bytes: &Bytes) -> PyResult<Bound<'py, PyAny>> {
    match bytes.len() {
        0..=COPIED_BYTES_MAX => Ok(PyBytes::new(py, bytes).into_any()),
        _ => ExportedArray::from_bytes(bytes.clone()).into_memoryview(py),
    }
}

/// Returns the set of groups with these bits.
///
/// # Errors
/// `ValueError` for the empty set.
pub(crate) fn groups(bits: u64) -> PyResult<Groups> {
    Groups::from_bits(bits)
        .ok_or_else(|| PyValueError::new_err("a task or worker must belong to a group"))
}

/// Returns the task with these parts.
///
/// # Errors
/// `ValueError` for the empty set of groups.
pub(crate) fn raw_task((payload, key, group_bits): TaskParts<'_>) -> PyResult<RawTask> {
    Ok(RawTask {
        key,
        groups: groups(group_bits)?,
        payload: from_python(&payload),
    })
}

/// Returns the exception for a failed call of a run or a context.
pub(crate) fn call_failed(failure: &Failure) -> PyErr {
    Python::attach(|py| crate::errors::from_work_failure(py, "call", &failure.to_string()))
}
