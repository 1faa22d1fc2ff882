//! Injects faults at the steps of migrations, with real processes.
//!
//! A round holds several migrations at breakpoints, each between another pair of hosts. Then it
//! injects one fault and judges the outcome for every task.

use crate::faults::{self, Breakpoint, Fault, FaultTargets, Point, Role, StepEdge, edges, is_full};
use crate::faults::{leftovers, send_signal};
use crate::oracle::Oracle;
use crate::rng::seed;
use crate::run::{RunningCommand, wait_for};
use crate::testbed::Host;
use crate::vm::{EventEntry, Vm};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_proto::migration::Step;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time limit for a migration to reach a step, for a migration to end, and for the virtual machine
/// to notice a lost host.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of migrations that are held at the same time.
const HELD_MIGRATIONS_MAX: usize = 4;
/// Hosts of the testbed: the master's host, and two for each held migration.
pub const HOST_COUNT: usize = 1 + 2 * HELD_MIGRATIONS_MAX;

/// The process that a fault hits, by its role in the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// The daemon of the source.
    Source,
    /// The daemon of the target.
    Target,
    /// The daemon of the master.
    Master,
    /// The tasker of the source.
    SourceTasker,
    /// The tasker of the target.
    TargetTasker,
    ResourceManager,
    /// CRIU at the target, if it runs for the migration at that point. At the source CRIU runs only
    /// within a step, so no breakpoint can hit it there.
    TargetEngine,
}

impl Victim {
    fn host(self, held: &HeldMigration) -> usize {
        match self {
            Victim::Source | Victim::SourceTasker => held.source,
            Victim::Target | Victim::TargetTasker | Victim::TargetEngine => held.target,
            Victim::Master | Victim::ResourceManager => 1,
        }
    }

    fn role(self) -> Role {
        match self {
            Victim::Source | Victim::Target | Victim::Master => Role::Daemon,
            Victim::SourceTasker | Victim::TargetTasker => Role::Tasker,
            Victim::ResourceManager => Role::ResourceManager,
            Victim::TargetEngine => Role::Engine,
        }
    }
}

/// A point of a migration and the victim of the fault at that point.
pub type Case = (Point, Victim);

/// The cases that are tried for one fault. With [`is_full`] all cases are tried instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// Each step once: at one edge, with one victim.
    EachStep,
    /// Every third step, at one edge, with one victim.
    EachThirdStep,
}

/// Returns the steps of which several can be held at the same time. [`Step::PreCopy`] is included
/// only if `pre_copies`.
fn early_steps(pre_copies: bool) -> impl Iterator<Item = Step> {
    Step::ALL
        .into_iter()
        .filter(move |step| *step < Step::Commit && (pre_copies || *step != Step::PreCopy))
}

/// Returns the steps that are held one at a time. Each needs answers of all daemons, so no daemon
/// may be stopped for another migration.
fn late_steps() -> impl Iterator<Item = Step> {
    Step::ALL.into_iter().filter(|step| *step >= Step::Commit)
}

fn steps(pre_copies: bool) -> impl Iterator<Item = Step> {
    early_steps(pre_copies).chain(late_steps())
}

/// Distributes cases to rounds: up to [`HELD_MIGRATIONS_MAX`] cases with early steps in one round,
/// and one round for each case with a late step.
fn rounds(cases: impl IntoIterator<Item = Case>) -> Vec<Vec<Case>> {
    let (early, late): (Vec<Case>, Vec<Case>) = cases
        .into_iter()
        .partition(|((step, _), _)| *step < Step::Commit);
    let early = early.chunks(HELD_MIGRATIONS_MAX).map(<[Case]>::to_vec);
    early
        .chain(late.into_iter().map(|case| vec![case]))
        .collect()
}

/// Returns the cases of each victim at each point.
fn all_cases(victims: &[Victim], pre_copies: bool) -> Vec<Case> {
    victims
        .iter()
        .flat_map(|victim| edges(steps(pre_copies)).map(|point| (point, *victim)))
        .collect()
}

