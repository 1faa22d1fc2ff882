//! Faults in the course of checkpoints of jobs, and of their restarts. Several are held at their places first, each of a job of its
//! own: its first task is on the master's host, the other one on a host that it has for itself; then the fault meets all of them.
//!
//! Before tasks are stopped, and again when they stand, and before a job is started again, all daemons have to answer. So most are
//! held by their engine at first, and daemons stand still last, one of them before its job is that far.

mod places;

pub use places::{Place, Share, Spot, What, met, turns};

use crate::liar::{self, has_lied, lie, lies};
use crate::ring_job::Job;
use crate::run::{Done, Running, eventually};
use crate::strikes::{
    self, Fault, Halt, Party, Passed, Point, UNTIL_LOST, is_stopped, left_on, signal,
};
use crate::testbed::gone;
use crate::vm::{Sure, Task, Vm};
use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use places::{has_engine, some, word};
use sempa_proto::event::EventKind;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time for a place to be reached, for what is held to end, and for a lost host to be noticed.
const LONG: Duration = Duration::from_secs(120);
/// Jobs: as many as can be held at once.
const JOBS: usize = 5;
/// Hosts that they need: the master's, and one for each job.
pub const HOSTS: usize = 1 + JOBS;
/// No checkpoint is made by itself meanwhile, but a job goes back to its newest one when it loses a task.
const SELDOM: &str = "1h";
/// Taskers and the resource manager are started again that have died so often within this time, and a little later.
const DEATHS_MAX: usize = 4;
const DEATHS_PERIOD: Duration = Duration::from_secs(65);
/// Rounds by which a job shows that it goes on: more than its notes are late.
const SOME: usize = 4;

/// Whom a fault meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whom {
    /// The daemon of the job's own host.
    Host,
    /// Its tasker.
    Tasker,
    /// What the tasker has started of CRIU.
    Engine,
    /// The master's daemon.
    Master,
    /// The resource manager.
    ResourceManager,
}

impl Whom {
    fn party(self, own: usize) -> (usize, Party) {
        match self {
            Whom::Host => (own, Party::Daemon),
            Whom::Tasker => (own, Party::Tasker),
            Whom::Engine => (own, Party::Engine),
            Whom::Master => (1, Party::Daemon),
            Whom::ResourceManager => (1, Party::ResourceManager),
        }
    }

