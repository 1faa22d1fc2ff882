//! Ends the tasks of two kinds of jobs: jobs that roll back to their newest checkpoint after the
//! loss of a host, and jobs that must end when their checkpoint is complete.

use super::inventory::job_members;
use super::recently_dead::RecentDeaths;
use super::{
    CheckpointedJob, EXIT_CHECK_INTERVAL, EXIT_CHECKS_MAX, JobActivity, RESTART_RETRY_INTERVAL,
    SIGKILL,
};
use crate::Machine;
use crate::rpc::RpcPurpose;
use sempa_proto::checkpoint::CheckpointFailure;
use sempa_proto::event::EventKind;
use sempa_proto::host::HostRequest;
use sempa_proto::migration::{Failure, Step};
use sempa_proto::table::TaskInfo;
use sempa_proto::task::Reply;
use sempa_proto::{HostId, Tid};
use std::collections::BTreeSet;

impl Machine {
    /// Master: handles the loss of a host. Rolls back each job that had tasks on this host, if the
    /// job has a schedule and a checkpoint. Forgets the checkpoint copies on this host and queues
    /// new ones.
    pub(crate) fn roll_back_for_lost_host(&mut self, host: HostId) {
        self.replace_copies_on(host);
        let why = format!("{} was lost", self.host_name(host));
        self.roll_back_jobs_on(host, Some(host), &why, |_| {
            CheckpointFailure::HostLost(host)
        });
        self.end_members_on(host);
    }

    /// Master: handles the end of a host's tasker. All tasks of the host have died with the tasker.
    /// The jobs roll back as if the host were lost, but the host remains in the virtual machine.
    pub(crate) fn roll_back_for_lost_tasker(&mut self, host: HostId) {
        let why = format!("the tasker of {} has ended", self.host_name(host));
        let failure = |job| CheckpointFailure::Task {
            tid: job,
            step: Step::Dump,
            failure: Failure::Engine(why.clone()),
        };
        self.roll_back_jobs_on(host, None, &why, failure);
    }

    /// Master: returns which of the tasks belong to a job that rolls back, or that is being
    /// restarted from a checkpoint.
    pub(crate) fn find_awaiting_restart(&self, mut tids: Vec<Tid>) -> Vec<Tid> {
        let jobs = self.master.iter().flat_map(|m| m.checkpoints.jobs.values());
        let awaiting_jobs: Vec<&CheckpointedJob> = jobs
            .filter(|job| {
                matches!(
                    job.activity,
                    JobActivity::RollingBack { .. } | JobActivity::Restarting(_)
                )
            })
            .collect();
        tids.retain(|tid| awaiting_jobs.iter().any(|job| job.members.contains(tid)));
        tids
    }

