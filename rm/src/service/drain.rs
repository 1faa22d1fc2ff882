//! Drains hosts on request: their tasks migrate to other hosts, no task is started there, and the
//! requesting task can query the progress. The event log contains each drain, so a restarted
//! resource manager continues it.

use super::Service;
use crate::api::VmApi;
use crate::decide::{StayDecision, plan_evictions};
use crate::recording::RecordedInput;
use sempa_proto::event::EventKind;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

/// Hosts that are drained with a deadline, and the deadline on the service's clock.
#[derive(Debug, Default)]
pub(super) struct DrainDeadlines(BTreeMap<HostId, Micros>);

impl DrainDeadlines {
    /// Returns when [`Service::report_overdue_drains`] is due.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        self.0.values().copied().min()
    }
}

impl<V: VmApi> Service<V> {
    /// Continues the drains that the history contains.
    pub(super) fn restore_drains(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall_clock());
        for (host, by, until) in self.history.writer.history.draining_hosts() {
            self.model.set_drain(host, Some(by));
            if let Some(left) = until
                .filter(|until| *until > wall)
                .map(|until| until.since(wall))
            {
                self.drain_deadlines.0.insert(host, now + left);
            }
        }
    }

    /// Writes the current drains to a recording that has just begun.
    pub(super) fn record_drains(&mut self) {
        let now = self.vm.now();
        let drained: Vec<(String, Tid, Option<Micros>)> = (self.model.drained_hosts())
            .map(|(id, by)| {
                (
                    self.model.host_name(id),
                    by,
                    self.drain_deadlines.0.get(&id).map(|at| at.since(now)),
                )
            })
            .collect();
        for (host, by, within) in drained {
            self.record_input(|| RecordedInput::Drain {
                host,
                by,
                begun: true,
                within,
            });
        }
    }

    /// Handles a request of task `by` to drain a host. `within`: time until the deadline; without
    /// it, tasks that stay are not reported.
    pub(super) fn drain(&mut self, by: Tid, host: &str, within: Option<Micros>) -> RmReply {
        let Some(id) = self.model.host_by_name(host) else {
            return RmReply::NotFound;
        };
        self.record_input(|| RecordedInput::Drain {
            host: host.to_string(),
            by,
            begun: true,
            within,
        });
        let (now, until) = (
            self.vm.now(),
            within.map(|within| self.vm.wall_clock() + within),
        );
        match within {
            Some(within) => drop(self.drain_deadlines.0.insert(id, now + within)),
            None => drop(self.drain_deadlines.0.remove(&id)),
        }
        self.log_event(EventKind::DrainStarted {
            host: id,
            requested_by: by,
            deadline: until,
        });
        self.revoke_grants();
        self.model.set_drain(id, Some(by));
        self.decide_evictions();
        self.drain_answer(id)
    }

    /// Handles a request of task `by` to end the drain of a host, so that it accepts tasks again.
    pub(super) fn undrain(&mut self, by: Tid, host: &str) -> RmReply {
        let Some(id) = self.model.host_by_name(host) else {
            return RmReply::NotFound;
        };
        if self.model.is_drained(id) {
            self.record_input(|| RecordedInput::Drain {
                host: host.to_string(),
                by,
                begun: false,
                within: None,
            });
            self.log_event(EventKind::DrainEnded {
                host: id,
                requested_by: by,
            });
            self.model.set_drain(id, None);
            self.drain_deadlines.0.remove(&id);
            self.needs_decision = true;
        }
        self.drain_answer(id)
    }

    /// Returns the progress of the drain of a host.
    pub(super) fn drain_progress(&mut self, host: &str) -> RmReply {
        self.model
            .host_by_name(host)
            .map_or(RmReply::NotFound, |id| self.drain_answer(id))
    }

    /// Returns the remaining tasks of a host. For each task that cannot migrate now, the reply
    /// contains the reason.
    fn drain_answer(&mut self, id: HostId) -> RmReply {
        let drained = self.model.is_drained(id);
        let snapshot = self.model.snapshot(self.vm.now());
        let stays: BTreeMap<Tid, StayDecision> = plan_evictions(snapshot)
            .staying
            .into_iter()
            .map(|stay| (stay.tid, stay))
            .collect();
        let Some(host) = snapshot.host(id) else {
            return RmReply::NotFound;
        };
        let why = |tid: &Tid| stays.get(tid).map(|stay| stay.describe(snapshot));
        let (fixed, others): (Vec<_>, Vec<_>) = host.tasks.iter().partition(|task| task.pinned);
        let mut tasks: Vec<(Tid, Option<String>)> = others
            .iter()
            .map(|task| (task.tid, why(&task.tid)))
            .collect();
        tasks.truncate(REPLY_ENTRIES_MAX);
        let stay = fixed
            .iter()
            .filter(|task| !sempa_proto::load::is_load_watcher(&task.name))
            .count() as u32;
        RmReply::Drain {
            drained,
            tasks,
            staying: stay,
        }
    }

    /// Logs the remaining tasks of hosts whose deadline has passed.
    pub(super) fn report_overdue_drains(&mut self, now: Micros) {
        let due: Vec<HostId> = self
            .drain_deadlines
            .0
            .iter()
            .filter(|(_, at)| **at <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.drain_deadlines.0.remove(&id);
            let RmReply::Drain { tasks, .. } = self.drain_answer(id) else {
                continue;
            };
            if tasks.is_empty() {
                continue;
            }
            let one = |(tid, why): &(Tid, Option<String>)| match why {
                Some(why) => format!("{tid} ({why})"),
                None => format!("{tid} (migrating)"),
            };
            let list: Vec<String> = tasks.iter().map(one).collect();
            let name = self.model.host_name(id);
            self.log_note(format!(
                "{name} should be empty by now; remaining tasks: {}",
                list.join(", ")
            ));
        }
    }
}
