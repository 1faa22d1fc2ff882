//! Shared-memory rings to tasks on the same host: reading, writing and waking. See [`agreement`]
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

mod agreement;

use super::core::Core;
use super::lend::{Lending, Loans};
use super::process::Own;
use bytes::Bytes;
use rustc_hash::FxHashMap;
use sempa_proto::link::{
    ACK_FRAGMENTS, FRAGMENT_BYTES_MAX, Link, LinkKind, Payload, SHORT_HEAD_APART, SHORT_HEAD_BYTES,
    SHORT_HEAD_SPARE, decode_short_head,
};
use sempa_proto::message::MESSAGE_HEAD_BYTES;
use sempa_proto::route::OfferId;
use sempa_proto::{Micros, Tid};
use sempa_ring::bell::{SLOTS_MAX, Wake};
use sempa_ring::futex;
use sempa_ring::memory::{Ends, OwnBell, PeerBell, RING_BYTES, Shared};
use sempa_ring::ring::{Broken, Reader, Record};
use sempa_ring::store::STORE_BYTES;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Maximum number of bytes read from one ring in one go.
const DRAIN_BYTES_MAX: usize = 4 << 20;
/// Number of [`Core::drain`] calls after which everything is read that a ring and a pool held
/// before the first call, regardless of concurrent writes.
const TURNS_MAX: usize = HEARD_BYTES_MAX / DRAIN_BYTES_MAX + 2;
/// Maximum number of unread bytes of one ring, including the leased messages that its records refer
/// to.
const HEARD_BYTES_MAX: usize = RING_BYTES + STORE_BYTES;
/// Maximum length of a record.
const RECORD_BYTES_MAX: usize = SHORT_HEAD_BYTES + FRAGMENT_BYTES_MAX + MESSAGE_HEAD_BYTES;
const _: () = assert!(RECORD_BYTES_MAX <= RING_BYTES / 4);

/// Number of small messages written to a ring between two checks of the current CPU.
const WRITES_PER_LOOK: u8 = 16;

/// Number of fragments in flight from which a sender reads the ring for acknowledgements before it
/// sends.
const HEAR_FRAGMENTS: u64 = ACK_FRAGMENTS * 2;

/// Polling up to this number of empty rings is cheap.
const QUIET_MIN: usize = 4;
/// Number of empty polls, each together with more than [`QUIET_MIN`] empty rings, after which a
/// ring is not polled until its writer rings the doorbell again.
const QUIET_LOOKS: u8 = 8;

/// Value for an unknown CPU.
const NO_PROCESSOR: u8 = u8::MAX;

/// Returns the CPU of the calling thread, reduced to one byte. It serves as a hint only.
fn processor() -> u8 {
    nix::sched::sched_getcpu().map_or(NO_PROCESSOR, |number| {
        (number % usize::from(NO_PROCESSOR)) as u8
    })
}

/// Ring that is in use.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) peer: Tid,
    pub(super) ends: Ends,
    pub(super) loans: Loans,
    /// A large message was copied into the ring because the peer does not have this task's pool.
    pub(super) wants_store: bool,
    /// The peer's doorbell, followed by the slot of this ring in it.
    bell: Arc<Own<PeerBell>>,
    theirs: usize,
    used: Micros,
    /// Number of consecutive empty polls that count as described at [`QUIET_LOOKS`].
    quiet: u8,
    /// The ring is in the list of waiting rings.
    waits: bool,
    /// Nothing else may be written to the ring, which is about to end.
    ends_now: bool,
    /// CPU on which the peer wrote its last frame.
    processor: u8,
    /// CPU on which this task writes, and the number of writes until it is checked again.
    ours: (u8, u8),
}

impl Ring {
    fn new(now: Micros, peer: Tid, ends: Ends, bell: PeerBell, theirs: usize) -> Ring {
        Ring {
            peer,
            loans: Loans::new(&ends),
            wants_store: false,
            ends,
            bell: Arc::new(Own::new(bell)),
            theirs,
            used: now,
            quiet: 0,
            waits: false,
            ends_now: false,
            processor: NO_PROCESSOR,
            ours: (NO_PROCESSOR, 0),
        }
    }

