//! Injects faults into checkpoints of jobs and into their restarts, with real processes.
//!
//! A round has several operations (checkpoints or restarts), each of another job. The first task of
//! every job is on the master's host; its other task is on a host that no other job uses. All
//! operations of a round are held at their points, then one fault hits all of them, and the outcome
//! is judged.

mod fault_points;
mod hold;
mod judge;

pub use fault_points::{FaultPoint, Hold, Operation, Sampling, all_rounds, daemon_points};

use crate::fake_criu::behave;
use crate::faults::{self, Fault, Point, PointLog, Role, Targets, signal};
use crate::move_steps::all_others_have_ended;
use crate::ring_job::Job;
use crate::rng::seed;
use crate::run::{Running, eventually};
use crate::testbed::gone;
use crate::vm::{Sure, Task, Vm};
use anyhow::{Context, Result, ensure};
use fault_points::{has_engine, round, word};
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
const TIMEOUT: Duration = Duration::from_secs(120);
/// Number of jobs, and maximum number of operations in a round.
const JOBS: usize = 5;
/// Hosts of the testbed: the master's host, and one for each job.
pub const HOSTS: usize = 1 + JOBS;
/// Interval of periodic checkpoints. None is due during a test, but an interval must be set, so
/// that a job rolls back to its newest checkpoint when it loses a task.
const SELDOM: &str = "1h";
/// Maximum number of taskers and resource managers that are killed within [`DEATHS_PERIOD`]. It is
/// below the number of restarts that daemons allow in that period.
const DEATHS_MAX: usize = 4;
const DEATHS_PERIOD: Duration = Duration::from_secs(65);
/// Number of rounds of a job's computation that prove progress: more than the number of lines of
/// its log that may arrive late.
const PROGRESS: usize = 4;

/// The process that a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The daemon of the host that no other job uses.
    Host,
    /// The tasker of the host that no other job uses.
    Tasker,
    /// CRIU processes that this tasker has started.
    Engine,
    /// The daemon of the master's host.
    Master,
    ResourceManager,
}

impl Victim {
    fn role(self, own_host: usize) -> (usize, Role) {
        match self {
            Victim::Host => (own_host, Role::Daemon),
            Victim::Tasker => (own_host, Role::Tasker),
            Victim::Engine => (own_host, Role::Engine),
            Victim::Master => (1, Role::Daemon),
            Victim::ResourceManager => (1, Role::ResourceManager),
        }
    }

