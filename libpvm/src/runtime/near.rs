//! Rings to tasks on the same host: how they come about, how they are read and written, how they end.
//!
//! A ring is a route of a link and nothing more. What it carries is kept by the link until the other end has it, so a ring may
//! end at any time. It begins with an offer through the daemon. From the offer to its answer nothing is transmitted to that
//! task, and a ring is read before anything that came from its writer through the daemon, so a change of route reorders
//! nothing.

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

/// Bytes read from one ring before others get their turn.
const DRAIN_BYTES_MAX: usize = 4 << 20;
/// After so many turns all has been read that a ring and a store held before the first, whatever is written meanwhile.
const TURNS_MAX: usize = HEARD_BYTES_MAX / DRAIN_BYTES_MAX + 2;
/// What one ring can have, with what is lent over it.
const HEARD_BYTES_MAX: usize = RING_BYTES + STORE_BYTES;
/// The longest record.
const RECORD_BYTES_MAX: usize = SHORT_HEAD_BYTES + FRAGMENT_BYTES_MAX + MESSAGE_HEAD_BYTES;
const _: () = assert!(RECORD_BYTES_MAX <= RING_BYTES / 4);

/// Small messages written to a ring between two looks at the processor.
const WRITES_PER_LOOK: u8 = 16;

/// Fragments on their way from which on a sender reads what the receiver has acknowledged.
const HEAR_FRAGMENTS: u64 = ACK_FRAGMENTS * 2;

/// So many rings that were rung for and have nothing cost little to look at.
const QUIET_MIN: usize = 4;
/// After so many looks in vain beside more than those a ring is not looked at any more until its writer rings again.
const QUIET_LOOKS: u8 = 8;

/// A processor that is not known.
const NO_PROCESSOR: u8 = u8::MAX;

/// The processor that this thread is on, as far as a byte tells; a hint.
fn processor() -> u8 {
    nix::sched::sched_getcpu().map_or(NO_PROCESSOR, |number| {
        (number % usize::from(NO_PROCESSOR)) as u8
    })
}

/// A ring in use.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) peer: Tid,
    pub(super) ends: Ends,
    pub(super) loans: Loans,
    /// A large message had to be copied because the other task does not know of this one's store.
    pub(super) wants_store: bool,
    /// The other task's bell, and our place in it.
    bell: Arc<Own<PeerBell>>,
    theirs: usize,
    used: Micros,
    /// Looks since anything was there, as far as they count.
    quiet: u8,
    /// It is in the list of those that have something to write.
    waits: bool,
    /// Nothing more is written to it.
    ends_now: bool,
    /// Where its last frame was written.
    processor: u8,
    /// Where ours are written, and for how many more that is believed.
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

    /// The processor that frames are written on, nearly always.
    pub(super) fn our_processor(&mut self) -> u8 {
        if self.ours.1 == 0 {
            self.ours = (processor(), WRITES_PER_LOOK);
        }
        self.ours.1 -= 1;
        self.ours.0
    }

    /// True when something is to be read, or the end of it has come, at a glance.
    fn has_something(&self) -> bool {
        !self.ends.reader.is_empty() || self.ends.reader.is_closed()
    }

    /// A look has found nothing, here as in `others - 1` before it; true when it was one too many.
    fn is_quiet(&mut self, others: usize) -> bool {
        self.quiet = if others > QUIET_MIN {
            self.quiet.saturating_add(1)
        } else {
            0
        };
        self.quiet >= QUIET_LOOKS
    }

    /// Gives the next record to the link; how many bytes it had, 0 when there is none.
    fn take_record(&mut self, now: Micros, link: &mut Link) -> Result<usize, Broken> {
        let Some((bytes, processor)) = take_record(&mut self.ends.reader, &self.loans, now, link)?
        else {
            return Ok(0);
        };
        self.processor = processor;
        Ok(bytes)
    }
}

/// Gives the next record to the link, if there is one: how many bytes it had, and where it was written.
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

