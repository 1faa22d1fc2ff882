//! Client of the group service. A caller can process messages while its request waits for the
//! reply. At exit, ends all memberships of the task.

use super::Runtime;
use sempa_proto::PvmError;
use sempa_proto::group::GroupRequest;
use sempa_proto::task::{Reply, Request};
use std::sync::atomic::Ordering::Relaxed;

/// Event that ended a wait for the group service.
enum GroupWaitEvent {
    Answer(Reply),
    Messages,
}

impl Runtime {
    /// Sends a request to the group service and waits for the reply, which may depend on other
    /// members. `on_messages` is called whenever messages arrive during the wait; it must remove
    /// all messages from the inbox. With `None` the messages stay in the inbox.
    pub fn group_request(
        &self,
        request: GroupRequest,
        on_messages: Option<&mut dyn FnMut()>,
    ) -> Reply {
        self.0.has_used_groups.store(true, Relaxed);
        let what = Request::Group(request);
        let Some(on_messages) = on_messages else {
            return self.request(what);
        };
        let lost = || Reply::Failed {
            error: PvmError::SysErr,
            reason: self.lost_reason(),
        };
        let Some(mut state) = self.lock() else {
            return lost();
        };
        let id = match state.core.send_request(what) {
            Ok(id) => id,
            Err(refused) => return refused,
        };
        state.write_outbox();
        drop(state);
        loop {
            let event = self.wait_for_core(None, &mut |core| match core.take_reply(id) {
                Some(reply) => Some(GroupWaitEvent::Answer(reply)),
                None => (!core.inbox.is_empty()).then_some(GroupWaitEvent::Messages),
            });
            match event {
                Ok(Some(GroupWaitEvent::Answer(reply))) => return reply,
                Ok(Some(GroupWaitEvent::Messages)) => on_messages(),
                // There is no deadline, so only the loss of the daemon ends the wait.
                Ok(None) | Err(_) => return lost(),
            }
        }
    }

    /// Ends this task's membership in all groups before the task exits, so that the group service
    /// does not count the exit as the death of a member.
    pub(super) fn leave_groups(&self) {
        if self.0.has_used_groups.swap(false, Relaxed) {
            // An error means that the daemon is lost, and that the memberships have ended with it.
            self.request(Request::Group(GroupRequest::LeaveAll));
        }
    }
}