    /// Returns what a job loses if `fault` hits this victim.
    fn loss(self, fault: Fault) -> Loss {
        match (self, fault) {
            (Victim::Host | Victim::Master, _) if fault.is_lasting() => Loss::Host,
            (Victim::Tasker, Fault::Kill) => Loss::Tasker,
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
enum Holder {
    /// A process that was stopped by a signal.
    Process(Pid),
    /// The fake CRIU, which waits for another command word.
    Word,
    /// The lock of the checkpoint store, which this process has acquired.
    Lock(#[expect(dead_code, reason = "dropping it releases the lock")] Flock<File>),
}

/// An operation that is held at a fault point.
#[derive(Debug)]
struct Held {
    point: FaultPoint,
    job: usize,
    /// `None` if the operation ended before it could be held.
    holder: Option<Holder>,
    console: Running,
    /// Names of the job's checkpoints before the operation.
    before: Vec<String>,
}

/// A job and the host that no other job uses.
#[derive(Debug)]
struct Member {
    host: usize,
    job: Job,
    /// The tid of the job's task on that host.
    worker: String,
    runs: bool,
    /// True if a fault has hit a checkpoint of the job, and its newest checkpoint has not been
    /// restarted since.
    owes_restart: bool,
}

impl Member {
    fn tids(&self) -> [&str; 2] {
        [&self.job.tid, &self.worker]
    }

    fn name(&self) -> String {
        format!("h{}", self.host)
    }
}

/// Injects faults into checkpoints and restarts on one virtual machine, and judges the outcome.
#[derive(Debug)]
pub struct CheckpointFaults<'a> {
    vm: &'a Vm<'a>,
    breakpoints: PathBuf,
    members: Vec<Member>,
    /// Selects the points of the next round; incremented by each round.
    turn: usize,
    /// The number of engine processes that faults have hit so far.
    engines: usize,
    /// Times at which a test has killed a tasker or the resource manager.
    killed: Vec<Instant>,
    /// Number of operations that were held so far.
    held: usize,
    /// Number of held operations that ended before the fault.
    early: usize,
}

impl<'a> CheckpointFaults<'a> {
    /// Adds all hosts of the testbed to the virtual machine, starts the jobs, and makes a
    /// checkpoint of each job. The testbed must have its own engine. `offset` and the seed select
    /// the points of the first round.
    pub fn start(vm: &'a Vm<'a>, offset: usize) -> Result<CheckpointFaults<'a>> {
        let bed = vm.bed();
        let breakpoints = bed
            .steps()
            .context("a testbed with breakpoints")?
            .to_path_buf();
        vm.take_in(&bed.hosts().iter().collect::<Vec<_>>())?;
        vm.program("ring_job")?;
        let start = |host| {
            let here = format!("h{host}");
            (host, Job::start_small(vm, &format!("ring-{here}"), &here))
        };
        let started: Vec<(usize, Job)> = (2..=HOSTS).map(start).collect();
        let mut members = Vec::new();
        for (host, job) in started {
            job.go_on(vm, PROGRESS);
            let here = format!("h{host}");
            let is_worker = |task: &Task| is_ring(task) && task.host.as_deref() == Some(&here);
            let worker = vm.tasks()?.into_iter().find(is_worker);
            let worker = worker.with_context(|| format!("no worker on {here}"))?.tid;
            vm.json(&["checkpoint", "--every", SELDOM, &job.tid])?;
            members.push(Member {
                host,
                job,
                worker,
                runs: true,
                owes_restart: false,
            });
        }
        Ok(CheckpointFaults {
            vm,
            breakpoints,
            members,
            turn: usize::try_from(seed())? + offset,
            engines: 0,
            killed: Vec::new(),
            held: 0,
            early: 0,
        })
    }

    /// Restarts the same jobs on `vm`, the next virtual machine of the testbed, each from its
    /// newest checkpoint in the store. Checks that the store has no incomplete checkpoints.
    pub fn start_again<'b>(mut self, vm: &'b Vm<'b>) -> Result<CheckpointFaults<'b>> {
        vm.take_in(&vm.bed().hosts().iter().collect::<Vec<_>>())?;
        for member in &mut self.members {
            member.runs = false;
        }
        let mut faults = CheckpointFaults { vm, ..self };
        for job in 0..JOBS {
            faults.restart(job)?;
        }
        faults.all_make_progress()?;
        faults.nothing_is_left()?;
        Ok(faults)
    }

    /// Returns the number of engine processes that faults have hit so far.
    pub fn engines(&self) -> usize {
        self.engines
    }

    /// Makes a checkpoint of a job and restarts the job from it, without a fault. Returns the
    /// points that the daemon of the job's own host reaches in each of the two operations.
    pub fn undisturbed(&mut self) -> Result<[(Operation, BTreeSet<Point>); 2]> {
        let member = &self.members[0];
        let log = PointLog::new(&self.breakpoints, &member.worker)?;
        self.vm.json(&["checkpoint", &member.job.tid])?;
        let checkpoint = log.take()?;
        self.end(&[0])?;
        self.restart(0)?;
        Ok([
            (Operation::Checkpoint, checkpoint),
            (Operation::Restart, log.take()?),
        ])
    }

    fn next_rounds(&mut self, sampling: Sampling) -> Vec<Vec<FaultPoint>> {
        let rounds = sampling.rounds();
        self.turn += rounds;
        (self.turn - rounds..self.turn).map(round).collect()
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
        self.wait_for_restarts(&victims, fault).sure(self.vm);
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
        let (mut held, from) = self.hold(&round(self.turn))?;
        let victims = vec![Victim::Master; held.len()];
        self.inject(&mut held, &victims, Fault::Kill, from)?;
        self.vm.is_gone(TIMEOUT)?;
        for host in self.vm.bed().hosts() {
            gone(host, "ring_job", TIMEOUT)?;
        }
        for one in held {
            one.console.finish(TIMEOUT)?;
            let checkpoints = self.checkpoints(one.job)?.into_iter();
            let new = checkpoints
                .filter(|name| !one.before.contains(name))
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
        let (held, early) = (self.held, self.early);
        assert!(
            early * 2 <= held,
            "{early} of {held} operations ended before the fault"
        );
        let owing: Vec<usize> = (0..JOBS)
            .filter(|job| self.members[*job].owes_restart)
            .collect();
        self.end(&owing).sure(self.vm);
        for job in owing {
            self.restart(job).sure(self.vm);
        }
        self.nothing_is_left().sure(self.vm);
        self.members
            .iter()
            .for_each(|member| member.job.finish(self.vm));
    }

    /// Waits until another kill of these victims does not exceed [`DEATHS_MAX`] in
    /// [`DEATHS_PERIOD`].
    fn wait_for_restarts(&mut self, victims: &[Victim], fault: Fault) -> Result<()> {
        let is_limited =
            |victim: &Victim| matches!(victim, Victim::Tasker | Victim::ResourceManager);
        if fault != Fault::Kill || !victims.iter().any(is_limited) {
            return Ok(());
        }
        let killed = &mut self.killed;
        eventually(TIMEOUT, || {
            killed.retain(|at| at.elapsed() < DEATHS_PERIOD);
            if killed.len() < DEATHS_MAX {
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
        held: &mut [Held],
        victims: &[Victim],
        fault: Fault,
        from: u64,
    ) -> Result<()> {
        let (vm, bed, members) = (self.vm, self.vm.bed(), &self.members);
        let hosts: Vec<usize> = held.iter().map(|one| members[one.job].host).collect();
        let roles = hosts.iter().zip(victims);
        let targets = Targets {
            roles: roles.map(|(host, victim)| victim.role(*host)).collect(),
            pairs: Vec::new(),
        };
        let holders: Vec<(FaultPoint, usize, Option<Holder>)> = held
            .iter_mut()
            .zip(&hosts)
            .map(|(one, host)| (one.point, *host, one.holder.take()))
            .collect();
        let resume = |hit: &[Pid]| {
            for (point, host, holder) in holders {
                if word(&point).is_some() {
                    behave(bed, &format!("h{host}"), "");
                }
                match holder {
                    Some(Holder::Process(pid)) if !hit.contains(&pid) => {
                        let told = signal(pid, Signal::SIGCONT);
                        // An engine may have ended with its tasker, so an error is ignored.
                        if point.1 != Hold::EngineWorks {
                            told?;
                        }
                    }
                    Some(Holder::Process(_) | Holder::Word | Holder::Lock(_)) | None => {}
                }
            }
            Ok(())
        };
        let noticed = || {
            if victims.contains(&Victim::Master) {
                return all_others_have_ended(vm);
            }
            for one in held.iter_mut() {
                if matches!(one.console.poll(), Ok(None)) {
                    return Err(format!("{:?} has not ended", one.point));
                }
            }
            let lost = hosts.iter().zip(victims);
            let lost = lost.filter(|(_, victim)| **victim == Victim::Host);
            for (host, _) in lost {
                is_lost(vm, from, *host)?;
            }
            Ok(())
        };
        self.engines += faults::inject(bed, fault, &targets, resume, noticed)?;
        Ok(())
    }

    fn store(&self) -> PathBuf {
        self.vm.home().join(".local/state/sempa/checkpoints")
    }

    /// Returns the complete checkpoints of a job, oldest first.
    fn checkpoints(&self, job: usize) -> Result<Vec<String>> {
        let begin = format!("{}-", self.members[job].job.tid);
        let checkpoints: Vec<String> = names(&self.store())
            .into_iter()
            .filter(|name| name.starts_with(&begin))
            .collect();
        ensure!(!checkpoints.is_empty(), "no checkpoint {begin}");
        Ok(checkpoints)
    }

    /// Ends these jobs with all their tasks.
    fn end(&mut self, jobs: &[usize]) -> Result<()> {
        let running = || {
            let jobs = jobs.iter().copied();
            jobs.filter(|job| self.members[*job].runs)
        };
        let tids: Vec<&str> = running().flat_map(|job| self.members[job].tids()).collect();
        if tids.is_empty() {
            return Ok(());
        }
        self.vm.pvm(&[&["kill"], &tids[..]].concat())?;
        eventually(TIMEOUT, || {
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
        let on = format!("h1,{}", member.name());
        self.vm
            .pvm(&["restart", &newest, "--on", &on])?
            .expect_good("the restart of the newest checkpoint")?;
        (member.runs, member.owes_restart) = (true, false);
        member.job.go_on(self.vm, PROGRESS);
        member.job.is_right();
        Ok(())
    }
}

/// Succeeds if the master has lost the host since event number `from`.
fn is_lost(vm: &Vm<'_>, from: u64, host: usize) -> Result<(), String> {
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

fn is_ring(task: &Task) -> bool {
    task.name == "ring_job"
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
