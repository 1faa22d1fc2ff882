//! This process as a task, as all Python objects of one [`Vm`] share it.

use crate::arrivals::Arrivals;
use crate::{errors, waits};
use libpvm::proto::message::{CTX_BASE, Message};
use libpvm::{Error, Inbox, Match, Runtime, Vm};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use sempa_proto::PvmError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Subscription to the event log. A task can subscribe, but the virtual machine has no request that
/// ends a subscription.
#[derive(Clone, Copy, Debug, Default)]
enum EventSubscription {
    #[default]
    None,
    /// A stream reads the events, which have this message context.
    Followed(i32),
    /// No stream reads the events: they are dropped.
    Unread(i32),
}

/// The enrolled task and the state that its Python objects share.
#[derive(Debug)]
pub(crate) struct Enrolled {
    vm: Vm,
    arrivals: Mutex<Option<Arc<Arrivals>>>,
    event_subscription: Mutex<EventSubscription>,
    /// True from the call of exit() on, so that errors say so.
    is_leaving: AtomicBool,
}

impl Enrolled {
    pub(crate) fn new(vm: Vm) -> Self {
        Self {
            vm,
            arrivals: Mutex::default(),
            event_subscription: Mutex::default(),
            is_leaving: AtomicBool::new(false),
        }
    }

    pub(crate) fn vm(&self) -> &Vm {
        &self.vm
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        self.vm.runtime()
    }

    /// Returns the watcher for asyncio. The first call starts its thread.
    ///
    /// # Errors
    /// `OSError` if the system starts no thread.
    pub(crate) fn arrivals(&self) -> PyResult<Arc<Arrivals>> {
        let mut arrivals = lock(&self.arrivals);
        if let Some(arrivals) = &*arrivals {
            return Ok(arrivals.clone());
        }
        let new_arrivals = Arrivals::start(self.runtime())?;
        *arrivals = Some(new_arrivals.clone());
        Ok(new_arrivals)
    }

