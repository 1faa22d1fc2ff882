//! Injects faults at the steps of migrations, with real processes.
//!
//! A round holds several migrations at breakpoints, each between another pair of hosts. Then it
//! injects one fault and checks the outcome for every task.

use crate::faults::{
    self, Breakpoint, Fault, FaultTargets, Point, ProcessRole, StepEdge, points_of_steps,
    tests_all_cases,
};
use crate::faults::{leftover_names, send_signal};
use crate::oracle::Oracle;
use crate::rng::print_seed;
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

/// Time limit for each wait: for a migration to reach a step, for a migration to end, and for the
/// virtual machine to detect a lost host.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of migrations that are held at the same time.
const HELD_MIGRATIONS_MAX: usize = 4;
/// Number of hosts of the testbed: the master's host, and two for each held migration.
pub const HOST_COUNT: usize = 1 + 2 * HELD_MIGRATIONS_MAX;

/// The process that a fault hits, by its role in the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Victim {
    /// The daemon of the source.
    SourceDaemon,
    /// The daemon of the target.
    TargetDaemon,
    /// The daemon of the master.
    MasterDaemon,
    /// The tasker of the source.
    SourceTasker,
    /// The tasker of the target.
    TargetTasker,
    ResourceManager,
    /// CRIU at the target, if it runs for the migration at the point of the fault. At the source
    /// CRIU runs only within a step, so no breakpoint can stop it.
    TargetEngine,
}

impl Victim {
    fn host_number(self, migration: &HeldMigration) -> usize {
        match self {
            Self::SourceDaemon | Self::SourceTasker => migration.source_host,
            Self::TargetDaemon | Self::TargetTasker | Self::TargetEngine => migration.target_host,
            Self::MasterDaemon | Self::ResourceManager => 1,
        }
    }

    fn process_role(self) -> ProcessRole {
        match self {
            Self::SourceDaemon | Self::TargetDaemon | Self::MasterDaemon => ProcessRole::Daemon,
            Self::SourceTasker | Self::TargetTasker => ProcessRole::Tasker,
            Self::ResourceManager => ProcessRole::ResourceManager,
            Self::TargetEngine => ProcessRole::Engine,
        }
    }
}

/// A point of a migration and the victim of the fault at that point.
pub type FaultCase = (Point, Victim);

/// The sample of cases that are tried for one fault. If [`tests_all_cases`] is true, all cases are
/// tried instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepSample {
    /// Each step once, at one of its edges, with one victim.
    EachStep,
    /// Every third step once, at one of its edges, with one victim.
    EachThirdStep,
}

/// Returns the steps at which several migrations can be held at the same time. [`Step::PreCopy`] is
/// included only if `uses_pre_copy` is true.
fn early_steps(uses_pre_copy: bool) -> impl Iterator<Item = Step> {
    Step::ALL
        .into_iter()
        .filter(move |step| *step < Step::Commit && (uses_pre_copy || *step != Step::PreCopy))
}

/// Returns the steps at which only one migration at a time is held. Each of these steps needs
/// answers of all daemons, so no daemon may be stopped for another migration.
fn late_steps() -> impl Iterator<Item = Step> {
    Step::ALL.into_iter().filter(|step| *step >= Step::Commit)
}

fn all_steps(uses_pre_copy: bool) -> impl Iterator<Item = Step> {
    early_steps(uses_pre_copy).chain(late_steps())
}

/// Distributes cases to rounds: up to [`HELD_MIGRATIONS_MAX`] cases with early steps in one round,
/// and one round for each case with a late step.
fn group_into_rounds(cases: impl IntoIterator<Item = FaultCase>) -> Vec<Vec<FaultCase>> {
    let (early_cases, late_cases): (Vec<FaultCase>, Vec<FaultCase>) = cases
        .into_iter()
        .partition(|((step, _), _)| *step < Step::Commit);
    let early_cases = early_cases
        .chunks(HELD_MIGRATIONS_MAX)
        .map(<[FaultCase]>::to_vec);
    early_cases
        .chain(late_cases.into_iter().map(|case| vec![case]))
        .collect()
}

