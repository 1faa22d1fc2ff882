//! Vacated jobs in the simulation: their tasks are checkpointed and ended, and restarted when the
//! service requests it.

use super::{IMAGE_BYTES, MIGRATION_DURATION, ReplayTask, WorldState};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Usage;
use sempa_proto::{HostId, PvmError, Tid};

impl WorldState {
    /// Ends the tasks of jobs whose checkpoint is complete, and stores them for a restart. The
    /// checkpoint fails if a task of the job migrates.
    pub(super) fn complete_vacates(&mut self) {
        let due: Vec<Tid> = self
            .vacates_due
            .iter()
            .filter(|(_, at)| **at <= self.now)
            .map(|(job, _)| *job)
            .collect();
        for job in due {
            self.vacates_due.remove(&job);
            let family = self.job_tasks(job);
            if family.iter().any(|tid| self.tasks[tid].migrating.is_some()) || family.is_empty() {
                let why = "a task of it migrates, or it has ended".to_string();
                self.event(HostId::MASTER, EventKind::CheckpointFailed { job, why });
                continue;
            }
            self.figures.parked += 1;
            let set = format!("replayed-{}", self.figures.parked);
            let (tasks, bytes) = (family.len() as u32, IMAGE_BYTES * family.len() as u64);
            let kind = EventKind::Checkpointed {
                checkpoint: set.clone(),
                job,
                tasks,
                bytes,
                frozen: MIGRATION_DURATION,
                vacated: true,
            };
            self.event(HostId::MASTER, kind);
            let mut stored = Vec::new();
            for tid in family {
                let Some(task) = self.tasks.remove(&tid) else {
                    continue;
                };
                self.event(
                    task.host,
                    EventKind::TaskEnded {
                        tid,
                        status: 9,
                        used: Usage::default(),
                    },
                );
                stored.push((tid, task));
            }
            self.checkpoints.insert(set, stored);
        }
    }

    /// Returns the tasks of the job with the top task `head`, `head` first.
    fn job_tasks(&self, head: Tid) -> Vec<Tid> {
        let mut all: Vec<Tid> = self.tasks.get(&head).map(|_| head).into_iter().collect();
        let mut at = 0;
        while let Some(parent) = all.get(at).copied() {
            all.extend(
                self.tasks
                    .iter()
                    .filter(|(_, task)| task.parent == parent)
                    .map(|(tid, _)| *tid),
            );
            at += 1;
        }
        all
    }

    /// Restarts the tasks of a checkpoint on the hosts with these names, one host per task.
    pub(super) fn restart(&mut self, set: &str, host_names: &[String]) -> Result<(), Error> {
        let refused = |why: &str| Error::new(PvmError::BadParam, why);
        let host_of = |name: &String| {
            self.table
                .hosts
                .iter()
                .find(|host| host.name == *name)
                .map(|host| host.id)
        };
        let hosts: Vec<HostId> = host_names.iter().filter_map(host_of).collect();
        let stored = self
            .checkpoints
            .get(set)
            .ok_or_else(|| refused("there is no such checkpoint"))?;
        if hosts.len() != stored.len() {
            return Err(refused("some of these hosts do not exist"));
        }
        let stored = self.checkpoints.remove(set).unwrap_or_default();
        let job = stored.first().map_or(Tid::NONE, |(tid, _)| *tid);
        let tasks = stored
            .iter()
            .zip(&hosts)
            .map(|((tid, _), host)| (*tid, *host))
            .collect();
        let back = stored
            .into_iter()
            .zip(hosts)
            .map(|((tid, task), host)| (tid, ReplayTask { host, ..task }));
        self.tasks.extend(back);
        let why = "there is room".to_string();
        self.event(
            HostId::MASTER,
            EventKind::Restarted {
                checkpoint: set.to_string(),
                job,
                tasks,
                why,
            },
        );
        Ok(())
    }
}