    /// What a job loses by this fault.
    fn loss(self, fault: Fault) -> Loss {
        let lasts = match fault {
            Fault::Kill => true,
            Fault::Stop(long) | Fault::Cut(long) | Fault::Part(long) => long >= UNTIL_LOST,
        };
        match (self, fault) {
            (Whom::Host | Whom::Master, _) if lasts => Loss::Host,
            (Whom::Tasker, Fault::Kill) => Loss::Tasker,
            _ => Loss::Nothing,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    Nothing,
    /// All on its own host, which stays.
    Tasker,
    /// The host itself.
    Host,
}

/// What holds one of them.
#[derive(Debug)]
enum Hold {
    /// A process that stands still.
    Process(Pid),
    /// The word that its engine waits for the end of.
    Word,
    /// The lock of the store.
    Lock(#[expect(dead_code, reason = "it is held as long as this is there")] Flock<File>),
}

/// One of them, held.
#[derive(Debug)]
pub struct Cell {
    /// What and where.
    pub spot: Spot,
    job: usize,
    hold: Option<Hold>,
    console: Running,
    /// The sets of its job before.
    before: Vec<String>,
}

/// A job, and the host that it has for itself.
#[derive(Debug)]
struct Member {
    host: usize,
    job: Job,
    /// Its task there.
    worker: String,
    runs: bool,
    /// A checkpoint of it was struck, and the newest set there is was not started since.
    owes: bool,
}

impl Member {
    fn tids(&self) -> [&str; 2] {
        [&self.job.tid, &self.worker]
    }

    fn name(&self) -> String {
        format!("h{}", self.host)
    }
}

/// The jobs of one virtual machine.
#[derive(Debug)]
pub struct Jobs<'a> {
    vm: &'a Vm<'a>,
    steps: PathBuf,
    members: Vec<Member>,
    turn: usize,
    engines: usize,
    /// When taskers or the resource manager were killed.
    killed: Vec<Instant>,
    /// How many were held so far, and how many of these were over before the fault came.
    held: usize,
    early: usize,
}

impl<'a> Jobs<'a> {
    /// Takes in all hosts of the testbed, which has an engine of its own, starts the jobs, and has a set made of each. `turn`: which
    /// places the first fault meets.
    ///
    /// # Errors
    /// They do not start, or cannot be written.
    pub fn start(vm: &'a Vm<'a>, turn: usize) -> Result<Jobs<'a>> {
        let bed = vm.bed();
        let steps = bed
            .steps()
            .context("a testbed whose daemons stand still")?
            .to_path_buf();
        vm.take_in(bed.hosts())?;
        vm.program("ring_job")?;
        let begun = (2..=HOSTS).map(|host| {
            (
                host,
                Job::start_small(vm, &format!("ring-h{host}"), &format!("h{host}")),
            )
        });
        let begun: Vec<(usize, Job)> = begun.collect();
        let mut members = Vec::new();
        for (host, job) in begun {
            job.go_on(vm, SOME);
            let tasks = vm.tasks()?;
            let here = format!("h{host}");
            let worker = tasks
                .into_iter()
                .find(|task| is_ring(task) && task.host.as_deref() == Some(&here));
            let worker = worker.with_context(|| format!("no worker on {here}"))?.tid;
            vm.json(&["checkpoint", "--every", SELDOM, &job.tid])?;
            members.push(Member {
                host,
                job,
                worker,
                runs: true,
                owes: false,
            });
        }
        let (engines, held, early, killed) = Default::default();
        Ok(Jobs {
            vm,
            steps,
            members,
            turn,
            engines,
            killed,
            held,
            early,
        })
    }

    /// The same jobs in the next virtual machine: all that ran in the last one has ended with it, and each is started from the
    /// newest set that is in the store. Nothing is left of those that were not complete.
    ///
    /// # Errors
    /// One cannot be started, or does not go on.
    pub fn start_again<'b>(mut self, vm: &'b Vm<'b>) -> Result<Jobs<'b>> {
        vm.take_in(vm.bed().hosts())?;
        self.members
            .iter_mut()
            .for_each(|member| member.runs = false);
        let Jobs {
            steps,
            members,
            turn,
            engines,
            killed,
            held,
            early,
            ..
        } = self;
        let mut jobs = Jobs {
            vm,
            steps,
            members,
            turn,
            engines,
            killed,
            held,
            early,
        };
        for job in 0..JOBS {
            jobs.begin_again(job)?;
        }
        jobs.all_go_on()?;
        jobs.nothing_is_left()?;
        Ok(jobs)
    }

    /// Engines that were met so far.
    pub fn engines(&self) -> usize {
        self.engines
    }

    /// Has a checkpoint made of one of them and has it started again, with nothing in the way: the places that the daemon comes
    /// to with each of the two.
    ///
    /// # Errors
    /// It fails.
    pub fn undisturbed(&mut self) -> Result<[(What, BTreeSet<Point>); 2]> {
        let member = &self.members[0];
        let passed = Passed::new(&self.steps, &member.worker)?;
        self.vm.json(&["checkpoint", &member.job.tid])?;
        let checkpoint = passed.take()?;
        self.end(&[0])?;
        self.begin_again(0)?;
        Ok([
            (What::Checkpoint, checkpoint),
            (What::Restart, passed.take()?),
        ])
    }

    /// The places for the next fault, in rounds.
    fn next(&mut self, share: Share) -> Vec<Vec<Spot>> {
        let rounds = share.rounds();
        self.turn += rounds;
        (self.turn - rounds..self.turn).map(some).collect()
    }

    /// Has one fault meet one party at those places whose turn it is, and judges what comes of it.
    ///
    /// # Panics
    /// It is not as it has to be; with all that the virtual machine has written.
    pub fn strike(&mut self, share: Share, whom: Whom, fault: Fault) {
        for round in self.next(share) {
            let works = |spot: &Spot| whom != Whom::Engine || has_engine(spot);
            let round: Vec<Spot> = round.into_iter().filter(works).collect();
            self.strike_each(&round, |_| whom, fault);
        }
    }

    /// The same with somebody else for each of the places.
    ///
    /// # Panics
    /// See there.
    pub fn strike_those(&mut self, share: Share, whom: &[Whom], fault: Fault) {
        for (number, round) in self.next(share).into_iter().enumerate() {
            self.strike_each(&round, |n| whom[(number + n) % whom.len()], fault);
        }
    }

    fn strike_each(&mut self, round: &[Spot], whom: impl Fn(usize) -> Whom, fault: Fault) {
        let whom: Vec<Whom> = (0..round.len()).map(whom).collect();
        self.may_die(&whom, fault).sure(self.vm);
        let begun = Instant::now();
        let done = self.hold(round).and_then(|(mut cells, from)| {
            let held = begun.elapsed();
            self.meet(&mut cells, &whom, fault)?;
            let struck = begun.elapsed();
            let said = self.judge(cells, &whom, fault, from)?;
            eprintln!(
                "{fault:?}, {whom:?}: held after {held:.1?}, struck {struck:.1?}, judged {:.1?}",
                begun.elapsed()
            );
            Ok(said)
        });
        match done {
            Ok(said) => round
                .iter()
                .zip(said)
                .for_each(|(spot, said)| eprintln!("  {spot:?}: {said}")),
            Err(error) => panic!(
                "{fault:?}, {whom:?}, {round:?}: {error:#}\n{}",
                self.vm.logs()
            ),
        }
    }

    /// Kills the master while those are held whose turn it is; nothing is left of the virtual machine then.
    ///
    /// # Errors
    /// They cannot be held, or something is left.
    pub fn kill_master(&mut self) -> Result<()> {
        let (mut cells, _) = self.hold(&some(self.turn))?;
        self.meet(&mut cells, &[Whom::Master], Fault::Kill)?;
        self.vm.is_gone(LONG)?;
        for host in self.vm.bed().hosts() {
            gone(host, "ring_job", LONG)?;
        }
        for Cell {
            spot,
            job,
            console,
            before,
            ..
        } in cells
        {
            console.finish(LONG)?;
            let new = self
                .sets(job)?
                .into_iter()
                .filter(|set| !before.contains(set))
                .count();
            ensure!(
                new <= usize::from(spot.0 == What::Checkpoint),
                "{new} new sets: {spot:?}"
            );
        }
        Ok(())
    }

    /// Starts what every struck checkpoint has left in the store, and has all jobs come to their end: it is right.
    ///
    /// # Panics
    /// It is not.
    pub fn finish(mut self) {
        let (held, early) = (self.held, self.early);
        assert!(
            early * 2 <= held,
            "{early} of {held} were over before the fault came"
        );
        let owing: Vec<usize> = (0..JOBS).filter(|job| self.members[*job].owes).collect();
        self.end(&owing).sure(self.vm);
        for job in owing {
            self.begin_again(job).sure(self.vm);
        }
        self.nothing_is_left().sure(self.vm);
        self.members
            .iter()
            .for_each(|member| member.job.finish(self.vm));
    }

    // ---- before

    /// Waits until all of these would be started again: nobody is who dies too often.
    fn may_die(&mut self, whom: &[Whom], fault: Fault) -> Result<()> {
        if fault != Fault::Kill
            || !whom
                .iter()
                .any(|whom| matches!(whom, Whom::Tasker | Whom::ResourceManager))
        {
            return Ok(());
        }
        let killed = &mut self.killed;
        eventually(LONG, || {
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

    /// Holds these at their places; and the number of the next event before that.
    fn hold(&mut self, round: &[Spot]) -> Result<(Vec<Cell>, u64)> {
        let jobs = self.share_out(round)?;
        let from = self.vm.events()?.last().map_or(0, |entry| entry.number + 1);
        let mut cells = Vec::new();
        let all: Vec<(Spot, usize)> = round.iter().copied().zip(jobs).collect();
        for (spot, job) in all {
            let before = self.sets(job)?;
            let member = &self.members[job];
            let name = member.name();
            match word(&spot) {
                Some(word) => {
                    has_lied(self.vm.bed(), &name);
                    lie(self.vm.bed(), &name, word);
                }
                None => {
                    // All others are as far as they can get while nobody counts.
                    self.hold_engines(&mut cells)?;
                }
            }
            let halt = if word(&spot).is_none() {
                Some(self.halt(spot, job)?)
            } else {
                None
            };
            let on = format!("h1,{name}");
            let member = &self.members[job];
            let newest = before.last().context("a set")?;
            let words = match spot.0 {
                What::Checkpoint => ["--json", "checkpoint", &member.job.tid].to_vec(),
                What::Restart => ["restart", newest, "--on", &on].to_vec(),
            };
            let console = self.vm.start_pvm(&words)?;
            let mut cell = Cell {
                spot,
                job,
                hold: None,
                console,
                before,
            };
            if let Some(halt) = halt {
                self.wait_for_daemon(&mut cell, &halt)?;
            }
            cells.push(cell);
        }
        self.hold_engines(&mut cells)?;
        for cell in &mut cells {
            self.hold_deeper(cell)?;
        }
        for cell in &mut cells {
            self.held += 1;
            // Its time was over, on a machine that has so much else to do.
            if let Some(status) = cell.console.poll()? {
                self.early += 1;
                let (out, err) = (cell.console.out_so_far()?, cell.console.err_so_far()?);
                eprintln!(
                    "{:?} was over before the fault came: {status} {out}{err}",
                    cell.spot
                );
            }
        }
        Ok((cells, from))
    }

    /// Which job serves for which place: those whose newest set was not started since a checkpoint of theirs was struck are
    /// started again first. Those that are to be started again have ended, all others are where they belong.
    fn share_out(&mut self, round: &[Spot]) -> Result<Vec<usize>> {
        ensure!(round.len() <= JOBS, "more places than jobs: {round:?}");
        let mut free: Vec<usize> = (0..JOBS).collect();
        free.sort_by_key(|job| !self.members[*job].owes);
        let restarts = round
            .iter()
            .filter(|(what, _)| *what == What::Restart)
            .count();
        let mut ended = free[..restarts].to_vec();
        let mut others = free[restarts..].to_vec();
        others.truncate(round.len() - restarts);
        let strays = self.strays()?;
        let astray = |job: &&usize| self.members[**job].owes || strays.contains(*job);
        let anew: Vec<usize> = others.iter().filter(astray).copied().collect();
        self.end(&[&ended[..], &anew[..]].concat())?;
        for job in anew {
            self.begin_again(job)?;
        }
        let jobs = round.iter().map(|(what, _)| {
            if *what == What::Restart {
                ended.remove(0)
            } else {
                others.remove(0)
            }
        });
        Ok(jobs.collect())
    }

    /// Running jobs whose tasks are not where they began.
    fn strays(&self) -> Result<Vec<usize>> {
        let tasks = self.vm.tasks()?;
        let is_on = |tid: &str, host: &str| {
            tasks
                .iter()
                .any(|task| task.tid == tid && task.host.as_deref() == Some(host))
        };
        let strays = |member: &Member| {
            !(is_on(&member.job.tid, "h1") && is_on(&member.worker, &member.name()))
        };
        Ok((0..JOBS)
            .filter(|job| self.members[*job].runs && strays(&self.members[*job]))
            .collect())
    }

    /// Ends these jobs.
    fn end(&mut self, jobs: &[usize]) -> Result<()> {
        let running: Vec<usize> = jobs
            .iter()
            .copied()
            .filter(|job| self.members[*job].runs)
            .collect();
        let tids: Vec<&str> = running
            .iter()
            .flat_map(|job| self.members[*job].tids())
            .collect();
        if tids.is_empty() {
            return Ok(());
        }
        self.vm.pvm(&[&["kill"], &tids[..]].concat())?;
        eventually(LONG, || {
            let left = self.vm.tasks().map_err(|error| error.to_string())?;
            let left: Vec<&Task> = left
                .iter()
                .filter(|task| tids.contains(&&*task.tid))
                .collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        })?;
        running
            .into_iter()
            .for_each(|job| self.members[job].runs = false);
        Ok(())
    }

    /// Starts the newest set of a job that does not run, where it belongs. It goes on.
    fn begin_again(&mut self, job: usize) -> Result<()> {
        let newest = self.sets(job)?.pop().context("a set")?;
        let member = &mut self.members[job];
        let on = format!("h1,{}", member.name());
        self.vm
            .pvm(&["restart", &newest, "--on", &on])?
            .expect_good("the newest set is started")?;
        (member.runs, member.owes) = (true, false);
        member.job.go_on(self.vm, SOME);
        member.job.is_right();
        Ok(())
    }

    /// Waits until it is there; none if the console has come to an end before.
    fn reach<T>(cell: &mut Cell, mut look: impl FnMut() -> Result<T, String>) -> Result<Option<T>> {
        eventually(LONG, || {
            let is_over = cell
                .console
                .poll()
                .map_err(|error| error.to_string())?
                .is_some();
            match look() {
                Ok(found) => Ok(Some(found)),
                Err(_) if is_over => Ok(None),
                Err(missing) => Err(format!("{:?}: {missing}", cell.spot)),
            }
        })
    }

    /// Waits for the engines that are to wait or to work.
    fn hold_engines(&self, cells: &mut [Cell]) -> Result<()> {
        let bed = self.vm.bed();
        for cell in cells.iter_mut().filter(|cell| cell.hold.is_none()) {
            let (name, host) = (
                self.members[cell.job].name(),
                bed.host(self.members[cell.job].host),
            );
            let called = Jobs::reach(cell, || match lies(bed, &name) {
                none if none.is_empty() => Err("no engine was called".to_string()),
                _ => Ok(Hold::Word),
            })?;
            cell.hold = called;
            if cell.hold.is_some() && cell.spot.1 == Place::EngineWorks {
                let stands = Jobs::reach(cell, || {
                    let mut engines = strikes::processes_of(host, Party::Engine).into_iter();
                    engines
                        .find(|pid| is_stopped(*pid))
                        .ok_or("no engine stands still".to_string())
                })?;
                cell.hold = stands.map(Hold::Process);
            }
        }
        Ok(())
    }

    /// Takes one that is held by its engine to the place behind that.
    fn hold_deeper(&self, cell: &mut Cell) -> Result<()> {
        let (bed, member) = (self.vm.bed(), &self.members[cell.job]);
        if !matches!(cell.hold, Some(Hold::Word)) {
            return Ok(());
        }
        match cell.spot.1 {
            Place::At(..) => {
                let halt = self.halt(cell.spot, cell.job)?;
                lie(bed, &member.name(), "");
                self.wait_for_daemon(cell, &halt)?;
            }
            Place::Sealing => {
                let path = self.store().join("lock");
                let lock = eventually(LONG, || {
                    let file = File::open(&path).map_err(|error| error.to_string())?;
                    Flock::lock(file, FlockArg::LockExclusiveNonblock)
                        .map_err(|(_, errno)| errno.to_string())
                })?;
                lie(bed, &member.name(), "");
                let draft = format!(".draft-{}-", member.job.tid);
                let whole = Jobs::reach(cell, || {
                    let drafts = names(&self.store())
                        .into_iter()
                        .filter(|name| name.starts_with(&draft));
                    let mut whole = drafts.map(|name| self.store().join(name).join("manifest"));
                    if whole.any(|path| path.exists()) {
                        Ok(())
                    } else {
                        Err("it is not being sealed".to_string())
                    }
                })?;
                cell.hold = whole.map(|()| Hold::Lock(lock));
            }
            Place::EngineWaits | Place::EngineWorks => {}
        }
        Ok(())
    }

    fn halt(&self, (_, place): Spot, job: usize) -> Result<Halt> {
        let Place::At(step, edge) = place else {
            bail!("no daemon stands still at {place:?}")
        };
        let point: Point = (step, edge);
        Halt::new(&self.steps, &self.members[job].worker, point)
    }

    fn wait_for_daemon(&self, cell: &mut Cell, halt: &Halt) -> Result<()> {
        let host = self.vm.bed().host(self.members[cell.job].host);
        let came = Jobs::reach(cell, || {
            halt.who_stands(&[host])?
                .ok_or("no daemon came there".to_string())
        })?;
        if came.is_none() {
            halt.give_up();
        }
        cell.hold = came.map(Hold::Process);
        Ok(())
    }

    // ---- the fault

    fn meet(&mut self, cells: &mut [Cell], whom: &[Whom], fault: Fault) -> Result<()> {
        let bed = self.vm.bed();
        let each = cells.iter().zip(whom.iter().cycle());
        let parties: Vec<(usize, Party)> = each
            .map(|(cell, whom)| whom.party(self.members[cell.job].host))
            .collect();
        let members = &self.members;
        let engines = strikes::strike(bed, &parties, &[], fault, |victims| {
            for cell in cells.iter_mut() {
                if word(&cell.spot).is_some() {
                    lie(bed, &members[cell.job].name(), "");
                }
                match cell.hold.take() {
                    Some(Hold::Process(pid)) if victims.contains(&pid) => {}
                    Some(Hold::Process(pid)) => {
                        let told = signal(pid, Signal::SIGCONT);
                        // An engine may have ended with its tasker.
                        if cell.spot.1 != Place::EngineWorks {
                            told?;
                        }
                    }
                    Some(Hold::Word | Hold::Lock(_)) | None => {}
                }
            }
            Ok(())
        })?;
        self.engines += engines;
        Ok(())
    }

    // ---- what comes of it

    /// Each checkpoint has become a set or nothing of it is there, and its job goes on; it has gone back to its newest set if it
    /// has lost a task, and only then. Each restart has begun all of its job or nothing, and then may be begun again. All tasks run
    /// once, nothing that they say is lost, and nothing is left behind.
    fn judge(
        &mut self,
        cells: Vec<Cell>,
        whom: &[Whom],
        fault: Fault,
        from: u64,
    ) -> Result<Vec<String>> {
        let mut said = Vec::new();
        for (cell, whom) in cells.into_iter().zip(whom) {
            let Cell {
                spot,
                job,
                console,
                before,
                ..
            } = cell;
            let done = console.finish(LONG)?;
            let what = format!(
                "{spot:?} of the job on h1 and h{}: {done:?}",
                self.members[job].host
            );
            let loss = whom.loss(fault);
            if loss == Loss::Nothing && !done.good() {
                let reasons = ["not done within", "was killed by signal 9"];
                let reasons = if (*whom, fault) == (Whom::Engine, Fault::Kill) {
                    &reasons[..]
                } else {
                    &reasons[..1]
                };
                ensure!(
                    reasons.iter().any(|reason| done.err.contains(reason)),
                    "no reason to fail: {what}"
                );
            }
            said.push(if done.good() {
                "good".to_string()
            } else {
                done.err.trim().to_string()
            });
            self.judge_one(spot.0, job, &done, &before, loss, from)
                .with_context(|| what)?;
        }
        self.vm.take_in(self.vm.bed().hosts())?;
        self.all_run_once()?;
        for job in (0..JOBS)
            .filter(|job| !self.members[*job].runs)
            .collect::<Vec<_>>()
        {
            self.begin_again(job)?;
        }
        self.all_go_on()?;
        self.nothing_is_left()?;
        Ok(said)
    }

    fn judge_one(
        &mut self,
        what: What,
        job: usize,
        done: &Done,
        before: &[String],
        loss: Loss,
        from: u64,
    ) -> Result<()> {
        let member = &self.members[job];
        if loss == Loss::Host {
            let name = member.name();
            self.event_from(from, "loss of its host", |kind| {
                matches!(kind, EventKind::HostGone { name: gone, .. } if *gone == name)
                    .then_some(())
            })?;
        }
        let old = before.last().context("a set")?;
        let is_new = |set: &String| !before.contains(set);
        if what == What::Restart {
            let new: Vec<String> = self.sets(job)?.into_iter().filter(is_new).collect();
            ensure!(new.is_empty(), "new sets: {new:?}");
            self.members[job].runs = done.good();
            return Ok(());
        }
        // One that was being sealed when the job went back may become whole, and goes then.
        let new = eventually(LONG, || {
            let sets = self.sets(job).map_err(|error| error.to_string())?;
            let new: Vec<String> = sets.into_iter().filter(is_new).collect();
            if new.len() == usize::from(done.good()) {
                Ok(new)
            } else {
                Err(format!("new sets: {new:?}"))
            }
        })?;
        self.members[job].owes = true;
        let member = &self.members[job];
        let went_back = |kind: &EventKind| match kind {
            EventKind::Restarted { set, job, .. } if job.to_string() == member.job.tid => {
                Some(set.clone())
            }
            _ => None,
        };
        if loss == Loss::Nothing {
            let events = self.vm.events_from(from)?;
            let back = events.iter().find_map(|entry| went_back(&entry.kind));
            ensure!(
                back.is_none(),
                "the job has lost nothing, and went back to {back:?}"
            );
            return Ok(());
        }
        let back = self.event_from(from, "job that goes back", went_back)?;
        let newest = if done.good() {
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

    /// Each task of each job that runs is there once, and no other one is there.
    fn all_run_once(&self) -> Result<()> {
        eventually(LONG, || {
            let tasks = self.vm.tasks().map_err(|error| error.to_string())?;
            let mut listed: Vec<(&str, bool)> = tasks
                .iter()
                .filter(|task| is_ring(task))
                .map(|task| (&*task.tid, task.moving))
                .collect();
            let running = self.members.iter().filter(|member| member.runs);
            let mut wanted: Vec<(&str, bool)> = running
                .flat_map(Member::tids)
                .map(|tid| (tid, false))
                .collect();
            listed.sort();
            wanted.sort();
            if listed != wanted {
                return Err(format!("{listed:?} are there, and not {wanted:?}"));
            }
            for host in self.vm.bed().hosts() {
                let processes = host
                    .processes()
                    .into_iter()
                    .filter(|(_, line)| line.contains("ring_job"));
                let processes: Vec<String> = processes
                    .map(|(pid, line)| format!("{pid} {line}"))
                    .collect();
                let here = tasks
                    .iter()
                    .filter(|task| is_ring(task) && task.host.as_deref() == Some(host.name()));
                if here.count() != processes.len() {
                    return Err(format!("{processes:?} on {}: {tasks:?}", host.name()));
                }
            }
            Ok(())
        })
    }

    /// The same, and the jobs go on and have done right so far.
    fn all_go_on(&self) -> Result<()> {
        self.all_run_once()?;
        for member in self.members.iter().filter(|member| member.runs) {
            member.job.go_on(self.vm, SOME);
            member.job.is_right();
        }
        Ok(())
    }

    /// No host has images, tokens or an engine, and the store has sets and no others.
    fn nothing_is_left(&self) -> Result<()> {
        eventually(LONG, || {
            let hidden = names(&self.store())
                .into_iter()
                .filter(|name| name.starts_with('.'));
            let mut left: Vec<String> = hidden.collect();
            for host in self.vm.bed().hosts() {
                left.extend(left_on(host));
                left.extend(
                    host.processes()
                        .into_iter()
                        .map(|(_, line)| line)
                        .filter(|line| liar::is_engine(line)),
                );
            }
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
        })
    }

    fn store(&self) -> PathBuf {
        self.vm.home().join(".local/state/sempa/checkpoints")
    }

    /// The complete sets of a job, oldest first.
    fn sets(&self, job: usize) -> Result<Vec<String>> {
        let begin = format!("{}-", self.members[job].job.tid);
        let sets: Vec<String> = names(&self.store())
            .into_iter()
            .filter(|name| name.starts_with(&begin))
            .collect();
        ensure!(!sets.is_empty(), "no set of {begin}");
        Ok(sets)
    }

    /// What `find` finds in an event from this one on.
    fn event_from<T>(
        &self,
        from: u64,
        what: &str,
        find: impl Fn(&EventKind) -> Option<T>,
    ) -> Result<T> {
        eventually(LONG, || {
            let events = self
                .vm
                .events_from(from)
                .map_err(|error| error.to_string())?;
            events
                .iter()
                .find_map(|entry| find(&entry.kind))
                .ok_or_else(|| format!("no {what}"))
        })
    }
}

/// A task of one of the jobs.
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
