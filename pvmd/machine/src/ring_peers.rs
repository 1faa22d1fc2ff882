//! Set-up and end of routes between two tasks, as far as the daemon is involved: shared-memory
//! rings and direct routes.
//!
//! The daemon forwards the messages that set up a route. It does not see the data that the two
//! tasks then exchange on the route. Therefore it notifies each task when the other task ends,
//! leaves the virtual machine or migrates.

use super::io::Descriptors;
use super::routing::delivery_output;
use super::tasks::Task;
use super::{ConnId, Machine, Output};
use sempa_proto::Tid;
use sempa_proto::host::PendingItem;
use sempa_proto::route::{OFFER_ADDRESSES_MAX, RouteMsg};
use sempa_proto::task::ToTask;
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of tasks with which one task may share rings. Messages of further pairs are
/// carried by the daemon.
pub(super) const RING_PEERS_MAX: usize = 8192;

/// The pairs of tasks of this host that share rings or are about to, and the unanswered offers of
/// direct routes.
#[derive(Debug, Default)]
pub(super) struct RingPeers {
    /// Ring peers by task. Each pair is recorded under both tasks.
    peers: BTreeMap<Tid, BTreeSet<Tid>>,
    /// For each task of this host: the tasks of any host whose offers of a direct route it has not
    /// answered.
    direct_offers: BTreeMap<Tid, BTreeSet<Tid>>,
}

impl RingPeers {
    /// True if the two tasks share rings, or can do so within [`RING_PEERS_MAX`].
    fn can_share_rings(&self, a: Tid, b: Tid) -> bool {
        let partners = |tid| self.peers.get(&tid);
        partners(a).is_some_and(|p| p.contains(&b))
            || [a, b]
                .into_iter()
                .all(|tid| partners(tid).is_none_or(|p| p.len() < RING_PEERS_MAX))
    }

    /// Records a pair when an offer is forwarded. The offering task must be notified of the end of
    /// the other task even if the offer is not accepted.
    pub(super) fn add_pair(&mut self, a: Tid, b: Tid) {
        self.peers.entry(a).or_default().insert(b);
        self.peers.entry(b).or_default().insert(a);
    }

    /// Removes a task. Returns the tasks that shared rings with it and the tasks whose offers it
    /// has not answered.
    pub(super) fn remove_task(&mut self, tid: Tid) -> BTreeSet<Tid> {
        let mut partners = self.peers.remove(&tid).unwrap_or_default();
        for partner in &partners {
            if let Some(peers_of_other) = self.peers.get_mut(partner) {
                peers_of_other.remove(&tid);
                if peers_of_other.is_empty() {
                    self.peers.remove(partner);
                }
            }
        }
        partners.extend(self.direct_offers.remove(&tid).unwrap_or_default());
        partners
    }

    /// Records that an offer of a direct route was delivered to this task.
    fn add_direct_offer(&mut self, to: Tid, from: Tid) {
        let offerers = self.direct_offers.entry(to).or_default();
        if offerers.len() < RING_PEERS_MAX {
            offerers.insert(from);
        }
    }

    /// Records that the task `by` has answered the offer of a direct route from `offerer`.
    fn remove_direct_offer(&mut self, by: Tid, offerer: Tid) {
        if let Some(offerers) = self.direct_offers.get_mut(&by) {
            offerers.remove(&offerer);
            if offerers.is_empty() {
                self.direct_offers.remove(&by);
            }
        }
    }

    /// True if no pair and no offer is recorded.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.peers.is_empty() && self.direct_offers.is_empty()
    }
}

impl Machine {
    /// Handles a route message from one task to another.
    ///
    /// A message without descriptors is routed like any other item. A message with descriptors is
    /// delivered only to a connected task of this host; otherwise it is dropped (see
    /// [`Machine::handle_undeliverable_route_message`]).
    pub(super) fn forward_route_message(
        &mut self,
        conn: ConnId,
        to: Tid,
        route_message: RouteMsg,
        descriptors: Descriptors,
    ) {
        let Some(from) = self.conns.task_of(conn) else {
            return;
        };
        if let RouteMsg::DirectOffer { addresses, .. } = &route_message
            && addresses.len() > OFFER_ADDRESSES_MAX
        {
            return self.log_warning(format!(
                "{from} offered {} addresses for a route; it was dropped",
                addresses.len()
            ));
        }
        if let RouteMsg::DirectAccept { .. } | RouteMsg::DirectRefuse { .. } = route_message {
            self.ring_peers.remove_direct_offer(from, to);
        }
        if route_message.fd_count() == 0 && descriptors.count() == 0 {
            return self.deliver(
                to,
                ToTask::Route {
                    from,
                    same_host: false,
                    message: route_message,
                },
            );
        }
        let receiver = self
            .tasks
            .get(to)
            .filter(|t| to != from && !t.holds_items)
            .and_then(Task::conn);
        let complete = route_message.fd_count() == descriptors.count();
        match receiver.filter(|_| complete && self.ring_peers.can_share_rings(from, to)) {
            Some(conn) => {
                self.ring_peers.add_pair(from, to);
                let message = ToTask::Route {
                    from,
                    same_host: true,
                    message: route_message,
                };
                self.outputs.push_back(Output::ToTaskWithFds {
                    conn,
                    message,
                    descriptors,
                });
            }
            None => self.handle_undeliverable_route_message(from, to, &route_message),
        }
    }

    /// Handles a route message with descriptors that could not be delivered. An offer is refused.
    /// The sender of an acceptance is notified that the peer has migrated or ended, so that it does
    /// not use the rings. Only a task that cannot run on another host counts as ended, because a
    /// library drops all further messages to an ended peer.
    fn handle_undeliverable_route_message(&mut self, from: Tid, to: Tid, message: &RouteMsg) {
        match *message {
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
            _ if self.is_alive(to) || self.may_run_elsewhere(to) => {
                self.deliver(from, ToTask::PeerMigrated { tid: to })
            }
            _ => self.deliver(from, ToTask::PeerGone { tid: to }),
        }
    }

    /// Handles the end or the departure of a task: notifies the tasks that share rings with it or
    /// wait for its answer.
    pub(super) fn end_peer_routes(&mut self, tid: Tid) {
        for partner in self.ring_peers.remove_task(tid) {
            self.deliver(partner, ToTask::PeerGone { tid });
        }
    }

    /// Delivers a frame or an item on a task's connection. Whether the sender of a route message
    /// runs on the same host is decided only in this function.
    pub(super) fn deliver_now(&mut self, conn: ConnId, mut held: PendingItem) {
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
            if let (RouteMsg::DirectOffer { .. }, Some(tid)) = (message, self.conns.task_of(conn)) {
                self.ring_peers.add_direct_offer(tid, *from);
            }
        }
        self.outputs.push_back(delivery_output(conn, held));
    }
}

/// Returns the task that must be notified if this item cannot be delivered because the receiver has
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
