//! The end of a checkpoint: its result is recorded and reported, and the next checkpoint of the job
//! is scheduled.

use super::{
    ATTEMPTS_MAX, CHECKPOINT_INTERVAL_MIN, InventoryPurpose, JobActivity, RETRY_INTERVAL,
    SnapshotContents, WRITING_RETRY_INTERVAL,
};
use crate::Machine;
use checkpoint_protocol::SnapshotId;
use sempa_proto::checkpoint::{
    CheckpointFailure, CheckpointReport, CheckpointSchedule, StoreFailure,
};
use sempa_proto::event::EventKind;
use sempa_proto::task::Reply;
use sempa_proto::{Micros, Tid};

impl Machine {
    pub(super) fn handle_snapshot_end(
        &mut self,
        snapshot: SnapshotId,
        result: Result<Micros, CheckpointFailure>,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let SnapshotContents {
            members: tasks,
            self_checkpointed_members: self_checkpointed_tids,
            sealed_checkpoint: name_and_bytes,
            ..
        } = job_checkpoints
            .snapshot_contents
            .remove(&snapshot)
            .unwrap_or_default();
        let Some(job) = job_checkpoints.job_of_snapshot(snapshot) else {
            return;
        };
        let result = result.and_then(|frozen_time| {
            let (checkpoint, bytes) = name_and_bytes.ok_or_else(|| {
                CheckpointFailure::Store(StoreFailure("the checkpoint was lost".into()))
            })?;
            Ok(CheckpointReport {
                name: checkpoint,
                job,
                tasks,
                stored_bytes: bytes,
                frozen_time,
                self_checkpointed_tasks: self_checkpointed_tids,
            })
        });
        self.finish_checkpoint(job, result);
    }

    /// Finishes a checkpoint that is complete, has failed or did not begin. A checkpoint that
    /// failed for a transient reason is tried again instead.
    pub(super) fn finish_checkpoint(
        &mut self,
        job: Tid,
        result: Result<CheckpointReport, CheckpointFailure>,
    ) {
        let (now, lease) = (self.now, self.config.lease);
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        entry.activity = JobActivity::Idle;
        entry.attempt_count += 1;
        let death_uncertainty_end = entry
            .recent_deaths
            .uncertainty_end(now, lease)
            .filter(|_| entry.schedule.is_some());
        if let Some(why) = result
            .as_ref()
            .err()
            .filter(|why| why.is_transient() && entry.attempt_count < ATTEMPTS_MAX)
        {
            return self.schedule_check(
                job,
                if why.is_self_checkpoint_pending() {
                    WRITING_RETRY_INTERVAL
                } else {
                    RETRY_INTERVAL
                },
            );
        }
        (entry.attempt_count, entry.is_draining) = (0, false);
        if result.is_ok() {
            entry.last_duration = now.since(entry.started_at);
        }
        let is_vacated = std::mem::take(&mut entry.ends_for_vacate) && entry.ends_after_checkpoint;
        let must_end_job = std::mem::take(&mut entry.ends_after_checkpoint) && result.is_ok();
        if let (Ok(report), true) = (&result, must_end_job) {
            // The request is answered when the job has ended.
            (entry.activity, entry.schedule) = (
                JobActivity::EndingJob {
                    report: report.clone(),
                    check_count: 0,
                },
                None,
            );
        }
        let waiters = if must_end_job {
            Vec::new()
        } else {
            std::mem::take(&mut entry.waiters)
        };
        if let Ok(report) = &result {
            entry.newest_checkpoint = Some(report.name.clone());
            let has_only_ended_tasks = entry.has_only_ended_tasks();
            let ended_members = std::mem::take(&mut entry.ended_members);
            entry.members.retain(|tid| !ended_members.contains(tid));
            entry.recent_deaths.retain_tasks(&report.tasks);
            if has_only_ended_tasks && entry.activity == JobActivity::Idle {
                self.check_job_soon(job);
            }
        } else if entry.activity == JobActivity::Idle && entry.has_only_ended_tasks() {
            self.check_job_soon(job);
        }
        if let (Err(CheckpointFailure::NoSuchJob(_)), Some(uncertainty_end)) =
            (&result, death_uncertainty_end)
        {
            self.schedule_check(job, uncertainty_end.since(now));
        } else if matches!(result, Err(CheckpointFailure::NoSuchJob(_))) {
            self.handle_job_end(job);
            self.forget_job(job);
        } else {
            self.schedule_next_checkpoint(job, result.is_ok());
        }
        if must_end_job {
            self.request_inventory(InventoryPurpose::CheckTasksEnded(job));
        }
        self.record_event(checkpoint_event(job, &result, is_vacated));
        for (tid, id) in waiters {
            self.reply(tid, id, Reply::Checkpointed(result.clone()));
        }
        if let Ok(report) = &result {
            self.queue_copy(job, &report.name);
        }
    }

