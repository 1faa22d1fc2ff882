//! Fragments whose payload a route writes straight into the message, without a buffer in between.
//!
//! The route appends the payload of the expected fragment to [`Link::partial_message_mut`], in any
//! number of pieces, and then calls [`Link::accept_placed_fragment`]. If the same fragment arrives
//! on another route meanwhile, the link drops the incomplete one; [`Link::placed_bytes`] tells the
//! route.

use super::{Link, ReceiveHalf, ReceivedMessage};
use crate::buffer_pool;
use crate::ids::Micros;
use bytes::Bytes;

impl ReceiveHalf {
    /// Drops the part of the expected fragment that a route has written.
    #[inline]
    pub(super) fn drop_placed_bytes(&mut self) {
        if self.placed_bytes > 0 {
            let accepted_bytes = self.partial_message.len() - self.placed_bytes;
            self.partial_message.truncate(accepted_bytes);
            self.placed_bytes = 0;
        }
    }

    /// Makes the message available of which the last fragment was accepted.
    pub(super) fn complete_partial_message(&mut self) {
        self.ready_messages.push_back(ReceivedMessage {
            end_seq: self.expected_seq,
            head: Bytes::new(),
            bytes: buffer_pool::freeze(std::mem::take(&mut self.partial_message)),
        });
    }
}

impl Link {
    /// Returns the message that is being received. The route may append the payload of the
    /// expected fragment. Before anything else uses the link, the message must end with this
    /// payload, and [`Link::set_placed_bytes`] or [`Link::accept_placed_fragment`] must be called.
    pub fn partial_message_mut(&mut self) -> &mut Vec<u8> {
        &mut self.rx.partial_message
    }

    /// Returns the number of bytes of the expected fragment that a route has written so far.
    pub fn placed_bytes(&self) -> usize {
        self.rx.placed_bytes
    }

    /// Records how many bytes of the expected fragment the route has written so far.
    pub fn set_placed_bytes(&mut self, byte_count: usize) {
        self.rx.placed_bytes = byte_count;
    }

    /// Drops the part of the expected fragment that a route has written.
    pub fn drop_placed_bytes(&mut self) {
        self.rx.drop_placed_bytes();
    }

    /// Accepts the expected fragment, the payload of which a route has written completely. `ack` is
    /// the acknowledgement of its frame. Behind the payload of the last fragment the message must
    /// have nothing else.
    pub fn accept_placed_fragment(
        &mut self,
        now: Micros,
        is_last: bool,
        ack: u64,
        payload_bytes: usize,
    ) {
        self.handle_ack(now, ack, false);
        let rx = &mut self.rx;
        rx.placed_bytes = 0;
        rx.expected_seq += 1;
        if is_last {
            rx.complete_partial_message();
        }
        self.count_received_fragment(now, payload_bytes);
    }
}
