//! The source's side of a pre-copy: the record of the pages that were sent, and the condition that
//! ends the pre-copy early.
//!
//! A process is identified by its PID in the task's PID namespace, as in CRIU's images.

use super::pages::{BLOCK_PAGES, block_and_index};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Bytes of a page's hash, a prefix of its BLAKE3 hash. Two pages with the same prefix count as
/// equal.
const HASH_BYTES: usize = 16;

type Hash = [u8; HASH_BYTES];

/// Ends a pre-copy early: on request, at a deadline, or on a link so fast that pre-copy does not
/// pay off.
///
/// All clones share one request.
#[derive(Clone, Debug)]
pub struct PreCopyStop {
    requested: Arc<AtomicBool>,
    deadline: Instant,
    /// Limit in bytes per second.
    rate_max: Option<u64>,
}

impl PreCopyStop {
    /// Creates a stop at a deadline.
    pub fn at(deadline: Instant) -> PreCopyStop {
        PreCopyStop {
            requested: Arc::default(),
            deadline,
            rate_max: None,
        }
    }

    /// Adds a stop as soon as more bytes per second are sent than this.
    #[must_use]
    pub fn or_above_rate(self, bytes_per_second: u64) -> PreCopyStop {
        PreCopyStop {
            rate_max: Some(bytes_per_second),
            ..self
        }
    }

    /// Stops the pre-copy. This cannot be undone.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }

    /// Stops the pre-copy if this measured rate, in bytes per second, is above the limit.
    pub(crate) fn observe_rate(&self, rate: u64) {
        if self.rate_max.is_some_and(|max| rate > max) {
            self.request();
        }
    }

    /// True if the pre-copy must end.
    pub(crate) fn is_due(&self) -> bool {
        self.requested.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }
}

/// The sent pages of one block.
#[derive(Debug)]
struct Block {
    sent: u128,
    /// One hash for each page of the block.
    hashes: Box<[Hash]>,
}

/// The pages of a task that the target has, with a hash of the content that was sent.
#[derive(Debug, Default)]
pub struct SentPages {
    page_size: u64,
    /// Keyed by process and block number.
    blocks: BTreeMap<(u64, u64), Block>,
    /// Distinct pages that were sent.
    pages: u64,
    /// Bytes that were sent, including pages that were sent again.
    bytes: u64,
}

impl SentPages {
    pub(crate) fn new(page_size: u64) -> SentPages {
        SentPages {
            page_size,
            ..SentPages::default()
        }
    }

    pub(crate) fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Distinct pages that were sent.
    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    /// Bytes that were sent, including pages that were sent again.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if the target has this page with this content.
    pub(crate) fn has(&self, process: u64, address: u64, content: &[u8]) -> bool {
        let (block, index) = block_and_index(address, self.page_size);
        let block = self.blocks.get(&(process, block));
        block.is_some_and(|block| {
            block.sent & (1 << index) != 0 && block.hashes[index] == hash(content)
        })
    }

    /// Records that a page is sent with this content. Returns false if the page must not be sent:
    /// the target already has this content, or the page would be a new one beyond `pages_max`
    /// distinct pages.
    pub(crate) fn record(
        &mut self,
        process: u64,
        address: u64,
        content: &[u8],
        pages_max: u64,
    ) -> bool {
        let (block, index) = block_and_index(address, self.page_size);
        let key = (process, block);
        let was_sent = self
            .blocks
            .get(&key)
            .is_some_and(|block| block.sent & (1 << index) != 0);
        if !was_sent && self.pages >= pages_max {
            return false;
        }
        let block = self.blocks.entry(key).or_insert_with(|| Block {
            sent: 0,
            hashes: vec![Hash::default(); BLOCK_PAGES as usize].into(),
        });
        let hash = hash(content);
        if was_sent && block.hashes[index] == hash {
            return false;
        }
        (block.sent, block.hashes[index]) = (block.sent | 1 << index, hash);
        self.pages += u64::from(!was_sent);
        self.bytes += content.len() as u64;
        true
    }
}

fn hash(content: &[u8]) -> Hash {
    *blake3::hash(content)
        .as_bytes()
        .first_chunk()
        .expect("it has more bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A pre-copy is due to stop when it is requested through any clone, and at its deadline.
    #[test]
    fn pre_copy_stops_on_request_and_at_the_deadline() {
        let stop = PreCopyStop::at(Instant::now() + Duration::from_secs(600));
        assert!(!stop.is_due() && PreCopyStop::at(Instant::now()).is_due());
        stop.clone().request();
        assert!(stop.is_due());
    }

    /// A page is recorded again only with new content, and no page beyond the maximum is recorded.
    #[test]
    fn pages_are_sent_once_and_up_to_the_maximum() {
        let mut sent = SentPages::new(4);
        let is_new: Vec<bool> = [(0, 1), (4, 1), (0, 1), (0, 2), (8, 1)]
            .map(|(at, byte)| sent.record(1, at, &[byte; 4], 2))
            .to_vec();
        assert_eq!(is_new, [true, true, false, true, false]);
        assert_eq!((sent.pages, sent.bytes()), (2, 12));
        assert!(sent.has(1, 0, &[2; 4]) && !sent.has(1, 0, &[1; 4]) && !sent.has(1, 8, &[1; 4]));
    }
}
