//! Jobs that another virtual machine has taken over, according to the claim in the store: their
//! tasks here are ended, so that no job runs twice.

use super::JobActivity;
use crate::Machine;
use sempa_proto::Tid;
use sempa_proto::checkpoint::{CheckpointFailure, JobHolder, StoreFailure};
use sempa_proto::event::EventKind;
use sempa_proto::task::Reply;

impl Machine {
    /// Master: ends this virtual machine's copy of a job. A checkpoint or restart of the job that
    /// is in progress has no effect any more.
    pub(crate) fn end_taken_over_job(&mut self, job: Tid, by: &JobHolder) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let entry = job_checkpoints.jobs.entry(job).or_default();
        entry.activity = JobActivity::TakenOver { check_count: 0 };
        (entry.schedule, entry.ends_after_checkpoint) = (None, false);
        let (waiters, members) = (std::mem::take(&mut entry.waiters), entry.members.clone());
        self.record_event(EventKind::JobTakenOver {
            job,
            by: by.to_string(),
        });
        for (tid, id) in waiters {
            let failure = StoreFailure(format!("the job was restarted in {by}"));
            let result = Err(CheckpointFailure::Store(failure));
            self.reply(tid, id, Reply::Checkpointed(result));
        }
        for tid in members {
            self.kill_task(tid);
        }
        // The inventory finds members that were not known.
        self.request_inventory(super::InventoryPurpose::CheckTasksEnded(job));
    }
}
