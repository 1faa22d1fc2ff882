//! Setup and teardown of rings. The two tasks exchange route messages, which the daemon passes on.
//!
//! 1. After a first message through the daemon, one task offers a ring: it sends the ring's memory
//!    and its doorbell.
//! 2. The peer accepts and sends its own doorbell, or refuses. Without an answer within
//!    [`OFFER_MAX`] the offer is dropped.
//! 3. Either task closes the ring when it is idle, when a task ends or migrates, or when the peer
//!    violates the protocol. The link then continues through the daemon.

use super::super::core::Core;
use super::super::lend::Loans;
use super::super::process::Own;
use super::{Call, HEARD_BYTES_MAX, Ring, Slot, Standing, take_record};
use sempa_proto::frame::encode_control;
use sempa_proto::link::LinkEvent;
use sempa_proto::route::{OfferId, RouteWord};
use sempa_proto::task::ToDaemon;
use sempa_proto::{Micros, Tid};
use sempa_ring::bell::{SLOTS_MAX, Wake};
use sempa_ring::memory::{Ends, PeerBell, accept, offer};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Number of messages that go to a peer through the daemon before a ring is offered. Many pairs of
/// tasks exchange only one message.
const MESSAGES_BEFORE_OFFER: u32 = 1;
/// Time for which an offer is valid. A stopped task does not answer; the daemon carries the
/// messages then.
const OFFER_MAX: Micros = Micros::from_millis(500);
/// Time for which a refusal is remembered.
const REFUSAL: Micros = Micros::from_secs(30);
/// Time for which a refusal is remembered when the peer is on another host and its daemon refused.
/// Forgotten earlier if one of the two migrates.
const REFUSAL_FAR: Micros = Micros::from_secs(600);
/// Time without traffic after which a ring is closed.
const RING_IDLE_MAX: Micros = Micros::from_secs(60);
/// Interval of the check for idle rings.
const IDLE_LOOK: Micros = Micros::from_secs(10);
/// Delay of the next offer after a ring has ended, because the peer may be exiting or migrating.
const AFTER_END: Micros = Micros::from_secs(1);

impl Core {
    // ---- setup

    /// Offers a ring to the peer if it is time; called after a message to it went through the
    /// daemon.
    pub(in crate::runtime) fn consider_ring(&mut self, now: Micros, peer: Tid) {
        self.near.spoke_elsewhere();
        if self.near.bell.is_none()
            || !self.is_connected()
            || self.is_lifted()
            || self.direct.leads_to(peer)
        {
            return;
        }
        match self.near.standing.entry(peer).or_insert(Standing::Sent(0)) {
            Standing::Sent(count) if *count < MESSAGES_BEFORE_OFFER => *count += 1,
            Standing::Refused { until } if *until > now => {}
            Standing::Offered { .. } => {}
            Standing::Sent(_) | Standing::Refused { .. } => {
                if !self.offer_ring(now, peer) {
                    self.near.standing.insert(
                        peer,
                        Standing::Refused {
                            until: now + REFUSAL,
                        },
                    );
                }
            }
        }
    }

    fn offer_ring(&mut self, now: Micros, peer: Tid) -> bool {
        let (Some(bell), Some(slot)) = (self.near.share(), self.near.free_slot()) else {
            return false;
        };
        let Ok((ends, rings)) = offer() else {
            return false;
        };
        self.near.last_offer += 1;
        let id = OfferId(self.near.last_offer);
        let word = RouteWord::RingOffer {
            id,
            slot: slot as u32,
        };
        if !self.say(peer, word, vec![Arc::new(Own::fd(rings)), bell]) {
            return false;
        }
        self.near.slots[slot] = Slot::Reserved;
        let until = now + OFFER_MAX;
        self.near.standing.insert(
            peer,
            Standing::Offered {
                id,
                slot,
                ends: Own::new(ends),
                until,
            },
        );
        self.wake_at(until);
        // Nothing sent from here on may overtake what the daemon carries.
        if let Some(link) = self.link_mut(peer) {
            link.handle(now, LinkEvent::RouteDown);
        }
        true
    }

    pub(in crate::runtime) fn say(
        &mut self,
        to: Tid,
        word: RouteWord,
        descriptors: Vec<Arc<Own<OwnedFd>>>,
    ) -> bool {
        let Ok(frame) = encode_control(&ToDaemon::Route { to, word }) else {
            return false;
        };
        if !self.is_connected() {
            return false;
        }
        self.outbox.push_with(frame, descriptors);
        true
    }

