//! A driver whose callbacks are functions of a C program.

#![allow(unsafe_code, reason = "callbacks are functions of C programs")]

use super::buffer::Buffer;
use super::memory::address;
use super::run::RunHandle;
use crate::abi;
use crate::errors::{CallError, CallResult, NONE, callback_result};
use bytes::Bytes;
use master_worker::dispatch::PauseCause;
use master_worker::{AttemptRecord, Failure, PoolEvent, RawDriver, ResultInfo, Run, TaskId};
use std::ffi::{CString, c_char, c_int, c_void};
use std::rc::Rc;

const EVENT_HOST_ADDED: c_int = 0;
const EVENT_HOST_LOST: c_int = 1;
const EVENT_WORKER_READY: c_int = 2;
const EVENT_WORKER_PAUSED: c_int = 3;
const EVENT_WORKER_RESUMED: c_int = 4;
const EVENT_WORKER_MIGRATED: c_int = 5;
const EVENT_WORKER_LOST: c_int = 6;
const CAUSE_OWNER: c_int = 1;
const CAUSE_SUSPENDED: c_int = 2;

type RunCallback = unsafe extern "C" fn(*mut c_void, *const RunHandle) -> c_int;
type BufferCallback = unsafe extern "C" fn(*mut c_void, *mut Buffer) -> c_int;
/// Type of the visitor of `sempa_run_each_quarantined`.
pub(super) type VisitQuarantined =
    unsafe extern "C" fn(*mut c_void, *const abi::Quarantined) -> c_int;

/// The structure `sempa_driver` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Callbacks {
    size: usize,
    user: *mut c_void,
    start: Option<RunCallback>,
    configure: Option<RunCallback>,
    save: Option<BufferCallback>,
    restore: Option<unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int>,
    init_data: Option<BufferCallback>,
    benchmark: Option<BufferCallback>,
    on_result: Option<
        unsafe extern "C" fn(*mut c_void, *const RunHandle, *const abi::TaskResult) -> c_int,
    >,
    on_partial_result: Option<
        unsafe extern "C" fn(*mut c_void, *const RunHandle, *const abi::PartialResult) -> c_int,
    >,
    on_quarantined: Option<
        unsafe extern "C" fn(*mut c_void, *const RunHandle, *const abi::Quarantined) -> c_int,
    >,
    on_pool_event:
        Option<unsafe extern "C" fn(*mut c_void, *const RunHandle, *const abi::PoolEvent) -> c_int>,
    on_all_closed: Option<RunCallback>,
}

impl Callbacks {
    pub(super) const NONE: Self = Self {
        size: size_of::<Self>(),
        user: std::ptr::null_mut(),
        start: None,
        configure: None,
        save: None,
        restore: None,
        init_data: None,
        benchmark: None,
        on_result: None,
        on_partial_result: None,
        on_quarantined: None,
        on_pool_event: None,
        on_all_closed: None,
    };

    #[cfg(test)]
    pub(super) fn layout_checks() -> String {
        crate::layout::layout_checks!("sempa_driver", Self,
            size user start configure save restore init_data benchmark on_result
            on_partial_result on_quarantined on_pool_event on_all_closed)
    }

    /// # Errors
    /// A callback is missing that the run needs.
    pub(super) fn check(&self, has_journal: bool) -> CallResult<()> {
        if self.start.is_none() || self.on_result.is_none() {
            return Err(CallError::argument(
                "the driver needs the callbacks start and on_result",
            ));
        }
        if has_journal && (self.save.is_none() || self.restore.is_none()) {
            return Err(CallError::argument(
                "a run with a journal needs the callbacks save and restore: without them a \
                 restart would lose the results in the driver",
            ));
        }
        Ok(())
    }
}

/// Attempts of a task with texts for C.
pub(super) struct Attempts {
    attempts: Vec<abi::Attempt>,
    /// The strings to which `attempts` points.
    _texts: Vec<CString>,
}

