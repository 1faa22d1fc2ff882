//! Tests of the agreements about direct routes.

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

/// Returns the arrival of an offer that the program of `peer` has requested.
fn explicit_offer(peer: Tid, id: OfferId, same_host: bool) -> RouteEvent {
    RouteEvent::OfferReceived {
        peer,
        id,
        same_host,
        kind: RouteKind::Explicit,
        accepts_automatic: true,
    }
}

/// Returns the arrival of B's acceptance.
fn acceptance_of_b(same_host: bool) -> RouteEvent {
    RouteEvent::OfferAccepted {
        peer: B,
        id: OFFER_ID,
        same_host,
    }
}

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
            id: OFFER_ID,
            kind: RouteKind::Explicit
        }]
    );
    assert!(!a.is_settled(B));
    let offer_event = explicit_offer(A, OFFER_ID, false);
    assert_eq!(
        handle_and_drain(&mut b, offer_event),
        [RouteOutput::Dial {
            peer: A,
            id: OFFER_ID
        }]
    );
    let acceptance_event = acceptance_of_b(false);
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
    let offer_event = explicit_offer(A, OFFER_ID, true);
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
    let acceptance_event = acceptance_of_b(true);
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
    let offer_event = explicit_offer(B, OfferId(3), false);
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
    let offer_event = explicit_offer(A, OFFER_ID, true);
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
            id: OFFER_ID,
            kind: RouteKind::Explicit
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
        handle_and_drain(&mut a, explicit_offer(B, OFFER_ID, false)),
        []
    );
    let offer_event = explicit_offer(A, OFFER_ID, false);
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
    assert_eq!(handle_and_drain(&mut a, acceptance_of_b(true)), []);
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
            id: OfferId(2),
            kind: RouteKind::Explicit
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
    let offer_event = explicit_offer(A, OfferId(2), false);
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
                kind: RouteKind::Explicit,
                accepts_automatic: true,
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

// ---- automatic routes

/// Returns an offer of `peer` with the id [`OFFER_ID`].
fn offer_of(peer: Tid, kind: RouteKind, same_host: bool, accepts_automatic: bool) -> RouteEvent {
    RouteEvent::OfferReceived {
        peer,
        id: OFFER_ID,
        same_host,
        kind,
        accepts_automatic,
    }
}

/// Returns two tasks on different hosts whose libraries have set up a route. Both programs have
/// requested notifications of new routes with tag 4, and of the end of the route with tag 5.
fn automatically_connected_pair() -> (RouteAgreements, RouteAgreements) {
    let (mut a, mut b) = (RouteAgreements::new(A), RouteAgreements::new(B));
    for (routes, peer) in [(&mut a, B), (&mut b, A)] {
        routes.watch_new_routes(7, 4, -1, 9).expect("room");
        routes.route_end_watches.push((peer, 7, 5));
    }
    assert_eq!(
        handle_and_drain(&mut a, RouteEvent::AutomaticRouteDue(B)),
        [RouteOutput::Offer {
            peer: B,
            id: OFFER_ID,
            kind: RouteKind::Automatic
        }]
    );
    assert_eq!(
        handle_and_drain(&mut b, offer_of(A, RouteKind::Automatic, false, true)),
        [RouteOutput::Dial {
            peer: A,
            id: OFFER_ID
        }]
    );
    let acceptance_event = acceptance_of_b(false);
    handle_and_drain(&mut a, acceptance_event);
    for (routes, peer) in [(&mut a, B), (&mut b, A)] {
        assert_eq!(
            handle_and_drain(routes, RouteEvent::Connected(peer)),
            [RouteOutput::AutomaticEstablished { peer }]
        );
        assert!(routes.is_automatic(peer) && !routes.is_settled(peer));
        assert_eq!(routes.automatic_count(), 1);
    }
    (a, b)
}

fn ended(peer: Tid, is_given_up: bool) -> [RouteOutput; 2] {
    [
        RouteOutput::Close { peer },
        RouteOutput::AutomaticEnded { peer, is_given_up },
    ]
}

/// Neither the route nor its end is notified to the program, and no second offer is sent.
#[test]
fn automatic_route_is_unknown_to_program() {
    let (mut a, mut b) = automatically_connected_pair();
    let again = RouteEvent::AutomaticRouteDue(B);
    assert_eq!(handle_and_drain(&mut a, again), []);
    assert_eq!(a.next_wakeup(), None, "no timer runs for it");
    let end_event = RouteEvent::ConnectionEnded(B);
    assert_eq!(handle_and_drain(&mut a, end_event), ended(B, false));
    assert_eq!(
        handle_and_drain(&mut b, RouteEvent::PeerMigrated(A)),
        ended(A, false)
    );
    assert_eq!(a.automatic_count() + b.automatic_count(), 0);
}

