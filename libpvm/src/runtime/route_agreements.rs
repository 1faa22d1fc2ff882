//! Agreement between tasks about direct routes (`PvmRouteDirect`), as a state machine without I/O.
//!
//! - Before the first message to a peer, a task sends an offer. A peer that refused receives no
//!   second offer. An established route carries messages in both directions.
//! - When a route breaks, or one of the two tasks migrates, the next message sends a new offer.
//! - On the same host the acceptance of an offer is sufficient, because the tasks have their rings.
//!   Between two hosts the peer that accepts connects to the task that offers.

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

/// Input of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteEvent {
    /// The program sends a message to this peer and wants a direct route.
    RouteRequested(Tid),
    /// A peer's offer has arrived.
    OfferReceived {
        peer: Tid,
        id: OfferId,
        same_host: bool,
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
    /// Deliver a notification with two integers to the program.
    Notify {
        ctx: i32,
        tag: i32,
        body: [i32; 2],
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agreement {
    Offered { id: OfferId, deadline: Micros },
    Connecting { deadline: Micros },
    Established,
    Refused,
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

    /// True if a message need not wait for an answer, because a route is established or was
    /// refused.
    pub(crate) fn is_settled(&self, peer: Tid) -> bool {
        matches!(
            self.agreements.get(&peer),
            Some(Agreement::Established | Agreement::Refused)
        )
    }

    /// Returns the time at which the caller must report [`RouteEvent::TimerExpired`]; `None` if no
    /// answer is awaited.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        let deadline_of = |agreement: &Agreement| match agreement {
            Agreement::Offered {
                deadline: deadline_of,
                ..
            }
            | Agreement::Connecting {
                deadline: deadline_of,
            } => Some(*deadline_of),
            Agreement::Established | Agreement::Refused => None,
        };
        self.agreements.values().filter_map(deadline_of).min()
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
        if self.agreements.get(&peer) != Some(&Agreement::Established) {
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
            RouteEvent::OfferReceived {
                peer,
                id,
                same_host,
            } => self.handle_offer(now, peer, id, same_host),
            RouteEvent::OfferAccepted {
                peer,
                id,
                same_host,
            } => match self.agreements.get(&peer) {
                Some(Agreement::Offered {
                    id: open_offer_id, ..
                }) if *open_offer_id == id && same_host => {
                    self.outputs.push_back(RouteOutput::WithdrawOffer { id });
                    self.establish(peer);
                }
                Some(Agreement::Offered {
                    id: open_offer_id, ..
                }) if *open_offer_id == id => {
                    self.outputs.push_back(RouteOutput::ExpectConnection { id });
                }
                _ => {}
            },
            RouteEvent::OfferRefused { peer, id } => {
                if matches!(self.agreements.get(&peer), Some(Agreement::Offered { id: open_offer_id, .. }) if *open_offer_id == id)
                {
                    self.cancel_attempt(peer);
                    self.agreements.insert(peer, Agreement::Refused);
                }
            }
            RouteEvent::Connected(peer) => {
                if matches!(
                    self.agreements.get(&peer),
                    Some(Agreement::Offered { .. } | Agreement::Connecting { .. })
                ) {
                    self.establish(peer);
                }
            }
            RouteEvent::ConnectFailed(peer) => self.handle_failure(peer),
            RouteEvent::ConnectionEnded(peer) => self.handle_route_end(peer),
            RouteEvent::PeerMigrated(peer) => {
                if self.agreements.get(&peer) == Some(&Agreement::Established) {
                    self.handle_route_end(peer);
                }
            }
            RouteEvent::PeerEnded(peer) => {
                self.cancel_attempt(peer);
                self.handle_route_end(peer);
            }
            RouteEvent::CloseAll => self.close_all(),
            RouteEvent::TimerExpired => {
                let expired_peers = |(peer, agreement): (&Tid, &Agreement)| match agreement {
                    Agreement::Offered {
                        deadline: answer_deadline,
                        ..
                    }
                    | Agreement::Connecting {
                        deadline: answer_deadline,
                    } if *answer_deadline <= now => Some(*peer),
                    _ => None,
                };
                let expired_peers: Vec<Tid> =
                    self.agreements.iter().filter_map(expired_peers).collect();
                expired_peers
                    .into_iter()
                    .for_each(|peer| self.handle_failure(peer));
            }
        }
    }

    fn handle_request(&mut self, now: Micros, peer: Tid) {
        if self.agreements.contains_key(&peer) || peer == self.own_tid || !peer.is_task() {
            return;
        }
        if self.agreements.len() >= AGREEMENTS_MAX {
            return;
        }
        self.last_offer_id += 1;
        let id = OfferId(self.last_offer_id);
        self.agreements.insert(
            peer,
            Agreement::Offered {
                id,
                deadline: now + OFFER_ANSWER_TIMEOUT,
            },
        );
        self.outputs.push_back(RouteOutput::Offer { peer, id });
    }

    fn handle_offer(&mut self, now: Micros, peer: Tid, id: OfferId, same_host: bool) {
        match self.agreements.get(&peer) {
            // Both tasks sent offers at the same time. The offer of the task with the smaller tid
            // counts.
            Some(Agreement::Offered { .. }) if self.accepts_offers && self.own_tid < peer => return,
            // A peer with an established route sends an offer only if its connection was lost.
            Some(Agreement::Established) => self.handle_route_end(peer),
            Some(_) => self.cancel_attempt(peer),
            None => {}
        }
        if !self.accepts_offers || self.agreements.len() >= AGREEMENTS_MAX {
            return self.outputs.push_back(RouteOutput::Refuse { peer, id });
        }
        if same_host {
            self.outputs.push_back(RouteOutput::Accept { peer, id });
            self.establish(peer);
        } else {
            self.agreements.insert(
                peer,
                Agreement::Connecting {
                    deadline: now + OFFER_ANSWER_TIMEOUT,
                },
            );
            self.outputs.push_back(RouteOutput::Dial { peer, id });
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
            Some(Agreement::Established | Agreement::Refused) | None => return,
        }
        self.agreements.remove(&peer);
    }

    /// Records a failed attempt as a refusal. Otherwise every further message would send a new
    /// offer and wait for its answer.
    fn handle_failure(&mut self, peer: Tid) {
        if matches!(
            self.agreements.get(&peer),
            Some(Agreement::Offered { .. } | Agreement::Connecting { .. })
        ) {
            self.cancel_attempt(peer);
            self.agreements.insert(peer, Agreement::Refused);
        }
    }

    fn establish(&mut self, peer: Tid) {
        self.agreements.insert(peer, Agreement::Established);
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
        if self.agreements.remove(&peer) == Some(Agreement::Established) {
            self.outputs.push_back(RouteOutput::Close { peer });
            self.notify_end(peer);
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
            if self.agreements.get(&peer) == Some(&Agreement::Established) {
                self.handle_route_end(peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Tid = Tid::from_raw(0x40001);
    const B: Tid = Tid::from_raw(0x80001);

    fn drain_outputs(routes: &mut RouteAgreements) -> Vec<RouteOutput> {
        std::iter::from_fn(|| routes.next_output()).collect()
    }

    fn handle_and_drain(routes: &mut RouteAgreements, event: RouteEvent) -> Vec<RouteOutput> {
        routes.handle_event(Micros(1), event);
        drain_outputs(routes)
    }

    fn notification(tag: i32, body: [i32; 2]) -> RouteOutput {
        RouteOutput::Notify { ctx: 7, tag, body }
    }

    const OFFER_ID: OfferId = OfferId(1);

    /// Returns two tasks on different hosts with an established route. Both have requested
    /// notifications of new routes with tag 4.
    fn connected_pair() -> (RouteAgreements, RouteAgreements) {
        let (mut a, mut b) = (RouteAgreements::new(A), RouteAgreements::new(B));
        for routes in [&mut a, &mut b] {
            routes.watch_new_routes(7, 4, -1, 9).expect("room");
        }
        assert_eq!(
            handle_and_drain(&mut a, RouteEvent::RouteRequested(B)),
            [RouteOutput::Offer {
                peer: B,
                id: OFFER_ID
            }]
        );
        assert!(!a.is_settled(B));
        let offer_event = RouteEvent::OfferReceived {
            peer: A,
            id: OFFER_ID,
            same_host: false,
        };
        assert_eq!(
            handle_and_drain(&mut b, offer_event),
            [RouteOutput::Dial {
                peer: A,
                id: OFFER_ID
            }]
        );
        let acceptance_event = RouteEvent::OfferAccepted {
            peer: B,
            id: OFFER_ID,
            same_host: false,
        };
        assert_eq!(
            handle_and_drain(&mut a, acceptance_event),
            [RouteOutput::ExpectConnection { id: OFFER_ID }]
        );
        assert_eq!(
            handle_and_drain(&mut a, RouteEvent::Connected(B)),
            [notification(4, [B.raw(), 9])]
        );
        assert_eq!(
            handle_and_drain(&mut b, RouteEvent::Connected(A)),
            [notification(4, [A.raw(), 9])]
        );
        assert!(a.is_settled(B) && b.is_settled(A));
        (a, b)
    }

    /// An established route causes no second offer, and both programs are notified of the route.
    #[test]
    fn route_is_offered_once_and_both_are_notified() {
        let (mut a, mut b) = connected_pair();
        assert_eq!(handle_and_drain(&mut a, RouteEvent::RouteRequested(B)), []);
        assert_eq!(handle_and_drain(&mut b, RouteEvent::RouteRequested(A)), []);
        assert_eq!((a.next_wakeup(), b.next_wakeup()), (None, None));
    }

    /// On the same host the acceptance of the offer establishes the route, without a connection.
    #[test]
    fn acceptance_suffices_on_same_host() {
        let mut b = RouteAgreements::new(B);
        let offer_event = RouteEvent::OfferReceived {
            peer: A,
            id: OFFER_ID,
            same_host: true,
        };
        assert_eq!(
            handle_and_drain(&mut b, offer_event),
            [RouteOutput::Accept {
                peer: A,
                id: OFFER_ID
            }]
        );
        assert!(b.is_settled(A));
        let mut a = RouteAgreements::new(A);
        handle_and_drain(&mut a, RouteEvent::RouteRequested(B));
        let acceptance_event = RouteEvent::OfferAccepted {
            peer: B,
            id: OFFER_ID,
            same_host: true,
        };
        assert_eq!(
            handle_and_drain(&mut a, acceptance_event),
            [RouteOutput::WithdrawOffer { id: OFFER_ID }]
        );
        assert!(a.is_settled(B));
        assert_eq!(
            handle_and_drain(&mut a, RouteEvent::PeerMigrated(B)),
            [RouteOutput::Close { peer: B }]
        );
        assert!(!a.is_settled(B));
    }

    /// A peer that refused receives no second offer. Its own offer is still accepted.
    #[test]
    fn refusing_peer_is_not_asked_again() {
        let mut a = RouteAgreements::new(A);
        handle_and_drain(&mut a, RouteEvent::RouteRequested(B));
        assert_eq!(
            handle_and_drain(
                &mut a,
                RouteEvent::OfferRefused {
                    peer: B,
                    id: OfferId(9)
                }
            ),
            []
        );
        assert_eq!(
            handle_and_drain(
                &mut a,
                RouteEvent::OfferRefused {
                    peer: B,
                    id: OFFER_ID
                }
            ),
            [RouteOutput::WithdrawOffer { id: OFFER_ID }]
        );
        assert!(a.is_settled(B));
        assert_eq!(handle_and_drain(&mut a, RouteEvent::RouteRequested(B)), []);
        assert_eq!(handle_and_drain(&mut a, RouteEvent::PeerMigrated(B)), []);
        assert!(a.is_settled(B));
        let offer_event = RouteEvent::OfferReceived {
            peer: B,
            id: OfferId(3),
            same_host: false,
        };
        assert_eq!(
            handle_and_drain(&mut a, offer_event),
            [RouteOutput::Dial {
                peer: B,
                id: OfferId(3)
            }]
        );
    }

    /// A program that does not accept routes refuses offers, but it can still send offers itself.
    #[test]
    fn unwilling_program_refuses_offers() {
        let mut b = RouteAgreements::new(B);
        b.accepts_offers = false;
        let offer_event = RouteEvent::OfferReceived {
            peer: A,
            id: OFFER_ID,
            same_host: true,
        };
        assert_eq!(
            handle_and_drain(&mut b, offer_event),
            [RouteOutput::Refuse {
                peer: A,
                id: OFFER_ID
            }]
        );
        assert_eq!(
            handle_and_drain(&mut b, RouteEvent::RouteRequested(A)),
            [RouteOutput::Offer {
                peer: A,
                id: OFFER_ID
            }]
        );
    }

    /// If two tasks send offers to each other at the same time, the offer of the task with the
    /// smaller tid counts.
    #[test]
    fn smaller_tid_wins_when_offers_cross() {
        let (mut a, mut b) = (RouteAgreements::new(A), RouteAgreements::new(B));
        handle_and_drain(&mut a, RouteEvent::RouteRequested(B));
        handle_and_drain(&mut b, RouteEvent::RouteRequested(A));
        assert_eq!(
            handle_and_drain(
                &mut a,
                RouteEvent::OfferReceived {
                    peer: B,
                    id: OFFER_ID,
                    same_host: false
                }
            ),
            []
        );
        let offer_event = RouteEvent::OfferReceived {
            peer: A,
            id: OFFER_ID,
            same_host: false,
        };
        assert_eq!(
            handle_and_drain(&mut b, offer_event),
            [
                RouteOutput::WithdrawOffer { id: OFFER_ID },
                RouteOutput::Dial {
                    peer: A,
                    id: OFFER_ID
                }
            ]
        );
    }

    /// An offer without an answer before the timeout counts as refused. A later answer is ignored.
    #[test]
    fn missing_answer_counts_as_refusal() {
        let mut a = RouteAgreements::new(A);
        handle_and_drain(&mut a, RouteEvent::RouteRequested(B));
        assert_eq!(a.next_wakeup(), Some(Micros(1) + OFFER_ANSWER_TIMEOUT));
        a.handle_event(Micros(1) + OFFER_ANSWER_TIMEOUT, RouteEvent::TimerExpired);
        assert_eq!(
            drain_outputs(&mut a),
            [RouteOutput::WithdrawOffer { id: OFFER_ID }]
        );
        assert!(a.is_settled(B));
        // The acceptance of an offer that has timed out is ignored.
        assert_eq!(
            handle_and_drain(
                &mut a,
                RouteEvent::OfferAccepted {
                    peer: B,
                    id: OFFER_ID,
                    same_host: true
                }
            ),
            []
        );
        assert_eq!(handle_and_drain(&mut a, RouteEvent::Connected(B)), []);
    }

    /// The program is notified once of the end of a route, and a later message sends a new offer.
    #[test]
    fn route_end_is_notified_once() {
        let (mut a, _) = connected_pair();
        a.watch_route_end(B, 7, 5).expect("room");
        a.watch_route_end(B, 7, 6).expect("room");
        a.unwatch_route_end(B, 7, 6);
        assert_eq!(
            handle_and_drain(&mut a, RouteEvent::ConnectionEnded(B)),
            [
                RouteOutput::Close { peer: B },
                notification(5, [B.raw(), -1])
            ]
        );
        assert_eq!(handle_and_drain(&mut a, RouteEvent::ConnectionEnded(B)), []);
        assert_eq!(
            handle_and_drain(&mut a, RouteEvent::RouteRequested(B)),
            [RouteOutput::Offer {
                peer: B,
                id: OfferId(2)
            }]
        );
        // Without a route the notification is sent immediately.
        a.watch_route_end(B, 7, 5).expect("room");
        assert_eq!(drain_outputs(&mut a), [notification(5, [B.raw(), -1])]);
    }

    /// An offer from a peer with an established route closes the route and starts a new route.
    #[test]
    fn offer_from_connected_peer_replaces_route() {
        let (_, mut b) = connected_pair();
        b.watch_route_end(A, 7, 5).expect("room");
        let offer_event = RouteEvent::OfferReceived {
            peer: A,
            id: OfferId(2),
            same_host: false,
        };
        let expected_outputs = [
            RouteOutput::Close { peer: A },
            notification(5, [A.raw(), -1]),
            RouteOutput::Dial {
                peer: A,
                id: OfferId(2),
            },
        ];
        assert_eq!(handle_and_drain(&mut b, offer_event), expected_outputs);
    }

    /// A program receives as many notifications of new routes as it has requested. The number of
    /// requests is limited to [`ROUTE_WATCHES_MAX`].
    #[test]
    fn new_route_notifications_are_counted() {
        let mut a = RouteAgreements::new(A);
        a.watch_new_routes(7, 4, 2, 9).expect("room");
        a.watch_new_routes(7, 5, -1, 9).expect("room");
        a.watch_new_routes(7, 5, 0, 9).expect("room");
        let tids = [0x80001, 0x80002, 0x80003].map(Tid::from_raw);
        let notification_counts = tids.map(|peer| {
            handle_and_drain(
                &mut a,
                RouteEvent::OfferReceived {
                    peer,
                    id: OFFER_ID,
                    same_host: true,
                },
            )
            .len()
        });
        assert_eq!(
            notification_counts,
            [2, 2, 1],
            "the answer, and twice a note"
        );
        for tag in 0..ROUTE_WATCHES_MAX as i32 {
            a.watch_new_routes(7, 100 + tag, 1, 9).expect("room");
        }
        assert_eq!(a.watch_new_routes(7, 1, 1, 9), Err(PvmError::OutOfRes));
    }

    /// A task that quiesces closes all routes and withdraws its offers.
    #[test]
    fn quiesce_closes_routes_and_offers() {
        let (mut a, mut b) = connected_pair();
        handle_and_drain(&mut a, RouteEvent::RouteRequested(Tid::from_raw(0x80009)));
        let outputs = handle_and_drain(&mut a, RouteEvent::CloseAll);
        assert!(
            outputs.contains(&RouteOutput::Close { peer: B })
                && outputs.contains(&RouteOutput::WithdrawOffer { id: OfferId(2) })
        );
        assert_eq!(a.next_wakeup(), None);
        assert_eq!(
            handle_and_drain(&mut b, RouteEvent::PeerEnded(A)),
            [RouteOutput::Close { peer: A }]
        );
        assert_eq!(handle_and_drain(&mut b, RouteEvent::PeerEnded(A)), []);
    }
}
