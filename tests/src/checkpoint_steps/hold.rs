//! Holds checkpoints and restarts at their points.
//!
//! All daemons must answer at three moments: before tasks are stopped, when all tasks are stopped,
//! and before a job is restarted. Therefore the fake CRIU holds most operations first, which does
//! not stop the daemons. An operation that the fake CRIU need not hold starts when all other
//! operations are held; the daemon of its job stops itself at the point. Finally, operations with
//! later points continue from the engine to these points.

use super::fault_points::fake_criu_command;
use super::sorted_file_names;
use super::{
    CheckpointFaults, FaultPoint, HeldOperation, HoldMeans, HoldPoint, JOB_COUNT, Operation,
    TestJob, WAIT_TIMEOUT,
};
use crate::fake_criu::{misbehaviours, set_behaviour, take_misbehaviours};
use crate::faults::{self, Breakpoint, Point, ProcessRole, is_stopped};
use crate::run::wait_for;
use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;

impl CheckpointFaults<'_> {
    /// Starts the operations of a round and holds each at its point. Returns the held operations
    /// and the number of the first event after the start.
    pub(super) fn start_and_hold(
        &mut self,
        round: &[FaultPoint],
    ) -> Result<(Vec<HeldOperation>, u64)> {
        let jobs = self.assign_jobs(round)?;
        let events = self.vm.events()?;
        let first_event = events.last().map_or(0, |entry| entry.number + 1);
        let mut held_operations = Vec::new();
        for (point, job) in round.iter().copied().zip(jobs) {
            match fake_criu_command(&point) {
                Some(command_word) => {
                    let host = self.jobs[job].worker_host_name();
                    take_misbehaviours(self.vm.testbed(), &host);
                    set_behaviour(self.vm.testbed(), &host, command_word);
                    held_operations.push(self.start_operation(point, job)?);
                }
                None => {
                    // The next operation stops a daemon, which then does not answer. Therefore the
                    // other operations must have reached their points first.
                    self.wait_for_held_engines(&mut held_operations)?;
                    let breakpoint = self.set_breakpoint(point, job)?;
                    let mut operation = self.start_operation(point, job)?;
                    self.wait_until_daemon_stops(&mut operation, &breakpoint)?;
                    held_operations.push(operation);
                }
            }
        }
        self.wait_for_held_engines(&mut held_operations)?;
        for operation in &mut held_operations {
            self.continue_to_later_point(operation)?;
        }
        for operation in &mut held_operations {
            self.held_operation_count += 1;
            // On a busy machine the time limit of an operation may expire before the fault.
            if let Some(status) = operation.console.poll_status()? {
                self.ended_early_count += 1;
                let (out, err) = (
                    operation.console.stdout_so_far()?,
                    operation.console.stderr_so_far()?,
                );
                let point = operation.point;
                eprintln!("{point:?} ended before the fault: {status} {out}{err}");
            }
        }
        Ok((held_operations, first_event))
    }

    /// Starts an operation on a job by a console command.
    fn start_operation(&self, point: FaultPoint, job: usize) -> Result<HeldOperation> {
        let test_job = &self.jobs[job];
        let host_list = format!("h1,{}", test_job.worker_host_name());
        let checkpoints_before = self.checkpoint_names(job)?;
        let newest_checkpoint = checkpoints_before.last().context("a checkpoint")?;
        let arguments = match point.0 {
            Operation::Checkpoint => ["--json", "checkpoint", &test_job.job.tid].to_vec(),
            Operation::Restart => ["restart", newest_checkpoint, "--on", &host_list].to_vec(),
        };
        let console = self.vm.start_pvm(&arguments)?;
        Ok(HeldOperation {
            point,
            job_index: job,
            held_by: None,
            console,
            checkpoints_before,
        })
    }

    /// Assigns a job to each point and returns the jobs in the order of the points. Points of
    /// restarts get the first jobs. Afterwards every job whose restart is tried has ended, and
    /// every other job runs on its own host.
    fn assign_jobs(&mut self, round: &[FaultPoint]) -> Result<Vec<usize>> {
        ensure!(round.len() <= JOB_COUNT, "more points than jobs: {round:?}");
        let mut free_jobs: Vec<usize> = (0..JOB_COUNT).collect();
        free_jobs.sort_by_key(|job| !self.jobs[*job].must_restart);
        let restart_count = round
            .iter()
            .filter(|(operation, _)| *operation == Operation::Restart)
            .count();
        let mut ended_jobs = free_jobs[..restart_count].to_vec();
        let mut running_jobs = free_jobs[restart_count..].to_vec();
        running_jobs.truncate(round.len() - restart_count);
        let misplaced_jobs = self.misplaced_jobs()?;
        let restarted_jobs: Vec<usize> = running_jobs
            .iter()
            .filter(|job| self.jobs[**job].must_restart || misplaced_jobs.contains(*job))
            .copied()
            .collect();
        self.end_jobs(&[&ended_jobs[..], &restarted_jobs[..]].concat())?;
        for job in restarted_jobs {
            self.restart_job(job)?;
        }
        let jobs = round.iter().map(|(operation, _)| {
            if *operation == Operation::Restart {
                ended_jobs.remove(0)
            } else {
                running_jobs.remove(0)
            }
        });
        Ok(jobs.collect())
    }

    /// Returns the running jobs that have a task on a host where they were not started.
    fn misplaced_jobs(&self) -> Result<Vec<usize>> {
        let tasks = self.vm.tasks()?;
        let is_on = |tid: &str, host: &str| {
            tasks
                .iter()
                .any(|task| task.tid == tid && task.host.as_deref() == Some(host))
        };
        let is_misplaced = |test_job: &TestJob| {
            !(is_on(&test_job.job.tid, "h1")
                && is_on(&test_job.worker_tid, &test_job.worker_host_name()))
        };
        Ok((0..JOB_COUNT)
            .filter(|job| self.jobs[*job].is_running && is_misplaced(&self.jobs[*job]))
            .collect())
    }

    /// Waits until `check` succeeds. Returns `None` if the console of the operation ends first.
    fn wait_while_console_runs<T>(
        operation: &mut HeldOperation,
        mut check: impl FnMut() -> Result<T, String>,
    ) -> Result<Option<T>> {
        wait_for(WAIT_TIMEOUT, || {
            let status = operation
                .console
                .poll_status()
                .map_err(|error| error.to_string())?;
            match check() {
                Ok(value) => Ok(Some(value)),
                Err(_) if status.is_some() => Ok(None),
                Err(check_error) => Err(format!("{:?}: {check_error}", operation.point)),
            }
        })
    }

    /// Waits until the engines of all operations that have no [`HoldMeans`] yet are held.
    fn wait_for_held_engines(&self, operations: &mut [HeldOperation]) -> Result<()> {
        let testbed = self.vm.testbed();
        for operation in operations
            .iter_mut()
            .filter(|operation| operation.held_by.is_none())
        {
            let test_job = &self.jobs[operation.job_index];
            let (host_name, host) = (
                test_job.worker_host_name(),
                testbed.host(test_job.worker_host),
            );
            let fake_criu_hold =
                Self::wait_while_console_runs(operation, || {
                    match misbehaviours(testbed, &host_name) {
                        command_words if command_words.is_empty() => {
                            Err("no engine was called".to_string())
                        }
                        _ => Ok(HoldMeans::FakeCriu),
                    }
                })?;
            operation.held_by = fake_criu_hold;
            if operation.held_by.is_some() && operation.point.1 == HoldPoint::DuringEngine {
                let stopped_pid = Self::wait_while_console_runs(operation, || {
                    let mut engines = faults::role_processes(host, ProcessRole::Engine).into_iter();
                    engines
                        .find(|pid| is_stopped(*pid))
                        .ok_or("no engine is stopped".to_string())
                })?;
                operation.held_by = stopped_pid.map(HoldMeans::Process);
            }
        }
        Ok(())
    }

    /// Lets an operation that the fake CRIU holds continue to its fault point if this point comes
    /// after the engine. Waits until the operation is held there or its console has ended.
    fn continue_to_later_point(&self, operation: &mut HeldOperation) -> Result<()> {
        if !matches!(operation.held_by, Some(HoldMeans::FakeCriu)) {
            return Ok(());
        }
        let (testbed, host) = (
            self.vm.testbed(),
            self.jobs[operation.job_index].worker_host_name(),
        );
        match operation.point.1 {
            HoldPoint::DaemonAt(..) => {
                let breakpoint = self.set_breakpoint(operation.point, operation.job_index)?;
                set_behaviour(testbed, &host, "");
                self.wait_until_daemon_stops(operation, &breakpoint)
            }
            HoldPoint::BeforeSeal => {
                let store_lock = self.wait_for_store_lock()?;
                set_behaviour(testbed, &host, "");
                let is_sealing = self.wait_for_seal(operation)?;
                operation.held_by = is_sealing.then_some(HoldMeans::StoreLock(store_lock));
                Ok(())
            }
            HoldPoint::BeforeEngine | HoldPoint::DuringEngine => Ok(()),
        }
    }

    fn wait_for_store_lock(&self) -> Result<Flock<File>> {
        let path = self.store_folder().join("lock");
        wait_for(WAIT_TIMEOUT, || {
            let file = File::open(&path).map_err(|error| error.to_string())?;
            Flock::lock(file, FlockArg::LockExclusiveNonblock)
                .map_err(|(_, error_number)| error_number.to_string())
        })
    }

    /// Waits until a checkpoint is complete except for its final name. Returns false if the console
    /// ends first.
    fn wait_for_seal(&self, operation: &mut HeldOperation) -> Result<bool> {
        let draft_prefix = format!(".draft-{}-", self.jobs[operation.job_index].job.tid);
        let seal_result = Self::wait_while_console_runs(operation, || {
            let drafts = sorted_file_names(&self.store_folder()).into_iter();
            let drafts = drafts.filter(|name| name.starts_with(&draft_prefix));
            let mut manifests = drafts.map(|name| self.store_folder().join(name).join("manifest"));
            if manifests.any(|path| path.exists()) {
                Ok(())
            } else {
                Err("it is not being sealed".to_string())
            }
        })?;
        Ok(seal_result.is_some())
    }

    fn set_breakpoint(&self, (_, hold_point): FaultPoint, job: usize) -> Result<Breakpoint> {
        let HoldPoint::DaemonAt(step, edge) = hold_point else {
            bail!("no daemon is stopped at {hold_point:?}")
        };
        let point: Point = (step, edge);
        Breakpoint::new(&self.breakpoints_folder, &self.jobs[job].worker_tid, point)
    }

    fn wait_until_daemon_stops(
        &self,
        operation: &mut HeldOperation,
        breakpoint: &Breakpoint,
    ) -> Result<()> {
        let host = self
            .vm
            .testbed()
            .host(self.jobs[operation.job_index].worker_host);
        let stopped_pid = Self::wait_while_console_runs(operation, || {
            breakpoint
                .stopped_daemon(&[host])?
                .ok_or("no daemon has reached it".to_string())
        })?;
        if stopped_pid.is_none() {
            breakpoint.remove_if_not_reached();
        }
        operation.held_by = stopped_pid.map(HoldMeans::Process);
        Ok(())
    }
}
