//! Processes messages while a request waits for its reply.

use super::{Core, Runtime};
use sempa_proto::PvmError;
use sempa_proto::task::{Reply, Request};
use std::time::{Duration, Instant};

/// Processes the messages of the inbox: removes all of them and returns true. Returns false, and
/// leaves them there, while another thread has the right to process messages.
pub type IntakeFn = fn(&Runtime) -> bool;

/// Time between two attempts to process messages while another thread has the right to do so.
const INTAKE_RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// Event that ended a wait.
enum WaitEvent<R> {
    Ended(R),
    MessagesArrived,
}

impl Runtime {
    /// Returns another handle of this task. Each request of this handle calls `intake` whenever
    /// messages arrive while the request waits for its reply; `intake` gets a handle that does not
    /// do so. Without `intake` the messages stay in the inbox.
    #[must_use]
    pub fn with_intake(&self, intake: Option<IntakeFn>) -> Self {
        Self {
            inner: self.inner.clone(),
            intake,
        }
    }

    /// As [`Runtime::request_and_wait`], but `on_messages` is called whenever messages arrive
    /// during the wait. It behaves as an [`IntakeFn`].
    pub(super) fn request_and_wait_with(
        &self,
        daemon_request: Request,
        on_messages: &mut dyn FnMut() -> bool,
    ) -> Reply {
        let id = match self.begin_request(daemon_request) {
            Ok((_state, id)) => id,
            Err(failure_reply) => return failure_reply,
        };
        let reply = self.wait_and_process(None, &mut |core| core.take_reply(id), on_messages);
        // There is no deadline, so only the loss of the daemon ends the wait without a reply.
        reply
            .ok()
            .flatten()
            .unwrap_or_else(|| self.connection_lost_reply())
    }

    /// As [`Runtime::wait_for_core`], with the intake of this handle.
    pub(crate) fn wait_with_intake<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Core) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        match self.intake {
            None => self.wait_for_core(deadline, f),
            Some(intake) => {
                let plain_handle = self.with_intake(None);
                self.wait_and_process(deadline, f, &mut || intake(&plain_handle))
            }
        }
    }

    fn wait_and_process<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Core) -> Option<R>,
        on_messages: &mut dyn FnMut() -> bool,
    ) -> Result<Option<R>, PvmError> {
        loop {
            let event = self.wait_for_core(deadline, &mut |core| match f(core) {
                Some(value) => Some(WaitEvent::Ended(value)),
                None => (!core.inbox.is_empty()).then_some(WaitEvent::MessagesArrived),
            });
            match event? {
                Some(WaitEvent::Ended(value)) => return Ok(Some(value)),
                Some(WaitEvent::MessagesArrived) => {}
                None => return Ok(None),
            }
            if on_messages() {
                continue;
            }
            // The other thread may run code of the program that waits for this thread, so the
            // reply must end the wait although messages are in the inbox.
            let retry_time = Instant::now() + INTAKE_RETRY_INTERVAL;
            let wait_end = deadline.map_or(retry_time, |deadline| deadline.min(retry_time));
            if let Some(value) = self.wait_for_core(Some(wait_end), f)? {
                return Ok(Some(value));
            }
            if deadline.is_some_and(|deadline| deadline <= wait_end) {
                return Ok(None);
            }
        }
    }
}
