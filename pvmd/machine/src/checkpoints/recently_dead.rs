//! Tasks that may have died with their host, before the loss of the host is known.
//!
//! - A machine that shuts down ends its processes one after the other, its daemon possibly last.
//!   The daemon then reports killed tasks, and is gone a moment later.
//! - A post-copied task whose memory is still on a host that dies is killed where it runs. Its exit
//!   may be known before the loss.
//!
//! In both cases the tasks have not ended voluntarily. If the host turns out to be lost, the job
//! rolls back as if the tasks had run on that host.

use super::job_end::END_SIGNALS;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Longest time between the kill of a task during the shutdown of a machine and the end of the
/// daemon on that machine.
const SHUTDOWN_WINDOW: Micros = Micros::from_secs(10);

/// Tasks of one job that may have died with a host.
#[derive(Debug, Default)]
pub(super) struct RecentDeaths {
    /// Time of death, by task and by the host with which the task may have been lost. A task may
    /// have two such hosts: the one where it was killed, and the one that had its memory.
    suspects: BTreeMap<(Tid, HostId), Micros>,
    /// Tasks that were ordered to end. Their death does not indicate that their host is lost.
    ordered_to_end: BTreeSet<Tid>,
}

impl RecentDeaths {
    /// Records that a member of the job was ordered to end.
    pub(super) fn record_end_order(&mut self, tid: Tid) {
        self.ordered_to_end.insert(tid);
    }

    /// Records the death of a task, if an event of `host` reports one that may indicate the loss of
    /// a host.
    pub(super) fn update_after_event(&mut self, now: Micros, host: HostId, kind: &EventKind) {
        let (tid, with) = match kind {
            EventKind::TaskEnded { tid, status, .. }
                if END_SIGNALS.contains(&(status & 0x7f)) && !self.ordered_to_end.contains(tid) =>
            {
                (*tid, host)
            }
            EventKind::MigrationFailed {
                tid,
                from,
                step: Step::Arrive,
                ..
            } => (*tid, *from),
            _ => return,
        };
        // The loss of the master's host ends this daemon, too.
        if with != HostId::MASTER {
            self.suspects.insert((tid, with), now);
        }
    }

    /// True if any of the tasks may have been lost with this host. A lost host has already been
    /// silent for `lease`.
    pub(super) fn any_lost_with(&self, now: Micros, lease: Micros, host: HostId) -> bool {
        self.suspects
            .iter()
            .any(|((_, with), since)| *with == host && now < *since + lease + SHUTDOWN_WINDOW)
    }

    /// Returns the time until which it is unknown whether tasks were lost with their hosts; `None`
    /// if there are no such tasks.
    pub(super) fn unknown_until(&self, now: Micros, lease: Micros) -> Option<Micros> {
        self.suspects
            .values()
            .map(|since| *since + lease + SHUTDOWN_WINDOW)
            .filter(|until| now < *until)
            .max()
    }

    /// Forgets all tasks except those of the new checkpoint, because a rollback to it does not
    /// restore other tasks.
    pub(super) fn retain_tasks(&mut self, tasks: &[Tid]) {
        self.suspects.retain(|(tid, _), _| tasks.contains(tid));
        self.ordered_to_end.retain(|tid| tasks.contains(tid));
    }
}
