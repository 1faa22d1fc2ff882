//! The events that `events` shows by default: what users need to know, without the steps of a
//! migration and without the consoles that come and go.

use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use std::collections::BTreeSet;

/// Selects the events to show, in the order of the log.
#[derive(Debug)]
pub(super) struct EventView {
    shows_all: bool,
    /// Consoles whose end the log has not reported yet.
    consoles: BTreeSet<Tid>,
}

impl EventView {
    pub(super) fn new(shows_all: bool) -> Self {
        Self {
            shows_all,
            consoles: BTreeSet::new(),
        }
    }

    /// True if the next event of the log is shown.
    pub(super) fn shows(&mut self, kind: &EventKind) -> bool {
        let is_shown = match kind {
            EventKind::ConsoleJoined { tid } => {
                self.consoles.insert(*tid);
                false
            }
            EventKind::TaskStarted { tid, .. } => !self.consoles.contains(tid),
            EventKind::TaskEnded { tid, .. } => !self.consoles.remove(tid),
            EventKind::MigrationStep { .. } | EventKind::MigrationEngine { .. } => false,
            _ => true,
        };
        is_shown || self.shows_all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::migration::{Step, Usage};
    use sempa_proto::{HostId, MigrationId};

    const CONSOLE: Tid = Tid::from_raw(0x40001);
    const TASK: Tid = Tid::from_raw(0x40002);

    fn start(tid: Tid) -> EventKind {
        EventKind::TaskStarted {
            tid,
            parent: Tid::NONE,
            name: String::new(),
            user: 0,
        }
    }

    fn end(tid: Tid) -> EventKind {
        EventKind::TaskEnded {
            tid,
            status: 0,
            used: Usage::default(),
        }
    }

    /// Consoles and the steps of migrations are hidden, unless all events are requested. A tid
    /// that a console had may belong to a task later.
    #[test]
    fn consoles_and_steps_are_hidden() {
        let step = EventKind::MigrationStep {
            id: MigrationId(1),
            tid: TASK,
            from: HostId::MASTER,
            to: HostId::MASTER,
            step: Step::Dump,
            bytes: 1,
        };
        let log = [
            EventKind::ConsoleJoined { tid: CONSOLE },
            start(CONSOLE),
            start(TASK),
            step,
            end(CONSOLE),
            end(TASK),
            start(CONSOLE),
            end(CONSOLE),
        ];
        let shown = |mut view: EventView| -> Vec<usize> {
            let events = log.iter().enumerate();
            events
                .filter(|(_, kind)| view.shows(kind))
                .map(|(index, _)| index)
                .collect()
        };
        assert_eq!(shown(EventView::new(false)), [2, 5, 6, 7]);
        assert_eq!(shown(EventView::new(true)).len(), log.len());
    }
}
