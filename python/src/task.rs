//! Handles of other tasks.

use crate::content::{array_body, body_of, object_body};
use crate::enrolled::{Enrolled, check_tag, selection};
use crate::message::PyMessage;
use crate::{errors, records, vm, waits};
use libpvm::proto::body::Encoding;
use libpvm::proto::link::INLINE_BODY_BYTES_MAX;
use libpvm::proto::message::{CTX_BASE, encode_message_head};
use libpvm::{Body, Error};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use sempa_proto::{PvmError, Tid};
use std::sync::Arc;

/// Handle of a task of the virtual machine. The task may have ended.
#[pyclass(name = "Task", module = "sempa_pvm", frozen)]
pub(crate) struct PyTask {
    enrolled: Arc<Enrolled>,
    tid: Tid,
}

impl PyTask {
    pub(crate) fn new(enrolled: &Arc<Enrolled>, tid: Tid) -> Self {
        Self {
            enrolled: enrolled.clone(),
            tid,
        }
    }

    fn send_body(&self, py: Python<'_>, tag: i32, body: Body) -> PyResult<()> {
        let runtime = self.enrolled.runtime();
        let is_small = body.bytes.len() <= INLINE_BODY_BYTES_MAX && self.tid.is_task();
        let head = encode_message_head(CTX_BASE, tag, 0, body.enc);
        if is_small && py.detach(|| runtime.try_send_inline(self.tid, head, &body.bytes, false)) {
            return Ok(());
        }
        self.enrolled.request(py, |vm| vm.send(self.tid, tag, body))
    }
}

/// A task as an argument: a `Task`, or its tid as PVM's number.
pub(crate) fn tid_of(task: &Bound<'_, PyAny>) -> PyResult<Tid> {
    if let Ok(task) = task.cast::<PyTask>() {
        return Ok(task.get().tid);
    }
    let number: i64 = task.extract().map_err(|_| {
        PyTypeError::new_err(format!(
            "a task is a Task or its tid, not {}",
            task.get_type()
        ))
    })?;
    // Programs in C print tids as signed or unsigned numbers of 32 bits.
    i32::try_from(number)
        .or_else(|_| u32::try_from(number).map(u32::cast_signed))
        .map(Tid::from_raw)
        .map_err(|_| PyValueError::new_err(format!("{number} is not a tid")))
}

#[pymethods]
impl PyTask {
    /// The task id as PVM's number. It never changes.
    #[getter]
    fn tid(&self) -> i32 {
        self.tid.raw()
    }

    /// Sends a message. `data` is None, an object with the buffer protocol, a Packer or a Content.
    #[pyo3(signature = (tag, data = None))]
    fn send(&self, py: Python<'_>, tag: i32, data: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        check_tag(tag)?;
        let body = match data {
            None => Body {
                enc: Encoding::Raw.enc_field(),
                ..Body::empty()
            },
            Some(data) => body_of(py, Some(self.enrolled.runtime()), data)?,
        };
        self.send_body(py, tag, body)
    }

    /// Sends an array with its format and shape, with one copy. `Message.array` returns it.
    fn send_array(&self, py: Python<'_>, tag: i32, array: &Bound<'_, PyAny>) -> PyResult<()> {
        check_tag(tag)?;
        let body = array_body(py, Some(self.enrolled.runtime()), array)?;
        self.send_body(py, tag, body)
    }

    /// Sends a copy of an object by pickle. `Message.object` returns it.
    fn send_object(&self, py: Python<'_>, tag: i32, value: &Bound<'_, PyAny>) -> PyResult<()> {
        check_tag(tag)?;
        let body = object_body(Some(self.enrolled.runtime()), value)?;
        self.send_body(py, tag, body)
    }

    /// Waits for a message from the task.
    #[pyo3(signature = (tag = None, timeout = None))]
    fn recv(&self, py: Python<'_>, tag: Option<i32>, timeout: Option<f64>) -> PyResult<PyMessage> {
        vm::receive(py, &self.enrolled, selection(Some(self.tid), tag)?, timeout)
    }

