//! A worker whose program is a Python object.

use super::context::PyContext;
use super::payload::{from_python, to_python};
use bytes::Bytes;
use master_worker::{Context, Failure, RawWorker};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A worker of Python. The object has the methods `init` and `execute`, and packs and unpacks
/// payloads.
pub(super) struct PyWorker {
    object: Py<PyAny>,
    context: Py<PyContext>,
}

impl PyWorker {
    /// # Errors
    /// The interpreter has no memory.
    pub(super) fn new(py: Python<'_>, object: Py<PyAny>) -> PyResult<Self> {
        Ok(Self {
            object,
            context: Py::new(py, PyContext::default())?,
        })
    }
}

impl RawWorker for PyWorker {
    fn init(&mut self, data: Bytes) -> Result<(), Failure> {
        Python::attach(|py| {
            let initialized = to_python(py, &data)
                .and_then(|data| self.object.bind(py).call_method1("init", (data,)));
            initialized.map(drop).map_err(|error| error.to_string())
        })?;
        Ok(())
    }

    fn execute(&mut self, task: Bytes, context: &mut Context) -> Result<Bytes, Failure> {
        let scope = self.context.get().scope();
        let result = scope.enter(context, || {
            Python::attach(|py| -> PyResult<Bytes> {
                let arguments = (to_python(py, &task)?, self.context.clone_ref(py));
                let result = self.object.bind(py).call_method1("execute", arguments)?;
                Ok(from_python(result.cast::<PyBytes>()?))
            })
        });
        Ok(result.map_err(|error| error.to_string())?)
    }
}
