//! The way to the group service: waiting for its answer while messages are taken in, and leaving in good order.

use super::Runtime;
use sempa_proto::PvmError;
use sempa_proto::group::GroupRequest;
use sempa_proto::task::{Reply, Request};
use std::sync::atomic::Ordering::Relaxed;

/// What a wait for an answer ended with.
enum News {
    Answer(Reply),
    Messages,
}

impl Runtime {
    /// Asks the group service and waits for its answer, which may take as long as other members take. `arrived` is called
    /// whenever messages have come meanwhile and must take them all out of the inbox; `None`: they stay there.
    pub fn group_request(&self, request: GroupRequest, arrived: Option<&mut dyn FnMut()>) -> Reply {
        self.0.grouped.store(true, Relaxed);
        let what = Request::Group(request);
        let Some(arrived) = arrived else {
            return self.request(what);
        };
        let lost = || Reply::Failed {
            error: PvmError::SysErr,
            reason: self.why_lost(),
        };
        let Some(mut state) = self.lock() else {
            return lost();
        };
        let id = match state.core.ask(what) {
            Ok(id) => id,
            Err(refused) => return refused,
        };
        state.flush();
        drop(state);
        loop {
            let news = self.core_wait(None, &mut |core| match core.take_reply(id) {
                Some(reply) => Some(News::Answer(reply)),
                None => (!core.inbox.is_empty()).then_some(News::Messages),
            });
            match news {
                Ok(Some(News::Answer(reply))) => return reply,
                Ok(Some(News::Messages)) => arrived(),
                // There is no deadline, so only the loss of the daemon ends the wait.
                Ok(None) | Err(_) => return lost(),
            }
        }
    }

    /// A task that leaves the virtual machine leaves its groups first: it has not died in them.
    pub(super) fn leave_groups(&self) {
        if self.0.grouped.swap(false, Relaxed) {
            // Without a daemon there is no group to leave.
            self.request(Request::Group(GroupRequest::LeaveAll));
        }
    }
}
