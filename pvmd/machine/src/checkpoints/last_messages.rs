//! Last messages of tasks that have ended, in transit while other tasks are dumped.
//!
//! After a restart, a live task retransmits what its peers have not received. An ended task cannot
//! retransmit: the daemon of its host sends the rest of the task's messages, and then an exit
//! notice. A checkpoint without these messages would lose them, for example the result of a worker
//! for which its coordinator waits. Therefore:
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
/// Time limit for an exit notice to arrive. A notice that has not arrived by then counts as lost
/// with its host or its session.
const EXIT_NOTICE_TIMEOUT: Micros = Micros::from_secs(2);
/// Time after an exit in which last messages may be in transit. A host that is silent for a longer
/// time is usually lost.
const RECENT_EXIT_WINDOW: Micros = Micros::from_secs(10);
/// Largest number of recent exits that the master remembers.
const RECENT_EXITS_MAX: usize = 512;

/// Tasks that are known to have ended.
#[derive(Debug, Default)]
pub(crate) struct KnownExits {
    tids: BTreeSet<Tid>,
    /// Tasks in the order of their exits, oldest first.
    exit_order: VecDeque<Tid>,
}

impl KnownExits {
    fn record_exit(&mut self, tid: Tid) {
        if self.tids.insert(tid) {
            self.exit_order.push_back(tid);
        }
        while self.exit_order.len() > KNOWN_EXITS_MAX
            && let Some(oldest_tid) = self.exit_order.pop_front()
        {
            self.tids.remove(&oldest_tid);
        }
    }

    /// Forgets the exit of a task that has been restarted.
    pub(crate) fn forget_exit(&mut self, tid: Tid) {
        if self.tids.remove(&tid) {
            self.exit_order.retain(|exited_tid| *exited_tid != tid);
        }
    }
}

/// Recent exits of all tasks, recorded by the master. The members of a job are unknown before its
/// first checkpoint, so every task may belong to the job.
#[derive(Debug, Default)]
pub(super) struct RecentExits(VecDeque<(Micros, Tid)>);

impl RecentExits {
    pub(super) fn record_exit(&mut self, now: Micros, tid: Tid) {
        self.0.push_back((now, tid));
        let is_old = |(exited_at, _): &(Micros, Tid)| now.since(*exited_at) >= RECENT_EXIT_WINDOW;
        while self.0.len() > RECENT_EXITS_MAX || self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
    }

    /// Returns the tasks whose last messages may be in transit.
    pub(super) fn recent_tids(&self, now: Micros) -> impl Iterator<Item = Tid> {
        self.0
            .iter()
            .filter(move |(exited_at, _)| now.since(*exited_at) < RECENT_EXIT_WINDOW)
            .map(|(_, tid)| *tid)
    }
}

impl Machine {
    /// Sends recent exit notices to a host that has just joined and has not received them. Without
    /// these notices, a dump on the new host would wait until the timeout.
    pub(crate) fn send_recent_exits(&mut self, host: HostId) {
        let now = self.now;
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let ended_tasks: Vec<Tid> = job_checkpoints.recent_exits.recent_tids(now).collect();
        let notices = ended_tasks.into_iter().map(|ended_tid| DataMsg::TaskEnded {
            tid: ended_tid,
            watermarks: Vec::new(),
            past: Default::default(),
        });
        self.outputs
            .extend(notices.map(|message| Output::SendData { host, message }));
    }

    /// Handles the exit notice of the task `tid`: all messages of the task have arrived. Dumps that
    /// waited only for this notice continue.
    pub(crate) fn handle_exit_notice(&mut self, tid: Tid) {
        self.tasks.known_exits.record_exit(tid);
        // Usually no task is being dumped, so the loop over all sources is short.
        for source in self.migrations.sources.values() {
            let Some(task) = self.tasks.live_tasks.get_mut(&source.migration().tid) else {
                continue;
            };
            if task.awaited_exits.remove(&tid) {
                self.migrations
                    .settled_parts
                    .extend(task.take_settled_part());
            }
        }
    }

