//! The daemon's part in routes between two tasks: shared-memory rings and direct routes.
//!
//! The daemon forwards the messages that set up a route. It does not see what the two tasks then
//! send on it. Therefore it notifies each of them when the other one ends, leaves the virtual
//! machine or migrates.

use super::io::Descriptors;
use super::route::hand_over;
use super::tasks::Task;
use super::{ConnId, Machine, Output};
use sempa_proto::Tid;
use sempa_proto::host::PendingItem;
use sempa_proto::route::{OFFER_ADDRESSES_MAX, RouteMsg};
use sempa_proto::task::ToTask;
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of tasks with which one task may share rings. Messages of further pairs are
/// carried by the daemon.
pub(super) const PARTNERS_MAX: usize = 8192;

/// The pairs of tasks of this host that share rings or are about to, and the unanswered offers of
/// direct routes.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    partners: BTreeMap<Tid, BTreeSet<Tid>>,
    /// For each task of this host: the tasks of any host whose offers of a direct route it has not
    /// answered.
    asked: BTreeMap<Tid, BTreeSet<Tid>>,
}

impl Pairs {
    /// True if the two tasks share rings, or can do so within [`PARTNERS_MAX`].
    fn have_room(&self, a: Tid, b: Tid) -> bool {
        let partners = |tid| self.partners.get(&tid);
        partners(a).is_some_and(|p| p.contains(&b))
            || [a, b]
                .into_iter()
                .all(|tid| partners(tid).is_none_or(|p| p.len() < PARTNERS_MAX))
    }

    /// Records a pair when an offer is forwarded. The offering task must be notified of the other
    /// one's end whether or not the offer is accepted.
    pub(super) fn join(&mut self, a: Tid, b: Tid) {
        self.partners.entry(a).or_default().insert(b);
        self.partners.entry(b).or_default().insert(a);
    }

    /// Removes a task. Returns the tasks that shared rings with it and those that wait for its
    /// answer.
    pub(super) fn take(&mut self, tid: Tid) -> BTreeSet<Tid> {
        let mut partners = self.partners.remove(&tid).unwrap_or_default();
        for partner in &partners {
            if let Some(theirs) = self.partners.get_mut(partner) {
                theirs.remove(&tid);
                if theirs.is_empty() {
                    self.partners.remove(partner);
                }
            }
        }
        partners.extend(self.asked.remove(&tid).unwrap_or_default());
        partners
    }

    /// Records that an offer of a direct route was delivered to this task.
    fn ask(&mut self, to: Tid, from: Tid) {
        let askers = self.asked.entry(to).or_default();
        if askers.len() < PARTNERS_MAX {
            askers.insert(from);
        }
    }

    /// Records that the task has answered such an offer.
    fn answered(&mut self, by: Tid, asker: Tid) {
        if let Some(askers) = self.asked.get_mut(&by) {
            askers.remove(&asker);
            if askers.is_empty() {
                self.asked.remove(&by);
            }
        }
    }

    /// True if no pair and no offer is recorded.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.partners.is_empty() && self.asked.is_empty()
    }
}

impl Machine {
    /// Handles a route message from a task to another one.
    ///
    /// A message without descriptors is routed like any other item. One with descriptors is
    /// delivered only to a connected task of this host; otherwise it is dropped (see
    /// `word_came_to_nothing`).
    pub(super) fn task_route(
        &mut self,
        conn: ConnId,
        to: Tid,
        word: RouteMsg,
        descriptors: Descriptors,
    ) {
        let Some(from) = self.conns.task(conn) else {
            return;
        };
        if let RouteMsg::DirectOffer { addresses, .. } = &word
            && addresses.len() > OFFER_ADDRESSES_MAX
        {
            return self.log(format!(
                "{from} offered {} addresses for a route; it was dropped",
                addresses.len()
            ));
        }
        if let RouteMsg::DirectAccept { .. } | RouteMsg::DirectRefuse { .. } = word {
            self.pairs.answered(from, to);
        }
        if word.fd_count() == 0 && descriptors.count() == 0 {
            return self.deliver(
                to,
                ToTask::Route {
                    from,
                    same_host: false,
                    message: word,
                },
            );
        }
        let listens = self
            .tasks
            .get(to)
            .filter(|t| to != from && !t.hold)
            .and_then(Task::conn);
        let complete = word.fd_count() == descriptors.count();
        match listens.filter(|_| complete && self.pairs.have_room(from, to)) {
            Some(conn) => {
                self.pairs.join(from, to);
                let message = ToTask::Route {
                    from,
                    same_host: true,
                    message: word,
                };
                self.out.push_back(Output::RouteToTask {
                    conn,
                    message,
                    descriptors,
                });
            }
            None => self.word_came_to_nothing(from, to, &word),
        }
    }

    /// Handles a route message with descriptors that could not be delivered. An offer is refused.
    /// The sender of an acceptance is notified that the peer has migrated or ended, so that it does
    /// not use the rings.
    fn word_came_to_nothing(&mut self, from: Tid, to: Tid, word: &RouteMsg) {
        match *word {
            RouteMsg::RingOffer { id, .. } => {
                self.deliver(
                    from,
                    ToTask::Route {
                        from: to,
                        same_host: false,
                        message: RouteMsg::RingRefuse { id },
                    },
                );
            }
            // The shared pool is only an optimization.
            RouteMsg::PoolOffer { .. } => {}
            _ if self.tasks.get(to).is_some() => {
                self.deliver(from, ToTask::PeerMigrated { tid: to })
            }
            _ => self.deliver(from, ToTask::PeerGone { tid: to }),
        }
    }

    /// A task has ended or left: notifies the tasks that share rings with it or wait for its
    /// answer.
    pub(super) fn rings_end(&mut self, tid: Tid) {
        for partner in self.pairs.take(tid) {
            self.deliver(partner, ToTask::PeerGone { tid });
        }
    }

    /// Delivers a frame or an item on a task's connection. Whether the sender of a route message
    /// runs on the same host is decided only here.
    pub(super) fn hand(&mut self, conn: ConnId, mut held: PendingItem) {
        if let PendingItem::Control(ToTask::Route {
            from,
            same_host: near,
            message,
        }) = &mut held
        {
            *near = match message {
                // A task that is still arriving will be able to use rings soon.
                RouteMsg::RingRefuse { .. } => self.is_alive(*from),
                _ => self.tasks.get(*from).is_some(),
            };
            if let (RouteMsg::DirectOffer { .. }, Some(tid)) = (message, self.conns.task(conn)) {
                self.pairs.ask(tid, *from);
            }
        }
        self.out.push_back(hand_over(conn, held));
    }
}

/// Returns the task that must be notified if this cannot be delivered because the receiver has
/// ended.
pub(super) fn sender_of(held: &PendingItem) -> Option<Tid> {
    match held {
        PendingItem::Frame(frame) => {
            sempa_proto::link::LinkFrame::decode(frame.clone()).map(|frame| frame.src)
        }
        PendingItem::Control(ToTask::Route { from, .. }) => Some(*from),
        PendingItem::Control(_) => None,
    }
}