impl Attempts {
    pub(super) fn new(history: &[AttemptRecord]) -> Self {
        let mut texts = Vec::with_capacity(2 * history.len());
        let mut keep = |text: &str| -> *const c_char {
            let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
            let address = text.as_ptr();
            texts.push(text);
            address
        };
        let attempts = history
            .iter()
            .map(|record| abi::Attempt {
                worker: record.worker.0,
                host: keep(&record.host),
                reason: keep(&record.reason.to_string()),
                duration_s: record.ended_at.saturating_sub(record.started_at) as f64 / 1e6,
                counts: record.is_counted.into(),
            })
            .collect();
        Self {
            attempts,
            _texts: texts,
        }
    }

    /// Returns a view of a task with these attempts. The view is valid as long as both arguments.
    pub(super) fn quarantined(&self, task: TaskId, payload: &[u8]) -> abi::Quarantined {
        abi::Quarantined {
            task: task.0,
            payload: address(payload),
            payload_length: payload.len(),
            attempts: self.attempts.as_ptr(),
            attempt_count: self.attempts.len(),
        }
    }
}

/// A driver whose callbacks are functions of a C program. The program promised with `sempa_driver`
/// that the callbacks may be called with its `user` until the run ends.
pub(super) struct CDriver {
    callbacks: Callbacks,
    handle: Rc<RunHandle>,
}

impl CDriver {
    pub(super) fn new(callbacks: Callbacks) -> Self {
        Self {
            callbacks,
            handle: Rc::default(),
        }
    }

    /// Calls `call` with the handle of the run.
    fn call_with_run(
        &self,
        name: &str,
        run: &mut Run,
        call: impl FnOnce(*mut c_void, *const RunHandle) -> c_int,
    ) -> Result<(), Failure> {
        let (user, handle) = (self.callbacks.user, Rc::as_ptr(&self.handle));
        let code = self.handle.with(run, || call(user, handle));
        callback_result(name, code)
    }

    fn call_for_run(
        &self,
        name: &str,
        callback: Option<RunCallback>,
        run: &mut Run,
    ) -> Result<(), Failure> {
        let Some(callback) = callback else {
            return Ok(());
        };
        // SAFETY: by the promise of `CDriver`.
        self.call_with_run(name, run, |user, handle| unsafe { callback(user, handle) })
    }

    /// Returns the bytes of a callback, with the callback's code.
    fn call_for_bytes(&self, callback: Option<BufferCallback>) -> (c_int, Bytes) {
        let Some(callback) = callback else {
            return (0, Bytes::new());
        };
        let mut buffer = Buffer::default();
        // SAFETY: by the promise of `CDriver`; the buffer lives during the call.
        let code = unsafe { callback(self.callbacks.user, &mut buffer) };
        (code, buffer.into_bytes())
    }
}

