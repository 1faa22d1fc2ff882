//! Routes link frames and control messages ("items") to tasks, on any host.
//!
//! - A task of this host receives them immediately, or they wait in its inbox.
//! - For a task of another host they are sent to the host where it runs, as far as this daemon
//!   knows. If that location is outdated, the receiving host forwards them.
//! - Only the host where a task should run decides that the task is gone. If that host is not in
//!   the table, every daemon does.

use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::host::{DataMsg, HostMsg, Location, PendingItem};
use sempa_proto::link::LinkFrame;
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{Epoch, HostId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of locations of tasks that have left their birth host. Locations of ended tasks
/// are kept, too; the oldest are dropped first.
pub(super) const LOCATIONS_MAX: usize = 1 << 20;

/// Locations of tasks that do not run on their birth host.
#[derive(Debug, Default)]
pub(super) struct Locations {
    by_tid: BTreeMap<Tid, Location>,
    by_epoch: BTreeMap<(Epoch, Tid), ()>,
}

impl Locations {
    /// Returns the host where the task runs, as far as this daemon knows.
    pub(super) fn host_of(&self, tid: Tid) -> Option<HostId> {
        self.by_tid
            .get(&tid)
            .map(|l| l.host)
            .or_else(|| tid.birth_host())
    }

    /// Returns the epoch of the task's location; 0 for a task on its birth host.
    pub(super) fn epoch_of(&self, tid: Tid) -> Epoch {
        self.by_tid.get(&tid).map(|l| l.epoch).unwrap_or_default()
    }

    /// Stores a location. Returns false if the stored location is not older.
    pub(super) fn update(&mut self, location: Location) -> bool {
        if self
            .by_tid
            .get(&location.tid)
            .is_some_and(|known| known.epoch >= location.epoch)
        {
            return false;
        }
        if let Some(old) = self.by_tid.insert(location.tid, location) {
            self.by_epoch.remove(&(old.epoch, old.tid));
        }
        self.by_epoch.insert((location.epoch, location.tid), ());
        if self.by_tid.len() > LOCATIONS_MAX
            && let Some(((_, tid), ())) = self.by_epoch.pop_first()
        {
            self.by_tid.remove(&tid);
        }
        true
    }

    /// Returns all locations, for a host that joins.
    pub(super) fn all(&self) -> Vec<Location> {
        self.by_tid.values().copied().collect()
    }
}

impl Machine {
    /// Returns the host where the task runs, as far as this daemon knows.
    pub(super) fn location(&self, tid: Tid) -> Option<HostId> {
        self.locations.host_of(tid)
    }

    /// Returns the other host of the table where the task runs, as far as this daemon knows.
    fn other_host_in_table(&self, tid: Tid) -> Option<HostId> {
        self.location(tid)
            .filter(|host| *host != self.config.host && self.table.get(*host).is_some())
    }

    /// True if the task has left for another host of the table, as far as this daemon knows. That
    /// host knows whether the task has ended.
    pub(super) fn may_run_elsewhere(&self, tid: Tid) -> bool {
        self.migrations.forwarding.contains_key(&tid) || self.other_host_in_table(tid).is_some()
    }

    /// Delivers or forwards a frame or an item. Returns false if the task has ended or never
    /// existed.
    pub(super) fn route_to_task(&mut self, dst: Tid, held: PendingItem) -> bool {
        if let Some(task) = self.tasks.get_mut(dst) {
            if task.phase == super::tasks::ConnectionPhase::Left {
                return false;
            }
            if let PendingItem::Control(ToTask::Reply { id, .. }) = &held {
                task.remove_request(*id);
                self.migrations
                    .settled_parts
                    .extend(task.take_settled_part());
            }
            match task
                .conn()
                .filter(|_| !task.holds_items || task.accepts_during_handoff(&held))
            {
                Some(conn) => self.deliver_now(conn, held),
                None => task.inbox.push(held),
            }
            return true;
        }
        if let Some(departed) = self.migrations.forwarding.get(&dst) {
            let (to, migration) = (departed.to, departed.migration);
            self.forward(dst, to, migration, held);
            return true;
        }
        if let Some(arrival) = self
            .migrations
            .arrivals
            .get_mut(&dst)
            .filter(|a| a.is_located)
        {
            arrival.direct_items.push(held);
            return true;
        }
        let Some(host) = self.other_host_in_table(dst) else {
            return false;
        };
        let message = match held {
            PendingItem::Frame(frame) => DataMsg::Frame(frame),
            PendingItem::Control(item) => DataMsg::Item { dst, item },
        };
        self.outputs.push_back(Output::SendData { host, message });
        true
    }

    /// Sends an item to a task of any host. If the task has ended, an item of a daemon is dropped;
    /// the sender of a route message receives [`ToTask::PeerGone`].
    pub(super) fn deliver(&mut self, dst: Tid, item: ToTask) {
        let Some(item) = self.batch_for_rm(dst, item) else {
            return;
        };
        let held = PendingItem::Control(item);
        let sender = super::ring_peers::sender_of(&held);
        if !self.route_to_task(dst, held)
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

    /// Forwards a link frame. If the receiver is gone, the sender receives [`ToTask::PeerGone`].
    pub(super) fn forward_link(&mut self, src: Tid, dst: Tid, frame: Bytes) {
        if !self.route_to_task(dst, PendingItem::Frame(frame)) {
            self.deliver(src, ToTask::PeerGone { tid: dst });
        }
    }

    /// Handles a link frame from a task of this host. A task may send frames only under its own
    /// tid, except the partial messages of a handoff.
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
    pub(super) fn handle_data_message(&mut self, host: HostId, carried: DataMsg) {
        match carried {
            DataMsg::Frame(bytes) => match LinkFrame::decode(bytes.clone()) {
                Some(frame) => self.forward_link(frame.src, frame.dst, bytes),
                None => self.log_warning(format!(
                    "{host} sent a link frame that cannot be read; it was dropped"
                )),
            },
            DataMsg::Item { dst, item } => self.deliver(dst, item),
            DataMsg::Ended {
                tid: dst,
                watermarks,
            } => self.handle_task_end(dst, &watermarks),
            DataMsg::RouteDrained { dst, epoch } => self.record_route_drained(host, dst, epoch),
            DataMsg::Record {
                dst,
                migration,
                record,
                complete,
            } => self.handle_record(dst, migration, *record, complete),
            DataMsg::Forwarded {
                dst,
                migration,
                item: held,
            } => self.handle_forwarded(dst, migration, held),
            DataMsg::ForwardedAll { dst, migration } => self.handle_forwarded_all(dst, migration),
        }
    }

    pub(super) fn send_to_host(&mut self, host: HostId, message: HostMsg) {
        self.outputs.push_back(Output::ToHost { host, message });
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

    /// Notifies tasks of this host that `tid` has migrated: those that have sent to it or share
    /// rings with it.
    pub(super) fn notify_peers_of_migration(&mut self, tid: Tid) {
        let mut peers = self.ring_peers.remove_task(tid);
        let senders = self
            .tasks
            .live
            .values()
            .filter(|t| t.tid != tid && t.watermarks.contains_key(&tid));
        peers.extend(senders.map(|t| t.tid));
        for peer in peers {
            self.deliver(peer, ToTask::PeerMigrated { tid });
        }
    }
}

/// Returns the output by which the shell delivers a frame or an item to a connected task.
pub(super) fn delivery_output(conn: super::ConnId, held: PendingItem) -> Output {
    match held {
        PendingItem::Frame(frame) => Output::LinkToTask { conn, frame },
        PendingItem::Control(message) => Output::ToTask { conn, message },
    }
}
