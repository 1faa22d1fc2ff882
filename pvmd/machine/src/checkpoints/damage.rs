//! Damaged checkpoints: they are marked, and a job that rolls back uses the next older one.

use super::{EXIT_CHECK_INTERVAL, JobActivity};
use crate::{Machine, Output};
use sempa_proto::Tid;
use sempa_proto::event::EventKind;

impl Machine {
    /// Records that the store has found the checkpoint of a restart damaged. The report of the
    /// failed step follows.
    pub(crate) fn handle_checkpoint_damaged(&mut self, restart_number: u64, why: String) {
        let open_restart = self
            .job_checkpoints()
            .and_then(|k| k.open_restarts.get_mut(&restart_number));
        if let Some(open_restart) = open_restart {
            open_restart.damage.get_or_insert(why);
        }
    }

    /// Has the store mark the checkpoint of a failed restart as damaged. If a job rolls back to it,
    /// the store also finds the next older checkpoint.
    pub(super) fn condemn_checkpoint(
        &mut self,
        checkpoint: &str,
        job: Tid,
        rollback_job: Option<Tid>,
        why: String,
    ) {
        self.outputs.push_back(Output::MarkDamaged {
            checkpoint: checkpoint.to_string(),
            why: why.clone(),
            rollback_job,
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

    /// Continues the rollback of a job whose newest checkpoint is damaged with an older one. If
    /// there is none, the rollback ends, because no further attempt could succeed.
    pub(crate) fn roll_back_further(
        &mut self,
        job: Tid,
        damaged_checkpoint: String,
        why: String,
        older_checkpoint: Option<String>,
    ) {
        let Some(entry) = self.job_checkpoints().and_then(|k| k.jobs.get_mut(&job)) else {
            return;
        };
        let is_expected = matches!(entry.activity, JobActivity::RollingBack { .. })
            && entry.newest_checkpoint.as_ref() == Some(&damaged_checkpoint);
        if !is_expected {
            return;
        }
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
            None => {
                self.outputs.push_back(Output::ReleaseJob { job });
                self.forget_job(job);
            }
        }
    }
}
