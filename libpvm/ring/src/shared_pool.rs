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
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
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

/// Maximum number of bytes of a pool that message bodies occupy while the program packs or owns
/// them. The rest of the pool remains for copies of other messages.
pub const BODY_BYTES_MAX: usize = POOL_BYTES / 2;
/// Maximum number of bytes that a task writes to a body while it holds the lock for writing: a
/// migration waits for the writer.
const WRITE_BYTES_MAX: usize = 1 << 20;

/// The pool of this task. The blocks are allocated under a lock of their own, because a program
/// drops message bodies while other threads send.
#[derive(Debug)]
pub struct OwnPool {
    mapping: Mapping,
    state: Mutex<PoolState>,
    /// Locked while a body is written, so that [`OwnPool::make_private_copy`] copies no memory that
    /// changes at the same time.
    write_lock: Mutex<()>,
    /// True if the memory is no longer shared.
    is_private: AtomicBool,
}

#[derive(Debug)]
struct PoolState {
    allocator: BlockAllocator,
    /// Offset and length of the blocks that belong to a [`PoolBody`].
    bodies: BTreeMap<usize, usize>,
}

impl OwnPool {
    /// Creates an empty pool. Returns the pool and a descriptor with which other tasks can map the
    /// pool only for reading.
    ///
    /// # Errors
    /// No descriptors or no memory are available, or the kernel is older than 5.1.
    pub fn new() -> io::Result<(Arc<Self>, OwnedFd)> {
        let fd = create_memfd(c"sempa-store", POOL_BYTES)?;
        let mapping = Mapping::new(Some(fd.as_fd()), POOL_BYTES)?;
        nix::fcntl::fcntl(
            &fd,
            nix::fcntl::FcntlArg::F_ADD_SEALS(required_seals() | SealFlag::F_SEAL_SEAL),
        )?;
        let pool = Self {
            mapping,
            state: Mutex::new(PoolState {
                allocator: BlockAllocator::new(POOL_BYTES),
                bodies: BTreeMap::new(),
            }),
            write_lock: Mutex::default(),
            is_private: AtomicBool::new(false),
        };
        Ok((Arc::new(pool), fd))
    }

    fn lock_state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_for_writing(&self) -> MutexGuard<'_, ()> {
        self.write_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies the body of a message into a new block with one user. Returns `None` if the pool has
    /// no free range that is long enough.
    pub fn store_message(&self, body: &[u8]) -> Option<Block> {
        let block = self.lock_state().allocator.allocate(body.len())?;
        self.write(block, 0, body);
        Some(block)
    }

    /// Allocates a block for a body that the program packs. Returns `None` if the pool has no free
    /// range of `capacity` bytes, or if bodies would occupy more than [`BODY_BYTES_MAX`] bytes.
    pub fn allocate_body(self: &Arc<Self>, capacity: usize) -> Option<PoolBody> {
        let mut state = self.lock_state();
        if !state.has_body_space(capacity) {
            return None;
        }
        let block = state.allocator.allocate(capacity)?;
        state.bodies.insert(block.offset, block.len);
        drop(state);
        Some(PoolBody {
            pool: self.clone(),
            block,
            len: 0,
        })
    }

    /// Adds a user to the block of a finished [`PoolBody`], because the body is sent to one more
    /// task. Returns `None` if `body` is not a whole body in the shared memory of this pool.
    pub fn share_body(&self, body: &[u8]) -> Option<Block> {
        let offset = (body.as_ptr() as usize).checked_sub(self.mapping.start() as usize)?;
        let mut state = self.lock_state();
        if state.bodies.get(&offset) != Some(&body.len()) || self.is_private.load(Relaxed) {
            return None;
        }
        let block = Block {
            offset,
            len: body.len(),
        };
        state.allocator.add_user(block);
        Some(block)
    }

    /// Adds a user to a block, because its message is sent to one more task.
    pub fn add_user(&self, block: Block) {
        self.lock_state().allocator.add_user(block);
    }

    /// Removes a user of a block; the block is freed when its last user is removed.
    pub fn release(&self, block: Block) {
        self.lock_state().allocator.release(block);
    }

    /// Records that a user will never release the block. The block stays allocated forever.
    pub fn abandon(&self, block: Block) {
        self.lock_state().allocator.abandon(block);
    }

    /// Total size in bytes of the abandoned blocks.
    pub fn abandoned_bytes(&self) -> usize {
        self.lock_state().allocator.abandoned_bytes()
    }

