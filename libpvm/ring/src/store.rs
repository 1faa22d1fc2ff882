//! Large messages lie in a store: memory of the kernel that its task writes and others only read. A record in a ring names the
//! part that a message lies in; the reader uses it where it lies and says when it is done.
//!
//! A store is sealed, so that nobody but the task that made it can ever write to it, and nobody can shrink it. A lender that
//! breaks the rules and writes to a part that is lent makes garbage of that message; it is bytes whatever it holds.
#![allow(unsafe_code)] // Reading memory that another process may change, and replacing mappings in place.

use crate::blocks::{Block, Blocks};
use crate::memory::{Mapping, Shared, check, make, replace};
use crate::ring::Area;
use nix::fcntl::SealFlag;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of a store. Memory is used only where messages have lain.
pub const STORE_BYTES: usize = 64 << 20;
/// Messages that one task may have from another one's store at a time: one bit each.
pub const LOANS_MAX: usize = 64;

const fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK
        .union(SealFlag::F_SEAL_GROW)
        .union(SealFlag::F_SEAL_FUTURE_WRITE)
}

/// The store of this task.
#[derive(Debug)]
pub struct OwnStore {
    mapping: Mapping,
    blocks: Blocks,
}

impl OwnStore {
    /// An empty store, and the descriptor for other tasks, who can only read.
    ///
    /// # Errors
    /// When the system has no descriptors or memory left, or a kernel before 5.1.
    pub fn new() -> io::Result<(OwnStore, OwnedFd)> {
        let fd = make(c"sempa-store", STORE_BYTES)?;
        let mapping = Mapping::new(Some(fd.as_fd()), STORE_BYTES)?;
        nix::fcntl::fcntl(
            &fd,
            nix::fcntl::FcntlArg::F_ADD_SEALS(seals() | SealFlag::F_SEAL_SEAL),
        )?;
        Ok((
            OwnStore {
                mapping,
                blocks: Blocks::new(STORE_BYTES),
            },
            fd,
        ))
    }

    /// Copies a message into a part of its own, which has one user then; `None` when there is no room.
    pub fn put(&mut self, parts: [&[u8]; 2]) -> Option<Block> {
        let block = self.blocks.take(parts[0].len() + parts[1].len())?;
        let mut at = block.offset;
        for part in parts {
            assert!(part.len() <= STORE_BYTES - at, "parts end within the store");
            // SAFETY: the range was just checked to be in the mapping, which is writable; it is nobody else's.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    part.as_ptr(),
                    self.mapping.start().add(at),
                    part.len(),
                )
            };
            at += part.len();
        }
        Some(block)
    }

    /// A message goes to one more task.
    pub fn share(&mut self, block: Block) {
        self.blocks.share(block);
    }

    /// A task is done with a message.
    pub fn give_back(&mut self, block: Block) {
        self.blocks.give_back(block);
    }

    /// Nobody will ever say that a task is done with a message.
    pub fn abandon(&mut self, block: Block) {
        self.blocks.abandon(block);
    }

    /// Bytes that are lost for good.
    pub fn abandoned(&self) -> usize {
        self.blocks.abandoned()
    }

    /// How many parts are in use.
    pub fn in_use(&self) -> usize {
        self.blocks.in_use()
    }
}

/// The store of another task, for reading.
#[derive(Debug)]
pub struct PeerStore {
    mapping: Mapping,
    /// What is in use, so that it can be kept, and under which number it is given back.
    lent: Mutex<Vec<(u8, Block)>>,
}

impl PeerStore {
    /// Maps a store that another task has made. A forked child has it, too.
    ///
    /// # Errors
    /// When it is not such memory, or the system has none left.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<PeerStore> {
        check(fd, STORE_BYTES, seals())?;
        Ok(PeerStore {
            mapping: Mapping::to_read(fd, STORE_BYTES)?,
            lent: Mutex::default(),
        })
    }

    fn lent(&self) -> MutexGuard<'_, Vec<(u8, Block)>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True when a message of it is in use.
    pub fn is_used(&self) -> bool {
        !self.lent().is_empty()
    }

    /// Uses a message where it lies; `None` when there is no such place, or another message is in use under this number: a
    /// lender that keeps the rules has not given it away twice.
    pub fn borrow(
        self: &Arc<PeerStore>,
        block: Block,
        slot: u8,
        back: &Arc<Returns>,
    ) -> Option<Loan> {
        let end = block.offset.checked_add(block.len)?;
        if end > STORE_BYTES || usize::from(slot) >= LOANS_MAX {
            return None;
        }
        let mut lent = self.lent();
        if lent.iter().any(|(used, _)| *used == slot) {
            return None;
        }
        lent.push((slot, block));
        drop(lent);
        Some(Loan {
            store: self.clone(),
            block,
            slot,
            back: back.clone(),
        })
    }

    /// Makes memory of this process of what is in use, at the same address, so that it stays whatever its lender does, and
    /// nothing leads out of the process any more. Whoever reads at the same time notices nothing.
    ///
    /// # Errors
    /// When the system has no memory left; all is as it was.
    pub fn keep(&self) -> io::Result<()> {
        let lent = self.lent();
        let fresh = Mapping::spare(STORE_BYTES)?;
        for (_, block) in lent.iter() {
            // SAFETY: both ranges are in their mappings, which was checked when the block was borrowed; the fresh one is
            // nobody else's, and the lender does not write to what it has lent.
            unsafe {
                let from = self.mapping.start().add(block.offset);
                std::ptr::copy_nonoverlapping(from, fresh.start().add(block.offset), block.len);
            }
        }
        replace(&self.mapping, fresh)
    }
}

