//! Decides between checkpoints and migrations that concern the same task.
//!
//! - A task that has been dumped may migrate although the checkpoint of its job is not complete,
//!   because its images record the host on which it ran.
//! - A task that has not been dumped yet does not migrate, unless an owner or an administrator
//!   needs its host. Such a migration does not wait for the checkpoint: the checkpoint is aborted
//!   and tried again.
//! - Before a host is drained, jobs with a schedule are checkpointed, so that a task that is lost
//!   during the drain loses no work.

use super::{CheckpointedJob, JobActivity};
use crate::Machine;
use sempa_proto::migration::{MigrationCause, Refusal};
use sempa_proto::{HostId, Tid};

impl Machine {
    /// Master: decides whether a task may migrate now. If a checkpoint prevents the migration but
    /// the cause of the migration has priority, the checkpoint is aborted and tried again.
    ///
    /// # Errors
    /// [`Refusal::AlreadyMigrating`] if the checkpoint has priority.
    pub(crate) fn admit_migration(
        &mut self,
        tid: Tid,
        cause: &MigrationCause,
    ) -> Result<(), Refusal> {
        let Some(master) = self.master.as_deref_mut() else {
            return Ok(());
        };
        let (job_checkpoints, coordinator) =
            (&mut master.checkpoints, &mut master.migrations.coordinator);
        let is_drain = matches!(cause, MigrationCause::Drain { .. });
        let takes_inventory = |job: &CheckpointedJob| {
            job.is_draining
                && job.activity == JobActivity::TakingInventory
                && job.members.contains(&tid)
        };
        if is_drain && job_checkpoints.jobs.values().any(takes_inventory) {
            // No snapshot contains the task yet, so the refusal carries a new id.
            return Err(Refusal::AlreadyMigrating(coordinator.generate_id()));
        }
        if let Some(part) = job_checkpoints.snapshots.part_of(tid) {
            let snapshot = job_checkpoints.snapshots.snapshot_of(part.id);
            let job = snapshot
                .and_then(|snapshot| job_checkpoints.job_of_snapshot(snapshot))
                .and_then(|job| job_checkpoints.jobs.get(&job));
            // The whole job ends with this checkpoint, so the task need not migrate.
            if job.is_some_and(|job| job.ends_after_checkpoint) {
                return Err(Refusal::AlreadyMigrating(part.id));
            }
            let checkpoint_comes_first = is_drain && job.is_some_and(|job| job.is_draining);
            if let Some((_, part)) = job_checkpoints
                .snapshots
                .part_that_prevents_migration(tid)
                .filter(|_| checkpoint_comes_first)
            {
                return Err(Refusal::AlreadyMigrating(part));
            }
        }
        while let Some((snapshot, part)) =
            job_checkpoints.snapshots.part_that_prevents_migration(tid)
        {
            if !matches!(
                cause,
                MigrationCause::Owner { .. } | MigrationCause::Drain { .. }
            ) {
                return Err(Refusal::AlreadyMigrating(part));
            }
            job_checkpoints.snapshots.abort_for_migration(
                snapshot,
                tid,
                format!("it must leave its host ({cause})"),
            );
        }
        Ok(())
    }

    /// Master: prepares the drain of a host. Each job with a schedule and a task on the host is
    /// checkpointed first; a checkpoint that is already in progress serves the drain, too.
    pub(crate) fn checkpoint_before_drain(&mut self, host: HostId) {
        let Some(job_checkpoints) = self.master.as_ref().map(|master| &master.checkpoints) else {
            return;
        };
        let may_begin = |job: &CheckpointedJob| {
            matches!(
                job.activity,
                JobActivity::Idle | JobActivity::TakingInventory | JobActivity::TakingSnapshot(_)
            )
        };
        let has_task_on_host = |job: &CheckpointedJob| {
            job.members
                .iter()
                .any(|tid| self.location(*tid) == Some(host))
        };
        let needs_checkpoint = |job: &CheckpointedJob| {
            job.schedule.is_some() && may_begin(job) && has_task_on_host(job)
        };
        let jobs: Vec<Tid> = job_checkpoints
            .jobs
            .iter()
            .filter(|(_, job)| needs_checkpoint(job))
            .map(|(tid, _)| *tid)
            .collect();
        for job in jobs {
            let Some(entry) = self
                .job_checkpoints()
                .and_then(|job_checkpoints| job_checkpoints.jobs.get_mut(&job))
            else {
                continue;
            };
            entry.is_draining = true;
            if entry.activity == JobActivity::Idle {
                self.begin_checkpoint(job);
            }
        }
    }
}
