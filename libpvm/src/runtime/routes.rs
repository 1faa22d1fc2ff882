//! Agreement between tasks about direct routes (`PvmRouteDirect`), as a state machine without I/O.
//!
//! - The first message to a peer sends an offer. A peer that refused is not asked again, and an
//!   established route carries both directions.
//! - When a route breaks, or one of the two tasks migrates, the next message sends a new offer.
//! - On the same host the acceptance is sufficient, because the tasks have their rings. Between two
//!   hosts the peer that accepts connects to the task that offers.

use rustc_hash::FxHashMap;
use sempa_proto::route::OfferId;
use sempa_proto::{Micros, PvmError, PvmResult, Tid};
use std::collections::VecDeque;

/// Time to answer an offer; after it the peer counts as having refused.
pub(crate) const ANSWER_WITHIN: Micros = Micros::from_secs(10);
/// Maximum number of peers with an agreement, or an offer in progress.
pub(crate) const AGREEMENTS_MAX: usize = 1 << 16;
/// Maximum number of notifications that a program may request.
pub(crate) const WATCHES_MAX: usize = 4096;

/// Input of the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteEvent {
    /// The program sends to this peer and wants a direct route.
    Wanted(Tid),
    /// A peer's offer has arrived.
    Asked { peer: Tid, id: OfferId, near: bool },
    /// A peer has accepted this task's offer.
    Accepted { peer: Tid, id: OfferId, near: bool },
    /// A peer has refused this task's offer.
    Refused { peer: Tid, id: OfferId },
    /// The connection to the peer is established.
    Stands(Tid),
    /// The connection to the peer could not be established.
    Failed(Tid),
    /// The connection to the peer has ended.
    Ended(Tid),
    /// The peer has migrated.
    Moved(Tid),
    /// The peer has ended.
    Gone(Tid),
    /// This task quiesces or exits: all routes must be closed.
    LetGo,
    /// The time of [`Routes::next_wakeup`] has come.
    Wake,
}

/// Action for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteOutput {
    /// Listen, and send an offer to this peer.
    Offer { to: Tid, id: OfferId },
    /// Stop listening for this offer.
    Withdraw { id: OfferId },
    /// Accept the offer of a peer on this host.
    Accept { to: Tid, id: OfferId },
    /// Connect to the addresses in the peer's offer, and accept it.
    Dial { to: Tid, id: OfferId },
    /// Accept the connection of the peer that has accepted this offer.
    Expect { id: OfferId },
    /// Refuse the peer's offer.
    Refuse { to: Tid, id: OfferId },
    /// Close the connection to this peer, established or in progress.
    Close { peer: Tid },
    /// Deliver a notification to the program.
    Note { ctx: i32, tag: i32, words: [i32; 2] },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Asking { id: OfferId, until: Micros },
    Dialling { until: Micros },
    Up,
    Refused,
}

/// Request of the program for notifications about new routes.
#[derive(Debug)]
struct Watch {
    ctx: i32,
    tag: i32,
    /// Number of notifications left; negative if unlimited.
    left: i32,
    fd: i32,
}

/// All agreements of one task.
#[derive(Debug)]
pub(crate) struct Routes {
    me: Tid,
    /// False if offers of peers are refused.
    pub(crate) willing: bool,
    last: u64,
    peers: FxHashMap<Tid, Standing>,
    watches: Vec<Watch>,
    /// Requests for notification of a route's end: peer, context, tag.
    ends: Vec<(Tid, i32, i32)>,
    out: VecDeque<RouteOutput>,
}

impl Routes {
    /// Creates a state without agreements.
    pub(crate) fn new(me: Tid) -> Routes {
        let (peers, watches, ends, out) = (
            FxHashMap::default(),
            Vec::new(),
            Vec::new(),
            VecDeque::new(),
        );
        Routes {
            me,
            willing: true,
            last: 0,
            peers,
            watches,
            ends,
            out,
        }
    }

    /// True if a message need not wait for an answer: a route is established, or was refused.
    pub(crate) fn is_settled(&self, peer: Tid) -> bool {
        matches!(
            self.peers.get(&peer),
            Some(Standing::Up | Standing::Refused)
        )
    }

