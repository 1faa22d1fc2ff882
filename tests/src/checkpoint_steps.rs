//! Injects faults into checkpoints of jobs and into their restarts, with real processes.
//!
//! A round has several operations (checkpoints or restarts), each of another job. A job has two
//! tasks: its first task is on the master's host, and its worker is on a host that no other job
//! uses. A round holds all its operations at their points, then one fault hits all of them, and the
//! outcome is checked.

mod fault_points;
mod hold;
mod outcome_checks;

pub use fault_points::{
    FaultPoint, HoldPoint, Operation, RoundSample, daemon_points, full_round_count,
};

use crate::fake_criu::set_behaviour;
use crate::faults::{self, Fault, FaultTargets, Point, PointLog, ProcessRole, send_signal};
use crate::migration_steps::check_slaves_ended;
use crate::ring_job::RingJob;
use crate::rng::print_seed;
use crate::run::{RunningCommand, wait_for};
use crate::testbed::wait_until_no_process;
use crate::vm::{OrPanicWithLogs, Task, Vm};
use anyhow::{Context, Result, ensure};
use fault_points::{fake_criu_command, has_engine_process, round_points};
use nix::fcntl::Flock;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time limit for each wait: for an operation to reach a point, for an operation to end, and for
/// the virtual machine to detect a lost host.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of jobs, and maximum number of operations in a round.
const JOB_COUNT: usize = 5;
/// Number of hosts of the testbed: the master's host, and one for each job.
pub const HOST_COUNT: usize = 1 + JOB_COUNT;
/// Interval of periodic checkpoints. It is longer than a test, so no periodic checkpoint is made.
/// An interval must be set, because otherwise a job that loses a task does not roll back to its
/// newest checkpoint.
const CHECKPOINT_INTERVAL: &str = "1h";
/// Maximum number of taskers and resource managers that are killed within [`KILL_COUNT_WINDOW`]. It
/// is less than the number of restarts that daemons allow in that time.
const KILL_COUNT_MAX: usize = 4;
const KILL_COUNT_WINDOW: Duration = Duration::from_secs(65);
/// Number of rounds of a job's computation that prove progress. It is more than the number of lines
/// of the job's log that may arrive late.
const PROGRESS_ROUND_COUNT: usize = 4;

/// The process that a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The daemon on the host of the job's worker.
    WorkerDaemon,
    /// The tasker on the host of the job's worker.
    WorkerTasker,
    /// The CRIU processes that the tasker on the host of the job's worker has started.
    WorkerEngine,
    /// The daemon of the master's host.
    MasterDaemon,
    ResourceManager,
}

impl Victim {
    fn host_and_role(self, worker_host: usize) -> (usize, ProcessRole) {
        match self {
            Self::WorkerDaemon => (worker_host, ProcessRole::Daemon),
            Self::WorkerTasker => (worker_host, ProcessRole::Tasker),
            Self::WorkerEngine => (worker_host, ProcessRole::Engine),
            Self::MasterDaemon => (1, ProcessRole::Daemon),
            Self::ResourceManager => (1, ProcessRole::ResourceManager),
        }
    }

