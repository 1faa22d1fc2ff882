//! Arithmetic on memory pages and on blocks of pages. Pre-copied memory is recorded, sent and
//! requested in blocks.

use nix::unistd::{SysconfVar, sysconf};

/// Number of pages in a block: one for each bit of a `u128`.
pub(crate) const BLOCK_PAGES: u64 = 128;

/// Returns this host's page size in bytes.
pub(crate) fn page_size() -> u64 {
    let size = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|bytes| u64::try_from(bytes).ok())
        .expect("the system has pages of some size")
}

/// Returns the number of the block that contains `address`, and the index within the block of the
/// page that contains `address`.
pub(crate) fn block_and_index(address: u64, page_size: u64) -> (u64, usize) {
    let page_number = address / page_size;
    (
        page_number / BLOCK_PAGES,
        (page_number % BLOCK_PAGES) as usize,
    )
}

/// Returns the bit mask of `page_count` pages of a block, starting with the page whose index is
/// `first_index`.
pub(crate) fn page_bits(first_index: usize, page_count: usize) -> u128 {
    let bits = if page_count as u64 >= BLOCK_PAGES {
        u128::MAX
    } else {
        (1 << page_count) - 1
    };
    bits << first_index
}

/// A range of adjacent pages within one block.
pub(crate) struct BlockRange {
    pub(crate) block: u64,
    /// Index of the first page within the block.
    pub(crate) first_index: usize,
    pub(crate) page_count: usize,
}

impl BlockRange {
    pub(crate) fn bits(&self) -> u128 {
        page_bits(self.first_index, self.page_count)
    }
}

/// Splits a range of `page_count` pages that starts at `address` at the boundaries between blocks.
pub(crate) fn split_by_block(address: u64, page_count: u64, page_size: u64) -> Vec<BlockRange> {
    let (mut page_number, end) = (address / page_size, address / page_size + page_count);
    let mut ranges = Vec::new();
    while page_number < end {
        let (block, first_index) = block_and_index(page_number * page_size, page_size);
        let page_count = (end - page_number).min(BLOCK_PAGES - first_index as u64);
        ranges.push(BlockRange {
            block,
            first_index,
            page_count: page_count as usize,
        });
        page_number += page_count;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of a page determines the block that contains it and its index in that block.
    #[test]
    fn pages_map_to_blocks_and_bits() {
        assert_eq!(block_and_index(0, 4096), (0, 0));
        assert_eq!(block_and_index(129 * 4096, 4096), (1, 1));
        assert_eq!(
            [page_bits(0, 128), page_bits(127, 1), page_bits(3, 2)],
            [u128::MAX, 1 << 127, 0b11000]
        );
    }
}