/// Returns the cases of each victim at each point.
fn all_cases(victims: &[Victim], uses_pre_copy: bool) -> Vec<FaultCase> {
    victims
        .iter()
        .flat_map(|victim| points_of_steps(all_steps(uses_pre_copy)).map(|point| (point, *victim)))
        .collect()
}

/// Returns the sample with the number `sample_number`. Successive samples combine each step with
/// all victims and both edges.
fn sample_cases(
    sample_number: usize,
    step_sample: StepSample,
    victims: &[Victim],
    uses_pre_copy: bool,
) -> Vec<FaultCase> {
    let case_of_step = |(i, step): (usize, Step)| {
        let case_number = sample_number + i;
        let edge = StepEdge::from_parity(case_number / victims.len());
        ((step, edge), victims[case_number % victims.len()])
    };
    // If the choice of steps and the choice of victims had the same period, some combinations would
    // never be tried.
    let is_chosen = |i: usize| match step_sample {
        StepSample::EachStep => true,
        StepSample::EachThirdStep => (i + sample_number + sample_number / 3).is_multiple_of(3),
    };
    all_steps(uses_pre_copy)
        .enumerate()
        .filter(|(i, _)| is_chosen(*i))
        .map(case_of_step)
        .collect()
}

/// Returns points for a test that needs each step at least once, grouped into rounds.
/// `sample_number` selects the sample.
pub fn sampled_points(sample_number: usize) -> Vec<Vec<Point>> {
    let cases = if tests_all_cases() {
        all_cases(&[Victim::SourceDaemon], false)
    } else {
        sample_cases(
            sample_number,
            StepSample::EachStep,
            &[Victim::SourceDaemon],
            false,
        )
    };
    let points_of_round =
        |round: Vec<FaultCase>| round.into_iter().map(|(point, _)| point).collect();
    group_into_rounds(cases)
        .into_iter()
        .map(points_of_round)
        .collect()
}

/// A migration that a breakpoint holds, or that has ended after a fault.
#[derive(Debug)]
pub struct HeldMigration {
    pub point: Point,
    /// The task's name in the oracle.
    pub task_name: String,
    pub tid: String,
    /// Number of the migration's source host.
    pub source_host: usize,
    /// Number of the migration's target host.
    pub target_host: usize,
    breakpoint: Breakpoint,
    /// The daemon that is stopped at the breakpoint; `None` before the breakpoint is reached.
    stopped_daemon: Option<Pid>,
    console: Option<RunningCommand>,
    /// Output of the console; empty until the migration has ended.
    console_output: String,
}

/// Function that returns true if this fault on this victim at this point may end the task.
pub type LossPredicate = fn(Fault, Victim, Point) -> bool;

/// Injects faults into migrations on one virtual machine, and checks the outcomes.
#[derive(Debug)]
pub struct MigrationFaults<'a> {
    pub vm: &'a Vm<'a>,
    /// The director process that checks the tasks.
    pub oracle: Oracle,
    /// True if the migrations use pre-copy, so that [`Step::PreCopy`] is one of the steps.
    pub uses_pre_copy: bool,
    task_may_be_lost: LossPredicate,
    breakpoints_folder: PathBuf,
    /// Number of rounds so far, including the current round.
    round_count: usize,
    /// Number of the sample for the next fault; incremented by each fault.
    sample_number: usize,
    /// Number of engine processes into which faults were injected so far.
    engine_hit_count: usize,
    /// Number of the first event of the current round.
    first_event: u64,
    /// Number of the host that is the source of all migrations; `None` if each migration in a round
    /// has another source.
    fixed_source: Option<usize>,
}

impl<'a> MigrationFaults<'a> {
    /// Prepares faults on a virtual machine. Its testbed must have been made by
    /// [`crate::testbed::Testbed::with_own_engine`].
    pub fn new(vm: &'a Vm<'a>, task_may_be_lost: LossPredicate) -> Result<Self> {
        MigrationFaults::with_oracle(vm, Oracle::start(vm)?, task_may_be_lost, None)
    }

