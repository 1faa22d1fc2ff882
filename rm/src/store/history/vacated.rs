//! Vacated jobs: checkpointed and ended because no host accepted a task whose host wanted no
//! guests. They restart when there is room. A job counts as vacated when the event log reports its
//! checkpoint, whichever resource manager ordered it.

use super::{History, Table};
use sempa_proto::event::EventKind;
use sempa_proto::rm::{DecisionKind, TaskUsage};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Maximum number of vacated jobs. Beyond it, tasks that must leave stay paused on their hosts.
pub const VACATED_MAX: usize = 1024;
/// Maximum number of (user, program) pairs that are stored per job. They determine which owners
/// admit the job.
const PROGRAMS_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VacatedJob {
    /// The job's first task.
    pub job: Tid,
    /// Name of the checkpoint.
    pub checkpoint: String,
    /// Number of tasks in the checkpoint.
    pub tasks: u32,
    /// Users and programs of the tasks.
    pub programs: Vec<(u32, String)>,
}

impl History {
    /// Records the decision to vacate a job. `tid`, `host`: the task that must leave, and
    /// its host. `why`: why the task cannot migrate.
    pub fn record_vacate(&mut self, at: Micros, job: Tid, (tid, host): (Tid, String), why: String) {
        self.record_decision(
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
    pub fn vacated_jobs(&self) -> impl Iterator<Item = &VacatedJob> {
        self.vacated.values()
    }

    /// Returns the vacated job that contains this task.
    pub fn vacated_job_of(&self, tid: Tid) -> Option<&VacatedJob> {
        let job_of = |tid: Tid| self.task(tid).map_or(tid, |task| task.job);
        self.vacated_jobs()
            .find(|vacated| vacated.job == tid || job_of(vacated.job) == job_of(tid))
    }

    /// Returns the first task of the job of a checkpoint. If the job is not vacated, the tid is
    /// taken from the checkpoint's name.
    pub(super) fn job_of_checkpoint(&self, checkpoint: &str) -> Option<Tid> {
        let vacated = self
            .vacated_jobs()
            .find(|vacated| vacated.checkpoint == checkpoint)
            .map(|vacated| vacated.job);
        let named =
            || u32::from_str_radix(checkpoint.strip_prefix('t')?.split('-').next()?, 16).ok();
        vacated.or_else(|| Some(Tid::from_raw(named()?.cast_signed())).filter(|tid| tid.is_task()))
    }

    /// Removes vacated jobs from the history, so that they are not restarted.
    pub fn remove_vacated(&mut self, which: impl Fn(&VacatedJob) -> bool) {
        let gone: Vec<u64> = self
            .vacated
            .iter()
            .filter(|(_, job)| which(job))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            self.vacated.remove(&number);
            self.dirty.insert((Table::Vacated, number));
        }
    }

    /// Applies an event about checkpoints and restarts.
    pub(super) fn apply_vacate_event(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Checkpointed {
                checkpoint,
                job,
                tasks,
                vacated: true,
                ..
            } => {
                self.remove_vacated(|vacated| vacated.job == *job);
                let parent_job = self.task(*job).map_or(*job, |first| first.job);
                // All spawned tasks of the job count as evicted, because one of them was not
                // allowed to stay.
                // Events of their ends follow. Tasks started by hand continue to run.
                let goes = |task: &&TaskUsage| task.job == parent_job && !task.program.is_empty();
                let go: Vec<Tid> = self.running().filter(goes).map(|task| task.tid).collect();
                go.into_iter().for_each(|tid| self.record_eviction(tid));
                let all = self
                    .tasks
                    .values()
                    .rev()
                    .filter(|task| task.job == parent_job);
                let kinds: BTreeSet<(u32, String)> =
                    all.map(|task| (task.user, task.program.clone())).collect();
                let kinds = kinds.into_iter().take(PROGRAMS_MAX).collect();
                let number = self.next_number();
                self.vacated.insert(
                    number,
                    VacatedJob {
                        job: *job,
                        checkpoint: checkpoint.clone(),
                        tasks: *tasks,
                        programs: kinds,
                    },
                );
                self.dirty.insert((Table::Vacated, number));
            }
            // The job runs again, so it is not vacated, whichever of its checkpoints was used.
            EventKind::Restarted { job, tasks, .. } => {
                self.remove_vacated(|vacated| {
                    vacated.job == *job || tasks.iter().any(|(tid, _)| *tid == vacated.job)
                });
            }
            _ => {}
        }
    }
}
