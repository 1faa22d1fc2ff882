//! Agreement between tasks about direct routes, as a state machine without I/O.
//!
//! - Before the first message to a peer on an explicit route (`PvmRouteDirect`), a task sends an
//!   offer. A peer that refused receives no second offer. An established route carries messages in
//!   both directions.
//! - An automatic route is requested by the library ([`super::automatic_routes`]). The program is
//!   notified neither of the route nor of its end. If the program requests a route to the same
//!   peer, an explicit route replaces the automatic one.
//! - When a route breaks, or one of the two tasks migrates, the next message sends a new offer.
//! - On the same host the acceptance of an offer is sufficient, because the tasks have their rings.
//!   Between two hosts the peer that accepts connects to the task that offers.

use super::automatic_routes::FailureScope;
use rustc_hash::FxHashMap;
use sempa_proto::route::OfferId;
use sempa_proto::{Micros, PvmError, PvmResult, Tid};
use std::collections::VecDeque;

/// Timeout for the answer to an offer. After the timeout the peer counts as having refused.
pub(crate) const OFFER_ANSWER_TIMEOUT: Micros = Micros::from_secs(10);
/// Maximum number of peers with an agreement or an offer in progress.
pub(crate) const AGREEMENTS_MAX: usize = 1 << 16;
/// Maximum number of a program's requests for notifications of new routes, and of its requests for
/// notifications of route ends.
pub(crate) const ROUTE_WATCHES_MAX: usize = 4096;

/// Origin of the request for a direct route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteKind {
    /// The program of at least one of the two tasks (`PvmRouteDirect`).
    Explicit,
    /// The libraries of the two tasks, without a request of a program.
    Automatic,
}

/// Input of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteEvent {
    /// The program sends a message to this peer and wants a direct route.
    RouteRequested(Tid),
    /// The library wants a direct route to this peer on another host.
    AutomaticRouteDue(Tid),
    /// The automatic route to this peer is given up for another one.
    RouteGivenUp(Tid),
    /// The program or the user forbids automatic routes from now on.
    AutomaticForbidden,
    /// A peer's offer has arrived.
    OfferReceived {
        peer: Tid,
        id: OfferId,
        same_host: bool,
        kind: RouteKind,
        /// True if the library accepts an automatic route now.
        accepts_automatic: bool,
    },
    /// A peer has accepted this task's offer.
    OfferAccepted {
        peer: Tid,
        id: OfferId,
        same_host: bool,
    },
    /// A peer has refused this task's offer.
    OfferRefused {
        peer: Tid,
        id: OfferId,
    },
    /// The connection to the peer is established.
    Connected(Tid),
    /// The connection to the peer could not be established.
    ConnectFailed(Tid),
    /// The connection to the peer has ended.
    ConnectionEnded(Tid),
    PeerMigrated(Tid),
    PeerEnded(Tid),
    /// This task quiesces or exits: all routes must be closed.
    CloseAll,
    /// The time that [`RouteAgreements::next_wakeup`] returned has been reached.
    TimerExpired,
}

