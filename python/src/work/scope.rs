//! Values that Python code may use during a callback: the run of a driver, the context of a worker.
//! The Python object is useless as soon as the callback has returned.
#![allow(unsafe_code)] // A Python object cannot have the lifetime of a callback's reference.

use crate::enrolled::lock;
use master_worker::{Context, Run};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::thread::{self, ThreadId};

/// The run of a driver, during a callback. Any thread may use the run while the callback waits for
/// the Python code, as coroutines of a driver do.
#[derive(Default)]
pub(crate) struct RunScope(Mutex<Option<ScopedRun>>);

struct ScopedRun(NonNull<Run>);

/// Fails to compile if a run may not be used by another thread.
const fn require_send<T: Send>() {}
const _: () = require_send::<Run>();

// SAFETY: the pointer stands for an exclusive reference to a `Run`, which is `Send`.
unsafe impl Send for ScopedRun {}

/// Ends a scope, also if the code within panics.
struct EndOfScope<'a, T>(&'a Mutex<Option<T>>);

impl<T> Drop for EndOfScope<'_, T> {
    fn drop(&mut self) {
        *lock(self.0) = None;
    }
}

impl RunScope {
    /// Calls `f` while Python code may use `run`.
    pub(crate) fn enter<R>(&self, run: &mut Run, f: impl FnOnce() -> R) -> R {
        *lock(&self.0) = Some(ScopedRun(NonNull::from(run)));
        let _end = EndOfScope(&self.0);
        f()
    }

    /// Calls `f` with the run; returns `None` outside of callbacks. `f` must not call Python.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Run) -> R) -> Option<R> {
        let mut guard = lock(&self.0);
        let scoped = guard.as_mut()?;
        // SAFETY: `enter` has an exclusive reference and does not use it before the scope has
        // ended, which needs the lock that `guard` holds. The lock excludes all other users.
        Some(f(unsafe { scoped.0.as_mut() }))
    }
}

/// The context of a worker while a task is executed. Only the thread of the task may use it.
#[derive(Default)]
pub(crate) struct ContextScope(Mutex<Option<ScopedContext>>);

struct ScopedContext {
    /// The lifetime is that of the scope; no type can express this.
    context: NonNull<Context<'static>>,
    owner: ThreadId,
}

// SAFETY: the pointer is dereferenced only in the thread `owner`, which has entered the scope.
unsafe impl Send for ScopedContext {}

/// Reason why a context cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScopeError {
    /// The task is not executed any more.
    Ended,
    OtherThread,
}

impl ContextScope {
    /// Calls `f` while Python code may use `context`.
    pub(crate) fn enter<R>(&self, context: &mut Context<'_>, f: impl FnOnce() -> R) -> R {
        *lock(&self.0) = Some(ScopedContext {
            context: NonNull::from(context).cast(),
            owner: thread::current().id(),
        });
        let _end = EndOfScope(&self.0);
        f()
    }

    /// Calls `f` with the context. `f` must not call Python.
    ///
    /// # Errors
    /// The task is not executed any more, or the calling thread is not that of the task.
    pub(crate) fn with<R>(
        &self,
        f: impl for<'a> FnOnce(&'a mut Context<'a>) -> R,
    ) -> Result<R, ScopeError> {
        let mut guard = lock(&self.0);
        let scoped = guard.as_mut().ok_or(ScopeError::Ended)?;
        if scoped.owner != thread::current().id() {
            return Err(ScopeError::OtherThread);
        }
        // SAFETY: `enter` has an exclusive reference and does not use it before the scope has
        // ended, which needs the lock that `guard` holds. `f` accepts every lifetime, so `f`
        // keeps no reference from the context, and the thread is that of `enter`.
        Ok(f(unsafe { scoped.context.as_mut() }))
    }
}
