//! Shared-memory rings to tasks on the same host: reading, writing and waking. See [`ring_setup`]
//! for setup and teardown.
//!
//! A ring is only a route of a link. The link retains every fragment until the peer has read it
//! from the ring (see [`receipts`]), so a ring may end at any time.
//!
//! Changing the route never reorders messages:
//!
//! - Setup begins with an offer through the daemon. From the offer to its answer nothing is
//!   transmitted to that peer.
//! - A task reads a ring before it handles anything that the ring's writer sent through the daemon.
//!
//! The doorbell of a task has one bit for each ring. A writer sets the bit and learns whether it
//! must wake the reader. A reader polls only the rings whose bit is set.

mod receipts;
mod ring_setup;
mod small_receive;

use super::core::{Core, STAMPED_HEAD_BYTES, stamped_head};
use super::links::link_at;
use super::process::ProcessOwned;
use super::zero_copy::{Leases, SharedPools};
use bytes::Bytes;
use receipts::Receipts;
use rustc_hash::FxHashMap;
use sempa_proto::link::{
    CPU_HINT_INDEX, FLAG_OUT_OF_LINE, FRAGMENT_BYTES_MAX, Link, LinkKind, Payload,
    SHORT_HEAD_BYTES, SmallFrame, decode_short_head, encode_short_head,
};
use sempa_proto::route::OfferId;
use sempa_proto::{Micros, Tid};
use sempa_ring::doorbell::{SLOT_COUNT, SlotCursor, WakeTarget};
use sempa_ring::futex;
use sempa_ring::ring::{CorruptRing, Record, RingReader};
use sempa_ring::shared_memory::{OwnDoorbell, PeerDoorbell, RING_BYTES, RingPair, SharedRing};
use sempa_ring::shared_pool::POOL_BYTES;
pub use small_receive::SmallMessageHead;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Maximum number of bytes that one call of [`Core::drain_ring`] reads.
const DRAIN_BYTES_MAX: usize = 4 << 20;
/// Number of [`Core::drain_ring`] calls that suffice to read everything that a ring and a pool
/// contained before the first call, even if the peer keeps writing.
const FULL_DRAIN_CALLS_MAX: usize = UNREAD_BYTES_MAX / DRAIN_BYTES_MAX + 2;
/// Maximum number of unread bytes of one ring, including the leased messages that its records refer
/// to.
const UNREAD_BYTES_MAX: usize = RING_BYTES + POOL_BYTES;
const RECORD_BYTES_MAX: usize = SHORT_HEAD_BYTES + FRAGMENT_BYTES_MAX + STAMPED_HEAD_BYTES;
const _: () = assert!(RECORD_BYTES_MAX <= RING_BYTES / 4);

/// Number of small messages written to a ring between two checks of the current CPU.
const WRITES_PER_CPU_CHECK: u8 = 16;

/// Number of fragments after which a sender looks how far the reader has read. A power of two.
const FRAGMENTS_PER_RECEIPT: u64 = 64;
/// Time after which a sender looks how far the reader has read, if it does not send.
const RECEIPT_CHECK_INTERVAL: Micros = Micros::from_secs(1);

/// Maximum number of empty rings in a poll that is not counted as empty. Polling so few empty rings
/// costs little.
const CHEAP_EMPTY_RINGS_MAX: usize = 4;
/// Number of counted empty polls after which a ring is not polled until its writer rings the
/// doorbell again. A poll counts if it finds more than [`CHEAP_EMPTY_RINGS_MAX`] empty rings.
const EMPTY_POLLS_MAX: u8 = 8;

/// Stands for an unknown CPU.
const UNKNOWN_CPU: u8 = u8::MAX;

/// Returns the CPU of the calling thread, reduced to one byte. The result serves only as a hint,
/// because different CPUs can have the same byte.
fn current_cpu() -> u8 {
    nix::sched::sched_getcpu().map_or(UNKNOWN_CPU, |cpu| (cpu % usize::from(UNKNOWN_CPU)) as u8)
}

/// Established ring to a peer, with its state.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) peer: Tid,
    pub(super) ring_pair: RingPair,
    pub(super) leases: Leases,
    receipts: Receipts,
    /// True if a large message was copied into the ring because the peer does not have this task's
    /// pool.
    pub(super) needs_pool_offer: bool,
    peer_doorbell: Arc<ProcessOwned<PeerDoorbell>>,
    /// Slot of this ring in the peer's doorbell.
    peer_slot: usize,
    /// Index of the link with the peer when the link was used last; see [`link_at`].
    link_index: usize,
    /// Index of the peer in the causal order when the peer was used last.
    order_index: usize,
    last_used_at: Micros,
    /// Number of consecutive empty polls; see [`EMPTY_POLLS_MAX`] for the polls that count.
    empty_poll_count: u8,
    /// True if `waiting_slots` contains the slot of this ring.
    is_in_waiting_slots: bool,
    /// True if the ring must be closed. Nothing more may be written to the ring.
    must_close: bool,
    /// CPU on which the peer wrote its last frame.
    peer_cpu: u8,
    /// CPU on which this task writes, and the number of writes until the CPU is checked again.
    own_cpu_and_unchecked_writes: (u8, u8),
}

