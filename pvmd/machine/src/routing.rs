//! Routes link frames and control messages ("items") to tasks, on any host.
//!
//! - A task of this host receives frames and items immediately, or they wait in its inbox.
//! - Frames and items for a task of another host are sent to the host where the task runs, as far
//!   as this daemon knows. If that location is outdated, the receiving host forwards them.
//! - Only the host that is the task's location decides that the task has ended. If that host is not
//!   in the table, every daemon treats the task as ended.

use super::tasks::ExitPositions;
use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::host::{DataMsg, HostMsg, Location, PendingItem};
use sempa_proto::link::LinkFrame;
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{Epoch, HostId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of locations of tasks that have left their birth host. Locations of ended tasks
/// are included; the oldest locations are dropped first.
pub(super) const LOCATIONS_MAX: usize = 1 << 20;

/// Locations of tasks that do not run on their birth host.
#[derive(Debug, Default)]
pub(super) struct Locations {
    locations_by_tid: BTreeMap<Tid, Location>,
    epoch_order: BTreeMap<(Epoch, Tid), ()>,
}

impl Locations {
    /// Returns the host that is the task's location, as far as this daemon knows; `None` if the tid
    /// names no host.
    pub(super) fn host_of(&self, tid: Tid) -> Option<HostId> {
        self.locations_by_tid
            .get(&tid)
            .map(|l| l.host)
            .or_else(|| tid.birth_host())
    }

    /// Returns the epoch of the task's location; 0 for a task on its birth host.
    pub(super) fn epoch_of(&self, tid: Tid) -> Epoch {
        self.locations_by_tid
            .get(&tid)
            .map(|l| l.epoch)
            .unwrap_or_default()
    }

    /// Stores a location. Returns false, without effect, if the stored location is not older.
    pub(super) fn update(&mut self, location: Location) -> bool {
        if self
            .locations_by_tid
            .get(&location.tid)
            .is_some_and(|stored_location| stored_location.epoch >= location.epoch)
        {
            return false;
        }
        if let Some(old_location) = self.locations_by_tid.insert(location.tid, location) {
            self.epoch_order
                .remove(&(old_location.epoch, old_location.tid));
        }
        self.epoch_order.insert((location.epoch, location.tid), ());
        if self.locations_by_tid.len() > LOCATIONS_MAX
            && let Some(((_, tid), ())) = self.epoch_order.pop_first()
        {
            self.locations_by_tid.remove(&tid);
        }
        true
    }

    /// Returns all locations, for a host that joins.
    pub(super) fn all_locations(&self) -> Vec<Location> {
        self.locations_by_tid.values().copied().collect()
    }
}

impl Machine {
    /// Returns the host that is the task's location, as far as this daemon knows; `None` if the tid
    /// names no host.
    pub(super) fn location(&self, tid: Tid) -> Option<HostId> {
        self.locations.host_of(tid)
    }

    /// Returns the task's location if it is another host and that host is in the table; otherwise
    /// `None`.
    fn other_host_in_table(&self, tid: Tid) -> Option<HostId> {
        self.location(tid)
            .filter(|host| *host != self.config.host && self.table.get(*host).is_some())
    }

    /// True if the task has left for another host of the table, as far as this daemon knows. The
    /// other host knows whether the task has ended.
    pub(super) fn may_run_elsewhere(&self, tid: Tid) -> bool {
        self.migrations.forwarding.contains_key(&tid) || self.other_host_in_table(tid).is_some()
    }

    /// Delivers or forwards a frame or an item. Returns false if the task has ended or never
    /// existed.
    pub(super) fn route_to_task(&mut self, dst: Tid, pending_item: PendingItem) -> bool {
        if let Some(task) = self.tasks.get_mut(dst) {
            if task.connection_phase == super::tasks::ConnectionPhase::Left {
                return false;
            }
            if let PendingItem::Control(ToTask::Reply { id, .. }) = &pending_item {
                task.remove_request(*id);
                self.migrations
                    .settled_parts
                    .extend(task.take_settled_part());
            }
            match task
                .conn()
                .filter(|_| !task.holds_items || task.accepts_during_handoff(&pending_item))
            {
                Some(conn) => self.deliver_now(conn, pending_item),
                None => task.inbox.push(pending_item),
            }
            return true;
        }
        if let Some(forwarding) = self.migrations.forwarding.get(&dst) {
            let (target, migration) = (forwarding.target, forwarding.migration);
            self.forward_item(dst, target, migration, pending_item);
            return true;
        }
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&dst)
            .filter(|a| a.is_located)
        {
            arrival.direct_items.push(pending_item);
            return true;
        }
        let Some(host) = self.other_host_in_table(dst) else {
            return false;
        };
        let message = match pending_item {
            PendingItem::Frame(frame) => DataMsg::Frame(frame),
            PendingItem::Control(item) => DataMsg::ControlItem { dst, item },
        };
        self.outputs.push_back(Output::SendData { host, message });
        true
    }

    /// Sends an item to a task of any host. If the task has ended, the item is dropped, and the
    /// sender of a route message receives [`ToTask::PeerGone`].
    pub(super) fn deliver(&mut self, dst: Tid, item: ToTask) {
        let Some(item) = self.batch_for_rm(dst, item) else {
            return;
        };
        let pending_item = PendingItem::Control(item);
        let sender = super::ring_peers::sender_of(&pending_item);
        if !self.route_to_task(dst, pending_item)
            && let Some(src) = sender
        {
            self.deliver(src, ToTask::PeerGone { tid: dst });
        }
    }

    /// Sends the reply to a task's request.
    pub(super) fn reply(&mut self, tid: Tid, id: RequestId, reply: Reply) {
        self.deliver(tid, ToTask::Reply { id, reply });
    }

    /// Sends the reply to a request that failed.
    pub(super) fn reply_error(
        &mut self,
        tid: Tid,
        id: RequestId,
        error: PvmError,
        reason: impl Into<String>,
    ) {
        self.reply(
            tid,
            id,
            Reply::Failed {
                error,
                reason: reason.into(),
            },
        );
    }

    /// Records how far a task of this host has been acknowledged by a peer.
    pub(super) fn record_acknowledgement(&mut self, frame: &LinkFrame) {
        if let Some(task) = self.tasks.get_mut(frame.dst)
            && task.watermarks.contains_key(&frame.src)
        {
            let acked_position = task.acked_positions.entry(frame.src).or_default();
            *acked_position = frame.ack.max(*acked_position);
        }
    }

    /// Forwards a link frame. If the receiver has ended, the sender receives [`ToTask::PeerGone`].
    pub(super) fn forward_link(&mut self, src: Tid, dst: Tid, frame: Bytes) {
        if !self.route_to_task(dst, PendingItem::Frame(frame)) {
            self.deliver(src, ToTask::PeerGone { tid: dst });
        }
    }

    /// Handles a link frame from a task of this host. A task may send frames only under its own
    /// tid. The only exception is the partial messages of a handoff.
    pub(super) fn handle_link_frame(&mut self, conn: super::ConnId, bytes: Bytes) {
        let Some(tid) = self.conns.task_of(conn) else {
            return;
        };
        let Some(frame) = LinkFrame::decode(bytes.clone()) else {
            return self.log_warning(format!(
                "{tid} sent a link frame that cannot be read; it was dropped"
            ));
        };
        if self.store_partial_fragment(tid, &frame, &bytes) {
            return;
        }
        if frame.src != tid {
            return self.log_warning(format!(
                "{tid} sent a link frame in the name of {}; it was dropped",
                frame.src
            ));
        }
        self.forward_or_log(tid, &frame, bytes);
    }

    /// Handles a message from the data channel of another host.
    pub(super) fn handle_data_message(&mut self, host: HostId, data_message: DataMsg) {
        match data_message {
            DataMsg::Frame(bytes) => match LinkFrame::decode(bytes.clone()) {
                Some(frame) => {
                    self.record_acknowledgement(&frame);
                    self.forward_link(frame.src, frame.dst, bytes);
                }
                None => self.log_warning(format!(
                    "{host} sent a link frame that cannot be read; it was dropped"
                )),
            },
            DataMsg::ControlItem { dst, item } => self.deliver(dst, item),
            DataMsg::TaskEnded {
                tid: dst,
                watermarks,
                past,
            } => self.handle_task_end(dst, &ExitPositions { watermarks, past }),
            DataMsg::RouteDrained { dst, epoch } => self.record_route_drained(host, dst, epoch),
            DataMsg::Record {
                dst,
                migration,
                record,
                is_final,
            } => self.handle_record(dst, migration, *record, is_final),
            DataMsg::Forwarded {
                dst,
                migration,
                item: forwarded_item,
            } => self.handle_forwarded(dst, migration, forwarded_item),
            DataMsg::ForwardingComplete { dst, migration } => {
                self.handle_forwarded_all(dst, migration)
            }
        }
    }

    pub(super) fn send_to_host(&mut self, host: HostId, message: HostMsg) {
        self.outputs.push_back(Output::SendToHost { host, message });
    }

    /// Returns all hosts of the table except this one.
    pub(super) fn other_hosts(&self) -> Vec<HostId> {
        self.table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != self.config.host)
            .collect()
    }

    /// Notifies the tasks of this host of the migration of `tid`, if they have sent messages to
    /// `tid` or share rings with `tid`.
    pub(super) fn notify_peers_of_migration(&mut self, tid: Tid) {
        let mut peers = self.ring_peers.remove_task(tid);
        let senders = self
            .tasks
            .live_tasks
            .values()
            .filter(|t| t.tid != tid && t.watermarks.contains_key(&tid));
        peers.extend(senders.map(|t| t.tid));
        for peer in peers {
            self.deliver(peer, ToTask::PeerMigrated { tid });
        }
    }
}

/// Returns the output by which the shell delivers a frame or an item to a connected task.
pub(super) fn delivery_output(conn: super::ConnId, item: PendingItem) -> Output {
    match item {
        PendingItem::Frame(frame) => Output::SendFrameToTask { conn, frame },
        PendingItem::Control(message) => Output::SendToTask { conn, message },
    }
}
