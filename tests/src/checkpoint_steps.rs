//! Injects faults into checkpoints of jobs and into their restarts, with real processes.
//!
//! A round has several operations (checkpoints or restarts), each of another job. The first task of
//! every job is on the master's host; its other task is on a host that no other job uses. All
//! operations of a round are held at their points, then one fault hits all of them, and the outcome
//! is judged.

mod fault_points;
mod hold;
mod judge;

pub use fault_points::{
    FaultPoint, HoldPoint, Operation, Sampling, daemon_points, full_round_count,
};

use crate::fake_criu::set_behaviour;
use crate::faults::{self, Fault, FaultTargets, Point, PointLog, Role, send_signal};
use crate::migration_steps::slaves_have_ended;
use crate::ring_job::Job;
use crate::rng::seed;
use crate::run::{RunningCommand, wait_for};
use crate::testbed::wait_until_no_process;
use crate::vm::{OrPanicWithLogs, Task, Vm};
use anyhow::{Context, Result, ensure};
use fault_points::{fake_criu_word, has_engine, round_points};
use nix::fcntl::Flock;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time limit for an operation to reach a point, for an operation to end, and for the virtual
/// machine to notice a lost host.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of jobs, and maximum number of operations in a round.
const JOB_COUNT: usize = 5;
/// Hosts of the testbed: the master's host, and one for each job.
pub const HOST_COUNT: usize = 1 + JOB_COUNT;
/// Interval of periodic checkpoints. None is due during a test, but an interval must be set, so
/// that a job rolls back to its newest checkpoint when it loses a task.
const CHECKPOINT_INTERVAL: &str = "1h";
/// Maximum number of taskers and resource managers that are killed within [`KILLS_WINDOW`]. It is
/// below the number of restarts that daemons allow in that period.
const KILLS_MAX: usize = 4;
const KILLS_WINDOW: Duration = Duration::from_secs(65);
/// Number of rounds of a job's computation that prove progress: more than the number of lines of
/// its log that may arrive late.
const PROGRESS_ROUNDS: usize = 4;

/// The process that a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The daemon of the host that no other job uses.
    OwnDaemon,
    /// The tasker of the host that no other job uses.
    OwnTasker,
    /// CRIU processes that this tasker has started.
    Engine,
    /// The daemon of the master's host.
    Master,
    ResourceManager,
}

impl Victim {
    fn role(self, own_host: usize) -> (usize, Role) {
        match self {
            Victim::OwnDaemon => (own_host, Role::Daemon),
            Victim::OwnTasker => (own_host, Role::Tasker),
            Victim::Engine => (own_host, Role::Engine),
            Victim::Master => (1, Role::Daemon),
            Victim::ResourceManager => (1, Role::ResourceManager),
        }
    }