    pub fn allocated_block_count(&self) -> usize {
        self.lock_state().allocator.allocated_block_count()
    }

    /// True if the program packs or owns a body in this pool.
    pub fn has_bodies(&self) -> bool {
        !self.lock_state().bodies.is_empty()
    }

    /// Replaces the mapping by a private copy of all bodies, at the same address. The pool is then
    /// of no more use for sending: peers see the content from before. A forked child inherits the
    /// private memory. Waits for threads that write to a body.
    ///
    /// # Errors
    /// No memory is available; the mapping is unchanged.
    pub fn make_private_copy(&self) -> io::Result<()> {
        let _no_writer = self.lock_for_writing();
        let state = self.lock_state();
        if self.is_private.load(Relaxed) {
            return Ok(());
        }
        let private_mapping = Mapping::map_private_sparse(POOL_BYTES)?;
        for (&offset, &len) in &state.bodies {
            // SAFETY: the allocator returns ranges within the pool. The fresh mapping has no other
            // user, and the write lock excludes writers of the source.
            unsafe {
                let source = self.mapping.start().add(offset);
                std::ptr::copy_nonoverlapping(source, private_mapping.start().add(offset), len);
            }
        }
        replace(&self.mapping, private_mapping)?;
        self.is_private.store(true, Relaxed);
        Ok(())
    }

    /// Copies `bytes` to the position `position` in a block.
    fn write(&self, block: Block, position: usize, bytes: &[u8]) {
        assert!(
            position <= block.len
                && bytes.len() <= block.len - position
                && block.len <= POOL_BYTES - block.offset,
            "bytes end within the block"
        );
        // SAFETY: the range was just checked to be in the mapping, which is writable, and the block
        // belongs to the caller.
        unsafe {
            let target = self.mapping.start().add(block.offset + position);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len());
        }
    }
}

impl PoolState {
    fn has_body_space(&self, added_bytes: usize) -> bool {
        let used_bytes: usize = self.bodies.values().sum();
        added_bytes <= BODY_BYTES_MAX - used_bytes.min(BODY_BYTES_MAX)
    }
}

/// Body of a message in the pool of this task. The program packs the body where its receivers read
/// it. Dropping the value removes a user of the block.
#[derive(Debug)]
pub struct PoolBody {
    pool: Arc<OwnPool>,
    block: Block,
    /// Number of bytes that are written.
    len: usize,
}

impl PoolBody {
    /// Appends bytes. Returns false, and appends nothing, if the block has no space for them and
    /// cannot grow.
    pub fn append(&mut self, bytes: &[u8]) -> bool {
        if bytes.len() > self.block.len - self.len && !self.grow(bytes.len()) {
            return false;
        }
        for piece in bytes.chunks(WRITE_BYTES_MAX) {
            let _writer = self.pool.lock_for_writing();
            self.pool.write(self.block, self.len, piece);
            self.len += piece.len();
        }
        true
    }

    /// Makes space for `added_bytes` bytes: enlarges the block to twice its size if possible, and
    /// otherwise moves the content to a larger block.
    fn grow(&mut self, added_bytes: usize) -> bool {
        let Some(needed_bytes) = self.len.checked_add(added_bytes) else {
            return false;
        };
        let capacities = [needed_bytes.max(2 * self.block.len), needed_bytes];
        if self.pool.is_private.load(Relaxed) {
            return false;
        }
        let mut state = self.pool.lock_state();
        for capacity in capacities {
            if state.has_body_space(capacity - self.block.len)
                && state.allocator.try_extend(&mut self.block, capacity)
            {
                state.bodies.insert(self.block.offset, self.block.len);
                return true;
            }
        }
        drop(state);
        let larger_body = capacities
            .into_iter()
            .find_map(|capacity| self.pool.allocate_body(capacity));
        let Some(mut larger_body) = larger_body else {
            return false;
        };
        let is_moved = larger_body.append(self.as_ref());
        debug_assert!(is_moved, "the block was made for the content");
        *self = larger_body;
        true
    }

    /// Frees the space behind the content. Nothing more should be appended.
    pub fn finish(&mut self) {
        let mut state = self.pool.lock_state();
        state.allocator.shrink(&mut self.block, self.len);
        state.bodies.insert(self.block.offset, self.block.len);
    }
}

impl AsRef<[u8]> for PoolBody {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the block is in the mapping, which lives as long as this value. Only this value
        // writes to the block, and `len` bytes are initialized. A private copy of the mapping has
        // the same content at the same address.
        unsafe {
            std::slice::from_raw_parts(self.pool.mapping.start().add(self.block.offset), self.len)
        }
    }
}

