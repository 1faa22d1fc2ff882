//! Last messages of tasks that have ended, in transit while other tasks are dumped.
//!
//! After a restart, a live task retransmits what its peers have not received. A task that has ended
//! cannot: its daemon sends the rest of its messages and then its exit notice. A checkpoint without
//! these messages would lose them, for example the result of a worker for which its coordinator
//! waits. Therefore:
//!
//! - Before a task is dumped, its daemon must know the exits of all ended tasks of its job.
//! - If last messages for the task are still queued when these exits are known, the task continues
//!   to receive them, and the checkpoint is tried again.

use crate::ring_peers::sender_of;
use crate::tasks::Task;
use crate::{Machine, Output, Timer};
use sempa_proto::host::{DataMsg, PendingItem};
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::migration::Failure;
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::{BTreeSet, VecDeque};

/// Largest number of exits that a daemon remembers.
const KNOWN_EXITS_MAX: usize = 65_536;
/// Time limit for an exit notice to arrive. After this time, the notice counts as lost with its
/// host or its session.
const EXIT_NOTICE_TIMEOUT: Micros = Micros::from_secs(2);
/// Time after an exit in which last messages may be in transit. A host that is silent for longer is
/// usually lost.
const RECENT_EXIT_WINDOW: Micros = Micros::from_secs(10);
/// Largest number of recent exits that the master remembers.
const RECENT_EXITS_MAX: usize = 512;

/// Tasks that are known to have ended.
#[derive(Debug, Default)]
pub(crate) struct KnownExits {
    tids: BTreeSet<Tid>,
    /// Tasks in the order of their exits, oldest first. May contain tasks that were forgotten.
    order: VecDeque<Tid>,
}

impl KnownExits {
    fn add(&mut self, tid: Tid) {
        if self.tids.insert(tid) {
            self.order.push_back(tid);
        }
        while self.order.len() > KNOWN_EXITS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.tids.remove(&oldest);
        }
    }

    /// Forgets a task that has been restarted.
    pub(crate) fn forget(&mut self, tid: Tid) {
        if self.tids.remove(&tid) {
            self.order.retain(|other| *other != tid);
        }
    }
}

/// Recent exits of all tasks, kept by the master. Before the first checkpoint of a job its members
/// are unknown, so that every task may belong to it.
#[derive(Debug, Default)]
pub(super) struct RecentExits(VecDeque<(Micros, Tid)>);

impl RecentExits {
    pub(super) fn add(&mut self, now: Micros, tid: Tid) {
        self.0.push_back((now, tid));
        let is_old = |(at, _): &(Micros, Tid)| now.since(*at) >= RECENT_EXIT_WINDOW;
        while self.0.len() > RECENT_EXITS_MAX || self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
    }

    /// Returns the tasks whose last messages may be in transit.
    pub(super) fn tids(&self, now: Micros) -> impl Iterator<Item = Tid> {
        self.0
            .iter()
            .filter(move |(at, _)| now.since(*at) < RECENT_EXIT_WINDOW)
            .map(|(_, tid)| *tid)
    }
}

impl Machine {
    /// Sends recent exit notices to a host that has just joined. It has not received these notices,
    /// and a dump on that host would wait for them until the timeout.
    pub(crate) fn send_recent_exits(&mut self, host: HostId) {
        let now = self.now;
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let ended: Vec<Tid> = job_checkpoints.recent_exits.tids(now).collect();
        let notices = ended.into_iter().map(|dst| DataMsg::Ended {
            tid: dst,
            watermarks: Vec::new(),
        });
        self.outputs
            .extend(notices.map(|message| Output::SendData { host, message }));
    }

    /// Handles an exit notice: all messages of that task have arrived.
    pub(crate) fn handle_exit_notice(&mut self, tid: Tid) {
        self.tasks.known_exits.add(tid);
        // Few tasks are being dumped at a time, usually none.
        for source in self.migrations.sources.values() {
            let Some(task) = self.tasks.live.get_mut(&source.migration().tid) else {
                continue;
            };
            if task.awaited_exits.remove(&tid) {
                self.migrations
                    .settled_parts
                    .extend(task.take_settled_part());
            }
        }
    }

