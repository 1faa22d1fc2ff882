//! Arithmetic on memory pages and on blocks of pages. Pre-copied memory is recorded, sent and
//! requested in blocks.

use nix::unistd::{SysconfVar, sysconf};

/// Number of pages in a block: one for each bit of a `u128`.
pub(crate) const BLOCK_PAGES: u64 = 128;

/// Returns this host's page size in bytes.
pub(crate) fn page_size() -> u64 {
    let known = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    known
        .and_then(|bytes| u64::try_from(bytes).ok())
        .expect("the system has pages of some size")
}

/// Returns the number of the block that contains `address`, and the index within the block of the
/// page that contains `address`.
pub(crate) fn block_and_index(address: u64, page_size: u64) -> (u64, usize) {
    let number = address / page_size;
    (number / BLOCK_PAGES, (number % BLOCK_PAGES) as usize)
}

/// Returns the bit mask of `count` pages of a block, starting with the page of index `first`.
pub(crate) fn page_bits(first: usize, count: usize) -> u128 {
    let all = if count as u64 >= BLOCK_PAGES {
        u128::MAX
    } else {
        (1 << count) - 1
    };
    all << first
}

/// A range of adjacent pages within one block.
pub(crate) struct BlockRange {
    pub(crate) block: u64,
    /// Index within the block of the first page.
    pub(crate) first: usize,
    pub(crate) pages: usize,
}

impl BlockRange {
    pub(crate) fn bits(&self) -> u128 {
        page_bits(self.first, self.pages)
    }
}

/// Splits a range of `pages` pages that starts at `address` at the boundaries between blocks.
pub(crate) fn split_by_block(address: u64, pages: u64, page_size: u64) -> Vec<BlockRange> {
    let (mut at, end) = (address / page_size, address / page_size + pages);
    let mut ranges = Vec::new();
    while at < end {
        let (block, first) = block_and_index(at * page_size, page_size);
        let pages = (end - at).min(BLOCK_PAGES - first as u64);
        ranges.push(BlockRange {
            block,
            first,
            pages: pages as usize,
        });
        at += pages;
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
