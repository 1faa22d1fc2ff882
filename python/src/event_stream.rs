//! Reads the event log as events happen.

use crate::arrivals::{PyLoopWaker, PyWatch, WatchedMessages};
use crate::enrolled::{EVENT_TAG, Enrolled, lock};
use crate::{errors, records, waits};
use libpvm::proto::event::{Event, EventKind};
use libpvm::proto::task::{Reply, Request};
use libpvm::{Error, Match, Vm};
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError};
use pyo3::prelude::*;
use sempa_proto::{HostId, Message, PvmError};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Maximum number of events in the reply to one request.
const EVENTS_PER_REQUEST_MAX: u32 = 1000;

/// Names of the hosts that are or were in the virtual machine, for the sentences of events.
pub(crate) type HostNames = BTreeMap<HostId, String>;

/// Iterator over the event log; also an asynchronous iterator. It ends with close().
#[pyclass(name = "EventStream", module = "sempa_pvm", frozen)]
pub(crate) struct PyEventStream {
    enrolled: Arc<Enrolled>,
    /// Selects the messages with events.
    selection: Match,
    state: Mutex<StreamState>,
}

struct StreamState {
    /// Events that were in the log before the stream began; at most the length of the log.
    earlier_events: VecDeque<Event>,
    /// Number of the newest event that is in `earlier_events` or was returned.
    last_number: u64,
    host_names: HostNames,
    is_closed: bool,
}

impl StreamState {
    /// Returns the event in a message, or `None` if the program has got this event already.
    ///
    /// # Errors
    /// `BadMsg` if the message contains no event.
    fn accept(&mut self, message: &Message) -> Result<Option<ShownEvent>, Error> {
        let event = Vm::decode_event(message).ok_or_else(|| {
            let reason = "an event cannot be read: use the same version on all hosts";
            Error::new(PvmError::BadMsg, reason)
        })?;
        if event.number <= self.last_number {
            return Ok(None);
        }
        self.last_number = event.number;
        Ok(Some(self.show(&event)))
    }

    fn show(&mut self, event: &Event) -> ShownEvent {
        ShownEvent::new(event, &mut self.host_names)
    }
}

impl PyEventStream {
    /// Starts a stream. With `first_number` the stream begins with the entry of this number, and
    /// otherwise with the next event.
    ///
    /// # Errors
    /// The error of a request, or `Already` if the task has another stream.
    pub(crate) fn start(
        py: Python<'_>,
        enrolled: &Arc<Enrolled>,
        first_number: Option<u64>,
    ) -> PyResult<Self> {
        // Events between the subscription and the request for earlier events come twice; `accept`
        // drops the second one.
        let ctx = enrolled.request(py, |vm| enrolled.follow_events(|| new_context(vm)))?;
        let stream = Self {
            enrolled: enrolled.clone(),
            selection: Match::any().ctx(ctx).tag(EVENT_TAG),
            state: Mutex::new(StreamState {
                earlier_events: VecDeque::new(),
                last_number: 0,
                host_names: HostNames::new(),
                is_closed: false,
            }),
        };
        let (host_names, earlier_events) = enrolled.request(py, |vm| {
            let earlier_events = match first_number {
                Some(number) => read_log(vm, number, None)?,
                None => Vec::new(),
            };
            Ok((host_names(vm)?, earlier_events))
        })?;
        let mut state = lock(&stream.state);
        state.host_names = host_names;
        state.last_number = earlier_events.last().map_or(0, |event| event.number);
        state.earlier_events = earlier_events.into();
        drop(state);
        Ok(stream)
    }

    /// Returns the next event that `receive` finds, or an earlier one. The second part is true if
    /// the stream is closed.
    fn next_event<'py>(
        &self,
        py: Python<'py>,
        receive: impl Fn() -> PyResult<Option<Message>>,
    ) -> PyResult<(Option<Bound<'py, PyAny>>, bool)> {
        loop {
            let mut state = lock(&self.state);
            if state.is_closed {
                return Ok((None, true));
            }
            let earlier_event = state.earlier_events.pop_front();
            let shown_event = earlier_event.map(|event| state.show(&event));
            // Python code must not run while the lock is held.
            drop(state);
            if let Some(shown_event) = shown_event {
                return Ok((Some(shown_event.into_python(py)?), false));
            }
            let Some(message) = receive()? else {
                return Ok((None, false));
            };
            let accepted = lock(&self.state).accept(&message);
            let shown_event = accepted.map_err(|error| errors::from_error(py, &error))?;
            if let Some(shown_event) = shown_event {
                return Ok((Some(shown_event.into_python(py)?), false));
            }
        }
    }
}