/// Where a task says that it is done with messages that came by a ring, while there is that ring.
#[derive(Debug)]
pub struct Returns(Mutex<Option<Shared>>);

impl Returns {
    /// For messages whose records come by this ring.
    pub fn new(ring: &Shared) -> Arc<Returns> {
        Arc::new(Returns(Mutex::new(Some(ring.clone()))))
    }

    /// The ring is no more.
    pub fn end(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn give(&self, slot: u8) {
        if let Some(ring) = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
        {
            ring.words().give_back(slot);
        }
    }
}

/// A message in another task's store.
#[derive(Debug)]
pub struct Loan {
    store: Arc<PeerStore>,
    block: Block,
    slot: u8,
    back: Arc<Returns>,
}

impl AsRef<[u8]> for Loan {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `borrow` has checked that the range is in the mapping, which lives as long as this. A lender that keeps the
        // rules does not write to it before `drop`; one that does not changes bytes, of which any are good.
        unsafe {
            std::slice::from_raw_parts(
                self.store.mapping.start().add(self.block.offset),
                self.block.len,
            )
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        let mut lent = self.store.lent();
        if let Some(place) = lent.iter().position(|(slot, _)| *slot == self.slot) {
            lent.swap_remove(place);
        }
        drop(lent);
        self.back.give(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{accept, offer};

    /// A store with its reader, and a pair of rings between the two.
    fn lender() -> (
        OwnStore,
        Arc<PeerStore>,
        crate::memory::Ends,
        crate::memory::Ends,
    ) {
        let (own, fd) = OwnStore::new().expect("made");
        let (ours, rings) = offer().expect("made");
        let theirs = accept(rings.as_fd()).expect("good");
        (
            own,
            Arc::new(PeerStore::map(fd.as_fd()).expect("mapped")),
            ours,
            theirs,
        )
    }

    #[test]
    fn a_message_is_read_where_it_lies_and_comes_back() {
        let (mut own, peer, ours, theirs) = lender();
        let block = own.put([b"head", &[7; 100_000]]).expect("room");
        let returns = Returns::new(theirs.reader.area());
        let loan = peer.borrow(block, 5, &returns).expect("good");
        assert_eq!(
            (
                &loan.as_ref()[..4],
                loan.as_ref()[4..].iter().all(|b| *b == 7)
            ),
            (&b"head"[..], true)
        );
        assert_eq!(ours.writer.take_returned(), 0);
        drop(loan);
        assert_eq!(ours.writer.take_returned(), 1 << 5);
        own.give_back(block);
        assert_eq!((own.in_use(), peer.is_used()), (0, false));
    }

    #[test]
    fn what_is_kept_stays_whatever_the_lender_does() {
        let (mut own, peer, ours, theirs) = lender();
        let block = own.put([b"", &[1; 50_000]]).expect("room");
        let returns = Returns::new(theirs.reader.area());
        let loan = peer.borrow(block, 0, &returns).expect("good");
        peer.keep().expect("memory");
        returns.end();
        own.give_back(block);
        assert_eq!(own.put([b"", &[2; 50_000]]), Some(block), "the same place");
        assert_eq!(loan.as_ref(), [1; 50_000]);
        drop(loan);
        assert_eq!(ours.writer.take_returned(), 0, "the ring is no more");
    }

    #[test]
    fn nobody_else_can_write_to_a_store_and_places_beyond_it_are_refused() {
        let (_, fd) = OwnStore::new().expect("made");
        assert!(Mapping::new(Some(fd.as_fd()), STORE_BYTES).is_err());
        assert!(nix::unistd::write(&fd, b"x").is_err());
        let (_, peer, _, theirs) = lender();
        let returns = Returns::new(theirs.reader.area());
        for (offset, len, slot) in [
            (STORE_BYTES, 1, 0),
            (usize::MAX, 2, 0),
            (1, STORE_BYTES, 0),
            (0, 1, 64),
        ] {
            assert!(peer.borrow(Block { offset, len }, slot, &returns).is_none());
        }
        let good = Block { offset: 0, len: 10 };
        let loan = peer.borrow(good, 7, &returns).expect("good");
        assert!(
            peer.borrow(good, 7, &returns).is_none(),
            "the number is in use"
        );
        drop(loan);
        assert!(peer.borrow(good, 7, &returns).is_some());
        let (pair, rings) = offer().expect("made");
        assert!(PeerStore::map(rings.as_fd()).is_err());
        drop(pair);
    }
}
