//! What follows from an event, and nobody who waits for an answer is to wait for: it is done with the next event, whatever that is,
//! or in a moment. So the answer is on its way before.

use super::Machine;
use sempa_proto::event::EventKind;
use sempa_proto::sm::{SM_GRANT_TAKEN, Taken, pack_taken};
use sempa_proto::{Micros, Tid};

/// How long it is put off at most.
const LATE_MAX: Micros = Micros::from_millis(1);

/// Something to be done.
#[derive(Debug)]
pub(super) enum Duty {
    /// An entry of the log, with the time of day at which it happened.
    Record(Micros, EventKind),
    /// A resource manager hears that places were taken that it had given under this wait id.
    Tell { rm: Tid, wid: i32, taken: Taken },
}

/// What is put off, in its order: at most what follows from one event.
#[derive(Debug, Default)]
pub(super) struct Late {
    duties: Vec<Duty>,
    due: Option<Micros>,
}

impl Late {
    /// When it is done at the latest.
    pub(super) fn due(&self) -> Option<Micros> {
        self.due
    }
}

impl Machine {
    /// To be done once what this event answers has been sent.
    pub(super) fn after_answers(&mut self, duty: Duty) {
        self.late.due.get_or_insert(self.now + LATE_MAX);
        self.late.duties.push(duty);
    }

    /// Something happened on this host; it is recorded once what this event answers has been sent.
    pub(super) fn record_after_answers(&mut self, kind: EventKind) {
        self.after_answers(Duty::Record(self.unix, kind));
    }

    /// Does what was put off.
    pub(super) fn catch_up(&mut self) {
        if self.late.due.take().is_none() {
            return;
        }
        for duty in std::mem::take(&mut self.late.duties) {
            match duty {
                Duty::Record(at, kind) => self.record_at(at, kind),
                Duty::Tell { rm, wid, taken } => {
                    self.send_made(rm, 0, SM_GRANT_TAKEN, wid, pack_taken(&taken))
                }
            }
        }
    }
}
