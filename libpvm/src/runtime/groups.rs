//! Client of the group service. A caller can process messages while its request waits for the
//! reply. When the task exits, the client ends all memberships of the task.

use super::Runtime;
use sempa_proto::PvmError;
use sempa_proto::group::GroupRequest;
use sempa_proto::task::{Reply, Request};
use std::sync::atomic::Ordering::Relaxed;

/// Event that ended a wait for a reply.
enum ReplyWaitEvent {
    ReplyArrived(Reply),
    MessagesArrived,
}

impl Runtime {
    /// Sends a request to the group service and waits for the reply, which may depend on other
    /// members. For `on_messages` see [`Runtime::request_and_wait_with`]; with `None` the messages
    /// stay in the inbox.
    pub fn group_request_and_wait(
        &self,
        request: GroupRequest,
        on_messages: Option<&mut dyn FnMut()>,
    ) -> Reply {
        self.0.has_used_groups.store(true, Relaxed);
        let daemon_request = Request::Group(request);
        match on_messages {
            Some(on_messages) => self.request_and_wait_with(daemon_request, on_messages),
            None => self.request_and_wait(daemon_request),
        }
    }

    /// As [`Runtime::request_and_wait`], but `on_messages` is called whenever messages arrive
    /// during the wait; `on_messages` must remove all messages from the inbox.
    pub fn request_and_wait_with(
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
        loop {
            let event = self.wait_for_core(None, &mut |core| match core.take_reply(id) {
                Some(reply) => Some(ReplyWaitEvent::ReplyArrived(reply)),
                None => (!core.inbox.is_empty()).then_some(ReplyWaitEvent::MessagesArrived),
            });
            match event {
                Ok(Some(ReplyWaitEvent::ReplyArrived(reply))) => return reply,
                Ok(Some(ReplyWaitEvent::MessagesArrived)) => on_messages(),
                // There is no deadline, so only the loss of the daemon ends the wait.
                Ok(None) | Err(_) => return connection_lost_reply(),
            }
        }
    }

    /// Ends this task's membership in all groups before the task exits, so that the group service
    /// does not count the exit as the death of a member.
    pub(super) fn leave_groups(&self) {
        if self.0.has_used_groups.swap(false, Relaxed) {
            // An error means that the connection to the daemon is lost; the loss has already ended
            // the memberships.
            self.request_and_wait(Request::Group(GroupRequest::LeaveAll));
        }
    }
}
