//! The target's side of a pre-copy: stores the received pages in memory until CRIU requests them.
//!
//! A process is identified by its PID in the task's PID namespace, as in CRIU's images.

use super::pages::{
    BLOCK_PAGES, BlockRange, block_and_index, page_bits, page_size, split_by_block,
};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Records which pages of one block were received and delivered.
#[derive(Debug)]
struct Block {
    received_bits: u128,
    /// Received pages that were not passed to the engine yet.
    undelivered_bits: u128,
    /// Index of the block's memory in the file of [`ReceivedPages`]. `None` after all pages of the
    /// block were delivered and its memory was freed.
    slot: Option<u64>,
}

/// Pre-copied pages that arrived before their task was restored.
///
/// The pages are kept in a sparse file in memory: slots that were never written, or that were
/// freed, use no memory.
#[derive(Debug)]
pub struct ReceivedPages {
    page_size: u64,
    file: Option<File>,
    /// The state of each block, by process and block number.
    blocks: BTreeMap<(u64, u64), Block>,
    /// Number of pages that are stored in memory.
    stored_page_count: u64,
    /// Number of slots of the file that have been assigned to blocks.
    slot_count: u64,
}

impl ReceivedPages {
    /// Creates an empty store for pages of this host's page size.
    pub fn empty() -> ReceivedPages {
        ReceivedPages::with_page_size(page_size())
    }

    pub(crate) fn with_page_size(page_size: u64) -> ReceivedPages {
        ReceivedPages {
            page_size,
            file: None,
            blocks: BTreeMap::new(),
            stored_page_count: 0,
            slot_count: 0,
        }
    }

    pub(crate) fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Returns the number of pages that are stored in memory.
    pub(crate) fn page_count(&self) -> u64 {
        self.stored_page_count
    }

