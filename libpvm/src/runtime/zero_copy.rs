//! Zero-copy transfer of large messages between tasks on this host: the body of a message is in the
//! shared pool of its sender, and all receivers read it there.
//!
//! 1. When a ring has its first large message, the sender offers its pool through the daemon. Until
//!    the pool is accepted, and while the pool is full, messages are copied through the ring.
//! 2. From then on the program packs large bodies into blocks of the pool ([`PackedBody`]). A body
//!    that is elsewhere is copied into a block when it is sent.
//! 3. The sender writes a record to the ring. The record contains the header of the message, names
//!    the block and thereby grants a lease.
//! 4. The receiver reads the body in the block, and then returns the lease through the ring's
//!    memory.
//!
//! As for every route, the link retains the message until the receiver has acknowledged it, so a
//! lease may be lost at any time.

use super::core::Core;
use super::process::ProcessOwned;
use super::shm::{Ring, RingSlot, ShmRoutes};
use bytes::Bytes;
use sempa_proto::link::{
    CPU_HINT_INDEX, FLAG_OUT_OF_LINE, HEAD_BYTES_MAX, Link, LinkKind, SHORT_HEAD_BYTES,
    encode_short_head,
};
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::{Message, Micros, PvmError, PvmResult, Tid};
use sempa_ring::block_allocator::Block;
use sempa_ring::ring::{CorruptRing, Record};
use sempa_ring::shared_memory::{RING_BYTES, RingPair, SharedRing};
use sempa_ring::shared_pool::{
    LEASES_MAX, Lease, LeaseReturner, OwnPool, POOL_BYTES, PeerPool, PoolBody,
};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Size in bytes from which a message to one task is leased. Smaller messages are copied through
/// the ring, where reader and writer copy at the same time.
pub(crate) const LEASED_MESSAGE_BYTES_MIN: usize = RING_BYTES / 2;
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
    pool: ProcessOwned<Arc<OwnPool>>,
    id: OfferId,
    fd: Arc<ProcessOwned<OwnedFd>>,
    last_used_at: Micros,
    /// Message that is being sent to several tasks; `None` if no such message is in the pool.
    multicast_copy: Option<MulticastCopy>,
}

/// Body that is being sent to several tasks, and the block that contains its copy.
#[derive(Debug)]
struct MulticastCopy {
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
    /// Number of bytes of message bodies that this task has copied to send them to tasks on this
    /// host, after the program had packed them.
    copied_bytes: u64,
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
    /// True if the peer may hold leases.
    pub(super) fn has_leased_blocks(&self) -> bool {
        self.leased_blocks.iter().any(Option::is_some)
    }

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

/// Number of words in a lease record: pool, offset, length, index of the lease. The header of the
/// message follows.
const LEASE_RECORD_WORDS: usize = 4;
/// Maximum size of a lease record in bytes.
const LEASE_RECORD_BYTES_MAX: usize = SHORT_HEAD_BYTES + LEASE_RECORD_WORDS * 8 + HEAD_BYTES_MAX;

impl Ring {
    /// Accepts a message whose body is in the peer's pool, and returns the length of the body in
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
        if record.is_empty() || record.len() > HEAD_BYTES_MAX {
            return Err(CorruptRing);
        }
        let mut head = Vec::with_capacity(record.len());
        record.append_to(&mut head);
        let lease = pool
            .lease(block, lease_index, &leases.lease_returner)
            .ok_or(CorruptRing)?;
        let body = Bytes::from_owner(LeasedMessage(ProcessOwned::new(lease)));
        link.handle_whole_message(now, (seq, ack), head.into(), body);
        Ok(block.len)
    }

    /// Frees the blocks of all leases that the peer has returned. `pool` is this task's current
    /// pool; blocks of older pools need not be freed.
    fn free_returned_blocks(&mut self, pool: Option<&OwnPoolState>) {
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
            if let Some(pool) = pool.filter(|pool| pool.id == id) {
                pool.pool.get().release(block);
            }
        }
    }
}

/// Memory of the shared pool into which the program packs the body of a large message. Tasks on
/// this host read the body where it was packed. When the task migrates or forks, the memory becomes
/// private at the same address. A forked child never frees the memory.
#[derive(Debug)]
pub struct PackedBody(ProcessOwned<PoolBody>);

impl PackedBody {
    /// Returns memory in a pool of its own, which no task maps. For tests of packing.
    #[doc(hidden)]
    pub fn in_separate_pool(capacity: usize) -> Option<Self> {
        let (pool, _) = OwnPool::new().ok()?;
        Some(Self(ProcessOwned::new(pool.allocate_body(capacity)?)))
    }

    /// Appends bytes. Returns false, and appends nothing, if the pool has no space for them.
    pub fn append(&mut self, bytes: &[u8]) -> bool {
        self.0.get_mut().append(bytes)
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.get().as_ref()
    }

