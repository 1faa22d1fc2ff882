//! Handoff of a task to a new process: the program is asked to exit and is started again, and the
//! new process continues the old one's links.
//!
//! 1. The daemon announces that the program will be asked to exit ([`Core::take_nothing`]). The old
//!    process sends its state: the position of each link, the unacknowledged fragments, and
//!    deferred notifications. After that the daemon passes it no messages.
//! 2. If the request is withdrawn, the old process accepts messages again.
//! 3. When the process exits later than the daemon expected, it reports that first
//!    ([`Core::begin_to_end`]).
//! 4. The new process takes over the links ([`Core::succeed`]). The daemon sends it the
//!    unacknowledged fragments of the old process ([`Core::take_back`]).

use super::Core;
use bytes::Bytes;
use sempa_proto::frame::{FrameError, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame};
use sempa_proto::task::{LinkMark, Successor, ToDaemon, Welcome};
use sempa_proto::{Message, Micros, MigrationId, RequestId};
use std::collections::VecDeque;

/// Watermark of an unread message: delivery waits for nothing.
const COME: u64 = 0;
/// Position of the number of predecessor processes in a request id, so that ids of different
/// processes never collide.
const REQUEST_BITS: u32 = 40;

/// Returns the incarnation of a new process and the id before its first request. Replies to
/// requests of a predecessor process do not match any id of the new process.
pub(super) fn beginning(welcome: &Welcome) -> (u16, RequestId) {
    let successor = welcome.successor.as_deref();
    (
        successor.map_or(0, |s| s.line),
        RequestId(successor.map_or(0, |s| u64::from(s.count) << REQUEST_BITS)),
    )
}

impl Core {
    /// Continues the links of the predecessor process.
    pub(super) fn succeed(&mut self, successor: &Successor) {
        for talk in &successor.talks {
            let mut link = Link::go_on(self.me, talk);
            link.handle(Micros(0), LinkEvent::RouteUp(self.route));
            self.links.insert(talk.peer, link);
            self.mark_busy(talk.peer);
            if talk.gone {
                self.gone.push_back(talk.peer);
            }
        }
    }

    /// Returns an unacknowledged fragment of the predecessor process to its link.
    pub(super) fn take_back(&mut self, now: Micros, frame: &LinkFrame) {
        if let Some(link) = self.links.get_mut(&frame.dst) {
            link.take_back(frame);
            self.pump_link(now, frame.dst);
        }
    }

    /// Handles the announcement that the program will be asked to exit for migration `by`: hands
    /// off the state, so that the daemon knows it completely. The program can still receive the
    /// messages that have arrived. With `None` the request was withdrawn.
    pub(super) fn take_nothing(&mut self, now: Micros, by: Option<MigrationId>) {
        if !self.is_connected() {
            return;
        }
        match by {
            Some(by) => self.tell_all(now, by),
            // The process is exiting, which cannot be undone.
            None if self.ends => {}
            None => {
                self.lifted = false;
                self.links.values_mut().for_each(Link::restore_window);
                let word = self
                    .parted
                    .take()
                    .map(|by| encode_control(&ToDaemon::TakesAgain { by }));
                self.outbox_words(word);
            }
        }
        self.news += 1;
    }

    /// Records that the process is exiting. Returns true if the daemon must be notified first with
    /// [`sempa_proto::task::Request::LastWords`]: the program was asked to exit before and exits
    /// late.
    pub(crate) fn begin_to_end(&mut self) -> bool {
        self.ends = true;
        self.was_asked && self.parted.is_none()
    }

    fn outbox_words(&mut self, words: impl IntoIterator<Item = Result<Bytes, FrameError>>) {
        words
            .into_iter()
            .flatten()
            .for_each(|word| self.outbox.push(word));
    }

    /// Returns the received messages and deferred notifications for the next process, in order. A
    /// program that is asked to exit receives the messages itself before it exits; a process that
    /// is exiting does not.
    fn unread(&mut self) -> Vec<(LinkMark, Message)> {
        let mut unread = VecDeque::new();
        if self.ends {
            self.inbox.take_all_into(&mut unread);
        }
        let come = |message: Message| {
            (
                LinkMark {
                    peer: message.src,
                    end: COME,
                },
                message,
            )
        };
        unread
            .into_iter()
            .map(come)
            .chain(std::mem::take(&mut self.held))
            .collect()
    }

    fn tell_all(&mut self, now: Micros, by: MigrationId) {
        (self.parted, self.was_asked) = (Some(by), true);
        self.end_rings(now);
        self.end_direct(now);
        self.lifted = true;
        self.route = self.route.next();
        let (mut talks, mut frames) = (Vec::new(), Vec::new());
        for link in self.links.values_mut() {
            // Fragments that went by other routes may still be in transit.
            link.handle(now, LinkEvent::RouteUp(self.route));
            let (talk, said) = link.part(now);
            talks.push(talk);
            frames.extend(said);
        }
        self.busy.clear();
        self.is_busy.clear();
        let parting = ToDaemon::Parting {
            by,
            line: self.line,
            talks,
            later: self.unread(),
        };
        let (Ok(first), Ok(last)) = (
            encode_control(&parting),
            encode_control(&ToDaemon::TakesNothing { by }),
        ) else {
            // The state is too large for a frame: nothing is handed off, and the program is not
            // asked to exit.
            if let ToDaemon::Parting { later, .. } = parting {
                later
                    .into_iter()
                    .for_each(|(mark, message)| match mark.end {
                        COME => self.inbox.push(message),
                        _ => self.held.push_back((mark, message)),
                    });
            }
            return;
        };
        self.outbox.push(first);
        for frame in &frames {
            self.outbox.push_link(frame);
        }
        self.outbox.push(last);
        let peers: Vec<_> = self.links.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.note_wakeup(peer));
    }
}