/// The program's request replaces an automatic route by an explicit one, of which both programs are
/// notified.
#[test]
fn explicit_request_replaces_automatic_route() {
    let (mut a, mut b) = automatically_connected_pair();
    let mut expected_outputs = ended(B, true).to_vec();
    expected_outputs.push(RouteOutput::Offer {
        peer: B,
        id: OfferId(2),
        kind: RouteKind::Explicit,
    });
    assert_eq!(
        handle_and_drain(&mut a, RouteEvent::RouteRequested(B)),
        expected_outputs
    );
    let offer_event = RouteEvent::OfferReceived {
        peer: A,
        id: OfferId(2),
        same_host: false,
        kind: RouteKind::Explicit,
        accepts_automatic: false,
    };
    assert_eq!(
        handle_and_drain(&mut b, offer_event).last(),
        Some(&RouteOutput::Dial {
            peer: A,
            id: OfferId(2)
        })
    );
    for (routes, peer) in [(&mut a, B), (&mut b, A)] {
        assert_eq!(
            handle_and_drain(routes, RouteEvent::Connected(peer)),
            [notification(4, [peer.raw(), 9])]
        );
        assert!(routes.is_settled(peer) && !routes.is_automatic(peer));
    }
}

/// The program's request replaces an automatic offer. If the peer's connection is being
/// established, the request waits for its end.
#[test]
fn explicit_request_during_automatic_setup_is_carried_out() {
    let mut a = RouteAgreements::new(A);
    handle_and_drain(&mut a, RouteEvent::AutomaticRouteDue(B));
    assert_eq!(
        handle_and_drain(&mut a, RouteEvent::RouteRequested(B)),
        [
            RouteOutput::WithdrawOffer { id: OFFER_ID },
            RouteOutput::Offer {
                peer: B,
                id: OfferId(2),
                kind: RouteKind::Explicit
            }
        ]
    );
    let mut b = RouteAgreements::new(B);
    handle_and_drain(&mut b, offer_of(A, RouteKind::Automatic, false, true));
    assert_eq!(handle_and_drain(&mut b, RouteEvent::RouteRequested(A)), []);
    handle_and_drain(&mut b, RouteEvent::ConnectFailed(A));
    assert!(!b.is_settled(A), "the explicit route was not tried");
    assert_eq!(
        handle_and_drain(&mut b, RouteEvent::RouteRequested(A)).len(),
        1
    );
}

/// If one of two offers that cross is explicit, the route is explicit for both tasks, whichever of
/// the offers counts.
#[test]
fn crossing_offers_make_explicit_route() {
    let requests = [RouteEvent::RouteRequested, RouteEvent::AutomaticRouteDue];
    let kinds = [RouteKind::Explicit, RouteKind::Automatic];
    for (a_index, b_index) in [(0, 1), (1, 0)] {
        let (mut a, mut b) = (RouteAgreements::new(A), RouteAgreements::new(B));
        handle_and_drain(&mut a, requests[a_index](B));
        handle_and_drain(&mut b, requests[b_index](A));
        handle_and_drain(&mut a, offer_of(B, kinds[b_index], false, false));
        let outputs = handle_and_drain(&mut b, offer_of(A, kinds[a_index], false, false));
        assert!(outputs.contains(&RouteOutput::Dial {
            peer: A,
            id: OFFER_ID
        }));
        for (routes, peer) in [(&mut a, B), (&mut b, A)] {
            handle_and_drain(routes, RouteEvent::Connected(peer));
            assert!(routes.is_settled(peer));
        }
    }
}

/// An automatic offer is refused on the same host, by a task that accepts none, and by a program
/// that forbids direct routes. The refusal says nothing about the peer's host.
#[test]
fn automatic_offer_is_refused_where_it_is_unwanted() {
    let refusal = RouteOutput::Refuse {
        peer: A,
        id: OFFER_ID,
    };
    for (same_host, accepts_automatic, accepts_offers) in [
        (true, true, true),
        (false, false, true),
        (false, true, false),
    ] {
        let mut b = RouteAgreements::new(B);
        b.accepts_offers = accepts_offers;
        let offer_event = offer_of(A, RouteKind::Automatic, same_host, accepts_automatic);
        assert_eq!(handle_and_drain(&mut b, offer_event), [refusal]);
        assert_eq!(b.automatic_count(), 0);
    }
    let mut a = RouteAgreements::new(A);
    handle_and_drain(&mut a, RouteEvent::AutomaticRouteDue(B));
    let refusal_event = RouteEvent::OfferRefused {
        peer: B,
        id: OFFER_ID,
    };
    let expected_outputs = [
        RouteOutput::WithdrawOffer { id: OFFER_ID },
        RouteOutput::AutomaticFailed {
            peer: B,
            scope: FailureScope::Peer,
        },
    ];
    assert_eq!(handle_and_drain(&mut a, refusal_event), expected_outputs);
    assert!(!a.is_settled(B), "an explicit route may still be requested");
}

