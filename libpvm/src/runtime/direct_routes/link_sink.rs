//! Passes the frames of a direct route to the link.

use super::super::direct::FrameSink;
use sempa_proto::Micros;
use sempa_proto::link::{Link, LinkKind, SHORT_HEAD_BYTES, decode_short_head};

/// The link that receives the frames of a route.
pub(super) struct LinkSink<'a> {
    pub(super) link: &'a mut Link,
    pub(super) now: Micros,
    pub(super) has_received: bool,
    /// True if a frame was no frame of a link.
    pub(super) is_invalid: bool,
}

impl<'a> LinkSink<'a> {
    pub(super) fn new(link: &'a mut Link, now: Micros) -> Self {
        Self {
            link,
            now,
            has_received: false,
            is_invalid: false,
        }
    }

    /// True if the head is that of the fragment that the link expects.
    fn is_expected(&self, head: &[u8; SHORT_HEAD_BYTES]) -> bool {
        decode_short_head(*head).is_some_and(|(kind, seq, _)| {
            matches!(kind, LinkKind::Data { .. }) && seq == self.link.expected_seq()
        })
    }
}

impl FrameSink for LinkSink<'_> {
    fn on_frame(&mut self, frame: &[u8]) {
        self.has_received = true;
        match frame
            .split_first_chunk()
            .and_then(|(head, payload)| Some((decode_short_head(*head)?, payload)))
        {
            Some(((kind, seq, ack), payload)) => self
                .link
                .handle_borrowed_frame(self.now, kind, seq, ack, payload),
            None => self.is_invalid = true,
        }
    }

    fn begins_placement(&mut self, head: &[u8; SHORT_HEAD_BYTES]) -> bool {
        if !self.is_expected(head) {
            return false;
        }
        self.link.drop_placed_bytes();
        true
    }

    fn continues_placement(&mut self, head: &[u8; SHORT_HEAD_BYTES], placed_bytes: usize) -> bool {
        self.is_expected(head) && self.link.placed_bytes() == placed_bytes
    }

    fn is_last_of_message(&self, head: &[u8; SHORT_HEAD_BYTES]) -> bool {
        matches!(
            decode_short_head(*head),
            Some((LinkKind::Data { is_last: true }, ..))
        )
    }

    fn message(&mut self) -> &mut Vec<u8> {
        self.link.partial_message_mut()
    }

    fn set_placed_bytes(&mut self, byte_count: usize) {
        self.link.set_placed_bytes(byte_count);
    }

    fn accept_payload(&mut self, head: &[u8; SHORT_HEAD_BYTES], payload_bytes: usize) {
        self.has_received = true;
        if let Some((_, _, ack)) = decode_short_head(*head) {
            let is_last = self.is_last_of_message(head);
            self.link
                .accept_placed_fragment(self.now, is_last, ack, payload_bytes);
        }
    }
}