    /// Returns the time at which [`RouteEvent::Wake`] is due.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        let until = |standing: &Standing| match standing {
            Standing::Asking { until, .. } | Standing::Dialling { until } => Some(*until),
            Standing::Up | Standing::Refused => None,
        };
        self.peers.values().filter_map(until).min()
    }

    /// Returns the next action.
    pub(crate) fn poll(&mut self) -> Option<RouteOutput> {
        self.out.pop_front()
    }

    /// Requests notification of the next `count` new routes; a negative count means all, 0 cancels
    /// the request.
    ///
    /// # Errors
    /// `OutOfRes` if the maximum number of requests is reached.
    pub(crate) fn watch_new(&mut self, ctx: i32, tag: i32, count: i32, fd: i32) -> PvmResult<()> {
        self.watches
            .retain(|watch| (watch.ctx, watch.tag) != (ctx, tag));
        if self.watches.len() >= WATCHES_MAX {
            return Err(PvmError::OutOfRes);
        }
        if count != 0 {
            self.watches.push(Watch {
                ctx,
                tag,
                left: count,
                fd,
            });
        }
        Ok(())
    }

    /// Requests notification of the end of the route to this peer. It comes immediately if there is
    /// no route.
    ///
    /// # Errors
    /// `OutOfRes` if the maximum number of requests is reached.
    pub(crate) fn watch_end(&mut self, peer: Tid, ctx: i32, tag: i32) -> PvmResult<()> {
        if self.ends.len() >= WATCHES_MAX {
            return Err(PvmError::OutOfRes);
        }
        self.ends.push((peer, ctx, tag));
        if self.peers.get(&peer) != Some(&Standing::Up) {
            self.tell_of_end(peer);
        }
        Ok(())
    }

    /// Cancels a request of [`Routes::watch_end`].
    pub(crate) fn unwatch_end(&mut self, peer: Tid, ctx: i32, tag: i32) {
        if let Some(at) = self
            .ends
            .iter()
            .position(|asked| *asked == (peer, ctx, tag))
        {
            self.ends.remove(at);
        }
    }

    /// Handles an event; the resulting actions are queued for [`Routes::poll`].
    pub(crate) fn handle(&mut self, now: Micros, event: RouteEvent) {
        match event {
            RouteEvent::Wanted(peer) => self.wanted(now, peer),
            RouteEvent::Asked { peer, id, near } => self.asked(now, peer, id, near),
            RouteEvent::Accepted { peer, id, near } => match self.peers.get(&peer) {
                Some(Standing::Asking { id: open, .. }) if *open == id && near => {
                    self.out.push_back(RouteOutput::Withdraw { id });
                    self.up(peer);
                }
                Some(Standing::Asking { id: open, .. }) if *open == id => {
                    self.out.push_back(RouteOutput::Expect { id });
                }
                _ => {}
            },
            RouteEvent::Refused { peer, id } => {
                if matches!(self.peers.get(&peer), Some(Standing::Asking { id: open, .. }) if *open == id)
                {
                    self.drop_attempt(peer);
                    self.peers.insert(peer, Standing::Refused);
                }
            }
            RouteEvent::Stands(peer) => {
                if matches!(
                    self.peers.get(&peer),
                    Some(Standing::Asking { .. } | Standing::Dialling { .. })
                ) {
                    self.up(peer);
                }
            }
            RouteEvent::Failed(peer) => self.failed(peer),
            RouteEvent::Ended(peer) => self.ended(peer),
            RouteEvent::Moved(peer) => {
                if self.peers.get(&peer) == Some(&Standing::Up) {
                    self.ended(peer);
                }
            }
            RouteEvent::Gone(peer) => {
                self.drop_attempt(peer);
                self.ended(peer);
            }
            RouteEvent::LetGo => self.let_go(),
            RouteEvent::Wake => {
                let late = |(peer, standing): (&Tid, &Standing)| match standing {
                    Standing::Asking { until, .. } | Standing::Dialling { until }
                        if *until <= now =>
                    {
                        Some(*peer)
                    }
                    _ => None,
                };
                let late: Vec<Tid> = self.peers.iter().filter_map(late).collect();
                late.into_iter().for_each(|peer| self.failed(peer));
            }
        }
    }

    fn wanted(&mut self, now: Micros, peer: Tid) {
        if self.peers.contains_key(&peer) || peer == self.me || !peer.is_task() {
            return;
        }
        if self.peers.len() >= AGREEMENTS_MAX {
            return;
        }
        self.last += 1;
        let id = OfferId(self.last);
        self.peers.insert(
            peer,
            Standing::Asking {
                id,
                until: now + ANSWER_WITHIN,
            },
        );
        self.out.push_back(RouteOutput::Offer { to: peer, id });
    }

    fn asked(&mut self, now: Micros, peer: Tid, id: OfferId, near: bool) {
        match self.peers.get(&peer) {
            // Both tasks sent offers at the same time: the offer of the task with the smaller tid
            // counts.
            Some(Standing::Asking { .. }) if self.willing && self.me < peer => return,
            // A peer that sends an offer has lost its end of the route.
            Some(Standing::Up) => self.ended(peer),
            Some(_) => self.drop_attempt(peer),
            None => {}
        }
        if !self.willing || self.peers.len() >= AGREEMENTS_MAX {
            return self.out.push_back(RouteOutput::Refuse { to: peer, id });
        }
        if near {
            self.out.push_back(RouteOutput::Accept { to: peer, id });
            self.up(peer);
        } else {
            self.peers.insert(
                peer,
                Standing::Dialling {
                    until: now + ANSWER_WITHIN,
                },
            );
            self.out.push_back(RouteOutput::Dial { to: peer, id });
        }
    }

    /// Cancels an offer or connection attempt to this peer.
    fn drop_attempt(&mut self, peer: Tid) {
        match self.peers.get(&peer) {
            Some(Standing::Asking { id, .. }) => {
                self.out.push_back(RouteOutput::Withdraw { id: *id })
            }
            Some(Standing::Dialling { .. }) => self.out.push_back(RouteOutput::Close { peer }),
            Some(Standing::Up | Standing::Refused) | None => return,
        }
        self.peers.remove(&peer);
    }

    /// Ends a failed attempt as refused. With a new offer for every message, each message would
    /// wait for an answer.
    fn failed(&mut self, peer: Tid) {
        if matches!(
            self.peers.get(&peer),
            Some(Standing::Asking { .. } | Standing::Dialling { .. })
        ) {
            self.drop_attempt(peer);
            self.peers.insert(peer, Standing::Refused);
        }
    }

    fn up(&mut self, peer: Tid) {
        self.peers.insert(peer, Standing::Up);
        for watch in &mut self.watches {
            if watch.left > 0 {
                watch.left -= 1;
            }
            let Watch { ctx, tag, fd, .. } = *watch;
            self.out.push_back(RouteOutput::Note {
                ctx,
                tag,
                words: [peer.raw(), fd],
            });
        }
        self.watches.retain(|watch| watch.left != 0);
    }

    /// Removes the route, if there was one. A later message may request another.
    fn ended(&mut self, peer: Tid) {
        if self.peers.remove(&peer) == Some(Standing::Up) {
            self.out.push_back(RouteOutput::Close { peer });
            self.tell_of_end(peer);
        }
    }

    fn tell_of_end(&mut self, peer: Tid) {
        for (_, ctx, tag) in self.ends.extract_if(.., |(watched, ..)| *watched == peer) {
            self.out.push_back(RouteOutput::Note {
                ctx,
                tag,
                words: [peer.raw(), -1],
            });
        }
    }

    fn let_go(&mut self) {
        let peers: Vec<Tid> = self.peers.keys().copied().collect();
        for peer in peers {
            self.drop_attempt(peer);
            if self.peers.get(&peer) == Some(&Standing::Up) {
                self.ended(peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Tid = Tid::from_raw(0x40001);
    const B: Tid = Tid::from_raw(0x80001);

    fn all(routes: &mut Routes) -> Vec<RouteOutput> {
        std::iter::from_fn(|| routes.poll()).collect()
    }

    fn at(routes: &mut Routes, event: RouteEvent) -> Vec<RouteOutput> {
        routes.handle(Micros(1), event);
        all(routes)
    }

    fn note(tag: i32, words: [i32; 2]) -> RouteOutput {
        RouteOutput::Note { ctx: 7, tag, words }
    }

    const ID: OfferId = OfferId(1);

    /// Returns two tasks on different hosts with an established route; both get notifications of
    /// new routes with tag 4.
    fn two() -> (Routes, Routes) {
        let (mut a, mut b) = (Routes::new(A), Routes::new(B));
        for routes in [&mut a, &mut b] {
            routes.watch_new(7, 4, -1, 9).expect("room");
        }
        assert_eq!(
            at(&mut a, RouteEvent::Wanted(B)),
            [RouteOutput::Offer { to: B, id: ID }]
        );
        assert!(!a.is_settled(B));
        let asked = RouteEvent::Asked {
            peer: A,
            id: ID,
            near: false,
        };
        assert_eq!(at(&mut b, asked), [RouteOutput::Dial { to: A, id: ID }]);
        let accepted = RouteEvent::Accepted {
            peer: B,
            id: ID,
            near: false,
        };
        assert_eq!(at(&mut a, accepted), [RouteOutput::Expect { id: ID }]);
        assert_eq!(at(&mut a, RouteEvent::Stands(B)), [note(4, [B.raw(), 9])]);
        assert_eq!(at(&mut b, RouteEvent::Stands(A)), [note(4, [A.raw(), 9])]);
        assert!(a.is_settled(B) && b.is_settled(A));
        (a, b)
    }

    /// An established route causes no second offer, and both programs were notified of it.
    #[test]
    fn route_is_offered_once_and_both_are_notified() {
        let (mut a, mut b) = two();
        assert_eq!(at(&mut a, RouteEvent::Wanted(B)), []);
        assert_eq!(at(&mut b, RouteEvent::Wanted(A)), []);
        assert_eq!((a.next_wakeup(), b.next_wakeup()), (None, None));
    }

    /// On the same host the acceptance of the offer establishes the route, without a connection.
    #[test]
    fn acceptance_suffices_on_same_host() {
        let mut b = Routes::new(B);
        let asked = RouteEvent::Asked {
            peer: A,
            id: ID,
            near: true,
        };
        assert_eq!(at(&mut b, asked), [RouteOutput::Accept { to: A, id: ID }]);
        assert!(b.is_settled(A));
        let mut a = Routes::new(A);
        at(&mut a, RouteEvent::Wanted(B));
        let accepted = RouteEvent::Accepted {
            peer: B,
            id: ID,
            near: true,
        };
        assert_eq!(at(&mut a, accepted), [RouteOutput::Withdraw { id: ID }]);
        assert!(a.is_settled(B));
        assert_eq!(
            at(&mut a, RouteEvent::Moved(B)),
            [RouteOutput::Close { peer: B }]
        );
        assert!(!a.is_settled(B));
    }

    /// A peer that refused gets no second offer, but its own offer is still accepted.
    #[test]
    fn refusing_peer_is_not_asked_again() {
        let mut a = Routes::new(A);
        at(&mut a, RouteEvent::Wanted(B));
        assert_eq!(
            at(
                &mut a,
                RouteEvent::Refused {
                    peer: B,
                    id: OfferId(9)
                }
            ),
            []
        );
        assert_eq!(
            at(&mut a, RouteEvent::Refused { peer: B, id: ID }),
            [RouteOutput::Withdraw { id: ID }]
        );
        assert!(a.is_settled(B));
        assert_eq!(at(&mut a, RouteEvent::Wanted(B)), []);
        assert_eq!(at(&mut a, RouteEvent::Moved(B)), []);
        assert!(a.is_settled(B));
        let asked = RouteEvent::Asked {
            peer: B,
            id: OfferId(3),
            near: false,
        };
        assert_eq!(
            at(&mut a, asked),
            [RouteOutput::Dial {
                to: B,
                id: OfferId(3)
            }]
        );
    }

    /// A program that does not accept routes refuses offers, but can still send its own.
    #[test]
    fn unwilling_program_refuses_offers() {
        let mut b = Routes::new(B);
        b.willing = false;
        let asked = RouteEvent::Asked {
            peer: A,
            id: ID,
            near: true,
        };
        assert_eq!(at(&mut b, asked), [RouteOutput::Refuse { to: A, id: ID }]);
        assert_eq!(
            at(&mut b, RouteEvent::Wanted(A)),
            [RouteOutput::Offer { to: A, id: ID }]
        );
    }

    /// Of two offers that cross, the one of the task with the smaller tid counts.
    #[test]
    fn smaller_tid_wins_when_offers_cross() {
        let (mut a, mut b) = (Routes::new(A), Routes::new(B));
        at(&mut a, RouteEvent::Wanted(B));
        at(&mut b, RouteEvent::Wanted(A));
        assert_eq!(
            at(
                &mut a,
                RouteEvent::Asked {
                    peer: B,
                    id: ID,
                    near: false
                }
            ),
            []
        );
        let asked = RouteEvent::Asked {
            peer: A,
            id: ID,
            near: false,
        };
        assert_eq!(
            at(&mut b, asked),
            [
                RouteOutput::Withdraw { id: ID },
                RouteOutput::Dial { to: A, id: ID }
            ]
        );
    }

    /// An offer that is not answered in time counts as refused; a late answer is ignored.
    #[test]
    fn missing_answer_counts_as_refusal() {
        let mut a = Routes::new(A);
        at(&mut a, RouteEvent::Wanted(B));
        assert_eq!(a.next_wakeup(), Some(Micros(1) + ANSWER_WITHIN));
        a.handle(Micros(1) + ANSWER_WITHIN, RouteEvent::Wake);
        assert_eq!(all(&mut a), [RouteOutput::Withdraw { id: ID }]);
        assert!(a.is_settled(B));
        // A late answer is ignored.
        assert_eq!(
            at(
                &mut a,
                RouteEvent::Accepted {
                    peer: B,
                    id: ID,
                    near: true
                }
            ),
            []
        );
        assert_eq!(at(&mut a, RouteEvent::Stands(B)), []);
    }

    /// The end of a route is notified once, and a later message sends a new offer.
    #[test]
    fn route_end_is_notified_once() {
        let (mut a, _) = two();
        a.watch_end(B, 7, 5).expect("room");
        a.watch_end(B, 7, 6).expect("room");
        a.unwatch_end(B, 7, 6);
        assert_eq!(
            at(&mut a, RouteEvent::Ended(B)),
            [RouteOutput::Close { peer: B }, note(5, [B.raw(), -1])]
        );
        assert_eq!(at(&mut a, RouteEvent::Ended(B)), []);
        assert_eq!(
            at(&mut a, RouteEvent::Wanted(B)),
            [RouteOutput::Offer {
                to: B,
                id: OfferId(2)
            }]
        );
        // Without a route the notification comes immediately.
        a.watch_end(B, 7, 5).expect("room");
        assert_eq!(all(&mut a), [note(5, [B.raw(), -1])]);
    }

    /// An offer from a peer with an established route closes that route and starts a new one.
    #[test]
    fn offer_from_connected_peer_replaces_route() {
        let (_, mut b) = two();
        b.watch_end(A, 7, 5).expect("room");
        let asked = RouteEvent::Asked {
            peer: A,
            id: OfferId(2),
            near: false,
        };
        let expected = [
            RouteOutput::Close { peer: A },
            note(5, [A.raw(), -1]),
            RouteOutput::Dial {
                to: A,
                id: OfferId(2),
            },
        ];
        assert_eq!(at(&mut b, asked), expected);
    }

    /// New routes are notified as often as requested, up to the maximum number of requests.
    #[test]
    fn new_route_notifications_are_counted() {
        let mut a = Routes::new(A);
        a.watch_new(7, 4, 2, 9).expect("room");
        a.watch_new(7, 5, -1, 9).expect("room");
        a.watch_new(7, 5, 0, 9).expect("room");
        let tids = [0x80001, 0x80002, 0x80003].map(Tid::from_raw);
        let told = tids.map(|peer| {
            at(
                &mut a,
                RouteEvent::Asked {
                    peer,
                    id: ID,
                    near: true,
                },
            )
            .len()
        });
        assert_eq!(told, [2, 2, 1], "the answer, and twice a note");
        for tag in 0..WATCHES_MAX as i32 {
            a.watch_new(7, 100 + tag, 1, 9).expect("room");
        }
        assert_eq!(a.watch_new(7, 1, 1, 9), Err(PvmError::OutOfRes));
    }

    /// A task that quiesces closes all routes and withdraws its offers.
    #[test]
    fn quiesce_closes_routes_and_offers() {
        let (mut a, mut b) = two();
        at(&mut a, RouteEvent::Wanted(Tid::from_raw(0x80009)));
        let out = at(&mut a, RouteEvent::LetGo);
        assert!(
            out.contains(&RouteOutput::Close { peer: B })
                && out.contains(&RouteOutput::Withdraw { id: OfferId(2) })
        );
        assert_eq!(a.next_wakeup(), None);
        assert_eq!(
            at(&mut b, RouteEvent::Gone(A)),
            [RouteOutput::Close { peer: A }]
        );
        assert_eq!(at(&mut b, RouteEvent::Gone(A)), []);
    }
}