impl Ring {
    fn new(
        now: Micros,
        peer: Tid,
        ring_pair: RingPair,
        doorbell: PeerDoorbell,
        peer_slot: usize,
    ) -> Self {
        Self {
            peer,
            leases: Leases::new(&ring_pair),
            receipts: Receipts::default(),
            needs_pool_offer: false,
            ring_pair,
            peer_doorbell: Arc::new(ProcessOwned::new(doorbell)),
            peer_slot,
            link_index: 0,
            order_index: 0,
            last_used_at: now,
            empty_poll_count: 0,
            is_in_waiting_slots: false,
            must_close: false,
            peer_cpu: UNKNOWN_CPU,
            own_cpu_and_unchecked_writes: (UNKNOWN_CPU, 0),
        }
    }

    /// Returns the CPU on which this task writes. The value may be outdated.
    pub(super) fn own_cpu_hint(&mut self) -> u8 {
        if self.own_cpu_and_unchecked_writes.1 == 0 {
            self.own_cpu_and_unchecked_writes = (current_cpu(), WRITES_PER_CPU_CHECK);
        }
        self.own_cpu_and_unchecked_writes.1 -= 1;
        self.own_cpu_and_unchecked_writes.0
    }

    /// Returns the wake-up of the peer's threads; `None` if no thread must be woken.
    #[inline]
    fn wake(&self, target: WakeTarget) -> Option<PendingWake> {
        (target != WakeTarget::NoThread).then(|| PendingWake {
            doorbell: self.peer_doorbell.clone(),
            target,
            cpu: self.peer_cpu,
        })
    }

    /// Requests the peer's drainer, because space in the ring was freed. Returns the wake-up of the
    /// drainer; `None` if the drainer was requested before.
    #[inline]
    fn request_drainer(&self) -> Option<PendingWake> {
        let is_new_request = self.peer_doorbell.get().request_drainer();
        is_new_request
            .then(|| self.wake(WakeTarget::Drainer))
            .flatten()
    }

    /// True if the ring has a record, or if the peer has closed the ring. Reads only the indices.
    fn is_readable(&self) -> bool {
        !self.ring_pair.reader.is_empty() || self.ring_pair.reader.is_closed()
    }

    /// Counts an empty poll; `empty_ring_count` is the number of empty rings in this round so far,
    /// including this ring. A round with at most [`CHEAP_EMPTY_RINGS_MAX`] empty rings resets the
    /// count. Returns true if the ring should not be polled again before its writer rings the
    /// doorbell.
    fn count_empty_poll(&mut self, empty_ring_count: usize) -> bool {
        self.empty_poll_count = if empty_ring_count > CHEAP_EMPTY_RINGS_MAX {
            self.empty_poll_count.saturating_add(1)
        } else {
            0
        };
        self.empty_poll_count >= EMPTY_POLLS_MAX
    }

    /// Passes the next record to the link. Returns the length in bytes of the record and of a
    /// message that the record leases, or 0 if there is no record.
    fn pass_next_record(&mut self, now: Micros, link: &mut Link) -> Result<usize, CorruptRing> {
        let Some((record_bytes, cpu)) =
            pass_next_record(&mut self.ring_pair.reader, &self.leases, now, link)?
        else {
            return Ok(0);
        };
        self.peer_cpu = cpu;
        Ok(record_bytes)
    }
}

/// Passes the next record to the link. Returns the length in bytes of the record and of a message
/// that the record leases, and the CPU on which the record was written; `None` if there is no
/// record.
fn pass_next_record(
    reader: &mut RingReader<SharedRing>,
    leases: &Leases,
    now: Micros,
    link: &mut Link,
) -> Result<Option<(usize, u8)>, CorruptRing> {
    let Some(mut record) = reader.next_record()? else {
        return Ok(None);
    };
    let record_bytes = record.len();
    let head = read_head(&mut record)?;
    let (kind, seq, ack) = decode_short_head(head).ok_or(CorruptRing)?;
    let cpu = head[CPU_HINT_INDEX];
    if head[0] & FLAG_OUT_OF_LINE != 0 {
        return Ring::accept_leased_message(leases, record, now, (seq, ack), link)
            .map(|payload_bytes| Some((record_bytes + payload_bytes, cpu)));
    }
    link.handle_borrowed_frame(now, kind, seq, ack, RingPayload(record));
    Ok(Some((record_bytes, cpu)))
}

