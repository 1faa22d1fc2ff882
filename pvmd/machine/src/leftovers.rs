//! Processes that ended tasks have left behind on this host.
//!
//! PVM lets the children of an ended task run on. They are guests of the host like the task was:
//! they stop when the owner comes and resume when guests are welcome again. They cannot migrate.
//! When the owner's directive is due to evict guests, they are killed if the directive ends guests
//! ([`EvictionMode::Kill`]) or vacates their jobs ([`EvictionMode::Checkpoint`]); under
//! [`EvictionMode::Move`] they stay stopped, as tasks do that no host accepts.
//!
//! If a task ends while its images are being transferred, the images contain copies of what it
//! leaves behind. The tasker keeps the processes stopped until the coordinator has decided: they
//! are killed if the task continues at the target, and run otherwise.

use super::Machine;
use sempa_proto::event::{EventKind, LeftoverCount};
use sempa_proto::host::HostMsg;
use sempa_proto::host_limit::HostLimit;
use sempa_proto::owner::{EvictionMode, GuestAccess};
use sempa_proto::table::{TASK_FORKED, TaskInfo};
use sempa_proto::task::Reply;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// What one ended task has left behind.
#[derive(Debug)]
struct Leftover {
    process_count: u32,
    /// Some of the process ids.
    pids: Vec<i32>,
    /// Program name of the task.
    name: String,
    parent: Tid,
}

/// The leftover processes of this host, by the task that left them.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    by_tid: BTreeMap<Tid, Leftover>,
    /// Tasks whose leftover processes were ordered to stop and may still run.
    unstopped_tids: BTreeSet<Tid>,
    /// Ended services that have left processes, which are no guests.
    service_tids: BTreeSet<Tid>,
}

impl Leftovers {
    /// True if no leftover process that was ordered to stop may still run.
    pub(super) fn have_stopped(&self) -> bool {
        self.unstopped_tids.is_empty()
    }

    pub(super) fn counts(&self) -> Vec<LeftoverCount> {
        let counts = self.by_tid.iter().map(|(tid, leftover)| LeftoverCount {
            tid: *tid,
            processes: leftover.process_count,
        });
        counts.collect()
    }

    /// Returns the tasks whose leftover processes were ordered to stop and may still run.
    pub(super) fn unstopped_tids(&self) -> impl Iterator<Item = Tid> {
        self.unstopped_tids.iter().copied()
    }

    /// Records that leftover processes of this task run although they were ordered to stop.
    pub(super) fn record_unstopped(&mut self, tid: Tid) {
        if self.by_tid.contains_key(&tid) {
            self.unstopped_tids.insert(tid);
        }
    }

    /// True if nothing is left behind.
    pub(super) fn is_empty(&self) -> bool {
        self.by_tid.is_empty()
    }

    fn tids(&self) -> Vec<Tid> {
        self.by_tid.keys().copied().collect()
    }
}

impl Machine {
    /// Records that the tasker has killed a task, or what a task has left behind, because of a
    /// limit of the host.
    pub(super) fn record_limit_kill(&mut self, tid: Tid, has_ended: bool, limit: &HostLimit) {
        self.log_warning_and_record(match has_ended {
            false => format!("{tid} was killed: {limit}"),
            true => format!("the processes that {tid} has left behind were killed: {limit}"),
        });
    }

    /// Handles the tasker's report on what a task has left behind. The first report precedes the
    /// report that the task has ended.
    pub(super) fn handle_left_behind(&mut self, tid: Tid, process_count: u32, pids: Vec<i32>) {
        if process_count == 0 {
            return self.forget_leftover(tid);
        }
        let leftovers = &mut self.owner_control.leftovers;
        if leftovers.service_tids.contains(&tid) {
            return;
        }
        if let Some(known_leftover) = leftovers.by_tid.get_mut(&tid) {
            (known_leftover.process_count, known_leftover.pids) = (process_count, pids);
            return;
        }
        let task = self.tasks.get(tid);
        if task.is_some_and(|task| task.is_service()) {
            // The processes of a service are no guests. Later reports follow the service's end.
            leftovers.service_tids.insert(tid);
            return;
        }
        let (name, parent) = task.map_or((String::new(), Tid::NONE), |task| {
            (task.name.clone(), task.parent)
        });
        let leftover = Leftover {
            process_count,
            pids,
            name,
            parent,
        };
        leftovers.by_tid.insert(tid, leftover);
        if self.shutdown.is_none() {
            self.record_event(EventKind::ProcessesLeft {
                host: self.config.host,
                left: LeftoverCount {
                    tid,
                    processes: process_count,
                },
            });
        }
        if self.owner_control.pauses_guests() {
            self.stop_leftover(tid);
            self.evict_leftovers();
        } else {
            // The task may have been suspended. The suspension ends with the task.
            self.resume_leftover(tid);
        }
    }

