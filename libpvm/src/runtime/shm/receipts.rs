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

/// Positions in a ring and the fragments that precede them.
#[derive(Debug, Default)]
pub(super) struct Receipts {
    /// Position and the number of the first fragment behind it; ascending.
    positions: VecDeque<(u64, u64)>,
    /// The link's retransmission count to which the positions belong.
    retransmission_count: u64,
}

impl Receipts {
    /// Records that the link has written its fragments to the ring.
    #[inline]
    pub(super) fn record_written(&mut self, position: u64, link: &Link) {
        if self.retransmission_count != link.retransmission_count() {
            self.positions.clear();
            self.retransmission_count = link.retransmission_count();
        }
        let next_seq = link.next_seq();
        // The newest entry moves along until it is far from the one before it.
        let remembered_position = match self.positions.len() {
            0 | 1 => None,
            len => Some(self.positions[len - 2].0),
        };
        match self.positions.back_mut() {
            Some(newest)
                if remembered_position
                    .is_some_and(|previous| newest.0 - previous < POSITION_DISTANCE_BYTES) =>
            {
                *newest = (position, next_seq);
            }
            _ => self.positions.push_back((position, next_seq)),
        }
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
            self.positions.clear();
            return Ok(());
        }
        let read_position = writer.read_position()?;
        let mut received_below = None;
        while let Some((position, next_seq)) = self.positions.front()
            && *position <= read_position
        {
            received_below = Some(*next_seq);
            self.positions.pop_front();
        }
        if let Some(seq) = received_below {
            link.confirm_received(now, seq);
        }
        Ok(())
    }

    /// True if the reader may not have read everything.
    pub(super) fn has_open_positions(&self) -> bool {
        !self.positions.is_empty()
    }
}