    /// Returns the CPU on which this task writes. The value may be outdated.
    pub(super) fn our_processor(&mut self) -> u8 {
        if self.ours.1 == 0 {
            self.ours = (processor(), WRITES_PER_LOOK);
        }
        self.ours.1 -= 1;
        self.ours.0
    }

    /// True if the ring has a record or the peer has closed it. Reads only the indices.
    fn has_something(&self) -> bool {
        !self.ends.reader.is_empty() || self.ends.reader.is_closed()
    }

    /// Counts an empty poll; `others` is the number of empty rings in this round, including this
    /// one. Returns true if the ring should not be polled again.
    fn is_quiet(&mut self, others: usize) -> bool {
        self.quiet = if others > QUIET_MIN {
            self.quiet.saturating_add(1)
        } else {
            0
        };
        self.quiet >= QUIET_LOOKS
    }

    /// Passes the next record to the link. Returns the number of bytes, 0 if there is no record.
    fn take_record(&mut self, now: Micros, link: &mut Link) -> Result<usize, Broken> {
        let Some((bytes, processor)) = take_record(&mut self.ends.reader, &self.loans, now, link)?
        else {
            return Ok(0);
        };
        self.processor = processor;
        Ok(bytes)
    }
}

/// Passes the next record to the link. Returns the number of bytes and the CPU on which the record
/// was written.
fn take_record(
    reader: &mut Reader<Shared>,
    loans: &Loans,
    now: Micros,
    link: &mut Link,
) -> Result<Option<(usize, u8)>, Broken> {
    let Some(mut record) = reader.next_record()? else {
        return Ok(None);
    };
    let bytes = record.len();
    let head = read_head(&mut record)?;
    let (kind, seq, ack) = decode_short_head(head).ok_or(Broken)?;
    let processor = head[SHORT_HEAD_SPARE];
    if head[0] & SHORT_HEAD_APART != 0 {
        return Ring::borrow(loans, record, now, (seq, ack), link)
            .map(|more| Some((bytes + more, processor)));
    }
    link.take(now, kind, seq, ack, InRing(record));
    Ok(Some((bytes, processor)))
}

/// State of the setup with a peer to which there is no ring.
#[derive(Debug)]
enum Standing {
    /// Number of messages sent to the peer through the daemon.
    Sent(u32),
    /// An offer was sent. Nothing is transmitted to the peer until the answer arrives.
    Offered {
        id: OfferId,
        slot: usize,
        ends: Own<Ends>,
        until: Micros,
    },
    /// The peer refused, or setup failed.
    Refused { until: Micros },
}

/// State of one slot of the doorbell.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a ring is used with every message, and most slots hold one"
)]
pub(super) enum Slot {
    Free,
    Reserved,
    Ring(Own<Ring>),
}

/// All rings of this task.
#[derive(Debug, Default)]
pub(crate) struct Near {
    bell: Option<Arc<Own<OwnBell>>>,
    /// Descriptor of the doorbell's memory, for peers.
    shared: Option<Arc<Own<OwnedFd>>>,
    pub(super) slots: Vec<Slot>,
    /// Slots of the rings that had no space for all frames of their link, each listed once.
    waiting: Vec<usize>,
    /// Pools and leases for large messages.
    pub(super) lending: Lending,
    by_peer: FxHashMap<Tid, usize>,
    standing: FxHashMap<Tid, Standing>,
    last_offer: u64,
    /// CPU on which the record that was read last had been written.
    heard_from: u8,
    /// Peer whose ring carried the most recent message from or to this task, if that ring still
    /// exists. The next message is likely to come through the same ring.
    spoke_last: Option<Tid>,
    /// Peers to wake when the lock is released.
    wakes: Vec<Call>,
    /// Peers whose wake-up is deferred until this task no longer needs its CPU.
    put_off: Vec<Call>,
    /// The next release of the lock must not wake the deferred peers yet.
    not_yet: bool,
    idle_look: Option<Micros>,
}

impl Near {
    /// Creates an empty set of rings with this doorbell.
    pub(crate) fn new(bell: Arc<Own<OwnBell>>) -> Near {
        Near {
            bell: Some(bell),
            heard_from: NO_PROCESSOR,
            ..Near::default()
        }
    }