    /// Records that the tasks of a host have ended with it. Jobs that do not roll back may thereby
    /// have ended.
    fn end_members_on(&mut self, host: HostId) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let members: BTreeSet<Tid> = job_checkpoints
            .jobs
            .values()
            .flat_map(|job| job.members.difference(&job.ended_members))
            .copied()
            .collect();
        let ended_members: BTreeSet<Tid> = members
            .into_iter()
            .filter(|tid| self.location(*tid) == Some(host))
            .collect();
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        for (job, entry) in &mut job_checkpoints.jobs {
            let may_run = matches!(
                entry.activity,
                JobActivity::Idle | JobActivity::TakingInventory | JobActivity::TakingSnapshot(_)
            );
            if !may_run || entry.has_only_ended_tasks() {
                continue;
            }
            let ended_with_host = entry.members.intersection(&ended_members).copied();
            let ended_with_host: Vec<Tid> = ended_with_host.collect();
            entry.ended_members.extend(ended_with_host);
            // The end of a checkpoint in progress checks the job, too.
            if entry.activity == JobActivity::Idle && entry.has_only_ended_tasks() {
                job_checkpoints.maybe_ended_jobs.push(*job);
            }
        }
    }

    /// Master: called when hosts have joined. Tries again to restart the jobs that could not be
    /// restarted, and queues missing copies of checkpoints.
    pub(crate) fn retry_stuck_jobs(&mut self) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let mut stuck_jobs = Vec::new();
        for (tid, job) in job_checkpoints
            .jobs
            .iter_mut()
            .filter(|(_, job)| job.is_stuck())
        {
            // If this attempt is too early and fails, the next attempt follows after the short
            // interval.
            job.attempt_count = 1;
            stuck_jobs.push(*tid);
        }
        stuck_jobs
            .into_iter()
            .for_each(|job| self.schedule_check(job, RESTART_RETRY_INTERVAL));
        self.queue_missing_copies();
    }

    pub(super) fn host_name(&self, host: HostId) -> String {
        self.table
            .get(host)
            .map_or_else(|| host.to_string(), |entry| entry.name.clone())
    }

    /// Rolls back the jobs that had tasks on `host`, where all tasks are dead. Jobs without a
    /// schedule or a checkpoint are not rolled back. `lost_host` is `host` if the host itself is
    /// lost, `None` if only its tasker has ended.
    fn roll_back_jobs_on(
        &mut self,
        host: HostId,
        lost_host: Option<HostId>,
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
                    .recent_deaths
                    .has_task_lost_with(self.now, self.config.lease, host)
        };
        // A job that is being restarted is not rolled back here: the restart protocol handles the
        // loss of the host.
        let may_roll_back = |job: &CheckpointedJob| {
            matches!(
                job.activity,
                JobActivity::Idle | JobActivity::TakingInventory | JobActivity::TakingSnapshot(_)
            )
        };
        let affected_jobs = job_checkpoints.jobs.iter().filter(|(_, job)| {
            job.schedule.is_some()
                && job.newest_checkpoint.is_some()
                && may_roll_back(job)
                && had_task_on_host(job)
        });
        let affected_jobs: Vec<(Tid, BTreeSet<Tid>)> = affected_jobs
            .map(|(tid, job)| (*tid, job.members.clone()))
            .collect();
        for (job, members) in affected_jobs {
            let why = why.to_string();
            let (mut waiters, mut had_open_request) = (Vec::new(), false);
            if let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) {
                had_open_request = entry.has_open_request();
                entry.activity = JobActivity::RollingBack {
                    lost_host,
                    why: why.clone(),
                    check_count: 0,
                };
                entry.recent_deaths = RecentDeaths::default();
                (
                    waiters,
                    entry.attempt_count,
                    entry.ends_after_checkpoint,
                    entry.ends_for_vacate,
                ) = (std::mem::take(&mut entry.waiters), 0, false, false);
            }
            if had_open_request {
                self.record_event(EventKind::CheckpointFailed { job, why });
            }
            for (tid, id) in waiters {
                self.reply(tid, id, Reply::Checkpointed(Err(failure(job))));
            }
            for tid in members {
                if self
                    .location(tid)
                    .is_some_and(|task_host| task_host != host)
                {
                    self.kill_task(tid);
                }
            }
            self.schedule_check(job, EXIT_CHECK_INTERVAL);
        }
    }

    /// Handles an inventory of a job whose tasks must end: kills the remaining tasks, or continues
    /// the rollback or the end of the job if no task remains.
    pub(super) fn check_tasks_ended(&mut self, job: Tid, tasks: &[TaskInfo]) {
        let lost_tasks_wait = self.lost_tasks_wait();
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let key = job_checkpoints.claim_key(job);
        let Some(entry) = job_checkpoints.jobs.get_mut(&job) else {
            return;
        };
        let (leftovers, members): (Vec<TaskInfo>, Vec<TaskInfo>) =
            job_members(job, &mut entry.members, tasks)
                .into_iter()
                .partition(TaskInfo::is_leftover);
        let remaining_tasks: Vec<Tid> = members.iter().map(|task| task.tid).collect();
        let remaining_leftovers: Vec<Tid> = leftovers.iter().map(|task| task.tid).collect();
        let (JobActivity::RollingBack {
            check_count: check_counter,
            ..
        }
        | JobActivity::EndingJob {
            check_count: check_counter,
            ..
        }
        | JobActivity::TakenOver {
            check_count: check_counter,
        }) = &mut entry.activity
        else {
            return;
        };
        // A task on a lost host may run until the end of the host's lease.
        if lost_tasks_wait.is_none() {
            *check_counter = check_counter.saturating_add(1);
        }
        let (check_count, gives_up) = (*check_counter, *check_counter >= EXIT_CHECKS_MAX);
        match &entry.activity {
            JobActivity::EndingJob { report, .. } if remaining_tasks.is_empty() || gives_up => {
                let (report, waiters) = (report.clone(), std::mem::take(&mut entry.waiters));
                if remaining_tasks.is_empty() {
                    entry.may_have_claim = false;
                    let members = entry.members.clone();
                    match remaining_leftovers.is_empty() && lost_tasks_wait.is_none() {
                        true => self.release_claim(key),
                        false => self.release_when_ended(key, members),
                    }
                }
                self.forget_job(job);
                for (tid, id) in waiters {
                    self.reply(tid, id, Reply::Checkpointed(Ok(report.clone())));
                }
                return;
            }
            JobActivity::TakenOver { .. } => {
                return self.end_rest_of_taken_over_job(
                    job,
                    &remaining_tasks,
                    &remaining_leftovers,
                    check_count,
                );
            }
            JobActivity::RollingBack { lost_host, why, .. }
                if remaining_tasks.is_empty() || gives_up =>
            {
                let (lost_host, why) = (*lost_host, why.clone());
                return self.restart_after_rollback(job, lost_host, why, remaining_tasks.len());
            }
            _ => {}
        }
        for tid in remaining_tasks {
            // The inventory includes tasks that the job has spawned since the previous inventory.
            self.kill_task(tid);
        }
        let delay = lost_tasks_wait.unwrap_or_default();
        self.schedule_check(job, delay.max(EXIT_CHECK_INTERVAL));
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
    /// `remaining_count` is the number of the job's tasks that have not ended. If any task has not
    /// ended, the restart fails, because such a task would run twice.
    fn restart_after_rollback(
        &mut self,
        job: Tid,
        lost_host: Option<HostId>,
        why: String,
        remaining_count: usize,
    ) {
        let newest_checkpoint = self
            .job_checkpoints()
            .and_then(|k| k.jobs.get(&job)?.newest_checkpoint.clone());
        let Some(checkpoint) = newest_checkpoint else {
            return self.give_up_rollback(job, why, "it has no checkpoint");
        };
        if remaining_count > 0 {
            let cause = format!("{why}, and {remaining_count} of its tasks have not ended");
            return self.give_up_rollback(job, cause, "it would run twice");
        }
        // A lost host stays in the table for a moment. A deleted host ends its tasks after it was
        // removed from the table.
        // The tasks of lost hosts have ended when their leases are over; more than one host may
        // have had tasks of the job. The tasks of a host whose tasker has ended have ended with the
        // tasker.
        let is_in_table = lost_host.is_some_and(|host| self.table.get(host).is_some());
        let wait = self.lost_tasks_wait();
        if is_in_table || wait.is_some() {
            let delay = wait.unwrap_or_default().max(EXIT_CHECK_INTERVAL);
            return self.schedule_check(job, delay);
        }
        let restart_number =
            self.restart_checkpoint(checkpoint, Some(job), Vec::new(), None, why, false);
        let entry = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job));
        if let (Some(entry), Some(restart_number)) = (entry, restart_number) {
            entry.activity = JobActivity::Restarting(restart_number);
        }
    }

    /// Forgets a job that rolls back and will not be restarted. The event ends the wait of those
    /// who expect the restart. `cause` is the reason for the rollback.
    pub(super) fn give_up_rollback(&mut self, job: Tid, cause: String, why: &str) {
        let entry = self.job_checkpoints().and_then(|k| k.jobs.get(&job));
        let newest_checkpoint = entry.and_then(|entry| entry.newest_checkpoint.clone());
        self.record_event(EventKind::RestartFailed {
            checkpoint: newest_checkpoint.unwrap_or_else(|| format!("of job {job}")),
            cause,
            why: why.into(),
        });
        self.forget_job(job);
    }
}
