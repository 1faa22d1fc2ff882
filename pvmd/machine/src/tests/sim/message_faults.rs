//! Injects faults into the checkpoint or the restart of a job, before or after a daemon handles a
//! message of that operation: an order, a report, or a message of its tasker or of the store. A
//! message is identified by the name of its type.

use super::Sim;
use super::fault_injection::{Fault, StepEdge, Victim};
use crate::Event;
use sempa_proto::HostId;
use sempa_proto::host::HostMsg;
use std::collections::BTreeMap;

/// The name of a message, and whether the daemon is about to handle the message or has handled it.
pub(in crate::tests) type MessagePoint = (String, StepEdge);

/// One planned fault, and counts of all points.
#[derive(Debug, Default)]
pub(in crate::tests) struct MessageFaults {
    is_counting: bool,
    planned: Option<(MessagePoint, usize, Victim, Fault)>,
    /// Number of times that each point was reached.
    pub(in crate::tests) times_reached: BTreeMap<MessagePoint, usize>,
}

/// Returns the name of a message between daemons, or from tasker or store; `None` for messages of
/// tasks.
fn message_name(event: &Event) -> Option<String> {
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
        Event::HostData { .. } | Event::HostLost { .. } | Event::Wake => return None,
        Event::TaskConnected { .. } | Event::TaskControl { .. } | Event::TaskRoute { .. } => {
            return None;
        }
        Event::TaskLink { .. } | Event::TaskClosed { .. } => return None,
        store_event => format!("disk {store_event:?}"),
    };
    let is_name = |c: char| c.is_alphanumeric() || c == ' ';
    let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
    Some(text[..end].split(' ').take(2).collect::<Vec<_>>().join(" "))
}

impl Sim {
    /// Starts counting the points. Injects `fault` when its point is reached for the `nth` time,
    /// counted from 0.
    pub(in crate::tests) fn count_points(
        &mut self,
        fault: Option<(MessagePoint, usize, Victim, Fault)>,
    ) {
        self.message_faults = MessageFaults {
            is_counting: true,
            planned: fault,
            times_reached: BTreeMap::new(),
        };
    }

    /// Returns the name of an event that a running daemon is about to handle, if points are
    /// counted.
    pub(super) fn counted_message(&self, on: HostId, event: &Event) -> Option<String> {
        let is_counted = self.message_faults.is_counting
            && self
                .nodes
                .get(&on)
                .is_some_and(|node| node.is_alive && node.deferred_events.is_none());
        is_counted.then(|| message_name(event)).flatten()
    }

    /// Counts a point, and injects the fault planned for it.
    pub(super) fn reach_message_point(&mut self, message: Option<&String>, edge: StepEdge) {
        let Some(message) = message else { return };
        let point = (message.clone(), edge);
        let times = self
            .message_faults
            .times_reached
            .entry(point.clone())
            .or_default();
        *times += 1;
        let times = *times;
        let is_due = |(wanted, nth, ..): &mut (MessagePoint, usize, Victim, Fault)| {
            *wanted == point && times > *nth
        };
        if let Some((_, _, victim, fault)) = self.message_faults.planned.take_if(is_due) {
            self.injection.triggered = true;
            self.inject(victim, fault);
        }
    }
}
