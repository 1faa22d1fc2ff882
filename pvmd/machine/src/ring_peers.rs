//! Set-up and end of routes between two tasks, as far as the daemon is involved: shared-memory
//! rings and direct routes.
//!
//! The daemon forwards the messages that set up a route. It does not see the data that the two
//! tasks exchange on the route. Therefore it notifies each task when its peer ends, leaves the
//! virtual machine or migrates.

use super::io::Descriptors;
use super::routing::delivery_output;
use super::tasks::Task;
use super::{ConnId, Machine, Output};
use sempa_proto::Tid;
use sempa_proto::host::PendingItem;
use sempa_proto::route::{OFFER_ADDRESSES_MAX, RouteMsg};
use sempa_proto::task::ToTask;
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of tasks with which one task may share rings. The daemon carries the messages
/// between further pairs.
pub(super) const RING_PEERS_MAX: usize = 8192;

/// The pairs of tasks of this host that share rings or are setting them up, and the unanswered
/// offers of direct routes.
#[derive(Debug, Default)]
pub(super) struct RingPeers {
    /// Ring peers by task. Each pair is recorded under both tasks.
    peers_by_task: BTreeMap<Tid, BTreeSet<Tid>>,
    /// For each task of this host: the tasks of any host whose offers of a direct route the task
    /// has not answered.
    direct_offers: BTreeMap<Tid, BTreeSet<Tid>>,
}

impl RingPeers {
    /// True if the two tasks share rings, or may share rings without exceeding [`RING_PEERS_MAX`].
    fn can_share_rings(&self, a: Tid, b: Tid) -> bool {
        let peers_of = |tid| self.peers_by_task.get(&tid);
        peers_of(a).is_some_and(|p| p.contains(&b))
            || [a, b]
                .into_iter()
                .all(|tid| peers_of(tid).is_none_or(|p| p.len() < RING_PEERS_MAX))
    }

    /// Records a pair when an offer is forwarded. The offering task must be notified of the end of
    /// the other task even if the offer is not accepted.
    pub(super) fn add_pair(&mut self, a: Tid, b: Tid) {
        self.peers_by_task.entry(a).or_default().insert(b);
        self.peers_by_task.entry(b).or_default().insert(a);
    }

    /// Removes the task `tid`. Returns the tasks that shared rings with the removed task, and the
    /// tasks whose offers of a direct route the removed task has not answered.
    pub(super) fn remove_task(&mut self, tid: Tid) -> BTreeSet<Tid> {
        let mut affected_tasks = self.peers_by_task.remove(&tid).unwrap_or_default();
        for ring_peer in &affected_tasks {
            if let Some(peers_of_other) = self.peers_by_task.get_mut(ring_peer) {
                peers_of_other.remove(&tid);
                if peers_of_other.is_empty() {
                    self.peers_by_task.remove(ring_peer);
                }
            }
        }
        affected_tasks.extend(self.direct_offers.remove(&tid).unwrap_or_default());
        affected_tasks
    }

    /// Records that an offer of a direct route from the task `offerer` was delivered to the task
    /// `receiver`.
    fn add_direct_offer(&mut self, receiver: Tid, offerer: Tid) {
        let offerers = self.direct_offers.entry(receiver).or_default();
        if offerers.len() < RING_PEERS_MAX {
            offerers.insert(offerer);
        }
    }

    /// Records that the task `receiver` has answered the offer of a direct route from `offerer`.
    fn remove_direct_offer(&mut self, receiver: Tid, offerer: Tid) {
        if let Some(offerers) = self.direct_offers.get_mut(&receiver) {
            offerers.remove(&offerer);
            if offerers.is_empty() {
                self.direct_offers.remove(&receiver);
            }
        }
    }

    /// True if no pair and no offer is recorded.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.peers_by_task.is_empty() && self.direct_offers.is_empty()
    }
}

