//! Setup and teardown of rings. The two tasks exchange route messages, which the daemon passes on.
//!
//! 1. After a first message through the daemon, one task offers a ring: it sends the ring's memory
//!    and its doorbell.
//! 2. The peer accepts and sends its own doorbell, or refuses. Without an answer within
//!    [`OFFER_TIMEOUT`] the offer is dropped.
//! 3. Either task closes the ring when it is idle, when a task ends or migrates, or when the peer
//!    violates the protocol. The link then continues through the daemon.

use super::super::core::Core;
use super::super::process::ProcessOwned;
use super::super::zero_copy::Leases;
use super::{PendingWake, Ring, RingSetup, RingSlot, UNREAD_BYTES_MAX, take_record};
use sempa_proto::frame::encode_control;
use sempa_proto::link::LinkEvent;
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::ToDaemon;
use sempa_proto::{Micros, Tid};
use sempa_ring::doorbell::{SLOTS_MAX, WakeTarget};
use sempa_ring::shared_memory::{PeerDoorbell, RingPair, create_ring_pair, map_peer_ring_pair};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Number of messages that go to a peer through the daemon before a ring is offered. Many pairs of
/// tasks exchange only one message.
const MESSAGES_BEFORE_OFFER: u32 = 1;
/// Time for which an offer is valid. A stopped task does not answer; after this time the daemon
/// carries the messages to it.
const OFFER_TIMEOUT: Micros = Micros::from_millis(500);
/// Time for which a refusal is remembered.
const REFUSAL_WINDOW: Micros = Micros::from_secs(30);
/// Time for which a refusal is remembered if the peer is on another host and its daemon refused.
/// The refusal is forgotten earlier if one of the two tasks migrates.
const REMOTE_REFUSAL_WINDOW: Micros = Micros::from_secs(600);
/// Time without traffic after which a ring is closed.
const RING_IDLE_TIMEOUT: Micros = Micros::from_secs(60);
const IDLE_CHECK_INTERVAL: Micros = Micros::from_secs(10);
/// Delay of the next offer after a ring has ended, because the peer may be exiting or migrating.
const REOFFER_DELAY: Micros = Micros::from_secs(1);

impl Core {
    // ---- setup

    /// Offers a ring to the peer if [`MESSAGES_BEFORE_OFFER`] messages have preceded and no refusal
    /// is remembered. Called after a message to the peer was sent through the daemon.
    pub(in crate::runtime) fn offer_ring_if_due(&mut self, now: Micros, peer: Tid) {
        self.shm.expect_from_daemon();
        if self.shm.doorbell.is_none()
            || !self.is_connected()
            || self.has_disabled_windows()
            || self.direct.has_route(peer)
        {
            return;
        }
        match self
            .shm
            .setups
            .entry(peer)
            .or_insert(RingSetup::NotOffered(0))
        {
            RingSetup::NotOffered(count) if *count < MESSAGES_BEFORE_OFFER => *count += 1,
            RingSetup::Refused { retry_at: until } if *until > now => {}
            RingSetup::Offered { .. } => {}
            RingSetup::NotOffered(_) | RingSetup::Refused { .. } => {
                if !self.offer_ring(now, peer) {
                    self.shm.setups.insert(
                        peer,
                        RingSetup::Refused {
                            retry_at: now + REFUSAL_WINDOW,
                        },
                    );
                }
            }
        }
    }

    fn offer_ring(&mut self, now: Micros, peer: Tid) -> bool {
        let (Some(doorbell), Some(slot)) = (self.shm.share_doorbell(), self.shm.free_slot()) else {
            return false;
        };
        let Ok((ends, rings)) = create_ring_pair() else {
            return false;
        };
        self.shm.last_offer_id += 1;
        let id = OfferId(self.shm.last_offer_id);
        let message = RouteMsg::RingOffer {
            id,
            slot: slot as u32,
        };
        if !self.send_route_message(
            peer,
            message,
            vec![Arc::new(ProcessOwned::new_fd(rings)), doorbell],
        ) {
            return false;
        }
        self.shm.slots[slot] = RingSlot::Reserved;
        let until = now + OFFER_TIMEOUT;
        self.shm.setups.insert(
            peer,
            RingSetup::Offered {
                id,
                slot,
                ends: ProcessOwned::new(ends),
                expires_at: until,
            },
        );
        self.schedule_timer(until);
        // Frames that are sent after the offer must not overtake frames that the daemon carries.
        if let Some(link) = self.link_mut(peer) {
            link.handle(now, LinkEvent::RouteDown);
        }
        true
    }