impl Drop for PoolBody {
    fn drop(&mut self) {
        let mut state = self.pool.lock_state();
        state.bodies.remove(&self.block.offset);
        state.allocator.release(self.block);
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
        Arc<OwnPool>,
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
        let (own_pool, peer_pool, own_ring_pair, peer_ring_pair) = pool_with_peer();
        let block = own_pool.store_message(&[7; 100_000]).expect("room");
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        let lease = peer_pool.lease(block, 5, &lease_returner).expect("good");
        assert_eq!(lease.as_ref(), [7; 100_000]);
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
        let (own_pool, peer_pool, own_ring_pair, peer_ring_pair) = pool_with_peer();
        let block = own_pool.store_message(&[1; 50_000]).expect("room");
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        let lease = peer_pool.lease(block, 0, &lease_returner).expect("good");
        peer_pool.make_private_copy().expect("memory");
        lease_returner.detach();
        own_pool.release(block);
        assert_eq!(
            own_pool.store_message(&[2; 50_000]),
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

    /// A body that was packed in the pool is read at the same place by all its receivers, and its
    /// block is free when the body and the leases are dropped.
    #[test]
    fn packed_body_is_read_where_it_was_packed() {
        let (own_pool, peer_pool, _own_ring_pair, peer_ring_pair) = pool_with_peer();
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        let mut body = own_pool.allocate_body(100_000).expect("room");
        assert!(body.append(&[1; 60_000]));
        assert!(own_pool.share_body(body.as_ref()).is_none(), "unfinished");
        assert!(body.append(&[2; 60_000]), "the block grows");
        body.finish();
        let block = own_pool.share_body(body.as_ref()).expect("a whole body");
        assert!(own_pool.share_body(&body.as_ref()[1..]).is_none());
        assert!(own_pool.share_body(&[1; 120_000]).is_none());
        let lease = peer_pool.lease(block, 0, &lease_returner).expect("good");
        assert!(lease.as_ref() == body.as_ref() && lease.as_ref().len() == 120_000);
        drop(body);
        assert_eq!(
            (own_pool.has_bodies(), own_pool.allocated_block_count()),
            (false, 1)
        );
        assert_eq!(lease.as_ref()[119_999], 2, "the receiver keeps the block");
        own_pool.release(block);
        assert_eq!(own_pool.allocated_block_count(), 0);
    }

    #[test]
    fn half_packed_body_continues_in_private_memory() {
        let (own_pool, peer_pool, _own_ring_pair, peer_ring_pair) = pool_with_peer();
        let lease_returner = LeaseReturner::new(peer_ring_pair.reader.memory());
        let mut sent_body = own_pool.allocate_body(5000).expect("room");
        assert!(sent_body.append(&[9; 5000]));
        sent_body.finish();
        let block = own_pool.share_body(sent_body.as_ref()).expect("shared");
        let lease = peer_pool.lease(block, 0, &lease_returner).expect("good");
        let mut body = own_pool.allocate_body(100_000).expect("room");
        assert!(body.append(&[1; 50_000]));
        own_pool.make_private_copy().expect("memory");
        own_pool.make_private_copy().expect("nothing left to do");
        assert!(body.append(&[2; 50_000]));
        assert!(!body.append(&[3]), "a private pool does not grow bodies");
        body.finish();
        assert!(own_pool.share_body(body.as_ref()).is_none());
        assert!(body.as_ref()[..50_000] == [1; 50_000] && body.as_ref()[50_000..] == [2; 50_000]);
        assert!(lease.as_ref() == [9; 5000] && sent_body.as_ref() == [9; 5000]);
    }

    #[test]
    fn bodies_leave_half_of_the_pool_free() {
        let (own_pool, _fd) = OwnPool::new().expect("made");
        let mut body = own_pool.allocate_body(BODY_BYTES_MAX).expect("room");
        assert!(own_pool.allocate_body(1).is_none());
        assert!(body.append(&[1; 4097]));
        body.finish();
        let mut second_body = own_pool.allocate_body(4096).expect("room");
        assert!(second_body.append(&vec![2; 1 << 20]), "it moves or grows");
        assert_eq!((body.as_ref().len(), body.as_ref()[4096]), (4097, 1));
        assert!(second_body.as_ref().iter().all(|byte| *byte == 2));
        drop((body, second_body));
        assert_eq!(own_pool.allocated_block_count(), 0);
    }
}