impl RawDriver for CDriver {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.call_for_run("start", self.callbacks.start, run)
    }

    fn configure(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.call_for_run("configure", self.callbacks.configure, run)
    }

    fn save(&self) -> Result<Bytes, Failure> {
        let (code, state) = self.call_for_bytes(self.callbacks.save);
        callback_result("save", code).map(|()| state)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Failure> {
        let Some(restore) = self.callbacks.restore else {
            return Ok(());
        };
        // SAFETY: by the promise of `CDriver`; the state lives during the call.
        let code = unsafe { restore(self.callbacks.user, address(state), state.len()) };
        callback_result("restore", code)
    }

    fn init_data(&mut self) -> Result<Bytes, Failure> {
        let (code, data) = self.call_for_bytes(self.callbacks.init_data);
        callback_result("init_data", code).map(|()| data)
    }

    fn benchmark(&mut self) -> Option<Bytes> {
        self.callbacks.benchmark?;
        let (code, task) = self.call_for_bytes(self.callbacks.benchmark);
        match code {
            NONE => None,
            code => match callback_result("benchmark", code) {
                Ok(()) => Some(task),
                Err(error) => {
                    eprintln!("warning: the run has no benchmark: {error}");
                    None
                }
            },
        }
    }

    fn on_result(
        &mut self,
        run: &mut Run,
        info: &ResultInfo,
        task: &Bytes,
        result: &Bytes,
    ) -> Result<(), Failure> {
        let Some(on_result) = self.callbacks.on_result else {
            return Ok(());
        };
        let result = abi::TaskResult {
            task: info.task.0,
            worker: info.worker.0,
            cpu_s: info.cpu_us as f64 / 1e6,
            wall_s: info.wall_us as f64 / 1e6,
            payload: address(task),
            payload_length: task.len(),
            data: address(result),
            length: result.len(),
        };
        // SAFETY: by the promise of `CDriver`; the result lives during the call.
        self.call_with_run("on_result", run, |user, handle| unsafe {
            on_result(user, handle, &result)
        })
    }

    fn on_partial_result(
        &mut self,
        run: &mut Run,
        task: TaskId,
        payload: &Bytes,
        data: &Bytes,
    ) -> Result<(), Failure> {
        let Some(on_partial_result) = self.callbacks.on_partial_result else {
            return Ok(());
        };
        let part = abi::PartialResult {
            task: task.0,
            payload: address(payload),
            payload_length: payload.len(),
            data: address(data),
            length: data.len(),
        };
        // SAFETY: by the promise of `CDriver`; the part lives during the call.
        self.call_with_run("on_partial_result", run, |user, handle| unsafe {
            on_partial_result(user, handle, &part)
        })
    }

    fn on_quarantined(
        &mut self,
        run: &mut Run,
        task: TaskId,
        payload: &Bytes,
        history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        let Some(on_quarantined) = self.callbacks.on_quarantined else {
            return Ok(());
        };
        let attempts = Attempts::new(history);
        let quarantined = attempts.quarantined(task, payload);
        // SAFETY: by the promise of `CDriver`; the attempts live during the call.
        self.call_with_run("on_quarantined", run, |user, handle| unsafe {
            on_quarantined(user, handle, &quarantined)
        })
    }

    fn on_pool_event(&mut self, run: &mut Run, event: &PoolEvent) -> Result<(), Failure> {
        let Some(on_pool_event) = self.callbacks.on_pool_event else {
            return Ok(());
        };
        let facts = EventFacts::new(event);
        let text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
        let (host, reason) = (text(facts.host), text(facts.reason));
        let event = abi::PoolEvent {
            kind: facts.kind,
            cause: facts.cause,
            worker: facts.worker,
            host: host.as_ptr(),
            reason: reason.as_ptr(),
        };
        // SAFETY: by the promise of `CDriver`; the event lives during the call.
        self.call_with_run("on_pool_event", run, |user, handle| unsafe {
            on_pool_event(user, handle, &event)
        })
    }

    fn on_all_closed(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.call_for_run("on_all_closed", self.callbacks.on_all_closed, run)
    }
}

/// Parts of an event; empty or 0 if the event has no such part.
struct EventFacts<'a> {
    kind: c_int,
    cause: c_int,
    worker: u64,
    host: &'a str,
    reason: &'a str,
}

impl<'a> EventFacts<'a> {
    fn new(event: &'a PoolEvent) -> Self {
        let facts = |kind, worker, host| Self {
            kind,
            cause: 0,
            worker,
            host,
            reason: "",
        };
        match event {
            PoolEvent::HostAdded { host } => facts(EVENT_HOST_ADDED, 0, host),
            PoolEvent::HostLost { host } => facts(EVENT_HOST_LOST, 0, host),
            PoolEvent::WorkerReady { worker, host } => facts(EVENT_WORKER_READY, worker.0, host),
            PoolEvent::WorkerPaused { worker, cause } => Self {
                cause: match cause {
                    PauseCause::Owner => CAUSE_OWNER,
                    PauseCause::Suspended => CAUSE_SUSPENDED,
                },
                ..facts(EVENT_WORKER_PAUSED, worker.0, "")
            },
            PoolEvent::WorkerResumed { worker } => facts(EVENT_WORKER_RESUMED, worker.0, ""),
            PoolEvent::WorkerMigrated { worker, host } => {
                facts(EVENT_WORKER_MIGRATED, worker.0, host)
            }
            PoolEvent::WorkerLost { worker, reason } => Self {
                reason,
                ..facts(EVENT_WORKER_LOST, worker.0, "")
            },
        }
    }
}
