//! Defers work that follows from an event until the reply to the event has been sent, so that no
//! task waits for it.
//!
//! Deferred actions run at the start of the next event, or after [`LATE_MAX`] at the latest.

use super::Machine;
use sempa_proto::event::EventKind;
use sempa_proto::sm::{PlacementLeaseUse, SM_PLACEMENT_LEASE_USED, pack_placement_lease_use};
use sempa_proto::{Micros, Tid};

/// Longest time for which work is deferred.
const LATE_MAX: Micros = Micros::from_millis(1);

#[derive(Debug)]
pub(super) enum Duty {
    /// An entry of the event log, with the time of day at which the event happened.
    Record(Micros, EventKind),
    /// A report to a resource manager: tasks have taken places that it had leased under this wait
    /// id.
    Tell {
        rm: Tid,
        wid: i32,
        taken: PlacementLeaseUse,
    },
}

/// Deferred actions, in order. There are never more than follow from one event.
#[derive(Debug, Default)]
pub(super) struct Late {
    duties: Vec<Duty>,
    due: Option<Micros>,
}

impl Late {
    /// Returns the latest time at which the actions must run.
    pub(super) fn due(&self) -> Option<Micros> {
        self.due
    }
}

impl Machine {
    /// Defers an action until the reply to the current event has been sent.
    pub(super) fn after_answers(&mut self, duty: Duty) {
        self.late.due.get_or_insert(self.now + LATE_MAX);
        self.late.duties.push(duty);
    }

    /// Defers an entry of the event log about this host. It keeps the current time.
    pub(super) fn record_after_answers(&mut self, kind: EventKind) {
        self.after_answers(Duty::Record(self.unix, kind));
    }

    /// Runs all deferred actions.
    pub(super) fn catch_up(&mut self) {
        if self.late.due.take().is_none() {
            return;
        }
        for duty in std::mem::take(&mut self.late.duties) {
            match duty {
                Duty::Record(at, kind) => self.record_at(at, kind),
                Duty::Tell { rm, wid, taken } => self.send_made(
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
