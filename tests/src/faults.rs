//! Faults that tests inject, and the steps at which they inject them.
//!
//! A daemon stops itself at a breakpoint: one end of a step of a migration, checkpoint or restart
//! of one task. The test then injects a fault and resumes the daemon.

use crate::fake_criu;
use crate::run::wait_for;
use crate::testbed::{Host, Testbed};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use procfs::process::{Process, Status};
use sempa_proto::migration::Step;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Duration of a fault that exceeds no lease. Even with the delays before and after the fault, it
/// is well below the default lease of 10 s.
pub const SHORT_FAULT: Until = Until::Elapsed(Duration::from_secs(1));
/// Duration of a fault that also exceeds retries and deadlines shorter than a lease, but no lease.
pub const LONG_FAULT: Until = Until::Elapsed(Duration::from_secs(5));
/// Maximum duration of a fault with [`Until::Noticed`].
const NOTICED_FAULT_MAX: Duration = Duration::from_secs(30);
/// Time limit for a killed process to die, and for a fault to end.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Environment variable and value that set a lease of 3 s, for tests that wait for the loss of a
/// host.
pub const SHORT_LEASE: (&str, &str) = ("SEMPA_LEASE_MS", "3000");

/// Environment variable that requests every fault on every victim at every step. Without it, each
/// fault is tried once per step, and a seed selects the victim.
const FULL_ENV: &str = "SEMPA_TEST_FULL";

/// True if all cases are requested, not only a sample.
pub fn is_full() -> bool {
    std::env::var_os(FULL_ENV).is_some_and(|value| !value.is_empty())
}

/// An edge of a step: its start or its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepEdge {
    /// No part of the step is done.
    Before,
    /// The step is done, and no other daemon has been notified.
    After,
}

impl StepEdge {
    fn prefix(self) -> &'static str {
        match self {
            StepEdge::Before => "before-",
            StepEdge::After => "",
        }
    }

    /// Returns the edge before a step for an even number, and the one after a step for an odd
    /// number.
    pub(crate) fn from_parity(number: usize) -> StepEdge {
        if number.is_multiple_of(2) {
            StepEdge::Before
        } else {
            StepEdge::After
        }
    }
}

/// A step of a migration, checkpoint or restart and the edge at which a fault can be injected.
pub type Point = (Step, StepEdge);

/// Returns the points at both edges of each step.
pub(crate) fn edges(steps: impl IntoIterator<Item = Step>) -> impl Iterator<Item = Point> {
    steps
        .into_iter()
        .flat_map(|step| [(step, StepEdge::Before), (step, StepEdge::After)])
}

/// A file that stops a daemon: the daemon that reaches the point with the task stops itself.
#[derive(Debug)]
pub struct Breakpoint {
    request: PathBuf,
}

impl Breakpoint {
    /// Sets a breakpoint. `folder` is [`Testbed::breakpoints_folder`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(folder: &Path, tid: &str, point: Point) -> Result<Breakpoint> {
        let request = folder.join(format!("{tid}-{}", point_name(point)));
        fs::write(&request, "")?;
        Ok(Breakpoint { request })
    }

    /// Removes the breakpoint, unless a daemon has reached it.
    pub fn remove(&self) {
        // The daemon that reaches the breakpoint renames the file.
        let _ = fs::remove_file(&self.request);
    }

    /// Returns the daemon, on one of these hosts, that has stopped at the breakpoint; `None` if no
    /// daemon has reached the breakpoint.
    ///
    /// # Errors
    /// A daemon has reached the breakpoint and has not stopped yet.
    pub fn stopped_daemon(&self, hosts: &[&Host]) -> Result<Option<Pid>, String> {
        if !self.request.with_extension("reached").exists() {
            return Ok(None);
        }
        let mut daemons = hosts.iter().filter_map(|host| daemon_of(host));
        let stopped = daemons
            .find(|pid| is_stopped(*pid))
            .ok_or(format!("no daemon is stopped at {:?}", self.request))?;
        Ok(Some(stopped))
    }
}

/// Records the points that daemons reach with one task.
#[derive(Debug)]
pub struct PointLog {
    file: PathBuf,
}

impl PointLog {
    /// Starts recording. `folder` is [`Testbed::breakpoints_folder`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(folder: &Path, tid: &str) -> Result<PointLog> {
        let file = folder.join(format!("{tid}-places"));
        fs::write(&file, "")?;
        Ok(PointLog { file })
    }

    /// Returns the points reached so far, and clears the record.
    ///
    /// # Errors
    /// The file cannot be read, or names an unknown point.
    pub fn take(&self) -> Result<BTreeSet<Point>> {
        let text = fs::read_to_string(&self.file)?;
        fs::write(&self.file, "")?;
        let all: BTreeMap<String, Point> = edges(Step::ALL)
            .map(|point| (point_name(point), point))
            .collect();
        text.lines()
            .map(|line| {
                all.get(line)
                    .copied()
                    .with_context(|| format!("unknown point: {line}"))
            })
            .collect()
    }
}

