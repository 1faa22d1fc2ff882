//! The window of a link: the fragments that are in flight on routes that do not confirm what the
//! receiver has read.

use super::{IDLE_QUEUE_CAPACITY, WINDOW_BYTES_MAX, WINDOW_FRAGMENTS_MAX};
use std::collections::VecDeque;

/// The unacknowledged fragments of a link, without those that were transmitted on a confirming
/// route.
#[derive(Clone, Debug, Default)]
pub(super) struct Window {
    /// Sizes in bytes of the fragments, in ascending order of their numbers.
    sizes: VecDeque<usize>,
    /// Number of the first fragment in `sizes`.
    first_seq: u64,
    /// Sum of `sizes`, in bytes.
    bytes: usize,
}

impl Window {
    /// True if another fragment may be transmitted.
    pub(super) fn is_open(&self) -> bool {
        self.bytes < WINDOW_BYTES_MAX && (self.sizes.len() as u64) < WINDOW_FRAGMENTS_MAX
    }

    /// Records that a fragment is transmitted. `seq` must be the number after the last recorded
    /// fragment, or any number if no fragment is in flight.
    pub(super) fn record_transmission(&mut self, seq: u64, fragment_bytes: usize) {
        if self.sizes.is_empty() {
            self.first_seq = seq;
        }
        self.sizes.push_back(fragment_bytes);
        self.bytes += fragment_bytes;
    }

    /// Removes the fragments below `acked_below`.
    pub(super) fn record_ack(&mut self, acked_below: u64) {
        while self.first_seq < acked_below
            && let Some(fragment_bytes) = self.sizes.pop_front()
        {
            self.bytes -= fragment_bytes;
            self.first_seq += 1;
        }
    }

    /// Removes all fragments, because they will be transmitted again or by other means.
    pub(super) fn clear(&mut self) {
        self.sizes.clear();
        self.bytes = 0;
    }

    /// Frees excess memory of an idle link.
    pub(super) fn shrink_idle(&mut self) {
        self.sizes.shrink_to(IDLE_QUEUE_CAPACITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fragments of a confirming route leave gaps in the numbers only while the window is empty.
    #[test]
    fn window_counts_exactly_what_is_in_flight() {
        let mut window = Window::default();
        for seq in 5..9 {
            window.record_transmission(seq, 100);
        }
        window.record_ack(7);
        assert_eq!((window.sizes.len(), window.bytes), (2, 200));
        window.record_ack(30);
        assert_eq!((window.sizes.len(), window.bytes), (0, 0));
        window.record_transmission(40, 10);
        window.record_ack(40);
        assert_eq!(window.bytes, 10);
        window.record_ack(41);
        assert_eq!(window.bytes, 0);
    }

    #[test]
    fn window_closes_at_its_limits() {
        let mut window = Window::default();
        for seq in 0..WINDOW_FRAGMENTS_MAX {
            assert!(window.is_open());
            window.record_transmission(seq, 1);
        }
        assert!(!window.is_open());
        window.clear();
        window.record_transmission(0, WINDOW_BYTES_MAX);
        assert!(!window.is_open());
    }
}
