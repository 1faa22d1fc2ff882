//! Handoff of a link from a process that has ended to the process that replaces it in the same
//! task.
//!
//! 1. The old process records the state of each link as a [`Talk`] and repeats all unacknowledged
//!    frames to its daemon. The daemon keeps them, with everything that the process sends
//!    afterwards.
//! 2. The new process receives both and continues the link as if it were the old one. The peer
//!    notices nothing.

use super::{Body, FRAGMENT_BYTES_MAX, Link, LinkFrame, LinkKind, Retained, SMALL_BYTES_MAX};
use crate::ids::{Micros, Tid};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// State of one end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Talk {
    pub peer: Tid,
    /// Incarnation of the link.
    pub line: u16,
    /// Number of the next fragment expected from the peer.
    pub expected: u64,
    /// Number of the first fragment that the old process repeated.
    pub first: u64,
    /// Number after the last repeated fragment.
    pub end: u64,
    pub gone: bool,
}

impl Talk {
    /// Creates the state of a link on which nothing was sent.
    pub fn new(peer: Tid, line: u16) -> Talk {
        Talk {
            peer,
            line,
            expected: 1,
            first: 1,
            end: 1,
            gone: false,
        }
    }
}

/// Reassembles the messages of the previous process from the frames that the daemon returns.
#[derive(Clone, Debug)]
pub(super) struct Back {
    next: u64,
    end: u64,
    first: u64,
    part: Vec<u8>,
    /// Set if the link was reset since then; returned frames still carry their old numbers.
    anew: Option<Anew>,
}

/// State of a link that was reset before all messages had returned.
#[derive(Clone, Copy, Debug)]
struct Anew {
    /// All fragments below were acknowledged before the reset.
    acked: u64,
    /// Number of returned messages at the front of the retained queue. Messages sent since then
    /// follow them.
    placed: usize,
}

impl Back {
    /// Records that the link is about to be reset. The retained messages still have their old
    /// numbers, unless an earlier reset changed them.
    pub(super) fn begin_anew(&mut self, acked: u64, retained: &VecDeque<Retained>) {
        let placed = retained.partition_point(|message| message.first_seq < self.first);
        self.anew.get_or_insert(Anew { acked, placed });
    }

    /// True if the link was reset since the handoff.
    pub(super) fn is_anew(&self) -> bool {
        self.anew.is_some()
    }

    /// Returns the index in the retained queue for a returned message with these numbers; messages
    /// sent since then follow it. `None` if the message was acknowledged: in the current
    /// incarnation all fragments below `acked` are.
    fn place(
        &mut self,
        (first, end): (u64, u64),
        acked: u64,
        retained: &VecDeque<Retained>,
    ) -> Option<usize> {
        if end <= self.anew.map_or(acked, |anew| anew.acked) {
            return None;
        }
        let Some(anew) = &mut self.anew else {
            return Some(retained.partition_point(|other| other.first_seq < first));
        };
        anew.placed += 1;
        Some(anew.placed - 1)
    }
}

impl Link {
    /// Records the state of this end and returns it with all frames that the next process needs, in
    /// order: a partial message from the peer as it arrived, and all frames that the peer has not
    /// acknowledged.
    ///
    /// From now on this end transmits without regard to the window. The returned frames count as
    /// transmitted.
    pub fn part(&mut self, now: Micros) -> (Talk, Vec<LinkFrame>) {
        let half = self.rx.partial.len().div_ceil(FRAGMENT_BYTES_MAX) as u64;
        let first = self
            .tx
            .retained
            .front()
            .map_or(self.tx.end, |message| message.first_seq);
        let expected = self.rx.expected - half;
        let talk = Talk {
            peer: self.peer,
            line: self.line,
            expected,
            first,
            end: first,
            gone: self.gone,
        };
        let (line, ack) = (self.line, self.rx.expected);
        let mut frames = Vec::new();
        for (piece, seq) in self.rx.partial.chunks(FRAGMENT_BYTES_MAX).zip(expected..) {
            let (kind, payload) = (
                LinkKind::Data { last: false },
                Bytes::copy_from_slice(piece),
            );
            frames.push(LinkFrame {
                src: self.peer,
                dst: self.local,
                kind,
                seq,
                ack: 1,
                line,
                payload,
            });
        }
        for message in &self.tx.retained {
            for seq in (message.first_seq..message.end_seq()).take_while(|seq| *seq < self.tx.next)
            {
                let (head, body) = message.fragment(seq);
                let (kind, payload) = (
                    LinkKind::Data {
                        last: seq + 1 == message.end_seq(),
                    },
                    [head, body].concat().into(),
                );
                frames.push(LinkFrame {
                    src: self.local,
                    dst: self.peer,
                    kind,
                    seq,
                    ack,
                    line,
                    payload,
                });
            }
        }
        self.lift_window();
        while let Some(frame) = self.next_frame(now) {
            frames.push(frame.to_frame());
        }
        (talk, frames)
    }

    /// Obeys the window again after [`Link::lift_window`].
    pub fn restore_window(&mut self) {
        self.tx.unlimited = false;
    }

