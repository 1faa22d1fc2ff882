//! Converts the errors of the task library into exceptions of `sempa_pvm.errors`.

use libpvm::{EnrollError, Error, MigrateError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use sempa_proto::PvmError;

/// Python module with the exceptions.
const MODULE: &str = "sempa_pvm.errors";

/// Returns the exception for a failed request. Its class depends on PVM's error code.
pub(crate) fn from_error(py: Python<'_>, error: &Error) -> PyErr {
    make_exception(py, "from_code", (error.reason.as_str(), error.code.code()))
}

/// As [`from_error`], for an error code and a sentence.
pub(crate) fn from_code(py: Python<'_>, code: PvmError, reason: impl Into<String>) -> PyErr {
    from_error(py, &Error::new(code, reason))
}

/// Returns a `NotEnrolledError` with the sentence that programs in C print.
pub(crate) fn from_enroll_error(py: Python<'_>, error: &EnrollError) -> PyErr {
    from_code(py, PvmError::SysErr, error.to_string())
}

/// Returns a `MigrationError` if the migration began and failed, otherwise the exception for the
/// refusal.
pub(crate) fn from_migrate_error(py: Python<'_>, error: &MigrateError) -> PyErr {
    match error {
        MigrateError::Refused(refusal) => from_error(py, refusal),
        MigrateError::Failed(failure) => {
            let reason =
                format!("the migration failed, and the task continues on its host: {failure}");
            make_exception(py, "migration_failed", (reason,))
        }
    }
}

/// Returns a `SpawnError` with the tasks that were started and the errors of the others.
pub(crate) fn from_spawn_failures(
    py: Python<'_>,
    program: &str,
    started: Vec<Bound<'_, PyAny>>,
    failed: &[PvmError],
) -> PyErr {
    let Some(first_error) = failed.first() else {
        return PyRuntimeError::new_err("no task of the spawn has failed");
    };
    // The event log names the limit or the constraint that left a task without a place.
    let hint = match first_error {
        PvmError::OutOfRes | PvmError::NoHost => "; 'pvm events' shows the reason",
        _ => "",
    };
    let (failed_count, all_count) = (failed.len(), started.len() + failed.len());
    let reason = format!(
        "{failed_count} of {all_count} tasks of '{program}' were not started: {first_error}{hint}"
    );
    let codes: Vec<i32> = failed.iter().map(|error| error.code()).collect();
    make_exception(py, "spawn_failed", (reason, started, codes))
}

/// Returns a `RunError` for the end of a master-worker run. `kind` is a word for programs.
pub(crate) fn from_work_failure(py: Python<'_>, kind: &str, reason: &str) -> PyErr {
    make_exception(py, "work_failed", (reason, kind))
}

/// Returns a `BrokerError`. `kind` decides about the class.
pub(crate) fn from_broker_failure(py: Python<'_>, kind: &str, reason: &str) -> PyErr {
    make_exception(py, "broker_failed", (reason, kind))
}

/// Calls a function of `sempa_pvm.errors`, which returns an exception.
fn make_exception<'py>(
    py: Python<'py>,
    function: &str,
    arguments: impl pyo3::call::PyCallArgs<'py>,
) -> PyErr {
    let exception = errors_module(py)
        .and_then(|module| module.getattr(function))
        .and_then(|function| function.call1(arguments));
    match exception {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

fn errors_module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = ERRORS.get_or_try_init(py, || py.import(MODULE).map(Bound::unbind))?;
    Ok(module.bind(py))
}