/// A connection that fails is reported to the peer, and both tasks learn that their hosts cannot
/// connect.
#[test]
fn failed_automatic_connection_ends_attempt_on_both_sides() {
    let (mut a, mut b) = (RouteAgreements::new(A), RouteAgreements::new(B));
    handle_and_drain(&mut a, RouteEvent::AutomaticRouteDue(B));
    handle_and_drain(&mut b, offer_of(A, RouteKind::Automatic, false, true));
    let acceptance_event = acceptance_of_b(false);
    handle_and_drain(&mut a, acceptance_event);
    let failure_of = |peer| RouteOutput::AutomaticFailed {
        peer,
        scope: FailureScope::Host,
    };
    assert_eq!(
        handle_and_drain(&mut b, RouteEvent::ConnectFailed(A)),
        [
            RouteOutput::Close { peer: A },
            RouteOutput::Refuse {
                peer: A,
                id: OFFER_ID
            },
            failure_of(A)
        ]
    );
    let refusal_event = RouteEvent::OfferRefused {
        peer: B,
        id: OFFER_ID,
    };
    assert_eq!(
        handle_and_drain(&mut a, refusal_event),
        [RouteOutput::WithdrawOffer { id: OFFER_ID }, failure_of(B)]
    );
    assert_eq!((a.next_wakeup(), b.next_wakeup()), (None, None));
}

/// A program that forbids direct routes loses the automatic ones, established and in setup, and
/// keeps the explicit ones.
#[test]
fn forbidding_ends_automatic_routes_only() {
    const C: Tid = Tid::from_raw(0x80009);
    let (mut a, _) = automatically_connected_pair();
    handle_and_drain(&mut a, RouteEvent::AutomaticRouteDue(C));
    let outputs = handle_and_drain(&mut a, RouteEvent::AutomaticForbidden);
    assert!(
        ended(B, true).iter().all(|output| outputs.contains(output))
            && outputs.contains(&RouteOutput::WithdrawOffer { id: OfferId(2) })
    );
    assert_eq!(a.automatic_count(), 0);
    let (mut a, _) = connected_pair();
    assert_eq!(handle_and_drain(&mut a, RouteEvent::AutomaticForbidden), []);
    assert_eq!(handle_and_drain(&mut a, RouteEvent::RouteGivenUp(B)), []);
    assert!(a.is_settled(B));
}

/// Each attempt ends, and no offer is withdrawn twice, in any order of requests, offers, answers
/// and ends.
#[test]
fn every_attempt_ends() {
    let events = [
        RouteEvent::AutomaticRouteDue(B),
        RouteEvent::RouteRequested(B),
        offer_of(B, RouteKind::Automatic, false, true),
        offer_of(B, RouteKind::Explicit, false, false),
        offer_of(B, RouteKind::Automatic, true, true),
        acceptance_of_b(false),
        RouteEvent::OfferRefused {
            peer: B,
            id: OFFER_ID,
        },
        RouteEvent::Connected(B),
        RouteEvent::ConnectFailed(B),
        RouteEvent::ConnectionEnded(B),
        RouteEvent::RouteGivenUp(B),
        RouteEvent::AutomaticForbidden,
        RouteEvent::PeerMigrated(B),
        RouteEvent::CloseAll,
    ];
    for index in 0..events.len().pow(4) {
        let mut a = RouteAgreements::new(A);
        let (mut closed_offers, mut opened_offers) = (Vec::new(), Vec::new());
        for step in 0..4 {
            let event = events[index / events.len().pow(step) % events.len()];
            for output in handle_and_drain(&mut a, event) {
                match output {
                    RouteOutput::Offer { id, .. } => opened_offers.push(id),
                    RouteOutput::WithdrawOffer { id } => closed_offers.push(id),
                    _ => {}
                }
            }
        }
        // After its timeout nothing is in setup.
        a.handle_event(Micros(1) + OFFER_ANSWER_TIMEOUT, RouteEvent::TimerExpired);
        assert_eq!(a.next_wakeup(), None);
        for output in drain_outputs(&mut a) {
            if let RouteOutput::WithdrawOffer { id } = output {
                closed_offers.push(id);
            }
        }
        let has_unique_ends =
            (1..closed_offers.len()).all(|i| !closed_offers[i..].contains(&closed_offers[i - 1]));
        assert!(has_unique_ends && closed_offers.iter().all(|id| opened_offers.contains(id)));
    }
}