#[pymethods]
impl PyEventStream {
    /// Waits for the next event. Returns None if the stream is closed.
    #[pyo3(signature = (timeout = None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let deadline = waits::deadline_after(timeout)?;
        let receive = || self.enrolled.receive(py, self.selection, deadline);
        match self.next_event(py, receive)? {
            (None, false) => Err(PyTimeoutError::new_err("no event has arrived in time")),
            (event, _) => Ok(event),
        }
    }

    /// Returns the next event, or None if none has arrived.
    fn try_get<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let receive = || self.enrolled.try_receive(py, self.selection);
        self.next_event(py, receive).map(|(event, _)| event)
    }

    /// True if the stream was closed, so that no further event comes.
    #[getter]
    fn is_exhausted(&self) -> bool {
        lock(&self.state).is_closed
    }

    /// Ends the stream. Another stream may begin then.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.end());
    }

    fn _watch(&self, waker: &PyLoopWaker) -> PyResult<PyWatch> {
        let messages = WatchedMessages::Selected(self.selection);
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

impl PyEventStream {
    fn end(&self) {
        let mut state = lock(&self.state);
        if !std::mem::replace(&mut state.is_closed, true) {
            state.earlier_events.clear();
            self.enrolled.stop_following_events();
        }
    }
}

impl Drop for PyEventStream {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns entries of the event log from `first_number` on: at most `events_max`, or all.
///
/// # Errors
/// The error of a request.
pub(crate) fn read_log(
    vm: &Vm,
    first_number: u64,
    events_max: Option<usize>,
) -> Result<Vec<Event>, Error> {
    let (mut events, mut next_number) = (Vec::new(), first_number);
    loop {
        let missing_count = events_max.map_or(usize::MAX, |events_max| events_max - events.len());
        let limit = u32::try_from(missing_count)
            .unwrap_or(u32::MAX)
            .min(EVENTS_PER_REQUEST_MAX);
        if limit == 0 {
            return Ok(events);
        }
        let batch = vm.events(next_number, limit)?;
        let Some(last_event) = batch.last() else {
            return Ok(events);
        };
        next_number = last_event.number + 1;
        events.extend(batch);
    }
}

/// Returns the names of the hosts in the host table.
///
/// # Errors
/// The error of the request.
pub(crate) fn host_names(vm: &Vm) -> Result<HostNames, Error> {
    let hosts = vm.config()?.hosts.into_iter();
    Ok(hosts.map(|host| (host.id, host.name)).collect())
}

/// An event with the names of hosts, ready for Python.
pub(crate) struct ShownEvent {
    number: u64,
    time_s: f64,
    host: Option<String>,
    text: String,
    kind: Result<String, serde_json::Error>,
}

impl ShownEvent {
    /// Shows an event, and learns the names of hosts from it.
    pub(crate) fn new(event: &Event, host_names: &mut HostNames) -> Self {
        if let EventKind::HostAdded { host, name } | EventKind::HostGone { host, name, .. } =
            &event.kind
        {
            host_names.insert(*host, name.clone());
        }
        let name_of = |host: HostId| host_names.get(&host).map(String::as_str);
        Self {
            number: event.number,
            time_s: event.at.0 as f64 / 1e6,
            host: name_of(event.host).map(str::to_string),
            text: event.kind.with_host_names(name_of),
            kind: serde_json::to_string(&event.kind),
        }
    }

    /// Returns the record `Event`.
    ///
    /// # Errors
    /// `RuntimeError` if the event has no form in JSON.
    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let json = self.kind.map_err(|error| {
            PyRuntimeError::new_err(format!("event {} has no JSON form: {error}", self.number))
        })?;
        let fields = (self.number, self.time_s, self.host, self.text, json);
        records::make(py, "event_from_json", fields)
    }
}

fn new_context(vm: &Vm) -> Result<i32, Error> {
    match vm.runtime().request_and_wait(Request::NewContext) {
        Reply::Context(ctx) => Ok(ctx),
        Reply::Failed { error, reason } => Err(Error::new(error, reason)),
        _ => Err(Error::new(
            PvmError::BadMsg,
            "making a context: the daemon's reply does not fit the request; use the same version \
             everywhere",
        )),
    }
}
