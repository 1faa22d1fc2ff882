//! What comes from daemons behind the last messages of a task: a notification of its end waits for them.

use super::{Core, HELD_MAX};
use sempa_proto::Message;
use sempa_proto::task::LinkMark;
use sempa_proto::{Micros, Tid};

impl Core {
    fn has_come(&self, mark: LinkMark) -> bool {
        // A connection of their own brings everything before it ends, and the daemon cannot know how much that is.
        if self.direct.leads_to(mark.peer) {
            return false;
        }
        match self.links.get(&mark.peer) {
            Some(link) => link.is_gone() || link.expected() >= mark.end,
            None => mark.end <= 1,
        }
    }

    /// Something from a daemon: handed over at once, or when the messages are there that it has to come behind.
    pub(super) fn take_delivery(&mut self, now: Micros, message: Message, after: Option<LinkMark>) {
        // The daemon knows how far it carried, not how far the rings did.
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

    /// Hands over what waited for messages of this peer, as far as they are there.
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
