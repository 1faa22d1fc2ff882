//! Stops and continues all processes of a task, and reads from /proc whether they are stopped.

use crate::namespace::Namespace;
use crate::sys;
use checkpoint::facts;
use checkpoint::proc::{self, innermost_pid};
use nix::time::ClockId;
use nix::unistd::Pid;
use procfs::process::Process;
use sempa_proto::Micros;
use sempa_proto::migration::Usage;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Time limit for processes to stop again after an engine has failed.
const SETTLE_TIMEOUT: Duration = Duration::from_millis(200);
/// Poll interval while the tasker waits for [`SETTLE_TIMEOUT`].
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Selects the processes of a task.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TaskProcesses<'a> {
    /// All processes of the task's PID namespace.
    Namespace(&'a Namespace),
    /// The processes of the task's process group. Used if the tasker may not create namespaces.
    Group(i32),
}

impl TaskProcesses<'_> {
    pub(crate) fn pids(&self) -> Vec<i32> {
        match self {
            TaskProcesses::Namespace(namespace) => namespace.pids(),
            TaskProcesses::Group(group) => group_pids(*group),
        }
    }
}

/// Returns the processes of a process group.
fn group_pids(group: i32) -> Vec<i32> {
    let mut pids = proc::process_ids();
    pids.retain(|pid| proc::stat(*pid).is_some_and(|stat| stat.pgrp == group));
    pids
}

/// Combined state of all threads of a process, from /proc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunState {
    /// All threads are stopped or have ended.
    Stopped,
    /// At least one thread may run.
    Running,
}

/// Returns the PIDs, in the task's namespace, of those of these processes that are stopped by a
/// signal.
pub(crate) fn stopped_by_signal(pids: &[i32]) -> Vec<i32> {
    let stopped = pids
        .iter()
        .copied()
        .filter(|pid| is_stopped_by_signal(*pid));
    stopped.filter_map(innermost_pid).collect()
}

/// Returns `pids` without the processes that were already stopped before the task was stopped.
pub(crate) fn without_stopped_before(mut pids: Vec<i32>, stopped_before: &[i32]) -> Vec<i32> {
    let was_stopped =
        |pid: i32| innermost_pid(pid).is_some_and(|inner| stopped_before.contains(&inner));
    pids.retain(|pid| stopped_before.is_empty() || !was_stopped(*pid));
    pids
}

/// Sends SIGCONT to all processes of a task except those that were already stopped before the task
/// was stopped.
pub(crate) fn continue_all(processes: &TaskProcesses<'_>, stopped_before: &[i32]) {
    for pid in without_stopped_before(processes.pids(), stopped_before) {
        let _ = sys::kill_raw(pid, libc::SIGCONT);
    }
}

/// Stops all processes of a task. Returns true if no process of the task runs; must be called again
/// until then.
///
/// Each call sends SIGSTOP to the running processes that are not in `signalled`, and adds them.
/// Parents are stopped before their children: if a child between vfork and exec were stopped, its
/// parent, which waits for the child in the kernel, could never stop. A second SIGSTOP would stay
/// pending and disturb a dump.
pub(crate) fn stop_all(processes: &TaskProcesses<'_>, signalled: &mut BTreeSet<i32>) -> bool {
    let first_states: BTreeMap<i32, (RunState, Option<i32>)> = processes
        .pids()
        .into_iter()
        .map(|pid| (pid, (run_state(pid), parent(pid))))
        .collect();
    let is_running = |pid: &i32| {
        first_states
            .get(pid)
            .is_some_and(|(state, _)| *state == RunState::Running)
    };
    let mut all_stopped = true;
    for (pid, (_, parent)) in first_states.iter().filter(|(pid, _)| is_running(pid)) {
        all_stopped = false;
        if !parent.is_some_and(|parent| is_running(&parent)) && signalled.insert(*pid) {
            // A process that has ended needs no signal.
            let _ = sys::kill_raw(*pid, libc::SIGSTOP);
        }
    }
    // A process may have forked after the first list was read and before it stopped; a second list
    // contains the child.
    all_stopped
        && processes
            .pids()
            .iter()
            .all(|pid| first_states.contains_key(pid))
}

/// Continues those of these stopped processes that were stopped before they returned from fork(2):
/// they still have copies of the library's sockets, which cannot be dumped. Returns true if any
/// process was continued; the task must then be stopped again.
pub(crate) fn continue_unfinished_forks(
    pids: &[i32],
    stopped_before: &[i32],
    signalled: &mut BTreeSet<i32>,
) -> bool {
    if pids.len() < 2 {
        return false;
    }
    let in_fork = without_stopped_before(pids.to_vec(), stopped_before)
        .into_iter()
        .filter(|pid| facts::has_library_sockets(*pid));
    in_fork
        .map(|pid| {
            signalled.remove(&pid);
            // A process that has ended has no open sockets.
            let _ = sys::kill_raw(pid, libc::SIGCONT);
        })
        .count()
        > 0
}

