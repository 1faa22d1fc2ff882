//! Ends the tasks of two kinds of jobs: jobs that roll back to their newest checkpoint after the
//! loss of a host, and jobs that must end when their checkpoint is complete.

use super::inventory::job_members;
use super::recently_dead::RecentDeaths;
use super::{
    CheckpointedJob, EXIT_CHECK_INTERVAL, EXIT_CHECKS_MAX, JobActivity, LOST_HOST_RESTART_DELAY,
    RESTART_RETRY_INTERVAL, SIGKILL,
};
use crate::Machine;
use crate::rpc::RpcPurpose;
use sempa_proto::checkpoint::CheckpointFailure;
use sempa_proto::event::EventKind;
use sempa_proto::host::HostRequest;
use sempa_proto::migration::{Failure, Step};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Master: handles the loss of a host. Jobs with a schedule that had tasks on this host roll
    /// back.
    pub(crate) fn roll_back_for_lost_host(&mut self, host: HostId) {
        self.replace_copies_on(host);
        let why = format!("{} was lost", self.host_name(host));
        self.roll_back_jobs_on(host, Some(host), &why, |_| {
            CheckpointFailure::HostLost(host)
        });
    }

    /// Master: handles the exit of a host's tasker, with which its tasks have died. The jobs roll
    /// back as if the host were lost, but the host remains.
    pub(crate) fn roll_back_for_lost_tasker(&mut self, host: HostId) {
        let why = format!("the tasker of {} has ended", self.host_name(host));
        let failure = |job| CheckpointFailure::Task {
            tid: job,
            step: Step::Dump,
            why: Failure::Engine(why.clone()),
        };
        self.roll_back_jobs_on(host, None, &why, failure);
    }

    /// Master: tries to restart the jobs again that could not be restarted. Called when hosts have
    /// joined.
    pub(crate) fn retry_stuck_jobs(&mut self) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let mut stuck = Vec::new();
        for (tid, job) in job_checkpoints
            .jobs
            .iter_mut()
            .filter(|(_, job)| job.is_stuck())
        {
            // If this attempt comes too early, the next one follows at the short interval.
            job.attempts = 1;
            stuck.push(*tid);
        }
        stuck
            .into_iter()
            .for_each(|job| self.schedule_check(job, RESTART_RETRY_INTERVAL));
        self.make_missing_copies();
    }

    pub(super) fn host_name(&self, host: HostId) -> String {
        self.table
            .get(host)
            .map_or_else(|| host.to_string(), |entry| entry.name.clone())
    }

    /// Rolls back the jobs that had tasks on this host, where all tasks are dead. `lost` is set if
    /// the host itself is lost.
    fn roll_back_jobs_on(
        &mut self,
        host: HostId,
        lost: Option<HostId>,
        why: &str,
        failure: impl Fn(Tid) -> CheckpointFailure,
    ) {
        if self.shutdown.is_some() {
            return;
        }
        let Some(master) = &self.master else { return };
        let (job_checkpoints, coordinator) = (&master.checkpoints, &master.migrations.coordinator);
        let had_task =
            |tid: &Tid| self.location(*tid) == Some(host) || coordinator.has_memory_on(*tid, host);
        let had_task_on_host = |job: &CheckpointedJob| {
            job.members.difference(&job.ended_members).any(had_task)
                || job
                    .recently_dead
                    .any_lost_with(self.now, self.config.lease, host)
        };
        // A job that is being restarted learns of the loss from the restart protocol.
        let may_roll_back = |job: &CheckpointedJob| {
            matches!(
                job.activity,
                JobActivity::Idle | JobActivity::TakingInventory | JobActivity::TakingSnapshot(_)
            )
        };
        let affected = job_checkpoints.jobs.iter().filter(|(_, job)| {
            job.schedule.is_some()
                && job.newest_checkpoint.is_some()
                && may_roll_back(job)
                && had_task_on_host(job)
        });
        let affected: Vec<(Tid, BTreeSet<Tid>)> = affected
            .map(|(tid, job)| (*tid, job.members.clone()))
            .collect();
        let not_before = self.now + LOST_HOST_RESTART_DELAY;
        for (job, members) in affected {
            let why = why.to_string();
            let (mut waiters, mut was_wanted) = (Vec::new(), false);
            if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
                was_wanted = entry.has_open_request();
                entry.activity = JobActivity::RollingBack {
                    lost,
                    not_before,
                    why: why.clone(),
                    checks: 0,
                };
                entry.recently_dead = RecentDeaths::default();
                (
                    waiters,
                    entry.attempts,
                    entry.ends_after_checkpoint,
                    entry.ends_for_vacate,
                ) = (std::mem::take(&mut entry.waiters), 0, false, false);
            }
            if was_wanted {
                self.record(EventKind::CheckpointFailed { job, why });
            }
            for (tid, id) in waiters {
                self.reply(tid, id, Reply::Checkpointed(Err(failure(job))));
            }
            for tid in members {
                if self.location(tid).is_some_and(|at| at != host) {
                    self.kill_task(tid);
                }
            }
            self.schedule_check(job, EXIT_CHECK_INTERVAL);
        }
    }

    /// Handles an inventory of a job whose tasks must end: kills the remaining tasks, or continues
    /// if none remains.
    pub(super) fn check_job_gone(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let left: Vec<Tid> = job_members(job, &mut entry.members, tasks)
            .iter()
            .map(|task| task.tid)
            .collect();
        let (JobActivity::RollingBack { checks, .. } | JobActivity::EndingJob { checks, .. }) =
            &mut entry.activity
        else {
            return;
        };
        *checks += 1;
        let gives_up = *checks >= EXIT_CHECKS_MAX;
        match &entry.activity {
            JobActivity::EndingJob { report, .. } if left.is_empty() || gives_up => {
                let (report, waiters) = (report.clone(), std::mem::take(&mut entry.waiters));
                self.forget_job(job);
                for (tid, id) in waiters {
                    self.reply(tid, id, Reply::Checkpointed(Ok(report.clone())));
                }
                return;
            }
            JobActivity::RollingBack {
                lost,
                not_before,
                why,
                ..
            } if left.is_empty() || gives_up => {
                let (lost, not_before, why) = (*lost, *not_before, why.clone());
                return self.restart_after_rollback(job, lost, not_before, why, left.len());
            }
            _ => {}
        }
        for tid in left {
            // Includes tasks that the job has spawned since the last inventory.
            self.kill_task(tid);
        }
        self.schedule_check(job, EXIT_CHECK_INTERVAL);
    }

    pub(super) fn kill_task(&mut self, tid: Tid) {
        self.call_host_of_task(
            tid,
            HostRequest::Signal {
                tid,
                signal: SIGKILL,
            },
            RpcPurpose::Ignored,
        );
    }

    /// Restarts a job after a rollback, when no process of its earlier tasks can run any more.
    /// `left` is the number of its tasks that have not ended: if it is not zero, the restart fails,
    /// because tasks would run twice.
    fn restart_after_rollback(
        &mut self,
        job: Tid,
        lost: Option<HostId>,
        not_before: Micros,
        why: String,
        left: usize,
    ) {
        let newest = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job)?.newest_checkpoint.clone());
        let Some(set) = newest else {
            return self.forget_job(job);
        };
        if left > 0 {
            let cause = format!("{why}, and {left} of its tasks have not ended");
            self.record(EventKind::RestartFailed {
                checkpoint: set,
                cause,
                why: "it would run twice".into(),
            });
            return self.forget_job(job);
        }
        // A lost host stays in the table for a moment. A deleted host ends its tasks after it was
        // removed from the table.
        let is_present =
            lost.is_some_and(|lost| self.table.get(lost).is_some() || self.is_leaving(lost));
        if is_present || self.now < not_before {
            return self.schedule_check(job, EXIT_CHECK_INTERVAL);
        }
        if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
            entry.activity = JobActivity::Restarting;
        }
        self.restart_checkpoint(set, Some(job), Vec::new(), None, why);
    }
}
