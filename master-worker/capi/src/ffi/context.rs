//! `sempa_context`: what a worker does while it executes a task.

#![allow(
    unsafe_code,
    reason = "C programs pass pointers, and the names are exported"
)]

use super::memory;
use crate::abi;
use crate::errors::{CallError, CallResult, NONE, OK, guard};
use bytes::Bytes;
use master_worker::Context;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};

/// The connection of an executing task. The pointer is null while no task is executed.
#[derive(Debug)]
pub(super) struct ContextHandle {
    /// A pointer to a [`Context`], whose lifetime the type cannot express.
    context: Cell<*mut c_void>,
    /// The newest update, which the program may read until the next call.
    update: RefCell<Bytes>,
}

impl Default for ContextHandle {
    fn default() -> Self {
        Self {
            context: Cell::new(std::ptr::null_mut()),
            update: RefCell::default(),
        }
    }
}

impl ContextHandle {
    /// Calls `f` while the handle stands for `context`.
    pub(super) fn with<R>(&self, context: &mut Context, f: impl FnOnce() -> R) -> R {
        let outer_context = self.context.replace(std::ptr::from_mut(context).cast());
        let result = f();
        self.context.set(outer_context);
        self.update.replace(Bytes::new());
        result
    }
}

/// Calls `f` with the connection behind a handle.
///
/// # Safety
/// `handle` is null or the handle that a callback of the present worker has got, in its thread.
unsafe fn with_context(
    handle: *const ContextHandle,
    f: impl FnOnce(&mut Context<'_>, &ContextHandle) -> CallResult<i32>,
) -> c_int {
    guard(|| {
        // SAFETY: by this function's contract.
        let handle = unsafe { handle.as_ref() };
        let handle = handle.ok_or_else(|| CallError::argument("context is NULL"))?;
        let context = handle.context.replace(std::ptr::null_mut());
        // SAFETY: the pointer is null or comes from the exclusive reference of an `execute` that
        // waits for the program. The handle is of no use during this call, so no second reference
        // exists.
        let result = match unsafe { context.cast::<Context<'_>>().as_mut() } {
            Some(context) => f(context, handle),
            None => Err(CallError::state("context")),
        };
        handle.context.set(context);
        result
    })
}

/// # Safety
/// As [`with_context`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_task(context: *const ContextHandle) -> u64 {
    let mut task = 0;
    let get = |context: &mut Context<'_>, _: &ContextHandle| {
        task = context.task().0;
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, get) };
    task
}

/// # Safety
/// As [`with_context`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_attempt(context: *const ContextHandle) -> u64 {
    let mut attempt = 0;
    let get = |context: &mut Context<'_>, _: &ContextHandle| {
        attempt = context.attempt().0;
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, get) };
    attempt
}

/// # Safety
/// As [`with_context`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_poll(context: *const ContextHandle) -> c_int {
    let poll = |context: &mut Context<'_>, _: &ContextHandle| {
        context.poll().map_err(CallError::vm)?;
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, poll) }
}

/// # Safety
/// As [`with_context`]; `data` and `length` are null or valid for a write.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_update(
    context: *const ContextHandle,
    data: *mut *const c_void,
    length: *mut usize,
) -> c_int {
    let get = |context: &mut Context<'_>, handle: &ContextHandle| {
        let Some(update) = context.update().map_err(CallError::vm)? else {
            return Ok(NONE);
        };
        // SAFETY: by this function's contract. The bytes do not move when the handle keeps them.
        unsafe {
            memory::store(data, memory::address(&update));
            memory::store(length, update.len());
        }
        handle.update.replace(update);
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, get) }
}

/// # Safety
/// As [`with_context`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_is_canceled(context: *const ContextHandle) -> c_int {
    let get = |context: &mut Context<'_>, _: &ContextHandle| {
        Ok(context.is_canceled().map_err(CallError::vm)?.into())
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, get) }
}

/// # Safety
/// As [`with_context`].
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_is_time_over(context: *const ContextHandle) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { with_context(context, |context, _| Ok(context.is_time_over().into())) }
}

/// # Safety
/// As [`with_context`]; `task` is null or valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_return_task(
    context: *const ContextHandle,
    task: *const abi::Task,
) -> c_int {
    let add = |context: &mut Context<'_>, _: &ContextHandle| {
        // SAFETY: by this function's contract.
        let task = unsafe { task.as_ref() };
        let task = task.ok_or_else(|| CallError::argument("task is NULL"))?;
        // SAFETY: by this function's contract.
        context.return_task(unsafe { memory::raw_task(task)? });
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, add) }
}

/// # Safety
/// As [`with_context`]; `data` has `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_context_send_partial(
    context: *const ContextHandle,
    data: *const c_void,
    length: usize,
) -> c_int {
    let send = |context: &mut Context<'_>, _: &ContextHandle| {
        // SAFETY: by this function's contract.
        let data = unsafe { memory::bytes("data", data, length)? };
        let sent = context.send_partial(data.to_vec().into());
        sent.map_err(CallError::vm)?;
        Ok(OK)
    };
    // SAFETY: by this function's contract.
    unsafe { with_context(context, send) }
}