    /// Creates the link of a new process that continues from the old process's state. It transmits
    /// nothing before all frames of the old process have returned ([`Link::take_back`]).
    pub fn go_on(local: Tid, talk: &Talk) -> Link {
        let mut link = Link::new(local, talk.peer);
        (link.line, link.gone, link.rx.expected) = (talk.line, talk.gone, talk.expected);
        let tx = &mut link.tx;
        (tx.acked, tx.next, tx.fresh, tx.end) = (talk.first, talk.first, talk.end, talk.end);
        if talk.gone {
            (tx.acked, tx.next) = (talk.end, talk.end);
        } else if talk.first < talk.end {
            tx.back = Some(Box::new(Back {
                next: talk.first,
                end: talk.end,
                first: talk.first,
                part: Vec::new(),
                anew: None,
            }));
        }
        link
    }

    /// Processes a returned frame that the previous process had sent.
    pub fn take_back(&mut self, frame: &LinkFrame) {
        let LinkKind::Data { last } = frame.kind else {
            return;
        };
        let tx = &mut self.tx;
        let Some(back) = tx.back.as_mut().filter(|back| back.next == frame.seq) else {
            return;
        };
        back.next += 1;
        back.part.extend_from_slice(&frame.payload);
        if last {
            let (seq, bytes) = (back.first, std::mem::take(&mut back.part));
            back.first = back.next;
            if let Some(place) = back.place((seq, back.next), tx.acked, &tx.retained) {
                let body = if bytes.len() <= SMALL_BYTES_MAX {
                    Body::copy(&bytes)
                } else {
                    Body::Large(bytes.into())
                };
                let message = Retained::new(seq, &[], body);
                tx.retained_bytes += message.len();
                tx.retained.insert(place, message);
            }
        }
        if back.next >= back.end && tx.back.take().is_some_and(|back| back.is_anew()) {
            tx.number_anew();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LinkEvent, WINDOW_BYTES_MAX};
    use super::*;
    use crate::ids::RouteId;

    const NOW: Micros = Micros(0);

    fn tid(n: u32) -> Tid {
        Tid::task(crate::HostId::MASTER, n).expect("good")
    }

    fn pair() -> [Link; 2] {
        let mut links = [Link::new(tid(1), tid(2)), Link::new(tid(2), tid(1))];
        links
            .iter_mut()
            .for_each(|link| link.handle(NOW, LinkEvent::RouteUp(RouteId(1))));
        links
    }

    fn frames(link: &mut Link) -> Vec<LinkFrame> {
        std::iter::from_fn(|| link.next_frame(NOW).map(|frame| frame.to_frame())).collect()
    }

    fn give(to: &mut Link, frames: &[LinkFrame]) {
        frames
            .iter()
            .for_each(|frame| to.handle(NOW, LinkEvent::Frame(frame.clone())));
    }

    fn messages(link: &mut Link) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| link.take_message())
            .map(|message| message.to_vec())
            .collect()
    }

    /// Queues three messages, the second of which has three fragments; returns their contents.
    fn say_three(link: &mut Link) -> [Vec<u8>; 3] {
        let big = vec![7; FRAGMENT_BYTES_MAX * 2 + 5];
        link.send([1], Bytes::from_static(b"a")).expect("queued");
        link.send([2, 3], big.clone().into()).expect("queued");
        link.send([], Bytes::from_static(b"z")).expect("queued");
        [b"\x01a".to_vec(), [vec![2, 3], big].concat(), b"z".to_vec()]
    }

    /// Hands `link` over to a new process; the daemon has also seen the frames in `later`.
    fn take_over(link: &mut Link, later: &[LinkFrame]) -> Link {
        let (mut talk, said) = link.part(NOW);
        let own: Vec<LinkFrame> = said
            .iter()
            .chain(later)
            .filter(|f| f.src == tid(1))
            .cloned()
            .collect();
        for frame in own
            .iter()
            .filter(|frame| matches!(frame.kind, LinkKind::Data { .. }))
        {
            assert_eq!(frame.seq, talk.end, "in order, and without a gap");
            talk.end += 1;
        }
        let mut new = Link::go_on(tid(1), &talk);
        new.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
        // The new process sends a message immediately.
        new.send([], Bytes::from_static(b"new")).expect("queued");
        own.iter().for_each(|frame| new.take_back(frame));
        give(
            &mut new,
            &said
                .into_iter()
                .filter(|frame| frame.src == tid(2))
                .collect::<Vec<_>>(),
        );
        new
    }

    /// The new process sends the old process's unacknowledged messages again, once and in order.
    #[test]
    fn successor_resends_unacknowledged_messages_once() {
        for heard in 0..6 {
            let [mut old, mut peer] = pair();
            let three = say_three(&mut old);
            let sent = frames(&mut old);
            give(&mut peer, &sent[..heard.min(sent.len())]);
            if heard % 2 == 0 {
                give(&mut old, &frames(&mut peer));
            }
            let mut new = take_over(&mut old, &[]);
            for _ in 0..4 {
                give(&mut peer, &frames(&mut new));
                give(&mut new, &frames(&mut peer));
                new.handle(NOW, LinkEvent::PeerMoved);
            }
            let all: Vec<_> = three.into_iter().chain([b"new".to_vec()]).collect();
            assert_eq!(messages(&mut peer), all, "{heard} were heard");
            peer.send([], Bytes::from_static(b"answer"))
                .expect("queued");
            give(&mut new, &frames(&mut peer));
            assert_eq!(messages(&mut new), [b"answer"]);
        }
    }

    /// If the peer is restarted during the handoff, it receives the returned messages once and in
    /// order.
    #[test]
    fn returned_messages_reach_restarted_peer_once() {
        for (heard, restarts) in [(0, 1), (1, 1), (0, 2)] {
            for came in 0..6 {
                let [mut old, mut peer] = pair();
                let three = say_three(&mut old);
                let sent = frames(&mut old);
                give(&mut peer, &sent[..heard]);
                let (mut talk, said) = old.part(NOW);
                talk.end += sent.len() as u64;
                let mut new = Link::go_on(tid(1), &talk);
                new.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
                new.send([], Bytes::from_static(b"new")).expect("queued");
                // Messages that the peer acknowledges before its restart are not sent again.
                peer.handle(NOW, LinkEvent::PeerMoved);
                give(&mut new, &frames(&mut peer));
                said[..came.min(said.len())]
                    .iter()
                    .for_each(|frame| new.take_back(frame));
                let mut again = Link::new(tid(2), tid(1));
                again.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
                for line in 1..=restarts {
                    again.restart(line);
                    assert!(new.follow(line), "it follows");
                    assert!(
                        came >= sent.len() || !new.is_transmitted(),
                        "something has yet to come back"
                    );
                    new.send([], Bytes::from(format!("newer {line}")))
                        .expect("queued");
                }
                if came < sent.len() {
                    let is_data = |frame: &LinkFrame| matches!(frame.kind, LinkKind::Data { .. });
                    assert!(
                        !frames(&mut new).iter().any(is_data),
                        "nothing overtakes what comes back"
                    );
                }
                said[came.min(said.len())..]
                    .iter()
                    .for_each(|frame| new.take_back(frame));
                for _ in 0..4 {
                    give(&mut again, &frames(&mut new));
                    give(&mut new, &frames(&mut again));
                    new.handle(NOW, LinkEvent::PeerMoved);
                }
                let newer = (1..=restarts).map(|line| format!("newer {line}").into_bytes());
                let all: Vec<_> = three
                    .into_iter()
                    .skip(heard)
                    .chain([b"new".to_vec()])
                    .chain(newer)
                    .collect();
                assert_eq!(
                    messages(&mut again),
                    all,
                    "{heard} heard, {came} came back before {restarts} restarts"
                );
                assert!(
                    new.tx.retained.is_empty() && new.tx.retained_bytes == 0,
                    "all is acknowledged"
                );
            }
        }
    }

    /// An end restored from a checkpoint does not repeat returned messages to a peer that continued
    /// to run.
    #[test]
    fn restored_end_drops_returned_messages() {
        let [mut old, _] = pair();
        old.send([], Bytes::from_static(b"old")).expect("queued");
        let sent = frames(&mut old);
        let (mut talk, said) = old.part(NOW);
        talk.end += sent.len() as u64;
        let mut new = Link::go_on(tid(1), &talk);
        assert!(!new.is_transmitted(), "something has yet to come back");
        new.begin_timeline(7, false);
        new.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
        said.iter().for_each(|frame| new.take_back(frame));
        new.send([], Bytes::from_static(b"new")).expect("queued");
        let mut peer = Link::new(tid(2), tid(1));
        peer.restart(7);
        give(&mut peer, &frames(&mut new));
        assert_eq!(messages(&mut peer), [b"new"]);
    }

    /// A partially received message and messages held back by the window survive the handoff.
    #[test]
    fn partial_and_queued_messages_survive_handoff() {
        let [mut old, mut peer] = pair();
        let big = vec![3; FRAGMENT_BYTES_MAX * 3];
        peer.send([9], big.clone().into()).expect("queued");
        let coming = frames(&mut peer);
        give(&mut old, &coming[..2]);
        // The peer learns that these two fragments arrived and does not repeat them.
        give(
            &mut peer,
            &old.part(NOW)
                .1
                .into_iter()
                .filter(|frame| frame.src == tid(1))
                .collect::<Vec<_>>(),
        );
        let wide = vec![5; WINDOW_BYTES_MAX * 2];
        old.restore_window();
        old.send([], wide.clone().into()).expect("queued");
        assert!(frames(&mut old).len() < wide.len() / FRAGMENT_BYTES_MAX);
        let mut new = take_over(&mut old, &[]);
        give(&mut new, &coming[2..]);
        assert_eq!(messages(&mut new), [[vec![9], big].concat()]);
        for _ in 0..8 {
            give(&mut peer, &frames(&mut new));
            give(&mut new, &frames(&mut peer));
            new.handle(NOW, LinkEvent::PeerMoved);
        }
        assert_eq!(messages(&mut peer), [wide, b"new".to_vec()]);
    }
}
