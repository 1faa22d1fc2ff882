//! Shared-memory rings to tasks on the same host: reading, writing and waking. See [`ring_setup`]
//! for setup and teardown.
//!
//! A ring is only a route of a link. The link keeps every fragment until the peer has acknowledged
//! it, so a ring may end at any time.
//!
//! Changing the route never reorders messages:
//!
//! - Setup begins with an offer through the daemon. From the offer to its answer nothing is
//!   transmitted to that peer.
//! - A ring is read before anything that its writer sent through the daemon is handled.
//!
//! The doorbell of a task has one bit for each ring. A writer sets the bit and learns whether it
//! must wake the reader. A reader polls only the rings whose bit is set.

mod ring_setup;

use super::core::Core;
use super::process::ProcessOwned;
use super::zero_copy::{Leases, SharedPools};
use bytes::Bytes;
use rustc_hash::FxHashMap;
use sempa_proto::link::{
    ACK_FRAGMENTS, CPU_HINT_BYTE, FLAG_OUT_OF_LINE, FRAGMENT_BYTES_MAX, Link, LinkKind, Payload,
    SHORT_HEAD_BYTES, decode_short_head,
};
use sempa_proto::message::MESSAGE_HEAD_BYTES;
use sempa_proto::route::OfferId;
use sempa_proto::{Micros, Tid};
use sempa_ring::doorbell::{SLOTS_MAX, WakeTarget};
use sempa_ring::futex;
use sempa_ring::ring::{Record, RingCorrupt, RingReader};
use sempa_ring::shared_memory::{OwnDoorbell, PeerDoorbell, RING_BYTES, RingPair, SharedRing};
use sempa_ring::shared_pool::POOL_BYTES;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Maximum number of bytes that one call of [`Core::drain_ring`] reads.
const DRAIN_BYTES_MAX: usize = 4 << 20;
/// Number of [`Core::drain_ring`] calls that read everything that a ring and a pool contained
/// before the first call, even if the peer keeps writing.
const FULL_DRAIN_CALLS: usize = UNREAD_BYTES_MAX / DRAIN_BYTES_MAX + 2;
/// Maximum number of unread bytes of one ring, including the leased messages that its records refer
/// to.
const UNREAD_BYTES_MAX: usize = RING_BYTES + POOL_BYTES;
const RECORD_BYTES_MAX: usize = SHORT_HEAD_BYTES + FRAGMENT_BYTES_MAX + MESSAGE_HEAD_BYTES;
const _: () = assert!(RECORD_BYTES_MAX <= RING_BYTES / 4);

/// Number of small messages written to a ring between two checks of the current CPU.
const WRITES_PER_CPU_CHECK: u8 = 16;

/// Minimum number of fragments in flight for which a sender reads the ring for acknowledgements
/// before it sends.
const POLL_ACKS_FRAGMENTS_MIN: u64 = ACK_FRAGMENTS * 2;

/// Maximum number of empty rings whose polling is cheap.
const CHEAP_EMPTY_RINGS: usize = 4;
/// Number of empty polls after which a ring is not polled until its writer rings the doorbell
/// again. A poll counts if it finds more than [`CHEAP_EMPTY_RINGS`] empty rings.
const EMPTY_POLLS_MAX: u8 = 8;

/// Value for an unknown CPU.
const CPU_UNKNOWN: u8 = u8::MAX;

/// Returns the CPU of the calling thread, reduced to one byte. It serves as a hint only.
fn current_cpu() -> u8 {
    nix::sched::sched_getcpu().map_or(CPU_UNKNOWN, |number| {
        (number % usize::from(CPU_UNKNOWN)) as u8
    })
}

