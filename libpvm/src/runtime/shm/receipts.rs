//! Receipts of a ring: the reader's position says which fragments the peer has received. A ring
//! needs neither acknowledgements nor timers.

use sempa_proto::Micros;
use sempa_proto::link::Link;
use sempa_ring::ring::{CorruptRing, RingWriter};
use sempa_ring::shared_memory::SharedRing;
use std::collections::VecDeque;

/// Number of bytes of the ring after which another position is remembered. Positions between two
/// remembered ones count only when the reader has passed the next one.
const POSITION_DISTANCE_BYTES: u64 = 4 << 10;

/// Position in a ring, and the number of the first fragment behind it.
#[derive(Clone, Copy, Debug)]
struct WrittenEnd {
    position: u64,
    next_seq: u64,
}

/// Positions in a ring and the fragments that precede them.
#[derive(Debug, Default)]
pub(super) struct Receipts {
    /// Ends at a distance of [`POSITION_DISTANCE_BYTES`] or more, ascending.
    remembered_ends: VecDeque<WrittenEnd>,
    /// End of everything that was written, if it is behind the remembered ends.
    newest_end: Option<WrittenEnd>,
    /// Position from which another end is remembered.
    next_remembered_position: u64,
    /// The link's retransmission count to which the positions belong.
    retransmission_count: u64,
}

impl Receipts {
    /// Records that the link has written its fragments to the ring.
    #[inline]
    pub(super) fn record_written(&mut self, position: u64, link: &Link) {
        if self.retransmission_count != link.retransmission_count() {
            self.clear();
            self.retransmission_count = link.retransmission_count();
        }
        let newest_end = WrittenEnd {
            position,
            next_seq: link.next_seq(),
        };
        if position < self.next_remembered_position {
            self.newest_end = Some(newest_end);
        } else {
            self.newest_end = None;
            self.next_remembered_position = position + POSITION_DISTANCE_BYTES;
            self.remembered_ends.push_back(newest_end);
        }
    }

    fn clear(&mut self) {
        self.remembered_ends.clear();
        (self.newest_end, self.next_remembered_position) = (None, 0);
    }

    /// Tells the link what the reader has read.
    ///
    /// # Errors
    /// [`CorruptRing`] if the reader's position is impossible.
    pub(super) fn confirm(
        &mut self,
        now: Micros,
        writer: &mut RingWriter<SharedRing>,
        link: &mut Link,
    ) -> Result<(), CorruptRing> {
        if self.retransmission_count != link.retransmission_count() {
            self.clear();
            return Ok(());
        }
        let read_position = writer.read_position()?;
        let mut received_below = None;
        let is_read = |end: &WrittenEnd| end.position <= read_position;
        while let Some(end) = self.remembered_ends.front().copied().filter(is_read) {
            received_below = Some(end.next_seq);
            self.remembered_ends.pop_front();
        }
        if let Some(end) = self.newest_end.take_if(|end| is_read(end)) {
            received_below = Some(end.next_seq);
        }
        if let Some(seq) = received_below {
            link.confirm_received(now, seq);
        }
        Ok(())
    }

    /// True if the reader may not have read everything.
    pub(super) fn has_open_positions(&self) -> bool {
        !self.remembered_ends.is_empty() || self.newest_end.is_some()
    }
}
