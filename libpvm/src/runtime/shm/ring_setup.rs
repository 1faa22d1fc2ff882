//! Setup and teardown of rings. The two tasks exchange route messages through their daemon.
//!
//! 1. After a first message through the daemon, one task offers a ring: the task sends the memory
//!    of the ring and of its doorbell.
//! 2. The peer accepts and sends its own doorbell, or refuses. Without an answer within
//!    [`OFFER_TIMEOUT`] the offer is dropped.
//! 3. Either task closes the ring when the ring is idle, when a task ends or migrates, or when the
//!    peer violates the protocol. The link then continues through the daemon.

use super::super::core::Core;
use super::super::process::ProcessOwned;
use super::super::zero_copy::Leases;
use super::{PendingWake, Ring, RingSetup, RingSlot, UNREAD_BYTES_MAX, pass_next_record};
use sempa_proto::frame::encode_control;
use sempa_proto::link::LinkEvent;
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::ToDaemon;
use sempa_proto::{Micros, Tid};
use sempa_ring::doorbell::{SLOT_COUNT, WakeTarget};
use sempa_ring::shared_memory::{PeerDoorbell, RingPair, create_ring_pair, map_peer_ring_pair};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Number of messages that go to a peer through the daemon before a ring is offered. The number is
/// not zero, because many pairs of tasks exchange only one message.
const MESSAGES_BEFORE_OFFER: u32 = 1;
/// Time for which an offer is valid. A stopped task does not answer; after this time the daemon
/// carries the messages to the stopped task.
const OFFER_TIMEOUT: Micros = Micros::from_millis(500);
/// Time after a refusal during which no new offer is sent.
const REFUSAL_TIMEOUT: Micros = Micros::from_secs(30);
/// Time after a refusal during which no new offer is sent, if a daemon refused because the peer is
/// on another host. The time ends earlier if one of the two tasks migrates.
const REMOTE_REFUSAL_TIMEOUT: Micros = Micros::from_secs(600);
/// Time without traffic after which a ring is closed.
const RING_IDLE_TIMEOUT: Micros = Micros::from_secs(60);
const IDLE_CHECK_INTERVAL: Micros = Micros::from_secs(10);
/// Delay of the next offer after a ring has ended. The delay is necessary because the peer may be
/// exiting or migrating.
const REOFFER_DELAY: Micros = Micros::from_secs(1);

impl Core {
    // ---- setup

    /// Offers a ring to the peer if [`MESSAGES_BEFORE_OFFER`] messages to the peer have preceded
    /// and no refusal is in effect. Called after a message to the peer was sent through the daemon.
    pub(in crate::runtime) fn offer_ring_if_due(&mut self, now: Micros, peer: Tid) {
        self.shm_routes.expect_message_at_socket();
        if self.shm_routes.doorbell.is_none()
            || !self.is_connected()
            || self.has_disabled_windows()
            || self.direct_routes.has_route(peer)
        {
            return;
        }
        match self
            .shm_routes
            .setups
            .entry(peer)
            .or_insert(RingSetup::NotOffered(0))
        {
            RingSetup::NotOffered(message_count) if *message_count < MESSAGES_BEFORE_OFFER => {
                *message_count += 1
            }
            RingSetup::Refused {
                retry_at: retry_time,
            }
            | RingSetup::Impossible {
                retry_at: retry_time,
            } if *retry_time > now => {}
            RingSetup::Offered { .. } => {}
            RingSetup::NotOffered(_) | RingSetup::Refused { .. } | RingSetup::Impossible { .. } => {
                if !self.offer_ring(now, peer) {
                    self.shm_routes.setups.insert(
                        peer,
                        RingSetup::Impossible {
                            retry_at: now + REFUSAL_TIMEOUT,
                        },
                    );
                }
            }
        }
    }

    fn offer_ring(&mut self, now: Micros, peer: Tid) -> bool {
        let (Some(doorbell), Some(slot)) = (
            self.shm_routes.share_doorbell(),
            self.shm_routes.find_free_slot(),
        ) else {
            return false;
        };
        let Ok((own_rings, ring_memory)) = create_ring_pair() else {
            return false;
        };
        self.shm_routes.last_offer_id += 1;
        let id = OfferId(self.shm_routes.last_offer_id);
        let message = RouteMsg::RingOffer {
            id,
            slot: slot as u32,
        };
        if !self.send_route_message(
            peer,
            message,
            vec![Arc::new(ProcessOwned::from_fd(ring_memory)), doorbell],
        ) {
            return false;
        }
        self.shm_routes.slots[slot] = RingSlot::Reserved;
        let expiry = now + OFFER_TIMEOUT;
        self.shm_routes.setups.insert(
            peer,
            RingSetup::Offered {
                id,
                slot,
                ring_pair: ProcessOwned::new(own_rings),
                expires_at: expiry,
            },
        );
        self.schedule_timer(expiry);
        // Frames that are sent after the offer must not overtake frames that the daemon carries.
        if let Some(link) = self.link_mut(peer) {
            link.handle_event(now, LinkEvent::RouteDown);
        }
        true
    }

