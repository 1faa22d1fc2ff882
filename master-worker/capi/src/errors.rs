//! Result codes of the interface, and the texts of errors.

use master_worker::{Failure, RunError};
use std::cell::RefCell;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub(crate) const OK: i32 = 0;
/// The call has no value to return.
pub(crate) const NONE: i32 = 1;
/// A worker ended because no next master came.
pub(crate) const NO_MASTER: i32 = 2;
const ERR_ARGUMENT: i32 = -1;
const ERR_STATE: i32 = -2;
const ERR_LIMIT: i32 = -3;
const ERR_VM: i32 = -4;
const ERR_START: i32 = -5;
const ERR_DRIVER: i32 = -6;
const ERR_JOURNAL: i32 = -7;
const ERR_QUARANTINE: i32 = -8;
const ERR_WORKER: i32 = -9;
const ERR_ENROLLED: i32 = -10;
const ERR_PANIC: i32 = -11;

thread_local! {
    /// Text of the thread's newest error.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
    /// Text that a callback has set for the failure that it is about to return.
    static CALLBACK_ERROR: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// An error of a call: its code and its text.
#[derive(Debug)]
pub(crate) struct CallError {
    code: i32,
    text: String,
}

pub(crate) type CallResult<T> = Result<T, CallError>;

impl CallError {
    fn new(code: i32, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { code, text }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(ERR_ARGUMENT, text)
    }

    /// The handle was used outside of the callback that got the handle.
    pub(crate) fn state(handle: &str) -> Self {
        let text = format!(
            "the {handle} can be used only in the callback that got it, and not in a visitor; \
             nothing was changed"
        );
        Self::new(ERR_STATE, text)
    }

    pub(crate) fn busy() -> Self {
        let text = "this process already executes a run or tasks of a run; wait until that call \
                    has returned";
        Self::new(ERR_STATE, text)
    }

    pub(crate) fn limit(error: &Failure) -> Self {
        let text = format!("no task was added: {error}");
        Self::new(ERR_LIMIT, text)
    }

    pub(crate) fn vm(error: impl std::fmt::Display) -> Self {
        Self::new(ERR_VM, error.to_string())
    }

    pub(crate) fn worker(error: &Failure) -> Self {
        Self::new(ERR_WORKER, format!("the worker ended early: {error}"))
    }

    pub(crate) fn enrolled_before() -> Self {
        let text = "this process called a function of libpvm3 before sempa_work_worker: that call \
                    took the place of the worker in the run. No task was lost; call \
                    sempa_work_worker first, and PVM's functions only in the callbacks";
        Self::new(ERR_ENROLLED, text)
    }
}

impl From<RunError> for CallError {
    fn from(error: RunError) -> Self {
        let code = match &error {
            RunError::Driver { .. } => ERR_DRIVER,
            RunError::Journal(_) => ERR_JOURNAL,
            RunError::TooManyQuarantined { .. } => ERR_QUARANTINE,
            RunError::Disconnected(_) => ERR_VM,
            RunError::Start(_) => ERR_START,
        };
        Self::new(code, error.to_string())
    }
}

/// Returns the code of a result. Keeps the text of an error for `sempa_work_last_error`. A panic
/// is an error.
pub(crate) fn guard(call: impl FnOnce() -> CallResult<i32>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        let text = payload
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let text = format!(
            "a bug in libsempa_work: {text}. The run has ended; with a journal it can be started \
             again"
        );
        Err(CallError::new(ERR_PANIC, text))
    });
    result.unwrap_or_else(|error| {
        set_last_error(&error.text);
        error.code
    })
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// Keeps a text for `sempa_work_last_error`.
pub(crate) fn set_last_error(text: &str) {
    LAST_ERROR.with_borrow_mut(|last| *last = c_string(text));
}

/// Returns the result of `read` for the text of the thread's newest error.
pub(crate) fn with_last_error<R>(read: impl FnOnce(&CString) -> R) -> R {
    LAST_ERROR.with_borrow(read)
}

/// Keeps the reason of the failure that a callback is about to return.
pub(crate) fn set_callback_error(text: String) {
    CALLBACK_ERROR.with_borrow_mut(|reason| *reason = Some(text));
}

/// Returns the failure that the result of a callback means.
///
/// # Errors
/// The callback returned another code than 0.
pub(crate) fn callback_result(callback: &str, code: i32) -> Result<(), Failure> {
    let reason = CALLBACK_ERROR.take();
    match code {
        OK => Ok(()),
        code => Err(reason.unwrap_or_else(|| format!("the callback {callback} returned {code}")))?,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_an_error_with_its_text() {
        assert_eq!(guard(|| panic!("number {}", 7)), ERR_PANIC);
        let text = with_last_error(|text| text.to_string_lossy().into_owned());
        assert!(text.contains("number 7"), "{text}");
    }

    #[test]
    fn reason_of_a_callback_is_used_once() {
        set_callback_error("no such file".into());
        let failed = callback_result("start", 5).expect_err("a failure");
        assert_eq!(failed.to_string(), "no such file");
        let failed = callback_result("start", 5).expect_err("a failure");
        assert_eq!(failed.to_string(), "the callback start returned 5");
        set_callback_error("not a failure after all".into());
        callback_result("start", OK).expect("success");
        assert!(callback_result("start", 1).is_err_and(|e| e.to_string().contains("returned 1")));
    }
}
