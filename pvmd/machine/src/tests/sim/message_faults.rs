//! Injects faults into the checkpoint or the restart of a job. A fault occurs before or after a
//! daemon handles a message of the operation: an order, a report, or a message of its tasker or of
//! the store. The name of a message's type identifies the message.

use super::Sim;
use super::fault_injection::{Fault, StepEdge, Victim};
use crate::Event;
use sempa_proto::HostId;
use sempa_proto::host::HostMsg;
use sempa_proto::tasker::FromTasker;
use std::collections::BTreeMap;

/// The name of a message, and the edge: the daemon has not handled the message yet, or has handled
/// it.
pub(in crate::tests) type MessagePoint = (String, StepEdge);

/// At most one planned fault, and the number of times that each point was reached.
#[derive(Debug, Default)]
pub(in crate::tests) struct MessageFaults {
    is_counting: bool,
    planned_fault: Option<(MessagePoint, usize, Victim, Fault)>,
    /// Number of times that each point was reached since counting started.
    pub(in crate::tests) times_reached: BTreeMap<MessagePoint, usize>,
}

/// Returns the name of a message between daemons, of a tasker or of the store; `None` for all other
/// events.
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
        // Heartbeats, renewals and answers belong to no operation.
        Event::HostControl {
            message: HostMsg::Heartbeat { .. } | HostMsg::HeartbeatAck { .. },
            ..
        }
        | Event::Tasker(FromTasker::LeaseRenewed { .. } | FromTasker::Pong) => return None,
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
    /// Starts counting the points. `fault` contains its point and a number `nth`; the fault is
    /// injected when the point has been reached `nth` times before.
    pub(in crate::tests) fn start_counting_points(
        &mut self,
        fault: Option<(MessagePoint, usize, Victim, Fault)>,
    ) {
        self.message_faults = MessageFaults {
            is_counting: true,
            planned_fault: fault,
            times_reached: BTreeMap::new(),
        };
    }

    /// Returns the name of the message in an event that a running daemon will handle. Returns
    /// `None` if points are not counted.
    pub(super) fn counted_message_name(&self, host_id: HostId, event: &Event) -> Option<String> {
        let is_counted = self.message_faults.is_counting
            && self
                .nodes
                .get(&host_id)
                .is_some_and(|node| node.is_alive && node.deferred_events.is_none());
        is_counted.then(|| message_name(event)).flatten()
    }

    /// Counts a point and injects the fault that is planned for this point. Has no effect if
    /// `message_name` is `None`.
    pub(super) fn reach_message_point(&mut self, message_name: Option<&String>, edge: StepEdge) {
        let Some(message_name) = message_name else {
            return;
        };
        let point = (message_name.clone(), edge);
        let times_reached = self
            .message_faults
            .times_reached
            .entry(point.clone())
            .or_default();
        *times_reached += 1;
        let times_reached = *times_reached;
        let is_due = |(planned_point, nth, ..): &mut (MessagePoint, usize, Victim, Fault)| {
            *planned_point == point && times_reached > *nth
        };
        if let Some((_, _, victim, fault)) = self.message_faults.planned_fault.take_if(is_due) {
            self.injection.has_triggered = true;
            self.inject_fault(victim, fault);
        }
    }
}
