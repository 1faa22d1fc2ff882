//! Zero-copy transfer of large messages between tasks on this host: the sender copies a message
//! once into its shared pool, and all receivers read it there.
//!
//! 1. When a ring has its first large message, the sender offers its pool through the daemon. Until
//!    the pool is accepted, and while it is full, messages are copied through the ring.
//! 2. The sender copies the message into a block of the pool. It writes a record to the ring that
//!    names the block: a lease.
//! 3. The receiver reads the message in the block, and then returns the lease through the ring's
//!    memory.
//!
//! The link keeps the message until it is acknowledged, as for every route, so a lease may be lost
//! at any time.

use super::core::Core;
use super::process::ProcessOwned;
use super::shm::{Ring, RingSlot, ShmRoutes};
use bytes::Bytes;
use sempa_proto::link::{
    CPU_HINT_BYTE, FLAG_OUT_OF_LINE, Link, LinkKind, SHORT_HEAD_BYTES, encode_short_head,
};
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::{Message, Micros, PvmError, PvmResult, Tid};
use sempa_ring::block_allocator::Block;
use sempa_ring::ring::{Record, RingCorrupt};
use sempa_ring::shared_memory::{RING_BYTES, RingPair, SharedRing};
use sempa_ring::shared_pool::{LEASES_MAX, Lease, LeaseReturner, OwnPool, POOL_BYTES, PeerPool};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Minimum size of a message to one task for a lease. Smaller messages are copied through the ring,
/// where reader and writer copy at the same time.
const LEASE_BYTES_MIN: usize = RING_BYTES / 2;
/// Minimum size of a message to several tasks for a lease.
const MULTICAST_LEASE_BYTES_MIN: usize = 32 << 10;
/// Maximum number of bytes in a pool that are lost because tasks with a lease have ended or
/// migrated. Above the maximum a new pool replaces the pool.
const LOST_POOL_BYTES_MAX: usize = POOL_BYTES / 2;
/// Delay until the next attempt to create a pool after a failed attempt.
const POOL_RETRY_DELAY: Micros = Micros::from_secs(30);
/// Maximum number of pools of one peer that hold leased messages: the current one and older ones.
const POOLS_PER_PEER_MAX: usize = 8;
/// Time without a new lease after which a pool is dropped.
const POOL_IDLE_TIMEOUT: Micros = Micros::from_secs(60);

/// This task's own pool, with its current use.
#[derive(Debug)]
struct OwnPoolState {
    pool: ProcessOwned<OwnPool>,
    id: OfferId,
    fd: Arc<ProcessOwned<OwnedFd>>,
    last_used_at: Micros,
    /// Block of the message that is being sent to several tasks.
    multicast: Option<MulticastCopy>,
}

/// Message that is being sent to several tasks, and the block that contains its copy.
#[derive(Debug)]
struct MulticastCopy {
    head: Vec<u8>,
    body: Bytes,
    block: Block,
}

/// This task's own pool, and the pools of peers whose messages this task leases.
#[derive(Debug, Default)]
pub(super) struct SharedPools {
    own_pool: Option<OwnPoolState>,
    last_pool_id: u64,
    /// Earliest time of the next attempt to create a pool.
    retry_at: Option<Micros>,
    /// True while one message is being sent to several tasks.
    multicast_in_progress: bool,
    /// Pools of peers that may hold leased messages.
    peer_pools: Vec<(Tid, Weak<PeerPool>)>,
}

/// Leases over one ring, in both directions.
#[derive(Debug)]
pub(super) struct Leases {
    /// Blocks leased to the peer, by index of the lease, each with the pool that contains the
    /// block. `None` is a free index.
    leased_blocks: Vec<Option<(OfferId, Block)>>,
    /// Pool that was offered to the peer; true if the peer has accepted it.
    offered_pool: Option<(OfferId, bool)>,
    /// Pool that the peer offered and this task accepted.
    peer_pool: Option<(OfferId, Arc<PeerPool>)>,
    lease_returns: Arc<LeaseReturner>,
}

impl Leases {
    pub(super) fn new(ends: &RingPair) -> Leases {
        Leases {
            leased_blocks: Vec::new(),
            offered_pool: None,
            peer_pool: None,
            lease_returns: LeaseReturner::new(ends.reader.memory()),
        }
    }
}

/// Message in a peer's pool that this task leases. A forked child never returns the lease.
struct LeasedMessage(ProcessOwned<Lease>);

impl AsRef<[u8]> for LeasedMessage {
    fn as_ref(&self) -> &[u8] {
        self.0.get().as_ref()
    }
}

/// Number of words in a lease record: pool, offset, length, index of the lease.
const LEASE_RECORD_WORDS: usize = 4;