    pub(in crate::runtime) fn send_route_message(
        &mut self,
        to: Tid,
        message: RouteMsg,
        descriptors: Vec<Arc<ProcessOwned<OwnedFd>>>,
    ) -> bool {
        let Ok(frame) = encode_control(&ToDaemon::Route { to, message }) else {
            return false;
        };
        if !self.is_connected() {
            return false;
        }
        self.outbox.push_with_descriptors(frame, descriptors);
        true
    }

    /// Handles a route message of a peer about rings or pools.
    pub(in crate::runtime) fn handle_ring_message(
        &mut self,
        now: Micros,
        from: Tid,
        same_host: bool,
        message: &RouteMsg,
        descriptors: Vec<OwnedFd>,
    ) {
        match *message {
            RouteMsg::RingOffer { id, slot } => {
                if self.shm.is_offered(from) && self.tid() < from {
                    return; // Ours counts.
                }
                self.drop_offer(now, from, RingSetup::NotOffered(0));
                if self
                    .accept_ring(now, from, id, slot as usize, &descriptors)
                    .is_none()
                {
                    self.send_route_message(from, RouteMsg::RingRefuse { id }, Vec::new());
                }
            }
            RouteMsg::RingAccept { id, slot } => {
                self.handle_ring_acceptance(now, from, id, slot as usize, &descriptors)
            }
            RouteMsg::PoolOffer { .. } | RouteMsg::PoolAccept { .. } => {
                self.handle_pool_message(now, from, message, &descriptors);
            }
            RouteMsg::RingRefuse { id } => {
                if matches!(self.shm.setups.get(&from), Some(RingSetup::Offered { id: open, .. }) if *open == id)
                {
                    let until = now
                        + if same_host {
                            REFUSAL_WINDOW
                        } else {
                            REMOTE_REFUSAL_WINDOW
                        };
                    self.drop_offer(now, from, RingSetup::Refused { retry_at: until });
                }
            }
            _ => {}
        }
    }

    /// Handles a route message whose descriptors could not be received because this process has too
    /// many open descriptors. The daemon continues to carry the messages.
    pub(in crate::runtime) fn handle_lost_descriptors(
        &mut self,
        now: Micros,
        from: Tid,
        message: &RouteMsg,
    ) {
        match *message {
            RouteMsg::RingOffer { id, .. } => {
                self.send_route_message(from, RouteMsg::RingRefuse { id }, Vec::new());
            }
            // The peer has installed its ring and detects that this end is closed.
            RouteMsg::RingAccept { .. } => self.drop_offer(
                now,
                from,
                RingSetup::Refused {
                    retry_at: now + REFUSAL_WINDOW,
                },
            ),
            // Without the pool, large messages are copied through the ring.
            _ => {}
        }
    }

    /// Drops the offer to a peer and sets the state of the setup to `next_setup`. The daemon
    /// carries the queued messages.
    fn drop_offer(&mut self, now: Micros, peer: Tid, next_setup: RingSetup) {
        if !self.shm.is_offered(peer) {
            return;
        }
        if let Some(RingSetup::Offered { slot, ends, .. }) =
            self.shm.setups.insert(peer, next_setup)
        {
            self.shm.slots[slot] = RingSlot::Free;
            // The peer may have accepted and written to the ring, with its acceptance still in
            // transit.
            if let Some(mut ends) = ends.into_inner() {
                let loans = Leases::new(&ends);
                self.close_and_read(now, peer, &mut ends, &loans);
            }
        }
        self.bump_send_event_seq();
        self.reroute_through_daemon(now, peer);
    }

