//! Deferred deliveries: a notification of a task's end is delivered after the last messages of that
//! task.
//!
//! The daemon sends with such a notification a watermark: the sequence number up to which the ended
//! task had sent. The notification is held back until the link has received everything below the
//! watermark.

use super::{Core, HELD_MAX};
use sempa_proto::Message;
use sempa_proto::task::LinkMark;
use sempa_proto::{Micros, Tid};

impl Core {
    fn has_come(&self, mark: LinkMark) -> bool {
        // A direct connection delivers everything before it ends, and the daemon does not know how
        // much that is.
        if self.direct.leads_to(mark.peer) {
            return false;
        }
        match self.links.get(&mark.peer) {
            Some(link) => link.is_gone() || link.expected() >= mark.end,
            None => mark.end <= 1,
        }
    }

    /// Handles a message from a daemon: delivers it immediately, or defers it until the messages
    /// below the watermark `after` have arrived.
    pub(super) fn take_delivery(&mut self, now: Micros, message: Message, after: Option<LinkMark>) {
        // The watermark counts what the daemon carried, so the ring must be read first.
        if let Some(mark) = after {
            self.drain_peer(now, mark.peer);
        }
        match after {
            Some(mark) if mark.peer != self.me && !self.has_come(mark) => {
                self.held.push_back((mark, message));
                if self.held.len() > HELD_MAX {
                    let (_, oldest) = self.held.pop_front().expect("just seen");
                    self.deliver(oldest);
                }
            }
            _ => self.deliver(message),
        }
    }

    /// Delivers the notifications whose watermark for this peer has been reached.
    pub(in crate::runtime) fn release_held(&mut self, peer: Tid) {
        if !self.held.iter().any(|(mark, _)| mark.peer == peer) {
            return;
        }
        for (mark, message) in std::mem::take(&mut self.held) {
            if mark.peer == peer && self.has_come(mark) {
                self.deliver(message);
            } else {
                self.held.push_back((mark, message));
            }
        }
    }
}