impl Ring {
    /// Accepts a message that is in the peer's pool, and returns the length of the message.
    pub(super) fn take_lease(
        leases: &Leases,
        mut record: Record<'_, SharedRing>,
        now: Micros,
        (seq, ack): (u64, u64),
        link: &mut Link,
    ) -> Result<usize, RingCorrupt> {
        let mut words = [0; LEASE_RECORD_WORDS];
        for word in &mut words {
            *word = u64::from_le_bytes(record.take().ok_or(RingCorrupt)?);
        }
        let [id, offset, len, slot] = words;
        let (_, pool) = leases
            .peer_pool
            .as_ref()
            .filter(|(theirs, _)| theirs.0 == id)
            .ok_or(RingCorrupt)?;
        let number = |word| usize::try_from(word).map_err(|_| RingCorrupt);
        let block = Block {
            offset: number(offset)?,
            len: number(len)?,
        };
        let slot = u8::try_from(slot).map_err(|_| RingCorrupt)?;
        let lease = pool
            .lease(block, slot, &leases.lease_returns)
            .ok_or(RingCorrupt)?;
        link.handle_whole_message(
            now,
            seq,
            ack,
            Bytes::from_owner(LeasedMessage(ProcessOwned::new(lease))),
        );
        Ok(block.len)
    }

    /// Frees the blocks of all leases that the peer has returned.
    fn free_returned(&mut self, mut pool: Option<&mut OwnPoolState>) {
        let mut returned = self.ends.writer.take_returned_leases();
        while returned != 0 {
            let slot = returned.trailing_zeros() as usize;
            returned &= returned - 1;
            let Some((id, block)) = self
                .leases
                .leased_blocks
                .get_mut(slot)
                .and_then(Option::take)
            else {
                continue;
            };
            if let Some(pool) = pool.as_deref_mut().filter(|pool| pool.id == id) {
                pool.pool.get_mut().release(block);
            }
        }
    }
}

impl SharedPools {
    /// Copies the message into the pool, unless the pool already contains this message for another
    /// receiver. `None` if the pool has no space.
    fn copy_into_pool(&mut self, head: &[u8], body: &Bytes) -> Option<Block> {
        let OwnPoolState {
            pool: own,
            multicast: one_copy,
            ..
        } = self.own_pool.as_mut()?;
        let own = own.get_mut();
        if let Some(copy) = one_copy
            && copy.body.as_ptr() == body.as_ptr()
            && copy.body.len() == body.len()
            && copy.head == head
        {
            own.add_user(copy.block);
            return Some(copy.block);
        }
        let block = own.store_message([head, body])?;
        if self.multicast_in_progress && one_copy.is_none() {
            own.add_user(block);
            *one_copy = Some(MulticastCopy {
                head: head.to_vec(),
                body: body.clone(),
                block,
            });
        }
        Some(block)
    }
}

impl ShmRoutes {
    /// Leases the next message of a link to the peer instead of copying it. Returns false if the
    /// message must be copied, or is too small.
    pub(super) fn lease_message(&mut self, now: Micros, slot: usize, link: &mut Link) -> bool {
        let ShmRoutes { slots, pools, .. } = self;
        let Some(RingSlot::Ring(ring)) = slots.get_mut(slot) else {
            return false;
        };
        let bytes_min = if pools.multicast_in_progress {
            MULTICAST_LEASE_BYTES_MIN
        } else {
            LEASE_BYTES_MIN
        };
        let Some((head, body)) = link.next_whole_message(bytes_min) else {
            return false;
        };
        let ring = ring.get_mut();
        ring.free_returned(pools.own_pool.as_mut());
        let id = pools.own_pool.as_ref().map(|pool| pool.id);
        if id.is_none() || ring.leases.offered_pool != id.map(|id| (id, true)) {
            ring.wants_pool_offer = true;
            return false;
        }
        let leased_blocks = &mut ring.leases.leased_blocks;
        let index = leased_blocks
            .iter()
            .position(Option::is_none)
            .unwrap_or(leased_blocks.len());
        if index >= LEASES_MAX {
            return false;
        }
        let Some(block) = pools.copy_into_pool(head, body) else {
            return false;
        };
        let Some(pool) = &mut pools.own_pool else {
            return false;
        };
        pool.last_used_at = now;
        if index == leased_blocks.len() {
            leased_blocks.push(None);
        }
        leased_blocks[index] = Some((pool.id, block));
        let (seq, ack) = link.mark_whole_sent(now);
        let mut short = encode_short_head(LinkKind::Data { last: true }, seq, ack);
        short[0] |= FLAG_OUT_OF_LINE;
        short[CPU_HINT_BYTE] = ring.own_cpu_hint();
        let words = [
            pool.id.0,
            block.offset as u64,
            block.len as u64,
            index as u64,
        ];
        let mut record = [0; SHORT_HEAD_BYTES + LEASE_RECORD_WORDS * 8];
        record[..SHORT_HEAD_BYTES].copy_from_slice(&short);
        for (to, word) in record[SHORT_HEAD_BYTES..].chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let written = ring.ends.writer.write([&record]);
        debug_assert_eq!(written, Ok(true), "the caller has looked for room");
        true
    }

