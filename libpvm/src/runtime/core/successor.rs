//! What a library does whose program is about to be asked to end, to be started again; and what it does in the new process.

use super::Core;
use bytes::Bytes;
use sempa_proto::frame::{FrameError, encode_control};
use sempa_proto::link::{Link, LinkEvent, LinkFrame};
use sempa_proto::task::{LinkMark, Successor, ToDaemon, Welcome};
use sempa_proto::{Message, Micros, MigrationId, RequestId};
use std::collections::VecDeque;

/// The end of a mark that comes behind nothing.
const COME: u64 = 0;
/// Numbers of requests begin so many bits higher for each process that there was before.
const REQUEST_BITS: u32 = 40;

/// The timeline of a new process, and the number before that of its first request. Answers to what the process before it had
/// asked are not for it.
pub(super) fn beginning(welcome: &Welcome) -> (u16, RequestId) {
    let successor = welcome.successor.as_deref();
    (
        successor.map_or(0, |s| s.line),
        RequestId(successor.map_or(0, |s| u64::from(s.count) << REQUEST_BITS)),
    )
}

impl Core {
    /// Goes on with the conversations of the process before this one.
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

    /// What the process before this one had sent comes back.
    pub(super) fn take_back(&mut self, now: Micros, frame: &LinkFrame) {
        if let Some(link) = self.links.get_mut(&frame.dst) {
            link.take_back(frame);
            self.pump_link(now, frame.dst);
        }
    }

    /// The program is about to be asked to end, for this move: from now on nothing goes by the daemon that knows where all
    /// stands. What the library has got so far the program can receive. Or it is not asked any more.
    pub(super) fn take_nothing(&mut self, now: Micros, by: Option<MigrationId>) {
        if !self.is_connected() {
            return;
        }
        match by {
            Some(by) => self.tell_all(now, by),
            // Its end has begun, and nobody can call it off.
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

    /// The process ends. True if its daemon has to hear of that first, by [`sempa_proto::task::Request::LastWords`]: the program was asked to end
    /// once, and has been late.
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

    /// What the next process is to get of what has come here, in its order. A program that is asked to end takes what has come
    /// before it does; one whose end has begun takes nothing any more.
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
            // What came by other ways may be on its way still.
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
            // Too much for a frame: nothing is said, and the program is not asked.
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
