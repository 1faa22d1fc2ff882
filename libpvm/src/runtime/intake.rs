//! Processes messages while a request waits for its reply.

use super::{Core, Runtime};
use sempa_proto::PvmError;
use sempa_proto::task::{Reply, Request};
use std::time::Instant;

/// Processes the messages of the inbox, and must remove all of them from it.
pub type IntakeFn = fn(&Runtime);

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
        Self(self.0.clone(), intake)
    }

    /// As [`Runtime::request_and_wait`], but `on_messages` is called whenever messages arrive
    /// during the wait; `on_messages` must remove all messages from the inbox.
    pub(super) fn request_and_wait_with(
        &self,
        daemon_request: Request,
        on_messages: &mut dyn FnMut(),
    ) -> Reply {
        let connection_lost_reply = || Reply::Failed {
            error: PvmError::SysErr,
            reason: self.lost_reason(),
        };
        let Some(mut state) = self.lock() else {
            return connection_lost_reply();
        };
        let id = match state.core.send_request(daemon_request) {
            Ok(id) => id,
            Err(failure_reply) => return failure_reply,
        };
        state.write_outbox();
        drop(state);
        let reply = self.wait_and_process(None, &mut |core| core.take_reply(id), on_messages);
        // There is no deadline, so only the loss of the daemon ends the wait without a reply.
        reply.ok().flatten().unwrap_or_else(connection_lost_reply)
    }

    /// As [`Runtime::wait_for_core`], with the intake of this handle.
    pub(crate) fn wait_with_intake<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Core) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        match self.1 {
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
        on_messages: &mut dyn FnMut(),
    ) -> Result<Option<R>, PvmError> {
        loop {
            let event = self.wait_for_core(deadline, &mut |core| match f(core) {
                Some(value) => Some(WaitEvent::Ended(value)),
                None => (!core.inbox.is_empty()).then_some(WaitEvent::MessagesArrived),
            });
            match event? {
                Some(WaitEvent::Ended(value)) => return Ok(Some(value)),
                Some(WaitEvent::MessagesArrived) => on_messages(),
                None => return Ok(None),
            }
        }
    }
}
