//! The agreement of two programs about a direct route (`PvmRouteDirect`), without the route itself.
//!
//! The first message to a task asks it. The answer counts for life: who has refused is not asked again, and a route that
//! stands carries both directions. When it breaks, or one of the two moves, the next message asks anew. On one host nothing
//! more is needed, because tasks there have their rings; on two hosts one of the two connects to the other.

use rustc_hash::FxHashMap;
use sempa_proto::route::OfferId;
use sempa_proto::{Micros, PvmError, PvmResult, Tid};
use std::collections::VecDeque;

/// How long a task may take to answer; after that it counts as having refused.
pub(crate) const ANSWER_WITHIN: Micros = Micros::from_secs(10);
/// Tasks with which one task has an agreement, or is about to.
pub(crate) const AGREEMENTS_MAX: usize = 1 << 16;
/// Notifications that a program may ask for.
pub(crate) const WATCHES_MAX: usize = 4096;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteEvent {
    /// The program sends to this task and wants a direct route.
    Wanted(Tid),
    /// A task asks us.
    Asked { peer: Tid, id: OfferId, near: bool },
    /// A task has said yes.
    Accepted { peer: Tid, id: OfferId, near: bool },
    /// A task has said no.
    Refused { peer: Tid, id: OfferId },
    /// The connection stands.
    Stands(Tid),
    /// It could not be made.
    Failed(Tid),
    /// It has ended.
    Ended(Tid),
    /// The task runs elsewhere now.
    Moved(Tid),
    /// The task has ended.
    Gone(Tid),
    /// This task lets go of everything.
    LetGo,
    /// The time of [`Routes::next_wakeup`] has come.
    Wake,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteOutput {
    /// Listen, and ask this task.
    Offer { to: Tid, id: OfferId },
    /// Listen no longer.
    Withdraw { id: OfferId },
    /// Say yes to a task on this host.
    Accept { to: Tid, id: OfferId },
    /// Connect to where the task that asks says, and say yes.
    Dial { to: Tid, id: OfferId },
    /// The task that was asked is going to connect.
    Expect { id: OfferId },
    /// Say no.
    Refuse { to: Tid, id: OfferId },
    /// Close what leads to this task, or was about to.
    Close { peer: Tid },
    /// Tell the program.
    Note { ctx: i32, tag: i32, words: [i32; 2] },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Asking { id: OfferId, until: Micros },
    Dialling { until: Micros },
    Up,
    Refused,
}

/// A program wants to know of new routes.
#[derive(Debug)]
struct Watch {
    ctx: i32,
    tag: i32,
    /// How often yet; negative: always.
    left: i32,
    fd: i32,
}

/// All agreements of one task.
#[derive(Debug)]
pub(crate) struct Routes {
    me: Tid,
    /// What is said to those who ask.
    pub(crate) willing: bool,
    last: u64,
    peers: FxHashMap<Tid, Standing>,
    watches: Vec<Watch>,
    /// Whose route is watched, in which context and with which tag.
    ends: Vec<(Tid, i32, i32)>,
    out: VecDeque<RouteOutput>,
}

impl Routes {
    /// None yet.
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

    /// True when a message need not wait for an answer: there is a route, or there will be none.
    pub(crate) fn is_settled(&self, peer: Tid) -> bool {
        matches!(
            self.peers.get(&peer),
            Some(Standing::Up | Standing::Refused)
        )
    }

    /// When [`RouteEvent::Wake`] is wanted.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        let until = |standing: &Standing| match standing {
            Standing::Asking { until, .. } | Standing::Dialling { until } => Some(*until),
            Standing::Up | Standing::Refused => None,
        };
        self.peers.values().filter_map(until).min()
    }

    /// The next thing to do.
    pub(crate) fn poll(&mut self) -> Option<RouteOutput> {
        self.out.pop_front()
    }

    /// Tells the program of the next `count` new routes, of all if it is negative, of none if it is 0.
    ///
    /// # Errors
    /// `OutOfRes` when as many are watched as can be.
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

    /// Tells the program of the end of the route to this task; at once if there is none.
    ///
    /// # Errors
    /// `OutOfRes` when as many are watched as can be.
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

    /// Forgets what [`Routes::watch_end`] was asked for.
    pub(crate) fn unwatch_end(&mut self, peer: Tid, ctx: i32, tag: i32) {
        if let Some(at) = self
            .ends
            .iter()
            .position(|asked| *asked == (peer, ctx, tag))
        {
            self.ends.remove(at);
        }
    }

    /// Takes an event.
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
            // Both asked at once: the offer of the smaller number counts.
            Some(Standing::Asking { .. }) if self.willing && self.me < peer => return,
            // It would not ask if it had its end.
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

    /// Nothing is under way to this task any more.
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

    /// There will be no route: asking again with every message would make each of them wait.
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

    /// The route, if there was one, is no more; another one may be asked for.
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

    /// Two tasks of different hosts with a route, both told of new ones with tag 4.
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

    #[test]
    fn a_route_is_asked_for_once_and_both_are_told() {
        let (mut a, mut b) = two();
        assert_eq!(at(&mut a, RouteEvent::Wanted(B)), []);
        assert_eq!(at(&mut b, RouteEvent::Wanted(A)), []);
        assert_eq!((a.next_wakeup(), b.next_wakeup()), (None, None));
    }

    #[test]
    fn on_one_host_the_answer_is_the_route() {
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

    #[test]
    fn who_refused_is_not_asked_again_until_it_asks_itself() {
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

    #[test]
    fn a_program_that_wants_none_refuses() {
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

    #[test]
    fn of_two_offers_that_cross_the_one_of_the_smaller_number_counts() {
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

    #[test]
    fn no_answer_counts_as_a_refusal() {
        let mut a = Routes::new(A);
        at(&mut a, RouteEvent::Wanted(B));
        assert_eq!(a.next_wakeup(), Some(Micros(1) + ANSWER_WITHIN));
        a.handle(Micros(1) + ANSWER_WITHIN, RouteEvent::Wake);
        assert_eq!(all(&mut a), [RouteOutput::Withdraw { id: ID }]);
        assert!(a.is_settled(B));
        // An answer that comes later means nothing.
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

    #[test]
    fn the_end_of_a_route_is_told_once_and_a_later_message_asks_anew() {
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
        // There is none yet: the watch is answered at once.
        a.watch_end(B, 7, 5).expect("room");
        assert_eq!(all(&mut a), [note(5, [B.raw(), -1])]);
    }

    #[test]
    fn a_peer_that_asks_again_has_lost_its_end() {
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

    #[test]
    fn new_routes_are_told_as_often_as_was_asked() {
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

    #[test]
    fn who_lets_go_leaves_nothing_open() {
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