    /// Lets leftover processes run, unless the coordinator must still decide whether their task
    /// continues at the target of a migration.
    fn resume_leftover(&mut self, tid: Tid) {
        let is_transferring = self
            .tasks
            .get(tid)
            .is_some_and(|task| task.transferring_migration.is_some());
        if !is_transferring {
            self.send_to_tasker(ToTasker::ResumeLeftovers { tid });
        }
    }

    /// Handles the coordinator's decision on a task that has ended during its migration: kills what
    /// the task has left behind if it continues at the target, or else lets that run.
    pub(super) fn settle_leftovers(&mut self, tid: Tid, continues_at_target: bool) {
        if continues_at_target {
            self.kill_leftovers(tid);
        } else if self.owner_control.leftovers.by_tid.contains_key(&tid)
            && !self.owner_control.pauses_guests()
        {
            self.resume_leftover(tid);
        }
    }

    fn forget_leftover(&mut self, tid: Tid) {
        let leftovers = &mut self.owner_control.leftovers;
        leftovers.unstopped_tids.remove(&tid);
        leftovers.service_tids.remove(&tid);
        if leftovers.by_tid.remove(&tid).is_some() && self.shutdown.is_none() {
            self.record_event(EventKind::LeftProcessesEnded {
                host: self.config.host,
                tid,
            });
        }
        self.report_if_all_paused();
    }

    /// Handles the end of the tasker, which has killed all leftover processes.
    pub(super) fn forget_leftovers(&mut self) {
        self.owner_control.leftovers.service_tids.clear();
        for tid in self.owner_control.leftovers.tids() {
            self.forget_leftover(tid);
        }
    }

    fn stop_leftover(&mut self, tid: Tid) {
        self.owner_control.leftovers.unstopped_tids.insert(tid);
        self.send_to_tasker(ToTasker::StopLeftovers { tid });
    }

    /// Stops all leftover processes for the owner.
    pub(super) fn stop_leftovers(&mut self) {
        for tid in self.owner_control.leftovers.tids() {
            self.stop_leftover(tid);
        }
    }

    /// Lets all leftover processes run, because guests are welcome.
    pub(super) fn resume_leftovers(&mut self) {
        self.owner_control.leftovers.unstopped_tids.clear();
        for tid in self.owner_control.leftovers.tids() {
            self.resume_leftover(tid);
        }
    }

    pub(super) fn handle_leftovers_stopped(&mut self, tid: Tid) {
        self.owner_control.leftovers.unstopped_tids.remove(&tid);
        self.report_if_all_paused();
    }

    /// Kills all leftover processes if the eviction of guests is due and the owner's directive does
    /// not leave guests stopped that cannot migrate.
    pub(super) fn evict_leftovers(&mut self) {
        let must_kill = match self.owner_control.active_access() {
            Some(GuestAccess::Paused {
                evict_at: Some(evict_at),
                eviction: EvictionMode::Kill | EvictionMode::Checkpoint,
            }) => evict_at <= self.unix_time,
            _ => false,
        };
        if !must_kill {
            return;
        }
        for tid in self.owner_control.leftovers.tids() {
            self.send_to_tasker(ToTasker::KillLeftovers { tid });
        }
    }

    /// Kills what a task has left behind on this host.
    pub(super) fn kill_leftovers(&mut self, tid: Tid) {
        self.send_to_tasker(ToTasker::KillLeftovers { tid });
    }

    /// Handles the request of the task `requester` to kill what the ended task `tid` has left
    /// behind.
    pub(super) fn handle_kill_leftovers(&mut self, requester: Tid, id: RequestId, tid: Tid) {
        self.order_leftovers_killed(tid);
        self.reply(requester, id, Reply::Done);
    }

    /// Kills what a task has left behind, on all hosts.
    pub(super) fn order_leftovers_killed(&mut self, tid: Tid) {
        for host in self.other_hosts() {
            self.send_to_host(host, HostMsg::KillLeftovers { tid });
        }
        self.kill_leftovers(tid);
    }

    /// Lists what ended tasks, or only the task `selected_tid`, have left behind on this host.
    pub(super) fn list_leftovers(&self, selected_tid: Option<Tid>) -> Vec<TaskInfo> {
        let leftovers = &self.owner_control.leftovers;
        let selected = leftovers
            .by_tid
            .iter()
            .filter(|(tid, _)| selected_tid.is_none_or(|selected_tid| selected_tid == **tid));
        let must_stop = self.owner_control.pauses_guests();
        let may_run = |tid: &Tid| leftovers.unstopped_tids.contains(tid);
        let infos = selected.map(|(tid, leftover)| TaskInfo {
            tid: *tid,
            parent: leftover.parent,
            host: self.config.host,
            flags: TASK_FORKED,
            name: leftover.name.clone(),
            pid: leftover.pids.first().copied().unwrap_or_default(),
            uid: self.config.uid,
            migrating: false,
            paused: must_stop && !may_run(tid),
            suspended: false,
            namespace_pid: leftover.pids.first().copied().unwrap_or_default(),
            stopping: must_stop && may_run(tid),
            leftover_processes: leftover.process_count,
        });
        infos.collect()
    }
}
