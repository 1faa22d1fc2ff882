//! Allocator for the blocks of a shared pool. It uses the first free range that is long enough, so
//! that recently used memory is reused.

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

/// State of a pool: the free ranges, and the number of users of each allocated block. Both maps
/// have offsets as keys.
#[derive(Debug)]
pub struct BlockAllocator {
    free_ranges: BTreeMap<usize, usize>,
    user_counts: BTreeMap<usize, u32>,
    /// Offsets of the blocks that a user will never release.
    abandoned_offsets: BTreeSet<usize>,
    abandoned_bytes: usize,
}

impl BlockAllocator {
    /// Creates an allocator for a pool of `bytes` bytes.
    pub fn new(bytes: usize) -> BlockAllocator {
        let free = BTreeMap::from([(0, bytes)]);
        BlockAllocator {
            free_ranges: free,
            user_counts: BTreeMap::new(),
            abandoned_offsets: BTreeSet::new(),
            abandoned_bytes: 0,
        }
    }

    /// Allocates a block with one user; `None` if no free range is long enough.
    pub fn allocate(&mut self, len: usize) -> Option<Block> {
        let need = len.checked_next_multiple_of(BLOCK_ALIGN)?.max(BLOCK_ALIGN);
        let (&offset, &room) = self.free_ranges.iter().find(|(_, room)| **room >= need)?;
        self.free_ranges.remove(&offset);
        if room > need {
            self.free_ranges.insert(offset + need, room - need);
        }
        self.user_counts.insert(offset, 1);
        Some(Block { offset, len })
    }

    /// Adds a user to a block, which stays allocated until every user has released it.
    pub fn add_user(&mut self, block: Block) {
        *self
            .user_counts
            .get_mut(&block.offset)
            .expect("a part in use") += 1;
    }

    /// Removes a user of a block. The block is freed when its last user is removed.
    pub fn release(&mut self, block: Block) {
        let users = self
            .user_counts
            .get_mut(&block.offset)
            .expect("a part in use");
        *users -= 1;
        if *users > 0 {
            return;
        }
        self.user_counts.remove(&block.offset);
        let (mut offset, mut room) = (
            block.offset,
            block.len.next_multiple_of(BLOCK_ALIGN).max(BLOCK_ALIGN),
        );
        if let Some((&before, &its)) = self.free_ranges.range(..offset).next_back()
            && before + its == offset
        {
            self.free_ranges.remove(&before);
            (offset, room) = (before, its + room);
        }
        if let Some(its) = self.free_ranges.remove(&(offset + room)) {
            room += its;
        }
        self.free_ranges.insert(offset, room);
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

    pub fn allocated_blocks(&self) -> usize {
        self.user_counts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_never_overlap_and_all_are_freed() {
        let (mut blocks, mut taken) = (BlockAllocator::new(1 << 20), Vec::<(Block, u32)>::new());
        let mut seed = 5u64;
        for _ in 0..20_000 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let dice = (seed >> 33) as usize;
            match dice % 3 {
                0 => {
                    if let Some(block) = blocks.allocate(dice / 3 % 100_000) {
                        let end = |block: &Block| block.offset + block.len;
                        let apart = |other: &Block| {
                            end(other) <= block.offset || end(&block) <= other.offset
                        };
                        assert!(
                            end(&block) <= 1 << 20 && taken.iter().all(|(other, _)| apart(other))
                        );
                        taken.push((block, 1));
                    }
                }
                1 if !taken.is_empty() => {
                    let i = dice / 3 % taken.len();
                    blocks.add_user(taken[i].0);
                    taken[i].1 += 1;
                }
                _ if !taken.is_empty() => {
                    let i = dice / 3 % taken.len();
                    blocks.release(taken[i].0);
                    taken[i].1 -= 1;
                    if taken[i].1 == 0 {
                        taken.swap_remove(i);
                    }
                }
                _ => {}
            }
        }
        for (block, users) in taken {
            (0..users).for_each(|_| blocks.release(block));
        }
        assert_eq!(blocks.allocated_blocks(), 0);
        assert_eq!(
            blocks.allocate(1 << 20),
            Some(Block {
                offset: 0,
                len: 1 << 20
            })
        );
        assert_eq!(blocks.allocate(1), None);
    }

    #[test]
    fn block_abandoned_repeatedly_is_lost_once() {
        let mut blocks = BlockAllocator::new(1 << 20);
        let block = blocks.allocate(10_000).expect("room");
        (0..4).for_each(|_| blocks.add_user(block));
        (0..3).for_each(|_| blocks.abandon(block));
        (0..2).for_each(|_| blocks.release(block));
        assert_eq!(
            (blocks.abandoned_bytes(), blocks.allocated_blocks()),
            (10_000, 1)
        );
        assert_eq!(
            blocks.allocate(10_000).map(|block| block.offset),
            Some(12_288)
        );
    }

    #[test]
    fn first_free_range_is_reused() {
        let mut blocks = BlockAllocator::new(1 << 20);
        let first = blocks.allocate(10_000).expect("room");
        let second = blocks.allocate(10_000).expect("room");
        blocks.release(first);
        assert_eq!(blocks.allocate(5_000).map(|block| block.offset), Some(0));
        assert_eq!(second.offset, 12_288);
    }
}
