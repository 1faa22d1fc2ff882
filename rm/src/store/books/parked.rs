//! Vacated jobs: checkpointed and ended because no host accepted a task that had to leave its host.
//! They restart when there is room. A job counts as vacated when the event log reports its
//! checkpoint, whichever resource manager ordered it.

use super::{Books, Sheet};
use sempa_proto::event::EventKind;
use sempa_proto::rm::{DecisionKind, TaskUsage};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Maximum number of vacated jobs. Beyond it, tasks that must leave stay paused on their hosts.
pub const PARKED_MAX: usize = 1024;
/// Maximum number of (user, program) pairs that are stored per job. They determine which owners
/// admit the job.
const KINDS_MAX: usize = 64;

/// A vacated job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// The job's first task.
    pub job: Tid,
    /// Name of the checkpoint.
    pub set: String,
    /// Number of tasks in the checkpoint.
    pub tasks: u32,
    /// Users and programs of the tasks.
    pub kinds: Vec<(u32, String)>,
}

impl Books {
    /// Records the decision to vacate a job. `tid`, `host`: the task that must leave, and its host.
    /// `why`: why the task cannot migrate.
    pub fn parks(&mut self, at: Micros, job: Tid, (tid, host): (Tid, String), why: String) {
        self.decided(
            at,
            DecisionKind::Vacated {
                job,
                tid,
                host,
                why,
            },
        );
    }

    /// Returns the vacated jobs, the longest waiting first.
    pub fn parked(&self) -> impl Iterator<Item = &Parked> {
        self.parked.values()
    }

    /// Returns the vacated job that contains this task.
    pub fn parked_with(&self, tid: Tid) -> Option<&Parked> {
        let family = |tid: Tid| self.known(tid).map_or(tid, |task| task.job);
        self.parked()
            .find(|parked| parked.job == tid || family(parked.job) == family(tid))
    }

    /// Returns the first task of the job of a checkpoint. If the job is not vacated, the tid is
    /// taken from the checkpoint's name.
    pub(super) fn job_of_set(&self, set: &str) -> Option<Tid> {
        let waits = self
            .parked()
            .find(|parked| parked.set == set)
            .map(|parked| parked.job);
        let named = || u32::from_str_radix(set.strip_prefix('t')?.split('-').next()?, 16).ok();
        waits.or_else(|| Some(Tid::from_raw(named()?.cast_signed())).filter(|tid| tid.is_task()))
    }

    /// Removes vacated jobs from the history, so that they are not restarted.
    pub fn unpark(&mut self, which: impl Fn(&Parked) -> bool) {
        let gone: Vec<u64> = self
            .parked
            .iter()
            .filter(|(_, parked)| which(parked))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            self.parked.remove(&number);
            self.dirty.insert((Sheet::Parked, number));
        }
    }

    /// Applies an event about checkpoints and restarts.
    pub(super) fn parked_event(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Checkpointed {
                checkpoint: set,
                job,
                tasks,
                vacated: true,
                ..
            } => {
                self.unpark(|parked| parked.job == *job);
                let family = self.known(*job).map_or(*job, |first| first.job);
                // All spawned tasks of the job count as evicted, because one of them had to leave.
                // Events of their ends follow. Tasks started by hand continue to run.
                let goes = |task: &&TaskUsage| task.job == family && !task.program.is_empty();
                let go: Vec<Tid> = self.running().filter(goes).map(|task| task.tid).collect();
                go.into_iter().for_each(|tid| self.evicted(tid));
                let all = self.tasks.values().rev().filter(|task| task.job == family);
                let kinds: BTreeSet<(u32, String)> =
                    all.map(|task| (task.user, task.program.clone())).collect();
                let kinds = kinds.into_iter().take(KINDS_MAX).collect();
                let number = self.number();
                self.parked.insert(
                    number,
                    Parked {
                        job: *job,
                        set: set.clone(),
                        tasks: *tasks,
                        kinds,
                    },
                );
                self.dirty.insert((Sheet::Parked, number));
            }
            // The job runs again, so it is not vacated, whichever of its checkpoints was used.
            EventKind::Restarted { job, tasks, .. } => {
                self.unpark(|parked| {
                    parked.job == *job || tasks.iter().any(|(tid, _)| *tid == parked.job)
                });
            }
            _ => {}
        }
    }
}
