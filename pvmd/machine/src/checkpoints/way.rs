//! Checkpoints that are in the way of a move, or come before it.
//!
//! A task that has been written goes on and may move, although the checkpoint of its job is not complete: where it ran is in its
//! images. Up to then it stays, unless an owner or an administrator wants his host: he does not wait for anybody's disk. Only when a host
//! is drained jobs that are checkpointed by themselves are written first: what becomes of their tasks on the way costs nothing then.

use super::{Doing, Job};
use crate::Machine;
use sempa_proto::migration::{Cause, Refusal};
use sempa_proto::{HostId, Tid};

impl Machine {
    /// Master: a task is to move. Calls a checkpoint off that keeps it, if the cause is worth that; it is tried again.
    ///
    /// # Errors
    /// The checkpoint goes before.
    pub(crate) fn make_way(&mut self, tid: Tid, cause: &Cause) -> Result<(), Refusal> {
        let Some(master) = self.master.as_deref_mut() else {
            return Ok(());
        };
        let (keeping, coordinator) = (&mut master.keeping, &mut master.directing.coordinator);
        let drains = matches!(cause, Cause::Drain { .. });
        let counts =
            |job: &Job| job.drains && job.doing == Doing::Counting && job.members.contains(&tid);
        if drains && keeping.jobs.values().any(counts) {
            // Its part has no number yet.
            return Err(Refusal::AlreadyMoving(coordinator.next_id()));
        }
        if let Some(part) = keeping.cuts.of_task(tid) {
            let cut = keeping.cuts.of_part(part.id);
            let job = cut
                .and_then(|cut| keeping.job_of_cut(cut))
                .and_then(|job| keeping.jobs.get(&job));
            // All of it leaves by that.
            if job.is_some_and(|job| job.ends) {
                return Err(Refusal::AlreadyMoving(part.id));
            }
            let first = drains && job.is_some_and(|job| job.drains);
            if let Some((_, part)) = keeping.cuts.keeps(tid).filter(|_| first) {
                return Err(Refusal::AlreadyMoving(part));
            }
        }
        while let Some((cut, part)) = keeping.cuts.keeps(tid) {
            if !matches!(cause, Cause::Owner { .. } | Cause::Drain { .. }) {
                return Err(Refusal::AlreadyMoving(part));
            }
            keeping
                .cuts
                .give_way(cut, tid, format!("it has to leave its host ({cause})"));
        }
        Ok(())
    }

    /// Master: a host is being emptied.
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