/// State of the ring setup with a peer to which there is no ring.
#[derive(Debug)]
enum RingSetup {
    /// No offer was sent yet. The number counts the messages that were sent to the peer through the
    /// daemon.
    NotOffered(u32),
    /// An offer was sent. Nothing is transmitted to the peer until the answer arrives.
    Offered {
        id: OfferId,
        slot: usize,
        ring_pair: ProcessOwned<RingPair>,
        expires_at: Micros,
    },
    /// The peer refused the offer, or the setup failed. No new offer is sent before `retry_at`.
    Refused { retry_at: Micros },
    /// There can be no ring: the peer is on another host, or this host provides no memory. No new
    /// offer is sent before `retry_at`.
    Impossible { retry_at: Micros },
}

/// State of one slot of the doorbell.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a ring is used with every message, and most slots hold one"
)]
pub(super) enum RingSlot {
    Free,
    Reserved,
    Ring(ProcessOwned<Ring>),
}

/// The rings of this task, both established and in setup.
#[derive(Debug, Default)]
pub(crate) struct ShmRoutes {
    doorbell: Option<Arc<ProcessOwned<OwnDoorbell>>>,
    /// Descriptor of the doorbell's memory, which offers send to peers. `None` until the first use.
    doorbell_fd: Option<Arc<ProcessOwned<OwnedFd>>>,
    pub(super) slots: Vec<RingSlot>,
    /// Slots of the rings that had no space for all frames of their link. No slot is listed twice.
    waiting_slots: Vec<usize>,
    /// Pools and leases for large messages.
    pub(super) pools: SharedPools,
    slots_by_peer: FxHashMap<Tid, usize>,
    setups: FxHashMap<Tid, RingSetup>,
    last_offer_id: u64,
    /// CPU on which the writer of the most recently read record ran.
    last_writer_cpu: u8,
    /// Peer whose ring carried the most recent message from or to this task, if that ring still
    /// exists. The next message probably arrives through the same ring.
    expected_peer: Option<Tid>,
    /// Slot of the ring through which the last small message went.
    last_small_slot: usize,
    /// Peers to wake when the lock is released.
    pending_wakes: Vec<PendingWake>,
    /// Peers whose wake-up is deferred until this task waits and no longer needs its CPU.
    deferred_wakes: Vec<PendingWake>,
    /// True if the next release of the lock must not wake the deferred peers yet.
    skip_deferred_once: bool,
    next_idle_check_at: Option<Micros>,
    /// Time of the next look at what the readers of all rings have read.
    next_receipt_check_at: Option<Micros>,
}

impl ShmRoutes {
    pub(crate) fn new(doorbell: Arc<ProcessOwned<OwnDoorbell>>) -> Self {
        Self {
            doorbell: Some(doorbell),
            last_writer_cpu: UNKNOWN_CPU,
            ..Self::default()
        }
    }

    /// True if peers can ring the doorbell, so that a drainer thread is needed.
    pub(crate) fn is_doorbell_shared(&self) -> bool {
        self.doorbell_fd.is_some()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots_by_peer.is_empty()
    }

    /// Lets this peer read its ring soon, even while its program computes.
    pub(crate) fn request_drainer_of(&mut self, peer: Tid) {
        let ring = self.slot(peer).and_then(|slot| self.ring_mut(slot));
        let wake = ring.and_then(|ring| ring.request_drainer());
        self.pending_wakes.extend(wake);
    }

    /// True if the next message to this task is expected through a ring, not from the daemon.
    pub(crate) fn expects_ring_message(&self) -> bool {
        self.expected_peer.is_some()
    }

    /// Records that the next message is expected at a socket: of the daemon or of a direct route,
    /// because the last one from or to this task went that way.
    pub(crate) fn expect_message_at_socket(&mut self) {
        self.expected_peer = None;
    }

    /// True if messages to this peer go through a ring instead of the daemon.
    pub(crate) fn has_ring(&self, peer: Tid) -> bool {
        self.slots_by_peer.contains_key(&peer)
    }

    /// True if there is a ring to this peer and the peer will read what is written to it.
    pub(crate) fn has_open_ring(&self, peer: Tid) -> bool {
        let ring = self.slot(peer).and_then(|slot| match &self.slots[slot] {
            RingSlot::Ring(ring) => Some(ring.get()),
            RingSlot::Free | RingSlot::Reserved => None,
        });
        ring.is_some_and(|ring| !ring.must_close && !ring.ring_pair.writer.is_closed())
    }

    /// True while an offer to this peer is unanswered.
    pub(crate) fn has_open_offer(&self, peer: Tid) -> bool {
        matches!(self.setups.get(&peer), Some(RingSetup::Offered { .. }))
    }

    /// True if there can be no ring to this peer, most likely because it is on another host.
    pub(super) fn is_ring_impossible(&self, peer: Tid) -> bool {
        matches!(self.setups.get(&peer), Some(RingSetup::Impossible { .. }))
    }

    /// Returns the peers with unanswered offers, and the times at which the offers expire.
    fn unanswered_offers(&self) -> impl Iterator<Item = (Tid, Micros)> {
        self.setups.iter().filter_map(|(peer, setup)| match setup {
            RingSetup::Offered {
                expires_at: expiry, ..
            } => Some((*peer, *expiry)),
            RingSetup::NotOffered(_) | RingSetup::Refused { .. } | RingSetup::Impossible { .. } => {
                None
            }
        })
    }