    /// Runs a short request without the interpreter's lock.
    ///
    /// # Errors
    /// The exception for the error of the request.
    pub(crate) fn request<T: Send>(
        &self,
        py: Python<'_>,
        request: impl FnOnce(&Vm) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| request(&self.vm))
            .map_err(|error| self.exception(py, error))
    }

    /// Runs a request that may wait for other tasks ([`waits::run_request`]).
    ///
    /// # Errors
    /// The exception for the error of the request, or the exception of a signal handler.
    pub(crate) fn long_request<T: Send + 'static>(
        &self,
        py: Python<'_>,
        request: impl FnOnce(&Vm) -> Result<T, Error> + Send + 'static,
    ) -> PyResult<T> {
        let vm = self.vm.clone();
        waits::run_request(py, move || request(&vm))?.map_err(|error| self.exception(py, error))
    }

    /// Waits for a selected message. Returns `None` when the deadline expires.
    ///
    /// # Errors
    /// `NotEnrolledError` if the connection to the daemon is lost and no such message has arrived,
    /// or the exception of a signal handler.
    pub(crate) fn receive(
        &self,
        py: Python<'_>,
        selection: Match,
        deadline: Option<Instant>,
    ) -> PyResult<Option<Message>> {
        self.drop_unread_events();
        let mut take_message = |inbox: &mut Inbox| inbox.take_first(|m| selection.matches(m));
        let convert_error = |py: Python<'_>, code: PvmError| self.exception(py, code.into());
        waits::wait_in_slices(py, deadline, convert_error, |wait_end| {
            self.runtime()
                .wait_for_inbox(Some(wait_end), &mut take_message)
        })
    }

    /// Returns the first selected message, or `None` if no such message has arrived.
    ///
    /// # Errors
    /// As [`Enrolled::receive`].
    pub(crate) fn try_receive(
        &self,
        py: Python<'_>,
        selection: Match,
    ) -> PyResult<Option<Message>> {
        self.drop_unread_events();
        self.request(py, |vm| vm.try_recv(selection))
    }

    /// Returns the exception for an error. The loss of the connection is reported with its reason.
    pub(crate) fn exception(&self, py: Python<'_>, mut error: Error) -> PyErr {
        if error.code == PvmError::SysErr {
            let lost_reason = self.runtime().lost_reason();
            if self.is_leaving.load(Ordering::Relaxed) {
                // The daemon may close the connection before the exit is over.
                error.reason = "this task has left the virtual machine".into();
            } else if !lost_reason.is_empty() {
                error.reason = error.reason.replace(error.code.text(), &lost_reason);
            }
        }
        errors::from_error(py, &error)
    }

    /// Leaves the virtual machine.
    ///
    /// # Errors
    /// `NotEnrolledError` if the connection was lost before.
    pub(crate) fn exit(&self, py: Python<'_>) -> PyResult<()> {
        if self.runtime().is_connected() {
            self.is_leaving.store(true, Ordering::Relaxed);
        }
        self.long_request(py, Vm::exit)
    }

    /// Subscribes to the event log for one stream. `new_context` returns an unused message context.
    /// Returns the context of the event messages.
    ///
    /// # Errors
    /// `Already` if another stream reads the events, or the error of a request.
    pub(crate) fn follow_events(
        &self,
        new_context: impl FnOnce() -> Result<i32, Error>,
    ) -> Result<i32, Error> {
        let mut subscription = lock(&self.event_subscription);
        let ctx = match *subscription {
            EventSubscription::Followed(_) => {
                return Err(Error::new(
                    PvmError::Already,
                    "this task already follows the event log: close the first event stream",
                ));
            }
            EventSubscription::Unread(ctx) => {
                self.drop_messages_in(ctx);
                ctx
            }
            EventSubscription::None => {
                let ctx = new_context()?;
                self.vm.subscribe_events(ctx, EVENT_TAG)?;
                ctx
            }
        };
        *subscription = EventSubscription::Followed(ctx);
        Ok(ctx)
    }

    /// Ends the use of the subscription by a stream. Further events are dropped.
    pub(crate) fn stop_following_events(&self) {
        let mut subscription = lock(&self.event_subscription);
        if let EventSubscription::Followed(ctx) = *subscription {
            *subscription = EventSubscription::Unread(ctx);
            self.drop_messages_in(ctx);
        }
    }

    fn drop_unread_events(&self) {
        if let EventSubscription::Unread(ctx) = *lock(&self.event_subscription) {
            self.drop_messages_in(ctx);
        }
    }

    fn drop_messages_in(&self, ctx: i32) {
        let mut take_message = |inbox: &mut Inbox| inbox.take_first(|message| message.ctx == ctx);
        while self.runtime().check_inbox(&mut take_message).is_some() {}
    }
}

impl Drop for Enrolled {
    fn drop(&mut self) {
        if let Some(arrivals) = lock(&self.arrivals).take() {
            arrivals.stop();
        }
    }
}

/// Tag of the messages with events.
pub(crate) const EVENT_TAG: i32 = 1;

/// Locks a mutex. A panic of another thread does not make the value unusable.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the selection of messages between programs, which use the base context.
///
/// # Errors
/// `ValueError` for a negative tag.
pub(crate) fn selection(src: Option<sempa_proto::Tid>, tag: Option<i32>) -> PyResult<Match> {
    tag.map(check_tag).transpose()?;
    let ctx = Some(CTX_BASE);
    Ok(Match { src, tag, ctx })
}

/// Checks the tag of a message. The library uses negative tags.
///
/// # Errors
/// `ValueError` for a negative tag.
pub(crate) fn check_tag(tag: i32) -> PyResult<()> {
    if tag < 0 {
        return Err(PyValueError::new_err(format!(
            "the tag {tag} is negative; use a tag from 0 to {}, or None for any tag",
            i32::MAX
        )));
    }
    Ok(())
}