/// Sends SIGSTOP to all processes of a frozen task that are not stopped yet, so that none of them
/// runs when the task is thawed. Returns the signaled processes. A child between vfork and exec
/// receives no signal, as in [`stop_all`]: it must run until its parent can stop.
pub(crate) fn signal_frozen(processes: &TaskProcesses<'_>) -> BTreeSet<i32> {
    let shares_memory = |pid: i32| parent(pid).is_some_and(|parent| sys::share_memory(pid, parent));
    let to_signal = processes
        .pids()
        .into_iter()
        .filter(|pid| !is_stopped_by_signal(*pid) && !shares_memory(*pid));
    // A process that has ended needs no signal.
    to_signal
        .inspect(|pid| drop(sys::kill_raw(*pid, libc::SIGSTOP)))
        .collect()
}

/// Waits until these processes have stopped again, which takes a short time after an engine has
/// detached from them.
pub(crate) fn wait_until_stopped(pids: &[i32]) {
    let until = Instant::now() + SETTLE_TIMEOUT;
    while pids.iter().any(|pid| run_state(*pid) == RunState::Running) && Instant::now() < until {
        std::thread::sleep(SETTLE_POLL_INTERVAL);
    }
}

fn run_state(pid: i32) -> RunState {
    let can_run = |letter| !matches!(letter, 'T' | 'Z' | 'X');
    if thread_states(pid).into_iter().any(can_run) {
        RunState::Running
    } else {
        RunState::Stopped
    }
}

/// True if no thread of a process will execute another instruction, even if the process was not
/// reaped yet.
pub(crate) fn has_ended(pid: i32) -> bool {
    thread_states(pid)
        .iter()
        .all(|letter| matches!(letter, 'Z' | 'X'))
}

/// Returns the state letters of the threads of a process.
fn thread_states(pid: i32) -> Vec<char> {
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let threads = threads.into_iter().flatten().flatten();
    let stats = threads.filter_map(|thread| thread.stat().ok());
    stats.map(|stat| stat.state).collect()
}

fn is_stopped_by_signal(pid: i32) -> bool {
    proc::stat(pid).is_some_and(|stat| stat.state == 'T')
}

fn parent(pid: i32) -> Option<i32> {
    Some(proc::stat(pid)?.ppid)
}

/// Returns the resources that a process and its reaped children have used; zero if the process was
/// reaped.
///
/// The sum of the process's user and system time is exact. Its split into the two, and the times of
/// the children, have the resolution of the kernel's ticks.
pub(crate) fn resource_usage(pid: i32) -> Usage {
    let Some(stat) = proc::stat(pid) else {
        return Usage::default();
    };
    let (user, system) = (stat.utime, stat.stime);
    let children = [stat.cutime, stat.cstime].map(|ticks| u64::try_from(ticks).unwrap_or(0));
    let rate = procfs::ticks_per_second();
    let micros = |ticks: u64| ticks * 1_000_000 / rate;
    let exact = cpu_time_micros(pid).unwrap_or(micros(user + system));
    let own = (u128::from(exact) * u128::from(user)).checked_div(u128::from(user + system));
    let own = own.map_or(exact, |own| own as u64);
    let resident_max = proc::status(pid).and_then(|status| status.vmhwm);
    Usage {
        user: Micros(own + micros(children[0])),
        system: Micros(exact - own + micros(children[1])),
        resident_max_bytes: resident_max.unwrap_or(0) * 1024,
    }
}

/// Returns the processor time of all threads of a process in microseconds, from its CPU clock.
fn cpu_time_micros(pid: i32) -> Option<u64> {
    let time = ClockId::pid_cpu_clock_id(Pid::from_raw(pid))
        .and_then(ClockId::now)
        .ok()?;
    u64::try_from(Duration::from(time).as_micros()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "system tier: needs python3"]
    fn usage_includes_reaped_children() {
        let code = "import os, sys, time\nif os.fork() == 0:\n  while time.process_time() < 0.2: pass\n  os._exit(0)\n\
                    os.wait(); held = bytearray(b'x') * (50 << 20); print(); sys.stdout.flush(); time.sleep(1000)";
        let python = std::process::Command::new("python3")
            .args(["-c", code])
            .stdout(std::process::Stdio::piped())
            .spawn();
        let mut child = python.expect("python3");
        let mut line = [0];
        std::io::Read::read_exact(&mut child.stdout.take().expect("a pipe"), &mut line)
            .expect("it says when");
        let used = resource_usage(child.id() as i32);
        child.kill().expect("it is there");
        child.wait().expect("it ends");
        assert!(used.user.0 + used.system.0 >= 190_000, "{used:?}");
        assert!(used.resident_max_bytes >= 50 << 20, "{used:?}");
        let ticks = 10_000;
        assert!(
            !used.user.0.is_multiple_of(ticks) || !used.system.0.is_multiple_of(ticks),
            "its own part is exact: {used:?}"
        );
        assert_eq!(super::resource_usage(-1), Usage::default());
    }

    #[test]
    fn parent_of_running_process_is_known() {
        assert_eq!(
            parent(std::process::id() as i32),
            Some(std::os::unix::process::parent_id() as i32)
        );
    }
}