    pub(super) fn slot(&self, peer: Tid) -> Option<usize> {
        self.slots_by_peer.get(&peer).copied()
    }

    /// As [`ShmRoutes::slot`], but finds the slot of the last small message without a search.
    #[inline]
    fn probable_slot(&self, peer: Tid) -> Option<usize> {
        match self.slots.get(self.last_small_slot) {
            Some(RingSlot::Ring(ring)) if ring.get().peer == peer => Some(self.last_small_slot),
            _ => self.slot(peer),
        }
    }

    /// True if the doorbell bit of a ring is set and the ring contains a record. The ring in the
    /// slot `except` does not count.
    #[inline]
    pub(crate) fn has_readable_ring_besides(&self, except: usize) -> bool {
        let Some(doorbell) = &self.doorbell else {
            return false;
        };
        doorbell.get().only_pending_slot() != Some(except)
            && self.has_readable_ring_in_slots_besides(except)
    }

    fn has_readable_ring_in_slots_besides(&self, except: usize) -> bool {
        let mut cursor = SlotCursor::default();
        while let Some(slot) = self.next_pending_slot(&mut cursor) {
            if slot != except
                && let Some(RingSlot::Ring(ring)) = self.slots.get(slot)
                && ring.get().is_readable()
            {
                return true;
            }
        }
        false
    }

    /// Returns the next slot whose doorbell bit is set.
    #[inline]
    fn next_pending_slot(&self, cursor: &mut SlotCursor) -> Option<usize> {
        self.doorbell.as_ref()?.get().next_pending_slot(cursor)
    }

    /// True if a ring whose doorbell bit is set must be drained: the ring has a record, or the ring
    /// was empty in [`EMPTY_POLLS_MAX`] counted polls and its bit must be cleared.
    pub(crate) fn must_poll(&mut self) -> bool {
        let (mut cursor, mut empty_ring_count) = (SlotCursor::default(), 0);
        while let Some(slot) = self.next_pending_slot(&mut cursor) {
            if let Some(ring) = self.ring_mut(slot) {
                empty_ring_count += 1;
                if ring.is_readable() || ring.count_empty_poll(empty_ring_count) {
                    return true;
                }
            }
        }
        false
    }

    /// Counts an empty poll of this slot; `empty_ring_count` is the number of empty rings in this
    /// round. Returns true if the slot should not be polled until its writer rings the doorbell
    /// again. Because of this limit, a peer that sent only once causes no lasting cost, even if
    /// this task never sleeps.
    fn count_empty_poll(&mut self, slot: usize, empty_ring_count: usize) -> bool {
        match self.ring_mut(slot) {
            Some(ring) => !ring.is_readable() && ring.count_empty_poll(empty_ring_count),
            // Unknown slot. If a ring is installed in the slot later, the ring is read at that
            // time.
            None => true,
        }
    }

    /// Returns the number of rings that a poll checks.
    #[cfg(test)]
    pub(super) fn polled_ring_count(&self) -> usize {
        let Some(doorbell) = self.doorbell.as_ref().map(|doorbell| doorbell.get()) else {
            return 0;
        };
        let doorbell_words = std::iter::successors(doorbell.next_pending_word(0), |(index, _)| {
            doorbell.next_pending_word(index + 1)
        });
        doorbell_words
            .map(|(_, bits)| bits.count_ones() as usize)
            .sum()
    }

    #[cfg(test)]
    pub(super) fn waiting_ring_count(&self) -> usize {
        self.waiting_slots.len()
    }

    /// Sets whether the ring has frames that must be written when the peer frees space.
    fn set_waits_for_space(&mut self, slot: usize, waits_for_space: bool) {
        let Some(ring) = self.ring_mut(slot) else {
            return;
        };
        let was_listed = std::mem::replace(&mut ring.is_in_waiting_slots, waits_for_space);
        if waits_for_space && !was_listed {
            self.waiting_slots.push(slot);
        } else if was_listed && !waits_for_space {
            self.remove_waiting_slot(slot);
        }
    }

    fn remove_waiting_slot(&mut self, slot: usize) {
        self.waiting_slots
            .retain(|waiting_slot| *waiting_slot != slot);
    }

    fn ring_mut(&mut self, slot: usize) -> Option<&mut Ring> {
        match self.slots.get_mut(slot) {
            Some(RingSlot::Ring(ring)) => Some(ring.get_mut()),
            _ => None,
        }
    }

    /// True if the writer of the last received record ran on the CPU of this thread. In that case
    /// the peer cannot answer while this thread spins.
    pub(crate) fn shares_cpu(&self) -> bool {
        self.last_writer_cpu == current_cpu()
    }

    #[inline]
    pub(crate) fn has_pending_wakes(&self) -> bool {
        !self.pending_wakes.is_empty()
    }

