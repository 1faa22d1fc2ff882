//! Zero-copy transfer of large messages between tasks on this host: the sender copies a message
//! once into its shared pool, and all receivers read the message in the pool.
//!
//! 1. When a ring has its first large message, the sender offers its pool through the daemon. Until
//!    the pool is accepted, and while the pool is full, messages are copied through the ring.
//! 2. The sender copies the message into a block of the pool, and writes a record to the ring. The
//!    record names the block and thereby grants a lease.
//! 3. The receiver reads the message in the block, and then returns the lease through the ring's
//!    memory.
//!
//! As for every route, the link retains the message until the receiver has acknowledged it, so a
//! lease may be lost at any time.

use super::core::Core;
use super::process::ProcessOwned;
use super::shm::{Ring, RingSlot, ShmRoutes};
use bytes::Bytes;
use sempa_proto::link::{
    CPU_HINT_INDEX, FLAG_OUT_OF_LINE, Link, LinkKind, SHORT_HEAD_BYTES, encode_short_head,
};
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::{Message, Micros, PvmError, PvmResult, Tid};
use sempa_ring::block_allocator::Block;
use sempa_ring::ring::{CorruptRing, Record};
use sempa_ring::shared_memory::{RING_BYTES, RingPair, SharedRing};
use sempa_ring::shared_pool::{LEASES_MAX, Lease, LeaseReturner, OwnPool, POOL_BYTES, PeerPool};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Size in bytes from which a message to one task is leased. Smaller messages are copied through
/// the ring, where reader and writer copy at the same time.
const LEASED_MESSAGE_BYTES_MIN: usize = RING_BYTES / 2;
/// Size in bytes from which a message to several tasks is leased.
const MULTICAST_MESSAGE_BYTES_MIN: usize = 32 << 10;
/// Maximum number of bytes of a pool that may be lost because tasks with a lease have ended or
/// migrated. Above the maximum a new pool replaces this pool.
const LOST_POOL_BYTES_MAX: usize = POOL_BYTES / 2;
/// Delay until the next attempt to create a pool after a failed attempt.
const POOL_RETRY_DELAY: Micros = Micros::from_secs(30);
/// Maximum number of pools of one peer that contain leased messages: the current pool and older
/// pools.
const MAPPED_POOLS_PER_PEER_MAX: usize = 8;
/// Time without a new lease after which a pool is dropped.
const POOL_IDLE_TIMEOUT: Micros = Micros::from_secs(60);

/// This task's own pool and the state of its use.
#[derive(Debug)]
struct OwnPoolState {
    pool: ProcessOwned<OwnPool>,
    id: OfferId,
    fd: Arc<ProcessOwned<OwnedFd>>,
    last_used_at: Micros,
    /// Message that is being sent to several tasks; `None` if no such message is in the pool.
    multicast_copy: Option<MulticastCopy>,
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
    /// Earliest time of the next attempt to create a pool; `None` if no attempt has failed.
    pool_retry_at: Option<Micros>,
    /// True while one message is being sent to several tasks.
    is_multicast_in_progress: bool,
    /// Pools of peers that may hold leased messages.
    peer_pools: Vec<(Tid, Weak<PeerPool>)>,
}

/// Leases of one ring, in both directions.
#[derive(Debug)]
pub(super) struct Leases {
    /// Blocks leased to the peer. The position is the index of the lease; the offer id names the
    /// pool that contains the block. `None` is a free index.
    leased_blocks: Vec<Option<(OfferId, Block)>>,
    /// Pool that was offered to the peer. The second part is true if the peer has accepted the
    /// pool.
    offered_pool_and_acceptance: Option<(OfferId, bool)>,
    /// Pool that the peer offered and this task accepted.
    peer_pool: Option<(OfferId, Arc<PeerPool>)>,
    lease_returner: Arc<LeaseReturner>,
}