    /// Makes the body immutable and shareable.
    pub fn freeze(mut self) -> Bytes {
        self.0.get_mut().finish();
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for PackedBody {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl SharedPools {
    /// Returns the block of the pool that contains the body, with one more user. Copies the body
    /// into the pool unless it was packed there, or copied there for another receiver. Returns
    /// `None` if there is no pool or the pool has no space.
    fn share_body(&mut self, body: &Bytes) -> Option<Block> {
        let OwnPoolState {
            pool: own_pool,
            multicast_copy: multicast,
            ..
        } = self.own_pool.as_mut()?;
        let own_pool = own_pool.get();
        if let Some(block) = own_pool.share_body(body) {
            return Some(block);
        }
        if let Some(copy) = multicast
            && copy.body.as_ptr() == body.as_ptr()
            && copy.body.len() == body.len()
        {
            own_pool.add_user(copy.block);
            return Some(copy.block);
        }
        let block = own_pool.store_message(body)?;
        self.copied_bytes += body.len() as u64;
        if self.is_multicast_in_progress && multicast.is_none() {
            own_pool.add_user(block);
            *multicast = Some(MulticastCopy {
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
        ring.free_returned_blocks(pools.own_pool.as_ref());
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
        let Some(block) = pools.share_body(body) else {
            return false;
        };
        let mut record = [0; LEASE_RECORD_BYTES_MAX];
        let record_bytes = LEASE_RECORD_BYTES_MAX - HEAD_BYTES_MAX + head.len();
        record[LEASE_RECORD_BYTES_MAX - HEAD_BYTES_MAX..record_bytes].copy_from_slice(head);
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
        record[..SHORT_HEAD_BYTES].copy_from_slice(&short_head);
        for (record_word, word) in record[SHORT_HEAD_BYTES..].chunks_exact_mut(8).zip(words) {
            record_word.copy_from_slice(&word.to_le_bytes());
        }
        let write_result = ring.ring_pair.writer.write([&record[..record_bytes]]);
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
        ring.get_mut().free_returned_blocks(pools.own_pool.as_ref());
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
        ring.free_returned_blocks(self.pools.own_pool.as_ref());
        ring.leases.lease_returner.detach();
        let Some(pool) = &mut self.pools.own_pool else {
            return;
        };
        for (id, block) in ring.leases.leased_blocks.drain(..).flatten() {
            if id == pool.id {
                pool.pool.get().abandon(block);
            }
        }
        if pool.pool.get().abandoned_bytes() > LOST_POOL_BYTES_MAX {
            self.drop_pool();
        }
    }

    /// Drops the pool if it has no leases and was not used for [`POOL_IDLE_TIMEOUT`].
    pub(super) fn drop_idle_pool(&mut self, now: Micros) {
        for slot in &mut self.slots {
            if let RingSlot::Ring(ring) = slot {
                ring.get_mut()
                    .free_returned_blocks(self.pools.own_pool.as_ref());
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
    /// readable. Bodies that the program packs or owns become private memory of this process.
    pub(super) fn drop_pool(&mut self) {
        if let Some(own_pool) = self.pools.own_pool.take()
            && own_pool.pool.get().has_bodies()
        {
            // The error is ignored, as in [`ShmRoutes::copy_leased_messages`].
            let _ = own_pool.pool.get().make_private_copy();
        }
    }

    /// Frees the blocks of all leases that the reader of this ring has returned.
    pub(super) fn free_returned_blocks(&mut self, slot: usize) {
        if let Some(RingSlot::Ring(ring)) = self.slots.get_mut(slot) {
            ring.get_mut()
                .free_returned_blocks(self.pools.own_pool.as_ref());
        }
    }

    fn allocate_body(&mut self, now: Micros, capacity: usize) -> Option<PackedBody> {
        let own_pool = self.pools.own_pool.as_mut()?;
        own_pool.last_used_at = now;
        let body = own_pool.pool.get().allocate_body(capacity)?;
        Some(PackedBody(ProcessOwned::new(body)))
    }

    /// Returns the number of bytes of message bodies that were copied on their way to tasks on this
    /// host, after the program had packed them.
    #[cfg(test)]
    pub(super) fn copied_bytes(&self) -> u64 {
        self.pools.copied_bytes
    }

    /// Counts bytes of message bodies that were copied to a ring.
    pub(super) fn count_copied_bytes(&mut self, byte_count: usize) {
        self.pools.copied_bytes += byte_count as u64;
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
    /// Allocates memory of the pool for a body that the program packs. Returns `None` if there is
    /// no pool or the pool has no space.
    pub(super) fn allocate_body(&mut self, now: Micros, capacity: usize) -> Option<PackedBody> {
        self.shm_routes.pools.own_pool.as_ref()?;
        // A block that was used lately is still in the cache.
        self.free_unused_blocks(now);
        self.shm_routes.allocate_body(now, capacity)
    }

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
            own_pool.pool.get().release(copy.block);
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
    /// are closed and set up again when they are needed. The same applies to bodies in the pool of
    /// this task, because a child does not inherit the pool.
    pub(crate) fn prepare_for_fork(&mut self, now: Micros) {
        let own_pool = self.shm_routes.pools.own_pool.as_ref();
        if own_pool.is_some_and(|own_pool| own_pool.pool.get().has_bodies()) {
            self.shm_routes.drop_pool();
        }
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
