//! Vacated jobs: checkpointed and ended because a task must leave its host and no other host
//! accepts it. They restart when hosts have room for them. A job counts as vacated when the event
//! log reports its checkpoint, whichever resource manager ordered the checkpoint.

use super::{History, Table};
use sempa_proto::event::EventKind;
use sempa_proto::rm::{DecisionKind, TaskUsage};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Maximum number of vacated jobs. While there are as many, tasks that must leave their hosts stay
/// paused there.
pub const VACATED_JOBS_MAX: usize = 1024;
/// Maximum number of (user, program) pairs that are stored per job. The pairs determine which hosts
/// admit the job.
const PROGRAMS_PER_JOB_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VacatedJob {
    /// The job's first task.
    pub job: Tid,
    /// Name of the checkpoint.
    pub checkpoint: String,
    /// Number of tasks in the checkpoint.
    pub task_count: u32,
    /// Users and programs of the tasks, as (user, program).
    pub programs: Vec<(u32, String)>,
}

impl History {
    /// Records the decision to vacate a job. `tid`, `host`: the task that must leave its host, and
    /// the name of this host. `reason`: reason why the task cannot migrate.
    pub fn record_vacate(
        &mut self,
        decision_time: Micros,
        job: Tid,
        (tid, host): (Tid, String),
        reason: String,
    ) {
        self.record_decision(
            decision_time,
            DecisionKind::Vacated {
                job,
                tid,
                host,
                why: reason,
            },
        );
    }

    /// Returns the vacated jobs, the job that has waited longest first.
    pub fn vacated_jobs(&self) -> impl Iterator<Item = &VacatedJob> {
        self.vacated_jobs.values()
    }

    /// Returns the vacated job that contains this task; `None` if the task's job is not vacated.
    pub fn vacated_job_of(&self, tid: Tid) -> Option<&VacatedJob> {
        let job_of = |tid: Tid| self.task(tid).map_or(tid, |task| task.job);
        self.vacated_jobs()
            .find(|listed_job| listed_job.job == tid || job_of(listed_job.job) == job_of(tid))
    }

    /// Returns the first task of the job of a checkpoint. If the job is not vacated, the tid
    /// follows from the checkpoint's name. `None` if the name contains no tid.
    pub(super) fn job_of_checkpoint(&self, checkpoint: &str) -> Option<Tid> {
        let vacated_job = self
            .vacated_jobs()
            .find(|vacated_job| vacated_job.checkpoint == checkpoint)
            .map(|vacated_job| vacated_job.job);
        let tid_in_name =
            || u32::from_str_radix(checkpoint.strip_prefix('t')?.split('-').next()?, 16).ok();
        vacated_job.or_else(|| {
            Some(Tid::from_raw(tid_in_name()?.cast_signed())).filter(|tid| tid.is_task())
        })
    }

    /// Removes the vacated jobs for which `is_selected` is true, so that they are not restarted.
    pub fn remove_vacated(&mut self, is_selected: impl Fn(&VacatedJob) -> bool) {
        let removed_numbers: Vec<u64> = self
            .vacated_jobs
            .iter()
            .filter(|(_, job)| is_selected(job))
            .map(|(number, _)| *number)
            .collect();
        for number in removed_numbers {
            self.vacated_jobs.remove(&number);
            self.changed_keys.insert((Table::VacatedJobs, number));
        }
    }

    /// Applies an event about checkpoints and restarts: adds or removes vacated jobs.
    pub(super) fn apply_vacate_event(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Checkpointed {
                checkpoint,
                job,
                tasks,
                vacated: true,
                ..
            } => {
                self.remove_vacated(|vacated_job| vacated_job.job == *job);
                let parent_job = self.task(*job).map_or(*job, |first_task| first_task.job);
                // All spawned tasks of the job count as evicted, because one of them was not
                // allowed to stay.
                //
                // Events about the ends of these tasks follow. Tasks that a user has started by
                // hand continue to run.
                let is_evicted =
                    |task: &&TaskUsage| task.job == parent_job && !task.program.is_empty();
                let evicted_tids: Vec<Tid> = self
                    .running_tasks()
                    .filter(is_evicted)
                    .map(|task| task.tid)
                    .collect();
                evicted_tids
                    .into_iter()
                    .for_each(|tid| self.record_eviction(tid));
                let job_tasks = self
                    .tasks
                    .values()
                    .rev()
                    .filter(|task| task.job == parent_job);
                let task_programs: BTreeSet<(u32, String)> = job_tasks
                    .map(|task| (task.user, task.program.clone()))
                    .collect();
                let task_programs = task_programs
                    .into_iter()
                    .take(PROGRAMS_PER_JOB_MAX)
                    .collect();
                let number = self.next_number();
                self.vacated_jobs.insert(
                    number,
                    VacatedJob {
                        job: *job,
                        checkpoint: checkpoint.clone(),
                        task_count: *tasks,
                        programs: task_programs,
                    },
                );
                self.changed_keys.insert((Table::VacatedJobs, number));
            }
            // The job runs again. It is therefore not vacated, whichever of its checkpoints was
            // used.
            EventKind::Restarted { job, tasks, .. } => {
                self.remove_vacated(|vacated_job| {
                    vacated_job.job == *job || tasks.iter().any(|(tid, _)| *tid == vacated_job.job)
                });
            }
            _ => {}
        }
    }
}