    /// As [`MigrationFaults::new`], with the given oracle. If `fixed_source` is a host number, all
    /// tasks migrate from this host, and only one migration at a time can be held.
    pub fn with_oracle(
        vm: &'a Vm<'a>,
        oracle: Oracle,
        task_may_be_lost: LossPredicate,
        fixed_source: Option<usize>,
    ) -> Result<Self> {
        let breakpoint_folder = vm
            .testbed()
            .breakpoints_folder()
            .context("a testbed with breakpoints")?
            .to_path_buf();
        Ok(MigrationFaults {
            vm,
            oracle,
            uses_pre_copy: false,
            task_may_be_lost,
            breakpoints_folder: breakpoint_folder,
            round_count: 0,
            sample_number: usize::try_from(print_seed())?,
            engine_hit_count: 0,
            first_event: 0,
            fixed_source,
        })
    }

    /// Returns the number of engine processes into which faults were injected so far.
    pub fn engine_hit_count(&self) -> usize {
        self.engine_hit_count
    }

    /// Injects one fault into a sample of migrations. If [`tests_all_cases`] is true, injects the
    /// fault at every point and into each of these victims.
    ///
    /// # Panics
    /// An outcome is wrong.
    pub fn inject_sample(&mut self, step_sample: StepSample, victims: &[Victim], fault: Fault) {
        let cases = if tests_all_cases() {
            all_cases(victims, self.uses_pre_copy)
        } else {
            sample_cases(self.sample_number, step_sample, victims, self.uses_pre_copy)
        };
        self.sample_number += 1;
        let rounds = if self.fixed_source.is_some() {
            cases.into_iter().map(|case| vec![case]).collect()
        } else {
            group_into_rounds(cases)
        };
        for round in rounds {
            self.inject_and_check_round(&round, fault);
        }
    }

    /// Holds one migration for each case and injects the fault into all of them at the same time.
    /// Checks the outcomes.
    ///
    /// # Panics
    /// As [`MigrationFaults::inject_sample`].
    pub fn inject_and_check_round(&mut self, cases: &[FaultCase], fault: Fault) {
        let points: Vec<Point> = cases.iter().map(|(point, _)| *point).collect();
        let victims: Vec<Victim> = cases.iter().map(|(_, victim)| *victim).collect();
        let started_at = Instant::now();
        let result = self
            .start_and_hold(&points)
            .and_then(|mut held_migrations| {
                let hold_time = started_at.elapsed();
                self.inject_and_wait(&mut held_migrations, &victims, fault)?;
                let fault_time = started_at.elapsed();
                let task_may_be_lost = self.task_may_be_lost;
                let losable_points = cases
                    .iter()
                    .filter(|(point, victim)| task_may_be_lost(fault, *victim, *point))
                    .map(|(point, _)| *point)
                    .collect::<Vec<Point>>();
                let survivor_count = self.wait_and_check(held_migrations, |hold_time| {
                    losable_points.contains(&hold_time.point)
                })?;
                Ok((survivor_count, hold_time, fault_time))
            });
        match result {
            Ok((survivor_count, hold_time, fault_time)) => eprintln!(
                "{fault:?}, {cases:?}: {survivor_count} live on; held {hold_time:.1?}, over {fault_time:.1?}, judged {:.1?}",
                started_at.elapsed()
            ),
            Err(error) => panic!(
                "{fault:?}, {cases:?}: {error:#}\n{}",
                self.vm.events_and_logs()
            ),
        }
    }

