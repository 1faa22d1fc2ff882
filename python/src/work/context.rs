//! The connection of an executing task to its run.

use super::payload::{TaskParts, call_failed, from_python, raw_task, to_python};
use super::scope::{ContextScope, ScopeError};
use master_worker::Context;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The calls of a worker during a task. Only the thread of the task may use them.
#[pyclass(name = "WorkContext", module = "sempa_pvm._native", frozen)]
#[derive(Default)]
pub(crate) struct PyContext {
    scope: ContextScope,
}

impl PyContext {
    pub(crate) fn scope(&self) -> &ContextScope {
        &self.scope
    }

    fn with<R>(&self, f: impl for<'a> FnOnce(&'a mut Context<'a>) -> R) -> PyResult<R> {
        self.scope.with(f).map_err(exception)
    }
}

fn exception(error: ScopeError) -> PyErr {
    PyRuntimeError::new_err(match error {
        ScopeError::Ended => "the context can be used only while its task is executed",
        ScopeError::OtherThread => {
            "the context can be used only in the thread that executes the task"
        }
    })
}

#[pymethods]
impl PyContext {
    /// Number of the task, which is the same in each attempt.
    #[getter]
    fn task(&self) -> PyResult<u64> {
        self.with(|context| context.task().0)
    }

    /// Number of the attempt.
    #[getter]
    fn attempt(&self) -> PyResult<u64> {
        self.with(|context| context.attempt().0)
    }

    /// Looks for messages of the master.
    fn poll(&self) -> PyResult<()> {
        let polled = self.with(|context| context.poll())?;
        polled.map_err(|failure| call_failed(&failure))
    }

    /// Returns the newest update if this attempt has not seen it.
    fn update<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let update = self.with(|context| context.update())?;
        let update = update.map_err(|failure| call_failed(&failure))?;
        update.map(|data| to_python(py, &data)).transpose()
    }

    /// True if the master needs no result of this attempt.
    fn is_canceled(&self) -> PyResult<bool> {
        let is_canceled = self.with(|context| context.is_canceled())?;
        is_canceled.map_err(|failure| call_failed(&failure))
    }

    /// True if the time limit of the task is over.
    fn is_time_over(&self) -> PyResult<bool> {
        self.with(|context| context.is_time_over())
    }

    /// Returns work that this attempt does not do.
    fn return_task(&self, task: TaskParts<'_>) -> PyResult<()> {
        let task = raw_task(task)?;
        self.with(|context| context.return_task(task))
    }

    /// Sends part of the result to the driver at once.
    fn send_partial(&self, py: Python<'_>, data: &Bound<'_, PyBytes>) -> PyResult<()> {
        let data = from_python(data);
        let sent = py.detach(|| self.scope.with(|context| context.send_partial(data)));
        let sent = sent.map_err(exception)?;
        sent.map_err(|failure| call_failed(&failure))
    }
}
