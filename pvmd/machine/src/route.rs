//! Finding the way: link frames and items to tasks, wherever they run.
//!
//! A task here gets what is for it at once, or it waits in the task's inbox. For a task elsewhere it goes to the host
//! where the task runs by our knowledge; that host knows better if we are behind and passes it on. Only the host where a
//! task has to be can say that it is gone; for a host that is not in the table anybody can.

use super::{Machine, Output};
use bytes::Bytes;
use sempa_proto::host::{Carried, Held, HostMsg, Location};
use sempa_proto::link::LinkFrame;
use sempa_proto::task::{Reply, ToTask};
use sempa_proto::{Epoch, HostId, PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Places of tasks that have left their birth host, remembered also after they ended; the oldest go first.
pub(super) const LOCATIONS_MAX: usize = 1 << 20;

/// Where tasks are that do not run on their birth host.
#[derive(Debug, Default)]
pub(super) struct Locations {
    by_tid: BTreeMap<Tid, Location>,
    by_epoch: BTreeMap<(Epoch, Tid), ()>,
}

impl Locations {
    /// Where the task runs by our knowledge.
    pub(super) fn host(&self, tid: Tid) -> Option<HostId> {
        self.by_tid.get(&tid).map(|l| l.host).or_else(|| tid.home())
    }

    /// Since when it is there; 0 for a task on its birth host.
    pub(super) fn epoch(&self, tid: Tid) -> Epoch {
        self.by_tid.get(&tid).map(|l| l.epoch).unwrap_or_default()
    }

    /// Takes a newer place; false when ours is as new or newer.
    pub(super) fn set(&mut self, location: Location) -> bool {
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

    /// All of them, for a host that is new.
    pub(super) fn all(&self) -> Vec<Location> {
        self.by_tid.values().copied().collect()
    }
}

impl Machine {
    /// Where the task runs by our knowledge.
    pub(super) fn location(&self, tid: Tid) -> Option<HostId> {
        self.locations.host(tid)
    }

    /// Hands over or passes on; false when the task is gone for good.
    pub(super) fn route(&mut self, dst: Tid, held: Held) -> bool {
        if let Some(task) = self.tasks.get_mut(dst) {
            if task.phase == super::tasks::Phase::Left {
                return false;
            }
            if let Held::Item(ToTask::Reply { id, .. }) = &held {
                task.answered(*id);
                self.moves.settled.extend(task.take_settled());
            }
            match task.conn().filter(|_| !task.hold || task.passes(&held)) {
                Some(conn) => self.hand(conn, held),
                None => task.inbox.push(held),
            }
            return true;
        }
        if let Some(departed) = self.moves.departed.get(&dst) {
            let (to, migration) = (departed.to, departed.migration);
            self.hand_on(dst, to, migration, held);
            return true;
        }
        if let Some(arrival) = self.moves.arrivals.get_mut(&dst).filter(|a| a.located) {
            arrival.own.push(held);
            return true;
        }
        match self.location(dst) {
            Some(host) if host != self.config.host && self.table.get(host).is_some() => {
                let carried = match held {
                    Held::Link(frame) => Carried::Link(frame),
                    Held::Item(item) => Carried::Item { dst, item },
                };
                self.out.push_back(Output::Carry { host, carried });
                true
            }
            _ => false,
        }
    }

    /// An item for a task, wherever it runs. If the task has ended, a daemon's vanishes, and who sent a word is told.
    pub(super) fn deliver(&mut self, dst: Tid, item: ToTask) {
        let Some(item) = self.unless_news(dst, item) else {
            return;
        };
        let held = Held::Item(item);
        let sender = super::pairs::sender_of(&held);
        if !self.route(dst, held)
            && let Some(src) = sender
        {
            self.deliver(src, ToTask::PeerGone { tid: dst });
        }
    }

    /// The answer to a task's request.
    pub(super) fn reply(&mut self, tid: Tid, id: RequestId, reply: Reply) {
        self.deliver(tid, ToTask::Reply { id, reply });
    }

    /// The answer to a request that failed.
    pub(super) fn fail(
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

    /// A link frame on its way; its sender learns when its peer is gone.
    pub(super) fn forward_link(&mut self, src: Tid, dst: Tid, frame: Bytes) {
        if !self.route(dst, Held::Link(frame)) {
            self.deliver(src, ToTask::PeerGone { tid: dst });
        }
    }

    /// A link frame from a task here, which may speak for itself only.
    pub(super) fn link_from_task(&mut self, conn: super::ConnId, bytes: Bytes) {
        let Some(tid) = self.conns.task(conn) else {
            return;
        };
        let Some(frame) = LinkFrame::decode(bytes.clone()) else {
            return self.log(format!(
                "{tid} sent a link frame that cannot be read; it was dropped"
            ));
        };
        if self.is_half(tid, &frame, &bytes) {
            return;
        }
        if frame.src != tid {
            return self.log(format!(
                "{tid} sent a link frame in the name of {}; it was dropped",
                frame.src
            ));
        }
        self.said(tid, &frame, bytes);
    }

    /// Something from the data channel of another host.
    pub(super) fn host_carried(&mut self, host: HostId, carried: Carried) {
        match carried {
            Carried::Link(bytes) => match LinkFrame::decode(bytes.clone()) {
                Some(frame) => self.forward_link(frame.src, frame.dst, bytes),
                None => self.log(format!(
                    "{host} carried a link frame that cannot be read; it was dropped"
                )),
            },
            Carried::Item { dst, item } => self.deliver(dst, item),
            Carried::Ended { dst, marks } => self.task_ended_somewhere(dst, &marks),
            Carried::Passed { dst, epoch } => self.passed(host, dst, epoch),
            Carried::Record {
                dst,
                migration,
                record,
                complete,
            } => self.record_came(dst, migration, *record, complete),
            Carried::Handed {
                dst,
                migration,
                held,
            } => self.handed(dst, migration, held),
            Carried::HandedAll { dst, migration } => self.handed_all(dst, migration),
        }
    }

    /// Sends a control message to another daemon.
    pub(super) fn tell_host(&mut self, host: HostId, message: HostMsg) {
        self.out.push_back(Output::ToHost { host, message });
    }

    /// All hosts of the table but this one.
    pub(super) fn other_hosts(&self) -> Vec<HostId> {
        self.table
            .hosts
            .iter()
            .map(|h| h.id)
            .filter(|id| *id != self.config.host)
            .collect()
    }

    /// Tells the tasks here that have sent something to this one, or share rings with it, that it runs elsewhere now.
    pub(super) fn tell_peers_of_move(&mut self, tid: Tid) {
        let mut peers = self.pairs.take(tid);
        let senders = self
            .tasks
            .live
            .values()
            .filter(|t| t.tid != tid && t.marks.contains_key(&tid));
        peers.extend(senders.map(|t| t.tid));
        for peer in peers {
            self.deliver(peer, ToTask::PeerMoved { tid });
        }
    }
}

/// What the shell has to do to hand something to a connected task.
pub(super) fn hand_over(conn: super::ConnId, held: Held) -> Output {
    match held {
        Held::Link(frame) => Output::LinkToTask { conn, frame },
        Held::Item(message) => Output::ToTask { conn, message },
    }
}
