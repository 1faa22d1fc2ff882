//! Tasks that are suspended: they stand still until somebody lets them go on, wherever they are moved meanwhile.
//!
//! The order belongs to the task and is its daemon's business, as a signal is. How it stands still, and how it moves as it
//! stands, is as for guests whose host's owner is there (`guests`): it stands still while either is so.

use super::Machine;
use super::asks::no_task;
use super::guests::SUSPEND_TIME;
use sempa_proto::event::EventKind;
use sempa_proto::suspend::Cause;
use sempa_proto::task::Reply;
use sempa_proto::{PvmError, Tid};

impl Machine {
    /// Somebody wants a task of this host suspended, or to go on.
    pub(super) fn suspend_task(&mut self, tid: Tid, suspend: bool, cause: Cause) -> Reply {
        let changes = match (self.tasks.get(tid), self.moves.arrivals.get(&tid)) {
            (Some(task), _) if task.exited.is_some() => return no_task(tid),
            (Some(task), _) if !task.spawned() || task.serves() => return no_guest(tid, task.spawned(), suspend),
            (Some(task), _) => task.suspended.is_some() != suspend,
            (None, Some(arrival)) => arrival.is_suspended() != suspend,
            (None, None) => return no_task(tid),
        };
        if !changes {
            return Reply::Done;
        }
        let event = if suspend { EventKind::Suspended { tid, cause } } else { EventKind::Resumed { tid, cause } };
        self.record(event);
        let now = self.now;
        if let Some(task) = self.tasks.get_mut(tid) {
            task.suspended = suspend.then_some(now);
            if suspend {
                self.hold_guest(tid);
            } else if !self.hosting.is_stopped() {
                self.free_guest(tid);
            }
        } else if let Some(arrival) = self.moves.arrivals.get_mut(&tid) {
            arrival.suspend(now, suspend);
            if suspend {
                self.hold_arrival(tid, SUSPEND_TIME);
            } else if arrival.held && !self.hosting.is_stopped() {
                self.free_arrival(tid);
            }
        }
        Reply::Done
    }
}

fn no_guest(tid: Tid, spawned: bool, suspend: bool) -> Reply {
    let what = if suspend { "suspended" } else { "resumed" };
    let why = if spawned {
        "it serves the virtual machine"
    } else {
        "no daemon has started it; whoever did can stop it with its shell's means"
    };
    Reply::Failed { error: PvmError::Denied, reason: format!("{tid} was not {what}: {why}") }
}
