//! Faults that tests inject, and the steps at which they inject them.
//!
//! A daemon stops itself at a breakpoint: the start or the end of a step of a migration, checkpoint
//! or restart of one task. The test then injects a fault and resumes the daemon.

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

/// Duration of a fault that does not exceed any lease. Even with the delays before and after the
/// fault, it is much less than the default lease of 10 s.
pub const SHORT_DURATION: FaultEnd = FaultEnd::Elapsed(Duration::from_secs(1));
/// Duration of a fault that exceeds retry intervals and time limits that are shorter than a lease,
/// but does not exceed a lease.
pub const LONG_DURATION: FaultEnd = FaultEnd::Elapsed(Duration::from_secs(5));
/// Maximum time for which a fault with [`FaultEnd::LossHandled`] waits for the reaction of the
/// virtual machine. After this time the fault ends without the reaction.
const NOTICED_FAULT_TIME_MAX: Duration = Duration::from_secs(30);
/// Time limit for the death of a killed process.
const DEATH_TIMEOUT: Duration = Duration::from_secs(120);

/// Name and value of the environment variable that sets a lease of 6 s, for tests that wait for the
/// loss of a host. On a loaded machine, breakpoints may hold the master for 2 to 3 s; after 4.8 s
/// the hosts would end their tasks.
pub const SHORT_LEASE_ENV: (&str, &str) = ("SEMPA_LEASE_MS", "6000");

/// Environment variable that requests every fault on every victim at every step. Without the
/// variable each fault is tried once per step, and a seed selects the victim.
const FULL_ENV: &str = "SEMPA_TEST_FULL";

/// True if the environment requests all cases instead of a sample.
pub fn tests_all_cases() -> bool {
    std::env::var_os(FULL_ENV).is_some_and(|value| !value.is_empty())
}

/// An edge of a step: its start or its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepEdge {
    /// The step has not begun.
    Before,
    /// The daemon has completed the step and has not notified another daemon.
    After,
}

impl StepEdge {
    fn prefix(self) -> &'static str {
        match self {
            Self::Before => "before-",
            Self::After => "",
        }
    }

    /// Returns [`StepEdge::Before`] for an even number and [`StepEdge::After`] for an odd number.
    pub(crate) fn from_parity(number: usize) -> Self {
        if number.is_multiple_of(2) {
            Self::Before
        } else {
            Self::After
        }
    }
}

/// A step of a migration, checkpoint or restart and the edge at which a fault can be injected.
pub type Point = (Step, StepEdge);

/// Returns the points at both edges of each step.
pub(crate) fn points_of_steps(
    all_steps: impl IntoIterator<Item = Step>,
) -> impl Iterator<Item = Point> {
    all_steps
        .into_iter()
        .flat_map(|step| [(step, StepEdge::Before), (step, StepEdge::After)])
}

/// A file that stops a daemon. The daemon that reaches the point in an operation on the task stops
/// itself.
#[derive(Debug)]
pub struct Breakpoint {
    request_file: PathBuf,
}

impl Breakpoint {
    /// Sets a breakpoint for a task. `folder` is [`Testbed::breakpoints_folder`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(folder: &Path, tid: &str, point: Point) -> Result<Self> {
        let request_path = folder.join(format!("{tid}-{}", point_name(point)));
        fs::write(&request_path, "")?;
        Ok(Self {
            request_file: request_path,
        })
    }

    /// Removes the breakpoint. Has no effect if a daemon has reached it.
    pub fn remove_if_not_reached(&self) {
        // An error is ignored: the daemon that reaches the breakpoint renames the file.
        let _ = fs::remove_file(&self.request_file);
    }

    /// Returns the daemon, on one of these hosts, that has stopped at the breakpoint; `None` if no
    /// daemon has reached the breakpoint.
    ///
    /// # Errors
    /// A daemon has reached the breakpoint and has not stopped yet.
    pub fn stopped_daemon(&self, hosts: &[&Host]) -> Result<Option<Pid>, String> {
        if !self.request_file.with_extension("reached").exists() {
            return Ok(None);
        }
        let mut daemons = hosts.iter().filter_map(|host| daemon_pid(host));
        let daemon = daemons
            .find(|pid| is_stopped(*pid))
            .ok_or(format!("no daemon is stopped at {:?}", self.request_file))?;
        Ok(Some(daemon))
    }
}