    /// Returns the number of messages leased to a peer.
    #[cfg(test)]
    pub(super) fn lease_count_to(&mut self, peer: Tid) -> usize {
        let Some(slot) = self.slot(peer) else {
            return 0;
        };
        let ShmRoutes { slots, pools, .. } = self;
        let Some(RingSlot::Ring(ring)) = slots.get_mut(slot) else {
            return 0;
        };
        ring.get_mut().free_returned(pools.own_pool.as_mut());
        ring.get().leases.leased_blocks.iter().flatten().count()
    }

    /// Returns the number of peers' pools that are mapped.
    #[cfg(test)]
    pub(super) fn mapped_peer_pools(&self) -> usize {
        self.pools
            .peer_pools
            .iter()
            .filter(|(_, store)| store.strong_count() > 0)
            .count()
    }

    /// Acquires a lease on a peer's message and never returns it.
    #[cfg(test)]
    pub(super) fn leak_lease(&mut self, pool_owner: Tid) {
        let Some(RingSlot::Ring(ring)) = self
            .slot(pool_owner)
            .and_then(|slot| self.slots.get_mut(slot))
        else {
            return;
        };
        let loans = &ring.get().leases;
        if let Some((_, store)) = &loans.peer_pool {
            std::mem::forget(store.lease(Block { offset: 0, len: 1 }, 0, &loans.lease_returns));
        }
    }

    #[cfg(test)]
    pub(super) fn pool_id(&self) -> Option<OfferId> {
        self.pools.own_pool.as_ref().map(|store| store.id)
    }

    /// Returns the number of blocks of the pool that are in use.
    #[cfg(test)]
    pub(super) fn pool_blocks_in_use(&self) -> usize {
        self.pools
            .own_pool
            .as_ref()
            .map_or(0, |store| store.pool.get().allocated_blocks())
    }

    /// Ends all leases over a ring that has ended: blocks leased to the peer are lost, and leases
    /// from the peer need not be returned.
    pub(super) fn end_leases(&mut self, ring: &mut Ring) {
        ring.free_returned(self.pools.own_pool.as_mut());
        ring.leases.lease_returns.detach();
        let Some(pool) = &mut self.pools.own_pool else {
            return;
        };
        for (id, block) in ring.leases.leased_blocks.drain(..).flatten() {
            if id == pool.id {
                pool.pool.get_mut().abandon(block);
            }
        }
        if pool.pool.get().abandoned_bytes() > LOST_POOL_BYTES_MAX {
            self.pools.own_pool = None;
        }
    }

    /// Drops the pool if it has no leases and was not used for [`POOL_IDLE_TIMEOUT`].
    pub(super) fn drop_idle_pool(&mut self, now: Micros) {
        for slot in &mut self.slots {
            if let RingSlot::Ring(ring) = slot {
                ring.get_mut().free_returned(self.pools.own_pool.as_mut());
            }
        }
        let idle = |store: &OwnPoolState| {
            store.pool.get().allocated_blocks() == 0
                && now.since(store.last_used_at) >= POOL_IDLE_TIMEOUT
        };
        if self.pools.own_pool.as_ref().is_some_and(idle) {
            self.pools.own_pool = None;
        }
    }

    /// Drops the pool. Receivers keep their mappings, so the messages that they lease stay
    /// readable.
    pub(super) fn drop_pool(&mut self) {
        self.pools.own_pool = None;
    }

    /// Copies all leased messages into private memory. If memory is short, the messages stay in
    /// shared memory.
    pub(super) fn copy_leased_messages(&mut self) {
        for store in self
            .pools
            .peer_pools
            .drain(..)
            .filter_map(|(_, store)| store.upgrade())
        {
            // Ignored: messages that could not be copied remain readable.
            let _ = store.make_private_copy();
        }
    }
}

impl Core {
    /// Queues one message for several tasks; the tasks on this host read a single copy of the
    /// message. Stops at the first task for which the message cannot be queued.
    pub(crate) fn send_to_many(
        &mut self,
        now: Micros,
        message: &Message,
        to: &[Tid],
    ) -> PvmResult<()> {
        self.shm.pools.multicast_in_progress = true;
        let me = self.tid();
        let sent = to.iter().try_for_each(|dst| {
            let message = Message {
                src: me,
                dst: *dst,
                ..message.clone()
            };
            if *dst == me {
                self.deliver(message);
                return Ok(());
            }
            if dst.is_task() {
                self.send(now, message)
            } else {
                Err(PvmError::BadParam)
            }
        });
        self.end_multicast();
        sent
    }