    /// Returns the number of bytes that are stored in memory.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_page_count * self.page_size
    }

    /// Returns the length in bytes of a range of pages. `None` if the range is empty, not aligned
    /// to pages, or not within one block.
    pub(crate) fn bytes_within_block(&self, address: u64, pages: u64) -> Option<usize> {
        let (_, first) = block_and_index(address, self.page_size);
        let fits = address.is_multiple_of(self.page_size)
            && pages > 0
            && pages <= BLOCK_PAGES - first as u64;
        fits.then(|| (pages * self.page_size) as usize)
    }

    /// Stores the content of pages, which must be within one block. Replaces content that was
    /// stored earlier for the same page.
    ///
    /// # Errors
    /// Memory for the pages could not be allocated or written.
    pub(crate) fn insert(&mut self, process: u64, address: u64, content: &[u8]) -> io::Result<()> {
        let (block, first) = block_and_index(address, self.page_size);
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(File::from(memfd_create(
                c"sempa-ahead",
                MFdFlags::MFD_CLOEXEC,
            )?)),
        };
        let block = match self.blocks.entry((process, block)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                file.set_len((self.slot_count + 1) * BLOCK_PAGES * self.page_size)?;
                self.slot_count += 1;
                unknown.insert(Block {
                    received_bits: 0,
                    undelivered_bits: 0,
                    slot: Some(self.slot_count - 1),
                })
            }
        };
        // Delivered pages are never requested again.
        let Some(slot) = block.slot else {
            return Ok(());
        };
        file.write_all_at(
            content,
            (slot * BLOCK_PAGES + first as u64) * self.page_size,
        )?;
        let bits = page_bits(first, content.len() / self.page_size as usize);
        self.stored_page_count += u64::from((bits & !block.received_bits).count_ones());
        (block.received_bits, block.undelivered_bits) =
            (block.received_bits | bits, block.undelivered_bits | bits);
        Ok(())
    }

    /// Returns the content of these pages, with zeros for pages that have not been received.
    ///
    /// `None` if none of the pages has been received, if they are more than [`BLOCK_PAGES`], or if
    /// some were freed: the source knows only which pages it has sent, not which of them were
    /// freed.
    pub(crate) fn get(&self, process: u64, address: u64, pages: u64) -> Option<Vec<u8>> {
        let page_size = self.page_size;
        if pages == 0 || pages > BLOCK_PAGES || !address.is_multiple_of(page_size) {
            return None;
        }
        let ranges = split_by_block(address, pages, page_size);
        let received = |range: &BlockRange| {
            self.blocks
                .get(&(process, range.block))
                .filter(|block| block.received_bits & range.bits() != 0)
        };
        let is_freed =
            |range: &BlockRange| received(range).is_some_and(|block| block.slot.is_none());
        if ranges.iter().any(is_freed) || !ranges.iter().any(|range| received(range).is_some()) {
            return None;
        }
        let mut found = vec![0; (pages * page_size) as usize];
        let mut rest = &mut found[..];
        for range in &ranges {
            let (range_buffer, remainder) = rest.split_at_mut(range.pages * page_size as usize);
            if let Some(block) = received(range) {
                let at = (block.slot? * BLOCK_PAGES + range.first as u64) * page_size;
                // After a read error the source sends all requested pages.
                self.file.as_ref()?.read_exact_at(range_buffer, at).ok()?;
            }
            rest = remainder;
        }
        Some(found)
    }

    /// Marks these pages as delivered to the engine. The memory of a block is freed when all its
    /// received pages were delivered.
    pub(crate) fn mark_delivered(&mut self, process: u64, address: u64, pages: u64) {
        let bytes = BLOCK_PAGES * self.page_size;
        for range in split_by_block(address, pages, self.page_size) {
            let Some(block) = self.blocks.get_mut(&(process, range.block)) else {
                continue;
            };
            block.undelivered_bits &= !range.bits();
            let Some(slot) = block.slot.take_if(|_| block.undelivered_bits == 0) else {
                continue;
            };
            self.stored_page_count -= u64::from(block.received_bits.count_ones());
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            // If freeing fails, the memory is freed together with the file.
            let _ = self
                .file
                .as_ref()
                .map(|file| fallocate(file, flags, (slot * bytes) as i64, bytes as i64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 16;

    fn insert(received: &mut ReceivedPages, address: u64, pages: u64, fill_byte: u8) {
        let length = received
            .bytes_within_block(address, pages)
            .expect("it is within a block");
        received
            .insert(1, address, &vec![fill_byte; length])
            .expect("there is memory");
    }

    /// A page keeps its latest content until all received pages of its block were delivered.
    #[test]
    fn pages_are_kept_until_their_block_is_delivered() {
        let mut received = ReceivedPages::with_page_size(PAGE);
        insert(&mut received, 0, 4, 1);
        insert(&mut received, 2 * PAGE, 1, 2);
        insert(&mut received, BLOCK_PAGES * PAGE, 2, 3);
        assert_eq!(received.stored_bytes(), 6 * PAGE);
        for _ in 0..2 {
            assert_eq!(
                received.get(1, PAGE, 2),
                Some([[1; PAGE as usize], [2; PAGE as usize]].concat())
            );
        }
        assert_eq!(
            (received.get(2, 0, 1), received.get(1, 9 * PAGE, 1)),
            (None, None),
            "nobody has sent these"
        );
        received.mark_delivered(1, PAGE, 3);
        received.mark_delivered(2, 0, 1);
        assert!(
            received.get(1, PAGE, 1).is_some(),
            "a part of the block is wanted yet"
        );
        received.mark_delivered(1, 0, 5);
        assert_eq!(
            (received.get(1, 0, 1), received.stored_bytes()),
            (None, 2 * PAGE)
        );
        assert_eq!(
            received
                .get(1, (BLOCK_PAGES - 1) * PAGE, 2)
                .map(|found| found.len()),
            Some(2 * PAGE as usize)
        );
        assert_eq!(
            received.get(1, 3 * PAGE, BLOCK_PAGES),
            None,
            "one of them was given back"
        );
        insert(&mut received, PAGE, 1, 3);
        assert_eq!(
            (received.get(1, PAGE, 1), received.stored_bytes()),
            (None, 2 * PAGE)
        );
    }

    /// Pages of two blocks are read together, with zeros for pages that were not received.
    #[test]
    fn missing_pages_are_read_as_zeros() {
        let mut received = ReceivedPages::with_page_size(PAGE);
        let border = BLOCK_PAGES * PAGE;
        insert(&mut received, border - PAGE, 1, 1);
        insert(&mut received, border + PAGE, 1, 2);
        let found = received.get(1, border - PAGE, 3).expect("some are here");
        assert_eq!(
            found
                .chunks(PAGE as usize)
                .map(|page| page[0])
                .collect::<Vec<u8>>(),
            [1, 0, 2]
        );
    }

    /// Ranges that are empty, unaligned or cross the end of a block are refused.
    #[test]
    fn ranges_outside_one_block_are_refused() {
        let mut received = ReceivedPages::with_page_size(PAGE);
        let refused = [
            (0, 0),
            (1, 1),
            (0, BLOCK_PAGES + 1),
            (PAGE, BLOCK_PAGES),
            (0, u64::MAX),
        ];
        assert!(
            refused
                .iter()
                .all(|(address, pages)| received.bytes_within_block(*address, *pages).is_none())
        );
        assert!(received.get(1, 0, 1).is_none());
        insert(&mut received, 0, BLOCK_PAGES, 1);
        assert!(received.get(1, 0, BLOCK_PAGES + 1).is_none() && received.get(1, 1, 1).is_none());
        assert!(received.get(1, 0, BLOCK_PAGES).is_some());
    }
}
