//! Finds out from the event log of the virtual machine why a task has ended.

use libpvm::Vm;
use libpvm::proto::Tid;
use libpvm::proto::event::EventKind;
use sempa_broker_session::GoneReason;
use std::collections::BTreeMap;

/// Number of events that are read with one request.
const EVENTS_PER_REQUEST: u32 = 1000;
/// Number of tasks whose reason is kept until a notice asks for it.
const REASONS_MAX: usize = 4096;

/// Reads the event log when a task has ended.
#[derive(Debug, Default)]
pub(crate) struct DepartureReasons {
    next_event: u64,
    reasons: BTreeMap<Tid, GoneReason>,
}

impl DepartureReasons {
    /// Returns why the task has ended. The daemon reports the end after it has logged the cause.
    pub(crate) fn find(&mut self, vm: &Vm, tid: Tid) -> GoneReason {
        self.read_events(vm);
        self.reasons.remove(&tid).unwrap_or(GoneReason::Killed)
    }

    fn read_events(&mut self, vm: &Vm) {
        loop {
            // Without the log the reason is "killed", which is true of every ended task.
            let Ok(events) = vm.events(self.next_event, EVENTS_PER_REQUEST) else {
                return;
            };
            let Some(last) = events.last() else { return };
            self.next_event = last.number + 1;
            for event in &events {
                match &event.kind {
                    EventKind::GuestsEnded { guests, .. } => {
                        self.note(guests.iter().copied(), GoneReason::MovedOut);
                    }
                    EventKind::HostGone { lost_tasks, .. } => {
                        let tids = lost_tasks.named.iter().map(|(tid, _)| *tid);
                        self.note(tids, GoneReason::Lost);
                    }
                    _ => {}
                }
            }
        }
    }

    fn note(&mut self, tids: impl Iterator<Item = Tid>, reason: GoneReason) {
        for tid in tids {
            self.reasons.insert(tid, reason);
        }
        while self.reasons.len() > REASONS_MAX {
            self.reasons.pop_first();
        }
    }
}