/// A record of the points that daemons reach in operations on one task.
#[derive(Debug)]
pub struct PointLog {
    record_file: PathBuf,
}

impl PointLog {
    /// Starts the record for a task. `folder` is [`Testbed::breakpoints_folder`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn new(folder: &Path, tid: &str) -> Result<Self> {
        let file = folder.join(format!("{tid}-places"));
        fs::write(&file, "")?;
        Ok(Self { record_file: file })
    }

    /// Returns the points since the start of the record or the last call, and clears the record.
    ///
    /// # Errors
    /// The file cannot be read, or contains an unknown point.
    pub fn take_points(&self) -> Result<BTreeSet<Point>> {
        let text = fs::read_to_string(&self.record_file)?;
        fs::write(&self.record_file, "")?;
        let points_by_name: BTreeMap<String, Point> = points_of_steps(Step::ALL)
            .map(|point| (point_name(point), point))
            .collect();
        text.lines()
            .map(|line| {
                points_by_name
                    .get(line)
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
pub enum ProcessRole {
    Daemon,
    Tasker,
    /// CRIU or fake CRIU processes that the tasker has started. There may be none.
    Engine,
    /// The resource manager, if the host runs it.
    ResourceManager,
}

/// The condition that ends a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultEnd {
    /// A time has passed since the start of the fault.
    Elapsed(Duration),
    /// The virtual machine has reacted: the loss of the hosts is known, and the operations that the
    /// fault has hit have ended.
    LossHandled,
}

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Sends SIGKILL. This fault does not end.
    Kill,
    /// Sends SIGSTOP at the start of the fault and SIGCONT at its end.
    Pause(FaultEnd),
    /// Disconnects the host from the network until the end of the fault.
    Disconnect(FaultEnd),
    /// Interrupts the connection between two hosts. All other hosts can reach both hosts.
    Partition(FaultEnd),
}

impl Fault {
    fn end_condition(self) -> Option<FaultEnd> {
        match self {
            Self::Kill => None,
            Self::Pause(fault_end) | Self::Disconnect(fault_end) | Self::Partition(fault_end) => {
                Some(fault_end)
            }
        }
    }

    /// True if the fault lasts until the virtual machine has declared its victim lost, or does not
    /// end.
    pub fn exceeds_lease(self) -> bool {
        matches!(self.end_condition(), None | Some(FaultEnd::LossHandled))
    }
}

/// The victims of a fault.
#[derive(Clone, Debug, Default)]
pub struct FaultTargets {
    /// The processes that a signal hits, as (number of the host, kind of process).
    /// [`Fault::Disconnect`] disconnects the hosts in this list.
    pub hosts_and_roles: Vec<(usize, ProcessRole)>,
    /// The pairs of host numbers that [`Fault::Partition`] separates.
    pub host_pairs: Vec<(usize, usize)>,
}

/// Injects a fault and waits until it is over. While the fault lasts, calls `resume_others` once
/// with the processes that received the fault's signal; `resume_others` must not resume these
/// processes. A fault with [`FaultEnd::LossHandled`] lasts until `check_loss_handled` succeeds, but
/// at most 30 seconds. Returns the number of engine processes that received the signal.
pub fn inject_and_wait(
    testbed: &Testbed,
    fault: Fault,
    targets: &FaultTargets,
    resume_others: impl FnOnce(&[Pid]) -> Result<()>,
    check_loss_handled: impl FnMut() -> Result<(), String>,
) -> Result<usize> {
    let is_signal_fault = matches!(fault, Fault::Kill | Fault::Pause(_));
    let (victims, engine_count) = if is_signal_fault {
        find_victims(testbed, targets)?
    } else {
        (BTreeMap::new(), 0)
    };
    // An engine process may exit at any moment. A resource manager that hangs is killed and
    // replaced.
    let may_have_exited = |pid: &Pid| {
        let role = victims.get(pid);
        role.is_some_and(|role| matches!(role, ProcessRole::Engine | ProcessRole::ResourceManager))
    };
    let send = |pid: Pid, signal| match send_signal(pid, signal) {
        Err(_) if may_have_exited(&pid) => Ok(()),
        result => result,
    };
    let victim_pids: Vec<Pid> = victims.keys().copied().collect();
    set_networks_connected(testbed, fault, targets, false)?;
    let start_signal = if fault == Fault::Kill {
        Signal::SIGKILL
    } else {
        Signal::SIGSTOP
    };
    victim_pids
        .iter()
        .try_for_each(|pid| send(*pid, start_signal))?;
    let started_at = Instant::now();
    if fault == Fault::Kill {
        // On a loaded machine a killed process may die late. If other daemons were resumed before
        // its death, they could complete the step.
        victim_pids.iter().copied().try_for_each(wait_for_death)?;
    }
    resume_others(&victim_pids)?;
    let Some(end_condition) = fault.end_condition() else {
        return Ok(engine_count);
    };
    wait_for_fault_end(end_condition, started_at, check_loss_handled)?;
    victim_pids
        .iter()
        .try_for_each(|pid| send(*pid, Signal::SIGCONT))?;
    set_networks_connected(testbed, fault, targets, true)?;
    Ok(engine_count)
}

/// Returns the processes that a signal hits, each once and with its role, and the number of engine
/// processes.
fn find_victims(
    testbed: &Testbed,
    targets: &FaultTargets,
) -> Result<(BTreeMap<Pid, ProcessRole>, usize)> {
    let (mut victims, mut engine_count) = (BTreeMap::new(), 0);
    for &(host, role) in &targets.hosts_and_roles {
        let pids = role_processes(testbed.host(host), role);
        let is_engine = role == ProcessRole::Engine;
        ensure!(!pids.is_empty() || is_engine, "no {role:?} on h{host}");
        engine_count += if is_engine { pids.len() } else { 0 };
        victims.extend(pids.into_iter().map(|pid| (pid, role)));
    }
    Ok((victims, engine_count))
}

/// Disconnects the hosts of a network fault if `is_connected` is false; reconnects them if
/// `is_connected` is true. Has no effect for other faults.
fn set_networks_connected(
    testbed: &Testbed,
    fault: Fault,
    targets: &FaultTargets,
    is_connected: bool,
) -> Result<()> {
    match fault {
        Fault::Disconnect(_) => targets
            .hosts_and_roles
            .iter()
            .try_for_each(|(host, _)| testbed.set_connected(*host, is_connected)),
        Fault::Partition(_) => targets
            .host_pairs
            .iter()
            .try_for_each(|(i, j)| testbed.set_partitioned(*i, *j, !is_connected)),
        Fault::Kill | Fault::Pause(_) => Ok(()),
    }
}

fn wait_for_fault_end(
    end_condition: FaultEnd,
    started_at: Instant,
    mut check_loss_handled: impl FnMut() -> Result<(), String>,
) -> Result<()> {
    match end_condition {
        FaultEnd::Elapsed(duration) => wait_for(duration + DEATH_TIMEOUT, || {
            if started_at.elapsed() >= duration {
                Ok(())
            } else {
                Err("the fault is not over".to_string())
            }
        }),
        FaultEnd::LossHandled => {
            // The virtual machine detects some faults only after their end.
            if let Err(error) = wait_for(NOTICED_FAULT_TIME_MAX, &mut check_loss_handled) {
                eprintln!("the fault ends although {error:#}");
            }
            Ok(())
        }
    }
}

/// Sends a signal to a process. The error names the signal and the process.
///
/// # Errors
/// The kernel refuses the signal, or the process has ended.
pub fn send_signal(pid: Pid, signal: Signal) -> Result<()> {
    kill(pid, signal).with_context(|| format!("{signal} to {pid}"))
}

/// Returns the process number, on the machine, of a host's daemon; `None` if no daemon runs.
pub fn daemon_pid(host: &Host) -> Option<Pid> {
    let daemon = host
        .processes()
        .into_iter()
        .find(|(_, line)| line.contains("bin/pvmd"))?;
    Some(Pid::from_raw(daemon.0.cast_signed()))
}

/// Returns the processes of a host that have a role: at most one, except for engines.
pub fn role_processes(host: &Host, role: ProcessRole) -> Vec<Pid> {
    let Some(daemon_pid) = daemon_pid(host) else {
        return Vec::new();
    };
    let matching_pids = |matches_process: &dyn Fn(Pid, &str) -> bool| {
        let processes = host
            .processes()
            .into_iter()
            .map(|(pid, line)| (Pid::from_raw(pid.cast_signed()), line));
        processes
            .filter(|(pid, line)| matches_process(*pid, line))
            .map(|(pid, _)| pid)
            .collect::<Vec<_>>()
    };
    let keep_first = |pids: Vec<Pid>| pids.into_iter().take(1).collect();
    match role {
        ProcessRole::Daemon => vec![daemon_pid],
        // The child processes of the tasker have the tasker's name.
        ProcessRole::Tasker => keep_first(matching_pids(&|pid, line| {
            let parent = process_status(pid).map(|status| status.ppid);
            let is_service = |parent: i32| {
                let program = Process::new(parent).and_then(|process| process.exe());
                program.is_ok_and(|program| program.ends_with("pvm-taskerd"))
            };
            line.contains("pvm-tasker")
                && parent.is_some_and(|pid| pid == daemon_pid.as_raw() || is_service(pid))
        })),
        ProcessRole::ResourceManager => {
            keep_first(matching_pids(&|_, line| line.contains("bin/pvm-rm")))
        }
        // The tasker starts the engine by a link with another name, so the path of the executable
        // is checked.
        ProcessRole::Engine => matching_pids(&|pid, line| {
            let program = Process::new(pid.as_raw()).and_then(|process| process.exe());
            let program = program.unwrap_or_default();
            program.ends_with("criu")
                || (program.ends_with("bash") && fake_criu::is_engine_command_line(line))
        }),
    }
}

/// Returns the images, resume tokens and temporary files that remain on a host from migrations,
/// checkpoints and restarts, each as `NAME on HOST`.
pub fn leftover_names(host: &Host) -> Vec<String> {
    let entries = fs::read_dir(host.machine_path("/tmp/sempa-0/pvm"))
        .into_iter()
        .flatten()
        .flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_leftover = |name: &String| {
        ["images-", "memory-", "resume-", ".tmp-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    };
    names
        .filter(is_leftover)
        .map(|name| format!("{name} on {}", host.name()))
        .collect()
}

/// Kills a process and waits until it is dead.
///
/// # Panics
/// The process cannot be killed, or does not die within the time limit.
pub fn kill_and_wait(pid: Pid) {
    kill(pid, Signal::SIGKILL).expect("killed");
    wait_for_death(pid).expect("dead");
}

fn wait_for_death(pid: Pid) -> Result<()> {
    wait_for(DEATH_TIMEOUT, || {
        if is_dead(pid) {
            Ok(())
        } else {
            Err(format!("{pid} does not die"))
        }
    })
}

/// True if the process and all its threads are dead, so that all its files are closed. A zombie is
/// dead.
fn is_dead(pid: Pid) -> bool {
    process_status(pid).is_none_or(|status| status.state.starts_with('Z') && status.threads == 1)
}

/// True if a signal has stopped the process.
pub fn is_stopped(pid: Pid) -> bool {
    process_status(pid).is_some_and(|status| status.state.starts_with('T'))
}

fn process_status(pid: Pid) -> Option<Status> {
    Process::new(pid.as_raw()).ok()?.status().ok()
}
