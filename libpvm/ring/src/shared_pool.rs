//! Shared pools for large messages: memory that one task writes and its peers only read. A record
//! in a ring contains the position of a message in the pool. The reader leases the block of the
//! message, reads the block in place, and returns the lease.
//!
//! A pool is sealed: only the task that created it can ever write to it, and no task can shrink it.
//! A sender that violates the protocol and writes to a leased block corrupts only the message in
//! the block. The receiver must accept arbitrary bytes anyway.
#![allow(unsafe_code)] // Reading memory that another process may change, and replacing mappings in place.

use crate::block_allocator::{Block, BlockAllocator};
use crate::ring::RingMemory;
use crate::shared_memory::{Mapping, SharedRing, create_memfd, replace, verify_memfd};
use nix::fcntl::SealFlag;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Size of a pool in bytes. Only pages that have contained messages occupy memory.
pub const POOL_BYTES: usize = 64 << 20;
/// Maximum number of messages that one task may lease from one peer at the same time; each lease
/// has one bit.
pub const LEASES_MAX: usize = 64;

const fn required_seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK
        .union(SealFlag::F_SEAL_GROW)
        .union(SealFlag::F_SEAL_FUTURE_WRITE)
}

/// The pool of this task.
#[derive(Debug)]
pub struct OwnPool {
    mapping: Mapping,
    allocator: BlockAllocator,
}

impl OwnPool {
    /// Creates an empty pool. Returns the pool and a descriptor with which other tasks can map the
    /// pool only for reading.
    ///
    /// # Errors
    /// No descriptors or no memory are available, or the kernel is older than 5.1.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let fd = create_memfd(c"sempa-store", POOL_BYTES)?;
        let mapping = Mapping::new(Some(fd.as_fd()), POOL_BYTES)?;
        nix::fcntl::fcntl(
            &fd,
            nix::fcntl::FcntlArg::F_ADD_SEALS(required_seals() | SealFlag::F_SEAL_SEAL),
        )?;
        Ok((
            Self {
                mapping,
                allocator: BlockAllocator::new(POOL_BYTES),
            },
            fd,
        ))
    }

    /// Copies a message, given in two parts, into a new block with one user. Returns `None` if the
    /// pool has no free range that is long enough.
    pub fn store_message(&mut self, parts: [&[u8]; 2]) -> Option<Block> {
        let block = self.allocator.allocate(parts[0].len() + parts[1].len())?;
        let mut position = block.offset;
        for part in parts {
            assert!(
                part.len() <= POOL_BYTES - position,
                "parts end within the store"
            );
            // SAFETY: the range was just checked to be in the mapping, which is writable, and no
            // other code uses it.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    part.as_ptr(),
                    self.mapping.start().add(position),
                    part.len(),
                )
            };
            position += part.len();
        }
        Some(block)
    }

    /// Adds a user to a block, because its message is sent to one more task.
    pub fn add_user(&mut self, block: Block) {
        self.allocator.add_user(block);
    }

    /// Removes a user of a block; the block is freed when its last user is removed.
    pub fn release(&mut self, block: Block) {
        self.allocator.release(block);
    }

    /// Records that a user will never release the block. The block stays allocated forever.
    pub fn abandon(&mut self, block: Block) {
        self.allocator.abandon(block);
    }

    /// Total size in bytes of the abandoned blocks.
    pub fn abandoned_bytes(&self) -> usize {
        self.allocator.abandoned_bytes()
    }

    pub fn allocated_block_count(&self) -> usize {
        self.allocator.allocated_block_count()
    }
}

/// The pool of another task, mapped for reading.
#[derive(Debug)]
pub struct PeerPool {
    mapping: Mapping,
    /// Slot and block of each lease that has not been returned.
    open_leases: Mutex<Vec<(u8, Block)>>,
}