    /// Adds missing hosts, spawns a task for each point, and migrates each task until it is held at
    /// its point.
    ///
    /// # Errors
    /// A point is not reached.
    pub fn start_and_hold(&mut self, points: &[Point]) -> Result<Vec<HeldMigration>> {
        self.round_count += 1;
        ensure!(
            self.fixed_source.is_none() || points.len() == 1,
            "one move at a time from the same host: {points:?}"
        );
        // A daemon delays the second restart of its tasker, so the next round with a single
        // migration uses other hosts.
        let first_pair = if points.len() == 1 {
            self.round_count % HELD_MIGRATIONS_MAX
        } else {
            0
        };
        let fixed_source = self.fixed_source;
        let source_and_target = |i: usize| {
            (
                fixed_source.unwrap_or(2 + 2 * (first_pair + i)),
                3 + 2 * (first_pair + i),
            )
        };
        let hosts = self.vm.testbed().hosts();
        let needed_hosts = (0..points.len()).flat_map(|i| <[usize; 2]>::from(source_and_target(i)));
        let needed_hosts: Vec<&Host> = needed_hosts
            .map(|host_number| &hosts[host_number - 1])
            .collect();
        self.vm.add_missing_hosts(&needed_hosts)?;
        // A master that is stopped at a breakpoint cannot answer, so the events are read before the
        // migrations start.
        let events = self.vm.events()?;
        self.first_event = events.last().map_or(0, |entry| entry.number + 1);
        let host_and_name = |(i, (step, _)): (usize, &Point)| {
            (
                format!("h{}", source_and_target(i).0),
                format!("r{}-{step}", self.round_count),
            )
        };
        let names: Vec<(String, String)> = points.iter().enumerate().map(host_and_name).collect();
        let tids = self.oracle.spawn_and_wait(&names)?;
        for (i, tid) in tids.iter().enumerate() {
            // After a fault the taskers may still be trying their engines.
            let target = format!("h{}", source_and_target(i).1);
            self.vm.wait_until_migratable(tid, &target, WAIT_TIMEOUT)?;
        }
        let mut held_migrations = Vec::new();
        for (i, (tid, (_, name))) in tids.into_iter().zip(names).enumerate() {
            let (source, target) = source_and_target(i);
            let breakpoint = Breakpoint::new(&self.breakpoints_folder, &tid, points[i])?;
            let console = self.vm.start_migration(&tid, &format!("h{target}"))?;
            held_migrations.push(HeldMigration {
                point: points[i],
                task_name: name,
                tid,
                source_host: source,
                target_host: target,
                breakpoint,
                stopped_daemon: None,
                console: Some(console),
                console_output: String::new(),
            });
        }
        held_migrations
            .iter_mut()
            .try_for_each(|migration| self.wait_until_held(migration))?;
        Ok(held_migrations)
    }

    fn wait_until_held(&self, migration: &mut HeldMigration) -> Result<()> {
        let hosts =
            [migration.source_host, migration.target_host, 1].map(|i| self.vm.testbed().host(i));
        let pid = wait_for(WAIT_TIMEOUT, || {
            migration.breakpoint.stopped_daemon(&hosts)?.ok_or_else(|| {
                let console = migration.console.as_mut();
                let console_status =
                    console.and_then(|console| console.poll_status().ok().flatten());
                format!(
                    "{} has not reached {:?}: {console_status:?}",
                    migration.tid, migration.point
                )
            })
        })?;
        migration.stopped_daemon = Some(pid);
        Ok(())
    }

    /// Injects a fault into one victim of each held migration, and waits until the fault is over.
    pub fn inject_and_wait(
        &mut self,
        held_migrations: &mut [HeldMigration],
        victims: &[Victim],
        fault: Fault,
    ) -> Result<()> {
        let first_event = self.first_event;
        let migrations_and_victims = || held_migrations.iter().zip(victims);
        let targets = FaultTargets {
            hosts_and_roles: migrations_and_victims()
                .map(|(migration, victim)| (victim.host_number(migration), victim.process_role()))
                .collect(),
            host_pairs: held_migrations
                .iter()
                .map(|migration| (migration.source_host, migration.target_host))
                .collect(),
        };
        let stopped_daemons: Vec<Pid> = held_migrations
            .iter()
            .filter_map(|migration| migration.stopped_daemon)
            .collect();
        let resume_others = |victim_pids: &[Pid]| {
            let other_daemons = stopped_daemons
                .iter()
                .filter(|pid| !victim_pids.contains(pid));
            other_daemons
                .into_iter()
                .try_for_each(|pid| send_signal(*pid, Signal::SIGCONT))
        };
        let (vm, testbed, started_at) = (self.vm, self.vm.testbed(), Instant::now());
        let check_loss_handled = || {
            if victims.contains(&Victim::MasterDaemon) {
                return check_slaves_ended(vm);
            }
            for (migration, victim) in held_migrations.iter_mut().zip(victims) {
                let loses_host = victim.process_role() == ProcessRole::Daemon
                    && !matches!(fault, Fault::Partition(_));
                if loses_host {
                    check_host_lost(vm, first_event, victim.host_number(migration))?;
                } else if started_at.elapsed() < leaseless_fault_time() {
                    check_console_ended(migration)?;
                }
            }
            Ok(())
        };
        self.engine_hit_count +=
            faults::inject_and_wait(testbed, fault, &targets, resume_others, check_loss_handled)?;
        Ok(())
    }