    /// Removes and returns the peers to wake; the caller wakes them without the lock.
    pub(crate) fn take_peer_wakes(&mut self) -> PeerWakes {
        let mut peer_wakes = std::mem::take(&mut self.pending_wakes);
        if !std::mem::take(&mut self.skip_deferred_once) {
            peer_wakes.append(&mut self.deferred_wakes);
        }
        PeerWakes(peer_wakes)
    }

    /// Defers waking the peers that would run on this thread's CPU. The next call of
    /// [`ShmRoutes::take_peer_wakes`] does not return these peers; the second call does. Returns
    /// true if a wake-up is deferred.
    pub(crate) fn defer_wakes(&mut self) -> bool {
        let own_cpu = current_cpu();
        let same_cpu_wakes = self.pending_wakes.extract_if(.., |wake| {
            wake.target == WakeTarget::Sleepers && wake.cpu == own_cpu
        });
        self.deferred_wakes.extend(same_cpu_wakes);
        self.skip_deferred_once = !self.deferred_wakes.is_empty();
        self.skip_deferred_once
    }

    /// True if there are deferred wake-ups and the next [`ShmRoutes::take_peer_wakes`] returns
    /// them.
    pub(crate) fn has_deferred_wakes(&self) -> bool {
        !self.deferred_wakes.is_empty() && !self.skip_deferred_once
    }

    /// Makes the next [`ShmRoutes::take_peer_wakes`] return the deferred wake-ups.
    pub(crate) fn release_deferred_wakes(&mut self) {
        self.skip_deferred_once = false;
    }

    fn find_free_slot(&mut self) -> Option<usize> {
        if let Some(slot_index) = self
            .slots
            .iter()
            .position(|slot| matches!(slot, RingSlot::Free))
        {
            return Some(slot_index);
        }
        (self.slots.len() < SLOT_COUNT).then(|| {
            self.slots.push(RingSlot::Free);
            self.slots.len() - 1
        })
    }

    /// Returns the descriptor of the doorbell's memory. On first use, moves the doorbell into
    /// shared memory; `None` if that fails.
    fn share_doorbell(&mut self) -> Option<Arc<ProcessOwned<OwnedFd>>> {
        if self.doorbell_fd.is_none() {
            self.doorbell_fd = Some(Arc::new(ProcessOwned::from_fd(
                self.doorbell.as_ref()?.get().share().ok()?,
            )));
        }
        self.doorbell_fd.clone()
    }
}

/// Wake-up of a peer that the caller performs after it has released the lock.
#[derive(Debug)]
pub(crate) struct PendingWake {
    doorbell: Arc<ProcessOwned<PeerDoorbell>>,
    target: WakeTarget,
    /// CPU on which the peer last wrote. The peer will probably wake up on this CPU.
    cpu: u8,
}

impl PendingWake {
    pub(crate) fn wake(&self) {
        wake_peer(self.doorbell.get(), self.target);
    }
}

/// Wake-ups of several peers.
#[derive(Debug)]
pub(crate) struct PeerWakes(Vec<PendingWake>);

impl PeerWakes {
    pub(crate) fn wake_all(self) {
        self.0.iter().for_each(PendingWake::wake);
    }
}

fn wake_peer(doorbell: &PeerDoorbell, target: WakeTarget) {
    match target {
        WakeTarget::NoThread => {}
        WakeTarget::Sleepers => futex::wake_all(doorbell.sleep_word()),
        WakeTarget::Drainer => futex::wake_all(doorbell.drainer_word()),
    }
}

/// Payload of a frame that is still in the ring.
struct RingPayload<'a>(Record<'a, SharedRing>);

impl Payload for RingPayload<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn into_bytes(mut self) -> Bytes {
        let mut bytes = Vec::with_capacity(self.0.len());
        self.0.append_to(&mut bytes);
        bytes.into()
    }

    fn append_to(mut self, bytes: &mut Vec<u8>) {
        self.0.append_to(bytes);
    }
}

fn read_head(record: &mut Record<'_, SharedRing>) -> Result<[u8; SHORT_HEAD_BYTES], CorruptRing> {
    let head = record.take_bytes().ok_or(CorruptRing)?;
    if record.len() > FRAGMENT_BYTES_MAX {
        Err(CorruptRing)
    } else {
        Ok(head)
    }
}

impl Core {
    // ---- reading

    /// Reads the rings whose doorbell bit is set. Returns true if at least one ring had a record.
    pub(crate) fn poll_rings(&mut self, now: Micros) -> bool {
        let has_record = self.poll_marked_rings(now, false);
        self.complete_arrivals(now);
        has_record
    }

    /// As [`Core::poll_rings`], and clears the bits, so that every writer rings the doorbell again
    /// at its next record.
    pub(crate) fn poll_rings_before_sleep(&mut self, now: Micros) -> bool {
        let has_record = self.poll_marked_rings(now, true);
        self.complete_arrivals(now);
        has_record
    }

