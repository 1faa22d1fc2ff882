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
struct ReceivedBlock {
    received_bits: u128,
    /// Received pages that were not passed to the engine yet.
    undelivered_bits: u128,
    /// Index of the block's memory in the file of [`ReceivedPages`]. `None` after all pages of the
    /// block were delivered and its memory was freed.
    slot: Option<u64>,
}

/// Pre-copied pages that arrived before their task was restored.
///
/// The pages are stored in a sparse file in memory: slots that were never written, or that were
/// freed, use no memory.
#[derive(Debug)]
pub struct ReceivedPages {
    page_size: u64,
    file: Option<File>,
    /// The state of each block, by process and block number.
    blocks: BTreeMap<(u64, u64), ReceivedBlock>,
    /// Number of pages that are stored in memory.
    stored_page_count: u64,
    /// Number of slots of the file that have been assigned to blocks.
    slot_count: u64,
}

impl ReceivedPages {
    /// Creates an empty store for pages of this host's page size.
    pub fn empty() -> Self {
        Self::with_page_size(page_size())
    }

    pub(crate) fn with_page_size(page_size: u64) -> Self {
        Self {
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
    pub(crate) fn bytes_within_block(&self, address: u64, page_count: u64) -> Option<usize> {
        let (_, first_index) = block_and_index(address, self.page_size);
        let is_valid = address.is_multiple_of(self.page_size)
            && page_count > 0
            && page_count <= BLOCK_PAGES - first_index as u64;
        is_valid.then(|| (page_count * self.page_size) as usize)
    }

    /// Stores the content of pages, which must be within one block. Replaces content that was
    /// stored earlier for the same page. Does nothing if the memory of the block was already freed.
    ///
    /// # Errors
    /// Memory for the pages could not be allocated or written.
    pub(crate) fn insert(
        &mut self,
        namespace_pid: u64,
        address: u64,
        content: &[u8],
    ) -> io::Result<()> {
        let (block, first_index) = block_and_index(address, self.page_size);
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(File::from(memfd_create(
                c"sempa-ahead",
                MFdFlags::MFD_CLOEXEC,
            )?)),
        };
        let block = match self.blocks.entry((namespace_pid, block)) {
            Entry::Occupied(occupied_entry) => occupied_entry.into_mut(),
            Entry::Vacant(vacant_entry) => {
                file.set_len((self.slot_count + 1) * BLOCK_PAGES * self.page_size)?;
                self.slot_count += 1;
                vacant_entry.insert(ReceivedBlock {
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
            (slot * BLOCK_PAGES + first_index as u64) * self.page_size,
        )?;
        let bits = page_bits(first_index, content.len() / self.page_size as usize);
        self.stored_page_count += u64::from((bits & !block.received_bits).count_ones());
        (block.received_bits, block.undelivered_bits) =
            (block.received_bits | bits, block.undelivered_bits | bits);
        Ok(())
    }

    /// Returns the content of these pages, with zeros for pages that have not been received.
    ///
    /// `None` if the range is invalid, if none of the pages has been received, if more than
    /// [`BLOCK_PAGES`] pages are requested, if the content cannot be read, or if some of the pages
    /// were freed: the source knows only which pages it has sent, not which of them were freed.
    pub(crate) fn get(&self, namespace_pid: u64, address: u64, page_count: u64) -> Option<Vec<u8>> {
        let page_size = self.page_size;
        if page_count == 0 || page_count > BLOCK_PAGES || !address.is_multiple_of(page_size) {
            return None;
        }
        let ranges = split_by_block(address, page_count, page_size);
        let received_bits = |range: &BlockRange| {
            self.blocks
                .get(&(namespace_pid, range.block))
                .filter(|block| block.received_bits & range.bits() != 0)
        };
        let is_freed =
            |range: &BlockRange| received_bits(range).is_some_and(|block| block.slot.is_none());
        if ranges.iter().any(is_freed) || !ranges.iter().any(|range| received_bits(range).is_some())
        {
            return None;
        }
        let mut content = vec![0; (page_count * page_size) as usize];
        let mut remaining_buffer = &mut content[..];
        for range in &ranges {
            let (range_buffer, remainder) =
                remaining_buffer.split_at_mut(range.page_count * page_size as usize);
            if let Some(block) = received_bits(range) {
                let offset = (block.slot? * BLOCK_PAGES + range.first_index as u64) * page_size;
                // After a read error the source sends all requested pages.
                self.file
                    .as_ref()?
                    .read_exact_at(range_buffer, offset)
                    .ok()?;
            }
            remaining_buffer = remainder;
        }
        Some(content)
    }

    /// Marks these pages as delivered to the engine. The memory of a block is freed when all its
    /// received pages were delivered.
    pub(crate) fn mark_delivered(&mut self, namespace_pid: u64, address: u64, page_count: u64) {
        let block_bytes = BLOCK_PAGES * self.page_size;
        for range in split_by_block(address, page_count, self.page_size) {
            let Some(block) = self.blocks.get_mut(&(namespace_pid, range.block)) else {
                continue;
            };
            block.undelivered_bits &= !range.bits();
            let Some(slot) = block.slot.take_if(|_| block.undelivered_bits == 0) else {
                continue;
            };
            self.stored_page_count -= u64::from(block.received_bits.count_ones());
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            // If freeing fails, the memory is freed together with the file.
            let _ = self.file.as_ref().map(|file| {
                fallocate(file, flags, (slot * block_bytes) as i64, block_bytes as i64)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 16;

    fn insert(received_pages: &mut ReceivedPages, address: u64, page_count: u64, fill_byte: u8) {
        let length = received_pages
            .bytes_within_block(address, page_count)
            .expect("it is within a block");
        received_pages
            .insert(1, address, &vec![fill_byte; length])
            .expect("there is memory");
    }

    /// The latest content of a page is returned until all received pages of its block were
    /// delivered.
    #[test]
    fn pages_are_kept_until_their_block_is_delivered() {
        let mut received_pages = ReceivedPages::with_page_size(PAGE_BYTES);
        insert(&mut received_pages, 0, 4, 1);
        insert(&mut received_pages, 2 * PAGE_BYTES, 1, 2);
        insert(&mut received_pages, BLOCK_PAGES * PAGE_BYTES, 2, 3);
        assert_eq!(received_pages.stored_bytes(), 6 * PAGE_BYTES);
        for _ in 0..2 {
            assert_eq!(
                received_pages.get(1, PAGE_BYTES, 2),
                Some([[1; PAGE_BYTES as usize], [2; PAGE_BYTES as usize]].concat())
            );
        }
        assert_eq!(
            (
                received_pages.get(2, 0, 1),
                received_pages.get(1, 9 * PAGE_BYTES, 1)
            ),
            (None, None),
            "nobody has sent these"
        );
        received_pages.mark_delivered(1, PAGE_BYTES, 3);
        received_pages.mark_delivered(2, 0, 1);
        assert!(
            received_pages.get(1, PAGE_BYTES, 1).is_some(),
            "a part of the block is wanted yet"
        );
        received_pages.mark_delivered(1, 0, 5);
        assert_eq!(
            (received_pages.get(1, 0, 1), received_pages.stored_bytes()),
            (None, 2 * PAGE_BYTES)
        );
        assert_eq!(
            received_pages
                .get(1, (BLOCK_PAGES - 1) * PAGE_BYTES, 2)
                .map(|content| content.len()),
            Some(2 * PAGE_BYTES as usize)
        );
        assert_eq!(
            received_pages.get(1, 3 * PAGE_BYTES, BLOCK_PAGES),
            None,
            "one of them was given back"
        );
        insert(&mut received_pages, PAGE_BYTES, 1, 3);
        assert_eq!(
            (
                received_pages.get(1, PAGE_BYTES, 1),
                received_pages.stored_bytes()
            ),
            (None, 2 * PAGE_BYTES)
        );
    }

    /// Pages of two blocks are read together, with zeros for pages that were not received.
    #[test]
    fn missing_pages_are_read_as_zeros() {
        let mut received_pages = ReceivedPages::with_page_size(PAGE_BYTES);
        let boundary = BLOCK_PAGES * PAGE_BYTES;
        insert(&mut received_pages, boundary - PAGE_BYTES, 1, 1);
        insert(&mut received_pages, boundary + PAGE_BYTES, 1, 2);
        let content = received_pages
            .get(1, boundary - PAGE_BYTES, 3)
            .expect("some are here");
        assert_eq!(
            content
                .chunks(PAGE_BYTES as usize)
                .map(|page| page[0])
                .collect::<Vec<u8>>(),
            [1, 0, 2]
        );
    }

    /// Ranges that are empty, unaligned or cross the end of a block are refused.
    #[test]
    fn ranges_outside_one_block_are_refused() {
        let mut received_pages = ReceivedPages::with_page_size(PAGE_BYTES);
        let invalid_ranges = [
            (0, 0),
            (1, 1),
            (0, BLOCK_PAGES + 1),
            (PAGE_BYTES, BLOCK_PAGES),
            (0, u64::MAX),
        ];
        assert!(invalid_ranges.iter().all(|(address, page_count)| {
            received_pages
                .bytes_within_block(*address, *page_count)
                .is_none()
        }));
        assert!(received_pages.get(1, 0, 1).is_none());
        insert(&mut received_pages, 0, BLOCK_PAGES, 1);
        assert!(
            received_pages.get(1, 0, BLOCK_PAGES + 1).is_none()
                && received_pages.get(1, 1, 1).is_none()
        );
        assert!(received_pages.get(1, 0, BLOCK_PAGES).is_some());
    }
}