impl Machine {
    /// Handles a route message from one task to another.
    ///
    /// A message without descriptors is routed like any other item. A message with descriptors is
    /// delivered only to a connected task of this host; if there is no such task, the message is
    /// dropped (see [`Machine::handle_undeliverable_route_message`]).
    pub(super) fn forward_route_message(
        &mut self,
        conn: ConnId,
        dst: Tid,
        route_message: RouteMsg,
        descriptors: Descriptors,
    ) {
        let Some(src) = self.conns.task_of(conn) else {
            return;
        };
        if let RouteMsg::DirectOffer { addresses, .. } = &route_message
            && addresses.len() > OFFER_ADDRESSES_MAX
        {
            return self.log_warning(format!(
                "{src} offered {} addresses for a route; it was dropped",
                addresses.len()
            ));
        }
        if let RouteMsg::DirectAccept { .. } | RouteMsg::DirectRefuse { .. } = route_message {
            self.ring_peers.remove_direct_offer(src, dst);
        }
        if route_message.fd_count() == 0 && descriptors.count() == 0 {
            return self.deliver(
                dst,
                ToTask::Route {
                    sender: src,
                    same_host: false,
                    message: route_message,
                },
            );
        }
        let receiver_conn = self
            .tasks
            .get(dst)
            .filter(|t| dst != src && !t.holds_items)
            .and_then(Task::conn);
        let has_all_descriptors = route_message.fd_count() == descriptors.count();
        match receiver_conn
            .filter(|_| has_all_descriptors && self.ring_peers.can_share_rings(src, dst))
        {
            Some(conn) => {
                self.ring_peers.add_pair(src, dst);
                let message = ToTask::Route {
                    sender: src,
                    same_host: true,
                    message: route_message,
                };
                self.outputs.push_back(Output::SendToTaskWithFds {
                    conn,
                    message,
                    descriptors,
                });
            }
            None => self.handle_undeliverable_route_message(src, dst, &route_message),
        }
    }

    /// Handles a route message with descriptors that could not be delivered. An offer is refused.
    /// The sender of an acceptance is notified that the peer has migrated or ended, so that the
    /// sender does not use the rings. Only a task that cannot run on another host counts as ended,
    /// because a library drops all further messages to an ended peer.
    fn handle_undeliverable_route_message(&mut self, src: Tid, dst: Tid, message: &RouteMsg) {
        match *message {
            RouteMsg::RingOffer { id, .. } => {
                self.deliver(
                    src,
                    ToTask::Route {
                        sender: dst,
                        same_host: false,
                        message: RouteMsg::RingRefuse { id },
                    },
                );
            }
            // The shared pool is only an optimization, so its offer is dropped.
            RouteMsg::PoolOffer { .. } => {}
            _ if self.is_alive(dst) || self.may_run_elsewhere(dst) => {
                self.deliver(src, ToTask::PeerMigrated { tid: dst })
            }
            _ => self.deliver(src, ToTask::PeerGone { tid: dst }),
        }
    }

    /// Handles the end or the departure of the task `tid`. Notifies the tasks that share rings with
    /// `tid`, and the tasks whose offers of a direct route `tid` has not answered.
    pub(super) fn end_peer_routes(&mut self, tid: Tid) {
        for affected_task in self.ring_peers.remove_task(tid) {
            self.deliver(affected_task, ToTask::PeerGone { tid });
        }
    }

    /// Delivers a frame or an item on a task's connection, and records an offer of a direct route.
    /// Only this function decides whether a route message is marked as coming from the same host.
    pub(super) fn deliver_now(&mut self, conn: ConnId, mut item: PendingItem) {
        if let PendingItem::Control(ToTask::Route {
            sender,
            same_host,
            message,
        }) = &mut item
        {
            *same_host = match message {
                // A task that is still arriving will be able to use rings soon.
                RouteMsg::RingRefuse { .. } => self.is_alive(*sender),
                _ => self.tasks.get(*sender).is_some(),
            };
            if let (RouteMsg::DirectOffer { .. }, Some(tid)) = (message, self.conns.task_of(conn)) {
                self.ring_peers.add_direct_offer(tid, *sender);
            }
        }
        self.outputs.push_back(delivery_output(conn, item));
    }
}

/// Returns the task that must be notified if this item cannot be delivered because the receiver has
/// ended; `None` if no task must be notified.
pub(super) fn sender_of(item: &PendingItem) -> Option<Tid> {
    match item {
        PendingItem::Frame(frame) => {
            sempa_proto::link::LinkFrame::decode(frame.clone()).map(|frame| frame.src)
        }
        PendingItem::Control(ToTask::Route { sender, .. }) => Some(*sender),
        PendingItem::Control(_) => None,
    }
}
