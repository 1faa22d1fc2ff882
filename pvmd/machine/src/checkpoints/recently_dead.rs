//! Tasks that may have died with their host, before the master knows of the loss of the host.
//!
//! - A machine that shuts down ends its processes one after the other, its daemon possibly last.
//!   The daemon then reports killed tasks, and ends a moment later.
//! - If a host dies that still has memory of a post-copied task, the task is killed on the host
//!   where it runs. The exit of the task may be known before the loss of the host with the memory.
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
    /// Time of death, by task and by the host whose loss may have killed the task. A task may have
    /// two such hosts: the host where the task was killed, and the host that had its memory.
    death_times: BTreeMap<(Tid, HostId), Micros>,
    /// Tasks that were ordered to end. Their death does not indicate that their host is lost.
    ordered_to_end: BTreeSet<Tid>,
}

impl RecentDeaths {
    /// Records that a member of the job was ordered to end.
    pub(super) fn record_end_order(&mut self, tid: Tid) {
        self.ordered_to_end.insert(tid);
    }

    /// Records the death of a task, if the event reports a death that may indicate the loss of a
    /// host. `host` is the host of the event.
    pub(super) fn update_after_event(&mut self, now: Micros, host: HostId, event: &EventKind) {
        let (tid, lost_host) = match event {
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
        if lost_host != HostId::MASTER {
            self.death_times.insert((tid, lost_host), now);
        }
    }

    /// True if any of the tasks may have been lost with the host `host`. A lost host was silent for
    /// the time `lease` before it counted as lost.
    pub(super) fn has_task_lost_with(&self, now: Micros, lease: Micros, host: HostId) -> bool {
        self.death_times.iter().any(|((_, lost_host), died_at)| {
            *lost_host == host && now < *died_at + lease + SHUTDOWN_WINDOW
        })
    }

    /// Returns the end of the time in which the loss of a host may still explain the death of a
    /// task; `None` if this time has passed for all tasks.
    pub(super) fn uncertainty_end(&self, now: Micros, lease: Micros) -> Option<Micros> {
        self.death_times
            .values()
            .map(|died_at| *died_at + lease + SHUTDOWN_WINDOW)
            .filter(|end_time| now < *end_time)
            .max()
    }

    /// Forgets all tasks that are not in the new checkpoint, because a rollback to this checkpoint
    /// does not restore them.
    pub(super) fn retain_tasks(&mut self, tasks: &[Tid]) {
        self.death_times.retain(|(tid, _), _| tasks.contains(tid));
        self.ordered_to_end.retain(|tid| tasks.contains(tid));
    }
}
