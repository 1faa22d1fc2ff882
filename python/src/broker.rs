//! A member of a broker session.

use crate::buffer::ExportedArray;
use crate::content::body_of;
use crate::enrolled::lock;
use crate::vm::PyVm;
use crate::{errors, waits};
use bytes::Bytes;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::call::PyCallArgs;
use pyo3::exceptions::{PyTimeoutError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use sempa_broker_client::{
    Destination, Error, JoinOptions, LimitName, Mail, MailHead, MailKind, Member, MemberId,
    Pattern, Role, SendOptions, Verdict, WatchTarget,
};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Python module with the records of mail.
const TYPES_MODULE: &str = "sempa_pvm._broker_types";
/// Number that stands for the foreman, and kinds that stand for other mail; as in `smbl.h`.
const FOREMAN: i64 = 0;
const KIND_GONE: i32 = -2;
const KIND_RETURNED: i32 = -3;
/// Time after which a coroutine that was cancelled frees its thread.
const COROUTINE_SLICE: Duration = Duration::from_millis(250);

/// This program as a member of a session. Several threads may use a member.
#[pyclass(name = "Member", module = "sempa_pvm.broker", frozen)]
pub(crate) struct PyMember {
    /// `None` after the member has left.
    member: Mutex<Option<Arc<Member>>>,
    id: MemberId,
    session: String,
}

/// Calls a function or class of the module with the records.
fn make<'py>(
    py: Python<'py>,
    name: &str,
    arguments: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    static TYPES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = TYPES.get_or_try_init(py, || py.import(TYPES_MODULE).map(Bound::unbind))?;
    module.bind(py).getattr(name)?.call1(arguments)
}

fn exception(py: Python<'_>, error: Error) -> PyErr {
    let kind = match &error {
        Error::Over { .. } => "over",
        Error::Gone { .. } | Error::Superseded { .. } => "gone",
        Error::Refused { .. } => "refused",
        Error::TimedOut { .. } => return PyTimeoutError::new_err(error.to_string()),
        Error::Enroll(error) => return errors::from_enroll_error(py, error),
        Error::Vm(error) => return errors::from_error(py, error),
        Error::SessionFile(_) => "session file",
        Error::NoBroker { .. } => "no broker",
        Error::System(_) => "system",
    };
    errors::from_broker_failure(py, kind, &error.to_string())
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name} is {value} s: {error}")))
}

fn member_id(number: i64) -> PyResult<MemberId> {
    match u32::try_from(number) {
        Ok(number) if number > 0 => Ok(MemberId(number)),
        _ => Err(PyValueError::new_err(format!(
            "{number} is not the number of a member; members are 1 or more"
        ))),
    }
}

fn check_kind(kind: i32) -> PyResult<i32> {
    match kind {
        0.. => Ok(kind),
        _ => Err(PyValueError::new_err(format!(
            "the kind {kind} is negative; use a kind from 0 to {}",
            i32::MAX
        ))),
    }
}

fn pattern(source: Option<i64>, kind: Option<i32>) -> PyResult<Pattern> {
    let mail_kind = match kind {
        None => None,
        Some(KIND_GONE) => Some(MailKind::Gone),
        Some(KIND_RETURNED) => Some(MailKind::Returned),
        Some(kind) => Some(MailKind::Message(check_kind(kind)?)),
    };
    Ok(Pattern {
        source: source.map(member_id).transpose()?,
        kind: mail_kind,
    })
}

/// Returns the bytes of an object with the buffer protocol; `None` has no bytes.
fn body(py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if !data.is_none() && PyUntypedBuffer::get(data).is_err() {
        return Err(PyTypeError::new_err(format!(
            "the content of a broker's message is None or an object with the buffer protocol, such \
             as bytes, not {}",
            data.get_type()
        )));
    }
    Ok(body_of(py, None, data)?.bytes)
}

