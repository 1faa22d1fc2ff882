//! Jobs that another virtual machine has taken over, according to the claim in the store: their
//! tasks here are ended, so that no job runs twice.

use super::{EXIT_CHECK_INTERVAL, EXIT_CHECKS_MAX, JobActivity, OpenRestart};
use crate::Machine;
use checkpoint_protocol::RestartId;
use sempa_proto::checkpoint::{
    CheckpointFailure, ClaimKey, JobHolder, RestartFailure, StoreFailure,
};
use sempa_proto::event::EventKind;
use sempa_proto::task::Reply;
use sempa_proto::{Micros, Tid};

/// Interval between two checks of a job whose tasks have not ended for a long time.
const SLOW_EXIT_CHECK_INTERVAL: Micros = Micros::from_secs(1);

impl Machine {
    /// Master: ends this virtual machine's copy of a job. A checkpoint or restart of the job that
    /// is in progress has no effect any more. Another job with the same number is not affected.
    pub(crate) fn end_taken_over_job(&mut self, key: ClaimKey, by: &JobHolder) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        if job_checkpoints.entry_key(key.job) == key {
            self.end_own_copy(key.job, by);
        }
        let failure = RestartFailure::RunsElsewhere {
            holder: by.clone(),
            time_until_force: Micros(0),
        };
        self.cancel_restarts_of(key, &failure);
    }

    fn end_own_copy(&mut self, job: Tid, by: &JobHolder) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let entry = job_checkpoints.jobs.entry(job).or_default();
        if matches!(entry.activity, JobActivity::TakenOver { .. }) {
            return;
        }
        entry.activity = JobActivity::TakenOver { check_count: 0 };
        (entry.schedule, entry.ends_after_checkpoint) = (None, false);
        entry.may_have_claim = false;
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

    /// Kills what remains of a job that another virtual machine has taken over. `tasks` are its
    /// tasks that run, and `leftovers` its ended tasks that have left processes.
    pub(super) fn end_rest_of_taken_over_job(
        &mut self,
        job: Tid,
        tasks: &[Tid],
        leftovers: &[Tid],
        check_count: u32,
    ) {
        if tasks.is_empty() && leftovers.is_empty() {
            return self.forget_job(job);
        }
        if check_count == EXIT_CHECKS_MAX {
            let tids = tasks.iter().chain(leftovers).map(Tid::to_string);
            self.log_warning_and_record(format!(
                "job {job} runs in another virtual machine, and these of its tasks here have not ended: {}",
                tids.collect::<Vec<_>>().join(" ")
            ));
        }
        tasks.iter().for_each(|tid| self.kill_task(*tid));
        for tid in leftovers {
            self.order_leftovers_killed(*tid);
        }
        let delay = match check_count >= EXIT_CHECKS_MAX {
            true => SLOW_EXIT_CHECK_INTERVAL,
            false => EXIT_CHECK_INTERVAL,
        };
        self.schedule_check(job, delay);
    }

    /// Ends the restarts of a job that this virtual machine may not run any more.
    fn cancel_restarts_of(&mut self, key: ClaimKey, failure: &RestartFailure) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        let is_of_job = |open_restart: &&OpenRestart| {
            let meta = open_restart.meta.as_ref();
            meta.is_some_and(|meta| meta.claim_key() == key)
        };
        let cancelled_restarts: Vec<(u64, Option<RestartId>)> = job_checkpoints
            .open_restarts
            .iter()
            .filter(|(_, open_restart)| is_of_job(open_restart))
            .map(|(restart_number, open_restart)| (*restart_number, open_restart.restart_id))
            .collect();
        for (restart_number, restart_id) in cancelled_restarts {
            match (restart_id, self.job_checkpoints()) {
                (Some(restart_id), Some(job_checkpoints)) => {
                    job_checkpoints.restarts.cancel(restart_id, failure.clone());
                }
                _ => self.finish_restart(restart_number, Err(failure.clone())),
            }
        }
    }
}