    pub(in crate::runtime) fn send_route_message(
        &mut self,
        receiver: Tid,
        message: RouteMsg,
        descriptors: Vec<Arc<ProcessOwned<OwnedFd>>>,
    ) -> bool {
        let Ok(frame) = encode_control(&ToDaemon::Route { receiver, message }) else {
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
        sender: Tid,
        same_host: bool,
        message: &RouteMsg,
        descriptors: Vec<OwnedFd>,
    ) {
        match *message {
            RouteMsg::RingOffer { id, slot } => {
                if self.shm_routes.has_open_offer(sender) && self.tid() < sender {
                    return; // Ours counts.
                }
                self.drop_offer(now, sender, RingSetup::NotOffered(0));
                if self
                    .accept_ring(now, sender, id, slot as usize, &descriptors)
                    .is_none()
                {
                    self.send_route_message(sender, RouteMsg::RingRefuse { id }, Vec::new());
                }
            }
            RouteMsg::RingAccept { id, slot } => {
                self.handle_ring_acceptance(now, sender, id, slot as usize, &descriptors)
            }
            RouteMsg::PoolOffer { .. } | RouteMsg::PoolAccept { .. } => {
                self.handle_pool_message(now, sender, message, &descriptors);
            }
            RouteMsg::RingRefuse { id } => {
                if matches!(self.shm_routes.setups.get(&sender), Some(RingSetup::Offered { id: open_offer_id, .. }) if *open_offer_id == id)
                {
                    let next_setup = if same_host {
                        RingSetup::Refused {
                            retry_at: now + REFUSAL_TIMEOUT,
                        }
                    } else {
                        RingSetup::Impossible {
                            retry_at: now + REMOTE_REFUSAL_TIMEOUT,
                        }
                    };
                    self.drop_offer(now, sender, next_setup);
                }
            }
            _ => {}
        }
    }

    /// Handles a route message whose descriptors were lost because this process has too many open
    /// descriptors. The daemon continues to carry the messages.
    pub(in crate::runtime) fn handle_lost_descriptors(
        &mut self,
        now: Micros,
        sender: Tid,
        message: &RouteMsg,
    ) {
        match *message {
            RouteMsg::RingOffer { id, .. } => {
                self.send_route_message(sender, RouteMsg::RingRefuse { id }, Vec::new());
            }
            // The peer has installed its ring. The peer will detect that this task has closed the
            // ring.
            RouteMsg::RingAccept { .. } => self.drop_offer(
                now,
                sender,
                RingSetup::Refused {
                    retry_at: now + REFUSAL_TIMEOUT,
                },
            ),
            // Without the pool, large messages are copied through the ring.
            _ => {}
        }
    }

    /// Drops the offer to a peer and sets the state of the setup to `next_setup`. The daemon
    /// carries the queued messages.
    fn drop_offer(&mut self, now: Micros, peer: Tid, next_setup: RingSetup) {
        if !self.shm_routes.has_open_offer(peer) {
            return;
        }
        if let Some(RingSetup::Offered {
            slot, ring_pair, ..
        }) = self.shm_routes.setups.insert(peer, next_setup)
        {
            self.shm_routes.slots[slot] = RingSlot::Free;
            // The peer may have accepted the offer and written to the ring while its acceptance is
            // still in transit.
            if let Some(mut ring_pair) = ring_pair.into_inner() {
                let leases = Leases::new(&ring_pair);
                self.close_and_drain(now, peer, &mut ring_pair, &leases);
            }
        }
        self.bump_send_event_seq();
        self.reroute_through_daemon(now, peer);
    }

    pub(in crate::runtime) fn reroute_through_daemon(&mut self, now: Micros, peer: Tid) {
        if !self.is_connected() {
            return;
        }
        let route = self.allocate_route();
        if let Some(link) = self.link_mut(peer) {
            link.handle_event(now, LinkEvent::RouteUp(route));
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
        let [ring_memory, peer_doorbell] = descriptors else {
            return None;
        };
        if self.has_peer_ended(peer) || self.has_disabled_windows() || peer_slot >= SLOT_COUNT {
            return None;
        }
        let own_doorbell = self.shm_routes.share_doorbell()?;
        let ring_pair = map_peer_ring_pair(ring_memory.as_fd()).ok()?;
        let peer_doorbell = PeerDoorbell::map(peer_doorbell.as_fd()).ok()?;
        if let Some(old_slot) = self.shm_routes.slot(peer) {
            self.close_ring(now, old_slot);
        }
        let slot = self.shm_routes.find_free_slot()?;
        // The daemon delivers the acceptance after all frames that the daemon has received earlier.
        if !self.send_route_message(
            peer,
            RouteMsg::RingAccept {
                id,
                slot: slot as u32,
            },
            vec![own_doorbell],
        ) {
            return None;
        }
        self.install_ring(
            now,
            slot,
            Ring::new(now, peer, ring_pair, peer_doorbell, peer_slot),
        );
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
        let Some(RingSetup::Offered {
            id: open_offer_id, ..
        }) = self.shm_routes.setups.get(&peer)
        else {
            return;
        };
        let peer_doorbell = descriptors
            .first()
            .and_then(|fd| PeerDoorbell::map(fd.as_fd()).ok());
        if *open_offer_id != id {
            return;
        }
        let Some(peer_doorbell) = peer_doorbell.filter(|_| peer_slot < SLOT_COUNT) else {
            return self.drop_offer(
                now,
                peer,
                RingSetup::Refused {
                    retry_at: now + REFUSAL_TIMEOUT,
                },
            );
        };
        if let Some(RingSetup::Offered {
            slot, ring_pair, ..
        }) = self.shm_routes.setups.remove(&peer)
            && let Some(ring_pair) = ring_pair.into_inner()
        {
            self.install_ring(
                now,
                slot,
                Ring::new(now, peer, ring_pair, peer_doorbell, peer_slot),
            );
        }
    }

    fn install_ring(&mut self, now: Micros, slot: usize, ring: Ring) {
        let peer = ring.peer;
        self.shm_routes.slots[slot] = RingSlot::Ring(ProcessOwned::new(ring));
        self.shm_routes.slots_by_peer.insert(peer, slot);
        self.shm_routes.setups.remove(&peer);
        let check_at = *self
            .shm_routes
            .next_idle_check_at
            .get_or_insert(now + IDLE_CHECK_INTERVAL);
        self.schedule_timer(check_at);
        let route = self.allocate_route();
        if let Some(link) = self.get_or_create_link(peer) {
            link.handle_event(now, LinkEvent::ConfirmingRouteUp(route));
        }
        self.bump_send_event_seq();
        self.pump_ring(now, slot);
        // The peer may have rung the doorbell before this slot had a ring.
        self.drain_ring(now, slot);
    }

    // ---- teardown

    /// Closes a ring, ends its leases, and wakes the peer. The peer first reads the remaining
    /// records and then detects the end of the ring.
    pub(in crate::runtime) fn close_ring(&mut self, now: Micros, slot: usize) {
        let Some(slot_entry) = self.shm_routes.slots.get_mut(slot) else {
            return;
        };
        let RingSlot::Ring(mut ring) = std::mem::replace(slot_entry, RingSlot::Free) else {
            return;
        };
        let Ring {
            peer,
            ring_pair: ring_ends,
            leases: ring_leases,
            ..
        } = ring.get_mut();
        self.shm_routes.slots_by_peer.remove(peer);
        self.shm_routes
            .expected_peer
            .take_if(|expected_tid| expected_tid == peer);
        self.shm_routes.setups.insert(
            *peer,
            RingSetup::Refused {
                retry_at: now + REOFFER_DELAY,
            },
        );
        self.close_and_drain(now, *peer, ring_ends, ring_leases);
        self.shm_routes.end_leases(ring.get_mut());
        let Ring {
            peer,
            peer_doorbell: doorbell,
            peer_slot: slot_at_peer,
            peer_cpu: last_cpu,
            ..
        } = ring.get();
        if let Some(link) = self.link_mut(*peer) {
            link.shrink_idle();
        }
        let wake_target = doorbell.get().notify(*slot_at_peer, true);
        if wake_target != WakeTarget::NoThread {
            self.shm_routes.pending_wakes.push(PendingWake {
                doorbell: doorbell.clone(),
                target: wake_target,
                cpu: *last_cpu,
            });
        }
        if let Some(doorbell) = &self.shm_routes.doorbell {
            doorbell.get().clear_slot(slot);
        }
        self.shm_routes.remove_waiting_slot(slot);
        self.bump_send_event_seq();
    }

    /// Closes this task's side of a ring, and reads the records that the peer wrote before the peer
    /// detected the end. A peer that has exited cannot send these records again.
    fn close_and_drain(
        &mut self,
        now: Micros,
        peer: Tid,
        ring_pair: &mut RingPair,
        leases: &Leases,
    ) {
        ring_pair.writer.close();
        ring_pair.reader.close();
        let is_full = self.inbox_is_full();
        let Some(link) = self.link_mut(peer).filter(|_| !is_full) else {
            return;
        };
        // The loop is bounded because a peer that violates the protocol may keep writing.
        let mut read_bytes = 0;
        while read_bytes < UNREAD_BYTES_MAX
            && let Ok(Some((bytes, _))) = pass_next_record(&mut ring_pair.reader, leases, now, link)
        {
            read_bytes += bytes;
        }
        if read_bytes > 0 {
            self.accept_messages_from(peer);
            self.deliver_deferred(peer);
        }
    }

    /// Reads and writes as many frames as possible, then closes all rings. All later frames go
    /// through the daemon, in order.
    pub(in crate::runtime) fn close_all_rings(&mut self, now: Micros) {
        for slot in 0..self.shm_routes.slots.len() {
            self.drain_ring_fully(now, slot);
            self.pump_ring(now, slot);
            self.close_ring(now, slot);
        }
        let offered_peers: Vec<Tid> = self
            .shm_routes
            .unanswered_offers()
            .map(|(peer, _)| peer)
            .collect();
        for peer in offered_peers {
            self.drop_offer(now, peer, RingSetup::NotOffered(0));
        }
    }

    /// Releases all rings and setups, this task's pool, and the shared memory of the doorbell.
    /// Leased messages in the pools of peers stay mapped.
    pub(in crate::runtime) fn release_shared_memory(&mut self) {
        self.shm_routes.setups.clear();
        self.shm_routes.slots.clear();
        self.shm_routes.waiting_slots.clear();
        self.shm_routes.drop_pool();
        self.shm_routes.doorbell_fd = None;
        if let Some(doorbell) = &self.shm_routes.doorbell {
            // Unsharing fails if there is no memory for a private page. The task then keeps using
            // the shared page, to which no peer writes any longer.
            let _ = doorbell.get().unshare();
        }
    }

    /// Handles the end or migration of a peer: reads the remaining records, closes the ring to the
    /// peer, and drops the state of the setup with this peer.
    pub(in crate::runtime) fn remove_peer_ring(&mut self, now: Micros, peer: Tid) {
        self.drain_peer(now, peer);
        if let Some(slot) = self.shm_routes.slot(peer) {
            self.close_ring(now, slot);
            self.reroute_through_daemon(now, peer);
        }
        self.drop_offer(now, peer, RingSetup::NotOffered(0));
        self.shm_routes.setups.remove(&peer);
    }

    /// Drops unanswered offers that have expired, closes idle rings, and drops an idle pool.
    pub(in crate::runtime) fn run_shm_timers(&mut self, now: Micros) {
        self.check_receipts(now);
        let expired_peers: Vec<Tid> = self
            .shm_routes
            .unanswered_offers()
            .filter(|(_, expiry)| *expiry <= now)
            .map(|(peer, _)| peer)
            .collect();
        for peer in expired_peers {
            self.drop_offer(
                now,
                peer,
                RingSetup::Refused {
                    retry_at: now + REFUSAL_TIMEOUT,
                },
            );
        }
        if self
            .shm_routes
            .next_idle_check_at
            .is_some_and(|check_at| check_at <= now)
        {
            let idle_rings = |(peer, slot): (&Tid, &usize)| match &self.shm_routes.slots[*slot] {
                RingSlot::Ring(ring) if now.since(ring.get().last_used_at) >= RING_IDLE_TIMEOUT => {
                    Some((*peer, *slot))
                }
                _ => None,
            };
            let idle_rings: Vec<(Tid, usize)> = self
                .shm_routes
                .slots_by_peer
                .iter()
                .filter_map(idle_rings)
                .collect();
            for (peer, slot) in idle_rings {
                self.close_ring(now, slot);
                self.reroute_through_daemon(now, peer);
            }
            self.shm_routes.drop_idle_pool(now);
            self.shm_routes.next_idle_check_at =
                (!self.shm_routes.slots_by_peer.is_empty()).then(|| now + IDLE_CHECK_INTERVAL);
        }
        if let Some(check_at) = self
            .shm_routes
            .unanswered_offers()
            .map(|(_, expiry)| expiry)
            .chain(self.shm_routes.next_idle_check_at)
            .chain(self.shm_routes.next_receipt_check_at)
            .min()
        {
            self.schedule_timer(check_at);
        }
    }
}