/// True if a send may succeed later.
fn may_wait(verdict: Verdict) -> bool {
    match verdict {
        Verdict::Full(limit) => limit != LimitName::MessageBytes,
        Verdict::NoForeman => true,
        _ => false,
    }
}

fn answer(py: Python<'_>, verdict: Verdict) -> PyResult<Bound<'_, PyAny>> {
    let (name, reason, limit) = match verdict {
        Verdict::Taken => ("taken", None, None),
        Verdict::Done => ("done", None, None),
        Verdict::Gone(reason) => ("gone", Some(reason.to_string()), None),
        Verdict::Unknown => ("unknown", None, None),
        Verdict::NoForeman => ("no foreman", None, None),
        Verdict::Full(limit) => ("full", None, Some(limit.name())),
        Verdict::NotAllowed => ("not allowed", None, None),
    };
    make(py, "answer", (name, reason, limit))
}

fn mail_record(py: Python<'_>, mail: Mail) -> PyResult<Bound<'_, PyAny>> {
    let view = |body: Bytes| ExportedArray::from_bytes(body).into_memoryview(py);
    match mail {
        Mail::Message { from, kind, body } => make(py, "Message", (from.0, kind, view(body)?)),
        Mail::Gone {
            member,
            reason,
            undelivered,
        } => make(py, "Gone", (member.0, reason.to_string(), undelivered)),
        Mail::Returned {
            to,
            kind,
            body,
            reason,
        } => {
            let fields = (to.0, kind, view(body)?, reason.to_string());
            make(py, "Returned", fields)
        }
    }
}

fn head_record<'py>(py: Python<'py>, head: &MailHead) -> PyResult<Bound<'py, PyAny>> {
    let kind = match head.kind {
        MailKind::Message(kind) => kind,
        MailKind::Gone => KIND_GONE,
        MailKind::Returned => KIND_RETURNED,
    };
    make(py, "MailInfo", (head.source.0, kind, head.byte_count))
}

impl PyMember {
    /// # Errors
    /// The member has left.
    fn member(&self, py: Python<'_>) -> PyResult<Arc<Member>> {
        lock(&self.member).clone().ok_or_else(|| {
            let reason = format!("this member has left the session {}", self.session);
            errors::from_broker_failure(py, "gone", &reason)
        })
    }

    /// Waits for mail that matches, with a call of the member that takes or probes the mail.
    ///
    /// # Errors
    /// The member has left, an argument is wrong, the time limit is over, or the session has ended.
    fn wait_for_match<T: Send>(
        &self,
        py: Python<'_>,
        source: Option<i64>,
        kind: Option<i32>,
        timeout: Option<f64>,
        look: fn(&Member, Pattern, Duration) -> Result<Option<T>, Error>,
    ) -> PyResult<T> {
        let (member, pattern) = (self.member(py)?, pattern(source, kind)?);
        let deadline = waits::deadline_after(timeout)?;
        let found = waits::wait_in_slices(py, deadline, exception, |wait_end| {
            look(
                &member,
                pattern,
                wait_end.saturating_duration_since(Instant::now()),
            )
        })?;
        found.ok_or_else(|| PyTimeoutError::new_err("no such mail has arrived in time"))
    }

    fn leave_session(&self, py: Python<'_>, for_owner: bool) -> PyResult<()> {
        let Some(member) = lock(&self.member).take() else {
            return Ok(());
        };
        let left = py.detach(|| match (Arc::try_unwrap(member), for_owner) {
            (Ok(member), false) => member.leave(),
            (Ok(member), true) => member.leave_for_owner(),
            // Another thread is in a call; the member leaves at the end of that call.
            (Err(_), _) => Ok(()),
        });
        left.map_err(|error| exception(py, error))
    }
}

