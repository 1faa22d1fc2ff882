//! Decides between checkpoints and migrations that concern the same task.
//!
//! - A task that has been dumped may migrate although the checkpoint of its job is not complete:
//!   its images record where it ran.
//! - Until then it stays, unless an owner or an administrator needs its host. That does not wait
//!   for a disk: the checkpoint is aborted and tried again.
//! - Before a host is drained, jobs with a schedule are checkpointed, so that a task that is lost
//!   during the drain loses no work.

use super::{Doing, Job};
use crate::Machine;
use sempa_proto::migration::{MigrationCause, Refusal};
use sempa_proto::{HostId, Tid};

impl Machine {
    /// Master: decides whether a task may migrate now. Aborts a checkpoint that keeps the task, if
    /// the cause of the migration has priority; the checkpoint is tried again.
    ///
    /// # Errors
    /// The checkpoint has priority.
    pub(crate) fn make_way(&mut self, tid: Tid, cause: &MigrationCause) -> Result<(), Refusal> {
        let Some(master) = self.master.as_deref_mut() else {
            return Ok(());
        };
        let (keeping, coordinator) = (&mut master.keeping, &mut master.directing.coordinator);
        let drains = matches!(cause, MigrationCause::Drain { .. });
        let counts =
            |job: &Job| job.drains && job.doing == Doing::Counting && job.members.contains(&tid);
        if drains && keeping.jobs.values().any(counts) {
            // The task has no part of a snapshot yet, so the id is a new one.
            return Err(Refusal::AlreadyMigrating(coordinator.next_id()));
        }
        if let Some(part) = keeping.cuts.part_of(tid) {
            let cut = keeping.cuts.snapshot_of(part.id);
            let job = cut
                .and_then(|cut| keeping.job_of_cut(cut))
                .and_then(|job| keeping.jobs.get(&job));
            // The whole job ends with this checkpoint.
            if job.is_some_and(|job| job.ends) {
                return Err(Refusal::AlreadyMigrating(part.id));
            }
            let first = drains && job.is_some_and(|job| job.drains);
            if let Some((_, part)) = keeping.cuts.binding_part(tid).filter(|_| first) {
                return Err(Refusal::AlreadyMigrating(part));
            }
        }
        while let Some((cut, part)) = keeping.cuts.binding_part(tid) {
            if !matches!(
                cause,
                MigrationCause::Owner { .. } | MigrationCause::Drain { .. }
            ) {
                return Err(Refusal::AlreadyMigrating(part));
            }
            keeping.cuts.abort_for_migration(
                cut,
                tid,
                format!("it has to leave its host ({cause})"),
            );
        }
        Ok(())
    }

    /// Master: checkpoints the jobs on a host that is being drained.
    pub(crate) fn write_before_drain(&mut self, host: HostId) {
        let Some(keeping) = self.master.as_ref().map(|master| &master.keeping) else {
            return;
        };
        let may_begin = |job: &Job| {
            matches!(
                job.doing,
                Doing::Nothing | Doing::Counting | Doing::Cutting(_)
            )
        };
        let is_there = |job: &Job| {
            job.members
                .iter()
                .any(|tid| self.location(*tid) == Some(host))
        };
        let wanted = |job: &Job| job.pace.is_some() && may_begin(job) && is_there(job);
        let jobs: Vec<Tid> = keeping
            .jobs
            .iter()
            .filter(|(_, job)| wanted(job))
            .map(|(tid, _)| *tid)
            .collect();
        for job in jobs {
            let Some(entry) = self
                .keeping()
                .and_then(|keeping| keeping.jobs.get_mut(&job))
            else {
                continue;
            };
            entry.drains = true;
            if entry.doing == Doing::Nothing {
                self.begin_count(job);
            }
        }
    }
}
