//! The end of a checkpoint: its result is recorded and reported, and the next checkpoint of the job
//! is scheduled.

use super::{
    ATTEMPTS_MAX, CHECKPOINT_INTERVAL_MIN, InventoryPurpose, JobActivity, RETRY_INTERVAL,
    SnapshotContents, WRITING_RETRY_INTERVAL,
};
use crate::Machine;
use checkpoint_protocol::SnapshotId;
use sempa_proto::checkpoint::{CheckpointFailure, CheckpointReport, CheckpointSchedule};
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
            self_checkpointed,
            sealed,
            ..
        } = job_checkpoints
            .snapshot_contents
            .remove(&snapshot)
            .unwrap_or_default();
        let Some(job) = job_checkpoints.job_of_snapshot(snapshot) else {
            return;
        };
        let result = result.and_then(|frozen| {
            let (set, bytes) =
                sealed.ok_or_else(|| CheckpointFailure::Store("the checkpoint was lost".into()))?;
            Ok(CheckpointReport {
                name: set,
                job,
                tasks,
                bytes,
                frozen,
                self_checkpointed,
            })
        });
        self.finish_checkpoint(job, result);
    }

    /// Finishes a checkpoint that is complete, has failed or did not begin.
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
        entry.attempts += 1;
        let unknown_until = entry
            .recently_dead
            .unknown_until(now, lease)
            .filter(|_| entry.schedule.is_some());
        if let Some(why) = result
            .as_ref()
            .err()
            .filter(|why| why.is_transient() && entry.attempts < ATTEMPTS_MAX)
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
        (entry.attempts, entry.is_draining) = (0, false);
        if result.is_ok() {
            entry.last_duration = now.since(entry.started_at);
        }
        let vacated = std::mem::take(&mut entry.ends_for_vacate) && entry.ends_after_checkpoint;
        let ends = std::mem::take(&mut entry.ends_after_checkpoint) && result.is_ok();
        if let (Ok(report), true) = (&result, ends) {
            // The request is answered when the job has ended.
            (entry.activity, entry.schedule) = (
                JobActivity::EndingJob {
                    report: report.clone(),
                    checks: 0,
                },
                None,
            );
        }
        let waiters = if ends {
            Vec::new()
        } else {
            std::mem::take(&mut entry.waiters)
        };
        if let Ok(report) = &result {
            entry.newest_checkpoint = Some(report.name.clone());
            let ended = std::mem::take(&mut entry.ended_members);
            entry.members.retain(|tid| !ended.contains(tid));
            entry.recently_dead.retain_tasks(&report.tasks);
        } else if entry.activity == JobActivity::Idle && entry.has_only_ended_tasks() {
            let quiet = job;
            self.job_checkpoints()
                .into_iter()
                .for_each(|job_checkpoints| job_checkpoints.maybe_ended_jobs.push(quiet));
        }
        if let (Err(CheckpointFailure::NoSuchJob(_)), Some(until)) = (&result, unknown_until) {
            self.schedule_check(job, until.since(now));
        } else if matches!(result, Err(CheckpointFailure::NoSuchJob(_))) {
            self.handle_job_end(job);
            self.forget_job(job);
        } else {
            self.schedule_next_checkpoint(job, result.is_ok());
        }
        if ends {
            self.take_inventory(InventoryPurpose::CheckGone(job));
        }
        self.record(checkpoint_event(job, &result, vacated));
        for (tid, id) in waiters {
            self.reply(tid, id, Reply::Checkpointed(result.clone()));
        }
        if let Ok(report) = &result {
            self.queue_copy(job, &report.name);
        }
    }

    /// Schedules the next checkpoint of a job, if the job has a schedule. `is_complete` is true if
    /// the last checkpoint succeeded.
    fn schedule_next_checkpoint(&mut self, job: Tid, is_complete: bool) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let (took, Some(checkpoint_schedule)) = (entry.last_duration, entry.schedule) else {
            return;
        };
        let interval = checkpoint_interval(checkpoint_schedule, is_complete.then_some(took));
        let mut late = None;
        if let CheckpointSchedule::MaxLoss(bound) | CheckpointSchedule::Every(bound) =
            checkpoint_schedule
            && is_complete
            && took + took + interval > bound
            && !std::mem::replace(&mut entry.lateness_reported, true)
        {
            late = Some(bound);
        }
        self.schedule_check(job, interval);
        if let Some(bound) = late {
            let text = format!(
                "a checkpoint of job {job} took {:.1} s: more than {:.1} s of work may be lost",
                took.0 as f64 / 1e6,
                bound.0 as f64 / 1e6
            );
            self.record(EventKind::Note { text });
        }
    }
}

/// Returns the event log entry for the end of a checkpoint. `vacated` is true if the resource
/// manager requested the end of the job.
fn checkpoint_event(
    job: Tid,
    result: &Result<CheckpointReport, CheckpointFailure>,
    vacated: bool,
) -> EventKind {
    match result {
        Ok(CheckpointReport {
            name: set,
            tasks,
            bytes,
            frozen,
            ..
        }) => EventKind::Checkpointed {
            checkpoint: set.clone(),
            job,
            tasks: u32::try_from(tasks.len()).unwrap_or(u32::MAX),
            bytes: *bytes,
            frozen: *frozen,
            vacated,
        },
        Err(why) => EventKind::CheckpointFailed {
            job,
            why: why.to_string(),
        },
    }
}

/// Returns the time until the next checkpoint. The duration is that of the last checkpoint; `None`
/// if it failed.
pub(super) fn checkpoint_interval(
    schedule: CheckpointSchedule,
    duration: Option<Micros>,
) -> Micros {
    let pause = match (schedule, duration) {
        // A loss is largest just before a checkpoint is stored: it includes all work since the
        // start of the previous checkpoint. Taking a checkpoint may last half as long again as the
        // last time.
        (CheckpointSchedule::MaxLoss(bound), Some(duration)) => {
            bound.since(Micros(duration.0.saturating_mul(5) / 2))
        }
        // As for `MaxLoss`, but with a minimum, so that the job does not spend all its time on
        // checkpoints.
        (CheckpointSchedule::Every(every), Some(duration)) => {
            checkpoint_interval(CheckpointSchedule::MaxLoss(every), Some(duration))
                .max(Micros(every.0 / 2))
        }
        (CheckpointSchedule::Every(every), None) => every,
        // Without a valid checkpoint all work is at risk, so the next attempt follows soon.
        (CheckpointSchedule::MaxLoss(_) | CheckpointSchedule::Never, _) => RETRY_INTERVAL,
    };
    pause.max(CHECKPOINT_INTERVAL_MIN)
}