    /// Makes the dump of a task wait until the exits of the tasks in `ended` are known on this
    /// host.
    pub(crate) fn await_exit_notices(&mut self, id: MigrationId, tid: Tid, ended: Vec<Tid>) {
        let known = &self.tasks.known_exits.tids;
        let may_arrive = |tid: &Tid| {
            self.location(*tid)
                .is_some_and(|host| self.table.get(host).is_some())
        };
        let awaits: BTreeSet<Tid> = ended
            .into_iter()
            .filter(|tid| !known.contains(tid) && may_arrive(tid))
            .collect();
        if awaits.is_empty() {
            return;
        }
        if let Some(task) = self.tasks.get_mut(tid) {
            task.awaited_exits = awaits;
            self.set_timer(EXIT_NOTICE_TIMEOUT, Timer::ExitNoticeTimeout(tid, id));
        }
    }

    /// Ends the wait of a dump for exit notices after [`EXIT_NOTICE_TIMEOUT`], although some have
    /// not arrived.
    pub(crate) fn stop_awaiting_exits(&mut self, tid: Tid, id: MigrationId) {
        let Some(task) = self
            .tasks
            .get_mut(tid)
            .filter(|task| task.settling_part == Some(id))
        else {
            return;
        };
        task.awaited_exits.clear();
        self.migrations
            .settled_parts
            .extend(task.take_settled_part());
    }

    /// Checks that no message of an ended task is queued for this task.
    ///
    /// # Errors
    /// The task must receive such a message before it is dumped.
    pub(super) fn check_last_messages_received(&self, task: &Task) -> Result<(), Failure> {
        let left = task
            .respawning
            .as_ref()
            .map_or(0, |respawning| respawning.left_items);
        let is_data = |held: &&PendingItem| match held {
            PendingItem::Frame(bytes) => {
                matches!(LinkFrame::kind_of(bytes), Some(LinkKind::Data { .. }))
            }
            PendingItem::Control(_) => false,
        };
        let mut senders = task
            .inbox
            .iter()
            .skip(left)
            .filter(is_data)
            .filter_map(sender_of);
        match senders.find(|src| self.tasks.known_exits.tids.contains(src)) {
            None => Ok(()),
            Some(src) => Err(Failure::Cancelled(format!(
                "the last words of {src} have come, which has ended, and it has to take them first"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recent exits are forgotten after a while, and their number is limited.
    #[test]
    fn recent_exits_expire_and_are_limited() {
        let mut recent = RecentExits::default();
        let all =
            |recent: &RecentExits, at: Micros| recent.tids(at).map(Tid::raw).collect::<Vec<_>>();
        recent.add(Micros(0), Tid::from_raw(1));
        recent.add(Micros(1), Tid::from_raw(2));
        assert_eq!(all(&recent, Micros(RECENT_EXIT_WINDOW.0 - 1)), [1, 2]);
        assert_eq!(all(&recent, RECENT_EXIT_WINDOW), [2]);
        recent.add(RECENT_EXIT_WINDOW + Micros(1), Tid::from_raw(3));
        assert_eq!(recent.0.len(), 1);
        (0..=RECENT_EXITS_MAX)
            .for_each(|_| recent.add(RECENT_EXIT_WINDOW + Micros(2), Tid::from_raw(4)));
        assert_eq!(
            all(&recent, RECENT_EXIT_WINDOW + Micros(2)),
            vec![4; RECENT_EXITS_MAX]
        );
    }

    /// The number of remembered exits is limited. The exit of a restarted task is forgotten.
    #[test]
    fn known_exits_are_limited_and_can_be_forgotten() {
        let mut ends = KnownExits::default();
        let tids = || {
            (0..=i32::try_from(KNOWN_EXITS_MAX).expect("small")).map(|n| Tid::from_raw(0x40000 + n))
        };
        tids().for_each(|tid| ends.add(tid));
        assert_eq!(
            (ends.tids.len(), ends.tids.first()),
            (KNOWN_EXITS_MAX, Some(&Tid::from_raw(0x40001)))
        );
        let again = Tid::from_raw(0x40005);
        ends.forget(again);
        assert!(!ends.tids.contains(&again));
        ends.add(again);
        assert_eq!(
            (ends.tids.len(), ends.order.len(), ends.order.back()),
            (KNOWN_EXITS_MAX, KNOWN_EXITS_MAX, Some(&again))
        );
    }
}