    fn poll_marked_rings(&mut self, now: Micros, clears_bits: bool) -> bool {
        let (mut has_record, mut empty_ring_count) = (false, 0);
        let mut cursor = SlotCursor::default();
        while let Some(slot) = self.shm_routes.next_pending_slot(&mut cursor) {
            if self.drain_ring(now, slot) {
                has_record = true;
                continue;
            }
            empty_ring_count += 1;
            if self.shm_routes.count_empty_poll(slot, empty_ring_count) || clears_bits {
                if let Some(doorbell) = &self.shm_routes.doorbell {
                    doorbell.get().clear_slot(slot);
                }
                has_record |= self.drain_ring(now, slot);
            }
        }
        has_record
    }

    /// Reads all rings without regard to the doorbell bits, because other tasks can change these
    /// bits.
    pub(crate) fn poll_all_rings(&mut self, now: Micros) {
        for slot in 0..self.shm_routes.slots.len() {
            self.drain_ring(now, slot);
        }
        self.complete_arrivals(now);
    }

    /// Reads all rings that contain a record and whose doorbell bit is set. Everything that was
    /// visible before the call is read.
    pub(in crate::runtime) fn look_at_rings(&mut self, now: Micros) {
        let mut cursor = SlotCursor::default();
        while let Some(slot) = self.shm_routes.next_pending_slot(&mut cursor) {
            if self
                .shm_routes
                .ring_mut(slot)
                .is_some_and(|ring| ring.is_readable())
            {
                self.drain_ring_fully(now, slot);
            }
        }
    }

    /// True if a thread that spins must poll the rings.
    #[inline]
    pub(crate) fn must_poll_rings(&mut self) -> bool {
        self.order.is_waiting_for_look() || self.shm_routes.must_poll()
    }

    /// Reads one ring, at most [`DRAIN_BYTES_MAX`] bytes. Returns true if the ring had a record.
    pub(super) fn drain_ring(&mut self, now: Micros, slot: usize) -> bool {
        let Some(peer) = self.shm_routes.ring_mut(slot).map(|ring| ring.peer) else {
            return false;
        };
        if self.refuses_data_of(peer) {
            return false;
        }
        let (shm, links) = self.shm_routes_and_links();
        let Some(ring) = shm.ring_mut(slot) else {
            return false;
        };
        let Some(link) = links.get_mut(&peer) else {
            return false;
        };
        // The flag is read before the records: if the ring is closed, everything that the peer
        // wrote before is already visible.
        let is_closed = ring.ring_pair.reader.is_closed();
        let (mut read_bytes, mut was_writer_blocked) = (0, false);
        let is_corrupt = loop {
            match ring.pass_next_record(now, link) {
                Ok(0) => break false,
                Ok(bytes) => read_bytes += bytes,
                Err(CorruptRing) => break true,
            }
            was_writer_blocked |= ring.ring_pair.reader.release();
            if read_bytes >= DRAIN_BYTES_MAX {
                break false;
            }
        };
        let (has_record, must_close) = (read_bytes > 0, ring.must_close);
        let has_ended = is_corrupt || (is_closed && !has_record);
        if has_record {
            shm.last_writer_cpu = ring.peer_cpu;
            let Some(ring) = shm.ring_mut(slot) else {
                return false;
            };
            (ring.last_used_at, ring.empty_poll_count) = (now, 0);
            if was_writer_blocked {
                let wake = ring.request_drainer();
                shm.pending_wakes.extend(wake);
            }
            let must_answer = links.get(&peer).is_some_and(|link| link.has_frame());
            if self.accept_messages_from(peer) {
                self.shm_routes.expected_peer = Some(peer);
            }
            self.deliver_deferred(peer);
            if must_answer && !must_close {
                self.pump_ring(now, slot);
            } else {
                self.schedule_link_timer(peer);
            }
        }
        if has_ended {
            self.close_ring(now, slot);
            self.reroute_through_daemon(now, peer);
        }
        has_record
    }

    /// Reads the ring of a peer. Must be called before the task handles a message from or about
    /// this peer that arrived on another route.
    pub(super) fn drain_peer(&mut self, now: Micros, peer: Tid) {
        if let Some(slot) = self.shm_routes.slot(peer) {
            self.drain_ring_fully(now, slot);
        }
    }

    /// Reads one ring until the ring is empty, with at most [`FULL_DRAIN_CALLS_MAX`] calls of
    /// [`Core::drain_ring`].
    pub(super) fn drain_ring_fully(&mut self, now: Micros, slot: usize) {
        for _ in 0..FULL_DRAIN_CALLS_MAX {
            if !self.drain_ring(now, slot) {
                return;
            }
        }
    }

    // ---- writing