/// Returns the name of a point in the daemons' files.
fn point_name((step, edge): Point) -> String {
    format!("{}{step}", edge.prefix())
}

/// A kind of process that a fault can hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Daemon,
    Tasker,
    /// CRIU processes that the tasker has started, or fake ones. There may be none.
    Engine,
    /// The resource manager, if the host runs it.
    ResourceManager,
}

/// The condition on which a fault ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After a fixed time.
    Elapsed(Duration),
    /// The virtual machine has reacted: the loss of the hosts is known, and the migrations have
    /// ended.
    Noticed,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Sends SIGKILL. This fault does not end.
    Kill,
    /// Sends SIGSTOP, and SIGCONT at the end.
    Pause(Until),
    /// Disconnects the host from the network until the end of the fault.
    Disconnect(Until),
    /// Interrupts the network between two hosts. All other hosts can reach both of them.
    Partition(Until),
}

impl Fault {
    fn until(self) -> Option<Until> {
        match self {
            Fault::Kill => None,
            Fault::Pause(until) | Fault::Disconnect(until) | Fault::Partition(until) => Some(until),
        }
    }

    /// True if the fault lasts until the virtual machine has declared its victim lost.
    pub fn is_lasting(self) -> bool {
        matches!(self.until(), None | Some(Until::Noticed))
    }
}

/// The victims of a fault.
#[derive(Clone, Debug, Default)]
pub struct FaultTargets {
    /// Kinds of processes, each with the number of its host.
    pub roles: Vec<(usize, Role)>,
    /// Pairs of hosts for [`Fault::Partition`].
    pub pairs: Vec<(usize, usize)>,
}

/// Injects a fault and waits until it is over. While the fault lasts, calls `resume` with the
/// processes that the fault has hit, which `resume` must not resume. A fault with
/// [`Until::Noticed`] lasts until `noticed` succeeds. Returns the number of engine processes that
/// the fault has hit.
pub fn inject(
    bed: &Testbed,
    fault: Fault,
    targets: &FaultTargets,
    resume: impl FnOnce(&[Pid]) -> Result<()>,
    noticed: impl FnMut() -> Result<(), String>,
) -> Result<usize> {
    let signals = matches!(fault, Fault::Kill | Fault::Pause(_));
    let (victims, engines) = if signals {
        victims(bed, targets)?
    } else {
        (Vec::new(), 0)
    };
    // An engine may exit at any moment.
    let may_be_gone = targets.roles.iter().all(|(_, role)| *role == Role::Engine);
    let tell = |pid: Pid, what| {
        send_signal(pid, what).or_else(|error| if may_be_gone { Ok(()) } else { Err(error) })
    };
    switch_networks(bed, fault, targets, false)?;
    let first = if fault == Fault::Kill {
        Signal::SIGKILL
    } else {
        Signal::SIGSTOP
    };
    victims.iter().try_for_each(|pid| tell(*pid, first))?;
    let begun = Instant::now();
    if fault == Fault::Kill {
        // On a loaded machine a killed process may die late. If other daemons were resumed before
        // its death, they could leave the step.
        victims.iter().copied().try_for_each(wait_for_death)?;
    }
    resume(&victims)?;
    let Some(until) = fault.until() else {
        return Ok(engines);
    };
    wait_until(until, begun, noticed)?;
    victims
        .iter()
        .try_for_each(|pid| tell(*pid, Signal::SIGCONT))?;
    switch_networks(bed, fault, targets, true)?;
    Ok(engines)
}

fn victims(bed: &Testbed, targets: &FaultTargets) -> Result<(Vec<Pid>, usize)> {
    let (mut victims, mut engines) = (Vec::new(), 0);
    for &(host, role) in &targets.roles {
        let found = processes_of(bed.host(host), role);
        let is_engine = role == Role::Engine;
        ensure!(!found.is_empty() || is_engine, "no {role:?} on h{host}");
        engines += if is_engine { found.len() } else { 0 };
        victims.extend(found);
    }
    // Several targets may name the same process.
    victims.sort();
    victims.dedup();
    Ok((victims, engines))
}

