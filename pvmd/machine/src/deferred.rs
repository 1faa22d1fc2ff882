//! Defers work that follows from an event until the reply to the event has been sent, so that no
//! task waits for it.
//!
//! Deferred actions run at the start of the next event, or after [`DEFERRAL_MAX`] at the latest.

use super::Machine;
use sempa_proto::event::EventKind;
use sempa_proto::sm::{PlacementLeaseUse, SM_PLACEMENT_LEASE_USED, pack_placement_lease_use};
use sempa_proto::{Micros, Tid};

/// Longest time by which an action is deferred.
const DEFERRAL_MAX: Micros = Micros::from_millis(1);

#[derive(Debug)]
pub(super) enum DeferredAction {
    /// An entry of the event log, with the time of day at which the event happened.
    Record(Micros, EventKind),
    /// A report to a resource manager: tasks were spawned on hosts of the placement lease with the
    /// wait id `wid`.
    ReportLeaseUse {
        rm: Tid,
        wid: i32,
        lease_use: PlacementLeaseUse,
    },
}

/// Deferred actions, in order. They never exceed the consequences of one event.
#[derive(Debug, Default)]
pub(super) struct DeferredActions {
    actions: Vec<DeferredAction>,
    due: Option<Micros>,
}

impl DeferredActions {
    /// Returns the time by which the actions must run; `None` if there are none.
    pub(super) fn due(&self) -> Option<Micros> {
        self.due
    }
}

impl Machine {
    /// Defers an action until the reply to the current event has been sent.
    pub(super) fn defer(&mut self, action: DeferredAction) {
        self.deferred.due.get_or_insert(self.now + DEFERRAL_MAX);
        self.deferred.actions.push(action);
    }

    /// Defers an entry of the event log about this host. The entry keeps the current time of day.
    pub(super) fn record_deferred(&mut self, kind: EventKind) {
        self.defer(DeferredAction::Record(self.unix_time, kind));
    }

    pub(super) fn run_deferred(&mut self) {
        if self.deferred.due.take().is_none() {
            return;
        }
        for action in std::mem::take(&mut self.deferred.actions) {
            match action {
                DeferredAction::Record(at, kind) => self.record_at(at, kind),
                DeferredAction::ReportLeaseUse {
                    rm,
                    wid,
                    lease_use: taken,
                } => self.send_daemon_message(
                    rm,
                    0,
                    SM_PLACEMENT_LEASE_USED,
                    wid,
                    pack_placement_lease_use(&taken),
                ),
            }
        }
    }
}