impl PeerPool {
    /// Maps a pool that another task created. A forked child inherits the mapping.
    ///
    /// # Errors
    /// The descriptor is not a sealed memory file of [`POOL_BYTES`] bytes, or no memory is
    /// available.
    pub fn map(fd: BorrowedFd<'_>) -> io::Result<Self> {
        verify_memfd(fd, POOL_BYTES, required_seals())?;
        Ok(Self {
            mapping: Mapping::map_read_only(fd, POOL_BYTES)?,
            open_leases: Mutex::default(),
        })
    }

    fn lock_open_leases(&self) -> MutexGuard<'_, Vec<(u8, Block)>> {
        self.open_leases
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// True if a lease of this pool has not been returned.
    pub fn has_leases(&self) -> bool {
        !self.lock_open_leases().is_empty()
    }

    /// Leases a block under the number `slot`; `lease_returner` returns the lease when the lease is
    /// dropped. The result is `None` if the range or the slot is invalid, or if the slot is already
    /// in use: a sender that obeys the protocol does not use a slot twice.
    pub fn lease(
        self: &Arc<Self>,
        block: Block,
        slot: u8,
        lease_returner: &Arc<LeaseReturner>,
    ) -> Option<Lease> {
        let end = block.offset.checked_add(block.len)?;
        if end > POOL_BYTES || usize::from(slot) >= LEASES_MAX {
            return None;
        }
        let mut open_leases = self.lock_open_leases();
        if open_leases.iter().any(|(open_slot, _)| *open_slot == slot) {
            return None;
        }
        open_leases.push((slot, block));
        drop(open_leases);
        Some(Lease {
            pool: self.clone(),
            block,
            slot,
            lease_returner: lease_returner.clone(),
        })
    }

    /// Replaces the mapping by a private copy of all leased blocks, at the same address. The sender
    /// can then no longer change or free the blocks, and this process no longer uses the pool's
    /// memory. Concurrent readers are not disturbed.
    ///
    /// # Errors
    /// No memory is available; the mapping is unchanged.
    pub fn make_private_copy(&self) -> io::Result<()> {
        let open_leases = self.lock_open_leases();
        let private_mapping = Mapping::map_private_sparse(POOL_BYTES)?;
        for (_, block) in open_leases.iter() {
            // SAFETY: both ranges are in their mappings, which was checked when the block was
            // leased. The fresh mapping has no other user, and the sender does not write to leased
            // blocks.
            unsafe {
                let source = self.mapping.start().add(block.offset);
                std::ptr::copy_nonoverlapping(
                    source,
                    private_mapping.start().add(block.offset),
                    block.len,
                );
            }
        }
        replace(&self.mapping, private_mapping)
    }
}

/// Returns leases through the ring in which their records arrived, as long as that ring exists.
#[derive(Debug)]
pub struct LeaseReturner(Mutex<Option<SharedRing>>);

impl LeaseReturner {
    /// Creates a returner for the leases whose records arrive in this ring.
    pub fn new(ring: &SharedRing) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(ring.clone()))))
    }

    /// Drops the ring. Leases that are dropped later are not reported to the sender.
    pub fn detach(&self) {
        drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn return_lease(&self, slot: u8) {
        if let Some(ring) = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
        {
            ring.control().return_lease(slot);
        }
    }
}

