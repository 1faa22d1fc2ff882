//! Handoff of a link from a process that exits to the process that replaces it in the same task.
//!
//! 1. The old process records the state of each link as a [`LinkState`] and sends all
//!    unacknowledged frames again, to its daemon. The daemon stores these frames and everything
//!    that the process sends afterwards.
//! 2. The new process receives the link states and the stored frames. It continues each link as if
//!    it were the old process. The peer cannot distinguish the two processes.

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
    /// Number after the last fragment that the old process sent again for the handoff.
    pub end_seq: u64,
    pub peer_gone: bool,
}

impl LinkState {
    /// Creates the state of a link of incarnation `link_incarnation` on which nothing was sent.
    pub fn new(peer: Tid, link_incarnation: u16) -> Self {
        Self {
            peer,
            incarnation: link_incarnation,
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
    partial_message: Vec<u8>,
    /// Set if the link was reset since the handoff. Returned frames still carry the numbers from
    /// before the reset.
    reset_state: Option<ResetState>,
}

/// State of a link that was reset before the daemon had returned all messages.
#[derive(Clone, Copy, Debug)]
struct ResetState {
    /// All fragments below this number were acknowledged before the reset.
    acked_below: u64,
    /// Number of returned messages at the front of the retained queue. Messages that the new
    /// process has sent follow the returned messages.
    returned_count: usize,
}

impl ReturningMessages {
    /// Records that the link is about to be reset, and how many returned messages are in the queue.
    /// `acked_below` is the number of the lowest unacknowledged fragment. The retained messages
    /// must still have their old numbers.
    pub(super) fn record_reset(
        &mut self,
        acked_below: u64,
        retained_messages: &VecDeque<RetainedMessage>,
    ) {
        let returned_count =
            retained_messages.partition_point(|message| message.first_seq < self.message_seq);
        self.reset_state.get_or_insert(ResetState {
            acked_below,
            returned_count,
        });
    }

    /// True if the link was reset since the handoff.
    pub(super) fn was_reset(&self) -> bool {
        self.reset_state.is_some()
    }

    /// Returns the index in the retained queue at which a returned message with the fragments
    /// `first_seq..end_seq` must be inserted. Messages that the new process has sent remain behind
    /// this index. Returns `None` if the peer has acknowledged the message. All fragments below
    /// `acked_below` are acknowledged in the current incarnation.
    fn queue_index(
        &mut self,
        (first_seq, end_seq): (u64, u64),
        acked_below: u64,
        retained_messages: &VecDeque<RetainedMessage>,
    ) -> Option<usize> {
        if end_seq
            <= self
                .reset_state
                .map_or(acked_below, |state| state.acked_below)
        {
            return None;
        }
        let Some(state) = &mut self.reset_state else {
            return Some(retained_messages.partition_point(|other| other.first_seq < first_seq));
        };
        let index = state.returned_count;
        state.returned_count += 1;
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
        self.rx.drop_placed_bytes();
        let partial_count = self.rx.partial_message.len().div_ceil(FRAGMENT_BYTES_MAX) as u64;
        let first_seq = self
            .tx
            .retained_messages
            .front()
            .map_or(self.tx.end_seq, |message| message.first_seq);
        let expected_seq = self.rx.expected_seq - partial_count;
        let state = LinkState {
            peer: self.peer,
            incarnation: self.incarnation,
            expected_seq,
            first_seq,
            end_seq: first_seq,
            peer_gone: self.peer_gone,
        };
        let (link_incarnation, ack) = (self.incarnation, self.rx.expected_seq);
        let mut frames = Vec::new();
        for (fragment, seq) in self
            .rx
            .partial_message
            .chunks(FRAGMENT_BYTES_MAX)
            .zip(expected_seq..)
        {
            let (kind, payload) = (
                LinkKind::Data { is_last: false },
                Bytes::copy_from_slice(fragment),
            );
            frames.push(LinkFrame {
                src: self.peer,
                dst: self.local_tid,
                kind,
                seq,
                ack: 1,
                incarnation: link_incarnation,
                payload,
            });
        }
        for message in &self.tx.retained_messages {
            for seq in
                (message.first_seq..message.end_seq()).take_while(|seq| *seq < self.tx.next_seq)
            {
                let (head, body) = message.fragment_payload(seq);
                let (kind, payload) = (
                    LinkKind::Data {
                        is_last: seq + 1 == message.end_seq(),
                    },
                    [head, body].concat().into(),
                );
                frames.push(LinkFrame {
                    src: self.local_tid,
                    dst: self.peer,
                    kind,
                    seq,
                    ack,
                    incarnation: link_incarnation,
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
    pub fn resume_from(local_tid: Tid, state: &LinkState) -> Self {
        let mut link = Self::new(local_tid, state.peer);
        (link.incarnation, link.peer_gone, link.rx.expected_seq) =
            (state.incarnation, state.peer_gone, state.expected_seq);
        let tx = &mut link.tx;
        (tx.acked_below, tx.next_seq, tx.first_unsent_seq, tx.end_seq) = (
            state.first_seq,
            state.first_seq,
            state.end_seq,
            state.end_seq,
        );
        if state.peer_gone {
            (tx.acked_below, tx.next_seq) = (state.end_seq, state.end_seq);
        } else if state.first_seq < state.end_seq {
            tx.returning_messages = Some(Box::new(ReturningMessages {
                next_seq: state.first_seq,
                end_seq: state.end_seq,
                message_seq: state.first_seq,
                partial_message: Vec::new(),
                reset_state: None,
            }));
        }
        link
    }

    /// Processes a frame of the previous process that the daemon returns. A frame other than the
    /// next expected frame is ignored.
    pub fn accept_returned_frame(&mut self, frame: &LinkFrame) {
        let LinkKind::Data { is_last } = frame.kind else {
            return;
        };
        let tx = &mut self.tx;
        let Some(pending_return) = tx
            .returning_messages
            .as_mut()
            .filter(|pending_return| pending_return.next_seq == frame.seq)
        else {
            return;
        };
        pending_return.next_seq += 1;
        pending_return
            .partial_message
            .extend_from_slice(&frame.payload);
        if is_last {
            let (seq, bytes) = (
                pending_return.message_seq,
                std::mem::take(&mut pending_return.partial_message),
            );
            pending_return.message_seq = pending_return.next_seq;
            if let Some(index) = pending_return.queue_index(
                (seq, pending_return.next_seq),
                tx.acked_below,
                &tx.retained_messages,
            ) {
                let body = if bytes.len() <= INLINE_BODY_BYTES_MAX {
                    Body::copy_inline(&bytes)
                } else {
                    Body::Shared(bytes.into())
                };
                let message = RetainedMessage::new(seq, &[], body);
                tx.retained_bytes += message.len();
                tx.retained_messages.insert(index, message);
            }
        }
        if pending_return.next_seq >= pending_return.end_seq
            && tx
                .returning_messages
                .take()
                .is_some_and(|pending_return| pending_return.was_reset())
        {
            tx.renumber_fragments();
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
        Tid::for_task(crate::HostId::MASTER, n).expect("good")
    }

    fn link_pair() -> [Link; 2] {
        let mut links = [Link::new(tid(1), tid(2)), Link::new(tid(2), tid(1))];
        links
            .iter_mut()
            .for_each(|link| link.handle_event(NOW, LinkEvent::RouteUp(RouteId(1))));
        links
    }

    fn take_frames(link: &mut Link) -> Vec<LinkFrame> {
        std::iter::from_fn(|| link.next_frame(NOW).map(|frame| frame.to_frame())).collect()
    }

    fn deliver(receiver: &mut Link, frames: &[LinkFrame]) {
        frames
            .iter()
            .for_each(|frame| receiver.handle_event(NOW, LinkEvent::Frame(frame.clone())));
    }

    fn take_messages(link: &mut Link) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| link.take_message())
            .map(|message| message.into_contiguous().to_vec())
            .collect()
    }

    /// Queues three messages, the second of which has three fragments. Returns their contents.
    fn queue_three_messages(link: &mut Link) -> [Vec<u8>; 3] {
        let big_body = vec![7; FRAGMENT_BYTES_MAX * 2 + 5];
        link.send([1], Bytes::from_static(b"a")).expect("queued");
        link.send([2, 3], big_body.clone().into()).expect("queued");
        link.send([], Bytes::from_static(b"z")).expect("queued");
        [
            b"\x01a".to_vec(),
            [vec![2, 3], big_body].concat(),
            b"z".to_vec(),
        ]
    }

    /// Hands off `link` to a new process and returns the new process's link. `later_frames`
    /// contains frames that the daemon received from the old process after the handoff.
    fn hand_off_to_new_process(link: &mut Link, later_frames: &[LinkFrame]) -> Link {
        let (mut link_state, handoff_frames) = link.hand_off(NOW);
        let returned_frames: Vec<LinkFrame> = handoff_frames
            .iter()
            .chain(later_frames)
            .filter(|f| f.src == tid(1))
            .cloned()
            .collect();
        for frame in returned_frames
            .iter()
            .filter(|frame| matches!(frame.kind, LinkKind::Data { .. }))
        {
            assert_eq!(frame.seq, link_state.end_seq, "in order, and without a gap");
            link_state.end_seq += 1;
        }
        let mut new_link = Link::resume_from(tid(1), &link_state);
        new_link.handle_event(NOW, LinkEvent::RouteUp(RouteId(1)));
        // The new process sends a message immediately.
        new_link
            .send([], Bytes::from_static(b"new"))
            .expect("queued");
        returned_frames
            .iter()
            .for_each(|frame| new_link.accept_returned_frame(frame));
        deliver(
            &mut new_link,
            &handoff_frames
                .into_iter()
                .filter(|frame| frame.src == tid(2))
                .collect::<Vec<_>>(),
        );
        new_link
    }

    /// The new process sends the unacknowledged messages of the old process again, each once and in
    /// order.
    #[test]
    fn successor_resends_unacknowledged_messages_once() {
        for delivered_count in 0..6 {
            let [mut old_link, mut peer] = link_pair();
            let messages = queue_three_messages(&mut old_link);
            let sent_frames = take_frames(&mut old_link);
            deliver(
                &mut peer,
                &sent_frames[..delivered_count.min(sent_frames.len())],
            );
            if delivered_count % 2 == 0 {
                deliver(&mut old_link, &take_frames(&mut peer));
            }
            let mut new_link = hand_off_to_new_process(&mut old_link, &[]);
            for _ in 0..4 {
                deliver(&mut peer, &take_frames(&mut new_link));
                deliver(&mut new_link, &take_frames(&mut peer));
                new_link.handle_event(NOW, LinkEvent::PeerMigrated);
            }
            let expected_messages: Vec<_> = messages.into_iter().chain([b"new".to_vec()]).collect();
            assert_eq!(
                take_messages(&mut peer),
                expected_messages,
                "{delivered_count} were heard"
            );
            peer.send([], Bytes::from_static(b"answer"))
                .expect("queued");
            deliver(&mut new_link, &take_frames(&mut peer));
            assert_eq!(take_messages(&mut new_link), [b"answer"]);
        }
    }

    /// If the peer is restarted during the handoff, the restarted peer receives the returned
    /// messages once and in order.
    #[test]
    fn returned_messages_reach_restarted_peer_once() {
        for (delivered_count, restart_count) in [(0, 1), (1, 1), (0, 2)] {
            for returned_count in 0..6 {
                let [mut old_link, mut peer] = link_pair();
                let messages = queue_three_messages(&mut old_link);
                let sent_frames = take_frames(&mut old_link);
                deliver(&mut peer, &sent_frames[..delivered_count]);
                let (mut link_state, handoff_frames) = old_link.hand_off(NOW);
                link_state.end_seq += sent_frames.len() as u64;
                let mut new_link = Link::resume_from(tid(1), &link_state);
                new_link.handle_event(NOW, LinkEvent::RouteUp(RouteId(1)));
                new_link
                    .send([], Bytes::from_static(b"new"))
                    .expect("queued");
                // Messages that the peer acknowledges before its restart are not sent again.
                peer.handle_event(NOW, LinkEvent::PeerMigrated);
                deliver(&mut new_link, &take_frames(&mut peer));
                handoff_frames[..returned_count.min(handoff_frames.len())]
                    .iter()
                    .for_each(|frame| new_link.accept_returned_frame(frame));
                let mut restarted_peer = Link::new(tid(2), tid(1));
                restarted_peer.handle_event(NOW, LinkEvent::RouteUp(RouteId(1)));
                for incarnation in 1..=restart_count {
                    restarted_peer.reset_to_incarnation(incarnation);
                    assert!(new_link.accept_incarnation(incarnation), "it follows");
                    assert!(
                        returned_count >= sent_frames.len() || !new_link.is_all_transmitted(),
                        "something has yet to come back"
                    );
                    new_link
                        .send([], Bytes::from(format!("newer {incarnation}")))
                        .expect("queued");
                }
                if returned_count < sent_frames.len() {
                    let is_data = |frame: &LinkFrame| matches!(frame.kind, LinkKind::Data { .. });
                    assert!(
                        !take_frames(&mut new_link).iter().any(is_data),
                        "nothing overtakes what comes back"
                    );
                }
                handoff_frames[returned_count.min(handoff_frames.len())..]
                    .iter()
                    .for_each(|frame| new_link.accept_returned_frame(frame));
                for _ in 0..4 {
                    deliver(&mut restarted_peer, &take_frames(&mut new_link));
                    deliver(&mut new_link, &take_frames(&mut restarted_peer));
                    new_link.handle_event(NOW, LinkEvent::PeerMigrated);
                }
                let later_messages = (1..=restart_count)
                    .map(|incarnation| format!("newer {incarnation}").into_bytes());
                let expected_messages: Vec<_> = messages
                    .into_iter()
                    .skip(delivered_count)
                    .chain([b"new".to_vec()])
                    .chain(later_messages)
                    .collect();
                assert_eq!(
                    take_messages(&mut restarted_peer),
                    expected_messages,
                    "{delivered_count} heard, {returned_count} came back before {restart_count} restarts"
                );
                assert!(
                    new_link.tx.retained_messages.is_empty() && new_link.tx.retained_bytes == 0,
                    "all is acknowledged"
                );
            }
        }
    }

    /// An end that was restored from a checkpoint does not send returned messages to a peer that
    /// continued to run.
    #[test]
    fn restored_end_drops_returned_messages() {
        let [mut old_link, _] = link_pair();
        old_link
            .send([], Bytes::from_static(b"old"))
            .expect("queued");
        let sent_frames = take_frames(&mut old_link);
        let (mut link_state, handoff_frames) = old_link.hand_off(NOW);
        link_state.end_seq += sent_frames.len() as u64;
        let mut new_link = Link::resume_from(tid(1), &link_state);
        assert!(
            !new_link.is_all_transmitted(),
            "something has yet to come back"
        );
        new_link.begin_incarnation(7, false);
        new_link.handle_event(NOW, LinkEvent::RouteUp(RouteId(1)));
        handoff_frames
            .iter()
            .for_each(|frame| new_link.accept_returned_frame(frame));
        new_link
            .send([], Bytes::from_static(b"new"))
            .expect("queued");
        let mut peer = Link::new(tid(2), tid(1));
        peer.reset_to_incarnation(7);
        deliver(&mut peer, &take_frames(&mut new_link));
        assert_eq!(take_messages(&mut peer), [b"new"]);
    }

    /// A partial message, and messages that the window had not yet admitted, survive the handoff.
    #[test]
    fn partial_and_queued_messages_survive_handoff() {
        let [mut old_link, mut peer] = link_pair();
        let large_body = vec![3; FRAGMENT_BYTES_MAX * 3];
        peer.send([9], large_body.clone().into()).expect("queued");
        let peer_frames = take_frames(&mut peer);
        deliver(&mut old_link, &peer_frames[..2]);
        // By this delivery the peer learns that the two fragments arrived, so the peer does not
        // repeat the fragments.
        deliver(
            &mut peer,
            &old_link
                .hand_off(NOW)
                .1
                .into_iter()
                .filter(|frame| frame.src == tid(1))
                .collect::<Vec<_>>(),
        );
        let over_window_body = vec![5; WINDOW_BYTES_MAX * 2];
        old_link.restore_window();
        old_link
            .send([], over_window_body.clone().into())
            .expect("queued");
        assert!(take_frames(&mut old_link).len() < over_window_body.len() / FRAGMENT_BYTES_MAX);
        let mut new_link = hand_off_to_new_process(&mut old_link, &[]);
        deliver(&mut new_link, &peer_frames[2..]);
        assert_eq!(
            take_messages(&mut new_link),
            [[vec![9], large_body].concat()]
        );
        for _ in 0..8 {
            deliver(&mut peer, &take_frames(&mut new_link));
            deliver(&mut new_link, &take_frames(&mut peer));
            new_link.handle_event(NOW, LinkEvent::PeerMigrated);
        }
        assert_eq!(
            take_messages(&mut peer),
            [over_window_body, b"new".to_vec()]
        );
    }
}