/// Disconnects the hosts of a network fault, or reconnects them if `on` is true. Does nothing for
/// other faults.
fn switch_networks(bed: &Testbed, fault: Fault, targets: &FaultTargets, on: bool) -> Result<()> {
    match fault {
        Fault::Disconnect(_) => targets
            .roles
            .iter()
            .try_for_each(|(host, _)| bed.set_connected(*host, on)),
        Fault::Partition(_) => targets
            .pairs
            .iter()
            .try_for_each(|(i, j)| bed.set_partitioned(*i, *j, !on)),
        Fault::Kill | Fault::Pause(_) => Ok(()),
    }
}

fn wait_until(
    until: Until,
    begun: Instant,
    mut noticed: impl FnMut() -> Result<(), String>,
) -> Result<()> {
    match until {
        Until::Elapsed(span) => wait_for(span + TIMEOUT, || {
            if begun.elapsed() >= span {
                Ok(())
            } else {
                Err("the fault is not over".to_string())
            }
        }),
        Until::Noticed => {
            // Some faults are noticed only after their end.
            if let Err(error) = wait_for(NOTICED_FAULT_MAX, &mut noticed) {
                eprintln!("the fault ends although {error:#}");
            }
            Ok(())
        }
    }
}

/// Sends a signal to a process.
///
/// # Errors
/// The kernel refuses, or the process is gone.
pub fn send_signal(pid: Pid, signal: Signal) -> Result<()> {
    kill(pid, signal).with_context(|| format!("{signal} to {pid}"))
}

/// Returns the daemon of a host.
pub fn daemon_of(host: &Host) -> Option<Pid> {
    let daemon = host
        .processes()
        .into_iter()
        .find(|(_, line)| line.contains("bin/pvmd"))?;
    Some(Pid::from_raw(daemon.0.cast_signed()))
}

/// Returns the processes of a host in a role: at most one, except for engines.
pub fn processes_of(host: &Host, role: Role) -> Vec<Pid> {
    let Some(daemon) = daemon_of(host) else {
        return Vec::new();
    };
    let those = |is_one: &dyn Fn(Pid, &str) -> bool| {
        let all = host
            .processes()
            .into_iter()
            .map(|(pid, line)| (Pid::from_raw(pid.cast_signed()), line));
        all.filter(|(pid, line)| is_one(*pid, line))
            .map(|(pid, _)| pid)
            .collect::<Vec<_>>()
    };
    let one = |found: Vec<Pid>| found.into_iter().take(1).collect();
    match role {
        Role::Daemon => vec![daemon],
        // The children of the tasker have the same name.
        Role::Tasker => one(those(&|pid, line| {
            line.contains("pvm-tasker")
                && status(pid).is_some_and(|status| status.ppid == daemon.as_raw())
        })),
        Role::ResourceManager => one(those(&|_, line| line.contains("bin/pvm-rm"))),
        // The link by which the engine is started has another name than the program.
        Role::Engine => those(&|pid, line| {
            let program = Process::new(pid.as_raw()).and_then(|process| process.exe());
            let program = program.unwrap_or_default();
            program.ends_with("criu") || (program.ends_with("bash") && fake_criu::is_engine(line))
        }),
    }
}

/// Returns the images and resume tokens that remain on a host from migrations, checkpoints and
/// restarts.
pub fn leftovers(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.machine_path("/tmp/sempa-0/pvm"))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_left = |name: &String| {
        ["images-", "memory-", "resume-", ".tmp-"]
            .iter()
            .any(|begin| name.starts_with(begin))
    };
    names
        .filter(is_left)
        .map(|name| format!("{name} on {}", host.name()))
        .collect()
}

/// Kills a process and waits until it is dead.
///
/// # Panics
/// The process cannot be killed, or does not die in time.
pub fn kill_and_wait(pid: Pid) {
    kill(pid, Signal::SIGKILL).expect("killed");
    wait_for_death(pid).expect("dead");
}

fn wait_for_death(pid: Pid) -> Result<()> {
    wait_for(TIMEOUT, || {
        if is_dead(pid) {
            Ok(())
        } else {
            Err(format!("{pid} does not die"))
        }
    })
}

/// True if the process and all its threads are dead, so that all its files are closed.
fn is_dead(pid: Pid) -> bool {
    status(pid).is_none_or(|status| status.state.starts_with('Z') && status.threads == 1)
}

/// True if the process is stopped.
pub fn is_stopped(pid: Pid) -> bool {
    status(pid).is_some_and(|status| status.state.starts_with('T'))
}

fn status(pid: Pid) -> Option<Status> {
    Process::new(pid.as_raw()).ok()?.status().ok()
}