/// A leased message in another task's pool. Dropping the value returns the lease.
#[derive(Debug)]
pub struct Lease {
    pool: Arc<PeerPool>,
    block: Block,
    slot: u8,
    lease_returner: Arc<LeaseReturner>,
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `lease` has checked that the range is in the mapping, which lives as long as this
        // value. A sender that obeys the protocol does not write to the block before `drop`; any
        // other sender changes bytes, for which any value is valid.
        unsafe {
            std::slice::from_raw_parts(
                self.pool.mapping.start().add(self.block.offset),
                self.block.len,
            )
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut open_leases = self.pool.lock_open_leases();
        if let Some(index) = open_leases.iter().position(|(slot, _)| *slot == self.slot) {
            open_leases.swap_remove(index);
        }
        drop(open_leases);
        self.lease_returner.return_lease(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared_memory::{create_ring_pair, map_peer_ring_pair};

    /// Returns the pool of one task, the same pool as mapped by a peer, the ring ends of the first
    /// task, and the ring ends of the peer.
    fn pool_with_peer() -> (
        OwnPool,
        Arc<PeerPool>,
        crate::shared_memory::RingPair,
        crate::shared_memory::RingPair,
    ) {
        let (own_pool, fd) = OwnPool::new().expect("made");
        let (own_ring_pair, rings_fd) = create_ring_pair().expect("made");
        let peer_ring_pair = map_peer_ring_pair(rings_fd.as_fd()).expect("good");
        (
            own_pool,
            Arc::new(PeerPool::map(fd.as_fd()).expect("mapped")),
            own_ring_pair,
            peer_ring_pair,
        )
    }

    #[test]
    fn message_is_read_in_place_and_returned() {
        let (mut own_pool, peer_pool, own_ring_pair, peer_ring_pair) = pool_with_peer();
        let block = own_pool
            .store_message([b"head", &[7; 100_000]])
            .expect("room");
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        let lease = peer_pool.lease(block, 5, &lease_returner).expect("good");
        assert_eq!(
            (
                &lease.as_ref()[..4],
                lease.as_ref()[4..].iter().all(|b| *b == 7)
            ),
            (&b"head"[..], true)
        );
        assert_eq!(own_ring_pair.writer.take_returned_leases(), 0);
        drop(lease);
        assert_eq!(own_ring_pair.writer.take_returned_leases(), 1 << 5);
        own_pool.release(block);
        assert_eq!(
            (own_pool.allocated_block_count(), peer_pool.has_leases()),
            (0, false)
        );
    }

    #[test]
    fn private_copy_is_independent_of_the_sender() {
        let (mut own_pool, peer_pool, own_ring_pair, peer_ring_pair) = pool_with_peer();
        let block = own_pool.store_message([b"", &[1; 50_000]]).expect("room");
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        let lease = peer_pool.lease(block, 0, &lease_returner).expect("good");
        peer_pool.make_private_copy().expect("memory");
        lease_returner.detach();
        own_pool.release(block);
        assert_eq!(
            own_pool.store_message([b"", &[2; 50_000]]),
            Some(block),
            "the same place"
        );
        assert_eq!(lease.as_ref(), [1; 50_000]);
        drop(lease);
        assert_eq!(
            own_ring_pair.writer.take_returned_leases(),
            0,
            "the ring is no more"
        );
    }

    #[test]
    fn peers_cannot_write_or_lease_invalid_ranges() {
        let (_, fd) = OwnPool::new().expect("made");
        assert!(Mapping::new(Some(fd.as_fd()), POOL_BYTES).is_err());
        assert!(nix::unistd::write(&fd, b"x").is_err());
        let (_, peer_pool, _, peer_ring_pair) = pool_with_peer();
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        for (offset, len, slot) in [
            (POOL_BYTES, 1, 0),
            (usize::MAX, 2, 0),
            (1, POOL_BYTES, 0),
            (0, 1, 64),
        ] {
            assert!(
                peer_pool
                    .lease(Block { offset, len }, slot, &lease_returner)
                    .is_none()
            );
        }
        let valid_block = Block { offset: 0, len: 10 };
        let lease = peer_pool
            .lease(valid_block, 7, &lease_returner)
            .expect("good");
        assert!(
            peer_pool.lease(valid_block, 7, &lease_returner).is_none(),
            "the number is in use"
        );
        drop(lease);
        assert!(peer_pool.lease(valid_block, 7, &lease_returner).is_some());
        let (ring_pair, rings_fd) = create_ring_pair().expect("made");
        assert!(PeerPool::map(rings_fd.as_fd()).is_err());
        drop(ring_pair);
    }
}
