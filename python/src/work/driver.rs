//! A driver whose callbacks are methods of a Python object.

use super::payload::{from_python, to_python};
use super::run::PyRun;
use crate::enrolled::lock;
use bytes::Bytes;
use master_worker::dispatch::PauseCause;
use master_worker::{AttemptRecord, Failure, PoolEvent, RawDriver, ResultInfo, Run, TaskId};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::sync::{Arc, Mutex};

/// The first exception of a callback.
pub(super) type FirstException = Arc<Mutex<Option<PyErr>>>;

/// A driver of Python. The object has a method for each callback, and packs and unpacks payloads.
pub(super) struct PyDriver {
    object: Py<PyAny>,
    run: Py<PyRun>,
    exception: FirstException,
}

impl PyDriver {
    /// # Errors
    /// The interpreter has no memory.
    pub(super) fn new(
        py: Python<'_>,
        object: Py<PyAny>,
        exception: FirstException,
    ) -> PyResult<Self> {
        Ok(Self {
            object,
            run: Py::new(py, PyRun::default())?,
            exception,
        })
    }

    /// Calls `f` with the Python object. An exception is kept and ends the run; further calls fail.
    fn call<R>(
        &self,
        f: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<R>,
    ) -> Result<R, Failure> {
        if lock(&self.exception).is_some() {
            return Err("an earlier callback has failed".into());
        }
        Python::attach(|py| {
            f(py, self.object.bind(py)).map_err(|error| {
                let text = error.to_string();
                lock(&self.exception).get_or_insert(error);
                text.into()
            })
        })
    }

    /// As [`PyDriver::call`], with the object of the run.
    fn call_with_run(
        &self,
        run: &mut Run,
        f: impl FnOnce(Python<'_>, &Bound<'_, PyAny>, Py<PyRun>) -> PyResult<()>,
    ) -> Result<(), Failure> {
        self.run.get().scope().enter(run, || {
            self.call(|py, object| f(py, object, self.run.clone_ref(py)))
        })
    }

    fn bytes_of(&self, method: &str) -> Result<Bytes, Failure> {
        self.call(|_, object| {
            let bytes = object.call_method0(method)?;
            Ok(from_python(bytes.cast::<PyBytes>()?))
        })
    }
}

impl RawDriver for PyDriver {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.call_with_run(run, |_, object, run| {
            object.call_method1("start", (run,)).map(drop)
        })
    }

    fn configure(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.call_with_run(run, |_, object, run| {
            object.call_method1("configure", (run,)).map(drop)
        })
    }

    fn save(&self) -> Result<Bytes, Failure> {
        self.bytes_of("save")
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Failure> {
        self.call(|py, object| {
            let state = PyBytes::new(py, state);
            object.call_method1("restore", (state,)).map(drop)
        })
    }

    fn init_data(&mut self) -> Result<Bytes, Failure> {
        self.bytes_of("init_data")
    }

    fn benchmark(&mut self) -> Option<Bytes> {
        let task = self.call(|_, object| {
            let task = object.call_method0("benchmark")?;
            let task: Option<Bound<'_, PyBytes>> = task.extract()?;
            Ok(task.map(|task| from_python(&task)))
        });
        // The exception ends the run, with the callback that follows.
        task.unwrap_or_default()
    }

    fn on_result(
        &mut self,
        run: &mut Run,
        info: &ResultInfo,
        task: &Bytes,
        result: &Bytes,
    ) -> Result<(), Failure> {
        self.call_with_run(run, |py, object, run| {
            let facts = (info.task.0, info.worker.0, info.cpu_us, info.wall_us);
            let (task, result) = (to_python(py, task)?, to_python(py, result)?);
            let arguments = (run, facts, task, result);
            object.call_method1("on_result", arguments).map(drop)
        })
    }

    fn on_partial_result(
        &mut self,
        run: &mut Run,
        task: TaskId,
        payload: &Bytes,
        data: &Bytes,
    ) -> Result<(), Failure> {
        self.call_with_run(run, |py, object, run| {
            let (payload, data) = (to_python(py, payload)?, to_python(py, data)?);
            let arguments = (run, task.0, payload, data);
            object.call_method1("on_partial", arguments).map(drop)
        })
    }

    fn on_quarantined(
        &mut self,
        run: &mut Run,
        task: TaskId,
        payload: &Bytes,
        history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        self.call_with_run(run, |py, object, run| {
            let attempts: Vec<_> = history.iter().map(attempt_facts).collect();
            let arguments = (run, task.0, to_python(py, payload)?, attempts);
            object.call_method1("on_quarantined", arguments).map(drop)
        })
    }

    fn on_pool_event(&mut self, run: &mut Run, event: &PoolEvent) -> Result<(), Failure> {
        self.call_with_run(run, |_, object, run| {
            let arguments = (run, event_facts(event));
            object.call_method1("on_pool_event", arguments).map(drop)
        })
    }

    fn on_all_closed(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.call_with_run(run, |_, object, run| {
            object.call_method1("on_all_closed", (run,)).map(drop)
        })
    }
}

/// Returns attempt, worker, host, reason, duration in seconds, and true if the attempt counts
/// against the task.
fn attempt_facts(record: &AttemptRecord) -> (u64, u64, &str, String, f64, bool) {
    let duration_us = record.ended_at.saturating_sub(record.started_at);
    (
        record.attempt.0,
        record.worker.0,
        &record.host,
        record.reason.to_string(),
        duration_us as f64 / 1e6,
        record.is_counted,
    )
}

/// Returns kind, host, worker and reason; the last three are `None` if the event has no such part.
fn event_facts(event: &PoolEvent) -> (&str, Option<&str>, Option<u64>, Option<&str>) {
    match event {
        PoolEvent::HostAdded { host } => ("HostAdded", Some(host), None, None),
        PoolEvent::HostLost { host } => ("HostLost", Some(host), None, None),
        PoolEvent::WorkerReady { worker, host } => {
            ("WorkerReady", Some(host), Some(worker.0), None)
        }
        PoolEvent::WorkerPaused { worker, cause } => {
            let cause = match cause {
                PauseCause::Owner => "owner",
                PauseCause::Suspended => "suspended",
            };
            ("WorkerPaused", None, Some(worker.0), Some(cause))
        }
        PoolEvent::WorkerResumed { worker } => ("WorkerResumed", None, Some(worker.0), None),
        PoolEvent::WorkerMigrated { worker, host } => {
            ("WorkerMigrated", Some(host), Some(worker.0), None)
        }
        PoolEvent::WorkerLost { worker, reason } => {
            ("WorkerLost", None, Some(worker.0), Some(reason))
        }
    }
}