    /// True if peers can ring the doorbell, so a drainer thread is needed.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// True if there is no ring.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_peer.is_empty()
    }

    /// True if the next message to this task is expected through a ring, not from the daemon.
    pub(crate) fn is_expected(&self) -> bool {
        self.spoke_last.is_some()
    }

    /// Records that this task sent something through the daemon; the answer is expected from there.
    pub(crate) fn spoke_elsewhere(&mut self) {
        self.spoke_last = None;
    }

    /// True if there is a ring to this peer.
    pub(crate) fn leads_to(&self, peer: Tid) -> bool {
        self.by_peer.contains_key(&peer)
    }

    /// True while an offer to this peer is unanswered.
    pub(crate) fn is_offered(&self, peer: Tid) -> bool {
        matches!(self.standing.get(&peer), Some(Standing::Offered { .. }))
    }

    /// Returns the peers with unanswered offers, and the times at which the offers expire.
    fn offered(&self) -> impl Iterator<Item = (Tid, Micros)> {
        self.standing
            .iter()
            .filter_map(|(peer, standing)| match standing {
                Standing::Offered { until, .. } => Some((*peer, *until)),
                Standing::Sent(_) | Standing::Refused { .. } => None,
            })
    }

    pub(super) fn slot(&self, peer: Tid) -> Option<usize> {
        self.by_peer.get(&peer).copied()
    }

    /// True if a ring whose doorbell bit is set must be drained: it has a record, or it has been
    /// empty often enough to clear its bit.
    pub(crate) fn has_something(&mut self) -> bool {
        let Near {
            bell: Some(bell),
            slots,
            ..
        } = self
        else {
            return false;
        };
        let (mut from, mut others) = (0, 0);
        while let Some((index, mut bits)) = bell.get().rung(from) {
            from = index + 1;
            while bits != 0 {
                let slot = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some(Slot::Ring(ring)) = slots.get_mut(slot) {
                    others += 1;
                    if ring.get().has_something() || ring.get_mut().is_quiet(others) {
                        return true;
                    }
                }
            }
        }
        false
    }

    /// Counts an empty poll of this slot; `others` is the number of empty rings in this round.
    /// Returns true if the slot should not be polled until its writer rings again. Peers that sent
    /// once thus cost nothing, even if this task never sleeps.
    fn is_quiet(&mut self, slot: usize, others: usize) -> bool {
        match self.ring(slot) {
            Some(ring) => !ring.has_something() && ring.is_quiet(others),
            // Unknown slot. A ring that is installed there later is read at its installation.
            None => true,
        }
    }

    /// Returns the number of rings that a poll checks.
    #[cfg(test)]
    pub(super) fn rung(&self) -> usize {
        let Some(bell) = self.bell.as_ref().map(|bell| bell.get()) else {
            return 0;
        };
        let words = std::iter::successors(bell.rung(0), |(index, _)| bell.rung(index + 1));
        words.map(|(_, bits)| bits.count_ones() as usize).sum()
    }

    /// Returns the number of rings that had no space for all frames.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Records whether the ring has frames to write when space is freed.
    fn note_waiting(&mut self, slot: usize, waits: bool) {
        let Some(ring) = self.ring(slot) else { return };
        let waited = std::mem::replace(&mut ring.waits, waits);
        if waits && !waited {
            self.waiting.push(slot);
        } else if waited && !waits {
            self.waits_no_more(slot);
        }
    }

    fn waits_no_more(&mut self, slot: usize) {
        self.waiting.retain(|waiting| *waiting != slot);
    }

    fn ring(&mut self, slot: usize) -> Option<&mut Ring> {
        match self.slots.get_mut(slot) {
            Some(Slot::Ring(ring)) => Some(ring.get_mut()),
            _ => None,
        }
    }

    /// True if the last received record was written on the CPU of this thread: the peer cannot
    /// answer while this thread spins.
    pub(crate) fn shares_processor(&self) -> bool {
        self.heard_from == processor()
    }

    /// Returns the peers to wake; the caller wakes them without the lock.
    pub(crate) fn take_wakes(&mut self) -> Wakes {
        let mut wakes = std::mem::take(&mut self.wakes);
        if !std::mem::take(&mut self.not_yet) {
            wakes.append(&mut self.put_off);
        }
        Wakes(wakes)
    }

    /// Defers waking the peers that would run on this thread's CPU. The next [`Near::take_wakes`]
    /// does not return them, the one after it does. Returns true if there are any.
    pub(crate) fn put_off(&mut self) -> bool {
        let here = processor();
        let late = self.wakes.extract_if(.., |call| {
            call.wake == Wake::Sleepers && call.processor == here
        });
        self.put_off.extend(late);
        self.not_yet = !self.put_off.is_empty();
        self.not_yet
    }

    /// True if there are deferred wake-ups and the next [`Near::take_wakes`] returns them.
    pub(crate) fn has_put_off(&self) -> bool {
        !self.put_off.is_empty() && !self.not_yet
    }

    /// Makes the next [`Near::take_wakes`] return the deferred wake-ups.
    pub(crate) fn put_off_no_more(&mut self) {
        self.not_yet = false;
    }

    fn free_slot(&mut self) -> Option<usize> {
        if let Some(free) = self
            .slots
            .iter()
            .position(|slot| matches!(slot, Slot::Free))
        {
            return Some(free);
        }
        (self.slots.len() < SLOTS_MAX).then(|| {
            self.slots.push(Slot::Free);
            self.slots.len() - 1
        })
    }

    /// Returns the descriptor of the doorbell's memory, which becomes shared on first use.
    fn share(&mut self) -> Option<Arc<Own<OwnedFd>>> {
        if self.shared.is_none() {
            self.shared = Some(Arc::new(Own::fd(self.bell.as_ref()?.get().share().ok()?)));
        }
        self.shared.clone()
    }
}

