//! Hosts that are drained on request: their tasks leave, no task is started there, and the
//! requesting task can ask for the progress. The event log contains each drain, so a restarted
//! resource manager continues it.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Stay, moves};
use crate::recording::Input;
use sempa_proto::event::EventKind;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

/// Hosts that must be empty at a future time, on the service's clock.
#[derive(Debug, Default)]
pub(super) struct Draining(BTreeMap<HostId, Micros>);

impl Draining {
    /// Returns when [`Service::drains_due`] is due.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        self.0.values().copied().min()
    }
}

impl<V: VmApi> Service<V> {
    /// Continues the drains in the history.
    pub(super) fn recall_drains(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall());
        for (host, by, until) in self.memory.ledger.books.drained() {
            self.model.drain(host, Some(by));
            if let Some(left) = until
                .filter(|until| *until > wall)
                .map(|until| until.since(wall))
            {
                self.draining.0.insert(host, now + left);
            }
        }
    }

    /// Writes the current drains to a recording that has just begun.
    pub(super) fn record_drains(&mut self) {
        let now = self.vm.now();
        let drained: Vec<(String, Tid, Option<Micros>)> = (self.model.drained())
            .map(|(id, by)| {
                (
                    self.model.host_name(id),
                    by,
                    self.draining.0.get(&id).map(|at| at.since(now)),
                )
            })
            .collect();
        for (host, by, within) in drained {
            self.record_input(|| Input::Drain {
                host,
                by,
                begun: true,
                within,
            });
        }
    }

    /// Handles a request to drain a host, within a time or as soon as possible.
    pub(super) fn drain(&mut self, by: Tid, host: &str, within: Option<Micros>) -> RmReply {
        let Some(id) = self.model.host_called(host) else {
            return RmReply::NotFound;
        };
        self.record_input(|| Input::Drain {
            host: host.to_string(),
            by,
            begun: true,
            within,
        });
        let (now, until) = (self.vm.now(), within.map(|within| self.vm.wall() + within));
        match within {
            Some(within) => drop(self.draining.0.insert(id, now + within)),
            None => drop(self.draining.0.remove(&id)),
        }
        self.record(EventKind::DrainStarted {
            host: id,
            requested_by: by,
            deadline: until,
        });
        self.take_grants_back();
        self.model.drain(id, Some(by));
        self.decide_moves();
        self.drain_state(id)
    }

    /// Handles a request to let a host take tasks again.
    pub(super) fn undrain(&mut self, by: Tid, host: &str) -> RmReply {
        let Some(id) = self.model.host_called(host) else {
            return RmReply::NotFound;
        };
        if self.model.is_drained(id) {
            self.record_input(|| Input::Drain {
                host: host.to_string(),
                by,
                begun: false,
                within: None,
            });
            self.record(EventKind::DrainEnded {
                host: id,
                requested_by: by,
            });
            self.model.drain(id, None);
            self.draining.0.remove(&id);
            self.changed = true;
        }
        self.drain_state(id)
    }

    /// Returns the progress of a drain.
    pub(super) fn draining(&mut self, host: &str) -> RmReply {
        self.model
            .host_called(host)
            .map_or(RmReply::NotFound, |id| self.drain_state(id))
    }

    /// Returns the remaining tasks of a host, with the reasons of those that stay.
    fn drain_state(&mut self, id: HostId) -> RmReply {
        let drained = self.model.is_drained(id);
        let snapshot = self.model.snapshot(self.vm.now());
        let stays: BTreeMap<Tid, Stay> = moves(snapshot)
            .stay
            .into_iter()
            .map(|stay| (stay.tid, stay))
            .collect();
        let Some(host) = snapshot.host(id) else {
            return RmReply::NotFound;
        };
        let why = |tid: &Tid| stays.get(tid).map(|stay| stay.reason(snapshot));
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

    /// Reports the remaining tasks of hosts whose time is over.
    pub(super) fn drains_due(&mut self, now: Micros) {
        let due: Vec<HostId> = self
            .draining
            .0
            .iter()
            .filter(|(_, at)| **at <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.draining.0.remove(&id);
            let RmReply::Drain { tasks, .. } = self.drain_state(id) else {
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
            self.note(format!(
                "{name} should be empty by now; remaining tasks: {}",
                list.join(", ")
            ));
        }
    }
}
