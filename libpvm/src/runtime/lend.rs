//! Zero-copy transfer of large messages between tasks on this host: the sender copies a message
//! once into its shared pool, and all receivers read it there.
//!
//! 1. When a ring has its first large message, the sender offers its pool through the daemon. Until
//!    the pool is accepted, and while it is full, messages are copied through the ring.
//! 2. The sender puts the message into a block of the pool and writes a record to the ring that
//!    names the block: a lease.
//! 3. The receiver uses the block in place and then returns the lease through the ring's memory.
//!
//! The link keeps the message until it is acknowledged, as for every route, so a lease may be lost
//! at any time.

use super::core::Core;
use super::near::{Near, Ring, Slot};
use super::process::Own;
use bytes::Bytes;
use sempa_proto::link::{
    Link, LinkKind, SHORT_HEAD_APART, SHORT_HEAD_BYTES, SHORT_HEAD_SPARE, encode_short_head,
};
use sempa_proto::route::{OfferId, RouteWord};
use sempa_proto::{Message, Micros, PvmError, PvmResult, Tid};
use sempa_ring::blocks::Block;
use sempa_ring::memory::{Ends, RING_BYTES, Shared};
use sempa_ring::ring::{Broken, Record};
use sempa_ring::store::{LOANS_MAX, Loan, OwnStore, PeerStore, Returns, STORE_BYTES};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Minimum size of a message to one task for a lease. Smaller messages are copied through the ring,
/// where reader and writer copy at the same time.
const LEND_BYTES_MIN: usize = RING_BYTES / 2;
/// Minimum size of a message to several tasks for a lease.
const LEND_TO_MANY_BYTES_MIN: usize = 32 << 10;
/// A pool of which more bytes than this are lost to tasks that ended or left with a lease is
/// replaced by a new one.
const ABANDONED_BYTES_MAX: usize = STORE_BYTES / 2;
/// Delay of the next attempt after no pool could be created.
const STORE_PAUSE: Micros = Micros::from_secs(30);
/// Maximum number of pools of one peer that hold leased messages: the current one and older ones.
const STORES_OF_ONE_MAX: usize = 8;
/// Time without a new lease after which a pool is dropped.
const STORE_IDLE_MAX: Micros = Micros::from_secs(60);

/// This task's own pool, with its current use.
#[derive(Debug)]
struct Store {
    own: Own<OwnStore>,
    id: OfferId,
    fd: Arc<Own<OwnedFd>>,
    used: Micros,
    /// Block of the message that is being sent to several tasks.
    one_copy: Option<OneCopy>,
}

/// Message that is sent to several tasks.
#[derive(Debug)]
struct OneCopy {
    head: Vec<u8>,
    body: Bytes,
    block: Block,
}

/// This task's pool and the pools of peers from which it has leases.
#[derive(Debug, Default)]
pub(super) struct Lending {
    store: Option<Store>,
    last_id: u64,
    /// Earliest time of the next attempt to create a pool.
    not_before: Option<Micros>,
    /// One message is being sent to several tasks.
    to_many: bool,
    /// Pools of peers that may hold leased messages.
    borrowed: Vec<(Tid, Weak<PeerStore>)>,
}

/// Leases over one ring, in both directions.
#[derive(Debug)]
pub(super) struct Loans {
    /// Blocks leased to the peer, each with the pool that contains it.
    lent: Vec<Option<(OfferId, Block)>>,
    /// Pool that was offered to the peer, and whether the peer has accepted it.
    offered: Option<(OfferId, bool)>,
    /// Pool that the peer offered and this task accepted.
    theirs: Option<(OfferId, Arc<PeerStore>)>,
    returns: Arc<Returns>,
}

impl Loans {
    pub(super) fn new(ends: &Ends) -> Loans {
        Loans {
            lent: Vec::new(),
            offered: None,
            theirs: None,
            returns: Returns::new(ends.reader.area()),
        }
    }
}

/// Leased message. A forked child never returns the lease.
struct Borrowed(Own<Loan>);

impl AsRef<[u8]> for Borrowed {
    fn as_ref(&self) -> &[u8] {
        self.0.get().as_ref()
    }
}