    /// Returns what a job loses if `fault` hits this victim.
    fn loss(self, fault: Fault) -> Loss {
        match (self, fault) {
            (Victim::OwnDaemon | Victim::Master, _) if fault.is_lasting() => Loss::Host,
            (Victim::OwnTasker, Fault::Kill) => Loss::Tasker,
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
    /// A process that was stopped by a signal.
    Process(Pid),
    /// The fake CRIU, which waits for another command word.
    FakeCriu,
    /// The lock of the checkpoint store, which this process has acquired.
    StoreLock(#[expect(dead_code, reason = "dropping it releases the lock")] Flock<File>),
}

/// An operation that is held at a fault point.
#[derive(Debug)]
struct HeldOperation {
    point: FaultPoint,
    job: usize,
    /// `None` if the operation ended before it could be held.
    holder: Option<HoldMeans>,
    console: RunningCommand,
    /// Names of the job's checkpoints before the operation.
    checkpoints_before: Vec<String>,
}

/// A job and the host that no other job uses.
#[derive(Debug)]
struct JobOnHost {
    host: usize,
    job: Job,
    /// The tid of the job's task on that host.
    worker_tid: String,
    runs: bool,
    /// True if a fault has hit a checkpoint of the job, and its newest checkpoint has not been
    /// restarted since.
    must_restart: bool,
}

impl JobOnHost {
    fn tids(&self) -> [&str; 2] {
        [&self.job.tid, &self.worker_tid]
    }

    fn host_name(&self) -> String {
        format!("h{}", self.host)
    }
}

/// Injects faults into checkpoints and restarts on one virtual machine, and judges the outcome.
#[derive(Debug)]
pub struct CheckpointFaults<'a> {
    vm: &'a Vm<'a>,
    breakpoints: PathBuf,
    members: Vec<JobOnHost>,
    /// Selects the points of the next round; incremented by each round.
    turn: usize,
    /// The number of engine processes that faults have hit so far.
    engines_hit: usize,
    /// Times at which a test has killed a tasker or the resource manager.
    kill_times: Vec<Instant>,
    /// Number of operations that were held so far.
    held_count: usize,
    /// Number of held operations that ended before the fault.
    ended_early_count: usize,
}

impl<'a> CheckpointFaults<'a> {
    /// Adds all hosts of the testbed to the virtual machine, starts the jobs, and makes a
    /// checkpoint of each job. The testbed must have its own engine. `offset` and the seed select
    /// the points of the first round.
    pub fn start(vm: &'a Vm<'a>, offset: usize) -> Result<CheckpointFaults<'a>> {
        let bed = vm.bed();
        let breakpoints = bed
            .breakpoints_folder()
            .context("a testbed with breakpoints")?
            .to_path_buf();
        vm.add_missing(&bed.hosts().iter().collect::<Vec<_>>())?;
        vm.compile_program("ring_job")?;
        let start = |host| {
            let here = format!("h{host}");
            (host, Job::start_small(vm, &format!("ring-{here}"), &here))
        };
        let started: Vec<(usize, Job)> = (2..=HOST_COUNT).map(start).collect();
        let mut members = Vec::new();
        for (host, job) in started {
            job.wait_for_rounds(vm, PROGRESS_ROUNDS);
            let here = format!("h{host}");
            let is_worker = |task: &Task| is_ring_job(task) && task.host.as_deref() == Some(&here);
            let worker = vm.tasks()?.into_iter().find(is_worker);
            let worker = worker.with_context(|| format!("no worker on {here}"))?.tid;
            vm.json(&["checkpoint", "--every", CHECKPOINT_INTERVAL, &job.tid])?;
            members.push(JobOnHost {
                host,
                job,
                worker_tid: worker,
                runs: true,
                must_restart: false,
            });
        }
        Ok(CheckpointFaults {
            vm,
            breakpoints,
            members,
            turn: usize::try_from(seed())? + offset,
            engines_hit: 0,
            kill_times: Vec::new(),
            held_count: 0,
            ended_early_count: 0,
        })
    }

    /// Restarts the same jobs on `vm`, the next virtual machine of the testbed, each from its
    /// newest checkpoint in the store. Checks that the store has no incomplete checkpoints.
    pub fn restart_jobs<'b>(mut self, vm: &'b Vm<'b>) -> Result<CheckpointFaults<'b>> {
        vm.add_missing(&vm.bed().hosts().iter().collect::<Vec<_>>())?;
        for member in &mut self.members {
            member.runs = false;
        }
        let mut faults = CheckpointFaults { vm, ..self };
        for job in 0..JOB_COUNT {
            faults.restart(job)?;
        }
        faults.check_progress()?;
        faults.check_nothing_is_left()?;
        Ok(faults)
    }

    /// Returns the number of engine processes that faults have hit so far.
    pub fn engines(&self) -> usize {
        self.engines_hit
    }

    /// Makes a checkpoint of a job and restarts the job from it, without a fault. Returns the
    /// points that the daemon of the job's own host reaches in each of the two operations.
    pub fn run_without_fault(&mut self) -> Result<[(Operation, BTreeSet<Point>); 2]> {
        let member = &self.members[0];
        let log = PointLog::new(&self.breakpoints, &member.worker_tid)?;
        self.vm.json(&["checkpoint", &member.job.tid])?;
        let checkpoint = log.take()?;
        self.end_jobs(&[0])?;
        self.restart(0)?;
        Ok([
            (Operation::Checkpoint, checkpoint),
            (Operation::Restart, log.take()?),
        ])
    }

    fn next_rounds(&mut self, sampling: Sampling) -> Vec<Vec<FaultPoint>> {
        let rounds = sampling.rounds();
        self.turn += rounds;
        (self.turn - rounds..self.turn).map(round_points).collect()
    }

    /// Injects `fault` into `victim` at the points of the next rounds.
    pub fn run(&mut self, sampling: Sampling, victim: Victim, fault: Fault) {
        self.run_mixed(sampling, &[victim], fault);
    }

    /// Injects `fault` at the points of the next rounds. The operations of a round, and successive
    /// rounds, take the victims in turn.
    ///
    /// # Panics
    /// As [`CheckpointFaults::run`].
    pub fn run_mixed(&mut self, sampling: Sampling, victims: &[Victim], fault: Fault) {
        for (number, round) in self.next_rounds(sampling).into_iter().enumerate() {
            let round = round.into_iter().enumerate();
            let case = |(i, point)| (point, victims[(number + i) % victims.len()]);
            let applies = |(point, victim): &(FaultPoint, Victim)| {
                *victim != Victim::Engine || has_engine(point)
            };
            let cases: Vec<(FaultPoint, Victim)> = round.map(case).filter(applies).collect();
            self.run_round(&cases, fault);
        }
    }

    fn run_round(&mut self, cases: &[(FaultPoint, Victim)], fault: Fault) {
        let points: Vec<FaultPoint> = cases.iter().map(|(point, _)| *point).collect();
        let victims: Vec<Victim> = cases.iter().map(|(_, victim)| *victim).collect();
        self.wait_for_restarts(&victims, fault)
            .or_panic_with_logs(self.vm);
        let begun = Instant::now();
        let done = self.hold(&points).and_then(|(mut held, from)| {
            let all_held = begun.elapsed();
            self.inject(&mut held, &victims, fault, from)?;
            let over = begun.elapsed();
            let outcomes = self.judge(held, &victims, fault, from)?;
            eprintln!(
                "{fault:?}, {victims:?}: held {all_held:.1?}, over {over:.1?}, judged {:.1?}",
                begun.elapsed()
            );
            Ok(outcomes)
        });
        match done {
            Ok(outcomes) => points
                .iter()
                .zip(outcomes)
                .for_each(|(point, outcome)| eprintln!("  {point:?}: {outcome}")),
            Err(error) => panic!("{fault:?}, {cases:?}: {error:#}\n{}", self.vm.logs()),
        }
    }

    /// Kills the master while the operations of one round are held. Checks that nothing of the
    /// virtual machine remains.
    ///
    /// # Errors
    /// An operation cannot be held, or something remains.
    pub fn kill_master(&mut self) -> Result<()> {
        let (mut held, from) = self.hold(&round_points(self.turn))?;
        let victims = vec![Victim::Master; held.len()];
        self.inject(&mut held, &victims, Fault::Kill, from)?;
        self.vm.wait_until_gone(STEP_TIMEOUT)?;
        for host in self.vm.bed().hosts() {
            wait_until_no_process(host, "ring_job", STEP_TIMEOUT)?;
        }
        for one in held {
            one.console.finish(STEP_TIMEOUT)?;
            let checkpoints = self.checkpoints(one.job)?.into_iter();
            let new = checkpoints
                .filter(|name| !one.checkpoints_before.contains(name))
                .count();
            let (operation, _) = one.point;
            ensure!(
                new <= usize::from(operation == Operation::Checkpoint),
                "{new} new checkpoints: {:?}",
                one.point
            );
        }
        Ok(())
    }

    /// Restarts the jobs of which a checkpoint was interrupted, from their newest checkpoints in
    /// the store. Then lets all jobs finish and checks their results.
    pub fn finish(mut self) {
        let (held, early) = (self.held_count, self.ended_early_count);
        assert!(
            early * 2 <= held,
            "{early} of {held} operations ended before the fault"
        );
        let owing: Vec<usize> = (0..JOB_COUNT)
            .filter(|job| self.members[*job].must_restart)
            .collect();
        self.end_jobs(&owing).or_panic_with_logs(self.vm);
        for job in owing {
            self.restart(job).or_panic_with_logs(self.vm);
        }
        self.check_nothing_is_left().or_panic_with_logs(self.vm);
        self.members
            .iter()
            .for_each(|member| member.job.finish(self.vm));
    }

    /// Waits until another kill of these victims does not exceed [`KILLS_MAX`] in
    /// [`KILLS_WINDOW`].
    fn wait_for_restarts(&mut self, victims: &[Victim], fault: Fault) -> Result<()> {
        let is_limited =
            |victim: &Victim| matches!(victim, Victim::OwnTasker | Victim::ResourceManager);
        if fault != Fault::Kill || !victims.iter().any(is_limited) {
            return Ok(());
        }
        let killed = &mut self.kill_times;
        wait_for(STEP_TIMEOUT, || {
            killed.retain(|at| at.elapsed() < KILLS_WINDOW);
            if killed.len() < KILLS_MAX {
                Ok(())
            } else {
                Err("they have died too often".to_string())
            }
        })?;
        killed.push(Instant::now());
        Ok(())
    }

    /// Injects a fault into held operations, and waits until the fault is over. `from` is the
    /// number of the first event since the operations began.
    fn inject(
        &mut self,
        held: &mut [HeldOperation],
        victims: &[Victim],
        fault: Fault,
        from: u64,
    ) -> Result<()> {
        let (vm, bed, members) = (self.vm, self.vm.bed(), &self.members);
        let hosts: Vec<usize> = held.iter().map(|one| members[one.job].host).collect();
        let roles = hosts.iter().zip(victims);
        let targets = FaultTargets {
            roles: roles.map(|(host, victim)| victim.role(*host)).collect(),
            pairs: Vec::new(),
        };
        let holders: Vec<(FaultPoint, usize, Option<HoldMeans>)> = held
            .iter_mut()
            .zip(&hosts)
            .map(|(one, host)| (one.point, *host, one.holder.take()))
            .collect();
        let resume = |hit: &[Pid]| {
            for (point, host, holder) in holders {
                if fake_criu_word(&point).is_some() {
                    set_behaviour(bed, &format!("h{host}"), "");
                }
                match holder {
                    Some(HoldMeans::Process(pid)) if !hit.contains(&pid) => {
                        let told = send_signal(pid, Signal::SIGCONT);
                        // An engine may have ended with its tasker, so an error is ignored.
                        if point.1 != HoldPoint::EngineWorks {
                            told?;
                        }
                    }
                    Some(HoldMeans::Process(_) | HoldMeans::FakeCriu | HoldMeans::StoreLock(_))
                    | None => {}
                }
            }
            Ok(())
        };
        let noticed = || {
            if victims.contains(&Victim::Master) {
                return slaves_have_ended(vm);
            }
            for one in held.iter_mut() {
                if matches!(one.console.poll(), Ok(None)) {
                    return Err(format!("{:?} has not ended", one.point));
                }
            }
            let lost = hosts.iter().zip(victims);
            let lost = lost.filter(|(_, victim)| **victim == Victim::OwnDaemon);
            for (host, _) in lost {
                host_is_lost(vm, from, *host)?;
            }
            Ok(())
        };
        self.engines_hit += faults::inject(bed, fault, &targets, resume, noticed)?;
        Ok(())
    }

    fn store(&self) -> PathBuf {
        self.vm.home().join(".local/state/sempa/checkpoints")
    }

    /// Returns the complete checkpoints of a job, oldest first.
    fn checkpoints(&self, job: usize) -> Result<Vec<String>> {
        let begin = format!("{}-", self.members[job].job.tid);
        let checkpoints: Vec<String> = file_names(&self.store())
            .into_iter()
            .filter(|name| name.starts_with(&begin))
            .collect();
        ensure!(!checkpoints.is_empty(), "no checkpoint {begin}");
        Ok(checkpoints)
    }

    /// Ends these jobs with all their tasks.
    fn end_jobs(&mut self, jobs: &[usize]) -> Result<()> {
        let running = || {
            let jobs = jobs.iter().copied();
            jobs.filter(|job| self.members[*job].runs)
        };
        let tids: Vec<&str> = running().flat_map(|job| self.members[job].tids()).collect();
        if tids.is_empty() {
            return Ok(());
        }
        self.vm.pvm(&[&["kill"], &tids[..]].concat())?;
        wait_for(STEP_TIMEOUT, || {
            let mut left = self.vm.tasks().map_err(|error| error.to_string())?;
            left.retain(|task| tids.contains(&&*task.tid));
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        })?;
        for job in jobs {
            self.members[*job].runs = false;
        }
        Ok(())
    }

    /// Restarts a job that does not run, from its newest checkpoint and on its own hosts. Checks
    /// that the job makes progress.
    fn restart(&mut self, job: usize) -> Result<()> {
        let newest = self.checkpoints(job)?.pop().context("a checkpoint")?;
        let member = &mut self.members[job];
        let on = format!("h1,{}", member.host_name());
        self.vm
            .pvm(&["restart", &newest, "--on", &on])?
            .expect_success("the restart of the newest checkpoint")?;
        (member.runs, member.must_restart) = (true, false);
        member.job.wait_for_rounds(self.vm, PROGRESS_ROUNDS);
        member.job.check_log();
        Ok(())
    }
}

/// Succeeds if the master has lost the host since event number `from`.
fn host_is_lost(vm: &Vm<'_>, from: u64, host: usize) -> Result<(), String> {
    find_event(vm, from, |kind| {
        let name = vm.bed().host(host).name();
        matches!(kind, EventKind::HostGone { name: gone, .. } if gone == name).then_some(())
    })
    .map_err(|error| format!("h{host} is not lost: {error}"))
}

/// Applies `find` to the events from number `from` on, and returns its first result that is not
/// `None`.
fn find_event<T>(
    vm: &Vm<'_>,
    from: u64,
    find: impl Fn(&EventKind) -> Option<T>,
) -> Result<T, String> {
    let events = vm.events_from(from).map_err(|error| error.to_string())?;
    let mut found = events.iter().filter_map(|entry| find(&entry.kind));
    found.next().ok_or_else(|| "no such event".to_string())
}

fn is_ring_job(task: &Task) -> bool {
    task.name == "ring_job"
}

fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
