//! Receives small messages from rings without the containers through which other messages pass.

use super::super::core::{Core, STAMPED_HEAD_BYTES};
use super::super::links::link_at;
use super::ShmRoutes;
use sempa_proto::causal::{Position, STAMP_BYTES};
use sempa_proto::link::{
    CPU_HINT_INDEX, FLAG_OUT_OF_LINE, INLINE_BODY_BYTES_MAX, LinkKind, SHORT_HEAD_BYTES,
    decode_short_head,
};
use sempa_proto::message::{CTX_BASE, CTX_TASK_CONTROL, MESSAGE_HEAD_BYTES, decode_message_head};
use sempa_proto::{Micros, Tid};
use sempa_ring::doorbell::SlotCursor;

/// Size in bytes of all headers of a small message in a ring.
const RECORD_HEAD_BYTES: usize = SHORT_HEAD_BYTES + STAMPED_HEAD_BYTES;

/// Header of a small message that a program has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallMessageHead {
    pub src: Tid,
    pub ctx: i32,
    pub tag: i32,
    pub wid: i32,
    pub enc: i32,
    /// True if another record was found in the ring behind the message.
    pub is_followed: bool,
}

/// The headers of a record, decoded.
struct RecordHead {
    seq: u64,
    ack: u64,
    writer_cpu: u8,
    stamp: u64,
    message_head: SmallMessageHead,
}

impl RecordHead {
    /// Decodes the headers of a record from `src`. Returns `None` if the record is not a whole
    /// message of a program: a part of a message, a message outside of the ring, or a message of
    /// the library.
    #[inline]
    fn decode(src: Tid, bytes: &[u8; RECORD_HEAD_BYTES]) -> Option<Self> {
        let (short_head, rest) = bytes.split_first_chunk::<SHORT_HEAD_BYTES>()?;
        let (stamp, rest) = rest.split_first_chunk::<STAMP_BYTES>()?;
        let (ctx, tag, wid, enc) = decode_message_head(rest.first_chunk::<MESSAGE_HEAD_BYTES>()?);
        let (kind, seq, ack) = decode_short_head(*short_head)?;
        let is_small_message = kind == LinkKind::Data { is_last: true }
            && short_head[0] & FLAG_OUT_OF_LINE == 0
            && ctx >= CTX_BASE
            && ctx != CTX_TASK_CONTROL
            && !Core::handles_tag(ctx, tag);
        is_small_message.then_some(Self {
            seq,
            ack,
            writer_cpu: short_head[CPU_HINT_INDEX],
            stamp: u64::from_le_bytes(*stamp),
            message_head: SmallMessageHead {
                src,
                ctx,
                tag,
                wid,
                enc,
                is_followed: false,
            },
        })
    }
}

impl ShmRoutes {
    /// Returns the only slot whose ring is marked and has a record; `None` if there are none or
    /// several.
    #[inline]
    fn only_readable_slot(&mut self) -> Option<usize> {
        if let Some(slot) = self.doorbell.as_ref()?.get().only_pending_slot() {
            return self.ring_mut(slot)?.is_readable().then_some(slot);
        }
        let (mut cursor, mut readable_slot) = (SlotCursor::default(), None);
        while let Some(slot) = self.next_pending_slot(&mut cursor) {
            if self.ring_mut(slot).is_some_and(|ring| ring.is_readable())
                && readable_slot.replace(slot).is_some()
            {
                return None;
            }
        }
        readable_slot
    }
}

impl Core {
    /// True if a program may receive the next small message of a ring at once, because nothing else
    /// waits.
    #[inline]
    pub(crate) fn receives_at_once(&self) -> bool {
        self.is_connected()
            && self.inbox.is_empty()
            && self.order.is_quiet()
            && self.has_no_deferred_work()
    }

    /// Receives a message with at most [`INLINE_BODY_BYTES_MAX`] bytes whose ring is the only one
    /// with a record, and replaces the content of `body` by its body. Returns `None` and changes
    /// nothing if the message cannot be received at once; the other ways to receive then find it.
    /// With `looks_ahead` the call also looks whether another record follows. A task that has just
    /// waited for this record should not look: it would take the next cache line from the writer.
    #[inline]
    pub(crate) fn try_receive_small(
        &mut self,
        now: Micros,
        body: &mut Vec<u8>,
        looks_ahead: bool,
    ) -> Option<SmallMessageHead> {
        if !self.receives_at_once() {
            return None;
        }
        let slot = self.shm_routes.only_readable_slot()?;
        let (shm, links, order) = self.shm_routes_links_and_order();
        let ring = shm.ring_mut(slot)?;
        let peer = ring.peer;
        let link = link_at(links, &mut ring.link_index, peer)?;
        let reader = &mut ring.ring_pair.reader;
        let head_bytes = reader.peek_small::<RECORD_HEAD_BYTES>(INLINE_BODY_BYTES_MAX, body)?;
        let mut head = RecordHead::decode(peer, &head_bytes)?;
        if !link.can_take_small_message(head.seq) || link.has_frame() {
            return None;
        }
        // The second look begins here, when the record has been seen. If another ring has a record
        // now, the stamps decide which message is first.
        if shm.has_readable_ring_besides(slot) {
            return None;
        }
        let ring = shm.ring_mut(slot)?;
        ring.ring_pair
            .reader
            .skip_record(RECORD_HEAD_BYTES + body.len());
        let reader = &mut ring.ring_pair.reader;
        head.message_head.is_followed = looks_ahead && !reader.is_empty();
        let was_writer_blocked = if head.message_head.is_followed {
            reader.release()
        } else {
            reader.release_all()
        };
        let position = Position {
            incarnation: link.incarnation(),
            end_seq: link.take_small_message(now, head.ack),
        };
        order.pass_message(peer, &mut ring.order_index, position, head.stamp);
        (ring.last_used_at, ring.empty_poll_count) = (now, 0);
        ring.peer_cpu = head.writer_cpu;
        if was_writer_blocked {
            let wake = ring.request_drainer();
            shm.pending_wakes.extend(wake);
        }
        (shm.last_writer_cpu, shm.expected_peer) = (head.writer_cpu, Some(peer));
        if self.order.has_stale_lists() {
            self.schedule_order_timers(now);
        }
        Some(head.message_head)
    }
}