    pub(in crate::runtime) fn reroute_through_daemon(&mut self, now: Micros, peer: Tid) {
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
        peer_slot: usize,
        descriptors: &[OwnedFd],
    ) -> Option<()> {
        let [rings, bell] = descriptors else {
            return None;
        };
        if self.is_gone(peer) || self.has_disabled_windows() || peer_slot >= SLOTS_MAX {
            return None;
        }
        let own = self.shm.share_doorbell()?;
        let ends = map_peer_ring_pair(rings.as_fd()).ok()?;
        let bell = PeerDoorbell::map(bell.as_fd()).ok()?;
        if let Some(old) = self.shm.slot(peer) {
            self.end_ring(now, old);
        }
        let slot = self.shm.free_slot()?;
        // The acceptance is sent after all frames that the daemon already carries.
        if !self.send_route_message(
            peer,
            RouteMsg::RingAccept {
                id,
                slot: slot as u32,
            },
            vec![own],
        ) {
            return None;
        }
        self.install_ring(now, slot, Ring::new(now, peer, ends, bell, peer_slot));
        Some(())
    }

    fn handle_ring_acceptance(
        &mut self,
        now: Micros,
        peer: Tid,
        id: OfferId,
        peer_slot: usize,
        descriptors: &[OwnedFd],
    ) {
        let Some(RingSetup::Offered { id: open, .. }) = self.shm.setups.get(&peer) else {
            return;
        };
        let bell = descriptors
            .first()
            .and_then(|fd| PeerDoorbell::map(fd.as_fd()).ok());
        if *open != id {
            return;
        }
        let Some(bell) = bell.filter(|_| peer_slot < SLOTS_MAX) else {
            return self.drop_offer(
                now,
                peer,
                RingSetup::Refused {
                    retry_at: now + REFUSAL_WINDOW,
                },
            );
        };
        if let Some(RingSetup::Offered { slot, ends, .. }) = self.shm.setups.remove(&peer)
            && let Some(ends) = ends.into_inner()
        {
            self.install_ring(now, slot, Ring::new(now, peer, ends, bell, peer_slot));
        }
    }

    fn install_ring(&mut self, now: Micros, slot: usize, ring: Ring) {
        let peer = ring.peer;
        self.shm.slots[slot] = RingSlot::Ring(ProcessOwned::new(ring));
        self.shm.slots_by_peer.insert(peer, slot);
        self.shm.setups.remove(&peer);
        let check_at = *self
            .shm
            .next_idle_check
            .get_or_insert(now + IDLE_CHECK_INTERVAL);
        self.schedule_timer(check_at);
        let route = self.next_route();
        if let Some(link) = self.get_or_create_link(peer) {
            link.handle(now, LinkEvent::RouteUp(route));
        }
        self.bump_send_event_seq();
        self.pump_ring(now, slot);
        // The peer may have rung the doorbell before the slot was known.
        self.drain_ring(now, slot);
    }

    // ---- teardown

    /// Closes a ring. The peer first reads the records that it has not read yet, and then detects
    /// the end.
    pub(in crate::runtime) fn end_ring(&mut self, now: Micros, slot: usize) {
        let Some(place) = self.shm.slots.get_mut(slot) else {
            return;
        };
        let RingSlot::Ring(mut ring) = std::mem::replace(place, RingSlot::Free) else {
            return;
        };
        let Ring {
            peer,
            ends,
            leases: loans,
            ..
        } = ring.get_mut();
        self.shm.slots_by_peer.remove(peer);
        self.shm.expected_peer.take_if(|last| last == peer);
        self.shm.setups.insert(
            *peer,
            RingSetup::Refused {
                retry_at: now + REOFFER_DELAY,
            },
        );
        self.close_and_read(now, *peer, ends, loans);
        self.shm.end_leases(ring.get_mut());
        let Ring {
            peer,
            peer_doorbell: bell,
            peer_slot: theirs,
            peer_cpu: processor,
            ..
        } = ring.get();
        if let Some(link) = self.link_mut(*peer) {
            link.shrink_idle();
        }
        let wake = bell.get().notify(*theirs, true);
        if wake != WakeTarget::NoThread {
            self.shm.pending_wakes.push(PendingWake {
                doorbell: bell.clone(),
                wake,
                cpu: *processor,
            });
        }
        if let Some(bell) = &self.shm.doorbell {
            bell.get().clear(slot);
        }
        self.shm.remove_waiting(slot);
        self.bump_send_event_seq();
    }

