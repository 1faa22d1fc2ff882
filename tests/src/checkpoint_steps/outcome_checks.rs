//! Checks the outcome of checkpoints and restarts after a fault.

use super::{
    CheckpointFaults, HeldOperation, JOB_COUNT, Loss, Operation, TestJob, Victim, WAIT_TIMEOUT,
};
use super::{check_host_lost, find_event, is_ring_job, sorted_file_names};
use crate::fake_criu;
use crate::faults::{Fault, leftover_names};
use crate::run::{CommandResult, wait_for};
use anyhow::{Context, Result, ensure};
use sempa_proto::event::EventKind;

impl CheckpointFaults<'_> {
    /// Checks the outcome of each operation after a fault. Returns a description of each outcome.
    /// `first_event` is the number of the first event of the round.
    ///
    /// - A checkpoint is complete, or the store contains no part of it. Its job makes progress. The
    ///   job has rolled back to its newest checkpoint if and only if it has lost a task.
    /// - A restart has started all tasks of its job, or none; if none, it can be repeated.
    /// - All tasks run once, no message is lost, and no files or processes remain.
    pub(super) fn check_outcomes(
        &mut self,
        held_operations: Vec<HeldOperation>,
        victims: &[Victim],
        fault: Fault,
        first_event: u64,
    ) -> Result<Vec<String>> {
        let mut outcomes = Vec::new();
        for (operation, victim) in held_operations.into_iter().zip(victims) {
            let HeldOperation {
                point,
                job_index: job,
                console,
                checkpoints_before,
                ..
            } = operation;
            let result = console.wait_or_kill(WAIT_TIMEOUT)?;
            let host = self.jobs[job].worker_host;
            let description = format!("{point:?} of the job on h1 and h{host}: {result:?}");
            let loss = victim.job_loss(fault);
            if loss == Loss::Nothing && !result.succeeded() {
                let mut allowed_reasons = vec!["not done within"];
                if (*victim, fault) == (Victim::WorkerEngine, Fault::Kill) {
                    allowed_reasons.push("was killed by signal 9");
                }
                let has_reason = allowed_reasons
                    .iter()
                    .any(|reason| result.stderr.contains(reason));
                ensure!(has_reason, "no reason to fail: {description}");
            }
            outcomes.push(if result.succeeded() {
                "good".to_string()
            } else {
                result.stderr.trim().to_string()
            });
            if loss == Loss::Host {
                wait_for(WAIT_TIMEOUT, || check_host_lost(self.vm, first_event, host))
                    .with_context(|| description.clone())?;
            }
            match point.0 {
                Operation::Restart => self.check_restart(job, &result, &checkpoints_before),
                Operation::Checkpoint => {
                    self.check_checkpoint(job, &result, &checkpoints_before, loss, first_event)
                }
            }
            .with_context(|| description)?;
        }
        self.vm
            .add_missing_hosts(&self.vm.testbed().hosts().iter().collect::<Vec<_>>())?;
        self.wait_until_all_run_once()?;
        for job in 0..JOB_COUNT {
            if !self.jobs[job].is_running {
                self.restart_job(job)?;
            }
        }
        self.check_progress()?;
        self.check_nothing_remains()?;
        Ok(outcomes)
    }

    /// Checks that a restart has made no checkpoint, and records whether the job runs.
    /// `checkpoints_before` lists the checkpoints before the restart.
    fn check_restart(
        &mut self,
        job: usize,
        result: &CommandResult,
        checkpoints_before: &[String],
    ) -> Result<()> {
        let mut new_checkpoints = self.checkpoint_names(job)?;
        new_checkpoints.retain(|name| !checkpoints_before.contains(name));
        ensure!(
            new_checkpoints.is_empty(),
            "new checkpoints: {new_checkpoints:?}"
        );
        self.jobs[job].is_running = result.succeeded();
        Ok(())
    }

    fn check_checkpoint(
        &mut self,
        job: usize,
        result: &CommandResult,
        checkpoints_before: &[String],
        loss: Loss,
        first_event: u64,
    ) -> Result<()> {
        let old_checkpoint = checkpoints_before.last().context("a checkpoint")?;
        // A checkpoint that is sealed during the rollback may be completed first and removed
        // afterwards, so the check is repeated.
        let new_checkpoints = wait_for(WAIT_TIMEOUT, || {
            let mut new_checkpoints = self
                .checkpoint_names(job)
                .map_err(|error| error.to_string())?;
            new_checkpoints.retain(|name| !checkpoints_before.contains(name));
            if new_checkpoints.len() == usize::from(result.succeeded()) {
                Ok(new_checkpoints)
            } else {
                Err(format!("new checkpoints: {new_checkpoints:?}"))
            }
        })?;
        self.jobs[job].must_restart = true;
        let test_job = &self.jobs[job];
        let rollback_checkpoint = |kind: &EventKind| match kind {
            EventKind::Restarted {
                checkpoint, job, ..
            } if job.to_string() == test_job.job.tid => Some(checkpoint.clone()),
            _ => None,
        };
        if loss == Loss::Nothing {
            let rollback = find_event(self.vm, first_event, rollback_checkpoint);
            ensure!(
                rollback.is_err(),
                "the job has lost nothing and went back to {rollback:?}"
            );
            return Ok(());
        }
        let rollback = wait_for(WAIT_TIMEOUT, || {
            find_event(self.vm, first_event, rollback_checkpoint)
                .map_err(|_| "the job does not go back".to_string())
        })?;
        let expected_checkpoint = if result.succeeded() {
            new_checkpoints.first().unwrap_or(old_checkpoint)
        } else {
            old_checkpoint
        };
        ensure!(
            rollback == *expected_checkpoint,
            "the job went back to {rollback}, and not to {expected_checkpoint}"
        );
        Ok(())
    }

    /// Waits until each task of each running job exists exactly once, and no other task of a job
    /// exists.
    fn wait_until_all_run_once(&self) -> Result<()> {
        wait_for(WAIT_TIMEOUT, || {
            let tasks = self.vm.tasks().map_err(|error| error.to_string())?;
            let mut listed_tasks: Vec<(&str, bool)> = tasks
                .iter()
                .filter(|task| is_ring_job(task))
                .map(|task| (&*task.tid, task.moving))
                .collect();
            let running_jobs = self.jobs.iter().filter(|test_job| test_job.is_running);
            let mut expected_tasks: Vec<(&str, bool)> = running_jobs
                .flat_map(TestJob::task_tids)
                .map(|tid| (tid, false))
                .collect();
            listed_tasks.sort();
            expected_tasks.sort();
            if listed_tasks != expected_tasks {
                return Err(format!(
                    "{listed_tasks:?} are listed, and not {expected_tasks:?}"
                ));
            }
            for host in self.vm.testbed().hosts() {
                let mut processes = host.processes();
                processes.retain(|(_, line)| line.contains("ring_job"));
                let host_tasks = tasks
                    .iter()
                    .filter(|task| is_ring_job(task) && task.host.as_deref() == Some(host.name()));
                if host_tasks.count() != processes.len() {
                    return Err(format!("{processes:?} on {}: {tasks:?}", host.name()));
                }
            }
            Ok(())
        })
    }

    /// Checks that all tasks run once ([`CheckpointFaults::wait_until_all_run_once`]), that all
    /// running jobs make progress, and that their logs so far are correct.
    pub(super) fn check_progress(&self) -> Result<()> {
        self.wait_until_all_run_once()?;
        for test_job in self.jobs.iter().filter(|test_job| test_job.is_running) {
            test_job
                .job
                .wait_for_rounds(self.vm, super::PROGRESS_ROUND_COUNT);
            test_job.job.check_log();
        }
        Ok(())
    }

    /// Checks that no host has images, resume tokens or an engine process, and that the store
    /// contains only complete checkpoints.
    pub(super) fn check_nothing_remains(&self) -> Result<()> {
        wait_for(WAIT_TIMEOUT, || {
            let incomplete_checkpoints = sorted_file_names(&self.store_folder())
                .into_iter()
                .filter(|name| name.starts_with('.'));
            let mut remains: Vec<String> = incomplete_checkpoints.collect();
            for host in self.vm.testbed().hosts() {
                remains.extend(leftover_names(host));
                let lines = host.processes().into_iter().map(|(_, line)| line);
                remains.extend(lines.filter(|line| fake_criu::is_engine_command_line(line)));
            }
            if remains.is_empty() {
                Ok(())
            } else {
                Err(remains.join(", "))
            }
        })
    }
}
