//! Judges the outcome of checkpoints and restarts after a fault.

use super::{
    CheckpointFaults, HeldOperation, JOB_COUNT, JobOnHost, Loss, Operation, STEP_TIMEOUT, Victim,
};
use super::{file_names, find_event, host_is_lost, is_ring_job};
use crate::fake_criu;
use crate::faults::{Fault, leftovers};
use crate::run::{CommandResult, wait_for};
use anyhow::{Context, Result, ensure};
use sempa_proto::event::EventKind;

impl CheckpointFaults<'_> {
    /// Checks the outcome of each operation after a fault. Returns a description of each outcome.
    ///
    /// - A checkpoint is complete, or nothing of it is left. Its job makes progress. The job has
    ///   rolled back to its newest checkpoint if and only if it has lost a task.
    /// - A restart has started all tasks of its job, or none; in that case it can be repeated.
    /// - All tasks run once, no message is lost, and no files or processes remain.
    pub(super) fn judge(
        &mut self,
        all: Vec<HeldOperation>,
        victims: &[Victim],
        fault: Fault,
        from: u64,
    ) -> Result<Vec<String>> {
        let mut outcomes = Vec::new();
        for (held, victim) in all.into_iter().zip(victims) {
            let HeldOperation {
                point,
                job,
                console,
                checkpoints_before: before,
                ..
            } = held;
            let done = console.finish(STEP_TIMEOUT)?;
            let host = self.members[job].host;
            let what = format!("{point:?} of the job on h1 and h{host}: {done:?}");
            let loss = victim.loss(fault);
            if loss == Loss::Nothing && !done.succeeded() {
                let mut reasons = vec!["not done within"];
                if (*victim, fault) == (Victim::Engine, Fault::Kill) {
                    reasons.push("was killed by signal 9");
                }
                let has_reason = reasons.iter().any(|reason| done.err.contains(reason));
                ensure!(has_reason, "no reason to fail: {what}");
            }
            outcomes.push(if done.succeeded() {
                "good".to_string()
            } else {
                done.err.trim().to_string()
            });
            if loss == Loss::Host {
                wait_for(STEP_TIMEOUT, || host_is_lost(self.vm, from, host))
                    .with_context(|| what.clone())?;
            }
            match point.0 {
                Operation::Restart => self.judge_restart(job, &done, &before),
                Operation::Checkpoint => self.judge_checkpoint(job, &done, &before, loss, from),
            }
            .with_context(|| what)?;
        }
        self.vm
            .add_missing(&self.vm.bed().hosts().iter().collect::<Vec<_>>())?;
        self.check_all_run_once()?;
        for job in 0..JOB_COUNT {
            if !self.members[job].runs {
                self.restart(job)?;
            }
        }
        self.check_progress()?;
        self.check_nothing_is_left()?;
        Ok(outcomes)
    }

    /// Judges a restart. It must not have made a checkpoint.
    fn judge_restart(&mut self, job: usize, done: &CommandResult, before: &[String]) -> Result<()> {
        let mut new = self.checkpoints(job)?;
        new.retain(|name| !before.contains(name));
        ensure!(new.is_empty(), "new checkpoints: {new:?}");
        self.members[job].runs = done.succeeded();
        Ok(())
    }

    fn judge_checkpoint(
        &mut self,
        job: usize,
        done: &CommandResult,
        before: &[String],
        loss: Loss,
        from: u64,
    ) -> Result<()> {
        let old = before.last().context("a checkpoint")?;
        // A checkpoint that was being sealed during the rollback may still be completed. It is
        // removed afterwards.
        let new = wait_for(STEP_TIMEOUT, || {
            let mut new = self.checkpoints(job).map_err(|error| error.to_string())?;
            new.retain(|name| !before.contains(name));
            if new.len() == usize::from(done.succeeded()) {
                Ok(new)
            } else {
                Err(format!("new checkpoints: {new:?}"))
            }
        })?;
        self.members[job].must_restart = true;
        let member = &self.members[job];
        let went_back = |kind: &EventKind| match kind {
            EventKind::Restarted {
                checkpoint: set,
                job,
                ..
            } if job.to_string() == member.job.tid => Some(set.clone()),
            _ => None,
        };
        if loss == Loss::Nothing {
            let back = find_event(self.vm, from, went_back);
            ensure!(
                back.is_err(),
                "the job has lost nothing and went back to {back:?}"
            );
            return Ok(());
        }
        let back = wait_for(STEP_TIMEOUT, || {
            find_event(self.vm, from, went_back).map_err(|_| "the job does not go back".to_string())
        })?;
        let newest = if done.succeeded() {
            new.first().unwrap_or(old)
        } else {
            old
        };
        ensure!(
            back == *newest,
            "the job went back to {back}, and not to {newest}"
        );
        Ok(())
    }

    /// Checks that each task of each running job exists once, and that no other task exists.
    fn check_all_run_once(&self) -> Result<()> {
        wait_for(STEP_TIMEOUT, || {
            let tasks = self.vm.tasks().map_err(|error| error.to_string())?;
            let mut listed: Vec<(&str, bool)> = tasks
                .iter()
                .filter(|task| is_ring_job(task))
                .map(|task| (&*task.tid, task.moving))
                .collect();
            let running = self.members.iter().filter(|member| member.runs);
            let mut wanted: Vec<(&str, bool)> = running
                .flat_map(JobOnHost::tids)
                .map(|tid| (tid, false))
                .collect();
            listed.sort();
            wanted.sort();
            if listed != wanted {
                return Err(format!("{listed:?} are listed, and not {wanted:?}"));
            }
            for host in self.vm.bed().hosts() {
                let mut processes = host.processes();
                processes.retain(|(_, line)| line.contains("ring_job"));
                let here = tasks
                    .iter()
                    .filter(|task| is_ring_job(task) && task.host.as_deref() == Some(host.name()));
                if here.count() != processes.len() {
                    return Err(format!("{processes:?} on {}: {tasks:?}", host.name()));
                }
            }
            Ok(())
        })
    }

    /// Checks [`CheckpointFaults::check_all_run_once`], that all jobs make progress, and that their
    /// results so far are correct.
    pub(super) fn check_progress(&self) -> Result<()> {
        self.check_all_run_once()?;
        for member in self.members.iter().filter(|member| member.runs) {
            member.job.wait_for_rounds(self.vm, super::PROGRESS_ROUNDS);
            member.job.check_log();
        }
        Ok(())
    }

    /// Checks that no host has images, resume tokens or an engine process, and that the store has
    /// only complete checkpoints.
    pub(super) fn check_nothing_is_left(&self) -> Result<()> {
        wait_for(STEP_TIMEOUT, || {
            let hidden = file_names(&self.store())
                .into_iter()
                .filter(|name| name.starts_with('.'));
            let mut left: Vec<String> = hidden.collect();
            for host in self.vm.bed().hosts() {
                left.extend(leftovers(host));
                let lines = host.processes().into_iter().map(|(_, line)| line);
                left.extend(lines.filter(|line| fake_criu::is_engine(line)));
            }
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
        })
    }
}
