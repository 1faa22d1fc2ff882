//! The source's side of a pre-copy: the record of the pages that were sent, and the condition that
//! ends the pre-copy early.
//!
//! A process is identified by its PID in the task's PID namespace, as in CRIU's images.

use super::pages::{BLOCK_PAGES, block_and_index};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Length in bytes of a page's hash, a prefix of its BLAKE3 hash. Two pages with the same prefix
/// count as equal.
const HASH_BYTES: usize = 16;

type Hash = [u8; HASH_BYTES];

/// The condition that ends a pre-copy early: a request, a deadline, or a connection that is so fast
/// that pre-copy is not worthwhile.
///
/// All clones share one request.
#[derive(Clone, Debug)]
pub struct PreCopyStopCondition {
    stop_requested: Arc<AtomicBool>,
    deadline: Instant,
    /// Send rate in bytes per second above which the pre-copy stops; `None` if the rate is not
    /// limited.
    bytes_per_second_max: Option<u64>,
}

impl PreCopyStopCondition {
    /// Creates a condition that stops the pre-copy at `deadline`.
    pub fn at_deadline(deadline: Instant) -> Self {
        Self {
            stop_requested: Arc::default(),
            deadline,
            bytes_per_second_max: None,
        }
    }

    /// Also stops the pre-copy if its send rate exceeds this limit.
    #[must_use]
    pub fn with_rate_limit(self, bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second_max: Some(bytes_per_second),
            ..self
        }
    }

    /// Requests the end of the pre-copy. The request cannot be undone.
    pub fn request_stop(&self) {
        self.stop_requested.store(true, Ordering::Relaxed);
    }

    /// Stops the pre-copy if this measured rate, in bytes per second, is above the limit.
    pub(crate) fn observe_rate(&self, bytes_per_second: u64) {
        if self
            .bytes_per_second_max
            .is_some_and(|max| bytes_per_second > max)
        {
            self.request_stop();
        }
    }

    /// True if the pre-copy must end.
    pub(crate) fn is_due(&self) -> bool {
        self.stop_requested.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }
}

/// Records which pages of one block were sent, with the hashes of the content that was sent.
#[derive(Debug)]
struct SentBlock {
    sent_bits: u128,
    /// Hash of the content that was sent for each page of the block.
    hashes: Box<[Hash]>,
}

/// The pages of a task that were sent to the target, each with a hash of its content when it was
/// sent.
#[derive(Debug, Default)]
pub struct SentPages {
    page_size: u64,
    /// The state of each block, by process and block number.
    blocks: BTreeMap<(u64, u64), SentBlock>,
    /// Number of distinct pages that were sent.
    distinct_page_count: u64,
    /// Number of bytes that were sent, including pages that were sent again.
    sent_bytes: u64,
}

impl SentPages {
    pub(crate) fn new(page_size: u64) -> Self {
        Self {
            page_size,
            ..Self::default()
        }
    }

    pub(crate) fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Returns the number of distinct pages that were sent.
    pub(crate) fn distinct_page_count(&self) -> u64 {
        self.distinct_page_count
    }

    /// Returns the number of bytes that were sent, including pages that were sent again.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// True if this page was sent with this content.
    pub(crate) fn contains(&self, namespace_pid: u64, address: u64, content: &[u8]) -> bool {
        let (block, index) = block_and_index(address, self.page_size);
        let block = self.blocks.get(&(namespace_pid, block));
        block.is_some_and(|block| {
            block.sent_bits & (1 << index) != 0 && block.hashes[index] == content_hash(content)
        })
    }

    /// Records that a page is sent with this content. Returns false if the page must not be sent:
    /// the target already has this content, or the page was not sent before and `pages_max`
    /// distinct pages were already sent.
    pub(crate) fn record(
        &mut self,
        namespace_pid: u64,
        address: u64,
        content: &[u8],
        pages_max: u64,
    ) -> bool {
        let (block, index) = block_and_index(address, self.page_size);
        let key = (namespace_pid, block);
        let was_sent = self
            .blocks
            .get(&key)
            .is_some_and(|block| block.sent_bits & (1 << index) != 0);
        if !was_sent && self.distinct_page_count >= pages_max {
            return false;
        }
        let block = self.blocks.entry(key).or_insert_with(|| SentBlock {
            sent_bits: 0,
            hashes: vec![Hash::default(); BLOCK_PAGES as usize].into(),
        });
        let hash = content_hash(content);
        if was_sent && block.hashes[index] == hash {
            return false;
        }
        (block.sent_bits, block.hashes[index]) = (block.sent_bits | 1 << index, hash);
        self.distinct_page_count += u64::from(!was_sent);
        self.sent_bytes += content.len() as u64;
        true
    }
}

fn content_hash(content: &[u8]) -> Hash {
    *blake3::hash(content)
        .as_bytes()
        .first_chunk()
        .expect("it has more bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A pre-copy stops when any clone of the condition requests it, and at the deadline.
    #[test]
    fn pre_copy_stops_on_request_and_at_the_deadline() {
        let condition =
            PreCopyStopCondition::at_deadline(Instant::now() + Duration::from_secs(600));
        assert!(!condition.is_due() && PreCopyStopCondition::at_deadline(Instant::now()).is_due());
        condition.clone().request_stop();
        assert!(condition.is_due());
    }

    /// A page is recorded again only with new content, and no page beyond the maximum is recorded.
    #[test]
    fn pages_are_sent_once_and_up_to_the_maximum() {
        let mut sent_pages = SentPages::new(4);
        let is_new: Vec<bool> = [(0, 1), (4, 1), (0, 1), (0, 2), (8, 1)]
            .map(|(address, byte)| sent_pages.record(1, address, &[byte; 4], 2))
            .to_vec();
        assert_eq!(is_new, [true, true, false, true, false]);
        assert_eq!(
            (sent_pages.distinct_page_count, sent_pages.sent_bytes()),
            (2, 12)
        );
        assert!(
            sent_pages.contains(1, 0, &[2; 4])
                && !sent_pages.contains(1, 0, &[1; 4])
                && !sent_pages.contains(1, 8, &[1; 4])
        );
    }
}
