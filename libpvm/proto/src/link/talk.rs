//! A conversation that a new process takes over from one that has ended, in the place of the same task.
//!
//! The old process says of each link where it stands, as a [`Talk`], and says again what the peer has not acknowledged: its
//! daemon keeps that, with all that the process says afterwards. The new process gets both, and goes on as if it were the old
//! one: the peer notices nothing.

use super::{Body, FRAGMENT_BYTES_MAX, Link, LinkFrame, LinkKind, Retained, SMALL_BYTES_MAX};
use crate::ids::{Micros, Tid};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Where one end of a link stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Talk {
    /// The other end.
    pub peer: Tid,
    /// The timeline of the link.
    pub line: u16,
    /// The number of the fragment that is to come next.
    pub expected: u64,
    /// The number of the first fragment that is said again.
    pub first: u64,
    /// The number after the last one.
    pub end: u64,
    /// The peer has ended.
    pub gone: bool,
}

impl Talk {
    /// Nothing has been said.
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

/// What a process still has to get of what the one before it had sent.
#[derive(Clone, Debug)]
pub(super) struct Back {
    next: u64,
    end: u64,
    first: u64,
    part: Vec<u8>,
    /// The conversation has begun anew meanwhile; what comes back has its old numbers still.
    anew: Option<Anew>,
}

/// How a conversation stood when it began anew before everything had come back.
#[derive(Clone, Copy, Debug)]
struct Anew {
    /// All below had been acknowledged.
    acked: u64,
    /// So many messages that have come back are kept, in front of those that were sent since.
    placed: usize,
}

impl Back {
    /// The conversation begins anew; what is kept has its old numbers still, unless it did so before.
    pub(super) fn begin_anew(&mut self, acked: u64, retained: &VecDeque<Retained>) {
        let placed = retained.partition_point(|message| message.first_seq < self.first);
        self.anew.get_or_insert(Anew { acked, placed });
    }

    /// True if the conversation has begun anew.
    pub(super) fn is_anew(&self) -> bool {
        self.anew.is_some()
    }

    /// The place of a message that has come back with these numbers among those that are kept, behind which waits what was sent
    /// since; none if it was acknowledged. On this timeline all below `acked` was.
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
    /// Where this end stands, and all that whoever takes its place has to get, in order: half a message that came from the peer,
    /// as it came, and what the peer has not acknowledged. From now on this end transmits without regard to the window; what is
    /// said here counts as transmitted.
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

    /// Transmits with regard to the window again.
    pub fn restore_window(&mut self) {
        self.tx.unlimited = false;
    }

    /// Takes the place of the end that stood there. It transmits nothing of its own before it has got back what that one had
    /// sent ([`Link::take_back`]).
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

    /// Takes a frame that the process before this one had sent.
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

    /// Queues three messages, of which the second has three fragments; what is to come.
    fn say_three(link: &mut Link) -> [Vec<u8>; 3] {
        let big = vec![7; FRAGMENT_BYTES_MAX * 2 + 5];
        link.send([1], Bytes::from_static(b"a")).expect("queued");
        link.send([2, 3], big.clone().into()).expect("queued");
        link.send([], Bytes::from_static(b"z")).expect("queued");
        [b"\x01a".to_vec(), [vec![2, 3], big].concat(), b"z".to_vec()]
    }

    /// A new process takes over; the daemon has seen these frames.
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
        // It says something at once.
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

    #[test]
    fn what_the_old_process_had_sent_and_nobody_has_acknowledged_the_new_one_sends_again_once_and_in_order()
     {
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

    #[test]
    fn what_comes_back_when_the_peer_was_started_again_meanwhile_is_sent_to_it_once_and_in_order() {
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
                // What it acknowledges before it is started again is not sent any more.
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

    #[test]
    fn a_peer_that_went_on_meanwhile_gets_nothing_twice_of_what_comes_back_to_one_started_from_a_checkpoint()
     {
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

    #[test]
    fn half_a_message_and_what_the_window_kept_back_are_not_lost() {
        let [mut old, mut peer] = pair();
        let big = vec![3; FRAGMENT_BYTES_MAX * 3];
        peer.send([9], big.clone().into()).expect("queued");
        let coming = frames(&mut peer);
        give(&mut old, &coming[..2]);
        // The peer hears that these two are there, and does not send them again.
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