    /// Returns a message from the task, or None if none has arrived.
    #[pyo3(signature = (tag = None))]
    fn try_recv(&self, py: Python<'_>, tag: Option<i32>) -> PyResult<Option<PyMessage>> {
        let selection = selection(Some(self.tid), tag)?;
        let message = self.enrolled.try_receive(py, selection)?;
        Ok(message.map(|message| PyMessage::new(&self.enrolled, message)))
    }

    /// Waits for a message from the task without blocking the event loop.
    #[pyo3(signature = (tag = None))]
    fn arecv<'py>(
        slf: &Bound<'py, Self>,
        py: Python<'py>,
        tag: Option<i32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let vm = Bound::new(py, vm::PyVm::from_enrolled(&slf.get().enrolled))?;
        vm::arecv(py, &vm, Some(slf.as_any()), tag)
    }

    /// Returns whether the task runs.
    fn is_running(&self, py: Python<'_>) -> PyResult<bool> {
        self.enrolled
            .request(py, |vm| vm.task(self.tid).is_running())
    }

    /// Sends SIGTERM to the task.
    fn kill(&self, py: Python<'_>) -> PyResult<()> {
        self.enrolled.request(py, |vm| vm.task(self.tid).kill())
    }

    /// Sends a signal to the task.
    fn signal(&self, py: Python<'_>, signal: i32) -> PyResult<()> {
        self.enrolled.request(py, |vm| vm.signal(self.tid, signal))
    }

    /// Suspends the task until resume(). The task stays suspended if it migrates.
    fn suspend(&self, py: Python<'_>) -> PyResult<()> {
        self.enrolled
            .request(py, |vm| vm.suspend(self.tid, true, None))
    }

    /// Resumes the task after suspend().
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        self.enrolled
            .request(py, |vm| vm.suspend(self.tid, false, None))
    }

    /// Migrates the task to a host and waits for the end of the migration.
    fn migrate<'py>(&self, py: Python<'py>, host: String) -> PyResult<Bound<'py, PyAny>> {
        let (vm, tid) = (self.enrolled.vm().clone(), self.tid);
        let report = waits::run_request(py, move || vm.task(tid).migrate(&host))?
            .map_err(|error| errors::from_migrate_error(py, &error))?;
        let frozen_s = report.frozen_time.0 as f64 / 1e6;
        let engine = report.engine.to_string();
        records::make(py, "Migration", (report.image_bytes, frozen_s, engine))
    }

    /// Returns the names of the hosts that would accept the task, the nearest host first.
    fn migration_targets(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let tid = self.tid;
        self.enrolled.long_request(py, move |vm| {
            let targets = vm.can_migrate(tid, None)?;
            let hosts = vm.config()?;
            let accepting_hosts = targets
                .verdicts
                .iter()
                .filter(|(_, verdict)| verdict.is_empty());
            Ok::<_, Error>(
                accepting_hosts
                    .filter_map(|(host, _)| hosts.get(*host))
                    .map(|host| host.name.clone())
                    .collect(),
            )
        })
    }

    fn __int__(&self) -> i32 {
        self.tid.raw()
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other
            .cast::<Self>()
            .is_ok_and(|other| other.get().tid == self.tid)
    }

    fn __hash__(&self) -> isize {
        self.tid.raw() as isize
    }

    fn __str__(&self) -> String {
        self.tid.to_string()
    }

    fn __repr__(&self) -> String {
        format!("<Task {}>", self.tid)
    }
}

/// Returns the tids of tasks in an iterable of `Task` or tids.
///
/// # Errors
/// `BadParam` if one of them is not a task.
pub(crate) fn tids_of(tasks: &Bound<'_, PyAny>) -> PyResult<Vec<Tid>> {
    let py = tasks.py();
    tasks
        .try_iter()?
        .map(|task| {
            let tid = tid_of(&task?)?;
            match tid.is_task() {
                true => Ok(tid),
                false => {
                    let reason = format!("{tid} is not the tid of a task");
                    Err(errors::from_code(py, PvmError::BadParam, reason))
                }
            }
        })
        .collect()
}
