//! Sets that are removed: those that somebody names, but for those that are needed, and those that the store does not keep.

use super::{Doing, Job, Keeping};
use crate::{Machine, Output};
use sempa_proto::checkpoint::{Removed, SetEntry, Stays, Unwanted};
use sempa_proto::event::EventKind;
use sempa_proto::task::Reply;
use sempa_proto::{PvmError, RequestId, Tid};
use std::collections::BTreeMap;

/// Sets that one request may name.
const NAMED_MAX: usize = 1024;

impl Job {
    /// True if it goes back to its newest set, or may have to.
    fn needs_newest(&self) -> bool {
        self.pace.is_some()
            || matches!(
                self.doing,
                Doing::Ending { .. } | Doing::Restarting | Doing::Leaving { .. }
            )
    }
}

impl Keeping {
    /// Sets that jobs may have to go back to.
    pub(super) fn needed(&self) -> Vec<String> {
        self.jobs
            .values()
            .filter(|job| job.needs_newest())
            .filter_map(|job| job.newest.clone())
            .collect()
    }
}

impl Machine {
    /// Master: somebody wants sets removed.
    pub(crate) fn sets_unwanted(&mut self, tid: Tid, id: RequestId, which: Unwanted, any: bool) {
        let Some(keeping) = self.keeping() else {
            return;
        };
        if matches!(&which, Unwanted::Sets(sets) if sets.len() > NAMED_MAX) {
            let reason = format!("at most {NAMED_MAX} checkpoints are removed at once");
            return self.fail(tid, id, PvmError::OutOfRes, reason);
        }
        let mut stay = BTreeMap::new();
        for (job, entry) in keeping
            .jobs
            .iter()
            .filter(|(_, entry)| entry.needs_newest())
        {
            stay.extend(entry.newest.clone().map(|set| (set, Stays::Wanted(*job))));
        }
        // Before the store has opened it nobody would keep it from going.
        stay.extend(
            keeping
                .wanted
                .values()
                .map(|wanted| (wanted.set.clone(), Stays::InUse)),
        );
        self.out.push_back(Output::RemoveSets {
            tid,
            id,
            which,
            any,
            stay,
        });
    }

    /// The store has removed them, or some of them.
    pub(crate) fn sets_removed(
        &mut self,
        tid: Tid,
        id: RequestId,
        result: Result<Removed, String>,
    ) {
        let removed = result.iter().flatten().filter(|(_, became)| became.is_ok());
        let sets: Vec<String> = removed.map(|(set, _)| set.clone()).collect();
        self.copies_unwanted(&sets);
        self.sets_gone(sets, format!("{tid} asked for it"));
        self.reply(tid, id, Reply::SetsRemoved(result));
    }

    /// What lies in the store, and where copies of it are.
    pub(crate) fn sets_listed(
        &mut self,
        tid: Tid,
        id: RequestId,
        mut result: Result<Vec<SetEntry>, String>,
    ) {
        for entry in result.iter_mut().flatten() {
            entry.copies = self.copies_of(entry.job, &entry.set);
        }
        self.reply(tid, id, Reply::Sets(result));
    }

    /// The store has removed sets by itself.
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
        self.record(EventKind::SetsRemoved { sets, why });
    }
}