    /// Closes this end of a ring and reads what the peer wrote before it detected that. If the peer
    /// has exited, it cannot send these records again.
    fn close_and_read(&mut self, now: Micros, peer: Tid, ends: &mut RingPair, leases: &Leases) {
        ends.writer.close();
        ends.reader.close();
        let is_full = self.inbox_is_full();
        let Some(link) = self.link_mut(peer).filter(|_| !is_full) else {
            return;
        };
        // Bounded, because a peer that violates the protocol may keep writing.
        let mut read = 0;
        while read < UNREAD_BYTES_MAX
            && let Ok(Some((bytes, _))) = take_record(&mut ends.reader, leases, now, link)
        {
            read += bytes;
        }
        if read > 0 {
            self.deliver_messages_from(peer);
            self.release_deferred(peer);
        }
    }

    /// Reads and writes what is possible, then closes all rings. All later frames go through the
    /// daemon, in order.
    pub(in crate::runtime) fn end_rings(&mut self, now: Micros) {
        for slot in 0..self.shm.slots.len() {
            self.drain_ring_fully(now, slot);
            self.pump_ring(now, slot);
            self.end_ring(now, slot);
        }
        let offered: Vec<Tid> = self.shm.unanswered_offers().map(|(peer, _)| peer).collect();
        for peer in offered {
            self.drop_offer(now, peer, RingSetup::NotOffered(0));
        }
    }

    /// Releases all memory that is shared with other processes.
    pub(in crate::runtime) fn release_shared_memory(&mut self) {
        self.shm.setups.clear();
        self.shm.slots.clear();
        self.shm.waiting_slots.clear();
        self.shm.drop_pool();
        self.shm.doorbell_fd = None;
        if let Some(bell) = &self.shm.doorbell {
            // Fails without memory for a private page. The task then keeps the shared page, to
            // which no peer writes anymore.
            let _ = bell.get().unshare();
        }
    }

    /// Closes the ring to a peer that has ended or migrated, and drops the state of the setup with
    /// this peer.
    pub(in crate::runtime) fn remove_peer_ring(&mut self, now: Micros, peer: Tid) {
        self.drain_peer(now, peer);
        if let Some(slot) = self.shm.slot(peer) {
            self.end_ring(now, slot);
            self.reroute_through_daemon(now, peer);
        }
        self.drop_offer(now, peer, RingSetup::NotOffered(0));
        self.shm.setups.remove(&peer);
    }

    /// Drops unanswered offers that have expired, and closes idle rings.
    pub(in crate::runtime) fn run_shm_timers(&mut self, now: Micros) {
        let late: Vec<Tid> = self
            .shm
            .unanswered_offers()
            .filter(|(_, until)| *until <= now)
            .map(|(peer, _)| peer)
            .collect();
        for peer in late {
            self.drop_offer(
                now,
                peer,
                RingSetup::Refused {
                    retry_at: now + REFUSAL_WINDOW,
                },
            );
        }
        if self.shm.next_idle_check.is_some_and(|due| due <= now) {
            let idle = |(peer, slot): (&Tid, &usize)| match &self.shm.slots[*slot] {
                RingSlot::Ring(ring) if now.since(ring.get().last_used_at) >= RING_IDLE_TIMEOUT => {
                    Some((*peer, *slot))
                }
                _ => None,
            };
            let idle: Vec<(Tid, usize)> = self.shm.slots_by_peer.iter().filter_map(idle).collect();
            for (peer, slot) in idle {
                self.end_ring(now, slot);
                self.reroute_through_daemon(now, peer);
            }
            self.shm.drop_idle_pool(now);
            self.shm.next_idle_check =
                (!self.shm.slots_by_peer.is_empty()).then(|| now + IDLE_CHECK_INTERVAL);
        }
        if let Some(due) = self
            .shm
            .unanswered_offers()
            .map(|(_, until)| until)
            .chain(self.shm.next_idle_check)
            .min()
        {
            self.schedule_timer(due);
        }
    }
}