    /// Resumes the daemons that breakpoints have stopped for these migrations.
    ///
    /// # Errors
    /// The kernel refuses the signal.
    pub fn resume_daemons(&self, held_migrations: &[HeldMigration]) -> Result<()> {
        held_migrations
            .iter()
            .filter_map(|migration| migration.stopped_daemon)
            .try_for_each(|pid| send_signal(pid, Signal::SIGCONT))
    }

    /// Waits for the end of all migrations of a round and checks their outcomes. Then ends the
    /// tasks. Returns the number of tasks that have survived. The checks are:
    ///
    /// - Each task runs once and exchanges messages. If `task_may_be_lost` allows it, the task may
    ///   instead have ended; in that case no process of the task remains, and the oracle was
    ///   notified.
    /// - No task has ever run twice, no message was lost, and the event log contains the outcome.
    /// - After the end of the tasks, no files or processes of the migrations remain on any host.
    ///
    /// # Errors
    /// A migration had another outcome; the error describes the first such migration.
    pub fn wait_and_check(
        &mut self,
        held_migrations: Vec<HeldMigration>,
        task_may_be_lost: impl Fn(&HeldMigration) -> bool,
    ) -> Result<usize> {
        let ended_migrations = self.wait_for_migration_ends(held_migrations)?;
        self.check_ended_migrations(ended_migrations, task_may_be_lost)
    }

    /// Waits for the end of all migrations of a round. Returns the migrations with the output of
    /// their consoles.
    ///
    /// # Errors
    /// A migration does not end.
    pub fn wait_for_migration_ends(
        &self,
        mut migrations: Vec<HeldMigration>,
    ) -> Result<Vec<HeldMigration>> {
        for migration in &mut migrations {
            let console = migration.console.take().context("a move")?;
            let result = console.wait_or_kill(WAIT_TIMEOUT)?;
            migration.console_output = format!("{:?} {:?}", result.stdout, result.stderr);
        }
        Ok(migrations)
    }

    /// As [`MigrationFaults::wait_and_check`], for migrations that have already ended.
    ///
    /// # Errors
    /// As [`MigrationFaults::wait_and_check`].
    pub fn check_ended_migrations(
        &mut self,
        ended_migrations: Vec<HeldMigration>,
        task_may_be_lost: impl Fn(&HeldMigration) -> bool,
    ) -> Result<usize> {
        let mut survivors = Vec::new();
        for migration in ended_migrations {
            let HeldMigration {
                point,
                task_name: name,
                tid,
                console_output: output,
                ..
            } = &migration;
            let description = format!("held at {point:?}: {name} ({tid}), console: {output}");
            if self
                .check_migration(&migration, task_may_be_lost(&migration))
                .with_context(|| description)?
            {
                survivors.push(migration);
            }
        }
        for migration in &survivors {
            self.oracle.end_task_and_wait(&migration.tid)?;
            self.oracle.check_ran_once(&migration.task_name)?;
        }
        self.check_nothing_remains()?;
        Ok(survivors.len())
    }

    /// Checks that the task runs exactly once and that no message was lost. If `task_may_be_lost`
    /// is true, the task may instead have ended; then the oracle must have been notified of the
    /// end. Also checks the event log. Returns true if the task has survived.
    fn check_migration(
        &mut self,
        migration: &HeldMigration,
        task_may_be_lost: bool,
    ) -> Result<bool> {
        let (oracle, vm) = (&mut self.oracle, self.vm);
        let has_survived = wait_for(WAIT_TIMEOUT, || {
            let tasks = vm.tasks().map_err(|error| error.to_string())?;
            let process_count = oracle
                .process_counts()
                .get(&migration.task_name)
                .copied()
                .unwrap_or(0);
            let was_notified = oracle.was_notified_of_end(&migration.tid)?;
            let listed_task = tasks.iter().find(|task| task.tid == migration.tid);
            match (listed_task, process_count, was_notified) {
                (Some(task), 1, false) if !task.moving => Ok(true),
                (None, 0, true) if task_may_be_lost => Ok(false),
                other => Err(format!("listed, processes, notified: {other:?}")),
            }
        })?;
        if has_survived {
            self.oracle.wait_for_messages(&migration.tid)?;
        }
        self.oracle.check_ran_once(&migration.task_name)?;
        let report = self.oracle.request_message_counts(&migration.tid)?;
        ensure!(report.fault_count == 0, "{report:?}");
        self.check_end_is_logged(migration, has_survived)?;
        Ok(has_survived)
    }