/// Returns the sample of one turn. Successive turns combine each step with all victims and both
/// edges.
fn sample(turn: usize, sampling: Sampling, victims: &[Victim], pre_copies: bool) -> Vec<Case> {
    let case = |(i, step): (usize, Step)| {
        let number = turn + i;
        let edge = StepEdge::from_parity(number / victims.len());
        ((step, edge), victims[number % victims.len()])
    };
    // If the choice of steps and the choice of victims rotated in step, some combinations would
    // never be tried.
    let is_chosen = |i: usize| match sampling {
        Sampling::EachStep => true,
        Sampling::EachThirdStep => (i + turn + turn / 3).is_multiple_of(3),
    };
    steps(pre_copies)
        .enumerate()
        .filter(|(i, _)| is_chosen(*i))
        .map(case)
        .collect()
}

/// Returns points for a test that needs each step at least once, grouped into rounds.
pub fn sampled_points(turn: usize) -> Vec<Vec<Point>> {
    let cases = if is_full() {
        all_cases(&[Victim::Source], false)
    } else {
        sample(turn, Sampling::EachStep, &[Victim::Source], false)
    };
    let points = |round: Vec<Case>| round.into_iter().map(|(point, _)| point).collect();
    rounds(cases).into_iter().map(points).collect()
}

/// A migration that is held at a breakpoint, or has ended since.
#[derive(Debug)]
pub struct HeldMigration {
    pub point: Point,
    /// The name by which the oracle knows the task.
    pub task_name: String,
    pub tid: String,
    /// Number of its source host.
    pub source: usize,
    /// Number of its target host.
    pub target: usize,
    breakpoint: Breakpoint,
    /// The daemon that is stopped at the breakpoint; `None` before the breakpoint is reached.
    stopped_daemon: Option<Pid>,
    console: Option<RunningCommand>,
    /// Output of the console; empty until the migration has ended.
    output: String,
}

/// Function that returns true if a fault on this victim at this point may end the task.
pub type MayBeLost = fn(Fault, Victim, Point) -> bool;

/// Injects faults into migrations on one virtual machine, and judges the outcomes.
#[derive(Debug)]
pub struct MigrationFaults<'a> {
    pub vm: &'a Vm<'a>,
    /// The director process that checks the tasks.
    pub oracle: Oracle,
    /// True if the migrations use pre-copy, so that [`Step::PreCopy`] is one of the steps.
    pub pre_copies: bool,
    may_be_lost: MayBeLost,
    breakpoints: PathBuf,
    /// Number of rounds that were held so far.
    round: usize,
    /// Selects the sample of the next fault; incremented by each fault.
    turn: usize,
    /// Number of engine processes that faults have hit so far.
    engines_hit: usize,
    /// Number of the first event of the current round.
    first_event: u64,
    /// Number of the host that is the source of all migrations; `None` if each migration has
    /// another source.
    fixed_source: Option<usize>,
}