    /// Writes as many frames of the link to its ring as the ring has space for. Closes a ring that
    /// is corrupt or that the peer has closed.
    // tidy: long because all steps work on the same ring and link under two borrows.
    pub(super) fn pump_ring(&mut self, now: Micros, slot: usize) {
        let (shm, links) = self.shm_routes_and_links();
        let Some(peer) = shm.ring_mut(slot).map(|ring| ring.peer) else {
            return;
        };
        let Some(link) = links.get_mut(&peer) else {
            return;
        };
        let (mut written_frame_count, mut is_urgent, mut is_corrupt, mut has_sent_data) =
            (0u32, false, false, false);
        let mut copied_bytes = 0;
        if let Some(ring) = shm.ring_mut(slot) {
            is_corrupt = ring
                .receipts
                .confirm(now, &mut ring.ring_pair.writer, link)
                .is_err();
        }
        while !is_corrupt && link.has_frame() {
            let Some(ring) = shm.ring_mut(slot) else {
                return;
            };
            match ring
                .ring_pair
                .writer
                .has_space_or_request_wake(RECORD_BYTES_MAX)
            {
                Ok(true) => {}
                Ok(false) => break,
                Err(CorruptRing) => {
                    is_corrupt = true;
                    break;
                }
            }
            if shm.lease_message(now, slot, link) {
                (written_frame_count, has_sent_data) = (written_frame_count + 1, true);
                continue;
            }
            let Some(ring) = shm.ring_mut(slot) else {
                return;
            };
            let frame = link.next_frame(now).expect("the link has one");
            is_urgent |= frame.kind == LinkKind::Probe;
            has_sent_data |= matches!(frame.kind, LinkKind::Data { .. });
            let mut head = frame.encode_short_head();
            head[CPU_HINT_INDEX] = ring.own_cpu_hint();
            is_corrupt = ring
                .ring_pair
                .writer
                .write([&head, frame.head, frame.body])
                .is_err();
            written_frame_count += 1;
            copied_bytes += frame.body.len();
            if written_frame_count == 1 && !link.is_all_transmitted() {
                // The reader copies the first fragments of a large message while this thread writes
                // the next fragments.
                wake_peer(
                    ring.peer_doorbell.get(),
                    ring.peer_doorbell.get().notify(ring.peer_slot, false),
                );
            }
        }
        is_urgent |= !link.is_all_transmitted();
        shm.count_copied_bytes(copied_bytes);
        shm.set_waits_for_space(slot, is_urgent || link.has_frame());
        if has_sent_data {
            shm.expected_peer = Some(peer);
        }
        let Some(ring) = shm.ring_mut(slot) else {
            return;
        };
        ring.receipts
            .record_written(ring.ring_pair.writer.position(), link);
        let needs_pool_offer = std::mem::take(&mut ring.needs_pool_offer);
        if written_frame_count > 0 || is_urgent {
            ring.last_used_at = now;
            let wake_target = ring.peer_doorbell.get().notify(ring.peer_slot, is_urgent);
            let wake = ring.wake(wake_target);
            shm.pending_wakes.extend(wake);
        }
        let must_close = shm.ring_mut(slot).is_some_and(|ring| {
            ring.must_close |= is_corrupt || ring.ring_pair.writer.is_closed();
            ring.must_close
        });
        self.schedule_receipt_check(now);
        self.record_progress(peer);
        if needs_pool_offer {
            self.offer_pool(now, slot);
        }
        if must_close {
            self.drain_ring_fully(now, slot);
            if self.shm_routes.slot(peer) == Some(slot) {
                self.close_ring(now, slot);
                self.reroute_through_daemon(now, peer);
            }
        } else {
            self.schedule_link_timer(peer);
        }
    }

    /// Sends a small message through a ring that has space, if no other frame is queued for the
    /// peer. Returns the wake-up of the peer, if the peer must be woken. `None` means that nothing
    /// was sent because one of these conditions does not hold.
    #[inline]
    pub(super) fn try_send_through_ring(
        &mut self,
        now: Micros,
        peer: Tid,
        head: &[u8],
        body: &[u8],
    ) -> Option<Option<PendingWake>> {
        if !self.is_connected() || self.has_disabled_windows() || !self.order.is_settled() {
            return None;
        }
        let stamp = self.order.next_stamp();
        let (shm, links) = self.shm_routes_and_links();
        let slot = shm.probable_slot(peer)?;
        (shm.last_small_slot, shm.expected_peer) = (slot, Some(peer));
        let ring = shm.ring_mut(slot)?;
        let has_space = ring
            .ring_pair
            .writer
            .has_space(SHORT_HEAD_BYTES + STAMPED_HEAD_BYTES + body.len())
            == Ok(true);
        if !has_space || ring.ring_pair.writer.is_closed() {
            return None;
        }
        let link = link_at(links, &mut ring.link_index, peer)?;
        if link.in_flight_fragments() % FRAGMENTS_PER_RECEIPT == FRAGMENTS_PER_RECEIPT - 1 {
            let writer = &mut ring.ring_pair.writer;
            ring.receipts.confirm(now, writer, link).ok()?;
        }
        let stamped_head = stamped_head(stamp, head);
        let SmallFrame { seq, ack } = link.try_send_small(now, &stamped_head, body)?;
        let mut short_head = encode_short_head(LinkKind::Data { is_last: true }, seq, ack);
        short_head[CPU_HINT_INDEX] = ring.own_cpu_hint();
        let mut record_head = [0; SHORT_HEAD_BYTES + STAMPED_HEAD_BYTES];
        record_head[..SHORT_HEAD_BYTES].copy_from_slice(&short_head);
        record_head[SHORT_HEAD_BYTES..].copy_from_slice(&stamped_head);
        let write_result = ring.ring_pair.writer.write_small(&record_head, body);
        debug_assert_eq!(write_result, Ok(true), "there was room");
        ring.receipts
            .record_written(ring.ring_pair.writer.position(), link);
        ring.last_used_at = now;
        let wake_target = ring.peer_doorbell.get().notify(ring.peer_slot, false);
        let peer_wake = ring.wake(wake_target);
        // Checked after the fence of the notification: a reader that closes its ring later reads
        // this record.
        let was_closed = ring.ring_pair.writer.is_closed();
        self.schedule_receipt_check(now);
        if was_closed {
            self.record_sent_to_closed_ring(peer);
        }
        Some(peer_wake)
    }

