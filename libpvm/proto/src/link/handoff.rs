//! Handoff of a link from a process that exits to the process that replaces it in the same task.
//!
//! 1. The old process records the state of each link as a [`LinkState`] and sends all
//!    unacknowledged frames again, to its daemon. The daemon stores these frames and everything
//!    that the process sends afterwards.
//! 2. The new process receives the link states and the stored frames. It continues each link as if
//!    it were the old process. The peer notices nothing.

use super::{
    Body, FRAGMENT_BYTES_MAX, INLINE_BODY_BYTES_MAX, Link, LinkFrame, LinkKind, RetainedMessage,
};
use crate::ids::{Micros, Tid};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// State of one end of a link, from which another process can continue the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkState {
    pub peer: Tid,
    /// Incarnation of the link.
    pub incarnation: u16,
    /// Number of the next fragment expected from the peer.
    pub expected_seq: u64,
    /// Number of the first fragment that the old process sent again for the handoff.
    pub first_seq: u64,
    /// Number after the last fragment that the old process sent again.
    pub end_seq: u64,
    pub peer_gone: bool,
}

impl LinkState {
    /// Creates the state of a link on which nothing was sent.
    pub fn new(peer: Tid, line: u16) -> LinkState {
        LinkState {
            peer,
            incarnation: line,
            expected_seq: 1,
            first_seq: 1,
            end_seq: 1,
            peer_gone: false,
        }
    }
}

/// Reassembles the messages of the previous process from the frames that the daemon returns, and
/// inserts them into the retained queue.
#[derive(Clone, Debug)]
pub(super) struct ReturningMessages {
    next_seq: u64,
    end_seq: u64,
    message_seq: u64,
    partial: Vec<u8>,
    /// Set if the link was reset since the handoff. Returned frames still carry the numbers from
    /// before the reset.
    reset_state: Option<ResetState>,
}

/// State of a link that was reset before the daemon had returned all messages.
#[derive(Clone, Copy, Debug)]
struct ResetState {
    /// All fragments below were acknowledged before the reset.
    acked: u64,
    /// Number of returned messages at the front of the retained queue. Messages that the new
    /// process has sent follow them.
    returned_count: usize,
}

impl ReturningMessages {
    /// Records that the link is about to be reset, and how many returned messages are in the queue.
    /// `acked` is the lowest unacknowledged fragment. The retained messages must still have their
    /// old numbers.
    pub(super) fn record_reset(&mut self, acked: u64, retained: &VecDeque<RetainedMessage>) {
        let placed = retained.partition_point(|message| message.first_seq < self.message_seq);
        self.reset_state.get_or_insert(ResetState {
            acked,
            returned_count: placed,
        });
    }

    /// True if the link was reset since the handoff.
    pub(super) fn was_reset(&self) -> bool {
        self.reset_state.is_some()
    }

    /// Returns the index in the retained queue at which a returned message with the fragments
    /// `first..end` must be inserted. Messages that the new process has sent stay after it. Returns
    /// `None` if the peer has acknowledged the message: all fragments below `acked` are
    /// acknowledged in the current incarnation.
    fn queue_index(
        &mut self,
        (first, end): (u64, u64),
        acked: u64,
        retained: &VecDeque<RetainedMessage>,
    ) -> Option<usize> {
        if end <= self.reset_state.map_or(acked, |reset| reset.acked) {
            return None;
        }
        let Some(reset) = &mut self.reset_state else {
            return Some(retained.partition_point(|other| other.first_seq < first));
        };
        let index = reset.returned_count;
        reset.returned_count += 1;
        Some(index)
    }
}

