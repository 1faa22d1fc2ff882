//! Waiting without the interpreter's lock. While a call waits, other Python threads run, and
//! Python's signal handlers run at least every [`SIGNAL_CHECK_INTERVAL`].

use pyo3::exceptions::{PyOverflowError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Maximum time after which a waiting call runs the handlers of signals that have arrived.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Converts a timeout in seconds into a deadline. `None` stands for no deadline.
///
/// # Errors
/// `ValueError` if the timeout is not a number, `OverflowError` if it is too large for the clock.
pub(crate) fn deadline_after(timeout_s: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout_s else {
        return Ok(None);
    };
    if seconds.is_nan() {
        return Err(PyValueError::new_err("the timeout is not a number"));
    }
    if seconds == f64::INFINITY {
        return Ok(None);
    }
    Duration::try_from_secs_f64(seconds.max(0.0))
        .ok()
        .and_then(|timeout| Instant::now().checked_add(timeout))
        .map(Some)
        .ok_or_else(|| PyOverflowError::new_err(format!("a timeout of {seconds} s is too long")))
}

/// Calls `wait_until` without the interpreter's lock, again and again with a deadline of at most
/// [`SIGNAL_CHECK_INTERVAL`], until `wait_until` returns a value or the deadline expires. Returns
/// `None` when the deadline expires.
///
/// # Errors
/// The error of `wait_until`, or the exception of a signal handler such as `KeyboardInterrupt`.
/// After an exception of a signal handler `wait_until` has returned no value, so no message is
/// lost.
pub(crate) fn wait_in_slices<T: Send, E: Send>(
    py: Python<'_>,
    deadline: Option<Instant>,
    convert_error: impl Fn(Python<'_>, E) -> PyErr,
    mut wait_until: impl FnMut(Instant) -> Result<Option<T>, E> + Send,
) -> PyResult<Option<T>> {
    loop {
        let slice_end = Instant::now() + SIGNAL_CHECK_INTERVAL;
        let wait_end = deadline.map_or(slice_end, |deadline| deadline.min(slice_end));
        match py.detach(|| wait_until(wait_end)) {
            Ok(Some(value)) => return Ok(Some(value)),
            Ok(None) => py.check_signals()?,
            Err(error) => return Err(convert_error(py, error)),
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
    }
}

/// Runs a request that may take long in a thread of its own, so that signal handlers run while the
/// request waits. If a signal handler raises an exception, the request continues, and its result is
/// dropped.
///
/// # Errors
/// The exception of a signal handler, or `RuntimeError` if the system starts no thread.
pub(crate) fn run_request<T: Send + 'static>(
    py: Python<'_>,
    request: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut receiver) = sync_channel(1);
    std::thread::Builder::new()
        .name("pvm-request".into())
        .spawn(move || {
            // An error means that the caller was interrupted and does not wait any more.
            let _ = sender.send(request());
        })
        .map_err(|error| {
            PyRuntimeError::new_err(format!(
                "no thread can be started for the request: {error}; nothing was requested"
            ))
        })?;
    loop {
        // A receiver can be used by one thread at a time only, hence the exclusive reference.
        let exclusive_receiver = &mut receiver;
        match py.detach(move || exclusive_receiver.recv_timeout(SIGNAL_CHECK_INTERVAL)) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err(
                    "the thread of the request has panicked",
                ));
            }
        }
    }
}