    /// Checks that the event log contains the end of the migration. If the task has not survived,
    /// the event log must also contain the end of the task or of its host.
    fn check_end_is_logged(&self, migration: &HeldMigration, has_survived: bool) -> Result<()> {
        let is_migration_end = |entry: &EventEntry| match &entry.kind {
            EventKind::Migrated { tid, .. } | EventKind::MigrationFailed { tid, .. } => {
                tid.to_string() == migration.tid
            }
            _ => false,
        };
        self.vm
            .wait_for_event(WAIT_TIMEOUT, "end of the move", is_migration_end)?;
        if has_survived {
            return Ok(());
        }
        let host_names = [migration.source_host, migration.target_host]
            .map(|i| self.vm.testbed().host(i).name());
        let is_task_end = |entry: &EventEntry| match &entry.kind {
            EventKind::TaskEnded { tid, .. } => tid.to_string() == migration.tid,
            EventKind::HostGone { name, .. } => host_names.contains(&name.as_str()),
            _ => false,
        };
        self.vm
            .wait_for_event(WAIT_TIMEOUT, "end of the task, or of its host", is_task_end)
            .map(drop)
    }

    /// Checks that no host of the virtual machine has images or resume tokens, and that no task of
    /// the oracle has a process on any host.
    fn check_nothing_remains(&self) -> Result<()> {
        wait_for(WAIT_TIMEOUT, || {
            let member_names = self.vm.host_names().map_err(|error| error.to_string())?;
            let mut remains: Vec<String> = self.oracle.process_counts().into_keys().collect();
            let hosts = self
                .vm
                .testbed()
                .hosts()
                .iter()
                .filter(|host| member_names.iter().any(|name| name == host.name()));
            remains.extend(hosts.flat_map(leftover_names));
            if remains.is_empty() {
                Ok(())
            } else {
                Err(remains.join(", "))
            }
        })
    }

    /// Waits until no host has a process of the virtual machine or of its tasks.
    ///
    /// # Errors
    /// A process remains; the error identifies it.
    pub fn wait_until_all_ended(&self) -> Result<()> {
        self.vm.wait_until_ended(WAIT_TIMEOUT)?;
        wait_for(WAIT_TIMEOUT, || {
            let process_counts = self.oracle.process_counts();
            if process_counts.is_empty() {
                Ok(())
            } else {
                Err(format!("{process_counts:?}"))
            }
        })
    }
}

/// Returns a duration of more than two short leases. A fault in a process without a lease, for
/// example a tasker, ends at the latest after this duration, even if the migration still waits for
/// the process.
fn leaseless_fault_time() -> Duration {
    Duration::from_secs(if tests_all_cases() { 30 } else { 13 })
}

/// Succeeds if the console that migrates the task has ended.
fn check_console_ended(migration: &mut HeldMigration) -> Result<(), String> {
    let console = migration.console.as_mut().ok_or("no move")?;
    match console.poll_status() {
        Ok(Some(_)) => Ok(()),
        other => Err(format!("{} is still being moved: {other:?}", migration.tid)),
    }
}

/// Succeeds if the event log contains the loss of the host, as event number `first_event` or later.
fn check_host_lost(vm: &Vm<'_>, first_event: u64, host: usize) -> Result<(), String> {
    let name = vm.testbed().host(host).name();
    let events = vm
        .events_from(first_event)
        .map_err(|error| error.to_string())?;
    let is_loss = |entry: &EventEntry| matches!(&entry.kind, EventKind::HostGone { name: lost_name, .. } if lost_name == name);
    if events.iter().any(is_loss) {
        Ok(())
    } else {
        Err(format!("{name} is not lost"))
    }
}

