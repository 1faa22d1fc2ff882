//! Removal of checkpoints: by request of a user, unless jobs or restarts still need them, and by
//! the store, to comply with its limits.

use super::{CheckpointedJob, JobActivity, JobCheckpoints};
use crate::{Machine, Output};
use sempa_proto::checkpoint::{
    CheckpointEntry, RemovalRefusal, RemovalResults, RemovalSelection, StoreFailure,
};
use sempa_proto::event::EventKind;
use sempa_proto::task::Reply;
use sempa_proto::{PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of checkpoints in one removal request.
const REMOVALS_MAX: usize = 1024;

impl CheckpointedJob {
    /// True if the job is rolling back to its newest checkpoint, or may need to do so later.
    fn needs_newest_checkpoint(&self) -> bool {
        self.schedule.is_some()
            || matches!(
                self.activity,
                JobActivity::RollingBack { .. }
                    | JobActivity::Restarting(_)
                    | JobActivity::EndingJob { .. }
            )
    }
}

impl JobCheckpoints {
    /// Returns the newest checkpoint of each job that may roll back.
    pub(super) fn needed_checkpoints(&self) -> Vec<String> {
        self.jobs
            .values()
            .filter(|job| job.needs_newest_checkpoint())
            .filter_map(|job| job.newest_checkpoint.clone())
            .collect()
    }
}

impl Machine {
    /// Master: handles a request to remove checkpoints. The store removes the selected checkpoints,
    /// except those from which a job is being restarted or may be restarted later.
    pub(crate) fn handle_removal_request(
        &mut self,
        tid: Tid,
        id: RequestId,
        selection: RemovalSelection,
        include_foreign: bool,
    ) {
        let Some(job_checkpoints) = self.job_checkpoints() else {
            return;
        };
        if matches!(&selection, RemovalSelection::Checkpoints(checkpoints) if checkpoints.len() > REMOVALS_MAX)
        {
            let reason = format!("at most {REMOVALS_MAX} checkpoints are removed at once");
            return self.reply_error(tid, id, PvmError::OutOfRes, reason);
        }
        let mut refusals = BTreeMap::new();
        for (job, entry) in job_checkpoints
            .jobs
            .iter()
            .filter(|(_, entry)| entry.needs_newest_checkpoint())
        {
            refusals.extend(
                entry
                    .newest_checkpoint
                    .clone()
                    .map(|checkpoint| (checkpoint, RemovalRefusal::OnlyRestartPoint(*job))),
            );
        }
        // A checkpoint that a restart has requested, but not opened yet, is not protected by the
        // store.
        refusals.extend(
            job_checkpoints
                .open_restarts
                .values()
                .map(|open_restart| (open_restart.checkpoint.clone(), RemovalRefusal::InUse)),
        );
        self.outputs.push_back(Output::RemoveCheckpoints {
            tid,
            id,
            selection,
            include_foreign,
            refusals,
        });
    }

    /// Handles the store's report on checkpoints that it has removed on request: removes the copies
    /// on other hosts, records the removal in the event log, and replies to the requester.
    pub(crate) fn handle_checkpoints_removed(
        &mut self,
        tid: Tid,
        id: RequestId,
        result: Result<RemovalResults, StoreFailure>,
    ) {
        let removals = result
            .iter()
            .flatten()
            .filter(|(_, removal_result)| removal_result.is_ok());
        let checkpoints: Vec<String> = removals.map(|(checkpoint, _)| checkpoint.clone()).collect();
        self.remove_copies_of(&checkpoints);
        self.forget_checkpoints(checkpoints, format!("requested by {tid}"));
        self.reply(tid, id, Reply::CheckpointsRemoved(result));
    }

    /// Adds the hosts with copies to the store's list of checkpoints, and sends the list to the
    /// task.
    pub(crate) fn handle_checkpoints_listed(
        &mut self,
        tid: Tid,
        id: RequestId,
        mut result: Result<Vec<CheckpointEntry>, StoreFailure>,
    ) {
        for entry in result.iter_mut().flatten() {
            entry.copy_hosts = self.hosts_with_copy(entry.job, &entry.name);
        }
        self.reply(tid, id, Reply::Checkpoints(result));
    }

    /// Handles the store's report on checkpoints that it has removed without a request, to comply
    /// with its limits.
    pub(crate) fn handle_checkpoints_expired(&mut self, checkpoints: Vec<String>) {
        self.forget_checkpoints(
            checkpoints,
            "to keep the limits of the store, or because their jobs ended long ago".into(),
        );
    }

    fn forget_checkpoints(&mut self, checkpoints: Vec<String>, why: String) {
        if checkpoints.is_empty() {
            return;
        }
        for entry in self
            .job_checkpoints()
            .into_iter()
            .flat_map(|job_checkpoints| job_checkpoints.jobs.values_mut())
        {
            entry
                .newest_checkpoint
                .take_if(|checkpoint| checkpoints.contains(checkpoint));
            entry
                .restart_checkpoint
                .take_if(|checkpoint| checkpoints.contains(checkpoint));
        }
        self.record_event(EventKind::CheckpointsRemoved { checkpoints, why });
    }
}