    /// Ends [`Core::send_to_many`] by dropping its own reference to the block.
    fn end_multicast(&mut self) {
        let pools = &mut self.shm.pools;
        pools.multicast_in_progress = false;
        if let Some(store) = &mut pools.own_pool
            && let Some(copy) = store.multicast.take()
        {
            store.pool.get_mut().release(copy.block);
        }
    }

    /// Offers the pool to a peer; creates the pool if there is none.
    pub(super) fn offer_pool(&mut self, now: Micros, slot: usize) {
        let near = &mut self.shm;
        if near.pools.own_pool.is_none() {
            if near.pools.retry_at.is_some_and(|until| now < until) {
                return;
            }
            let Ok((own, fd)) = OwnPool::new() else {
                near.pools.retry_at = Some(now + POOL_RETRY_DELAY);
                return;
            };
            near.pools.last_pool_id += 1;
            let id = OfferId(near.pools.last_pool_id);
            near.pools.own_pool = Some(OwnPoolState {
                pool: ProcessOwned::new(own),
                id,
                fd: Arc::new(ProcessOwned::new_fd(fd)),
                last_used_at: now,
                multicast: None,
            });
        }
        let Some(OwnPoolState { id, fd, .. }) = &near.pools.own_pool else {
            return;
        };
        let (id, fd) = (*id, fd.clone());
        let Some(RingSlot::Ring(ring)) = near.slots.get_mut(slot) else {
            return;
        };
        let ring = ring.get_mut();
        if ring
            .leases
            .offered_pool
            .is_some_and(|(offered, _)| offered == id)
        {
            return;
        }
        ring.leases.offered_pool = Some((id, false));
        let peer = ring.peer;
        self.send_route_message(peer, RouteMsg::PoolOffer { id }, vec![fd]);
    }

    /// Handles a route message of a peer about pools.
    pub(super) fn handle_pool_message(
        &mut self,
        now: Micros,
        from: Tid,
        message: &RouteMsg,
        descriptors: &[OwnedFd],
    ) {
        // Records that were written before this message refer to the previous pool.
        self.drain_peer(now, from);
        let Some(slot) = self.shm.slot(from) else {
            return;
        };
        let ShmRoutes { slots, pools, .. } = &mut self.shm;
        let Some(RingSlot::Ring(ring)) = slots.get_mut(slot) else {
            return;
        };
        let leases = &mut ring.get_mut().leases;
        match *message {
            RouteMsg::PoolOffer { id } => {
                // The previous pool stays mapped only while its messages are in use.
                leases.peer_pool = None;
                pools.peer_pools.retain(|(_, pool)| pool.strong_count() > 0);
                if pools
                    .peer_pools
                    .iter()
                    .filter(|(lender, _)| *lender == from)
                    .count()
                    >= POOLS_PER_PEER_MAX
                {
                    return;
                }
                let Some(pool) = descriptors
                    .first()
                    .and_then(|fd| PeerPool::map(fd.as_fd()).ok())
                else {
                    return;
                };
                let pool = Arc::new(pool);
                pools.peer_pools.push((from, Arc::downgrade(&pool)));
                leases.peer_pool = Some((id, pool));
                self.send_route_message(from, RouteMsg::PoolAccept { id }, Vec::new());
            }
            RouteMsg::PoolAccept { id } => {
                if let Some((offered, accepted)) = &mut leases.offered_pool
                    && *offered == id
                {
                    *accepted = true;
                }
            }
            _ => {}
        }
    }

    /// Copies leased messages into private memory before a fork: the child may keep reading these
    /// messages, but the pools' owners count only the parent's leases. Rings with such leases are
    /// closed and set up again when they are needed.
    pub(crate) fn prepare_for_fork(&mut self, now: Micros) {
        for slot in 0..self.shm.slots.len() {
            let used = |ring: &Ring| {
                ring.leases
                    .peer_pool
                    .as_ref()
                    .is_some_and(|(_, store)| store.has_leases())
            };
            let peer = match &self.shm.slots[slot] {
                RingSlot::Ring(ring) if used(ring.get()) => ring.get().peer,
                _ => continue,
            };
            self.drain_ring_fully(now, slot);
            self.end_ring(now, slot);
            self.reroute_through_daemon(now, peer);
        }
        let peer_pools = &mut self.shm.pools.peer_pools;
        peer_pools.retain(|(_, store)| store.strong_count() > 0);
        for store in peer_pools
            .iter()
            .filter_map(|(_, store)| store.upgrade())
            .filter(|store| store.has_leases())
        {
            // Ignored, as in [`ShmRoutes::copy_leased_messages`].
            let _ = store.make_private_copy();
        }
    }
}