impl Leases {
    pub(super) fn new(ring_pair: &RingPair) -> Self {
        Self {
            leased_blocks: Vec::new(),
            offered_pool_and_acceptance: None,
            peer_pool: None,
            lease_returner: LeaseReturner::new(ring_pair.reader.memory()),
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
    /// Accepts a message that is in the peer's pool, and returns the length of the message in
    /// bytes.
    pub(super) fn accept_leased_message(
        leases: &Leases,
        mut record: Record<'_, SharedRing>,
        now: Micros,
        (seq, ack): (u64, u64),
        link: &mut Link,
    ) -> Result<usize, CorruptRing> {
        let mut words = [0; LEASE_RECORD_WORDS];
        for word in &mut words {
            *word = u64::from_le_bytes(record.take_bytes().ok_or(CorruptRing)?);
        }
        let [id, offset, len, lease_index] = words;
        let (_, pool) = leases
            .peer_pool
            .as_ref()
            .filter(|(pool_id, _)| pool_id.0 == id)
            .ok_or(CorruptRing)?;
        let to_usize = |word| usize::try_from(word).map_err(|_| CorruptRing);
        let block = Block {
            offset: to_usize(offset)?,
            len: to_usize(len)?,
        };
        let lease_index = u8::try_from(lease_index).map_err(|_| CorruptRing)?;
        let lease = pool
            .lease(block, lease_index, &leases.lease_returner)
            .ok_or(CorruptRing)?;
        link.handle_whole_message(
            now,
            seq,
            ack,
            Bytes::from_owner(LeasedMessage(ProcessOwned::new(lease))),
        );
        Ok(block.len)
    }

    /// Frees the blocks of all leases that the peer has returned. `pool` is this task's current
    /// pool; blocks of older pools need not be freed.
    fn free_returned_blocks(&mut self, mut pool: Option<&mut OwnPoolState>) {
        let mut returned_bits = self.ring_pair.writer.take_returned_leases();
        while returned_bits != 0 {
            let lease_index = returned_bits.trailing_zeros() as usize;
            returned_bits &= returned_bits - 1;
            let Some((id, block)) = self
                .leases
                .leased_blocks
                .get_mut(lease_index)
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
    /// receiver. Returns the block that contains the message; `None` if there is no pool or the
    /// pool has no space.
    fn copy_into_pool(&mut self, head: &[u8], body: &Bytes) -> Option<Block> {
        let OwnPoolState {
            pool: own_pool,
            multicast_copy: multicast,
            ..
        } = self.own_pool.as_mut()?;
        let own_pool = own_pool.get_mut();
        if let Some(copy) = multicast
            && copy.body.as_ptr() == body.as_ptr()
            && copy.body.len() == body.len()
            && copy.head == head
        {
            own_pool.add_user(copy.block);
            return Some(copy.block);
        }
        let block = own_pool.store_message([head, body])?;
        if self.is_multicast_in_progress && multicast.is_none() {
            own_pool.add_user(block);
            *multicast = Some(MulticastCopy {
                head: head.to_vec(),
                body: body.clone(),
                block,
            });
        }
        Some(block)
    }
}

impl ShmRoutes {
    /// Leases the next message of a link to the peer, so that the message is not copied through the
    /// ring. Returns false if the message is too small or must be copied.
    pub(super) fn lease_message(&mut self, now: Micros, slot: usize, link: &mut Link) -> bool {
        let Self { slots, pools, .. } = self;
        let Some(RingSlot::Ring(ring)) = slots.get_mut(slot) else {
            return false;
        };
        let bytes_min = if pools.is_multicast_in_progress {
            MULTICAST_MESSAGE_BYTES_MIN
        } else {
            LEASED_MESSAGE_BYTES_MIN
        };
        let Some((head, body)) = link.next_whole_message(bytes_min) else {
            return false;
        };
        let ring = ring.get_mut();
        ring.free_returned_blocks(pools.own_pool.as_mut());
        let id = pools.own_pool.as_ref().map(|pool| pool.id);
        if id.is_none() || ring.leases.offered_pool_and_acceptance != id.map(|id| (id, true)) {
            ring.needs_pool_offer = true;
            return false;
        }
        let leased_blocks = &mut ring.leases.leased_blocks;
        let lease_index = leased_blocks
            .iter()
            .position(Option::is_none)
            .unwrap_or(leased_blocks.len());
        if lease_index >= LEASES_MAX {
            return false;
        }
        let Some(block) = pools.copy_into_pool(head, body) else {
            return false;
        };
        let Some(pool) = &mut pools.own_pool else {
            return false;
        };
        pool.last_used_at = now;
        if lease_index == leased_blocks.len() {
            leased_blocks.push(None);
        }
        leased_blocks[lease_index] = Some((pool.id, block));
        let (seq, ack) = link.mark_whole_message_sent(now);
        let mut short_head = encode_short_head(LinkKind::Data { is_last: true }, seq, ack);
        short_head[0] |= FLAG_OUT_OF_LINE;
        short_head[CPU_HINT_INDEX] = ring.own_cpu_hint();
        let words = [
            pool.id.0,
            block.offset as u64,
            block.len as u64,
            lease_index as u64,
        ];
        let mut record = [0; SHORT_HEAD_BYTES + LEASE_RECORD_WORDS * 8];
        record[..SHORT_HEAD_BYTES].copy_from_slice(&short_head);
        for (record_word, word) in record[SHORT_HEAD_BYTES..].chunks_exact_mut(8).zip(words) {
            record_word.copy_from_slice(&word.to_le_bytes());
        }
        let write_result = ring.ring_pair.writer.write([&record]);
        debug_assert_eq!(write_result, Ok(true), "the caller has looked for room");
        true
    }

    /// Returns the number of messages leased to a peer.
    #[cfg(test)]
    pub(super) fn lease_count(&mut self, peer: Tid) -> usize {
        let Some(slot) = self.slot(peer) else {
            return 0;
        };
        let Self { slots, pools, .. } = self;
        let Some(RingSlot::Ring(ring)) = slots.get_mut(slot) else {
            return 0;
        };
        ring.get_mut().free_returned_blocks(pools.own_pool.as_mut());
        ring.get().leases.leased_blocks.iter().flatten().count()
    }

    /// Returns the number of peers' pools that are mapped.
    #[cfg(test)]
    pub(super) fn mapped_peer_pool_count(&self) -> usize {
        self.pools
            .peer_pools
            .iter()
            .filter(|(_, peer_pool)| peer_pool.strong_count() > 0)
            .count()
    }

    /// Acquires a lease on a peer's message and never returns the lease.
    #[cfg(test)]
    pub(super) fn leak_lease(&mut self, pool_owner: Tid) {
        let Some(RingSlot::Ring(ring)) = self
            .slot(pool_owner)
            .and_then(|slot| self.slots.get_mut(slot))
        else {
            return;
        };
        let leases = &ring.get().leases;
        if let Some((_, mapped_pool)) = &leases.peer_pool {
            std::mem::forget(mapped_pool.lease(
                Block { offset: 0, len: 1 },
                0,
                &leases.lease_returner,
            ));
        }
    }

    #[cfg(test)]
    pub(super) fn pool_id(&self) -> Option<OfferId> {
        self.pools.own_pool.as_ref().map(|own_pool| own_pool.id)
    }

    /// Returns the number of blocks of this task's pool that are in use.
    #[cfg(test)]
    pub(super) fn used_pool_block_count(&self) -> usize {
        self.pools
            .own_pool
            .as_ref()
            .map_or(0, |own_pool| own_pool.pool.get().allocated_block_count())
    }

    /// Ends all leases of a ring that has ended. The blocks leased to the peer are lost, and leases
    /// from the peer need not be returned. Drops this task's pool if more than
    /// [`LOST_POOL_BYTES_MAX`] bytes of the pool are lost.
    pub(super) fn end_leases(&mut self, ring: &mut Ring) {
        ring.free_returned_blocks(self.pools.own_pool.as_mut());
        ring.leases.lease_returner.detach();
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
                ring.get_mut()
                    .free_returned_blocks(self.pools.own_pool.as_mut());
            }
        }
        let is_idle = |own_pool: &OwnPoolState| {
            own_pool.pool.get().allocated_block_count() == 0
                && now.since(own_pool.last_used_at) >= POOL_IDLE_TIMEOUT
        };
        if self.pools.own_pool.as_ref().is_some_and(is_idle) {
            self.pools.own_pool = None;
        }
    }

    /// Drops the pool. Receivers retain their mappings, so the messages that they lease stay
    /// readable.
    pub(super) fn drop_pool(&mut self) {
        self.pools.own_pool = None;
    }

    /// Copies all leased messages into private memory. If memory is short, the messages stay in
    /// shared memory.
    pub(super) fn copy_leased_messages(&mut self) {
        for peer_pool in self
            .pools
            .peer_pools
            .drain(..)
            .filter_map(|(_, peer_pool)| peer_pool.upgrade())
        {
            // The error is ignored, because messages that could not be copied remain readable.
            let _ = peer_pool.make_private_copy();
        }
    }
}

impl Core {
    /// Queues one message for several tasks. The tasks on this host read a single copy of the
    /// message. Stops at the first task for which the message cannot be queued.
    pub(crate) fn send_to_many(
        &mut self,
        now: Micros,
        message: &Message,
        receivers: &[Tid],
    ) -> PvmResult<()> {
        self.shm_routes.pools.is_multicast_in_progress = true;
        self.order.begin_multicast();
        let own_tid = self.tid();
        let send_result = receivers.iter().try_for_each(|dst| {
            let message = Message {
                src: own_tid,
                dst: *dst,
                ..message.clone()
            };
            if *dst == own_tid {
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
        self.order.end_multicast();
        send_result
    }

    /// Ends [`Core::send_to_many`]: removes the user that kept the copy of the message in the pool
    /// during the call.
    fn end_multicast(&mut self) {
        let pools = &mut self.shm_routes.pools;
        pools.is_multicast_in_progress = false;
        if let Some(own_pool) = &mut pools.own_pool
            && let Some(copy) = own_pool.multicast_copy.take()
        {
            own_pool.pool.get_mut().release(copy.block);
        }
    }

    /// Offers the pool to a peer. Creates the pool if there is none.
    pub(super) fn offer_pool(&mut self, now: Micros, slot: usize) {
        let shm_routes = &mut self.shm_routes;
        if shm_routes.pools.own_pool.is_none() {
            if shm_routes
                .pools
                .pool_retry_at
                .is_some_and(|retry_time| now < retry_time)
            {
                return;
            }
            let Ok((new_pool, fd)) = OwnPool::new() else {
                shm_routes.pools.pool_retry_at = Some(now + POOL_RETRY_DELAY);
                return;
            };
            shm_routes.pools.last_pool_id += 1;
            let id = OfferId(shm_routes.pools.last_pool_id);
            shm_routes.pools.own_pool = Some(OwnPoolState {
                pool: ProcessOwned::new(new_pool),
                id,
                fd: Arc::new(ProcessOwned::from_fd(fd)),
                last_used_at: now,
                multicast_copy: None,
            });
        }
        let Some(OwnPoolState { id, fd, .. }) = &shm_routes.pools.own_pool else {
            return;
        };
        let (id, fd) = (*id, fd.clone());
        let Some(RingSlot::Ring(ring)) = shm_routes.slots.get_mut(slot) else {
            return;
        };
        let ring = ring.get_mut();
        if ring
            .leases
            .offered_pool_and_acceptance
            .is_some_and(|(offered_id, _)| offered_id == id)
        {
            return;
        }
        ring.leases.offered_pool_and_acceptance = Some((id, false));
        let peer = ring.peer;
        self.send_route_message(peer, RouteMsg::PoolOffer { id }, vec![fd]);
    }

    /// Handles a route message of a peer about pools.
    pub(super) fn handle_pool_message(
        &mut self,
        now: Micros,
        sender: Tid,
        message: &RouteMsg,
        descriptors: &[OwnedFd],
    ) {
        // Records that were written before this message refer to the previous pool.
        self.drain_peer(now, sender);
        let Some(slot) = self.shm_routes.slot(sender) else {
            return;
        };
        let ShmRoutes { slots, pools, .. } = &mut self.shm_routes;
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
                    .filter(|(pool_owner, _)| *pool_owner == sender)
                    .count()
                    >= MAPPED_POOLS_PER_PEER_MAX
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
                pools.peer_pools.push((sender, Arc::downgrade(&pool)));
                leases.peer_pool = Some((id, pool));
                self.send_route_message(sender, RouteMsg::PoolAccept { id }, Vec::new());
            }
            RouteMsg::PoolAccept { id } => {
                if let Some((offered_id, is_accepted)) = &mut leases.offered_pool_and_acceptance
                    && *offered_id == id
                {
                    *is_accepted = true;
                }
            }
            _ => {}
        }
    }

    /// Copies leased messages into private memory before a fork. The child may read these messages
    /// later, but the owners of the pools count only the parent's leases. Rings with such leases
    /// are closed and set up again when they are needed.
    pub(crate) fn prepare_for_fork(&mut self, now: Micros) {
        for slot in 0..self.shm_routes.slots.len() {
            let has_peer_leases = |ring: &Ring| {
                ring.leases
                    .peer_pool
                    .as_ref()
                    .is_some_and(|(_, peer_pool)| peer_pool.has_leases())
            };
            let peer = match &self.shm_routes.slots[slot] {
                RingSlot::Ring(ring) if has_peer_leases(ring.get()) => ring.get().peer,
                _ => continue,
            };
            self.drain_ring_fully(now, slot);
            self.close_ring(now, slot);
            self.reroute_through_daemon(now, peer);
        }
        let peer_pools = &mut self.shm_routes.pools.peer_pools;
        peer_pools.retain(|(_, peer_pool)| peer_pool.strong_count() > 0);
        for peer_pool in peer_pools
            .iter()
            .filter_map(|(_, peer_pool)| peer_pool.upgrade())
            .filter(|peer_pool| peer_pool.has_leases())
        {
            // An error is ignored, as in [`ShmRoutes::copy_leased_messages`].
            let _ = peer_pool.make_private_copy();
        }
    }
}