    /// Handles a route message of a peer about rings or pools.
    pub(in crate::runtime) fn take_ring_word(
        &mut self,
        now: Micros,
        from: Tid,
        near: bool,
        word: &RouteWord,
        descriptors: Vec<OwnedFd>,
    ) {
        match *word {
            RouteWord::RingOffer { id, slot } => {
                if self.near.is_offered(from) && self.tid() < from {
                    return; // Ours counts.
                }
                self.drop_offer(now, from, Standing::Sent(0));
                if self
                    .accept_ring(now, from, id, slot as usize, &descriptors)
                    .is_none()
                {
                    self.say(from, RouteWord::RingRefuse { id }, Vec::new());
                }
            }
            RouteWord::RingAccept { id, slot } => {
                self.ring_accepted(now, from, id, slot as usize, &descriptors)
            }
            RouteWord::StoreOffer { .. } | RouteWord::StoreAccept { .. } => {
                self.take_store_word(now, from, word, &descriptors);
            }
            RouteWord::RingRefuse { id } => {
                if matches!(self.near.standing.get(&from), Some(Standing::Offered { id: open, .. }) if *open == id)
                {
                    let until = now + if near { REFUSAL } else { REFUSAL_FAR };
                    self.drop_offer(now, from, Standing::Refused { until });
                }
            }
            _ => {}
        }
    }

    /// Handles a route message whose descriptors could not be received because this process has too
    /// many open. The daemon continues to carry the messages.
    pub(in crate::runtime) fn could_not_take(&mut self, now: Micros, from: Tid, word: &RouteWord) {
        match *word {
            RouteWord::RingOffer { id, .. } => {
                self.say(from, RouteWord::RingRefuse { id }, Vec::new());
            }
            // The peer has installed its ring and notices that this end is closed.
            RouteWord::RingAccept { .. } => self.drop_offer(
                now,
                from,
                Standing::Refused {
                    until: now + REFUSAL,
                },
            ),
            // Without the pool, large messages are copied through the ring.
            _ => {}
        }
    }

    /// Drops the offer to a peer; the daemon carries the queued messages.
    fn drop_offer(&mut self, now: Micros, peer: Tid, standing: Standing) {
        if !self.near.is_offered(peer) {
            return;
        }
        if let Some(Standing::Offered { slot, ends, .. }) =
            self.near.standing.insert(peer, standing)
        {
            self.near.slots[slot] = Slot::Free;
            // The peer may have accepted and written to the ring, with its acceptance still in
            // transit.
            if let Some(mut ends) = ends.into_inner() {
                let loans = Loans::new(&ends);
                self.close_and_read(now, peer, &mut ends, &loans);
            }
        }
        self.news_of_routes();
        self.back_to_daemon(now, peer);
    }

    pub(in crate::runtime) fn back_to_daemon(&mut self, now: Micros, peer: Tid) {
        if !self.is_connected() {
            return;
        }
        let route = self.next_route();
        if let Some(link) = self.link_mut(peer) {
            link.handle(now, LinkEvent::RouteUp(route));
            self.pump_link(now, peer);
        }
    }

    fn accept_ring(
        &mut self,
        now: Micros,
        peer: Tid,
        id: OfferId,
        theirs: usize,
        descriptors: &[OwnedFd],
    ) -> Option<()> {
        let [rings, bell] = descriptors else {
            return None;
        };
        if self.is_gone(peer) || self.is_lifted() || theirs >= SLOTS_MAX {
            return None;
        }
        let own = self.near.share()?;
        let ends = accept(rings.as_fd()).ok()?;
        let bell = PeerBell::map(bell.as_fd()).ok()?;
        if let Some(old) = self.near.slot(peer) {
            self.end_ring(now, old);
        }
        let slot = self.near.free_slot()?;
        // The acceptance is queued after everything that the daemon already carries.
        if !self.say(
            peer,
            RouteWord::RingAccept {
                id,
                slot: slot as u32,
            },
            vec![own],
        ) {
            return None;
        }
        self.install(now, slot, Ring::new(now, peer, ends, bell, theirs));
        Some(())
    }

    fn ring_accepted(
        &mut self,
        now: Micros,
        peer: Tid,
        id: OfferId,
        theirs: usize,
        descriptors: &[OwnedFd],
    ) {
        let Some(Standing::Offered { id: open, .. }) = self.near.standing.get(&peer) else {
            return;
        };
        let bell = descriptors
            .first()
            .and_then(|fd| PeerBell::map(fd.as_fd()).ok());
        if *open != id {
            return;
        }
        let Some(bell) = bell.filter(|_| theirs < SLOTS_MAX) else {
            return self.drop_offer(
                now,
                peer,
                Standing::Refused {
                    until: now + REFUSAL,
                },
            );
        };
        if let Some(Standing::Offered { slot, ends, .. }) = self.near.standing.remove(&peer)
            && let Some(ends) = ends.into_inner()
        {
            self.install(now, slot, Ring::new(now, peer, ends, bell, theirs));
        }
    }

    fn install(&mut self, now: Micros, slot: usize, ring: Ring) {
        let peer = ring.peer;
        self.near.slots[slot] = Slot::Ring(Own::new(ring));
        self.near.by_peer.insert(peer, slot);
        self.near.standing.remove(&peer);
        let look = *self.near.idle_look.get_or_insert(now + IDLE_LOOK);
        self.wake_at(look);
        let route = self.next_route();
        if let Some(link) = self.link_to_send(peer) {
            link.handle(now, LinkEvent::RouteUp(route));
        }
        self.news_of_routes();
        self.pump_ring(now, slot);
        // The peer may have rung the doorbell before the slot was known.
        self.drain(now, slot);
    }

