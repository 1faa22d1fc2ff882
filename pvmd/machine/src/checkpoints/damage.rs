//! Damaged checkpoints: they are marked, and a job that rolls back uses the next older one.

use super::{Damage, EXIT_CHECK_INTERVAL, JobActivity, restart_retry_interval};
use crate::{Machine, Output};
use sempa_proto::Tid;
use sempa_proto::checkpoint::StoreFailure;
use sempa_proto::event::EventKind;

impl Machine {
    /// Records that the store has found the checkpoint of a restart damaged or missing. The report
    /// of the failed step follows.
    pub(crate) fn handle_checkpoint_damaged(
        &mut self,
        restart_number: u64,
        why: String,
        is_missing: bool,
    ) {
        let open_restart = self
            .job_checkpoints()
            .and_then(|k| k.open_restarts.get_mut(&restart_number));
        // A rollback uses an older checkpoint instead of a missing one. A user may have mistyped
        // the name.
        if let Some(open_restart) = open_restart
            && (!is_missing || open_restart.rollback_job.is_some())
        {
            open_restart
                .damage
                .get_or_insert(Damage { why, is_missing });
        }
    }

    /// Has the store mark the checkpoint of a failed restart as damaged. If a job rolls back to it,
    /// the store also finds the next older checkpoint.
    pub(super) fn condemn_checkpoint(
        &mut self,
        checkpoint: &str,
        job: Tid,
        rollback_job: Option<Tid>,
        damage: Damage,
    ) {
        let Damage { why, is_missing } = damage;
        let entry = rollback_job.and_then(|job| self.job_checkpoints()?.jobs.get_mut(&job));
        if let Some(entry) = entry {
            entry.is_newest_missing = is_missing;
        }
        let rollback_key = rollback_job.and_then(|rollback_job| {
            let job_checkpoints = self.job_checkpoints()?;
            Some(job_checkpoints.claim_key(rollback_job))
        });
        self.outputs.push_back(Output::MarkDamaged {
            checkpoint: checkpoint.to_string(),
            why: why.clone(),
            rollback_job: rollback_key,
        });
        if rollback_job.is_none() {
            self.record_event(EventKind::CheckpointDamaged {
                checkpoint: checkpoint.to_string(),
                job,
                why,
                rolls_back: false,
                replacement: None,
            });
        }
    }

    /// Handles the store's report on the checkpoint that is used instead of a damaged one. The
    /// rollback continues with this checkpoint. If there is none, the rollback ends, because no
    /// further attempt could succeed. If the store could not be read, or if it contains no
    /// checkpoint of the job at all, which may be a store that is not mounted, the checkpoint is
    /// tried again later, which asks the store again.
    pub(crate) fn handle_older_checkpoint(
        &mut self,
        job: Tid,
        damaged_checkpoint: String,
        why: String,
        result: Result<Option<String>, StoreFailure>,
    ) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let is_expected = matches!(entry.activity, JobActivity::RollingBack { .. })
            && entry.newest_checkpoint.as_ref() == Some(&damaged_checkpoint);
        if !is_expected {
            return;
        }
        let is_store_empty = entry.is_newest_missing && result == Ok(None);
        let result = match is_store_empty {
            true => Err(StoreFailure("it contains no checkpoint of the job".into())),
            false => result,
        };
        let older_checkpoint = match result {
            Ok(older_checkpoint) => older_checkpoint,
            Err(failure) => {
                let delay = restart_retry_interval(entry.attempt_count);
                self.log_warning(format!(
                    "job {job} waits for the store, because its checkpoint {damaged_checkpoint} cannot be used: {failure}"
                ));
                return self.schedule_check(job, delay);
            }
        };
        if entry.restart_checkpoint.as_ref() == Some(&damaged_checkpoint) {
            entry.restart_checkpoint = None;
        }
        entry.newest_checkpoint.clone_from(&older_checkpoint);
        self.record_event(EventKind::CheckpointDamaged {
            checkpoint: damaged_checkpoint,
            job,
            why,
            rolls_back: true,
            replacement: older_checkpoint.clone(),
        });
        match older_checkpoint {
            Some(_) => self.schedule_check(job, EXIT_CHECK_INTERVAL),
            // The event above ends the wait of those who expect the restart.
            None => self.forget_job(job),
        }
    }
}