impl<'a> MigrationFaults<'a> {
    /// Prepares faults on a virtual machine. Its testbed must have its own engine.
    pub fn new(vm: &'a Vm<'a>, may_be_lost: MayBeLost) -> Result<MigrationFaults<'a>> {
        MigrationFaults::with_oracle(vm, Oracle::start(vm)?, may_be_lost, None)
    }

    /// As [`MigrationFaults::new`], with another oracle. With `home`, all tasks migrate from this
    /// host, and only one migration at a time can be held.
    pub fn with_oracle(
        vm: &'a Vm<'a>,
        oracle: Oracle,
        may_be_lost: MayBeLost,
        home: Option<usize>,
    ) -> Result<MigrationFaults<'a>> {
        let breakpoints = vm
            .bed()
            .breakpoints_folder()
            .context("a testbed with breakpoints")?
            .to_path_buf();
        Ok(MigrationFaults {
            vm,
            oracle,
            pre_copies: false,
            may_be_lost,
            breakpoints,
            round: 0,
            turn: usize::try_from(seed())?,
            engines_hit: 0,
            first_event: 0,
            fixed_source: home,
        })
    }

    /// Returns the number of engine processes that faults have hit so far.
    pub fn engines(&self) -> usize {
        self.engines_hit
    }

    /// Injects one fault into a sample of migrations. With [`is_full`], injects the fault at every
    /// point and into each of these victims.
    pub fn run(&mut self, sampling: Sampling, victims: &[Victim], fault: Fault) {
        let cases = if is_full() {
            all_cases(victims, self.pre_copies)
        } else {
            sample(self.turn, sampling, victims, self.pre_copies)
        };
        self.turn += 1;
        let rounds = if self.fixed_source.is_some() {
            cases.into_iter().map(|case| vec![case]).collect()
        } else {
            rounds(cases)
        };
        for round in rounds {
            self.run_round(&round, fault);
        }
    }

    /// Injects one fault into all of these cases at the same time.
    ///
    /// # Panics
    /// As [`MigrationFaults::run`].
    pub fn run_round(&mut self, cases: &[Case], fault: Fault) {
        let points: Vec<Point> = cases.iter().map(|(point, _)| *point).collect();
        let victims: Vec<Victim> = cases.iter().map(|(_, victim)| *victim).collect();
        let begun = Instant::now();
        let done = self.hold(&points).and_then(|mut moves| {
            let held = begun.elapsed();
            self.inject(&mut moves, &victims, fault)?;
            let over = begun.elapsed();
            let may_be_lost = self.may_be_lost;
            let lost = cases
                .iter()
                .filter(|(point, victim)| may_be_lost(fault, *victim, *point))
                .map(|(point, _)| *point)
                .collect::<Vec<Point>>();
            let alive = self.judge(moves, |held| lost.contains(&held.point))?;
            Ok((alive, held, over))
        });
        match done {
            Ok((alive, held, over)) => eprintln!(
                "{fault:?}, {cases:?}: {alive} live on; held {held:.1?}, over {over:.1?}, judged {:.1?}",
                begun.elapsed()
            ),
            Err(error) => panic!("{fault:?}, {cases:?}: {error:#}\n{}", self.vm.logs()),
        }
    }

    /// Adds missing hosts, spawns a task for each point, and migrates each task until it is held at
    /// its point.
    ///
    /// # Errors
    /// A point is not reached.
    pub fn hold(&mut self, points: &[Point]) -> Result<Vec<HeldMigration>> {
        self.round += 1;
        ensure!(
            self.fixed_source.is_none() || points.len() == 1,
            "one move at a time from the same host: {points:?}"
        );
        // A daemon delays the second restart of a tasker, so the next round uses other hosts.
        let first = if points.len() == 1 {
            self.round % HELD_MIGRATIONS_MAX
        } else {
            0
        };
        let home = self.fixed_source;
        let pair = |i: usize| (home.unwrap_or(2 + 2 * (first + i)), 3 + 2 * (first + i));
        let hosts = self.vm.bed().hosts();
        let needed = (0..points.len()).flat_map(|i| <[usize; 2]>::from(pair(i)));
        let needed: Vec<&Host> = needed.map(|number| &hosts[number - 1]).collect();
        self.vm.add_missing(&needed)?;
        // A master that is stopped at a breakpoint cannot answer, so the events are read before the
        // migrations start.
        let events = self.vm.events()?;
        self.first_event = events.last().map_or(0, |entry| entry.number + 1);
        let named = |(i, (step, _)): (usize, &Point)| {
            (format!("h{}", pair(i).0), format!("r{}-{step}", self.round))
        };
        let names: Vec<(String, String)> = points.iter().enumerate().map(named).collect();
        let tids = self.oracle.spawn(&names)?;
        let mut moves = Vec::new();
        for (i, (tid, (_, name))) in tids.into_iter().zip(names).enumerate() {
            let (source, target) = pair(i);
            let breakpoint = Breakpoint::new(&self.breakpoints, &tid, points[i])?;
            let console = self.vm.start_migrate(&tid, &format!("h{target}"))?;
            moves.push(HeldMigration {
                point: points[i],
                task_name: name,
                tid,
                source,
                target,
                breakpoint,
                stopped_daemon: None,
                console: Some(console),
                output: String::new(),
            });
        }
        moves
            .iter_mut()
            .try_for_each(|held| self.wait_until_held(held))?;
        Ok(moves)
    }

    fn wait_until_held(&self, held: &mut HeldMigration) -> Result<()> {
        let hosts = [held.source, held.target, 1].map(|i| self.vm.bed().host(i));
        let pid = wait_for(STEP_TIMEOUT, || {
            held.breakpoint.stopped_daemon(&hosts)?.ok_or_else(|| {
                let console = held.console.as_mut();
                let ended = console.and_then(|console| console.poll().ok().flatten());
                format!("{} has not reached {:?}: {ended:?}", held.tid, held.point)
            })
        })?;
        held.stopped_daemon = Some(pid);
        Ok(())
    }

    /// Injects a fault into held migrations, with one victim each, and waits until the fault is
    /// over.
    pub fn inject(
        &mut self,
        moves: &mut [HeldMigration],
        victims: &[Victim],
        fault: Fault,
    ) -> Result<()> {
        let from = self.first_event;
        let each = || moves.iter().zip(victims);
        let targets = FaultTargets {
            roles: each()
                .map(|(held, victim)| (victim.host(held), victim.role()))
                .collect(),
            pairs: moves
                .iter()
                .map(|held| (held.source, held.target))
                .collect(),
        };
        let stopped: Vec<Pid> = moves
            .iter()
            .filter_map(|held| held.stopped_daemon)
            .collect();
        let resume = |hit: &[Pid]| {
            let others = stopped.iter().filter(|pid| !hit.contains(pid));
            others
                .into_iter()
                .try_for_each(|pid| send_signal(*pid, Signal::SIGCONT))
        };
        let (vm, bed, begun) = (self.vm, self.vm.bed(), Instant::now());
        let noticed = || {
            if victims.contains(&Victim::Master) {
                return slaves_have_ended(vm);
            }
            for (held, victim) in moves.iter_mut().zip(victims) {
                let is_host =
                    victim.role() == Role::Daemon && !matches!(fault, Fault::Partition(_));
                if is_host {
                    host_is_lost(vm, from, victim.host(held))?;
                } else if begun.elapsed() < beyond_leases() {
                    has_ended(held)?;
                }
            }
            Ok(())
        };
        self.engines_hit += faults::inject(bed, fault, &targets, resume, noticed)?;
        Ok(())
    }

    /// Resumes the daemons that are stopped for these migrations.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn resume(&self, moves: &[HeldMigration]) -> Result<()> {
        moves
            .iter()
            .filter_map(|held| held.stopped_daemon)
            .try_for_each(|pid| send_signal(pid, Signal::SIGCONT))
    }

    /// Waits for the end of all migrations of a round and judges them. Then ends the tasks. Returns
    /// the number of tasks that have survived. The checks are:
    ///
    /// - Each task runs once and exchanges messages. If `may_be_lost` allows it, the task may
    ///   instead have ended; then nothing of the task is left, and the oracle was notified.
    /// - No task has ever run twice, no message was lost, and the event log has the outcome.
    /// - After the end of the tasks, no files or processes of the migrations are left on any host.
    ///
    /// # Errors
    /// A migration had another outcome; the error describes the first one.
    pub fn judge(
        &mut self,
        moves: Vec<HeldMigration>,
        may_be_lost: impl Fn(&HeldMigration) -> bool,
    ) -> Result<usize> {
        let ended = self.wait_for_end(moves)?;
        self.judge_ended(ended, may_be_lost)
    }

    /// Waits for the end of all migrations of a round.
    ///
    /// # Errors
    /// A migration does not end.
    pub fn wait_for_end(&self, mut moves: Vec<HeldMigration>) -> Result<Vec<HeldMigration>> {
        for held in &mut moves {
            let console = held.console.take().context("a move")?;
            let done = console.finish(STEP_TIMEOUT)?;
            held.output = format!("{:?} {:?}", done.out, done.err);
        }
        Ok(moves)
    }

    /// As [`MigrationFaults::judge`], for migrations that have ended.
    ///
    /// # Errors
    /// As [`MigrationFaults::judge`].
    pub fn judge_ended(
        &mut self,
        moves: Vec<HeldMigration>,
        may_be_lost: impl Fn(&HeldMigration) -> bool,
    ) -> Result<usize> {
        let mut alive = Vec::new();
        for held in moves {
            let HeldMigration {
                point,
                task_name: name,
                tid,
                output,
                ..
            } = &held;
            let what = format!("held at {point:?}: {name} ({tid}), console: {output}");
            if self
                .judge_one(&held, may_be_lost(&held))
                .with_context(|| what)?
            {
                alive.push(held);
            }
        }
        for held in &alive {
            self.oracle.end_task(&held.tid)?;
            self.oracle.check_ran_once(&held.task_name)?;
        }
        self.check_nothing_is_left()?;
        Ok(alive.len())
    }

    /// Judges one migration. Returns true if its task has survived.
    fn judge_one(&mut self, held: &HeldMigration, may_be_lost: bool) -> Result<bool> {
        let (oracle, vm) = (&mut self.oracle, self.vm);
        let lives = wait_for(STEP_TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            let processes = oracle
                .process_counts()
                .get(&held.task_name)
                .copied()
                .unwrap_or(0);
            let notified = oracle.was_notified_of_end(&held.tid)?;
            let listed = tasks.iter().find(|task| task.tid == held.tid);
            match (listed, processes, notified) {
                (Some(task), 1, false) if !task.moving => Ok(true),
                (None, 0, true) if may_be_lost => Ok(false),
                other => Err(format!("listed, processes, notified: {other:?}")),
            }
        })?;
        if lives {
            self.oracle.wait_for_messages(&held.tid)?;
        }
        self.oracle.check_ran_once(&held.task_name)?;
        let account = self.oracle.account(&held.tid)?;
        ensure!(account.faults == 0, "{account:?}");
        self.check_end_is_logged(held, lives)?;
        Ok(lives)
    }

    /// Checks that the event log has the end of the migration and, if the task has not survived,
    /// the end of the task or of its host.
    fn check_end_is_logged(&self, held: &HeldMigration, lives: bool) -> Result<()> {
        let move_ended = |entry: &EventEntry| match &entry.kind {
            EventKind::Migrated { tid, .. } | EventKind::MigrationFailed { tid, .. } => {
                tid.to_string() == held.tid
            }
            _ => false,
        };
        self.vm
            .wait_for_event(STEP_TIMEOUT, "end of the move", move_ended)?;
        if lives {
            return Ok(());
        }
        let ends = [held.source, held.target].map(|i| self.vm.bed().host(i).name());
        let task_ended = |entry: &EventEntry| match &entry.kind {
            EventKind::TaskEnded { tid, .. } => tid.to_string() == held.tid,
            EventKind::HostGone { name, .. } => ends.contains(&name.as_str()),
            _ => false,
        };
        self.vm
            .wait_for_event(STEP_TIMEOUT, "end of the task, or of its host", task_ended)
            .map(drop)
    }

    /// Checks that no host has images, resume tokens or a process of a task.
    fn check_nothing_is_left(&self) -> Result<()> {
        wait_for(STEP_TIMEOUT, || {
            let here = self.vm.hosts().map_err(|error| error.to_string())?;
            let mut left: Vec<String> = self.oracle.process_counts().into_keys().collect();
            let hosts = self
                .vm
                .bed()
                .hosts()
                .iter()
                .filter(|host| here.iter().any(|name| name == host.name()));
            left.extend(hosts.flat_map(leftovers));
            if left.is_empty() {
                Ok(())
            } else {
                Err(left.join(", "))
            }
        })
    }

    /// Waits until no host has a process of the virtual machine or of its tasks.
    ///
    /// # Errors
    /// A process remains; the error names it.
    pub fn wait_until_all_ended(&self) -> Result<()> {
        self.vm.wait_until_gone(STEP_TIMEOUT)?;
        wait_for(STEP_TIMEOUT, || {
            let left = self.oracle.process_counts();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        })
    }
}

