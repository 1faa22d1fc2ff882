//! Builds the records of `sempa_pvm.records`.

use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// Python module with the records.
const MODULE: &str = "sempa_pvm.records";

/// Returns an instance of the record `name`.
///
/// # Errors
/// The package is incomplete, or the fields do not fit the record.
pub(crate) fn make<'py>(
    py: Python<'py>,
    name: &str,
    fields: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    static RECORDS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = RECORDS.get_or_try_init(py, || py.import(MODULE).map(Bound::unbind))?;
    module.bind(py).getattr(name)?.call1(fields)
}