/// Pending wake-up of a peer.
#[derive(Debug)]
struct Call {
    bell: Arc<Own<PeerBell>>,
    wake: Wake,
    /// CPU on which the peer wrote last, and where it will probably wake up.
    processor: u8,
}

/// Wake-ups that the caller performs without the lock.
#[derive(Debug)]
pub(crate) struct Wakes(Vec<Call>);

impl Wakes {
    pub(crate) fn wake(self) {
        for call in self.0 {
            wake_now(call.bell.get(), call.wake);
        }
    }
}

fn wake_now(bell: &PeerBell, wake: Wake) {
    match wake {
        Wake::Nobody => {}
        Wake::Sleepers => futex::wake_all(bell.word()),
        Wake::Ear => futex::wake_all(bell.ear()),
    }
}

/// Payload of a frame that is still in the ring.
struct InRing<'a>(Record<'a, Shared>);

impl Payload for InRing<'_> {
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

/// Reads the header of a record.
fn read_head(record: &mut Record<'_, Shared>) -> Result<[u8; SHORT_HEAD_BYTES], Broken> {
    let head = record.take().ok_or(Broken)?;
    if record.len() > FRAGMENT_BYTES_MAX {
        Err(Broken)
    } else {
        Ok(head)
    }
}

impl Core {
    // ---- reading

    /// Reads the rings whose doorbell bit is set. Returns true if any had a record.
    pub(crate) fn look(&mut self, now: Micros) -> bool {
        self.look_with(now, false)
    }

    /// As [`Core::look`], and clears the bits, so that every writer rings the doorbell again for
    /// its next record.
    pub(crate) fn look_before_sleep(&mut self, now: Micros) -> bool {
        self.look_with(now, true)
    }

    fn look_with(&mut self, now: Micros, before_sleep: bool) -> bool {
        let (mut found, mut from, mut others) = (false, 0, 0);
        while let Some((index, mut bits)) = self
            .near
            .bell
            .as_ref()
            .and_then(|bell| bell.get().rung(from))
        {
            from = index + 1;
            while bits != 0 {
                let slot = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if self.drain(now, slot) {
                    found = true;
                    continue;
                }
                others += 1;
                if self.near.is_quiet(slot, others) || before_sleep {
                    if let Some(bell) = &self.near.bell {
                        bell.get().hush(slot);
                    }
                    found |= self.drain(now, slot);
                }
            }
        }
        found
    }

    /// Reads all rings, regardless of the doorbell, to which other tasks have write access.
    pub(crate) fn look_everywhere(&mut self, now: Micros) {
        for slot in 0..self.near.slots.len() {
            self.drain(now, slot);
        }
    }

