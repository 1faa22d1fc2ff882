//! Small messages that are sent and taken in one step.

use super::{Body, FrameRef, INLINE_BODY_BYTES_MAX, Link, LinkKind, RetainedMessage};
use crate::ids::Micros;

impl Link {
    /// Queues a message as [`Link::send`] does, with a body of at most [`INLINE_BODY_BYTES_MAX`]
    /// bytes, and returns its frame for immediate transmission.
    ///
    /// Returns `None` and queues nothing if the frame cannot be transmitted now: the body is
    /// larger, the peer has ended, the link has no route, the window is closed, or another frame
    /// must be transmitted first.
    #[inline]
    pub fn try_send_inline<'a>(
        &mut self,
        now: Micros,
        head: &'a [u8],
        body: &'a [u8],
    ) -> Option<FrameRef<'a>> {
        let is_idle = self.tx.next_seq == self.tx.end_seq
            && !self.tx.probe_pending
            && self.rx.pending_ack != Some(true);
        if !is_idle
            || self.peer_gone
            || self.route.is_none()
            || body.len() > INLINE_BODY_BYTES_MAX
            || !self.is_window_open()
        {
            return None;
        }
        self.tx.retain_message(RetainedMessage::new(
            self.tx.end_seq,
            head,
            Body::copy_inline(body),
        ));
        // The message has one fragment, because it is small.
        let seq = self.tx.next_seq;
        self.record_transmission(now, head.len() + body.len());
        Some(FrameRef {
            src: self.local_tid,
            dst: self.peer,
            kind: LinkKind::Data { is_last: true },
            seq,
            ack: self.take_ack(false),
            incarnation: self.incarnation,
            head,
            body,
            shared_body: None,
        })
    }

    /// True if the fragment `seq` is a whole message that the application may take at once: all
    /// earlier messages were taken, and the route needs no acknowledgement of the fragment.
    #[inline]
    pub fn can_take_small_message(&self, seq: u64) -> bool {
        let rx = &self.rx;
        self.confirms_from.is_some()
            && rx.expected_seq == seq
            && rx.partial_message.is_empty()
            && rx.ready_messages.is_empty()
    }

    /// Records that the application takes the message for which
    /// [`Link::can_take_small_message`] is true, with the acknowledgement `ack` of its frame.
    /// Returns the number after the message.
    #[inline]
    pub fn take_small_message(&mut self, now: Micros, ack: u64) -> u64 {
        self.handle_ack(now, ack, false);
        self.rx.expected_seq += 1;
        self.rx.expected_seq
    }
}
