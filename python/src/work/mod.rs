//! Master-worker programs: the native part of `sempa_pvm.work`.

mod context;
mod driver;
mod options;
mod payload;
mod run;
mod scope;
mod worker;

pub(crate) use context::PyContext;
pub(crate) use run::PyRun;

use crate::enrolled::lock;
use crate::errors;
use crate::vm::PyVm;
use driver::{FirstException, PyDriver};
use libpvm::{Body, Inbox, Vm};
use master_worker::dispatch::{QUESTION_TAG, Question};
use master_worker::{RunError, RunOutcome, WorkerEnd};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use serde::Serialize;
use worker::PyWorker;

/// Returns a value as JSON.
///
/// # Errors
/// `RuntimeError` if the value has no form in JSON.
fn to_json(value: &impl Serialize) -> PyResult<String> {
    serde_json::to_string(value)
        .map_err(|error| PyRuntimeError::new_err(format!("a value has no JSON form: {error}")))
}

/// Returns the outcome of a run as JSON, or the exception that has ended the run.
fn finish(
    py: Python<'_>,
    result: Result<RunOutcome, RunError>,
    exception: &FirstException,
) -> PyResult<String> {
    // The lock must not be held while Python code runs.
    let exception = lock(exception).take();
    match (result, exception) {
        (_, Some(exception)) => Err(exception),
        (Ok(outcome), None) => to_json(&serde_json::json!({
            "is_finished": outcome.is_finished,
            "generation": outcome.generation,
            "repeated_results": outcome.repeated_results,
            "init_bytes_sent": outcome.init_bytes_sent,
            "statistics": outcome.statistics,
            "text": outcome.statistics.to_string(),
        })),
        (Err(error), None) => {
            let kind = match &error {
                RunError::Driver { .. } => "driver",
                RunError::Journal(_) => "journal",
                RunError::TooManyQuarantined { .. } => "quarantine",
                RunError::Disconnected(_) => "disconnected",
                RunError::Start(_) => "start",
            };
            Err(errors::from_work_failure(py, kind, &error.to_string()))
        }
    }
}

/// Carries out a run in the calling thread, without the interpreter's lock between callbacks.
/// `options` is JSON. Returns the outcome as JSON.
#[pyfunction]
pub(crate) fn work_master(
    py: Python<'_>,
    vm: &PyVm,
    driver: Py<PyAny>,
    options: &str,
) -> PyResult<String> {
    let options = options::master_options(options)?;
    let exception = FirstException::default();
    let driver = PyDriver::new(py, driver, exception.clone())?;
    let vm = vm.enrolled().vm().clone();
    let result = py.detach(|| {
        let result = master_worker::run_master(&vm, driver, &options);
        drop_own_questions(&vm);
        result.map(|(outcome, _)| outcome)
    });
    finish(py, result, &exception)
}

/// Carries out a run with one worker in the calling thread, without a virtual machine.
#[pyfunction]
pub(crate) fn work_in_process(
    py: Python<'_>,
    driver: Py<PyAny>,
    worker: Py<PyAny>,
    options: &str,
) -> PyResult<String> {
    let settings = options::master_options(options)?.settings;
    let exception = FirstException::default();
    let driver = PyDriver::new(py, driver, exception.clone())?;
    let mut worker = PyWorker::new(py, worker)?;
    let result = py.detach(|| {
        let result = master_worker::run_in_process(driver, &mut worker, settings);
        result.map(|(outcome, _)| outcome)
    });
    finish(py, result, &exception)
}

/// Executes tasks until the run releases this worker. Returns the time in seconds for which the
/// worker has waited for a next master in vain; None if the run has released the worker.
#[pyfunction]
pub(crate) fn work_serve(
    py: Python<'_>,
    vm: &PyVm,
    worker: Py<PyAny>,
    group_bits: u64,
) -> PyResult<Option<f64>> {
    let groups = payload::groups(group_bits)?;
    let mut worker = PyWorker::new(py, worker)?;
    let vm = vm.enrolled().vm().clone();
    let end = py.detach(|| master_worker::work(&vm, &mut worker, groups));
    match end {
        Ok(WorkerEnd::Released) => Ok(None),
        Ok(WorkerEnd::NoMaster(patience)) => Ok(Some(patience.as_secs_f64())),
        Err(failure) => {
            let text = failure.to_string();
            Err(errors::from_work_failure(py, "worker", &text))
        }
    }
}

/// Returns the name of the run that has started this process as a worker.
#[pyfunction]
pub(crate) fn work_run_of_worker() -> Option<String> {
    std::env::var(master_worker::protocol::RUN_VARIABLE).ok()
}

/// Requests the master in another thread of this process to end its run.
#[pyfunction]
pub(crate) fn work_stop(py: Python<'_>, vm: &PyVm) -> PyResult<()> {
    // The master waits for messages, so a message wakes the master.
    vm.enrolled().request(py, |vm| {
        vm.send(vm.tid(), QUESTION_TAG, Body::value(&Question::Stop)?)
    })
}

/// Removes requests to stop, and answers to them, that the master has not read.
fn drop_own_questions(vm: &Vm) {
    let own_tid = vm.tid();
    let mut take_question = |inbox: &mut Inbox| {
        inbox.take_first(|message| message.src == own_tid && message.tag == QUESTION_TAG)
    };
    while vm.runtime().check_inbox(&mut take_question).is_some() {}
}