    /// Returns what a job loses when `fault` hits this victim.
    fn job_loss(self, fault: Fault) -> Loss {
        match (self, fault) {
            (Self::WorkerDaemon | Self::MasterDaemon, _) if fault.exceeds_lease() => Loss::Host,
            (Self::WorkerTasker, Fault::Kill) => Loss::Tasker,
            _ => Loss::Nothing,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Nothing,
    Tasker,
    Host,
}

/// The means by which an operation is held.
#[derive(Debug)]
enum HoldMeans {
    /// A process that is stopped by a signal.
    Process(Pid),
    /// The fake CRIU, which waits for another command word.
    FakeCriu,
    /// The lock of the checkpoint store. The test's process holds the lock.
    StoreLock(#[expect(dead_code, reason = "dropping it releases the lock")] Flock<File>),
}

/// An operation that has been started, and that is held or will be held at a fault point.
#[derive(Debug)]
struct HeldOperation {
    point: FaultPoint,
    job_index: usize,
    /// `None` while the operation is not held, or if it ended before it could be held.
    held_by: Option<HoldMeans>,
    console: RunningCommand,
    /// Names of the job's checkpoints before the operation.
    checkpoints_before: Vec<String>,
}

/// A job and the host of its worker, which no other job uses.
#[derive(Debug)]
struct TestJob {
    worker_host: usize,
    job: RingJob,
    /// The tid of the job's worker.
    worker_tid: String,
    is_running: bool,
    /// True if a fault has hit a checkpoint of the job, and since then the job was not restarted
    /// from its newest checkpoint.
    must_restart: bool,
}

impl TestJob {
    fn task_tids(&self) -> [&str; 2] {
        [&self.job.tid, &self.worker_tid]
    }

    fn worker_host_name(&self) -> String {
        format!("h{}", self.worker_host)
    }
}

/// Injects faults into checkpoints and restarts on one virtual machine, and checks the outcomes.
#[derive(Debug)]
pub struct CheckpointFaults<'a> {
    vm: &'a Vm<'a>,
    breakpoints_folder: PathBuf,
    jobs: Vec<TestJob>,
    /// Number of the next round, which selects its points; incremented by each round.
    next_round: usize,
    /// Number of engine processes into which faults were injected so far.
    engine_hit_count: usize,
    /// Times at which the test has killed a tasker or the resource manager.
    kill_times: Vec<Instant>,
    /// Number of operations that were started and held so far.
    held_operation_count: usize,
    /// Number of held operations that ended before the fault.
    ended_early_count: usize,
}

impl<'a> CheckpointFaults<'a> {
    /// Adds all hosts of the testbed to the virtual machine, starts the jobs, and makes a
    /// checkpoint of each job. The testbed must have been made by
    /// [`crate::testbed::Testbed::with_own_engine`]. `round_offset` and the seed select the points
    /// of the first round.
    pub fn start_jobs(vm: &'a Vm<'a>, round_offset: usize) -> Result<Self> {
        let testbed = vm.testbed();
        let breakpoints_folder = testbed
            .breakpoints_folder()
            .context("a testbed with breakpoints")?
            .to_path_buf();
        vm.add_missing_hosts(&testbed.hosts().iter().collect::<Vec<_>>())?;
        vm.compile_program("ring_job")?;
        let start = |host| {
            let host_name = format!("h{host}");
            (
                host,
                RingJob::start_small(vm, &format!("ring-{host_name}"), &host_name),
            )
        };
        let started_jobs: Vec<(usize, RingJob)> = (2..=HOST_COUNT).map(start).collect();
        let mut test_jobs = Vec::new();
        for (host, job) in started_jobs {
            job.wait_for_rounds(vm, PROGRESS_ROUND_COUNT);
            let host_name = format!("h{host}");
            let is_worker =
                |task: &Task| is_ring_job(task) && task.host.as_deref() == Some(&host_name);
            let worker_tid = vm.tasks()?.into_iter().find(is_worker);
            let worker_tid = worker_tid
                .with_context(|| format!("no worker on {host_name}"))?
                .tid;
            vm.pvm_json(&["checkpoint", "--every", CHECKPOINT_INTERVAL, &job.tid])?;
            test_jobs.push(TestJob {
                worker_host: host,
                job,
                worker_tid,
                is_running: true,
                must_restart: false,
            });
        }
        Ok(CheckpointFaults {
            vm,
            breakpoints_folder,
            jobs: test_jobs,
            next_round: usize::try_from(print_seed())? + round_offset,
            engine_hit_count: 0,
            kill_times: Vec::new(),
            held_operation_count: 0,
            ended_early_count: 0,
        })
    }

    /// Restarts the jobs on `vm`, the next virtual machine of the testbed, each from its newest
    /// checkpoint in the store. Checks that the jobs make progress, and that the store contains no
    /// incomplete checkpoints and the hosts no files of the restarts.
    pub fn restart_jobs<'b>(mut self, vm: &'b Vm<'b>) -> Result<CheckpointFaults<'b>> {
        vm.add_missing_hosts(&vm.testbed().hosts().iter().collect::<Vec<_>>())?;
        for test_job in &mut self.jobs {
            test_job.is_running = false;
        }
        let mut faults = CheckpointFaults { vm, ..self };
        for job in 0..JOB_COUNT {
            faults.restart_job(job)?;
        }
        faults.check_progress()?;
        faults.check_nothing_remains()?;
        Ok(faults)
    }

    /// Returns the number of engine processes into which faults were injected so far.
    pub fn engine_hit_count(&self) -> usize {
        self.engine_hit_count
    }

    /// Makes a checkpoint of a job and restarts the job from this checkpoint, without a fault.
    /// Returns the points that daemons reach for the job's worker in each of the two operations.
    pub fn checkpoint_and_restart(&mut self) -> Result<[(Operation, BTreeSet<Point>); 2]> {
        let test_job = &self.jobs[0];
        let log = PointLog::new(&self.breakpoints_folder, &test_job.worker_tid)?;
        self.vm.pvm_json(&["checkpoint", &test_job.job.tid])?;
        let checkpoint_points = log.take_points()?;
        self.end_jobs(&[0])?;
        self.restart_job(0)?;
        Ok([
            (Operation::Checkpoint, checkpoint_points),
            (Operation::Restart, log.take_points()?),
        ])
    }

    fn take_next_rounds(&mut self, round_sample: RoundSample) -> Vec<Vec<FaultPoint>> {
        let round_count = round_sample.round_count();
        self.next_round += round_count;
        (self.next_round - round_count..self.next_round)
            .map(round_points)
            .collect()
    }

    /// Injects `fault` into `victim` at the points of the next rounds.
    ///
    /// # Panics
    /// An operation cannot be held, or an outcome is wrong.
    pub fn inject_rounds(&mut self, round_sample: RoundSample, victim: Victim, fault: Fault) {
        self.inject_rounds_with_victims(round_sample, &[victim], fault);
    }

    /// Injects `fault` at the points of the next rounds. The victims rotate over the operations of
    /// a round and over successive rounds.
    ///
    /// # Panics
    /// As [`CheckpointFaults::inject_rounds`].
    pub fn inject_rounds_with_victims(
        &mut self,
        round_sample: RoundSample,
        victims: &[Victim],
        fault: Fault,
    ) {
        for (round_index, round) in self.take_next_rounds(round_sample).into_iter().enumerate() {
            let round = round.into_iter().enumerate();
            let add_victim = |(i, point)| (point, victims[(round_index + i) % victims.len()]);
            let is_applicable = |(point, victim): &(FaultPoint, Victim)| {
                *victim != Victim::WorkerEngine || has_engine_process(point)
            };
            let cases: Vec<(FaultPoint, Victim)> =
                round.map(add_victim).filter(is_applicable).collect();
            self.inject_and_check_round(&cases, fault);
        }
    }

    fn inject_and_check_round(&mut self, cases: &[(FaultPoint, Victim)], fault: Fault) {
        let points: Vec<FaultPoint> = cases.iter().map(|(point, _)| *point).collect();
        let victims: Vec<Victim> = cases.iter().map(|(_, victim)| *victim).collect();
        self.wait_for_kill_quota(&victims, fault)
            .or_panic_with_logs(self.vm);
        let started_at = Instant::now();
        let result = self.start_and_hold(&points).and_then(|(mut held_operations, first_event)| {
            let hold_time = started_at.elapsed();
            self.inject_and_wait(&mut held_operations, &victims, fault, first_event)?;
            let fault_time = started_at.elapsed();
            let outcomes = self.check_outcomes(held_operations, &victims, fault, first_event)?;
            eprintln!(
                "{fault:?}, {victims:?}: held {hold_time:.1?}, over {fault_time:.1?}, judged {:.1?}",
                started_at.elapsed()
            );
            Ok(outcomes)
        });
        match result {
            Ok(outcomes) => points
                .iter()
                .zip(outcomes)
                .for_each(|(point, outcome)| eprintln!("  {point:?}: {outcome}")),
            Err(error) => panic!(
                "{fault:?}, {cases:?}: {error:#}\n{}",
                self.vm.events_and_logs()
            ),
        }
    }

    /// Kills the master while the operations of one round are held. Checks that no process of the
    /// virtual machine or of a job remains, that each held checkpoint has added at most one
    /// complete checkpoint to the store, and that the held restarts have added none.
    ///
    /// # Errors
    /// An operation cannot be held, or a check fails.
    pub fn kill_master_and_check(&mut self) -> Result<()> {
        let (mut held_operations, first_event) =
            self.start_and_hold(&round_points(self.next_round))?;
        let victims = vec![Victim::MasterDaemon; held_operations.len()];
        self.inject_and_wait(&mut held_operations, &victims, Fault::Kill, first_event)?;
        self.vm.wait_until_ended(WAIT_TIMEOUT)?;
        for host in self.vm.testbed().hosts() {
            wait_until_no_process(host, "ring_job", WAIT_TIMEOUT)?;
        }
        for held_operation in held_operations {
            held_operation.console.wait_or_kill(WAIT_TIMEOUT)?;
            let checkpoints = self.checkpoint_names(held_operation.job_index)?.into_iter();
            let new_count = checkpoints
                .filter(|name| !held_operation.checkpoints_before.contains(name))
                .count();
            let (operation_kind, _) = held_operation.point;
            ensure!(
                new_count <= usize::from(operation_kind == Operation::Checkpoint),
                "{new_count} new checkpoints: {:?}",
                held_operation.point
            );
        }
        Ok(())
    }

    /// Restarts the jobs whose checkpoint was interrupted, from their newest checkpoints in the
    /// store. Then ends all jobs and checks their results.
    ///
    /// # Panics
    /// Too many operations ended before the fault, a restart fails, or a result is wrong.
    pub fn end_and_check_jobs(mut self) {
        let (held_count, early_count) = (self.held_operation_count, self.ended_early_count);
        assert!(
            early_count * 2 <= held_count,
            "{early_count} of {held_count} operations ended before the fault"
        );
        let interrupted_jobs: Vec<usize> = (0..JOB_COUNT)
            .filter(|job| self.jobs[*job].must_restart)
            .collect();
        self.end_jobs(&interrupted_jobs).or_panic_with_logs(self.vm);
        for job in interrupted_jobs {
            self.restart_job(job).or_panic_with_logs(self.vm);
        }
        self.check_nothing_remains().or_panic_with_logs(self.vm);
        self.jobs
            .iter()
            .for_each(|test_job| test_job.job.end_and_check(self.vm));
    }

    /// Waits until another kill of these victims does not exceed [`KILL_COUNT_MAX`] in
    /// [`KILL_COUNT_WINDOW`], and records the time of the kill. Returns at once if `fault` or the
    /// victims are not limited.
    fn wait_for_kill_quota(&mut self, victims: &[Victim], fault: Fault) -> Result<()> {
        // A resource manager that hangs is killed by its daemon.
        let is_limited = |victim: &Victim| match victim {
            Victim::WorkerTasker => fault == Fault::Kill,
            Victim::ResourceManager => matches!(fault, Fault::Kill | Fault::Pause(_)),
            _ => false,
        };
        if !victims.iter().any(is_limited) {
            return Ok(());
        }
        let kill_times = &mut self.kill_times;
        wait_for(WAIT_TIMEOUT, || {
            kill_times.retain(|killed_at| killed_at.elapsed() < KILL_COUNT_WINDOW);
            if kill_times.len() < KILL_COUNT_MAX {
                Ok(())
            } else {
                Err("they have died too often".to_string())
            }
        })?;
        kill_times.push(Instant::now());
        Ok(())
    }

    /// Injects a fault into held operations, and waits until the fault is over. `first_event` is
    /// the number of the first event after the start of the operations.
    fn inject_and_wait(
        &mut self,
        held_operations: &mut [HeldOperation],
        victims: &[Victim],
        fault: Fault,
        first_event: u64,
    ) -> Result<()> {
        let (vm, testbed, jobs) = (self.vm, self.vm.testbed(), &self.jobs);
        let hosts: Vec<usize> = held_operations
            .iter()
            .map(|operation| jobs[operation.job_index].worker_host)
            .collect();
        let hosts_and_victims = hosts.iter().zip(victims);
        let targets = FaultTargets {
            hosts_and_roles: hosts_and_victims
                .map(|(host, victim)| victim.host_and_role(*host))
                .collect(),
            host_pairs: Vec::new(),
        };
        let held_processes: Vec<(FaultPoint, usize, Option<HoldMeans>)> = held_operations
            .iter_mut()
            .zip(&hosts)
            .map(|(operation, host)| (operation.point, *host, operation.held_by.take()))
            .collect();
        let resume_others = |victim_pids: &[Pid]| {
            for (point, host, held_by) in held_processes {
                if fake_criu_command(&point).is_some() {
                    set_behaviour(testbed, &format!("h{host}"), "");
                }
                match held_by {
                    Some(HoldMeans::Process(pid)) if !victim_pids.contains(&pid) => {
                        let signal_result = send_signal(pid, Signal::SIGCONT);
                        // An engine may have ended together with its tasker, so an error of the
                        // signal to an engine is ignored.
                        if point.1 != HoldPoint::DuringEngine {
                            signal_result?;
                        }
                    }
                    Some(HoldMeans::Process(_) | HoldMeans::FakeCriu | HoldMeans::StoreLock(_))
                    | None => {}
                }
            }
            Ok(())
        };
        let check_loss_handled = || {
            if victims.contains(&Victim::MasterDaemon) {
                return check_slaves_ended(vm);
            }
            for operation in held_operations.iter_mut() {
                if matches!(operation.console.poll_status(), Ok(None)) {
                    return Err(format!("{:?} has not ended", operation.point));
                }
            }
            let lost_hosts = hosts.iter().zip(victims);
            let lost_hosts = lost_hosts.filter(|(_, victim)| **victim == Victim::WorkerDaemon);
            for (host, _) in lost_hosts {
                check_host_lost(vm, first_event, *host)?;
            }
            Ok(())
        };
        self.engine_hit_count +=
            faults::inject_and_wait(testbed, fault, &targets, resume_others, check_loss_handled)?;
        Ok(())
    }

    fn store_folder(&self) -> PathBuf {
        self.vm.user_home().join(".local/state/sempa/checkpoints")
    }

    /// Returns the names of the complete checkpoints of a job, oldest first. Fails if there is
    /// none.
    fn checkpoint_names(&self, job: usize) -> Result<Vec<String>> {
        let name_prefix = format!("{}-", self.jobs[job].job.tid);
        let checkpoints: Vec<String> = sorted_file_names(&self.store_folder())
            .into_iter()
            .filter(|name| name.starts_with(&name_prefix))
            .collect();
        ensure!(!checkpoints.is_empty(), "no checkpoint {name_prefix}");
        Ok(checkpoints)
    }

    /// Kills the tasks of those jobs in `jobs` that run, and waits until these tasks have ended.
    fn end_jobs(&mut self, jobs: &[usize]) -> Result<()> {
        let running_jobs = || {
            let jobs = jobs.iter().copied();
            jobs.filter(|job| self.jobs[*job].is_running)
        };
        let tids: Vec<&str> = running_jobs()
            .flat_map(|job| self.jobs[job].task_tids())
            .collect();
        if tids.is_empty() {
            return Ok(());
        }
        self.vm.run_pvm(&[&["kill"], &tids[..]].concat())?;
        wait_for(WAIT_TIMEOUT, || {
            let mut remaining_tasks = self.vm.tasks().map_err(|error| error.to_string())?;
            remaining_tasks.retain(|task| tids.contains(&&*task.tid));
            if remaining_tasks.is_empty() {
                Ok(())
            } else {
                Err(format!("{remaining_tasks:?}"))
            }
        })?;
        for job in jobs {
            self.jobs[*job].is_running = false;
        }
        Ok(())
    }

    /// Restarts a job that does not run from its newest checkpoint, on the hosts where the job was
    /// started. Checks that the job makes progress.
    fn restart_job(&mut self, job: usize) -> Result<()> {
        let newest_checkpoint = self.checkpoint_names(job)?.pop().context("a checkpoint")?;
        let test_job = &mut self.jobs[job];
        let host_list = format!("h1,{}", test_job.worker_host_name());
        self.vm
            .run_pvm(&["restart", &newest_checkpoint, "--on", &host_list])?
            .expect_success("the restart of the newest checkpoint")?;
        (test_job.is_running, test_job.must_restart) = (true, false);
        test_job.job.wait_for_rounds(self.vm, PROGRESS_ROUND_COUNT);
        test_job.job.check_log();
        Ok(())
    }
}

/// Succeeds if the event log contains the loss of the host, as event number `first_event` or later.
fn check_host_lost(vm: &Vm<'_>, first_event: u64, host: usize) -> Result<(), String> {
    find_event(vm, first_event, |kind| {
        let name = vm.testbed().host(host).name();
        matches!(kind, EventKind::HostGone { name: lost_name, .. } if lost_name == name)
            .then_some(())
    })
    .map_err(|error| format!("h{host} is not lost: {error}"))
}

/// Applies `select` to the events from number `first_event` on, and returns the first result that
/// is not `None`.
fn find_event<T>(
    vm: &Vm<'_>,
    first_event: u64,
    select: impl Fn(&EventKind) -> Option<T>,
) -> Result<T, String> {
    let events = vm
        .events_from(first_event)
        .map_err(|error| error.to_string())?;
    let mut matches = events.iter().filter_map(|entry| select(&entry.kind));
    matches.next().ok_or_else(|| "no such event".to_string())
}

fn is_ring_job(task: &Task) -> bool {
    task.name == "ring_job"
}

fn sorted_file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