    /// Makes the dump of a task wait until the exits of the tasks in `ended_tasks` are known on
    /// this host.
    pub(crate) fn begin_awaiting_exits(
        &mut self,
        id: MigrationId,
        tid: Tid,
        ended_tasks: Vec<Tid>,
    ) {
        let known_tids = &self.tasks.known_exits.tids;
        let exit_notice_may_arrive = |tid: &Tid| {
            self.location(*tid)
                .is_some_and(|host| self.table.get(host).is_some())
        };
        let awaited_exits: BTreeSet<Tid> = ended_tasks
            .into_iter()
            .filter(|tid| !known_tids.contains(tid) && exit_notice_may_arrive(tid))
            .collect();
        if awaited_exits.is_empty() {
            return;
        }
        if let Some(task) = self.tasks.get_mut(tid) {
            task.awaited_exits = awaited_exits;
            self.set_timer(EXIT_NOTICE_TIMEOUT, Timer::ExitNoticeTimeout(tid, id));
        }
    }

    /// Ends the wait of a dump for exit notices after [`EXIT_NOTICE_TIMEOUT`], although some
    /// notices have not arrived.
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
    /// `Failure::Cancelled` if such a message is queued: the task must receive it before it is
    /// dumped.
    pub(super) fn check_last_messages_received(&self, task: &Task) -> Result<(), Failure> {
        let handoff_item_count = task
            .respawn_state
            .as_ref()
            .map_or(0, |state| state.handoff_item_count);
        let is_data = |item: &&PendingItem| match item {
            PendingItem::Frame(bytes) => {
                matches!(LinkFrame::peek_kind(bytes), Some(LinkKind::Data { .. }))
            }
            PendingItem::Control(_) => false,
        };
        let mut senders = task
            .inbox
            .iter()
            .skip(handoff_item_count)
            .filter(is_data)
            .filter_map(sender_of);
        match senders.find(|src| self.tasks.known_exits.tids.contains(src)) {
            None => Ok(()),
            Some(src) => Err(Failure::Cancelled(format!(
                "it must first receive the last messages of {src}, which has ended"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recent exits are forgotten after [`RECENT_EXIT_WINDOW`], and their number is limited.
    #[test]
    fn recent_exits_expire_and_are_limited() {
        let mut recent_exits = RecentExits::default();
        let raw_tids = |recent_exits: &RecentExits, now: Micros| {
            recent_exits
                .recent_tids(now)
                .map(Tid::raw)
                .collect::<Vec<_>>()
        };
        recent_exits.record_exit(Micros(0), Tid::from_raw(1));
        recent_exits.record_exit(Micros(1), Tid::from_raw(2));
        assert_eq!(
            raw_tids(&recent_exits, Micros(RECENT_EXIT_WINDOW.0 - 1)),
            [1, 2]
        );
        assert_eq!(raw_tids(&recent_exits, RECENT_EXIT_WINDOW), [2]);
        recent_exits.record_exit(RECENT_EXIT_WINDOW + Micros(1), Tid::from_raw(3));
        assert_eq!(recent_exits.0.len(), 1);
        (0..=RECENT_EXITS_MAX).for_each(|_| {
            recent_exits.record_exit(RECENT_EXIT_WINDOW + Micros(2), Tid::from_raw(4))
        });
        assert_eq!(
            raw_tids(&recent_exits, RECENT_EXIT_WINDOW + Micros(2)),
            vec![4; RECENT_EXITS_MAX]
        );
    }

    /// The number of remembered exits is limited. The exit of a restarted task is forgotten.
    #[test]
    fn known_exits_are_limited_and_can_be_forgotten() {
        let mut known_exits = KnownExits::default();
        let tids = || {
            (0..=i32::try_from(KNOWN_EXITS_MAX).expect("small")).map(|n| Tid::from_raw(0x40000 + n))
        };
        tids().for_each(|tid| known_exits.record_exit(tid));
        assert_eq!(
            (known_exits.tids.len(), known_exits.tids.first()),
            (KNOWN_EXITS_MAX, Some(&Tid::from_raw(0x40001)))
        );
        let restarted_tid = Tid::from_raw(0x40005);
        known_exits.forget_exit(restarted_tid);
        assert!(!known_exits.tids.contains(&restarted_tid));
        known_exits.record_exit(restarted_tid);
        assert_eq!(
            (
                known_exits.tids.len(),
                known_exits.exit_order.len(),
                known_exits.exit_order.back()
            ),
            (KNOWN_EXITS_MAX, KNOWN_EXITS_MAX, Some(&restarted_tid))
        );
    }
}
