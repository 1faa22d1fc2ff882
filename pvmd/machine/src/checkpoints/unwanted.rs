//! Removal of checkpoints: by request of a user, unless they are still needed, and by the store, to
//! stay within its limits.

use super::{Doing, Job, Keeping};
use crate::{Machine, Output};
use sempa_proto::checkpoint::{CheckpointEntry, RemovalRefusal, RemovalResults, RemovalSelection};
use sempa_proto::event::EventKind;
use sempa_proto::task::Reply;
use sempa_proto::{PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Largest number of checkpoints in one request.
const NAMED_MAX: usize = 1024;

impl Job {
    /// True if the job rolls back to its newest checkpoint, or may have to later.
    fn needs_newest(&self) -> bool {
        self.pace.is_some()
            || matches!(
                self.doing,
                Doing::Ending { .. } | Doing::Restarting | Doing::Leaving { .. }
            )
    }
}

impl Keeping {
    /// Returns the checkpoints to which jobs may roll back.
    pub(super) fn needed(&self) -> Vec<String> {
        self.jobs
            .values()
            .filter(|job| job.needs_newest())
            .filter_map(|job| job.newest.clone())
            .collect()
    }
}

impl Machine {
    /// Master: handles a request to remove checkpoints.
    pub(crate) fn sets_unwanted(
        &mut self,
        tid: Tid,
        id: RequestId,
        which: RemovalSelection,
        any: bool,
    ) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        if matches!(&which, RemovalSelection::Checkpoints(sets) if sets.len() > NAMED_MAX) {
            let reason = format!("at most {NAMED_MAX} checkpoints are removed at once");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        let mut stay = BTreeMap::new();
        for (job, entry) in keeping
            .jobs
            .iter()
            .filter(|(_, entry)| entry.needs_newest())
        {
            stay.extend(
                entry
                    .newest
                    .clone()
                    .map(|set| (set, RemovalRefusal::OnlyRestartPoint(*job))),
            );
        }
        // A checkpoint that a restart has requested, but not opened yet, is not protected by the
        // store.
        stay.extend(
            keeping
                .wanted
                .values()
                .map(|wanted| (wanted.set.clone(), RemovalRefusal::InUse)),
        );
        self.out.push_back(Output::RemoveSets {
            tid,
            id,
            which,
            any,
            stay,
        });
    }

    /// Handles the store's report on removed checkpoints.
    pub(crate) fn sets_removed(
        &mut self,
        tid: Tid,
        id: RequestId,
        result: Result<RemovalResults, String>,
    ) {
        let removed = result.iter().flatten().filter(|(_, became)| became.is_ok());
        let sets: Vec<String> = removed.map(|(set, _)| set.clone()).collect();
        self.copies_unwanted(&sets);
        self.sets_gone(sets, format!("{tid} asked for it"));
        self.reply(tid, id, Reply::CheckpointsRemoved(result));
    }

    /// Completes the store's list of checkpoints with the hosts that have copies.
    pub(crate) fn sets_listed(
        &mut self,
        tid: Tid,
        id: RequestId,
        mut result: Result<Vec<CheckpointEntry>, String>,
    ) {
        for entry in result.iter_mut().flatten() {
            entry.copy_hosts = self.copies_of(entry.job, &entry.name);
        }
        self.reply(tid, id, Reply::Checkpoints(result));
    }

    /// Handles checkpoints that the store has removed on its own initiative.
    pub(crate) fn sets_swept(&mut self, sets: Vec<String>) {
        self.sets_gone(
            sets,
            "the store has its limits, or their jobs have ended long ago".into(),
        );
    }

    fn sets_gone(&mut self, sets: Vec<String>, why: String) {
        if sets.is_empty() {
            return;
        }
        for entry in self
            .keeping()
            .into_iter()
            .flat_map(|keeping| keeping.jobs.values_mut())
        {
            entry.newest.take_if(|set| sets.contains(set));
            entry.origin.take_if(|set| sets.contains(set));
        }
        self.record(EventKind::CheckpointsRemoved {
            checkpoints: sets,
            why,
        });
    }
}
