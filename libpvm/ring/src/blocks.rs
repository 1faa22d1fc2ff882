//! Which parts of a store are free. Parts are found from the front, so that those used before are used again.

use std::collections::{BTreeMap, BTreeSet};

/// Parts begin and end at multiples of this: a page.
const STEP: usize = 4096;

/// A part of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where it begins.
    pub offset: usize,
    /// Bytes in use.
    pub len: usize,
}

/// The free parts, and by how many each other one is used.
#[derive(Debug)]
pub struct Blocks {
    free: BTreeMap<usize, usize>,
    users: BTreeMap<usize, u32>,
    /// Parts of which a user will never say that it is done.
    abandoned: BTreeSet<usize>,
    abandoned_bytes: usize,
}

impl Blocks {
    /// So many bytes, all free.
    pub fn new(bytes: usize) -> Blocks {
        let free = BTreeMap::from([(0, bytes)]);
        Blocks {
            free,
            users: BTreeMap::new(),
            abandoned: BTreeSet::new(),
            abandoned_bytes: 0,
        }
    }

    /// Takes a part, which has one user then; `None` when none is long enough.
    pub fn take(&mut self, len: usize) -> Option<Block> {
        let need = len.checked_next_multiple_of(STEP)?.max(STEP);
        let (&offset, &room) = self.free.iter().find(|(_, room)| **room >= need)?;
        self.free.remove(&offset);
        if room > need {
            self.free.insert(offset + need, room - need);
        }
        self.users.insert(offset, 1);
        Some(Block { offset, len })
    }

    /// A part has one more user.
    pub fn share(&mut self, block: Block) {
        *self.users.get_mut(&block.offset).expect("a part in use") += 1;
    }

    /// A user is done with a part; with the last one it is free.
    pub fn give_back(&mut self, block: Block) {
        let users = self.users.get_mut(&block.offset).expect("a part in use");
        *users -= 1;
        if *users > 0 {
            return;
        }
        self.users.remove(&block.offset);
        let (mut offset, mut room) = (block.offset, block.len.next_multiple_of(STEP).max(STEP));
        if let Some((&before, &its)) = self.free.range(..offset).next_back()
            && before + its == offset
        {
            self.free.remove(&before);
            (offset, room) = (before, its + room);
        }
        if let Some(its) = self.free.remove(&(offset + room)) {
            room += its;
        }
        self.free.insert(offset, room);
    }

    /// A user will never say that it is done with a part, which stays in use for good.
    pub fn abandon(&mut self, block: Block) {
        if self.abandoned.insert(block.offset) {
            self.abandoned_bytes += block.len;
        }
    }

    /// Bytes of parts that were abandoned, each counted once however many have done so.
    pub fn abandoned(&self) -> usize {
        self.abandoned_bytes
    }

    /// How many parts are in use.
    pub fn in_use(&self) -> usize {
        self.users.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_never_overlap_and_all_comes_back() {
        let (mut blocks, mut taken) = (Blocks::new(1 << 20), Vec::<(Block, u32)>::new());
        let mut seed = 5u64;
        for _ in 0..20_000 {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let dice = (seed >> 33) as usize;
            match dice % 3 {
                0 => {
                    if let Some(block) = blocks.take(dice / 3 % 100_000) {
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
                    blocks.share(taken[i].0);
                    taken[i].1 += 1;
                }
                _ if !taken.is_empty() => {
                    let i = dice / 3 % taken.len();
                    blocks.give_back(taken[i].0);
                    taken[i].1 -= 1;
                    if taken[i].1 == 0 {
                        taken.swap_remove(i);
                    }
                }
                _ => {}
            }
        }
        for (block, users) in taken {
            (0..users).for_each(|_| blocks.give_back(block));
        }
        assert_eq!(blocks.in_use(), 0);
        assert_eq!(
            blocks.take(1 << 20),
            Some(Block {
                offset: 0,
                len: 1 << 20
            })
        );
        assert_eq!(blocks.take(1), None);
    }

    #[test]
    fn a_part_that_several_abandon_is_lost_once_and_never_used_again() {
        let mut blocks = Blocks::new(1 << 20);
        let block = blocks.take(10_000).expect("room");
        (0..4).for_each(|_| blocks.share(block));
        (0..3).for_each(|_| blocks.abandon(block));
        (0..2).for_each(|_| blocks.give_back(block));
        assert_eq!((blocks.abandoned(), blocks.in_use()), (10_000, 1));
        assert_eq!(blocks.take(10_000).map(|block| block.offset), Some(12_288));
    }

    #[test]
    fn the_foremost_part_is_used_again() {
        let mut blocks = Blocks::new(1 << 20);
        let first = blocks.take(10_000).expect("room");
        let second = blocks.take(10_000).expect("room");
        blocks.give_back(first);
        assert_eq!(blocks.take(5_000).map(|block| block.offset), Some(0));
        assert_eq!(second.offset, 12_288);
    }
}
