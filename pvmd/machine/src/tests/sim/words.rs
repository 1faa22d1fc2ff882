//! Injects faults into the checkpoint or the restart of a job, where a daemon handles a message
//! that belongs to it: an order, a report, or a message of its tasker or the store. The messages
//! are named after their types.

use super::Sim;
use super::strikes::{Blow, Edge, Party};
use crate::Event;
use sempa_proto::HostId;
use sempa_proto::host::HostMsg;
use std::collections::BTreeMap;

/// The name of a message and whether the daemon is about to handle it or has done so.
pub(in crate::tests) type Spot = (String, Edge);

/// One planned fault, and counts of all points.
#[derive(Debug, Default)]
pub(in crate::tests) struct Words {
    listens: bool,
    wanted: Option<(Spot, usize, Party, Blow)>,
    /// How often each point was reached.
    pub(in crate::tests) said: BTreeMap<Spot, usize>,
}

/// Returns the name of a message between daemons, or from tasker or store. Messages of tasks have
/// none.
fn name_of(event: &Event) -> Option<String> {
    let text = match event {
        Event::HostControl {
            message: HostMsg::MigrationOrder { order, .. },
            ..
        } => format!("order {order:?}"),
        Event::HostControl {
            message: HostMsg::StepReport { report, .. },
            ..
        } => format!("report {report:?}"),
        Event::HostControl { message, .. } => format!("host {message:?}"),
        Event::Tasker(message) => format!("tasker {message:?}"),
        Event::HostCarried { .. } | Event::HostLost { .. } | Event::Wake => return None,
        Event::TaskConnected { .. } | Event::TaskControl { .. } | Event::TaskRoute { .. } => {
            return None;
        }
        Event::TaskLink { .. } | Event::TaskClosed { .. } => return None,
        served => format!("disk {served:?}"),
    };
    let is_name = |c: char| c.is_alphanumeric() || c == ' ';
    let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
    Some(text[..end].split(' ').take(2).collect::<Vec<_>>().join(" "))
}

impl Sim {
    /// Starts counting the points. Injects `fault` when its point is reached for the `nth` time,
    /// counted from 0.
    pub(in crate::tests) fn listen(&mut self, fault: Option<(Spot, usize, Party, Blow)>) {
        self.words = Words {
            listens: true,
            wanted: fault,
            said: BTreeMap::new(),
        };
    }

    /// Returns the name of an event that a running daemon is about to handle, if points are
    /// counted.
    pub(super) fn word(&self, on: HostId, event: &Event) -> Option<String> {
        let hears = self.words.listens
            && self
                .nodes
                .get(&on)
                .is_some_and(|node| node.alive && node.stands.is_none());
        hears.then(|| name_of(event)).flatten()
    }

    /// Counts a point, and injects the fault planned for it.
    pub(super) fn hears(&mut self, word: Option<&String>, edge: Edge) {
        let Some(word) = word else { return };
        let spot = (word.clone(), edge);
        let times = self.words.said.entry(spot.clone()).or_default();
        *times += 1;
        let times = *times;
        let is_it =
            |(wanted, nth, ..): &mut (Spot, usize, Party, Blow)| *wanted == spot && times > *nth;
        if let Some((_, _, party, blow)) = self.words.wanted.take_if(is_it) {
            self.strikes.struck = true;
            self.strike(party, blow);
        }
    }
}