impl Link {
    /// Records the state of this end. Returns the state and all frames that the next process needs,
    /// in order: the fragments of a partial message from the peer, then all frames that the peer
    /// has not acknowledged.
    ///
    /// From now on this end transmits without regard to the window. The returned frames count as
    /// transmitted.
    pub fn hand_off(&mut self, now: Micros) -> (LinkState, Vec<LinkFrame>) {
        let partial_fragments = self.rx.partial.len().div_ceil(FRAGMENT_BYTES_MAX) as u64;
        let first = self
            .tx
            .retained
            .front()
            .map_or(self.tx.end_seq, |message| message.first_seq);
        let expected = self.rx.expected_seq - partial_fragments;
        let state = LinkState {
            peer: self.peer,
            incarnation: self.incarnation,
            expected_seq: expected,
            first_seq: first,
            end_seq: first,
            peer_gone: self.peer_gone,
        };
        let (line, ack) = (self.incarnation, self.rx.expected_seq);
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
                incarnation: line,
                payload,
            });
        }
        for message in &self.tx.retained {
            for seq in
                (message.first_seq..message.end_seq()).take_while(|seq| *seq < self.tx.next_seq)
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
                    incarnation: line,
                    payload,
                });
            }
        }
        self.disable_window();
        while let Some(frame) = self.next_frame(now) {
            frames.push(frame.to_frame());
        }
        (state, frames)
    }

    /// Enables the window again after [`Link::disable_window`].
    pub fn restore_window(&mut self) {
        self.tx.window_disabled = false;
    }

    /// Creates the link of a new process that continues from the old process's state. The link
    /// transmits nothing before the daemon has returned all frames of the old process
    /// ([`Link::accept_returned_frame`]).
    pub fn resume_from(local: Tid, state: &LinkState) -> Link {
        let mut link = Link::new(local, state.peer);
        (link.incarnation, link.peer_gone, link.rx.expected_seq) =
            (state.incarnation, state.peer_gone, state.expected_seq);
        let tx = &mut link.tx;
        (tx.acked, tx.next_seq, tx.highest_sent, tx.end_seq) = (
            state.first_seq,
            state.first_seq,
            state.end_seq,
            state.end_seq,
        );
        if state.peer_gone {
            (tx.acked, tx.next_seq) = (state.end_seq, state.end_seq);
        } else if state.first_seq < state.end_seq {
            tx.returning_messages = Some(Box::new(ReturningMessages {
                next_seq: state.first_seq,
                end_seq: state.end_seq,
                message_seq: state.first_seq,
                partial: Vec::new(),
                reset_state: None,
            }));
        }
        link
    }

    /// Processes a frame of the previous process that the daemon returns. Frames that are not the
    /// next expected one are ignored.
    pub fn accept_returned_frame(&mut self, frame: &LinkFrame) {
        let LinkKind::Data { last } = frame.kind else {
            return;
        };
        let tx = &mut self.tx;
        let Some(back) = tx
            .returning_messages
            .as_mut()
            .filter(|back| back.next_seq == frame.seq)
        else {
            return;
        };
        back.next_seq += 1;
        back.partial.extend_from_slice(&frame.payload);
        if last {
            let (seq, bytes) = (back.message_seq, std::mem::take(&mut back.partial));
            back.message_seq = back.next_seq;
            if let Some(index) = back.queue_index((seq, back.next_seq), tx.acked, &tx.retained) {
                let body = if bytes.len() <= INLINE_BODY_BYTES_MAX {
                    Body::inline(&bytes)
                } else {
                    Body::Shared(bytes.into())
                };
                let message = RetainedMessage::new(seq, &[], body);
                tx.retained_bytes += message.len();
                tx.retained.insert(index, message);
            }
        }
        if back.next_seq >= back.end_seq
            && tx
                .returning_messages
                .take()
                .is_some_and(|back| back.was_reset())
        {
            tx.renumber();
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

    fn take_frames(link: &mut Link) -> Vec<LinkFrame> {
        std::iter::from_fn(|| link.next_frame(NOW).map(|frame| frame.to_frame())).collect()
    }

    fn deliver(receiver: &mut Link, frames: &[LinkFrame]) {
        frames
            .iter()
            .for_each(|frame| receiver.handle(NOW, LinkEvent::Frame(frame.clone())));
    }

    fn take_messages(link: &mut Link) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| link.take_message())
            .map(|message| message.to_vec())
            .collect()
    }

    /// Queues three messages, the second of which has three fragments. Returns their contents.
    fn queue_three(link: &mut Link) -> [Vec<u8>; 3] {
        let big = vec![7; FRAGMENT_BYTES_MAX * 2 + 5];
        link.send([1], Bytes::from_static(b"a")).expect("queued");
        link.send([2, 3], big.clone().into()).expect("queued");
        link.send([], Bytes::from_static(b"z")).expect("queued");
        [b"\x01a".to_vec(), [vec![2, 3], big].concat(), b"z".to_vec()]
    }

    /// Hands off `link` to a new process and returns the new process's link. `later_frames`
    /// contains frames that the daemon received from the old process after the handoff.
    fn hand_off_to_new_process(link: &mut Link, later_frames: &[LinkFrame]) -> Link {
        let (mut talk, said) = link.hand_off(NOW);
        let own: Vec<LinkFrame> = said
            .iter()
            .chain(later_frames)
            .filter(|f| f.src == tid(1))
            .cloned()
            .collect();
        for frame in own
            .iter()
            .filter(|frame| matches!(frame.kind, LinkKind::Data { .. }))
        {
            assert_eq!(frame.seq, talk.end_seq, "in order, and without a gap");
            talk.end_seq += 1;
        }
        let mut new = Link::resume_from(tid(1), &talk);
        new.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
        // The new process sends a message immediately.
        new.send([], Bytes::from_static(b"new")).expect("queued");
        own.iter()
            .for_each(|frame| new.accept_returned_frame(frame));
        deliver(
            &mut new,
            &said
                .into_iter()
                .filter(|frame| frame.src == tid(2))
                .collect::<Vec<_>>(),
        );
        new
    }

    /// The new process sends the unacknowledged messages of the old process again, each once and in
    /// order.
    #[test]
    fn successor_resends_unacknowledged_messages_once() {
        for heard in 0..6 {
            let [mut old, mut peer] = pair();
            let three = queue_three(&mut old);
            let sent = take_frames(&mut old);
            deliver(&mut peer, &sent[..heard.min(sent.len())]);
            if heard % 2 == 0 {
                deliver(&mut old, &take_frames(&mut peer));
            }
            let mut new = hand_off_to_new_process(&mut old, &[]);
            for _ in 0..4 {
                deliver(&mut peer, &take_frames(&mut new));
                deliver(&mut new, &take_frames(&mut peer));
                new.handle(NOW, LinkEvent::PeerMigrated);
            }
            let all: Vec<_> = three.into_iter().chain([b"new".to_vec()]).collect();
            assert_eq!(take_messages(&mut peer), all, "{heard} were heard");
            peer.send([], Bytes::from_static(b"answer"))
                .expect("queued");
            deliver(&mut new, &take_frames(&mut peer));
            assert_eq!(take_messages(&mut new), [b"answer"]);
        }
    }

    /// If the peer is restarted during the handoff, the restarted peer receives the returned
    /// messages once and in order.
    #[test]
    fn returned_messages_reach_restarted_peer_once() {
        for (heard, restarts) in [(0, 1), (1, 1), (0, 2)] {
            for came in 0..6 {
                let [mut old, mut peer] = pair();
                let three = queue_three(&mut old);
                let sent = take_frames(&mut old);
                deliver(&mut peer, &sent[..heard]);
                let (mut talk, said) = old.hand_off(NOW);
                talk.end_seq += sent.len() as u64;
                let mut new = Link::resume_from(tid(1), &talk);
                new.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
                new.send([], Bytes::from_static(b"new")).expect("queued");
                // Messages that the peer acknowledges before its restart are not sent again.
                peer.handle(NOW, LinkEvent::PeerMigrated);
                deliver(&mut new, &take_frames(&mut peer));
                said[..came.min(said.len())]
                    .iter()
                    .for_each(|frame| new.accept_returned_frame(frame));
                let mut again = Link::new(tid(2), tid(1));
                again.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
                for line in 1..=restarts {
                    again.reset_to_incarnation(line);
                    assert!(new.accept_incarnation(line), "it follows");
                    assert!(
                        came >= sent.len() || !new.is_all_transmitted(),
                        "something has yet to come back"
                    );
                    new.send([], Bytes::from(format!("newer {line}")))
                        .expect("queued");
                }
                if came < sent.len() {
                    let is_data = |frame: &LinkFrame| matches!(frame.kind, LinkKind::Data { .. });
                    assert!(
                        !take_frames(&mut new).iter().any(is_data),
                        "nothing overtakes what comes back"
                    );
                }
                said[came.min(said.len())..]
                    .iter()
                    .for_each(|frame| new.accept_returned_frame(frame));
                for _ in 0..4 {
                    deliver(&mut again, &take_frames(&mut new));
                    deliver(&mut new, &take_frames(&mut again));
                    new.handle(NOW, LinkEvent::PeerMigrated);
                }
                let newer = (1..=restarts).map(|line| format!("newer {line}").into_bytes());
                let all: Vec<_> = three
                    .into_iter()
                    .skip(heard)
                    .chain([b"new".to_vec()])
                    .chain(newer)
                    .collect();
                assert_eq!(
                    take_messages(&mut again),
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

    /// An end that was restored from a checkpoint does not send returned messages to a peer that
    /// continued to run.
    #[test]
    fn restored_end_drops_returned_messages() {
        let [mut old, _] = pair();
        old.send([], Bytes::from_static(b"old")).expect("queued");
        let sent = take_frames(&mut old);
        let (mut talk, said) = old.hand_off(NOW);
        talk.end_seq += sent.len() as u64;
        let mut new = Link::resume_from(tid(1), &talk);
        assert!(!new.is_all_transmitted(), "something has yet to come back");
        new.begin_incarnation(7, false);
        new.handle(NOW, LinkEvent::RouteUp(RouteId(1)));
        said.iter()
            .for_each(|frame| new.accept_returned_frame(frame));
        new.send([], Bytes::from_static(b"new")).expect("queued");
        let mut peer = Link::new(tid(2), tid(1));
        peer.reset_to_incarnation(7);
        deliver(&mut peer, &take_frames(&mut new));
        assert_eq!(take_messages(&mut peer), [b"new"]);
    }

    /// A partially received message and messages held back by the window survive the handoff.
    #[test]
    fn partial_and_queued_messages_survive_handoff() {
        let [mut old, mut peer] = pair();
        let big = vec![3; FRAGMENT_BYTES_MAX * 3];
        peer.send([9], big.clone().into()).expect("queued");
        let coming = take_frames(&mut peer);
        deliver(&mut old, &coming[..2]);
        // The peer learns that these two fragments arrived and does not repeat them.
        deliver(
            &mut peer,
            &old.hand_off(NOW)
                .1
                .into_iter()
                .filter(|frame| frame.src == tid(1))
                .collect::<Vec<_>>(),
        );
        let wide = vec![5; WINDOW_BYTES_MAX * 2];
        old.restore_window();
        old.send([], wide.clone().into()).expect("queued");
        assert!(take_frames(&mut old).len() < wide.len() / FRAGMENT_BYTES_MAX);
        let mut new = hand_off_to_new_process(&mut old, &[]);
        deliver(&mut new, &coming[2..]);
        assert_eq!(take_messages(&mut new), [[vec![9], big].concat()]);
        for _ in 0..8 {
            deliver(&mut peer, &take_frames(&mut new));
            deliver(&mut new, &take_frames(&mut peer));
            new.handle(NOW, LinkEvent::PeerMigrated);
        }
        assert_eq!(take_messages(&mut peer), [wide, b"new".to_vec()]);
    }
}