/// Where a task stands that has no ring.
#[derive(Debug)]
enum Standing {
    /// So many messages went to it.
    Sent(u32),
    /// An offer is on its way; nothing is transmitted until the answer.
    Offered {
        id: OfferId,
        slot: usize,
        ends: Own<Ends>,
        until: Micros,
    },
    /// It does not want one, or cannot.
    Refused { until: Micros },
}

/// What a slot of the bell is for.
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
    /// The memory behind the bell, for peers.
    shared: Option<Arc<Own<OwnedFd>>>,
    pub(super) slots: Vec<Slot>,
    /// Slots of rings whose links have more to write than there was room for; each once.
    waiting: Vec<usize>,
    /// What is lent and borrowed.
    pub(super) lending: Lending,
    by_peer: FxHashMap<Tid, usize>,
    standing: FxHashMap<Tid, Standing>,
    last_offer: u64,
    /// Where the last thing that was read had been written.
    heard_from: u8,
    /// The last word of this task went, or the last one to it came, by the ring with this peer, which is there still: so will the
    /// next one, as far as can be guessed.
    spoke_last: Option<Tid>,
    /// Whom to wake when the lock is free again.
    wakes: Vec<Call>,
    /// Whom to wake when this task needs its processor no more.
    put_off: Vec<Call>,
    /// Not when the lock is free the next time.
    not_yet: bool,
    idle_look: Option<Micros>,
}

impl Near {
    /// Rings with this bell.
    pub(crate) fn new(bell: Arc<Own<OwnBell>>) -> Near {
        Near {
            bell: Some(bell),
            heard_from: NO_PROCESSOR,
            ..Near::default()
        }
    }

    /// True when somebody has to listen for calls of peers.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// True when nothing can come through a ring.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_peer.is_empty()
    }

    /// True when the next word to this task may be expected in a ring, and not from the daemon.
    pub(crate) fn is_expected(&self) -> bool {
        self.spoke_last.is_some()
    }

    /// This task has said something to the daemon, or by way of it: that is where the answer comes from.
    pub(crate) fn spoke_elsewhere(&mut self) {
        self.spoke_last = None;
    }

    /// True when there is a ring to this task.
    pub(crate) fn leads_to(&self, peer: Tid) -> bool {
        self.by_peer.contains_key(&peer)
    }

    /// True while the answer to an offer is waited for.
    pub(crate) fn is_offered(&self, peer: Tid) -> bool {
        matches!(self.standing.get(&peer), Some(Standing::Offered { .. }))
    }

    /// To whom an offer is on its way, and until when the answer is waited for.
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

    /// True when a ring that was rung for is to be looked at: it has something, at a glance, or has had nothing for long.
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

    /// A look has found nothing in this slot, as in `others - 1` before it; true when it is not worth another one until it is rung
    /// for. So peers that spoke once cost nothing more, also if this task never sleeps.
    fn is_quiet(&mut self, slot: usize, others: usize) -> bool {
        match self.ring(slot) {
            Some(ring) => !ring.has_something() && ring.is_quiet(others),
            // Nobody we know; a ring that is installed later is looked at then.
            None => true,
        }
    }

    /// How many rings a look looks at.
    #[cfg(test)]
    pub(super) fn rung(&self) -> usize {
        let Some(bell) = self.bell.as_ref().map(|bell| bell.get()) else {
            return 0;
        };
        let words = std::iter::successors(bell.rung(0), |(index, _)| bell.rung(index + 1));
        words.map(|(_, bits)| bits.count_ones() as usize).sum()
    }

    /// How many rings had no room for everything.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Notes whether a ring has something to write when there is room again.
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

    /// True when whoever was heard of last is on this thread's own processor: it cannot answer while this one waits awake.
    pub(crate) fn shares_processor(&self) -> bool {
        self.heard_from == processor()
    }

    /// Whom to wake; to be done without the lock.
    pub(crate) fn take_wakes(&mut self) -> Wakes {
        let mut wakes = std::mem::take(&mut self.wakes);
        if !std::mem::take(&mut self.not_yet) {
            wakes.append(&mut self.put_off);
        }
        Wakes(wakes)
    }

    /// Leaves those asleep who would wake up on this thread's processor, until wakes are taken the time after the next. True when
    /// there are such.
    pub(crate) fn put_off(&mut self) -> bool {
        let here = processor();
        let late = self.wakes.extract_if(.., |call| {
            call.wake == Wake::Sleepers && call.processor == here
        });
        self.put_off.extend(late);
        self.not_yet = !self.put_off.is_empty();
        self.not_yet
    }

    /// True when the waking of peers was put off, and they are to be woken the next time.
    pub(crate) fn has_put_off(&self) -> bool {
        !self.put_off.is_empty() && !self.not_yet
    }

    /// They are to be woken the next time after all.
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

    /// The descriptor of the bell's memory, made shared on first use.
    fn share(&mut self) -> Option<Arc<Own<OwnedFd>>> {
        if self.shared.is_none() {
            self.shared = Some(Arc::new(Own::fd(self.bell.as_ref()?.get().share().ok()?)));
        }
        self.shared.clone()
    }
}

