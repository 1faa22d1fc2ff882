//! Which tasks are known to be stopped. What is said about a stop is what the tasker has confirmed:
//! the task list says that a task is stopped, and an event that all guests are, only afterwards. If
//! a confirmation does not come in time, an event says which guests are not stopped. Another event
//! has their process ids, as soon as the tasker reports them. What ended tasks have left behind is
//! treated like the guests.

use super::Machine;
use super::guests::ActiveDirective;
use super::tasks::Task;
use sempa_proto::event::EventKind;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;

/// Time limit for the tasker to confirm that the guests have stopped, from the directive: two
/// seconds more than their time to quiesce.
pub(super) const GUEST_STOP_TIMEOUT: Micros = Micros::from_millis(2025);

/// Tasks of this host of which the tasker has confirmed that no process runs. Contains at most one
/// entry for each task.
#[derive(Debug, Default)]
pub(super) struct StoppedTasks(BTreeSet<Tid>);

impl StoppedTasks {
    /// True if the tasker has confirmed that the task is stopped, and the task has not been ordered
    /// to run since.
    pub(super) fn contains(&self, tid: Tid) -> bool {
        self.0.contains(&tid)
    }

    /// Takes an order to the tasker into account.
    pub(super) fn track_order(&mut self, order: &ToTasker) {
        match order {
            ToTasker::Resume { tid } | ToTasker::ResumeToQuiesce { tid, .. } => {
                self.0.remove(tid);
            }
            // The task runs once more.
            ToTasker::Pause { tid, run_time } if *run_time > Micros::default() => {
                self.0.remove(tid);
            }
            _ => {}
        }
    }

    /// Forgets a task that has ended or has migrated away.
    pub(super) fn remove(&mut self, tid: Tid) {
        self.0.remove(&tid);
    }

    /// Records that a task is stopped: the tasker has confirmed it, or the task was restored and
    /// must stay stopped.
    pub(super) fn insert(&mut self, tid: Tid) {
        self.0.insert(tid);
    }
}

impl Machine {
    pub(super) fn forget_ended_guests(&mut self) {
        let is_on_host = |tid: &Tid| {
            self.tasks.get(*tid).is_some() || self.migrations.arrivals.contains_key(tid)
        };
        if let Some(directive) = &mut self.owner_control.active_directive {
            directive.running_guests.retain(is_on_host);
        }
    }

    /// True if a guest, or an arriving guest, may run on this host.
    pub(super) fn has_guests(&self) -> bool {
        !self.migrations.arrivals.is_empty()
            || self.tasks.live_tasks.values().any(Task::is_guest)
            || !self.owner_control.leftovers.is_empty()
    }

    /// True if guests must stop and the tasker has not confirmed within [`GUEST_STOP_TIMEOUT`] that
    /// all of them have stopped.
    pub(super) fn has_overdue_guests(&mut self) -> bool {
        self.forget_ended_guests();
        let now = self.now;
        let may_guests_run = |directive: &ActiveDirective| {
            !directive.running_guests.is_empty() || !self.owner_control.leftovers.have_stopped()
        };
        let is_overdue = |directive: &ActiveDirective| {
            may_guests_run(directive) && directive.received_at + GUEST_STOP_TIMEOUT <= now
        };
        let directive = self.owner_control.active_directive.as_ref();
        directive.is_some_and(is_overdue)
    }

    /// Handles the tasker's report that processes of a task, or what an ended task has left behind,
    /// run although they were ordered to stop. They count as stopped when the tasker confirms it.
    pub(super) fn handle_not_stopped(&mut self, tid: Tid, pids: Vec<i32>) {
        self.owner_control.stopped_tasks.remove(tid);
        let is_guest = self.tasks.get(tid).is_some_and(Task::is_guest);
        let Some(directive) = &mut self.owner_control.active_directive else {
            return;
        };
        if is_guest {
            directive.running_guests.insert(tid);
        }
        self.owner_control.leftovers.record_unstopped(tid);
        self.record_event(EventKind::GuestsStillRun {
            host: self.config.host,
            tid,
            pids,
        });
    }

    /// Reports the guests that have not stopped in time, if this was not reported before.
    pub(super) fn report_unstopped_guests(&mut self) {
        let host = self.config.host;
        if !self.has_overdue_guests() {
            return;
        }
        if let Some(directive) = &mut self.owner_control.active_directive
            && !std::mem::replace(&mut directive.is_delay_reported, true)
        {
            let running_guests = directive.running_guests.iter().copied();
            let unstopped_tids = self.owner_control.leftovers.unstopped_tids();
            let guests = running_guests.chain(unstopped_tids).collect();
            let why = "the tasker has not confirmed within 2 s that they are stopped".to_string();
            self.log_warning(format!("guests are not stopped: {why}"));
            self.record_event(EventKind::GuestsNotPaused { host, guests, why });
        }
    }
}