    /// Takes an inventory soon, because all known tasks of the job have ended.
    fn check_job_soon(&mut self, job: Tid) {
        if let Some(job_checkpoints) = self.job_checkpoints() {
            job_checkpoints.maybe_ended_jobs.push(job);
        }
    }

    /// Schedules the next checkpoint of a job, if the job has a schedule. `is_complete` is true if
    /// the last checkpoint succeeded.
    fn schedule_next_checkpoint(&mut self, job: Tid, is_complete: bool) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let (last_duration, Some(checkpoint_schedule)) = (entry.last_duration, entry.schedule)
        else {
            return;
        };
        let interval =
            checkpoint_interval(checkpoint_schedule, is_complete.then_some(last_duration));
        let mut exceeded_bound = None;
        if let CheckpointSchedule::MaxLoss(bound) | CheckpointSchedule::Interval(bound) =
            checkpoint_schedule
            && is_complete
            && last_duration + last_duration + interval > bound
            && !std::mem::replace(&mut entry.has_reported_lateness, true)
        {
            exceeded_bound = Some(bound);
        }
        self.schedule_check(job, interval);
        if let Some(bound) = exceeded_bound {
            let text = format!(
                "a checkpoint of job {job} took {:.1} s: more than {:.1} s of work may be lost",
                last_duration.0 as f64 / 1e6,
                bound.0 as f64 / 1e6
            );
            self.record_event(EventKind::Note { text });
        }
    }
}

/// Returns the event log entry for the end of a checkpoint. `is_vacated` is true if the resource
/// manager requested that the job end after the checkpoint.
fn checkpoint_event(
    job: Tid,
    result: &Result<CheckpointReport, CheckpointFailure>,
    is_vacated: bool,
) -> EventKind {
    match result {
        Ok(CheckpointReport {
            name: checkpoint,
            tasks,
            stored_bytes: bytes,
            frozen_time: freeze_duration,
            ..
        }) => EventKind::Checkpointed {
            checkpoint: checkpoint.clone(),
            job,
            tasks: u32::try_from(tasks.len()).unwrap_or(u32::MAX),
            bytes: *bytes,
            frozen: *freeze_duration,
            vacated: is_vacated,
        },
        Err(why) => EventKind::CheckpointFailed {
            job,
            why: why.to_string(),
        },
    }
}

/// Returns the time until the next checkpoint. `duration` is that of the last checkpoint; `None` if
/// the last checkpoint failed.
pub(super) fn checkpoint_interval(
    schedule: CheckpointSchedule,
    duration: Option<Micros>,
) -> Micros {
    let interval = match (schedule, duration) {
        // A loss is largest just before a checkpoint is stored: it includes all work since the
        // start of the previous checkpoint. The next checkpoint is assumed to take at most 1.5
        // times as long as the last one.
        (CheckpointSchedule::MaxLoss(loss_max), Some(duration)) => {
            loss_max.since(Micros(duration.0.saturating_mul(5) / 2))
        }
        // Like `MaxLoss`, but with a minimum, so that the job does not spend all its time on
        // checkpoints.
        (CheckpointSchedule::Interval(target_interval), Some(duration)) => {
            checkpoint_interval(CheckpointSchedule::MaxLoss(target_interval), Some(duration))
                .max(Micros(target_interval.0 / 2))
        }
        (CheckpointSchedule::Interval(target_interval), None) => target_interval,
        // Without a valid checkpoint all work may be lost, so the next attempt follows after a
        // short time.
        (CheckpointSchedule::MaxLoss(_) | CheckpointSchedule::Disabled, _) => RETRY_INTERVAL,
    };
    interval.max(CHECKPOINT_INTERVAL_MIN)
}