/// Action that the caller must execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteOutput {
    /// Listen, and send an offer to this peer.
    Offer {
        peer: Tid,
        id: OfferId,
        kind: RouteKind,
    },
    /// Stop listening for this offer.
    WithdrawOffer {
        id: OfferId,
    },
    /// Accept the offer of a peer on this host.
    Accept {
        peer: Tid,
        id: OfferId,
    },
    /// Connect to the addresses in the peer's offer, and accept the offer.
    Dial {
        peer: Tid,
        id: OfferId,
    },
    /// The peer has accepted this offer: accept the connection of the peer.
    ExpectConnection {
        id: OfferId,
    },
    Refuse {
        peer: Tid,
        id: OfferId,
    },
    /// Close the connection to this peer, established or in progress.
    Close {
        peer: Tid,
    },
    /// The automatic route to this peer is established.
    AutomaticEstablished {
        peer: Tid,
    },
    /// The attempt to establish an automatic route to this peer has failed.
    AutomaticFailed {
        peer: Tid,
        scope: FailureScope,
    },
    /// The automatic route to this peer has ended. `is_given_up`: this task has closed it.
    AutomaticEnded {
        peer: Tid,
        is_given_up: bool,
    },
    /// Deliver a notification with two integers to the program.
    Notify {
        ctx: i32,
        tag: i32,
        body: [i32; 2],
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agreement {
    Offered {
        id: OfferId,
        kind: RouteKind,
        /// True if the peer has accepted the offer and connects.
        is_accepted: bool,
        deadline: Micros,
    },
    Connecting {
        id: OfferId,
        kind: RouteKind,
        deadline: Micros,
    },
    Established(RouteKind),
    /// There is no explicit route. An automatic route that fails leaves no agreement.
    Refused,
}

impl Agreement {
    /// Returns the kind of a route that is established or in setup.
    fn kind(self) -> Option<RouteKind> {
        match self {
            Self::Offered { kind, .. }
            | Self::Connecting { kind, .. }
            | Self::Established(kind) => Some(kind),
            Self::Refused => None,
        }
    }

    /// Returns the time at which the setup fails.
    fn deadline(self) -> Option<Micros> {
        match self {
            Self::Offered { deadline, .. } | Self::Connecting { deadline, .. } => Some(deadline),
            Self::Established(_) | Self::Refused => None,
        }
    }
}

/// Request of the program to be notified of new routes.
#[derive(Debug)]
struct NewRouteWatch {
    ctx: i32,
    tag: i32,
    /// Number of notifications that may still be sent; negative if unlimited.
    remaining_notifications: i32,
    fd: i32,
}

/// State of this task's agreements with all its peers, and the requests of the program for
/// notifications.
#[derive(Debug)]
pub(crate) struct RouteAgreements {
    own_tid: Tid,
    /// False if offers of peers are refused.
    pub(crate) accepts_offers: bool,
    last_offer_id: u64,
    agreements: FxHashMap<Tid, Agreement>,
    new_route_watches: Vec<NewRouteWatch>,
    /// Requests for a notification of the end of a route: peer, message context and message tag.
    route_end_watches: Vec<(Tid, i32, i32)>,
    outputs: VecDeque<RouteOutput>,
}

impl RouteAgreements {
    pub(crate) fn new(own_tid: Tid) -> Self {
        let (agreements_by_peer, watches, watches_of_ends, output_queue) = (
            FxHashMap::default(),
            Vec::new(),
            Vec::new(),
            VecDeque::new(),
        );
        Self {
            own_tid,
            accepts_offers: true,
            last_offer_id: 0,
            agreements: agreements_by_peer,
            new_route_watches: watches,
            route_end_watches: watches_of_ends,
            outputs: output_queue,
        }
    }

    /// True if a message on an explicit route need not wait for an answer, because the route is
    /// established or was refused.
    pub(crate) fn is_settled(&self, peer: Tid) -> bool {
        matches!(
            self.agreements.get(&peer),
            Some(Agreement::Established(RouteKind::Explicit) | Agreement::Refused)
        )
    }

    /// True if the route to this peer is automatic.
    pub(crate) fn is_automatic(&self, peer: Tid) -> bool {
        self.agreements.get(&peer) == Some(&Agreement::Established(RouteKind::Automatic))
    }

    /// True if there is a route to this peer, or one in setup, or if the peer has refused an
    /// explicit route.
    pub(crate) fn has_agreement(&self, peer: Tid) -> bool {
        self.agreements.contains_key(&peer)
    }

    /// Returns the number of automatic routes that are established or in setup.
    pub(crate) fn automatic_count(&self) -> usize {
        let is_automatic = |agreement: &&Agreement| agreement.kind() == Some(RouteKind::Automatic);
        self.agreements.values().filter(is_automatic).count()
    }

    /// Returns the time at which the caller must report [`RouteEvent::TimerExpired`]; `None` if no
    /// answer is awaited.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        self.agreements
            .values()
            .filter_map(|agreement| agreement.deadline())
            .min()
    }

    /// Removes and returns the next queued action; `None` if no action is queued.
    pub(crate) fn next_output(&mut self) -> Option<RouteOutput> {
        self.outputs.pop_front()
    }

    /// Requests a notification of each of the next `route_count` new routes. A negative count
    /// requests all notifications; 0 cancels the request.
    ///
    /// # Errors
    /// `OutOfRes` if the maximum number of requests is reached.
    pub(crate) fn watch_new_routes(
        &mut self,
        ctx: i32,
        tag: i32,
        route_count: i32,
        fd: i32,
    ) -> PvmResult<()> {
        self.new_route_watches
            .retain(|watch| (watch.ctx, watch.tag) != (ctx, tag));
        if self.new_route_watches.len() >= ROUTE_WATCHES_MAX {
            return Err(PvmError::OutOfRes);
        }
        if route_count != 0 {
            self.new_route_watches.push(NewRouteWatch {
                ctx,
                tag,
                remaining_notifications: route_count,
                fd,
            });
        }
        Ok(())
    }

    /// Requests a notification of the end of the route to this peer. Without a route the
    /// notification is sent immediately.
    ///
    /// # Errors
    /// `OutOfRes` if the maximum number of requests is reached.
    pub(crate) fn watch_route_end(&mut self, peer: Tid, ctx: i32, tag: i32) -> PvmResult<()> {
        if self.route_end_watches.len() >= ROUTE_WATCHES_MAX {
            return Err(PvmError::OutOfRes);
        }
        self.route_end_watches.push((peer, ctx, tag));
        if self.agreements.get(&peer) != Some(&Agreement::Established(RouteKind::Explicit)) {
            self.notify_end(peer);
        }
        Ok(())
    }

    /// Cancels a request of [`RouteAgreements::watch_route_end`].
    pub(crate) fn unwatch_route_end(&mut self, peer: Tid, ctx: i32, tag: i32) {
        if let Some(index) = self
            .route_end_watches
            .iter()
            .position(|watch| *watch == (peer, ctx, tag))
        {
            self.route_end_watches.remove(index);
        }
    }

    /// Handles an event and queues the resulting actions for [`RouteAgreements::next_output`].
    pub(crate) fn handle_event(&mut self, now: Micros, event: RouteEvent) {
        match event {
            RouteEvent::RouteRequested(peer) => self.handle_request(now, peer),
            RouteEvent::AutomaticRouteDue(peer) => {
                if !self.agreements.contains_key(&peer) {
                    self.offer(now, peer, RouteKind::Automatic);
                }
            }
            RouteEvent::RouteGivenUp(peer) => self.give_up_automatic(peer),
            RouteEvent::AutomaticForbidden => {
                let peers: Vec<Tid> = self.agreements.keys().copied().collect();
                peers
                    .into_iter()
                    .for_each(|peer| self.give_up_automatic(peer));
            }
            RouteEvent::OfferReceived {
                peer,
                id,
                same_host,
                kind,
                accepts_automatic,
            } => self.handle_offer(now, (peer, id, kind), same_host, accepts_automatic),
            RouteEvent::OfferAccepted {
                peer,
                id,
                same_host,
            } => self.handle_acceptance(peer, id, same_host),
            RouteEvent::OfferRefused { peer, id } => {
                if matches!(self.agreements.get(&peer), Some(Agreement::Offered { id: open_offer_id, .. }) if *open_offer_id == id)
                {
                    self.handle_failure(peer);
                }
            }
            RouteEvent::Connected(peer) => {
                if let Some(Agreement::Offered { kind, .. } | Agreement::Connecting { kind, .. }) =
                    self.agreements.get(&peer)
                {
                    let kind = *kind;
                    self.establish(peer, kind);
                }
            }
            RouteEvent::ConnectFailed(peer) => self.handle_failure(peer),
            RouteEvent::ConnectionEnded(peer) => self.handle_route_end(peer),
            RouteEvent::PeerMigrated(peer) => {
                if let Some(Agreement::Established(_)) = self.agreements.get(&peer) {
                    self.handle_route_end(peer);
                }
            }
            RouteEvent::PeerEnded(peer) => {
                self.cancel_attempt(peer);
                self.handle_route_end(peer);
            }
            RouteEvent::CloseAll => self.close_all(),
            RouteEvent::TimerExpired => {
                let is_expired = |agreement: &Agreement| {
                    agreement.deadline().is_some_and(|deadline| deadline <= now)
                };
                let expired_peers: Vec<Tid> = self
                    .agreements
                    .iter()
                    .filter(|(_, agreement)| is_expired(agreement))
                    .map(|(peer, _)| *peer)
                    .collect();
                expired_peers
                    .into_iter()
                    .for_each(|peer| self.handle_failure(peer));
            }
        }
    }

    fn handle_request(&mut self, now: Micros, peer: Tid) {
        match self.agreements.get(&peer) {
            // The program waits for the end of the attempt and then requests the route again.
            Some(Agreement::Connecting {
                kind: RouteKind::Automatic,
                ..
            }) => return,
            // The peer's program must be notified of the explicit route, so a new offer is sent.
            Some(agreement) if agreement.kind() == Some(RouteKind::Automatic) => {
                self.give_up_automatic(peer)
            }
            Some(_) => return,
            None => {}
        }
        self.offer(now, peer, RouteKind::Explicit);
    }

    fn offer(&mut self, now: Micros, peer: Tid, kind: RouteKind) {
        if peer == self.own_tid || !peer.is_task() || self.agreements.len() >= AGREEMENTS_MAX {
            return;
        }
        self.last_offer_id += 1;
        let id = OfferId(self.last_offer_id);
        self.agreements.insert(
            peer,
            Agreement::Offered {
                id,
                kind,
                is_accepted: false,
                deadline: now + OFFER_ANSWER_TIMEOUT,
            },
        );
        self.outputs
            .push_back(RouteOutput::Offer { peer, id, kind });
    }

    fn handle_offer(
        &mut self,
        now: Micros,
        (peer, id, mut kind): (Tid, OfferId, RouteKind),
        same_host: bool,
        accepts_automatic: bool,
    ) {
        match self.agreements.get_mut(&peer) {
            // Both tasks sent offers at the same time. The offer of the task with the smaller tid
            // counts. The route is explicit if one of the two offers is.
            Some(Agreement::Offered { kind: own_kind, .. })
                if self.accepts_offers && self.own_tid < peer =>
            {
                if kind == RouteKind::Explicit {
                    *own_kind = kind;
                }
                return;
            }
            // A peer with an established route sends an offer only if its connection was lost.
            Some(Agreement::Established(_)) => self.handle_route_end(peer),
            Some(Agreement::Offered { kind: own_kind, .. }) => {
                if *own_kind == RouteKind::Explicit {
                    kind = RouteKind::Explicit;
                }
                self.cancel_attempt(peer);
            }
            Some(_) => self.cancel_attempt(peer),
            None => {}
        }
        // Tasks on one host have their rings and need no automatic route.
        let is_refused = kind == RouteKind::Automatic && (same_host || !accepts_automatic);
        if is_refused || !self.accepts_offers || self.agreements.len() >= AGREEMENTS_MAX {
            return self.outputs.push_back(RouteOutput::Refuse { peer, id });
        }
        if same_host {
            self.outputs.push_back(RouteOutput::Accept { peer, id });
            self.establish(peer, kind);
        } else {
            self.agreements.insert(
                peer,
                Agreement::Connecting {
                    id,
                    kind,
                    deadline: now + OFFER_ANSWER_TIMEOUT,
                },
            );
            self.outputs.push_back(RouteOutput::Dial { peer, id });
        }
    }

    fn handle_acceptance(&mut self, peer: Tid, id: OfferId, same_host: bool) {
        match self.agreements.get_mut(&peer) {
            Some(Agreement::Offered {
                id: open_offer_id,
                kind,
                ..
            }) if *open_offer_id == id && same_host => {
                let kind = *kind;
                self.outputs.push_back(RouteOutput::WithdrawOffer { id });
                self.establish(peer, kind);
            }
            Some(Agreement::Offered {
                id: open_offer_id,
                is_accepted,
                ..
            }) if *open_offer_id == id => {
                *is_accepted = true;
                self.outputs.push_back(RouteOutput::ExpectConnection { id });
            }
            _ => {}
        }
    }

    /// Cancels an offer or connection attempt to this peer.
    fn cancel_attempt(&mut self, peer: Tid) {
        match self.agreements.get(&peer) {
            Some(Agreement::Offered { id, .. }) => self
                .outputs
                .push_back(RouteOutput::WithdrawOffer { id: *id }),
            Some(Agreement::Connecting { .. }) => {
                self.outputs.push_back(RouteOutput::Close { peer })
            }
            Some(Agreement::Established(_) | Agreement::Refused) | None => return,
        }
        self.agreements.remove(&peer);
    }

    /// Records a failed attempt. For an explicit route the failure counts as a refusal. Otherwise
    /// every further message would send a new offer and wait for its answer.
    fn handle_failure(&mut self, peer: Tid) {
        let Some(agreement) = self.agreements.get(&peer).copied() else {
            return;
        };
        let (kind, scope) = match agreement {
            Agreement::Offered {
                kind,
                is_accepted: false,
                ..
            } => (kind, FailureScope::Peer),
            Agreement::Offered { kind, .. } | Agreement::Connecting { kind, .. } => {
                (kind, FailureScope::Host)
            }
            Agreement::Established(_) | Agreement::Refused => return,
        };
        self.cancel_attempt(peer);
        if kind == RouteKind::Explicit {
            self.agreements.insert(peer, Agreement::Refused);
            return;
        }
        if let Agreement::Connecting { id, .. } = agreement {
            // The peer need not wait for the connection.
            self.outputs.push_back(RouteOutput::Refuse { peer, id });
        }
        self.outputs
            .push_back(RouteOutput::AutomaticFailed { peer, scope });
    }

    fn establish(&mut self, peer: Tid, kind: RouteKind) {
        self.agreements.insert(peer, Agreement::Established(kind));
        if kind == RouteKind::Automatic {
            return self
                .outputs
                .push_back(RouteOutput::AutomaticEstablished { peer });
        }
        for watch in &mut self.new_route_watches {
            if watch.remaining_notifications > 0 {
                watch.remaining_notifications -= 1;
            }
            let NewRouteWatch { ctx, tag, fd, .. } = *watch;
            self.outputs.push_back(RouteOutput::Notify {
                ctx,
                tag,
                body: [peer.raw(), fd],
            });
        }
        self.new_route_watches
            .retain(|watch| watch.remaining_notifications != 0);
    }

    /// Removes the route, if there was one. A later message may request another route.
    fn handle_route_end(&mut self, peer: Tid) {
        let Some(Agreement::Established(kind)) = self.agreements.remove(&peer) else {
            return;
        };
        self.outputs.push_back(RouteOutput::Close { peer });
        if kind == RouteKind::Explicit {
            self.notify_end(peer);
        } else {
            self.outputs.push_back(RouteOutput::AutomaticEnded {
                peer,
                is_given_up: false,
            });
        }
    }

    /// Closes the automatic route to this peer, or ends its setup.
    fn give_up_automatic(&mut self, peer: Tid) {
        let Some(agreement) = self.agreements.get(&peer).copied() else {
            return;
        };
        if agreement.kind() != Some(RouteKind::Automatic) {
            return;
        }
        if let Agreement::Established(_) = agreement {
            self.agreements.remove(&peer);
            self.outputs.push_back(RouteOutput::Close { peer });
            self.outputs.push_back(RouteOutput::AutomaticEnded {
                peer,
                is_given_up: true,
            });
        } else {
            self.cancel_attempt(peer);
        }
    }

    fn notify_end(&mut self, peer: Tid) {
        for (_, ctx, tag) in self
            .route_end_watches
            .extract_if(.., |(watched_peer, ..)| *watched_peer == peer)
        {
            self.outputs.push_back(RouteOutput::Notify {
                ctx,
                tag,
                body: [peer.raw(), -1],
            });
        }
    }

    fn close_all(&mut self) {
        let peers: Vec<Tid> = self.agreements.keys().copied().collect();
        for peer in peers {
            self.cancel_attempt(peer);
            if let Some(Agreement::Established(_)) = self.agreements.get(&peer) {
                self.handle_route_end(peer);
            }
        }
    }
}

#[cfg(test)]
mod tests;