/// Established ring to a peer, with its state.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) peer: Tid,
    pub(super) ends: RingPair,
    pub(super) leases: Leases,
    /// A large message was copied into the ring because the peer does not have this task's pool.
    pub(super) wants_pool_offer: bool,
    peer_doorbell: Arc<ProcessOwned<PeerDoorbell>>,
    /// Slot of this ring in the peer's doorbell.
    peer_slot: usize,
    last_used_at: Micros,
    /// Number of consecutive empty polls; see [`EMPTY_POLLS_MAX`] for the polls that count.
    empty_polls: u8,
    /// True if the slot of this ring is in the list of waiting slots.
    in_waiting_list: bool,
    /// The ring must be closed: nothing more may be written to it.
    must_close: bool,
    /// CPU on which the peer wrote its last frame.
    peer_cpu: u8,
    /// CPU on which this task writes, and the number of writes until the CPU is checked again.
    own_cpu_and_checks_left: (u8, u8),
}

impl Ring {
    fn new(now: Micros, peer: Tid, ends: RingPair, bell: PeerDoorbell, theirs: usize) -> Ring {
        Ring {
            peer,
            leases: Leases::new(&ends),
            wants_pool_offer: false,
            ends,
            peer_doorbell: Arc::new(ProcessOwned::new(bell)),
            peer_slot: theirs,
            last_used_at: now,
            empty_polls: 0,
            in_waiting_list: false,
            must_close: false,
            peer_cpu: CPU_UNKNOWN,
            own_cpu_and_checks_left: (CPU_UNKNOWN, 0),
        }
    }

    /// Returns the CPU on which this task writes. The value may be outdated.
    pub(super) fn own_cpu_hint(&mut self) -> u8 {
        if self.own_cpu_and_checks_left.1 == 0 {
            self.own_cpu_and_checks_left = (current_cpu(), WRITES_PER_CPU_CHECK);
        }
        self.own_cpu_and_checks_left.1 -= 1;
        self.own_cpu_and_checks_left.0
    }

    /// True if the ring has a record or the peer has closed it. Reads only the indices.
    fn is_readable(&self) -> bool {
        !self.ends.reader.is_empty() || self.ends.reader.is_closed()
    }

    /// Counts an empty poll; `empty_rings` is the number of empty rings in this round, including
    /// this ring. Returns true if the ring should not be polled again.
    fn count_empty_poll(&mut self, empty_rings: usize) -> bool {
        self.empty_polls = if empty_rings > CHEAP_EMPTY_RINGS {
            self.empty_polls.saturating_add(1)
        } else {
            0
        };
        self.empty_polls >= EMPTY_POLLS_MAX
    }

    /// Passes the next record to the link. Returns the length of the record in bytes, 0 if there is
    /// no record.
    fn take_record(&mut self, now: Micros, link: &mut Link) -> Result<usize, RingCorrupt> {
        let Some((bytes, cpu)) = take_record(&mut self.ends.reader, &self.leases, now, link)?
        else {
            return Ok(0);
        };
        self.peer_cpu = cpu;
        Ok(bytes)
    }
}

/// Passes the next record to the link. Returns the length of the record in bytes and the CPU on
/// which it was written; `None` if there is no record.
fn take_record(
    reader: &mut RingReader<SharedRing>,
    leases: &Leases,
    now: Micros,
    link: &mut Link,
) -> Result<Option<(usize, u8)>, RingCorrupt> {
    let Some(mut record) = reader.next_record()? else {
        return Ok(None);
    };
    let bytes = record.len();
    let head = read_head(&mut record)?;
    let (kind, seq, ack) = decode_short_head(head).ok_or(RingCorrupt)?;
    let cpu = head[CPU_HINT_BYTE];
    if head[0] & FLAG_OUT_OF_LINE != 0 {
        return Ring::take_lease(leases, record, now, (seq, ack), link)
            .map(|more| Some((bytes + more, cpu)));
    }
    link.handle_borrowed_frame(now, kind, seq, ack, RingPayload(record));
    Ok(Some((bytes, cpu)))
}