#[pymethods]
impl PyMember {
    /// Joins a session as a task of the virtual machine, or from outside with a session file.
    #[staticmethod]
    #[pyo3(signature = (session = None, *, session_file = None, foreman = false, factor = 0,
        broker_options = None, timeout = 60.0, vm = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "named options of a Python function"
    )]
    fn join(
        py: Python<'_>,
        session: Option<&str>,
        session_file: Option<PathBuf>,
        foreman: bool,
        factor: u32,
        broker_options: Option<Vec<String>>,
        timeout: f64,
        vm: Option<&PyVm>,
    ) -> PyResult<Self> {
        let role = if foreman { Role::Foreman } else { Role::Worker };
        let mut options = match (session, session_file) {
            (_, Some(file)) => JoinOptions::outside(file, role),
            (Some(session), None) => JoinOptions::new(session, role),
            (None, None) => JoinOptions::from_env(role).ok_or_else(|| {
                PyValueError::new_err(
                    "there is no session: pass a name or a session file, or set SEMPA_SESSION or \
                     SEMPA_SESSION_FILE",
                )
            })?,
        };
        options.factor = factor;
        options.broker_options = broker_options.unwrap_or_default();
        options.timeout = seconds("timeout", timeout)?;
        let vm = vm.map(|vm| vm.enrolled().vm().clone());
        let joined = waits::run_request(py, move || match vm {
            Some(vm) if options.session_file.is_none() => Member::join_as_task(vm, options),
            _ => Member::join(options),
        })?;
        let member = joined.map_err(|error| exception(py, error))?;
        Ok(Self {
            id: member.id(),
            session: member.session().to_string(),
            member: Mutex::new(Some(Arc::new(member))),
        })
    }

    /// This member's number, which the session never uses again.
    #[getter]
    fn id(&self) -> u32 {
        self.id.0
    }

    #[getter]
    fn session(&self) -> &str {
        &self.session
    }

    /// How often this member has connected.
    #[getter]
    fn incarnation(&self, py: Python<'_>) -> PyResult<u32> {
        let member = self.member(py)?;
        Ok(py.detach(|| member.incarnation()))
    }

    /// Why the session ends, as soon as the broker has told so; None before.
    #[getter]
    fn over(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let member = self.member(py)?;
        let end = py.detach(|| member.over());
        Ok(end.map(|end| end.to_string()))
    }

    /// Sends a message to a member, or to the foreman (0), and waits for the broker's answer.
    #[pyo3(signature = (to, kind, data = None, *, returns = false, timeout = None))]
    fn send<'py>(
        &self,
        py: Python<'py>,
        to: i64,
        kind: i32,
        data: Option<&Bound<'py, PyAny>>,
        returns: bool,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let member = self.member(py)?;
        let to = match to {
            FOREMAN => Destination::Foreman,
            number => member_id(number)?.into(),
        };
        let kind = check_kind(kind)?;
        let body = data.map_or(Ok(Bytes::new()), |data| body(py, data))?;
        let timeout = seconds("timeout", timeout.unwrap_or(0.0))?;
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let time_left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            let options = SendOptions {
                returns,
                wait: Some(time_left.min(waits::SIGNAL_CHECK_INTERVAL)),
            };
            let verdict = py.detach(|| member.send(to, kind, body.clone(), options));
            let verdict = verdict.map_err(|error| exception(py, error))?;
            if !may_wait(verdict) || time_left.is_zero() {
                return answer(py, verdict);
            }
            py.check_signals()?;
        }
    }

    /// Waits for the earliest mail that matches; other mail stays.
    #[pyo3(signature = (source = None, kind = None, timeout = None))]
    fn recv<'py>(
        &self,
        py: Python<'py>,
        source: Option<i64>,
        kind: Option<i32>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mail = self.wait_for_match(py, source, kind, timeout, Member::recv_timeout)?;
        mail_record(py, mail)
    }

    /// Returns the earliest mail that matches and has arrived; None if there is none.
    #[pyo3(signature = (source = None, kind = None))]
    fn try_recv<'py>(
        &self,
        py: Python<'py>,
        source: Option<i64>,
        kind: Option<i32>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (member, pattern) = (self.member(py)?, pattern(source, kind)?);
        let mail = py.detach(|| member.try_recv(pattern));
        let mail = mail.map_err(|error| exception(py, error))?;
        mail.map(|mail| mail_record(py, mail)).transpose()
    }

    /// As recv, for coroutines. A coroutine that is cancelled has received nothing.
    #[pyo3(signature = (source = None, kind = None))]
    fn arecv<'py>(
        slf: &Bound<'py, Self>,
        source: Option<i64>,
        kind: Option<i32>,
    ) -> PyResult<Bound<'py, PyAny>> {
        pattern(source, kind)?;
        make(slf.py(), "receive", (slf, source, kind))
    }

    /// Waits for mail that matches, and tells about it without removing it.
    #[pyo3(signature = (source = None, kind = None, timeout = None))]
    fn probe<'py>(
        &self,
        py: Python<'py>,
        source: Option<i64>,
        kind: Option<i32>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let head = self.wait_for_match(py, source, kind, timeout, Member::probe_timeout)?;
        head_record(py, &head)
    }

    /// Tells about mail that matches and has arrived; None if there is none. Asks nobody.
    #[pyo3(signature = (source = None, kind = None))]
    fn iprobe<'py>(
        &self,
        py: Python<'py>,
        source: Option<i64>,
        kind: Option<i32>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (member, pattern) = (self.member(py)?, pattern(source, kind)?);
        let head = py.detach(|| member.iprobe(pattern));
        let head = head.map_err(|error| exception(py, error))?;
        head.map(|head| head_record(py, &head)).transpose()
    }

    /// Waits for a short time until mail matches; for a thread of an event loop.
    fn _wait(&self, py: Python<'_>, source: Option<i64>, kind: Option<i32>) -> PyResult<()> {
        let (member, pattern) = (self.member(py)?, pattern(source, kind)?);
        let found = py.detach(|| member.probe_timeout(pattern, COROUTINE_SLICE));
        found.map(drop).map_err(|error| exception(py, error))
    }

    /// Asks for a notice when a member, or any member, is gone.
    #[pyo3(signature = (member = None))]
    fn watch<'py>(&self, py: Python<'py>, member: Option<i64>) -> PyResult<Bound<'py, PyAny>> {
        let target = match member {
            None => WatchTarget::All,
            Some(number) => WatchTarget::Member(member_id(number)?),
        };
        let member = self.member(py)?;
        let verdict = py.detach(|| member.watch(target));
        answer(py, verdict.map_err(|error| exception(py, error))?)
    }

    /// The report of the session. Outside the virtual machine only a foreman may ask.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let member = self.member(py)?;
        let report = py.detach(|| member.report());
        let report = report.map_err(|error| exception(py, error))?;
        let text = serde_json::to_string(&report)
            .map_err(|error| PyValueError::new_err(format!("the report: {error}")))?;
        make(py, "report_from_json", (text,))
    }

    /// Ends the session for all after this time in seconds. Needs the role foreman.
    #[pyo3(signature = (within = 0.0))]
    fn finish<'py>(&self, py: Python<'py>, within: f64) -> PyResult<Bound<'py, PyAny>> {
        let within = seconds("within", within)?;
        let member = self.member(py)?;
        let verdict = py.detach(|| member.finish(within));
        answer(py, verdict.map_err(|error| exception(py, error))?)
    }

    /// Leaves the session. Mail that was not received is returned to its senders or dropped.
    #[pyo3(signature = (*, for_owner = false))]
    fn leave(&self, py: Python<'_>, for_owner: bool) -> PyResult<()> {
        self.leave_session(py, for_owner)
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
    ) -> PyResult<bool> {
        self.leave_session(py, false)?;
        Ok(false)
    }

    fn __repr__(&self) -> String {
        format!("<Member {} of session {}>", self.id.0, self.session)
    }
}

impl Drop for PyMember {
    fn drop(&mut self) {
        let member = lock(&self.member).take();
        // Leaving waits for the broker's answer.
        Python::attach(|py| py.detach(|| drop(member)));
    }
}
