//! Detects jobs that have ended. Their checkpoints are probably not needed any more, so the store
//! may remove them.
//!
//! A job has ended if it has no task left, and its first task has succeeded or was ordered to end.
//! Other jobs without tasks may still be restarted: those that crashed, that an owner evicted, or
//! that ended with their host or with the virtual machine.

use super::inventory::job_members;
use super::{CheckpointedJob, InventoryPurpose, JobActivity, JobCheckpoints};
use crate::{Machine, Output};
use sempa_proto::event::EventKind;
use sempa_proto::host::HostMsg;
use sempa_proto::table::TaskInfo;
use sempa_proto::{HostId, Micros, Tid};

/// Signals by which tasks are ordered to end: SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGTERM.
pub(super) const END_SIGNALS: [i32; 5] = [1, 2, 3, 9, SIGTERM];
const SIGTERM: i32 = 15;

/// How the first task of a job has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FirstTaskEnd {
    /// The last of [`END_SIGNALS`] that another task or a user sent to the task.
    end_signal: Option<i32>,
    /// True if an owner has evicted the task.
    evicted: bool,
    /// Wait status of the task; `None` if it ended with its host.
    status: Option<i32>,
}

impl FirstTaskEnd {
    /// True if the end was intended: the task succeeded, or it was ordered to end.
    fn is_intended(self) -> bool {
        let killed = |status: i32| {
            self.end_signal
                .is_some_and(|told| status & 0x7f == 0 || status & 0x7f == told)
        };
        !self.evicted
            && self
                .status
                .is_some_and(|status| status == 0 || killed(status))
    }
}

impl CheckpointedJob {
    /// True if all known tasks of the job have ended.
    pub(super) fn has_only_ended_tasks(&self) -> bool {
        !self.members.is_empty() && self.ended_members.len() == self.members.len()
    }
}

impl JobCheckpoints {
    /// Updates the jobs after an event of `host`. `spontaneous` is false if tasks end because a
    /// host or the virtual machine ends.
    pub(crate) fn update_after_event(
        &mut self,
        now: Micros,
        host: HostId,
        kind: &EventKind,
        spontaneous: bool,
    ) {
        match kind {
            EventKind::TaskStarted { tid, parent, .. } => {
                for job in self
                    .jobs
                    .values_mut()
                    .filter(|job| job.members.contains(parent))
                {
                    job.members.insert(*tid);
                    job.ended_members.remove(tid);
                }
            }
            EventKind::TaskEnded { tid, status, .. } => {
                if spontaneous {
                    self.recent_exits.add(now, *tid);
                }
                for (job, entry) in self
                    .jobs
                    .iter_mut()
                    .filter(|(_, entry)| entry.members.contains(tid))
                {
                    entry.ended_members.insert(*tid);
                    if spontaneous {
                        entry.recently_dead.update_after_event(now, host, kind);
                    }
                    if job == tid {
                        entry.first_task_end.status = spontaneous.then_some(*status);
                    }
                    if entry.has_only_ended_tasks() && entry.activity == JobActivity::Idle {
                        self.maybe_ended_jobs.push(*job);
                    }
                }
            }
            EventKind::MigrationFailed { tid, .. } => {
                for entry in self
                    .jobs
                    .values_mut()
                    .filter(|entry| entry.members.contains(tid))
                {
                    entry.recently_dead.update_after_event(now, host, kind);
                }
            }
            EventKind::GuestsEnded { guests, .. } => {
                for guest in guests {
                    self.record_end_order(*guest);
                    self.jobs
                        .entry(*guest)
                        .and_modify(|entry| entry.first_task_end.evicted = true);
                }
            }
            _ => {}
        }
    }

    /// Records that a task was ordered to end.
    fn record_end_order(&mut self, tid: Tid) {
        for entry in self
            .jobs
            .values_mut()
            .filter(|entry| entry.members.contains(&tid))
        {
            entry.recently_dead.record_end_order(tid);
        }
    }

    /// Records that all tasks except `survivors` were ordered to end.
    pub(crate) fn record_reset(&mut self, survivors: &[Tid]) {
        for (job, entry) in &mut self.jobs {
            let all = entry.members.iter().filter(|tid| !survivors.contains(tid));
            all.for_each(|tid| entry.recently_dead.record_end_order(*tid));
            if !survivors.contains(job) {
                entry.first_task_end.end_signal = Some(SIGTERM);
            }
        }
    }
}

impl Machine {
    /// Records a signal to a task. If the signal ends the task, that end is intended.
    pub(crate) fn record_end_signal(&mut self, tid: Tid, signal: i32) {
        if !END_SIGNALS.contains(&signal) {
            return;
        }
        match &mut self.master {
            Some(master) => {
                master.checkpoints.record_end_order(tid);
                master
                    .checkpoints
                    .jobs
                    .entry(tid)
                    .and_modify(|entry| entry.first_task_end.end_signal = Some(signal));
            }
            None => self.send_to_host(HostId::MASTER, HostMsg::EndSignalSent { tid, signal }),
        }
    }

    /// Takes an inventory for each job whose known tasks have all ended. True if there was such a
    /// job.
    pub(super) fn check_maybe_ended_jobs(&mut self) -> bool {
        let maybe_ended = self
            .job_checkpoints()
            .map(|job_checkpoints| std::mem::take(&mut job_checkpoints.maybe_ended_jobs))
            .unwrap_or_default();
        let counted = !maybe_ended.is_empty();
        for job in maybe_ended {
            self.take_inventory(InventoryPurpose::CheckEnded(job));
        }
        counted
    }

    /// Handles the inventory of a job that may have ended.
    pub(super) fn check_job_ended(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        if entry.activity == JobActivity::Idle
            && job_members(job, &mut entry.members, tasks).is_empty()
        {
            self.handle_job_end(job);
        }
    }

    /// Handles a job without tasks: unless it ended by a failure, its checkpoints may be removed.
    pub(super) fn handle_job_end(&mut self, job: Tid) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let Some(entry) = job_checkpoints.jobs.get(&job) else {
            return;
        };
        let checkpoints: Vec<String> = [&entry.newest_checkpoint, &entry.restarted_from]
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        if entry.first_task_end.is_intended() && !checkpoints.is_empty() {
            let protected = job_checkpoints
                .needed_checkpoints()
                .into_iter()
                .filter(|set| !checkpoints.contains(set))
                .collect();
            self.outputs.push_back(Output::MarkCheckpoints {
                checkpoints,
                ended: true,
                protected,
            });
            self.remove_job_copies(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An end is intended if the task succeeded or ended as ordered. A failure, a crash, an
    /// eviction or the loss of its host is not.
    #[test]
    fn end_is_intended_after_success_or_request() {
        let exit = |code: i32| Some(code << 8);
        let end = |end_signal, status| FirstTaskEnd {
            end_signal,
            evicted: false,
            status,
        };
        assert!(end(None, exit(0)).is_intended());
        assert!(!end(None, exit(1)).is_intended(), "it failed");
        assert!(
            !end(None, Some(9)).is_intended(),
            "nobody here has killed it"
        );
        assert!(!end(None, None).is_intended(), "it ended with its host");
        assert!(end(Some(15), Some(15)).is_intended() && end(Some(9), Some(9)).is_intended());
        assert!(end(Some(15), exit(1)).is_intended(), "it tidied up");
        assert!(!end(Some(15), Some(11)).is_intended(), "it crashed");
        assert!(
            !FirstTaskEnd {
                evicted: true,
                ..end(None, exit(0))
            }
            .is_intended()
        );
    }
}