/// Number of words in a lease record: pool, offset, length, index of the lease.
const PLACE_WORDS: usize = 4;

impl Ring {
    /// Accepts a message that is in the peer's pool; returns its length.
    pub(super) fn borrow(
        loans: &Loans,
        mut record: Record<'_, Shared>,
        now: Micros,
        (seq, ack): (u64, u64),
        link: &mut Link,
    ) -> Result<usize, Broken> {
        let mut words = [0; PLACE_WORDS];
        for word in &mut words {
            *word = u64::from_le_bytes(record.take().ok_or(Broken)?);
        }
        let [id, offset, len, slot] = words;
        let (_, store) = loans
            .theirs
            .as_ref()
            .filter(|(theirs, _)| theirs.0 == id)
            .ok_or(Broken)?;
        let number = |word| usize::try_from(word).map_err(|_| Broken);
        let block = Block {
            offset: number(offset)?,
            len: number(len)?,
        };
        let slot = u8::try_from(slot).map_err(|_| Broken)?;
        let loan = store.borrow(block, slot, &loans.returns).ok_or(Broken)?;
        link.take_whole(now, seq, ack, Bytes::from_owner(Borrowed(Own::new(loan))));
        Ok(block.len)
    }

    /// Frees the blocks of all leases that the peer has returned.
    fn collect(&mut self, mut store: Option<&mut Store>) {
        let mut returned = self.ends.writer.take_returned();
        while returned != 0 {
            let slot = returned.trailing_zeros() as usize;
            returned &= returned - 1;
            let Some((id, block)) = self.loans.lent.get_mut(slot).and_then(Option::take) else {
                continue;
            };
            if let Some(store) = store.as_deref_mut().filter(|store| store.id == id) {
                store.own.get_mut().give_back(block);
            }
        }
    }
}

impl Lending {
    /// Copies the message into the pool, unless the pool already contains it for another receiver.
    fn copy(&mut self, head: &[u8], body: &Bytes) -> Option<Block> {
        let Store { own, one_copy, .. } = self.store.as_mut()?;
        let own = own.get_mut();
        if let Some(copy) = one_copy
            && copy.body.as_ptr() == body.as_ptr()
            && copy.body.len() == body.len()
            && copy.head == head
        {
            own.share(copy.block);
            return Some(copy.block);
        }
        let block = own.put([head, body])?;
        if self.to_many && one_copy.is_none() {
            own.share(block);
            *one_copy = Some(OneCopy {
                head: head.to_vec(),
                body: body.clone(),
                block,
            });
        }
        Some(block)
    }
}

