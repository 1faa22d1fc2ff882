//! Small messages that are sent and taken in one step.

use super::{Body, INLINE_BODY_BYTES_MAX, Link, RetainedMessage, copy_head};
use crate::ids::Micros;

/// Number of unacknowledged fragments from which the acknowledgement of a small message counts. The
/// route confirms fragments anyway, so a later acknowledgement delays nothing.
const FRAGMENTS_PER_ACK: u64 = 8;

/// Numbers of the frame of a small message: a data frame with the last fragment of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallFrame {
    pub seq: u64,
    pub ack: u64,
}

impl Link {
    /// Queues a message as [`Link::send`] does, with a body of at most [`INLINE_BODY_BYTES_MAX`]
    /// bytes, and returns the numbers of its frame for immediate transmission.
    ///
    /// Returns `None` and queues nothing if the frame cannot be transmitted now: the body is
    /// larger, the peer has ended, the link has no route, the window is closed, or another frame
    /// must be transmitted first.
    #[inline]
    pub fn try_send_small(&mut self, now: Micros, head: &[u8], body: &[u8]) -> Option<SmallFrame> {
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
        // The message has one fragment, because it is small.
        let seq = self.tx.next_seq;
        let message_bytes = head.len() + body.len();
        self.tx.retained_bytes += message_bytes;
        self.tx.end_seq = seq + 1;
        self.tx.retained_messages.push_back(RetainedMessage {
            first_seq: seq,
            fragment_count: 1,
            head: copy_head(head),
            head_len: head.len() as u8,
            body: Body::copy_inline(body),
        });
        self.record_transmission(now, message_bytes);
        let ack = self.take_ack(false);
        Some(SmallFrame { seq, ack })
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
        // One acknowledgement of many fragments costs little more than one of a single fragment.
        if self.in_flight_fragments() >= FRAGMENTS_PER_ACK {
            self.handle_ack(now, ack, false);
        }
        self.rx.expected_seq += 1;
        self.rx.expected_seq
    }
}