/// Succeeds if all daemons except the master's have ended.
pub fn check_slaves_ended(vm: &Vm<'_>) -> Result<(), String> {
    let slave_hosts = vm.testbed().hosts()[1..].iter();
    match slave_hosts
        .clone()
        .find(|host| faults::daemon_pid(host).is_some())
    {
        Some(host) => Err(format!("{} has a daemon", host.name())),
        None => Ok(()),
    }
}

/// True before the end of the restore step, while only the source has the complete task. The master
/// may detect the loss of the source before it receives the target's report of the restored task.
pub fn is_before_restore_end(point: Point) -> bool {
    point < (Step::Restore, StepEdge::After)
}

/// True before the end of the commit step. Before this end the death of the source's tasker may end
/// the task; afterwards the loss of the target or the death of the target's tasker may end it. The
/// master receives the report of a tasker's death at once, even just before a commit.
pub fn is_before_commit(point: Point) -> bool {
    point < (Step::Commit, StepEdge::After)
}

/// True if `fault` on `victim` at `point` may end the task. Valid for migrations without post-copy,
/// in which the images contain the complete memory of the task.
pub fn task_may_be_lost(fault: Fault, victim: Victim, point: Point) -> bool {
    match (victim, fault) {
        _ if !fault.exceeds_lease() => false,
        (_, Fault::Partition(_)) => false,
        (Victim::SourceDaemon, _) => is_before_restore_end(point),
        (Victim::TargetDaemon, _) => !is_before_commit(point),
        (Victim::SourceTasker, Fault::Kill) => is_before_commit(point),
        (Victim::TargetTasker, Fault::Kill) => !is_before_commit(point),
        _ => false,
    }
}

/// Returns the process on `host` with the victim's role; `None` if there is none.
pub fn victim_process(host: &Host, victim: Victim) -> Option<Pid> {
    faults::role_processes(host, victim.process_role())
        .into_iter()
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const VICTIMS: [Victim; 5] = [
        Victim::SourceDaemon,
        Victim::TargetDaemon,
        Victim::SourceTasker,
        Victim::TargetTasker,
        Victim::ResourceManager,
    ];

    fn case_set(uses_pre_copy: bool, victims: &[Victim]) -> BTreeSet<FaultCase> {
        all_cases(victims, uses_pre_copy).into_iter().collect()
    }

    /// All rounds together contain each case once. Each round has at most as many cases as the
    /// testbed has pairs of hosts.
    #[test]
    fn rounds_have_each_case_once_and_fit_on_the_testbed() {
        for uses_pre_copy in [false, true] {
            let cases = all_cases(&VICTIMS, uses_pre_copy);
            let rounds = group_into_rounds(cases.clone());
            assert_eq!(rounds.concat().len(), cases.len());
            let distinct_cases: BTreeSet<FaultCase> = rounds.concat().into_iter().collect();
            assert_eq!(distinct_cases, case_set(uses_pre_copy, &VICTIMS));
            assert!(
                rounds
                    .iter()
                    .all(|round| round.len() <= HELD_MIGRATIONS_MAX)
            );
        }
    }

    #[test]
    fn a_sample_has_each_step_once() {
        for sample_number in 0..20 {
            let sample = sample_cases(sample_number, StepSample::EachStep, &VICTIMS, true);
            let sampled_steps: Vec<Step> = sample.iter().map(|((step, _), _)| *step).collect();
            assert_eq!(sampled_steps, Step::ALL);
        }
    }

    /// Successive samples combine each step with each victim at both edges. This does not depend on
    /// the number of the first sample.
    #[test]
    fn successive_samples_cover_all_cases() {
        let cases = [(StepSample::EachStep, 1), (StepSample::EachThirdStep, 9)];
        for (step_sample, sample_factor) in cases {
            for victim_count in 1..=VICTIMS.len() {
                let victims = &VICTIMS[..victim_count];
                for first_sample_number in [0, 7, 20_000] {
                    let sample_numbers =
                        first_sample_number..first_sample_number + 2 * victim_count * sample_factor;
                    let sampled_cases: BTreeSet<FaultCase> = sample_numbers
                        .flat_map(|turn| sample_cases(turn, step_sample, victims, false))
                        .collect();
                    assert_eq!(
                        sampled_cases,
                        case_set(false, victims),
                        "{step_sample:?}, {victim_count} victims"
                    );
                }
            }
        }
    }
}
