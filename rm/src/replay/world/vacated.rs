//! Vacated jobs in the simulation. Their tasks are checkpointed and ended, and restarted when the
//! service requests this.

use super::{IMAGE_BYTES, MIGRATION_DURATION, ReplayTask, WorldState};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::{HostId, PvmError, Tid};

impl WorldState {
    /// Completes the checkpoints that are due: ends the tasks of each job and stores them for a
    /// restart. If a task of the job is migrating or no task remains, the checkpoint fails instead.
    pub(super) fn complete_vacates(&mut self) {
        let due_jobs: Vec<Tid> = self
            .vacates_due
            .iter()
            .filter(|(_, completion_time)| **completion_time <= self.now)
            .map(|(job, _)| *job)
            .collect();
        for job in due_jobs {
            self.vacates_due.remove(&job);
            let job_tids = self.job_tasks(job);
            if job_tids
                .iter()
                .any(|tid| self.tasks[tid].migration.is_some())
                || job_tids.is_empty()
            {
                let why = "a task of it migrates, or it has ended".to_string();
                self.post_event(HostId::MASTER, EventKind::CheckpointFailed { job, why });
                continue;
            }
            self.result_so_far.parked += 1;
            let checkpoint_name = format!("replayed-{}", self.result_so_far.parked);
            let (tasks, bytes) = (job_tids.len() as u32, IMAGE_BYTES * job_tids.len() as u64);
            let checkpoint_event = EventKind::Checkpointed {
                checkpoint: checkpoint_name.clone(),
                job,
                tasks,
                bytes,
                frozen: MIGRATION_DURATION,
                vacated: true,
            };
            self.post_event(HostId::MASTER, checkpoint_event);
            let mut stored_tasks = Vec::new();
            for tid in job_tids {
                let Some(task) = self.tasks.remove(&tid) else {
                    continue;
                };
                self.post_event(
                    task.host,
                    EventKind::TaskEnded {
                        tid,
                        status: 9,
                        used: Usage::default(),
                    },
                );
                stored_tasks.push((tid, task));
            }
            self.checkpoints.insert(checkpoint_name, stored_tasks);
        }
    }

    /// Returns the tasks of the job whose first task is `top_task`, with `top_task` as the first
    /// entry.
    fn job_tasks(&self, top_task: Tid) -> Vec<Tid> {
        let mut job_tids: Vec<Tid> = self
            .tasks
            .get(&top_task)
            .map(|_| top_task)
            .into_iter()
            .collect();
        let mut index = 0;
        while let Some(parent) = job_tids.get(index).copied() {
            job_tids.extend(
                self.tasks
                    .iter()
                    .filter(|(_, task)| task.parent == parent)
                    .map(|(tid, _)| *tid),
            );
            index += 1;
        }
        job_tids
    }

    /// Restarts the tasks of a checkpoint on the hosts with these names, one host per task in the
    /// order of the stored tasks.
    ///
    /// # Errors
    ///
    /// The checkpoint or one of the hosts does not exist.
    pub(super) fn restart(
        &mut self,
        checkpoint_name: &str,
        host_names: &[String],
    ) -> Result<(), Error> {
        let parameter_error = |why: &str| Error::new(PvmError::BadParam, why);
        let host_of = |name: &String| {
            self.host_table
                .hosts
                .iter()
                .find(|host| host.name == *name)
                .map(|host| host.id)
        };
        let hosts: Vec<HostId> = host_names.iter().filter_map(host_of).collect();
        let stored_tasks = self
            .checkpoints
            .get(checkpoint_name)
            .ok_or_else(|| parameter_error("there is no such checkpoint"))?;
        if hosts.len() != stored_tasks.len() {
            return Err(parameter_error("some of these hosts do not exist"));
        }
        let stored_tasks = self.checkpoints.remove(checkpoint_name).unwrap_or_default();
        let job = stored_tasks.first().map_or(Tid::NONE, |(tid, _)| *tid);
        let tasks = stored_tasks
            .iter()
            .zip(&hosts)
            .map(|((tid, _), host)| (*tid, *host))
            .collect();
        let restarted_tasks = stored_tasks
            .into_iter()
            .zip(hosts)
            .map(|((tid, task), host)| (tid, ReplayTask { host, ..task }));
        self.tasks.extend(restarted_tasks);
        let why = "there is room".to_string();
        self.post_event(
            HostId::MASTER,
            EventKind::Restarted {
                checkpoint: checkpoint_name.to_string(),
                job,
                tasks,
                why,
            },
        );
        Ok(())
    }
}
