//! Drains hosts on request: their tasks migrate to other hosts, no task is started there, and the
//! requesting task can query the progress. The event log contains each drain, so that a restarted
//! resource manager can continue the drain.

use super::Service;
use crate::api::VmApi;
use crate::decide::{StayDecision, plan_evictions};
use crate::recording::RecordedInput;
use sempa_proto::event::EventKind;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

/// Deadlines of drains on the service's clock, by host. Hosts that are drained without a deadline
/// are not in the map.
#[derive(Debug, Default)]
pub(super) struct DrainDeadlines(BTreeMap<HostId, Micros>);

impl DrainDeadlines {
    /// Returns the time at which [`Service::report_overdue_drains`] is due; `None` if no drain has
    /// a deadline.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        self.0.values().copied().min()
    }
}

impl<V: VmApi> Service<V> {
    /// Continues the drains that the history contains.
    pub(super) fn restore_drains(&mut self) {
        let (now, wall_time) = (self.vm.now(), self.vm.wall_clock());
        for (host, requester, wall_deadline) in self.history.writer.history.draining_hosts() {
            self.model.set_drain(host, Some(requester));
            if let Some(remaining_time) = wall_deadline
                .filter(|wall_deadline| *wall_deadline > wall_time)
                .map(|wall_deadline| wall_deadline.since(wall_time))
            {
                self.drain_deadlines.0.insert(host, now + remaining_time);
            }
        }
    }

    /// Writes the current drains to a recording that has just started.
    pub(super) fn record_drains(&mut self) {
        let now = self.vm.now();
        let drains: Vec<(String, Tid, Option<Micros>)> = (self.model.drained_hosts())
            .map(|(id, requester)| {
                (
                    self.model.host_name(id),
                    requester,
                    self.drain_deadlines
                        .0
                        .get(&id)
                        .map(|deadline| deadline.since(now)),
                )
            })
            .collect();
        for (host, requester, time_until_deadline) in drains {
            self.record_input(|| RecordedInput::Drain {
                host,
                requester,
                is_start: true,
                time_until_deadline,
            });
        }
    }

    /// Handles a request of task `requester` to drain a host. `time_until_deadline`: time until the
    /// deadline. Without a deadline, tasks that stay are not reported.
    pub(super) fn start_drain(
        &mut self,
        requester: Tid,
        host: &str,
        time_until_deadline: Option<Micros>,
    ) -> RmReply {
        let Some(id) = self.model.host_by_name(host) else {
            return RmReply::NotFound;
        };
        self.record_input(|| RecordedInput::Drain {
            host: host.to_string(),
            requester,
            is_start: true,
            time_until_deadline,
        });
        let now = self.vm.now();
        let wall_deadline = time_until_deadline.map(|time| self.vm.wall_clock() + time);
        let deadlines = &mut self.drain_deadlines.0;
        if let Some(time_until_deadline) = time_until_deadline {
            deadlines.insert(id, now + time_until_deadline);
        } else {
            deadlines.remove(&id);
        }
        self.log_event(EventKind::DrainStarted {
            host: id,
            requested_by: requester,
            deadline: wall_deadline,
        });
        self.revoke_grants();
        self.model.set_drain(id, Some(requester));
        self.start_evictions();
        self.drain_reply(id)
    }

    /// Handles a request of task `requester` to end the drain of a host, so that the host accepts
    /// tasks again.
    pub(super) fn end_drain(&mut self, requester: Tid, host: &str) -> RmReply {
        let Some(id) = self.model.host_by_name(host) else {
            return RmReply::NotFound;
        };
        if self.model.is_drained(id) {
            self.record_input(|| RecordedInput::Drain {
                host: host.to_string(),
                requester,
                is_start: false,
                time_until_deadline: None,
            });
            self.log_event(EventKind::DrainEnded {
                host: id,
                requested_by: requester,
            });
            self.model.set_drain(id, None);
            self.drain_deadlines.0.remove(&id);
            self.needs_eviction_decision = true;
        }
        self.drain_reply(id)
    }

    /// Returns the progress of the drain of a host.
    pub(super) fn drain_progress(&mut self, host: &str) -> RmReply {
        self.model
            .host_by_name(host)
            .map_or(RmReply::NotFound, |id| self.drain_reply(id))
    }

    /// Returns the reply about the remaining tasks of a host. For each task that cannot migrate at
    /// present, the reply contains the reason.
    fn drain_reply(&mut self, id: HostId) -> RmReply {
        let is_drained_now = self.model.is_drained(id);
        let snapshot = self.model.update_snapshot(self.vm.now());
        let stays: BTreeMap<Tid, StayDecision> = plan_evictions(snapshot)
            .stays
            .into_iter()
            .map(|pinned_count| (pinned_count.tid, pinned_count))
            .collect();
        let Some(host) = snapshot.host(id) else {
            return RmReply::NotFound;
        };
        let reason_of = |tid: &Tid| {
            stays
                .get(tid)
                .map(|pinned_count| pinned_count.describe(snapshot))
        };
        let (pinned_tasks, guests): (Vec<_>, Vec<_>) =
            host.tasks.iter().partition(|task| task.pinned);
        let mut tasks: Vec<(Tid, Option<String>)> = guests
            .iter()
            .map(|task| (task.tid, reason_of(&task.tid)))
            .collect();
        tasks.truncate(REPLY_ENTRIES_MAX);
        let pinned_count = pinned_tasks
            .iter()
            .filter(|task| !sempa_proto::load::is_load_watcher(&task.name))
            .count() as u32;
        RmReply::Drain {
            is_drained: is_drained_now,
            tasks,
            bound_tasks: pinned_count,
        }
    }

    /// Logs the remaining tasks of hosts whose deadline has passed.
    pub(super) fn report_overdue_drains(&mut self, now: Micros) {
        let overdue_hosts: Vec<HostId> = self
            .drain_deadlines
            .0
            .iter()
            .filter(|(_, deadline)| **deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in overdue_hosts {
            self.drain_deadlines.0.remove(&id);
            let RmReply::Drain { tasks, .. } = self.drain_reply(id) else {
                continue;
            };
            if tasks.is_empty() {
                continue;
            }
            let describe_task = |(tid, why): &(Tid, Option<String>)| match why {
                Some(why) => format!("{tid} ({why})"),
                None => format!("{tid} (migrating)"),
            };
            let task_texts: Vec<String> = tasks.iter().map(describe_task).collect();
            let name = self.model.host_name(id);
            self.log_note(format!(
                "{name} should be empty by now; remaining tasks: {}",
                task_texts.join(", ")
            ));
        }
    }
}
