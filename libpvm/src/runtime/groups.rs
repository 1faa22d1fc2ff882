//! Client of the group service. A caller can process messages while its request waits for the
//! reply. When the task exits, the client ends all memberships of the task.

use super::Runtime;
use sempa_proto::group::GroupRequest;
use sempa_proto::task::{Reply, Request};
use std::sync::atomic::Ordering::Relaxed;

impl Runtime {
    /// Sends a request to the group service and waits for the reply, which may depend on other
    /// members. `on_messages` is called whenever messages arrive during the wait, and behaves as an
    /// [`IntakeFn`](super::IntakeFn); with `None` the messages stay in the inbox.
    pub fn group_request_and_wait(
        &self,
        request: GroupRequest,
        on_messages: Option<&mut dyn FnMut() -> bool>,
    ) -> Reply {
        self.inner.has_used_groups.store(true, Relaxed);
        let daemon_request = Request::Group(request);
        match on_messages {
            Some(on_messages) => self.request_and_wait_with(daemon_request, on_messages),
            None => self.request_and_wait(daemon_request),
        }
    }

    /// Ends this task's membership in all groups before the task exits, so that the group service
    /// does not count the exit as the death of a member.
    pub(super) fn leave_groups(&self) {
        if self.inner.has_used_groups.swap(false, Relaxed) {
            // An error means that the connection to the daemon is lost; the loss has already ended
            // the memberships.
            self.request_and_wait(Request::Group(GroupRequest::LeaveAll));
        }
    }
}