impl Near {
    /// Leases the next message of a link to the peer instead of copying it. Returns false if the
    /// message must be copied, or is too small.
    pub(super) fn lend(&mut self, now: Micros, slot: usize, link: &mut Link) -> bool {
        let Near { slots, lending, .. } = self;
        let Some(Slot::Ring(ring)) = slots.get_mut(slot) else {
            return false;
        };
        let bytes_min = if lending.to_many {
            LEND_TO_MANY_BYTES_MIN
        } else {
            LEND_BYTES_MIN
        };
        let Some((head, body)) = link.next_whole(bytes_min) else {
            return false;
        };
        let ring = ring.get_mut();
        ring.collect(lending.store.as_mut());
        let id = lending.store.as_ref().map(|store| store.id);
        if id.is_none() || ring.loans.offered != id.map(|id| (id, true)) {
            ring.wants_store = true;
            return false;
        }
        let lent = &mut ring.loans.lent;
        let place = lent.iter().position(Option::is_none).unwrap_or(lent.len());
        if place >= LOANS_MAX {
            return false;
        }
        let Some(block) = lending.copy(head, body) else {
            return false;
        };
        let Some(store) = &mut lending.store else {
            return false;
        };
        store.used = now;
        if place == lent.len() {
            lent.push(None);
        }
        lent[place] = Some((store.id, block));
        let (seq, ack) = link.whole_sent(now);
        let mut short = encode_short_head(LinkKind::Data { last: true }, seq, ack);
        short[0] |= SHORT_HEAD_APART;
        short[SHORT_HEAD_SPARE] = ring.our_processor();
        let words = [
            store.id.0,
            block.offset as u64,
            block.len as u64,
            place as u64,
        ];
        let mut record = [0; SHORT_HEAD_BYTES + PLACE_WORDS * 8];
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
    pub(super) fn lent_to(&mut self, peer: Tid) -> usize {
        let Some(slot) = self.slot(peer) else {
            return 0;
        };
        let Near { slots, lending, .. } = self;
        let Some(Slot::Ring(ring)) = slots.get_mut(slot) else {
            return 0;
        };
        ring.get_mut().collect(lending.store.as_mut());
        ring.get().loans.lent.iter().flatten().count()
    }

    /// Returns the number of peers' pools that are mapped.
    #[cfg(test)]
    pub(super) fn stores_borrowed(&self) -> usize {
        self.lending
            .borrowed
            .iter()
            .filter(|(_, store)| store.strong_count() > 0)
            .count()
    }

    /// Takes a lease on a peer's message and never returns it.
    #[cfg(test)]
    pub(super) fn hold_a_loan(&mut self, lender: Tid) {
        let Some(Slot::Ring(ring)) = self.slot(lender).and_then(|slot| self.slots.get_mut(slot))
        else {
            return;
        };
        let loans = &ring.get().loans;
        if let Some((_, store)) = &loans.theirs {
            std::mem::forget(store.borrow(Block { offset: 0, len: 1 }, 0, &loans.returns));
        }
    }

    /// Returns the id of the current pool.
    #[cfg(test)]
    pub(super) fn store_id(&self) -> Option<OfferId> {
        self.lending.store.as_ref().map(|store| store.id)
    }

    /// Returns the number of blocks of the pool that are in use.
    #[cfg(test)]
    pub(super) fn places_lent(&self) -> usize {
        self.lending
            .store
            .as_ref()
            .map_or(0, |store| store.own.get().in_use())
    }

    /// Ends all leases over a ring that has ended: blocks leased to the peer are lost, and leases
    /// from the peer need not be returned.
    pub(super) fn end_loans(&mut self, ring: &mut Ring) {
        ring.collect(self.lending.store.as_mut());
        ring.loans.returns.end();
        let Some(store) = &mut self.lending.store else {
            return;
        };
        for (id, block) in ring.loans.lent.drain(..).flatten() {
            if id == store.id {
                store.own.get_mut().abandon(block);
            }
        }
        if store.own.get().abandoned() > ABANDONED_BYTES_MAX {
            self.lending.store = None;
        }
    }

    /// Drops the pool if it has no leases and was not used for a while.
    pub(super) fn end_idle_store(&mut self, now: Micros) {
        for slot in &mut self.slots {
            if let Slot::Ring(ring) = slot {
                ring.get_mut().collect(self.lending.store.as_mut());
            }
        }
        let idle = |store: &Store| {
            store.own.get().in_use() == 0 && now.since(store.used) >= STORE_IDLE_MAX
        };
        if self.lending.store.as_ref().is_some_and(idle) {
            self.lending.store = None;
        }
    }

    /// Drops the pool. Receivers keep their mappings, so their messages stay readable.
    pub(super) fn end_store(&mut self) {
        self.lending.store = None;
    }

    /// Copies all leased messages into private memory. If memory is short, they stay where they
    /// are.
    pub(super) fn keep_borrowed(&mut self) {
        for store in self
            .lending
            .borrowed
            .drain(..)
            .filter_map(|(_, store)| store.upgrade())
        {
            // Ignored: what could not be copied remains readable.
            let _ = store.keep();
        }
    }
}

impl Core {
    /// Queues one message for several tasks; those on this host read one copy of it. Stops at the
    /// first task to which it cannot be sent.
    pub(crate) fn send_to_many(
        &mut self,
        now: Micros,
        message: &Message,
        to: &[Tid],
    ) -> PvmResult<()> {
        self.near.lending.to_many = true;
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
        self.went_to_many();
        sent
    }

