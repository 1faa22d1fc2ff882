//! Iterators over notices about tasks that end and hosts that join or leave.

use crate::arrivals::{PyLoopWaker, PyWatch, WatchedMessages};
use crate::enrolled::{Enrolled, lock};
use crate::task::PyTask;
use crate::{records, waits};
use libpvm::{Error, Notice, Notices};
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Instant;

/// Iterator over notices; also an asynchronous iterator.
#[pyclass(name = "Notices", module = "sempa_pvm", frozen)]
pub(crate) struct PyNotices {
    enrolled: Arc<Enrolled>,
    /// `None` after the iterator was closed.
    notices: Arc<Mutex<Option<Notices>>>,
}

/// Reason why there is no notice.
enum ReadError {
    /// Another thread waits for a notice of the same iterator.
    InUse,
    Failed(Error),
}

impl From<Error> for ReadError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Result of an attempt to read a notice.
enum Read {
    Notice(Notice),
    /// No further notice can arrive, or the iterator is closed.
    Exhausted,
}

impl PyNotices {
    pub(crate) fn new(enrolled: &Arc<Enrolled>, notices: Notices) -> Self {
        Self {
            enrolled: enrolled.clone(),
            notices: Arc::new(Mutex::new(Some(notices))),
        }
    }

    /// Calls `read` with the notices. Returns `None` if no notice has arrived.
    fn read_with(
        &self,
        read: impl FnOnce(&mut Notices) -> Result<Option<Notice>, Error>,
    ) -> Result<Option<Read>, ReadError> {
        let mut guard = self.try_lock()?;
        let Some(notices) = guard.as_mut() else {
            return Ok(Some(Read::Exhausted));
        };
        Ok(match read(notices)? {
            Some(notice) => Some(Read::Notice(notice)),
            None => notices.is_exhausted().then_some(Read::Exhausted),
        })
    }

    fn try_lock(&self) -> Result<MutexGuard<'_, Option<Notices>>, ReadError> {
        match self.notices.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(ReadError::InUse),
        }
    }

    fn wait(&self, py: Python<'_>, deadline: Option<Instant>) -> PyResult<Option<Read>> {
        let convert_error = |py: Python<'_>, error: ReadError| self.exception(py, error);
        waits::wait_in_slices(py, deadline, convert_error, |wait_end| {
            self.read_with(|notices| {
                notices.next_timeout(wait_end.saturating_duration_since(Instant::now()))
            })
        })
    }

    fn exception(&self, py: Python<'_>, error: ReadError) -> PyErr {
        match error {
            ReadError::InUse => PyRuntimeError::new_err(
                "another thread waits for a notice of this iterator: use one iterator in each thread",
            ),
            ReadError::Failed(error) => self.enrolled.exception(py, error),
        }
    }

    fn to_python<'py>(&self, py: Python<'py>, notice: Notice) -> PyResult<Bound<'py, PyAny>> {
        match notice {
            Notice::TaskEnded(tid) => {
                records::make(py, "TaskEnded", (PyTask::new(&self.enrolled, tid),))
            }
            Notice::HostRemoved(host) => records::make(py, "HostRemoved", (host.tid().raw(),)),
            Notice::HostJoined(host) => records::make(py, "HostJoined", (host.tid().raw(),)),
        }
    }
}

#[pymethods]
impl PyNotices {
    /// Waits for the next notice. Returns None if no further notice can arrive.
    #[pyo3(signature = (timeout = None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self.wait(py, waits::deadline_after(timeout)?)? {
            Some(Read::Notice(notice)) => self.to_python(py, notice).map(Some),
            Some(Read::Exhausted) => Ok(None),
            None => Err(PyTimeoutError::new_err("no notice has arrived in time")),
        }
    }

    /// Returns the next notice, or None if none has arrived.
    fn try_get<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let read = py
            .detach(|| self.read_with(Notices::try_next))
            .map_err(|error| self.exception(py, error))?;
        match read {
            Some(Read::Notice(notice)) => self.to_python(py, notice).map(Some),
            Some(Read::Exhausted) | None => Ok(None),
        }
    }

    /// True if no further notice can arrive.
    #[getter]
    fn is_exhausted(&self, py: Python<'_>) -> PyResult<bool> {
        let guard = self.try_lock().map_err(|error| self.exception(py, error))?;
        Ok(guard.as_ref().is_none_or(Notices::is_exhausted))
    }

    /// Cancels the request for notices. The iterator is exhausted then.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let notices = lock(&self.notices).take();
            drop(notices);
        });
    }

    fn _watch(&self, waker: &PyLoopWaker) -> PyResult<PyWatch> {
        let messages = WatchedMessages::Notices(self.notices.clone());
        Ok(self.enrolled.arrivals()?.watch(messages, waker))
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.get(py, None)
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py()
            .import("sempa_pvm._aio")?
            .call_method1("next_notice", (slf,))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _exception_type: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> bool {
        self.close(py);
        false
    }
}