    /// Ensures that the receipts of the rings are read if the task does not send any more.
    #[inline]
    fn schedule_receipt_check(&mut self, now: Micros) {
        if self.shm_routes.next_receipt_check_at.is_none() {
            let check_at = now + RECEIPT_CHECK_INTERVAL;
            self.shm_routes.next_receipt_check_at = Some(check_at);
            self.schedule_timer(check_at);
        }
    }

    /// Reads the receipts of all rings, so that links do not retain what was received.
    fn check_receipts(&mut self, now: Micros) {
        if self
            .shm_routes
            .next_receipt_check_at
            .take_if(|check_at| *check_at <= now)
            .is_none()
        {
            return;
        }
        let rings: Vec<(Tid, usize)> = self
            .shm_routes
            .slots_by_peer
            .iter()
            .map(|(peer, slot)| (*peer, *slot))
            .collect();
        let mut has_open_positions = false;
        for (peer, slot) in rings {
            has_open_positions |= self.check_receipt(now, peer, slot);
        }
        if has_open_positions {
            self.schedule_receipt_check(now);
        }
    }

    /// Reads the receipts of a ring. Returns true if the reader may not have read everything.
    fn check_receipt(&mut self, now: Micros, peer: Tid, slot: usize) -> bool {
        let (shm, links) = self.shm_routes_and_links();
        let mut has_open_positions = false;
        if let (Some(ring), Some(link)) = (shm.ring_mut(slot), links.get_mut(&peer)) {
            // A position that is impossible is noticed by the next write.
            let _ = ring.receipts.confirm(now, &mut ring.ring_pair.writer, link);
            has_open_positions = ring.receipts.has_open_positions();
        }
        self.record_progress(peer);
        has_open_positions
    }

    /// Frees the blocks of this task's pool that receivers have returned and links no longer
    /// retain.
    pub(super) fn free_unused_blocks(&mut self, now: Micros) {
        for slot in 0..self.shm_routes.slots.len() {
            if let Some(ring) = self.shm_routes.ring_mut(slot)
                && ring.leases.has_leased_blocks()
            {
                let peer = ring.peer;
                self.check_receipt(now, peer, slot);
                self.shm_routes.free_returned_blocks(slot);
            }
        }
    }

    /// True if the ring to this peer has no space for the queued frames of its link.
    pub(crate) fn is_ring_full_for(&mut self, peer: Tid) -> bool {
        let (shm, links) = self.shm_routes_and_links();
        let has_queued_frame =
            shm.slot(peer).is_some() && links.get(&peer).is_some_and(Link::has_frame);
        has_queued_frame && !self.has_disabled_windows()
    }

    /// Writes as many frames of the link to its ring as the ring has space for. Returns true if a
    /// frame was written or the ring has ended.
    pub(crate) fn pump_one_ring(&mut self, now: Micros, peer: Tid) -> bool {
        let Some(slot) = self.shm_routes.slot(peer) else {
            return true;
        };
        let (shm, links) = self.shm_routes_and_links();
        let has_space = shm
            .ring_mut(slot)
            .is_some_and(|ring| ring.ring_pair.writer.has_space(RECORD_BYTES_MAX) == Ok(true));
        if !has_space
            && links.contains_key(&peer)
            && !shm
                .ring_mut(slot)
                .is_some_and(|ring| ring.ring_pair.writer.is_closed())
        {
            // The ring of this task is read because the peer may be blocked in the same way: the
            // peer cannot write while the ring to this task is full.
            self.drain_ring(now, slot);
            return false;
        }
        self.pump_ring(now, slot);
        true
    }

    /// Continues writing to the rings that had no space for all frames.
    pub(crate) fn pump_rings(&mut self, now: Micros) {
        for slot in std::mem::take(&mut self.shm_routes.waiting_slots) {
            if let Some(ring) = self.shm_routes.ring_mut(slot) {
                ring.is_in_waiting_slots = false;
            }
            self.pump_ring(now, slot);
        }
    }
}