/// A peer to be woken.
#[derive(Debug)]
struct Call {
    bell: Arc<Own<PeerBell>>,
    wake: Wake,
    /// Where it has written last, and will likely wake up.
    processor: u8,
}

/// Peers to be woken.
#[derive(Debug)]
pub(crate) struct Wakes(Vec<Call>);

impl Wakes {
    /// Wakes them.
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

/// A frame's payload in a ring.
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

/// The header of a record.
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

    /// Takes in what has arrived in rings; true when there was anything.
    pub(crate) fn look(&mut self, now: Micros) -> bool {
        self.look_with(now, false)
    }

    /// As [`Core::look`]; afterwards every writer rings again for what it writes.
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

    /// As [`Core::look`], whatever the bell says: other tasks write there.
    pub(crate) fn look_everywhere(&mut self, now: Micros) {
        for slot in 0..self.near.slots.len() {
            self.drain(now, slot);
        }
    }

    /// Takes in what one ring has; true when it had anything.
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
        // Looked at first: what was written before the end is there then.
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

    /// A sender that is far ahead of this task reads what it has acknowledged.
    pub(super) fn hear(&mut self, now: Micros, peer: Tid) {
        if self
            .link_mut(peer)
            .is_some_and(|link| link.in_flight() >= HEAR_FRAGMENTS)
        {
            self.drain_peer(now, peer);
        }
    }

    /// Reads the ring of a task before something is believed that came from or of it another way.
    pub(super) fn drain_peer(&mut self, now: Micros, peer: Tid) {
        if let Some(slot) = self.near.slot(peer) {
            self.drain_all(now, slot);
        }
    }

    /// Takes in everything that one ring has.
    pub(super) fn drain_all(&mut self, now: Micros, slot: usize) {
        for _ in 0..TURNS_MAX {
            if !self.drain(now, slot) {
                return;
            }
        }
    }

    // ---- writing

    /// Writes what the link has for its ring, as far as there is room.
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
                // The reader copies the first pieces of a large message while the next are written.
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

    /// Sends a small message by a ring that has room, when nothing else waits for that task: whom to wake afterwards. `None`,
    /// and nothing was sent, when something stands in the way.
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

    /// True when the ring of this task is too full for what its link has.
    pub(crate) fn waits_for_ring(&mut self, peer: Tid) -> bool {
        let (near, links) = self.near_and_links();
        let waits = near.slot(peer).is_some() && links.get(&peer).is_some_and(Link::has_frame);
        waits && !self.is_lifted()
    }

    /// Writes to one ring what there is room for; true when something was written or the ring is no more.
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
            // What it sends meanwhile, it may be waiting with the same.
            self.drain(now, slot);
            return false;
        }
        self.pump_ring(now, slot);
        true
    }

    /// Writes to the rings that had no room for everything what there is room for now.
    pub(crate) fn pump_rings(&mut self, now: Micros) {
        for slot in std::mem::take(&mut self.near.waiting) {
            if let Some(ring) = self.near.ring(slot) {
                ring.waits = false;
            }
            self.pump_ring(now, slot);
        }
    }
}
