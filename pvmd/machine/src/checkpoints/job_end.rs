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
    /// The last of the [`END_SIGNALS`] that another task or a user has sent to the task.
    end_signal: Option<i32>,
    /// True if an owner has evicted the task.
    is_evicted: bool,
    /// Wait status of the task; `None` if the task ended with its host.
    wait_status: Option<i32>,
}

impl FirstTaskEnd {
    /// True if the end was intended: the task succeeded or was ordered to end.
    fn is_intended(self) -> bool {
        let ended_as_ordered = |status: i32| {
            self.end_signal
                .is_some_and(|end_signal| status & 0x7f == 0 || status & 0x7f == end_signal)
        };
        !self.is_evicted
            && self
                .wait_status
                .is_some_and(|status| status == 0 || ended_as_ordered(status))
    }
}

impl CheckpointedJob {
    /// True if all known tasks of the job have ended.
    pub(super) fn has_only_ended_tasks(&self) -> bool {
        !self.members.is_empty() && self.ended_members.len() == self.members.len()
    }
}

impl JobCheckpoints {
    /// Updates the jobs after an event of `host`. `is_spontaneous` is false while the host or the
    /// virtual machine shuts down; the shutdown is then the cause of all ends of tasks.
    pub(crate) fn update_after_event(
        &mut self,
        now: Micros,
        host: HostId,
        event: &EventKind,
        is_spontaneous: bool,
    ) {
        match event {
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
                if is_spontaneous {
                    self.recent_exits.record_exit(now, *tid);
                }
                for (job, entry) in self
                    .jobs
                    .iter_mut()
                    .filter(|(_, entry)| entry.members.contains(tid))
                {
                    entry.ended_members.insert(*tid);
                    if is_spontaneous {
                        entry.recent_deaths.update_after_event(now, host, event);
                    }
                    if job == tid {
                        entry.first_task_end.wait_status = is_spontaneous.then_some(*status);
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
                    entry.recent_deaths.update_after_event(now, host, event);
                }
            }
            EventKind::GuestsEnded { guests, .. } => {
                for guest in guests {
                    self.record_end_order(*guest);
                    self.jobs
                        .entry(*guest)
                        .and_modify(|entry| entry.first_task_end.is_evicted = true);
                }
            }
            _ => {}
        }
    }

    /// Records a task's order to end in all jobs that contain the task.
    fn record_end_order(&mut self, tid: Tid) {
        for entry in self
            .jobs
            .values_mut()
            .filter(|entry| entry.members.contains(&tid))
        {
            entry.recent_deaths.record_end_order(tid);
        }
    }

    /// Records that all tasks except `survivors` were ordered to end.
    pub(crate) fn record_reset(&mut self, survivors: &[Tid]) {
        for (job, entry) in &mut self.jobs {
            let ended_members = entry.members.iter().filter(|tid| !survivors.contains(tid));
            ended_members.for_each(|tid| entry.recent_deaths.record_end_order(*tid));
            if !survivors.contains(job) {
                entry.first_task_end.end_signal = Some(SIGTERM);
            }
        }
    }
}

impl Machine {
    /// Records a signal that was sent to a task. If the signal is one of [`END_SIGNALS`] and ends
    /// the task, the end counts as intended. A slave reports the signal to the master.
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

    /// Takes an inventory for each job whose known tasks have all ended. Returns true if there was
    /// such a job.
    pub(super) fn check_maybe_ended_jobs(&mut self) -> bool {
        let candidates = self
            .job_checkpoints()
            .map(|job_checkpoints| std::mem::take(&mut job_checkpoints.maybe_ended_jobs))
            .unwrap_or_default();
        let has_candidates = !candidates.is_empty();
        for job in candidates {
            self.request_inventory(InventoryPurpose::CheckJobEnded(job));
        }
        has_candidates
    }

    /// Handles an inventory that was taken because the job may have ended. If no task of the job
    /// remains, handles the end of the job.
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

    /// Handles a job without tasks. If its end was intended, its checkpoints may be removed.
    pub(super) fn handle_job_end(&mut self, job: Tid) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let key = job_checkpoints.claim_key(job);
        let Some(entry) = job_checkpoints.jobs.get_mut(&job) else {
            return;
        };
        let may_have_claim = std::mem::take(&mut entry.may_have_claim);
        let members = entry.members.clone();
        let checkpoints: Vec<String> = [&entry.newest_checkpoint, &entry.restart_checkpoint]
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        if entry.first_task_end.is_intended() && !checkpoints.is_empty() {
            let protected_checkpoints = job_checkpoints
                .needed_checkpoints()
                .into_iter()
                .filter(|checkpoint| !checkpoints.contains(checkpoint))
                .collect();
            self.outputs.push_back(Output::MarkCheckpoints {
                checkpoints,
                has_ended: true,
                protected_checkpoints,
            });
            self.remove_job_copies(job);
            self.forget_known_checkpoint(job);
        }
        if may_have_claim {
            self.release_when_ended(key, members);
        }
    }

    /// Has the claim of an idle job released when its tasks have ended. A host that may have tasks
    /// of the job is lost.
    pub(super) fn release_later(&mut self, job: Tid) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let key = job_checkpoints.claim_key(job);
        let entry = job_checkpoints.jobs.get(&job);
        if let Some(entry) = entry
            && entry.may_have_claim
            && entry.activity == JobActivity::Idle
        {
            let members = entry.members.clone();
            self.release_when_ended(key, members);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An end is intended if the task succeeded or ended as ordered. A failure, a crash, an
    /// eviction or the loss of the task's host is not an intended end.
    #[test]
    fn end_is_intended_after_success_or_request() {
        let exit_status = |code: i32| Some(code << 8);
        let first_task_end = |end_signal, status| FirstTaskEnd {
            end_signal,
            is_evicted: false,
            wait_status: status,
        };
        assert!(first_task_end(None, exit_status(0)).is_intended());
        assert!(
            !first_task_end(None, exit_status(1)).is_intended(),
            "it failed"
        );
        assert!(
            !first_task_end(None, Some(9)).is_intended(),
            "nobody here has killed it"
        );
        assert!(
            !first_task_end(None, None).is_intended(),
            "it ended with its host"
        );
        assert!(
            first_task_end(Some(15), Some(15)).is_intended()
                && first_task_end(Some(9), Some(9)).is_intended()
        );
        assert!(
            first_task_end(Some(15), exit_status(1)).is_intended(),
            "it tidied up"
        );
        assert!(
            !first_task_end(Some(15), Some(11)).is_intended(),
            "it crashed"
        );
        assert!(
            !FirstTaskEnd {
                is_evicted: true,
                ..first_task_end(None, exit_status(0))
            }
            .is_intended()
        );
    }
}
