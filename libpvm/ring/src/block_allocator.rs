//! Allocator for the blocks of a shared pool. The allocator uses the first free range that is long
//! enough, so that recently used memory is reused.

use std::collections::{BTreeMap, BTreeSet};

/// Alignment and minimum size of a block, in bytes: a page.
const BLOCK_ALIGN: usize = 4096;

/// An allocated range of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub offset: usize,
    /// Requested size in bytes, without the padding to whole pages.
    pub len: usize,
}

/// State of a pool. `free_ranges` contains the length of each free range, `user_counts` the number
/// of users of each allocated block. Both maps have offsets as keys.
#[derive(Debug)]
pub struct BlockAllocator {
    free_ranges: BTreeMap<usize, usize>,
    user_counts: BTreeMap<usize, u32>,
    /// Offsets of the blocks that at least one user will never release.
    abandoned_offsets: BTreeSet<usize>,
    abandoned_bytes: usize,
}

impl BlockAllocator {
    /// Creates an allocator for a pool of `pool_bytes` bytes.
    pub fn new(pool_bytes: usize) -> Self {
        let free_ranges = BTreeMap::from([(0, pool_bytes)]);
        Self {
            free_ranges,
            user_counts: BTreeMap::new(),
            abandoned_offsets: BTreeSet::new(),
            abandoned_bytes: 0,
        }
    }

    /// Allocates a block with one user; `None` if no free range is long enough.
    pub fn allocate(&mut self, len: usize) -> Option<Block> {
        let needed_bytes = len.checked_next_multiple_of(BLOCK_ALIGN)?.max(BLOCK_ALIGN);
        let (&offset, &range_bytes) = self
            .free_ranges
            .iter()
            .find(|(_, range_bytes)| **range_bytes >= needed_bytes)?;
        self.free_ranges.remove(&offset);
        if range_bytes > needed_bytes {
            self.free_ranges
                .insert(offset + needed_bytes, range_bytes - needed_bytes);
        }
        self.user_counts.insert(offset, 1);
        Some(Block { offset, len })
    }

    /// Enlarges a block to `len` bytes if the range behind the block is free. The block must have
    /// one user.
    pub fn try_extend(&mut self, block: &mut Block, len: usize) -> bool {
        let Some(needed_bytes) = len.checked_next_multiple_of(BLOCK_ALIGN) else {
            return false;
        };
        let (block_bytes, end) = (padded_bytes(*block), block.offset + padded_bytes(*block));
        let added_bytes = needed_bytes.saturating_sub(block_bytes);
        if added_bytes > 0 {
            let Some(range_bytes) = self
                .free_ranges
                .get(&end)
                .copied()
                .filter(|range_bytes| *range_bytes >= added_bytes)
            else {
                return false;
            };
            self.free_ranges.remove(&end);
            if range_bytes > added_bytes {
                self.free_ranges
                    .insert(end + added_bytes, range_bytes - added_bytes);
            }
        }
        block.len = block.len.max(len);
        true
    }

    /// Reduces a block to its first `len` bytes. The block must have one user.
    pub fn shrink(&mut self, block: &mut Block, len: usize) {
        let (old_end, offset) = (block.offset + padded_bytes(*block), block.offset);
        block.len = block.len.min(len);
        let end = offset + padded_bytes(*block);
        if end < old_end {
            self.insert_free_range(end, old_end - end);
        }
    }

    /// Adds a user to a block. The block stays allocated until every user has released the block.
    pub fn add_user(&mut self, block: Block) {
        *self
            .user_counts
            .get_mut(&block.offset)
            .expect("a part in use") += 1;
    }

    /// Removes a user of a block. The block is freed when its last user is removed.
    pub fn release(&mut self, block: Block) {
        let user_count = self
            .user_counts
            .get_mut(&block.offset)
            .expect("a part in use");
        *user_count -= 1;
        if *user_count > 0 {
            return;
        }
        self.user_counts.remove(&block.offset);
        self.insert_free_range(block.offset, padded_bytes(block));
    }

    /// Adds a free range and merges it with its neighbors.
    fn insert_free_range(&mut self, mut offset: usize, mut free_bytes: usize) {
        if let Some((&preceding_offset, &neighbor_bytes)) =
            self.free_ranges.range(..offset).next_back()
            && preceding_offset + neighbor_bytes == offset
        {
            self.free_ranges.remove(&preceding_offset);
            (offset, free_bytes) = (preceding_offset, neighbor_bytes + free_bytes);
        }
        if let Some(neighbor_bytes) = self.free_ranges.remove(&(offset + free_bytes)) {
            free_bytes += neighbor_bytes;
        }
        self.free_ranges.insert(offset, free_bytes);
    }