/// Returns a duration that exceeds two short leases. No migration waits longer for a process that
/// no lease guards.
fn beyond_leases() -> Duration {
    Duration::from_secs(if is_full() { 30 } else { 7 })
}

/// Succeeds if the console that migrates the task has ended.
fn has_ended(held: &mut HeldMigration) -> Result<(), String> {
    let console = held.console.as_mut().ok_or("no move")?;
    match console.poll() {
        Ok(Some(_)) => Ok(()),
        other => Err(format!("{} is still being moved: {other:?}", held.tid)),
    }
}

/// Succeeds if the master has lost the host since event number `from`.
fn host_is_lost(vm: &Vm<'_>, from: u64, host: usize) -> Result<(), String> {
    let name = vm.bed().host(host).name();
    let events = vm.events_from(from).map_err(|error| error.to_string())?;
    let is_it = |entry: &EventEntry| matches!(&entry.kind, EventKind::HostGone { name: gone, .. } if gone == name);
    if events.iter().any(is_it) {
        Ok(())
    } else {
        Err(format!("{name} is not lost"))
    }
}

/// Succeeds if all daemons except the master's have ended.
pub fn slaves_have_ended(vm: &Vm<'_>) -> Result<(), String> {
    let others = vm.bed().hosts()[1..].iter();
    match others
        .clone()
        .find(|host| faults::daemon_of(host).is_some())
    {
        Some(host) => Err(format!("{} has a daemon", host.name())),
        None => Ok(()),
    }
}

