//! A worker whose callbacks are functions of a C program.

#![allow(unsafe_code, reason = "callbacks are functions of C programs")]

use super::buffer::Buffer;
use super::context::ContextHandle;
use super::memory::{self, address};
use crate::errors::{CallError, CallResult, callback_result};
use bytes::Bytes;
use master_worker::{Context, Failure, Groups, RawWorker};
use std::ffi::{c_int, c_void};
use std::rc::Rc;

type Execute = unsafe extern "C" fn(
    *mut c_void,
    *const ContextHandle,
    *const c_void,
    usize,
    *mut Buffer,
) -> c_int;

/// The structure `sempa_worker` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Callbacks {
    size: usize,
    user: *mut c_void,
    groups: u64,
    init: Option<unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int>,
    execute: Option<Execute>,
}

impl Callbacks {
    pub(super) const NONE: Self = Self {
        size: size_of::<Self>(),
        user: std::ptr::null_mut(),
        groups: 0,
        init: None,
        execute: None,
    };

    #[cfg(test)]
    pub(super) fn layout_checks() -> String {
        crate::layout::layout_checks!("sempa_worker", Self, size user groups init execute)
    }

    /// Returns the groups to which the worker belongs.
    pub(super) fn groups(&self) -> Groups {
        memory::groups(self.groups)
    }
}

/// A worker whose callbacks are functions of a C program. The program promised with `sempa_worker`
/// that the callbacks may be called with its `user` until the worker ends.
pub(super) struct CWorker {
    callbacks: Callbacks,
    execute: Execute,
    handle: Rc<ContextHandle>,
}

impl CWorker {
    /// # Errors
    /// The callback `execute` is missing.
    pub(super) fn new(callbacks: Callbacks) -> CallResult<Self> {
        let missing = || CallError::argument("the worker needs the callback execute");
        Ok(Self {
            callbacks,
            execute: callbacks.execute.ok_or_else(missing)?,
            handle: Rc::default(),
        })
    }
}

impl RawWorker for CWorker {
    fn init(&mut self, data: Bytes) -> Result<(), Failure> {
        let Some(init) = self.callbacks.init else {
            return Ok(());
        };
        // SAFETY: by the promise of `CWorker`; the data live during the call.
        let code = unsafe { init(self.callbacks.user, address(&data), data.len()) };
        callback_result("init", code)
    }

    fn execute(&mut self, task: Bytes, context: &mut Context) -> Result<Bytes, Failure> {
        let mut result = Buffer::default();
        let (user, handle) = (self.callbacks.user, Rc::as_ptr(&self.handle));
        // SAFETY: by the promise of `CWorker`; task and buffer live during the call.
        let code = self.handle.with(context, || unsafe {
            (self.execute)(user, handle, address(&task), task.len(), &mut result)
        });
        callback_result("execute", code)?;
        Ok(result.into_bytes())
    }
}