    /// Records that a user will never release the block. The block stays allocated forever.
    pub fn abandon(&mut self, block: Block) {
        if self.abandoned_offsets.insert(block.offset) {
            self.abandoned_bytes += block.len;
        }
    }

    /// Total size in bytes of the abandoned blocks. A block that was abandoned several times counts
    /// once.
    pub fn abandoned_bytes(&self) -> usize {
        self.abandoned_bytes
    }

    pub fn allocated_block_count(&self) -> usize {
        self.user_counts.len()
    }
}

/// Returns the size in bytes of the pages that a block occupies.
fn padded_bytes(block: Block) -> usize {
    block.len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_disjoint(block: &Block, other: &Block) -> bool {
        other.offset + other.len <= block.offset || block.offset + block.len <= other.offset
    }

    #[test]
    fn blocks_never_overlap_and_all_are_freed() {
        let (mut allocator, mut blocks) =
            (BlockAllocator::new(1 << 20), Vec::<(Block, u32)>::new());
        let mut seed = 5u64;
        for _ in 0..20_000 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let random_number = (seed >> 33) as usize;
            match random_number % 3 {
                0 => {
                    if let Some(block) = allocator.allocate(random_number / 3 % 100_000) {
                        assert!(
                            block.offset + block.len <= 1 << 20
                                && blocks.iter().all(|(other, _)| is_disjoint(other, &block))
                        );
                        blocks.push((block, 1));
                    }
                }
                1 if !blocks.is_empty() => {
                    let i = random_number / 3 % blocks.len();
                    if blocks[i].1 == 1 && random_number.is_multiple_of(2) {
                        let new_len = random_number / 7 % 150_000;
                        if new_len < blocks[i].0.len {
                            allocator.shrink(&mut blocks[i].0, new_len);
                        } else {
                            allocator.try_extend(&mut blocks[i].0, new_len);
                        }
                        let resized_block = blocks[i].0;
                        assert!(blocks.iter().all(|(other, _)| *other == resized_block
                            || is_disjoint(other, &resized_block)));
                        continue;
                    }
                    allocator.add_user(blocks[i].0);
                    blocks[i].1 += 1;
                }
                _ if !blocks.is_empty() => {
                    let i = random_number / 3 % blocks.len();
                    allocator.release(blocks[i].0);
                    blocks[i].1 -= 1;
                    if blocks[i].1 == 0 {
                        blocks.swap_remove(i);
                    }
                }
                _ => {}
            }
        }
        for (block, user_count) in blocks {
            (0..user_count).for_each(|_| allocator.release(block));
        }
        assert_eq!(allocator.allocated_block_count(), 0);
        assert_eq!(
            allocator.allocate(1 << 20),
            Some(Block {
                offset: 0,
                len: 1 << 20
            })
        );
        assert_eq!(allocator.allocate(1), None);
    }

    #[test]
    fn block_abandoned_repeatedly_is_lost_once() {
        let mut allocator = BlockAllocator::new(1 << 20);
        let block = allocator.allocate(10_000).expect("room");
        (0..4).for_each(|_| allocator.add_user(block));
        (0..3).for_each(|_| allocator.abandon(block));
        (0..2).for_each(|_| allocator.release(block));
        assert_eq!(
            (
                allocator.abandoned_bytes(),
                allocator.allocated_block_count()
            ),
            (10_000, 1)
        );
        assert_eq!(
            allocator.allocate(10_000).map(|block| block.offset),
            Some(12_288)
        );
    }

    #[test]
    fn first_free_range_is_reused() {
        let mut allocator = BlockAllocator::new(1 << 20);
        let first_block = allocator.allocate(10_000).expect("room");
        let second_block = allocator.allocate(10_000).expect("room");
        allocator.release(first_block);
        assert_eq!(allocator.allocate(5_000).map(|block| block.offset), Some(0));
        assert_eq!(second_block.offset, 12_288);
    }

    #[test]
    fn block_grows_only_into_a_free_range() {
        let mut allocator = BlockAllocator::new(1 << 20);
        let mut first_block = allocator.allocate(4096).expect("room");
        assert!(allocator.try_extend(&mut first_block, 10_000));
        let mut second_block = allocator.allocate(1).expect("room");
        assert_eq!((first_block.len, second_block.offset), (10_000, 12_288));
        assert!(allocator.try_extend(&mut first_block, 12_288), "padding");
        assert!(!allocator.try_extend(&mut first_block, 12_289));
        assert!(!allocator.try_extend(&mut second_block, 1 << 20));
        allocator.shrink(&mut first_block, 5000);
        assert_eq!(
            allocator.allocate(4096).map(|block| block.offset),
            Some(8192)
        );
    }
}
