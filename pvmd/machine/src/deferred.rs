//! Defers actions that follow from an event until the reply to the event has been sent, so that no
//! task waits for these actions.
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
    RecordEvent(Micros, EventKind),
    /// A report to a resource manager: tasks were spawned on hosts of the placement lease with the
    /// wait id `wid`.
    ReportLeaseUse {
        rm: Tid,
        wid: i32,
        lease_use: PlacementLeaseUse,
    },
}

/// Deferred actions in their order. All actions result from one event, which limits their number.
#[derive(Debug, Default)]
pub(super) struct DeferredActions {
    actions: Vec<DeferredAction>,
    due_time: Option<Micros>,
}

impl DeferredActions {
    /// Returns the time by which the actions must run; `None` if there are none.
    pub(super) fn due_time(&self) -> Option<Micros> {
        self.due_time
    }
}

impl Machine {
    /// Defers an action until the reply to the current event has been sent.
    pub(super) fn defer_action(&mut self, action: DeferredAction) {
        self.deferred_actions
            .due_time
            .get_or_insert(self.now + DEFERRAL_MAX);
        self.deferred_actions.actions.push(action);
    }

    /// Defers an entry of the event log about this host. The entry contains the time of day at
    /// which it was deferred.
    pub(super) fn record_deferred(&mut self, kind: EventKind) {
        self.defer_action(DeferredAction::RecordEvent(self.unix_time, kind));
    }

    pub(super) fn run_deferred_actions(&mut self) {
        if self.deferred_actions.due_time.take().is_none() {
            return;
        }
        for action in std::mem::take(&mut self.deferred_actions.actions) {
            match action {
                DeferredAction::RecordEvent(at, kind) => self.record_at(at, kind),
                DeferredAction::ReportLeaseUse { rm, wid, lease_use } => self.send_daemon_message(
                    rm,
                    0,
                    SM_PLACEMENT_LEASE_USED,
                    wid,
                    pack_placement_lease_use(&lease_use),
                ),
            }
        }
    }
}
