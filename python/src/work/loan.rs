//! Values that a callback lends to Python code: the run of a driver, the context of a worker. The
//! Python object is useless as soon as the callback has returned.
#![allow(unsafe_code)] // A Python object cannot have the lifetime of a callback's reference.

use crate::enrolled::lock;
use master_worker::{Context, Run};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::thread::{self, ThreadId};

/// The run of a driver, during a callback. Any thread may use the run while the callback waits for
/// the Python code, as coroutines of a driver do.
#[derive(Default)]
pub(crate) struct RunLoan(Mutex<Option<LentRun>>);

struct LentRun(NonNull<Run>);

/// Fails to compile if a run may not be used by another thread.
const fn require_send<T: Send>() {}
const _: () = require_send::<Run>();

// SAFETY: the pointer stands for an exclusive reference to a `Run`, which is `Send`.
unsafe impl Send for LentRun {}

/// Ends a loan, also if the Python code panics.
struct EndOfLoan<'a, T>(&'a Mutex<Option<T>>);

impl<T> Drop for EndOfLoan<'_, T> {
    fn drop(&mut self) {
        *lock(self.0) = None;
    }
}

impl RunLoan {
    /// Calls `f` while Python code may use `run`.
    pub(crate) fn lend<R>(&self, run: &mut Run, f: impl FnOnce() -> R) -> R {
        *lock(&self.0) = Some(LentRun(NonNull::from(run)));
        let _end = EndOfLoan(&self.0);
        f()
    }

    /// Calls `f` with the run; returns `None` if no callback lends a run. `f` must not call Python.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&mut Run) -> R) -> Option<R> {
        let mut guard = lock(&self.0);
        let lent = guard.as_mut()?;
        // SAFETY: `lend` has an exclusive reference and does not use it before the loan has ended,
        // which needs the lock that `guard` holds. The lock excludes all other users.
        Some(f(unsafe { lent.0.as_mut() }))
    }
}

/// The context of a worker while a task is executed. Only the thread of the task may use it.
#[derive(Default)]
pub(crate) struct ContextLoan(Mutex<Option<LentContext>>);

struct LentContext {
    /// The lifetime is that of the loan; no type can express this.
    context: NonNull<Context<'static>>,
    owner: ThreadId,
}

// SAFETY: the pointer is dereferenced only in the thread `owner`, which has lent the context.
unsafe impl Send for LentContext {}

/// Reason why a context cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoanError {
    /// The task is not executed any more.
    Ended,
    OtherThread,
}

impl ContextLoan {
    /// Calls `f` while Python code may use `context`.
    pub(crate) fn lend<R>(&self, context: &mut Context<'_>, f: impl FnOnce() -> R) -> R {
        *lock(&self.0) = Some(LentContext {
            context: NonNull::from(context).cast(),
            owner: thread::current().id(),
        });
        let _end = EndOfLoan(&self.0);
        f()
    }

    /// Calls `f` with the context. `f` must not call Python.
    ///
    /// # Errors
    /// The task is not executed any more, or the calling thread is not that of the task.
    pub(crate) fn with<R>(
        &self,
        f: impl for<'a> FnOnce(&'a mut Context<'a>) -> R,
    ) -> Result<R, LoanError> {
        let mut guard = lock(&self.0);
        let lent = guard.as_mut().ok_or(LoanError::Ended)?;
        if lent.owner != thread::current().id() {
            return Err(LoanError::OtherThread);
        }
        // SAFETY: `lend` has an exclusive reference and does not use it before the loan has ended,
        // which needs the lock that `guard` holds. `f` accepts every lifetime, so `f` keeps no
        // reference from the context, and the thread is that of `lend`.
        Ok(f(unsafe { lent.context.as_mut() }))
    }
}