/// State of the setup with a peer to which there is no ring.
#[derive(Debug)]
enum RingSetup {
    /// No offer was sent yet. The number counts the messages sent to the peer through the daemon so
    /// far.
    NotOffered(u32),
    /// An offer was sent. Nothing is transmitted to the peer until the answer arrives.
    Offered {
        id: OfferId,
        slot: usize,
        ends: ProcessOwned<RingPair>,
        expires_at: Micros,
    },
    /// The peer refused, or setup failed. No new offer is sent before `until`.
    Refused { retry_at: Micros },
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
    /// Descriptor of the doorbell's memory, for peers.
    doorbell_fd: Option<Arc<ProcessOwned<OwnedFd>>>,
    pub(super) slots: Vec<RingSlot>,
    /// Slots of the rings that had no space for all frames of their link. No slot is listed twice.
    waiting_slots: Vec<usize>,
    /// Pools and leases for large messages.
    pub(super) pools: SharedPools,
    slots_by_peer: FxHashMap<Tid, usize>,
    setups: FxHashMap<Tid, RingSetup>,
    last_offer_id: u64,
    /// CPU on which the record that was read last had been written.
    last_writer_cpu: u8,
    /// Peer whose ring carried the most recent message from or to this task, if that ring still
    /// exists. The next message is likely to come through the same ring.
    expected_peer: Option<Tid>,
    /// Peers to wake when the lock is released.
    pending_wakes: Vec<PendingWake>,
    /// Peers whose wake-up is deferred until this task no longer needs its CPU.
    deferred_wakes: Vec<PendingWake>,
    /// The next release of the lock must not wake the deferred peers yet.
    hold_deferred_once: bool,
    next_idle_check: Option<Micros>,
}

impl ShmRoutes {
    pub(crate) fn new(bell: Arc<ProcessOwned<OwnDoorbell>>) -> ShmRoutes {
        ShmRoutes {
            doorbell: Some(bell),
            last_writer_cpu: CPU_UNKNOWN,
            ..ShmRoutes::default()
        }
    }

    /// True if peers can ring the doorbell, so a drainer thread is needed.
    pub(crate) fn is_shared(&self) -> bool {
        self.doorbell_fd.is_some()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.slots_by_peer.is_empty()
    }

    /// True if the next message to this task is expected through a ring, not from the daemon.
    pub(crate) fn expects_message(&self) -> bool {
        self.expected_peer.is_some()
    }

    /// Records that this task sent a message through the daemon, so the reply is expected through
    /// the daemon too.
    pub(crate) fn expect_from_daemon(&mut self) {
        self.expected_peer = None;
    }

    /// True if messages to this peer go through a ring instead of the daemon.
    pub(crate) fn has_ring(&self, peer: Tid) -> bool {
        self.slots_by_peer.contains_key(&peer)
    }

    /// True while an offer to this peer is unanswered.
    pub(crate) fn is_offered(&self, peer: Tid) -> bool {
        matches!(self.setups.get(&peer), Some(RingSetup::Offered { .. }))
    }

    /// Returns the peers with unanswered offers, and the times at which the offers expire.
    fn unanswered_offers(&self) -> impl Iterator<Item = (Tid, Micros)> {
        self.setups
            .iter()
            .filter_map(|(peer, standing)| match standing {
                RingSetup::Offered {
                    expires_at: until, ..
                } => Some((*peer, *until)),
                RingSetup::NotOffered(_) | RingSetup::Refused { .. } => None,
            })
    }

    pub(super) fn slot(&self, peer: Tid) -> Option<usize> {
        self.slots_by_peer.get(&peer).copied()
    }