    /// Ends [`Core::send_to_many`] by dropping its own reference to the block.
    fn went_to_many(&mut self) {
        let lending = &mut self.near.lending;
        lending.to_many = false;
        if let Some(store) = &mut lending.store
            && let Some(copy) = store.one_copy.take()
        {
            store.own.get_mut().give_back(copy.block);
        }
    }

    /// Offers the pool to a peer; creates the pool if there is none.
    pub(super) fn offer_store(&mut self, now: Micros, slot: usize) {
        let near = &mut self.near;
        if near.lending.store.is_none() {
            if near.lending.not_before.is_some_and(|until| now < until) {
                return;
            }
            let Ok((own, fd)) = OwnStore::new() else {
                near.lending.not_before = Some(now + STORE_PAUSE);
                return;
            };
            near.lending.last_id += 1;
            let id = OfferId(near.lending.last_id);
            near.lending.store = Some(Store {
                own: Own::new(own),
                id,
                fd: Arc::new(Own::fd(fd)),
                used: now,
                one_copy: None,
            });
        }
        let Some(Store { id, fd, .. }) = &near.lending.store else {
            return;
        };
        let (id, fd) = (*id, fd.clone());
        let Some(Slot::Ring(ring)) = near.slots.get_mut(slot) else {
            return;
        };
        let ring = ring.get_mut();
        if ring.loans.offered.is_some_and(|(offered, _)| offered == id) {
            return;
        }
        ring.loans.offered = Some((id, false));
        let peer = ring.peer;
        self.say(peer, RouteWord::StoreOffer { id }, vec![fd]);
    }

    /// Handles a route message of a peer about pools.
    pub(super) fn take_store_word(
        &mut self,
        now: Micros,
        from: Tid,
        word: &RouteWord,
        descriptors: &[OwnedFd],
    ) {
        // Records that were written before this message refer to the previous pool.
        self.drain_peer(now, from);
        let Some(slot) = self.near.slot(from) else {
            return;
        };
        let Near { slots, lending, .. } = &mut self.near;
        let Some(Slot::Ring(ring)) = slots.get_mut(slot) else {
            return;
        };
        let loans = &mut ring.get_mut().loans;
        match *word {
            RouteWord::StoreOffer { id } => {
                // The previous pool stays mapped only while its messages are in use.
                loans.theirs = None;
                lending
                    .borrowed
                    .retain(|(_, store)| store.strong_count() > 0);
                if lending
                    .borrowed
                    .iter()
                    .filter(|(lender, _)| *lender == from)
                    .count()
                    >= STORES_OF_ONE_MAX
                {
                    return;
                }
                let Some(store) = descriptors
                    .first()
                    .and_then(|fd| PeerStore::map(fd.as_fd()).ok())
                else {
                    return;
                };
                let store = Arc::new(store);
                lending.borrowed.push((from, Arc::downgrade(&store)));
                loans.theirs = Some((id, store));
                self.say(from, RouteWord::StoreAccept { id }, Vec::new());
            }
            RouteWord::StoreAccept { id } => {
                if let Some((offered, accepted)) = &mut loans.offered
                    && *offered == id
                {
                    *accepted = true;
                }
            }
            _ => {}
        }
    }

    /// Copies leased messages into private memory before a fork: the child may keep reading them,
    /// but their owners know this process only. Rings with such leases are closed and set up again
    /// when they are needed.
    pub(crate) fn prepare_for_fork(&mut self, now: Micros) {
        for slot in 0..self.near.slots.len() {
            let used = |ring: &Ring| {
                ring.loans
                    .theirs
                    .as_ref()
                    .is_some_and(|(_, store)| store.is_used())
            };
            let peer = match &self.near.slots[slot] {
                Slot::Ring(ring) if used(ring.get()) => ring.get().peer,
                _ => continue,
            };
            self.drain_all(now, slot);
            self.end_ring(now, slot);
            self.back_to_daemon(now, peer);
        }
        let borrowed = &mut self.near.lending.borrowed;
        borrowed.retain(|(_, store)| store.strong_count() > 0);
        for store in borrowed
            .iter()
            .filter_map(|(_, store)| store.upgrade())
            .filter(|store| store.is_used())
        {
            // Ignored, as in [`Near::keep_borrowed`].
            let _ = store.keep();
        }
    }
}