/// True while only the source has the whole task. The master may learn that the source is lost
/// before it learns that the target has the task.
pub fn only_source_has_task(point: Point) -> bool {
    point < (Step::Restore, StepEdge::After)
}

/// True before the commit. The master learns of the death of a tasker at once, even just before a
/// commit.
pub fn not_committed(point: Point) -> bool {
    point < (Step::Commit, StepEdge::After)
}

/// True if a fault may end a task whose memory is in its images.
pub fn may_be_lost(fault: Fault, victim: Victim, point: Point) -> bool {
    match (victim, fault) {
        _ if !fault.is_lasting() => false,
        (_, Fault::Partition(_)) => false,
        (Victim::Source, _) => only_source_has_task(point),
        (Victim::Target, _) => !not_committed(point),
        (Victim::SourceTasker, Fault::Kill) => not_committed(point),
        (Victim::TargetTasker, Fault::Kill) => !not_committed(point),
        _ => false,
    }
}

/// Returns the process of a host that is this victim; `None` if there is none.
pub fn process_of(host: &Host, victim: Victim) -> Option<Pid> {
    faults::processes_of(host, victim.role()).into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const VICTIMS: [Victim; 5] = [
        Victim::Source,
        Victim::Target,
        Victim::SourceTasker,
        Victim::TargetTasker,
        Victim::ResourceManager,
    ];

    fn all(pre_copies: bool, victims: &[Victim]) -> BTreeSet<Case> {
        all_cases(victims, pre_copies).into_iter().collect()
    }

    /// All rounds together have each case once, and each round has at most as many cases as the
    /// testbed has pairs of hosts.
    #[test]
    fn rounds_have_each_case_once_and_fit_on_the_testbed() {
        for pre_copies in [false, true] {
            let cases = all_cases(&VICTIMS, pre_copies);
            let rounds = rounds(cases.clone());
            assert_eq!(rounds.concat().len(), cases.len());
            let distinct: BTreeSet<Case> = rounds.concat().into_iter().collect();
            assert_eq!(distinct, all(pre_copies, &VICTIMS));
            assert!(
                rounds
                    .iter()
                    .all(|round| round.len() <= HELD_MIGRATIONS_MAX)
            );
        }
    }

    #[test]
    fn a_sample_has_each_step_once() {
        for turn in 0..20 {
            let sample = sample(turn, Sampling::EachStep, &VICTIMS, true);
            let tried: Vec<Step> = sample.iter().map(|((step, _), _)| *step).collect();
            assert_eq!(tried, Step::ALL);
        }
    }

    /// Successive turns combine each step with each victim at both edges, whatever the first turn
    /// is.
    #[test]
    fn successive_samples_cover_all_cases() {
        let cases = [(Sampling::EachStep, 1), (Sampling::EachThirdStep, 9)];
        for (sampling, longer) in cases {
            for count in 1..=VICTIMS.len() {
                let victims = &VICTIMS[..count];
                for begin in [0, 7, 20_000] {
                    let turns = begin..begin + 2 * count * longer;
                    let tried: BTreeSet<Case> = turns
                        .flat_map(|turn| sample(turn, sampling, victims, false))
                        .collect();
                    assert_eq!(tried, all(false, victims), "{sampling:?}, {count} victims");
                }
            }
        }
    }
}