    /// True if a ring whose doorbell bit is set must be drained: it has a record, or it has been
    /// empty often enough to clear its bit.
    pub(crate) fn needs_poll(&mut self) -> bool {
        let ShmRoutes {
            doorbell: Some(bell),
            slots,
            ..
        } = self
        else {
            return false;
        };
        let (mut from, mut others) = (0, 0);
        while let Some((index, mut bits)) = bell.get().pending_words(from) {
            from = index + 1;
            while bits != 0 {
                let slot = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some(RingSlot::Ring(ring)) = slots.get_mut(slot) {
                    others += 1;
                    if ring.get().is_readable() || ring.get_mut().count_empty_poll(others) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Counts an empty poll of this slot; `empty_rings` is the number of empty rings in this round.
    /// Returns true if the slot should not be polled until its writer rings the doorbell again.
    /// Peers that sent once thus cause no further cost, even if this task never sleeps.
    fn count_empty_poll(&mut self, slot: usize, empty_rings: usize) -> bool {
        match self.ring(slot) {
            Some(ring) => !ring.is_readable() && ring.count_empty_poll(empty_rings),
            // Unknown slot. If a ring is installed in the slot later, the ring is read at that
            // time.
            None => true,
        }
    }

    /// Returns the number of rings that a poll checks.
    #[cfg(test)]
    pub(super) fn polled_ring_count(&self) -> usize {
        let Some(bell) = self.doorbell.as_ref().map(|bell| bell.get()) else {
            return 0;
        };
        let words = std::iter::successors(bell.pending_words(0), |(index, _)| {
            bell.pending_words(index + 1)
        });
        words.map(|(_, bits)| bits.count_ones() as usize).sum()
    }

    #[cfg(test)]
    pub(super) fn waiting_ring_count(&self) -> usize {
        self.waiting_slots.len()
    }

    /// Records whether the ring has frames that must be written when space is freed.
    fn set_waiting(&mut self, slot: usize, waits: bool) {
        let Some(ring) = self.ring(slot) else { return };
        let waited = std::mem::replace(&mut ring.in_waiting_list, waits);
        if waits && !waited {
            self.waiting_slots.push(slot);
        } else if waited && !waits {
            self.remove_waiting(slot);
        }
    }

    fn remove_waiting(&mut self, slot: usize) {
        self.waiting_slots.retain(|waiting| *waiting != slot);
    }

    fn ring(&mut self, slot: usize) -> Option<&mut Ring> {
        match self.slots.get_mut(slot) {
            Some(RingSlot::Ring(ring)) => Some(ring.get_mut()),
            _ => None,
        }
    }

    /// True if the last received record was written on the CPU of this thread: the peer cannot
    /// answer while this thread spins.
    pub(crate) fn shares_cpu(&self) -> bool {
        self.last_writer_cpu == current_cpu()
    }

    /// Removes and returns the peers to wake; the caller wakes them without the lock.
    pub(crate) fn take_wakes(&mut self) -> PeerWakes {
        let mut wakes = std::mem::take(&mut self.pending_wakes);
        if !std::mem::take(&mut self.hold_deferred_once) {
            wakes.append(&mut self.deferred_wakes);
        }
        PeerWakes(wakes)
    }

    /// Defers waking the peers that would run on this thread's CPU. The next call of
    /// [`ShmRoutes::take_wakes`] does not return these peers, the call after it does. Returns true
    /// if a wake-up was deferred.
    pub(crate) fn defer_wakes(&mut self) -> bool {
        let here = current_cpu();
        let late = self.pending_wakes.extract_if(.., |call| {
            call.wake == WakeTarget::Sleepers && call.cpu == here
        });
        self.deferred_wakes.extend(late);
        self.hold_deferred_once = !self.deferred_wakes.is_empty();
        self.hold_deferred_once
    }

    /// True if there are deferred wake-ups and the next [`ShmRoutes::take_wakes`] returns them.
    pub(crate) fn has_deferred_wakes(&self) -> bool {
        !self.deferred_wakes.is_empty() && !self.hold_deferred_once
    }

    /// Makes the next [`ShmRoutes::take_wakes`] return the deferred wake-ups.
    pub(crate) fn release_deferred_wakes(&mut self) {
        self.hold_deferred_once = false;
    }

    fn free_slot(&mut self) -> Option<usize> {
        if let Some(free) = self
            .slots
            .iter()
            .position(|slot| matches!(slot, RingSlot::Free))
        {
            return Some(free);
        }
        (self.slots.len() < SLOTS_MAX).then(|| {
            self.slots.push(RingSlot::Free);
            self.slots.len() - 1
        })
    }

    /// Returns the descriptor of the doorbell's memory, which becomes shared on first use.
    fn share_doorbell(&mut self) -> Option<Arc<ProcessOwned<OwnedFd>>> {
        if self.doorbell_fd.is_none() {
            self.doorbell_fd = Some(Arc::new(ProcessOwned::new_fd(
                self.doorbell.as_ref()?.get().share().ok()?,
            )));
        }
        self.doorbell_fd.clone()
    }
}

#[derive(Debug)]
struct PendingWake {
    doorbell: Arc<ProcessOwned<PeerDoorbell>>,
    wake: WakeTarget,
    /// CPU on which the peer wrote last, and where it will probably wake up.
    cpu: u8,
}

/// Wake-ups that the caller performs without the lock.
#[derive(Debug)]
pub(crate) struct PeerWakes(Vec<PendingWake>);

impl PeerWakes {
    pub(crate) fn wake_all(self) {
        for call in self.0 {
            wake_peer(call.doorbell.get(), call.wake);
        }
    }
}

fn wake_peer(bell: &PeerDoorbell, wake: WakeTarget) {
    match wake {
        WakeTarget::NoThread => {}
        WakeTarget::Sleepers => futex::wake_all(bell.sleep_word()),
        WakeTarget::Drainer => futex::wake_all(bell.drainer_word()),
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

    fn append_to(mut self, out: &mut Vec<u8>) {
        self.0.append_to(out);
    }
}

fn read_head(record: &mut Record<'_, SharedRing>) -> Result<[u8; SHORT_HEAD_BYTES], RingCorrupt> {
    let head = record.take().ok_or(RingCorrupt)?;
    if record.len() > FRAGMENT_BYTES_MAX {
        Err(RingCorrupt)
    } else {
        Ok(head)
    }
}

impl Core {
    // ---- reading

    /// Reads the rings whose doorbell bit is set. Returns true if any had a record.
    pub(crate) fn poll_rings(&mut self, now: Micros) -> bool {
        self.poll_rings_inner(now, false)
    }

    /// As [`Core::poll_rings`], and clears the bits, so that every writer rings the doorbell again
    /// for its next record.
    pub(crate) fn poll_rings_before_sleep(&mut self, now: Micros) -> bool {
        self.poll_rings_inner(now, true)
    }

    fn poll_rings_inner(&mut self, now: Micros, before_sleep: bool) -> bool {
        let (mut found, mut from, mut others) = (false, 0, 0);
        while let Some((index, mut bits)) = self
            .shm
            .doorbell
            .as_ref()
            .and_then(|bell| bell.get().pending_words(from))
        {
            from = index + 1;
            while bits != 0 {
                let slot = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if self.drain_ring(now, slot) {
                    found = true;
                    continue;
                }
                others += 1;
                if self.shm.count_empty_poll(slot, others) || before_sleep {
                    if let Some(bell) = &self.shm.doorbell {
                        bell.get().clear(slot);
                    }
                    found |= self.drain_ring(now, slot);
                }
            }
        }
        found
    }

    /// Reads all rings without regard to the doorbell bits, because other tasks can change these
    /// bits.
    pub(crate) fn poll_all_rings(&mut self, now: Micros) {
        for slot in 0..self.shm.slots.len() {
            self.drain_ring(now, slot);
        }
    }

    /// Reads one ring. Returns true if it had a record.
    pub(super) fn drain_ring(&mut self, now: Micros, slot: usize) -> bool {
        if self.inbox_is_full() {
            return false;
        }
        let (shm, links) = self.shm_and_links();
        let Some(ring) = shm.ring(slot) else {
            return false;
        };
        let peer = ring.peer;
        let Some(link) = links.get_mut(&peer) else {
            return false;
        };
        // Checked before reading: if the ring is closed, everything written before is then visible.
        let closed = ring.ends.reader.is_closed();
        let (mut read, mut starved) = (0, false);
        let broken = loop {
            match ring.take_record(now, link) {
                Ok(0) => break false,
                Ok(bytes) => read += bytes,
                Err(RingCorrupt) => break true,
            }
            starved |= ring.ends.reader.release();
            if read >= DRAIN_BYTES_MAX {
                break false;
            }
        };
        let (found, ends_now) = (read > 0, ring.must_close);
        let ended = broken || (closed && !found);
        if found {
            shm.last_writer_cpu = ring.peer_cpu;
            let Some(ring) = shm.ring(slot) else {
                return false;
            };
            (ring.last_used_at, ring.empty_polls) = (now, 0);
            if starved && ring.peer_doorbell.get().request_drainer() {
                let (bell, cpu) = (ring.peer_doorbell.clone(), ring.peer_cpu);
                shm.pending_wakes.push(PendingWake {
                    doorbell: bell,
                    wake: WakeTarget::Drainer,
                    cpu,
                });
            }
            let answers = links.get(&peer).is_some_and(|link| link.has_frame());
            let news = self.event_seq();
            self.deliver_messages_from(peer);
            if self.event_seq() != news {
                self.shm.expected_peer = Some(peer);
            }
            self.release_deferred(peer);
            if answers && !ends_now {
                self.pump_ring(now, slot);
            } else {
                self.schedule_link_timer(peer);
            }
        }
        if ended {
            self.end_ring(now, slot);
            self.reroute_through_daemon(now, peer);
        }
        found
    }

    /// Reads the ring for acknowledgements if many fragments are in flight to the peer.
    pub(super) fn poll_acks(&mut self, now: Micros, peer: Tid) {
        if self
            .link_mut(peer)
            .is_some_and(|link| link.in_flight() >= POLL_ACKS_FRAGMENTS_MIN)
        {
            self.drain_peer(now, peer);
        }
    }

    /// Reads the ring of a peer. Must be called before a message from or about this peer is handled
    /// that arrived on another route.
    pub(super) fn drain_peer(&mut self, now: Micros, peer: Tid) {
        if let Some(slot) = self.shm.slot(peer) {
            self.drain_ring_fully(now, slot);
        }
    }

    /// Reads one ring until it is empty.
    pub(super) fn drain_ring_fully(&mut self, now: Micros, slot: usize) {
        for _ in 0..FULL_DRAIN_CALLS {
            if !self.drain_ring(now, slot) {
                return;
            }
        }
    }

    // ---- writing

    /// Writes frames of the link to its ring, as far as there is space.
    pub(super) fn pump_ring(&mut self, now: Micros, slot: usize) {
        let (shm, links) = self.shm_and_links();
        let Some(peer) = shm.ring(slot).map(|ring| ring.peer) else {
            return;
        };
        let Some(link) = links.get_mut(&peer) else {
            return;
        };
        let (mut wrote, mut urgent, mut broken, mut sent_data) = (0u32, false, false, false);
        while !broken && link.has_frame() {
            let Some(ring) = shm.ring(slot) else { return };
            match ring.ends.writer.has_space_or_request_wake(RECORD_BYTES_MAX) {
                Ok(true) => {}
                Ok(false) => break,
                Err(RingCorrupt) => {
                    broken = true;
                    break;
                }
            }
            if shm.lease_message(now, slot, link) {
                (wrote, sent_data) = (wrote + 1, true);
                continue;
            }
            let Some(ring) = shm.ring(slot) else { return };
            let frame = link.next_frame(now).expect("the link has one");
            urgent |= frame.kind == LinkKind::Probe;
            sent_data |= matches!(frame.kind, LinkKind::Data { .. });
            let mut head = frame.encode_short_head();
            head[CPU_HINT_BYTE] = ring.own_cpu_hint();
            broken = ring
                .ends
                .writer
                .write([&head, frame.head, frame.body])
                .is_err();
            wrote += 1;
            if wrote == 1 && !link.is_all_transmitted() {
                // The reader copies the first fragments of a large message while the next ones are
                // written.
                wake_peer(
                    ring.peer_doorbell.get(),
                    ring.peer_doorbell.get().notify(ring.peer_slot, false),
                );
            }
        }
        urgent |= !link.is_all_transmitted();
        shm.set_waiting(slot, urgent || link.has_frame());
        if sent_data {
            shm.expected_peer = Some(peer);
        }
        let Some(ring) = shm.ring(slot) else { return };
        let wants_store = std::mem::take(&mut ring.wants_pool_offer);
        if wrote > 0 || urgent {
            ring.last_used_at = now;
            let wake = ring.peer_doorbell.get().notify(ring.peer_slot, urgent);
            if wake != WakeTarget::NoThread {
                let (bell, cpu) = (ring.peer_doorbell.clone(), ring.peer_cpu);
                shm.pending_wakes.push(PendingWake {
                    doorbell: bell,
                    wake,
                    cpu,
                });
            }
        }
        let ends_now = shm.ring(slot).is_some_and(|ring| {
            ring.must_close |= broken || ring.ends.writer.is_closed();
            ring.must_close
        });
        if wants_store {
            self.offer_pool(now, slot);
        }
        if ends_now {
            self.drain_ring_fully(now, slot);
            if self.shm.slot(peer) == Some(slot) {
                self.end_ring(now, slot);
                self.reroute_through_daemon(now, peer);
            }
        } else {
            self.schedule_link_timer(peer);
        }
    }

    /// Sends a small message through a ring that has space, if nothing else is queued for the peer.
    /// Returns the peers to wake. `None` means that this is not possible and nothing was sent.
    #[inline]
    pub(super) fn try_send_through_ring(
        &mut self,
        now: Micros,
        peer: Tid,
        head: &[u8],
        body: &[u8],
    ) -> Option<PeerWakes> {
        if !self.is_connected() || self.has_disabled_windows() {
            return None;
        }
        let (shm, links) = self.shm_and_links();
        let slot = shm.slot(peer)?;
        shm.expected_peer = Some(peer);
        let ring = shm.ring(slot)?;
        let has_room = ring
            .ends
            .writer
            .has_space(SHORT_HEAD_BYTES + head.len() + body.len())
            == Ok(true);
        if !has_room || ring.ends.writer.is_closed() {
            return None;
        }
        let link = links.get_mut(&peer)?;
        if link.in_flight() >= POLL_ACKS_FRAGMENTS_MIN && !ring.ends.reader.is_empty() {
            return None;
        }
        let frame = link.try_send_inline(now, head, body)?;
        let mut short = frame.encode_short_head();
        short[CPU_HINT_BYTE] = ring.own_cpu_hint();
        let written = ring.ends.writer.write([&short, frame.head, frame.body]);
        debug_assert_eq!(written, Ok(true), "there was room");
        ring.last_used_at = now;
        let wake = ring.peer_doorbell.get().notify(ring.peer_slot, false);
        let (bell, cpu) = (&ring.peer_doorbell, ring.peer_cpu);
        let wakes = if wake == WakeTarget::NoThread {
            Vec::new()
        } else {
            vec![PendingWake {
                doorbell: bell.clone(),
                wake,
                cpu,
            }]
        };
        if let Some(due) = link.next_wakeup() {
            self.schedule_timer(due);
        }
        Some(PeerWakes(wakes))
    }

    /// True if the ring to this peer has no space for the queued frames of its link.
    pub(crate) fn is_ring_full_for(&mut self, peer: Tid) -> bool {
        let (shm, links) = self.shm_and_links();
        let waits = shm.slot(peer).is_some() && links.get(&peer).is_some_and(Link::has_frame);
        waits && !self.has_disabled_windows()
    }

    /// Writes frames of the link to its ring, as far as there is space. Returns true if a frame was
    /// written or the ring has ended.
    pub(crate) fn pump_one_ring(&mut self, now: Micros, peer: Tid) -> bool {
        let Some(slot) = self.shm.slot(peer) else {
            return true;
        };
        let (shm, links) = self.shm_and_links();
        let has_room = shm
            .ring(slot)
            .is_some_and(|ring| ring.ends.writer.has_space(RECORD_BYTES_MAX) == Ok(true));
        if !has_room
            && links.contains_key(&peer)
            && !shm
                .ring(slot)
                .is_some_and(|ring| ring.ends.writer.is_closed())
        {
            // Read the ring: the peer may be blocked in the same way, because the ring to this task
            // is full.
            self.drain_ring(now, slot);
            return false;
        }
        self.pump_ring(now, slot);
        true
    }

    /// Continues writing to the rings that had no space for all frames.
    pub(crate) fn pump_rings(&mut self, now: Micros) {
        for slot in std::mem::take(&mut self.shm.waiting_slots) {
            if let Some(ring) = self.shm.ring(slot) {
                ring.in_waiting_list = false;
            }
            self.pump_ring(now, slot);
        }
    }
}