    // ---- teardown

    /// Closes a ring. The peer notices that, and first reads what it has not read yet.
    pub(in crate::runtime) fn end_ring(&mut self, now: Micros, slot: usize) {
        let Some(place) = self.near.slots.get_mut(slot) else {
            return;
        };
        let Slot::Ring(mut ring) = std::mem::replace(place, Slot::Free) else {
            return;
        };
        let Ring {
            peer, ends, loans, ..
        } = ring.get_mut();
        self.near.by_peer.remove(peer);
        self.near.spoke_last.take_if(|last| last == peer);
        self.near.standing.insert(
            *peer,
            Standing::Refused {
                until: now + AFTER_END,
            },
        );
        self.close_and_read(now, *peer, ends, loans);
        self.near.end_loans(ring.get_mut());
        let Ring {
            peer,
            bell,
            theirs,
            processor,
            ..
        } = ring.get();
        if let Some(link) = self.link_mut(*peer) {
            link.trim();
        }
        let wake = bell.get().ring(*theirs, true);
        if wake != Wake::Nobody {
            self.near.wakes.push(Call {
                bell: bell.clone(),
                wake,
                processor: *processor,
            });
        }
        if let Some(bell) = &self.near.bell {
            bell.get().hush(slot);
        }
        self.near.waits_no_more(slot);
        self.news_of_routes();
    }

    /// Closes this end of a ring and reads what the peer wrote before it could notice that. A peer
    /// that has exited since will not send it again.
    fn close_and_read(&mut self, now: Micros, peer: Tid, ends: &mut Ends, loans: &Loans) {
        ends.writer.close();
        ends.reader.close();
        let is_full = self.inbox_is_full();
        let Some(link) = self.link_mut(peer).filter(|_| !is_full) else {
            return;
        };
        // Bounded, so that a peer that keeps writing nevertheless cannot keep this task busy.
        let mut heard = 0;
        while heard < HEARD_BYTES_MAX
            && let Ok(Some((bytes, _))) = take_record(&mut ends.reader, loans, now, link)
        {
            heard += bytes;
        }
        if heard > 0 {
            self.deliver_from(peer);
            self.release_held(peer);
        }
    }

    /// Reads and writes what is possible, then closes all rings: from here on everything goes
    /// through the daemon, in order.
    pub(in crate::runtime) fn end_rings(&mut self, now: Micros) {
        for slot in 0..self.near.slots.len() {
            self.drain_all(now, slot);
            self.pump_ring(now, slot);
            self.end_ring(now, slot);
        }
        let offered: Vec<Tid> = self.near.offered().map(|(peer, _)| peer).collect();
        for peer in offered {
            self.drop_offer(now, peer, Standing::Sent(0));
        }
    }

    /// Releases all memory that is shared with other processes.
    pub(in crate::runtime) fn unshare(&mut self) {
        self.near.standing.clear();
        self.near.slots.clear();
        self.near.waiting.clear();
        self.near.end_store();
        self.near.shared = None;
        if let Some(bell) = &self.near.bell {
            // Fails without memory for a private page. The task then keeps the shared page, to
            // which no peer writes anymore.
            let _ = bell.get().unshare();
        }
    }

    /// Closes the ring and forgets the setup with a peer that has ended or migrated.
    pub(in crate::runtime) fn forget_near(&mut self, now: Micros, peer: Tid) {
        self.drain_peer(now, peer);
        if let Some(slot) = self.near.slot(peer) {
            self.end_ring(now, slot);
            self.back_to_daemon(now, peer);
        }
        self.drop_offer(now, peer, Standing::Sent(0));
        self.near.standing.remove(&peer);
    }

    /// Drops unanswered offers that have expired, and closes idle rings.
    pub(in crate::runtime) fn wake_near(&mut self, now: Micros) {
        let late: Vec<Tid> = self
            .near
            .offered()
            .filter(|(_, until)| *until <= now)
            .map(|(peer, _)| peer)
            .collect();
        for peer in late {
            self.drop_offer(
                now,
                peer,
                Standing::Refused {
                    until: now + REFUSAL,
                },
            );
        }
        if self.near.idle_look.is_some_and(|due| due <= now) {
            let idle = |(peer, slot): (&Tid, &usize)| match &self.near.slots[*slot] {
                Slot::Ring(ring) if now.since(ring.get().used) >= RING_IDLE_MAX => {
                    Some((*peer, *slot))
                }
                _ => None,
            };
            let idle: Vec<(Tid, usize)> = self.near.by_peer.iter().filter_map(idle).collect();
            for (peer, slot) in idle {
                self.end_ring(now, slot);
                self.back_to_daemon(now, peer);
            }
            self.near.end_idle_store(now);
            self.near.idle_look = (!self.near.by_peer.is_empty()).then(|| now + IDLE_LOOK);
        }
        if let Some(due) = self
            .near
            .offered()
            .map(|(_, until)| until)
            .chain(self.near.idle_look)
            .min()
        {
            self.wake_at(due);
        }
    }
}