    /// Reads one ring. Returns true if it had a record.
    pub(super) fn drain(&mut self, now: Micros, slot: usize) -> bool {
        if self.inbox_is_full() {
            return false;
        }
        let (near, links) = self.near_and_links();
        let Some(ring) = near.ring(slot) else {
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
                Err(Broken) => break true,
            }
            starved |= ring.ends.reader.release();
            if read >= DRAIN_BYTES_MAX {
                break false;
            }
        };
        let (found, ends_now) = (read > 0, ring.ends_now);
        let ended = broken || (closed && !found);
        if found {
            near.heard_from = ring.processor;
            let Some(ring) = near.ring(slot) else {
                return false;
            };
            (ring.used, ring.quiet) = (now, 0);
            if starved && ring.bell.get().call_ear() {
                let (bell, processor) = (ring.bell.clone(), ring.processor);
                near.wakes.push(Call {
                    bell,
                    wake: Wake::Ear,
                    processor,
                });
            }
            let answers = links.get(&peer).is_some_and(|link| link.has_frame());
            let news = self.news();
            self.deliver_from(peer);
            if self.news() != news {
                self.near.spoke_last = Some(peer);
            }
            self.release_held(peer);
            if answers && !ends_now {
                self.pump_ring(now, slot);
            } else {
                self.note_wakeup(peer);
            }
        }
        if ended {
            self.end_ring(now, slot);
            self.back_to_daemon(now, peer);
        }
        found
    }

    /// Reads the ring for acknowledgements if many fragments are in flight to the peer.
    pub(super) fn hear(&mut self, now: Micros, peer: Tid) {
        if self
            .link_mut(peer)
            .is_some_and(|link| link.in_flight() >= HEAR_FRAGMENTS)
        {
            self.drain_peer(now, peer);
        }
    }

    /// Reads the ring of a peer. Called before anything is handled that came from or about this
    /// peer by another route.
    pub(super) fn drain_peer(&mut self, now: Micros, peer: Tid) {
        if let Some(slot) = self.near.slot(peer) {
            self.drain_all(now, slot);
        }
    }

    /// Reads one ring until it is empty.
    pub(super) fn drain_all(&mut self, now: Micros, slot: usize) {
        for _ in 0..TURNS_MAX {
            if !self.drain(now, slot) {
                return;
            }
        }
    }

    // ---- writing

    /// Writes frames of the link to its ring, as far as there is space.
    pub(super) fn pump_ring(&mut self, now: Micros, slot: usize) {
        let (near, links) = self.near_and_links();
        let Some(peer) = near.ring(slot).map(|ring| ring.peer) else {
            return;
        };
        let Some(link) = links.get_mut(&peer) else {
            return;
        };
        let (mut wrote, mut urgent, mut broken, mut spoke) = (0u32, false, false, false);
        while !broken && link.has_frame() {
            let Some(ring) = near.ring(slot) else { return };
            match ring.ends.writer.wants_room(RECORD_BYTES_MAX) {
                Ok(true) => {}
                Ok(false) => break,
                Err(Broken) => {
                    broken = true;
                    break;
                }
            }
            if near.lend(now, slot, link) {
                (wrote, spoke) = (wrote + 1, true);
                continue;
            }
            let Some(ring) = near.ring(slot) else { return };
            let frame = link.next_frame(now).expect("the link has one");
            urgent |= frame.kind == LinkKind::Probe;
            spoke |= matches!(frame.kind, LinkKind::Data { .. });
            let mut head = frame.encode_short_head();
            head[SHORT_HEAD_SPARE] = ring.our_processor();
            broken = ring
                .ends
                .writer
                .write([&head, frame.head, frame.body])
                .is_err();
            wrote += 1;
            if wrote == 1 && !link.is_transmitted() {
                // The reader copies the first fragments of a large message while the next ones are
                // written.
                wake_now(ring.bell.get(), ring.bell.get().ring(ring.theirs, false));
            }
        }
        urgent |= !link.is_transmitted();
        near.note_waiting(slot, urgent || link.has_frame());
        if spoke {
            near.spoke_last = Some(peer);
        }
        let Some(ring) = near.ring(slot) else { return };
        let wants_store = std::mem::take(&mut ring.wants_store);
        if wrote > 0 || urgent {
            ring.used = now;
            let wake = ring.bell.get().ring(ring.theirs, urgent);
            if wake != Wake::Nobody {
                let (bell, processor) = (ring.bell.clone(), ring.processor);
                near.wakes.push(Call {
                    bell,
                    wake,
                    processor,
                });
            }
        }
        let ends_now = near.ring(slot).is_some_and(|ring| {
            ring.ends_now |= broken || ring.ends.writer.is_closed();
            ring.ends_now
        });
        if wants_store {
            self.offer_store(now, slot);
        }
        if ends_now {
            self.drain_all(now, slot);
            if self.near.slot(peer) == Some(slot) {
                self.end_ring(now, slot);
                self.back_to_daemon(now, peer);
            }
        } else {
            self.note_wakeup(peer);
        }
    }

    /// Sends a small message through a ring that has space, if nothing else is queued for the peer.
    /// Returns the peers to wake; `None`, and nothing was sent, if this is not possible.
    #[inline]
    pub(super) fn send_near(
        &mut self,
        now: Micros,
        peer: Tid,
        head: &[u8],
        body: &[u8],
    ) -> Option<Wakes> {
        if !self.is_connected() || self.is_lifted() {
            return None;
        }
        let (near, links) = self.near_and_links();
        let slot = near.slot(peer)?;
        near.spoke_last = Some(peer);
        let ring = near.ring(slot)?;
        let has_room = ring
            .ends
            .writer
            .has_room(SHORT_HEAD_BYTES + head.len() + body.len())
            == Ok(true);
        if !has_room || ring.ends.writer.is_closed() {
            return None;
        }
        let link = links.get_mut(&peer)?;
        if link.in_flight() >= HEAR_FRAGMENTS && !ring.ends.reader.is_empty() {
            return None;
        }
        let frame = link.send_at_once(now, head, body)?;
        let mut short = frame.encode_short_head();
        short[SHORT_HEAD_SPARE] = ring.our_processor();
        let written = ring.ends.writer.write([&short, frame.head, frame.body]);
        debug_assert_eq!(written, Ok(true), "there was room");
        ring.used = now;
        let wake = ring.bell.get().ring(ring.theirs, false);
        let (bell, processor) = (&ring.bell, ring.processor);
        let wakes = if wake == Wake::Nobody {
            Vec::new()
        } else {
            vec![Call {
                bell: bell.clone(),
                wake,
                processor,
            }]
        };
        if let Some(due) = link.next_wakeup() {
            self.wake_at(due);
        }
        Some(Wakes(wakes))
    }

    /// True if the ring to this peer has no space for the queued frames of its link.
    pub(crate) fn waits_for_ring(&mut self, peer: Tid) -> bool {
        let (near, links) = self.near_and_links();
        let waits = near.slot(peer).is_some() && links.get(&peer).is_some_and(Link::has_frame);
        waits && !self.is_lifted()
    }

    /// Writes to one ring as far as there is space. Returns true if something was written or the
    /// ring has ended.
    pub(crate) fn pump_one_ring(&mut self, now: Micros, peer: Tid) -> bool {
        let Some(slot) = self.near.slot(peer) else {
            return true;
        };
        let (near, links) = self.near_and_links();
        let has_room = near
            .ring(slot)
            .is_some_and(|ring| ring.ends.writer.has_room(RECORD_BYTES_MAX) == Ok(true));
        if !has_room
            && links.contains_key(&peer)
            && !near
                .ring(slot)
                .is_some_and(|ring| ring.ends.writer.is_closed())
        {
            // Read the ring: the peer may be blocked in the same way, because the ring to this task
            // is full.
            self.drain(now, slot);
            return false;
        }
        self.pump_ring(now, slot);
        true
    }

    /// Continues writing to the rings that had no space for all frames.
    pub(crate) fn pump_rings(&mut self, now: Micros) {
        for slot in std::mem::take(&mut self.near.waiting) {
            if let Some(ring) = self.near.ring(slot) {
                ring.waits = false;
            }
            self.pump_ring(now, slot);
        }
    }
}
