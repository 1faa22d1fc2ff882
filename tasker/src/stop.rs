//! Stops and continues all processes of a task, and determines from /proc whether they are stopped.

use crate::census::{Census, CensusFailed, ProcessTree};
use crate::namespace::Namespace;
use crate::sys;
use checkpoint::facts;
use checkpoint::proc::{self, innermost_pid};
use nix::time::ClockId;
use nix::unistd::Pid;
use sempa_proto::Micros;
use sempa_proto::migration::Usage;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Time limit for processes to stop again after the engine has detached from them.
const STOP_AGAIN_TIMEOUT: Duration = Duration::from_millis(200);
/// Poll interval of [`wait_until_stopped`].
const STOP_AGAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// SIGSTOP in the sets of signals in /proc.
const STOP_BIT: u64 = 1 << (libc::SIGSTOP - 1);

/// The processes of a task, or of what a task has left behind.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TaskProcesses<'a> {
    /// All processes of the task's PID namespace.
    Namespace(&'a Namespace),
    /// The processes of the task's PID namespace that have left its control group.
    OutsideGroup(&'a Namespace),
    /// The processes of a task without a PID namespace. Used if the tasker may not create
    /// namespaces, and for tasks that must not have one.
    Tree(&'a ProcessTree),
}

impl TaskProcesses<'_> {
    /// Reads the processes of the host, and returns the PIDs of the selected ones.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.pids_in(&Census::default())
    }

    /// Returns the PIDs of the selected processes of a census; empty if they could not be read.
    pub(crate) fn pids_in(&self, census: &Census) -> Vec<i32> {
        self.try_pids_in(census).unwrap_or_default()
    }

    /// Returns the PIDs of the selected processes of a census.
    ///
    /// # Errors
    /// The processes could not be read.
    pub(crate) fn try_pids_in(&self, census: &Census) -> Result<Vec<i32>, CensusFailed> {
        match self {
            Self::Namespace(namespace) => namespace.try_pids_in(census),
            Self::OutsideGroup(namespace) => namespace.pids_outside_group(census),
            Self::Tree(tree) => census.tree_pids(tree),
        }
    }

    /// Returns the processes without the members of a control group whose freeze was requested.
    pub(crate) fn without_frozen(self) -> Self {
        match self {
            Self::Namespace(namespace) if namespace.frozen_group().is_some() => {
                Self::OutsideGroup(namespace)
            }
            processes => processes,
        }
    }

    /// True if processes are known to exist although a census may contain none of them: what a task
    /// without a namespace has left behind may fork and exit in turns.
    fn are_some_absent(&self) -> bool {
        match self {
            Self::Namespace(_) | Self::OutsideGroup(_) => false,
            Self::Tree(tree) => tree.has_left_group(),
        }
    }
}

/// What happens to a child that shares the memory of its parent, between vfork and exec. The parent
/// waits in the kernel until the exec, and cannot be stopped by a signal before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VforkRule {
    /// The child runs until its exec, so that the parent can stop, too. For a dump, which needs
    /// stopped processes.
    ChildRuns,
    /// The child is stopped. The parent executes no instruction while it waits. For a pause.
    ChildStops,
}

/// Combined state of all threads of a process, from /proc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunState {
    /// All threads are stopped or have ended, or the process does not exist.
    Stopped,
    /// At least one thread is neither stopped nor ended, and each such thread waits in the kernel
    /// without being interruptible by a stop signal, as in vfork.
    InKernel,
    /// At least one thread executes instructions, or can, or the threads cannot be read.
    Running,
}

/// Returns which of these processes are stopped by a signal. The returned PIDs are those in the
/// task's namespace.
pub(crate) fn stopped_by_signal(pids: &[i32]) -> Vec<i32> {
    let stopped_pids = pids
        .iter()
        .copied()
        .filter(|pid| is_stopped_by_signal(*pid));
    stopped_pids.filter_map(innermost_pid).collect()
}

/// Returns `pids` without the processes in `already_stopped_pids`, which are PIDs in the task's
/// namespace. Those processes were already stopped before the task was stopped.
pub(crate) fn without_already_stopped(
    mut pids: Vec<i32>,
    already_stopped_pids: &[i32],
) -> Vec<i32> {
    let was_stopped = |pid: i32| {
        innermost_pid(pid)
            .is_some_and(|namespace_pid| already_stopped_pids.contains(&namespace_pid))
    };
    pids.retain(|pid| already_stopped_pids.is_empty() || !was_stopped(*pid));
    pids
}

/// Sends SIGCONT to these processes except those that were already stopped before their task was
/// stopped.
pub(crate) fn continue_processes(pids: Vec<i32>, already_stopped_pids: &[i32]) {
    for pid in without_already_stopped(pids, already_stopped_pids) {
        let _ = sys::send_signal(pid, libc::SIGCONT);
    }
}

/// The processes of a task, each of which was seen stopped. One of them may have forked between the
/// reading of their list and its own stop, so a later list must confirm that these are all.
#[derive(Debug)]
pub(crate) struct SeenStopped {
    /// `None` if no process could fork.
    pids: Option<BTreeSet<i32>>,
}

impl SeenStopped {
    /// Describes processes of which none could fork.
    pub(crate) fn without_forks() -> Self {
        Self { pids: None }
    }

    /// True if a census that began after the processes were seen contains no other process. False
    /// if the census has failed.
    pub(crate) fn are_all(&self, processes: &TaskProcesses<'_>, later_census: &Census) -> bool {
        self.pids.as_ref().is_none_or(|pids| {
            let later_pids = processes.try_pids_in(later_census);
            later_pids.is_ok_and(|later_pids| later_pids.iter().all(|pid| pids.contains(pid)))
        })
    }
}

/// Stops all processes of a task as [`signal_running`]. Returns true if no process of the task
/// runs. The caller must repeat the call until then.
pub(crate) fn signal_and_check_stopped(
    processes: &TaskProcesses<'_>,
    signalled_pids: &mut BTreeSet<i32>,
    vfork_rule: VforkRule,
) -> bool {
    signal_running(processes, &Census::default(), signalled_pids, vfork_rule)
        .is_some_and(|seen| seen.are_all(processes, &Census::default()))
}

/// Stops all processes of a task that a census contains. Returns them if each of them has stopped;
/// `None` if one runs, or if the census has failed.
/// The caller must repeat the call, with a new census, until then and until
/// [`SeenStopped::are_all`] returns true.
///
/// Each call sends SIGSTOP to the running processes that are not in `signalled_pids`, and adds
/// these processes to the set. Parents are stopped before their children: a parent that waits in
/// vfork until its child's exec could never stop if the child were stopped first. `vfork_rule`
/// decides about such a child. A second SIGSTOP would stay pending and disturb a dump, so only a
/// process receives it that something has continued after the first.
///
/// For a pause, all processes are signalled at once as soon as one was continued: its children may
/// have done this.
pub(crate) fn signal_running(
    processes: &TaskProcesses<'_>,
    census: &Census,
    signalled_pids: &mut BTreeSet<i32>,
    vfork_rule: VforkRule,
) -> Option<SeenStopped> {
    let states: BTreeMap<i32, (RunState, Option<i32>)> = processes
        .try_pids_in(census)
        .ok()?
        .into_iter()
        .map(|pid| (pid, (run_state(pid), parent_pid(pid))))
        .collect();
    if states.is_empty() && processes.are_some_absent() {
        return None;
    }
    let state_of = |pid: &i32| states.get(pid).map(|(state, _)| *state);
    let is_running = |pid: &i32| state_of(pid).is_some_and(|state| state != RunState::Stopped);
    // True if the parent waits in vfork for this child, and is to be stopped by stopping the child.
    let is_waited_for = |child: i32, parent: i32| {
        vfork_rule == VforkRule::ChildStops
            && state_of(&parent) == Some(RunState::InKernel)
            && facts::share_memory(child, parent)
    };
    let waits_for_stopped_child = |pid: i32| {
        states.iter().any(|(child, (state, parent))| {
            *parent == Some(pid) && *state == RunState::Stopped && is_waited_for(*child, pid)
        })
    };
    let continued_pids: BTreeSet<i32> = signalled_pids
        .iter()
        .copied()
        .filter(|pid| state_of(pid) == Some(RunState::Running) && was_continued(*pid))
        .collect();
    signalled_pids.retain(|pid| !continued_pids.contains(pid));
    let keeps_order = vfork_rule == VforkRule::ChildRuns || continued_pids.is_empty();
    let mut all_stopped = true;
    for (pid, (_, parent)) in states.iter().filter(|(pid, _)| is_running(pid)) {
        if waits_for_stopped_child(*pid) {
            continue;
        }
        all_stopped = false;
        let must_wait_for_parent = parent.is_some_and(|parent| {
            keeps_order
                && is_running(&parent)
                && !(signalled_pids.contains(&parent) && is_waited_for(*pid, parent))
        });
        if !must_wait_for_parent && signalled_pids.insert(*pid) {
            // Fails only if the process has ended.
            let _ = sys::send_signal(*pid, libc::SIGSTOP);
        } else if vfork_rule == VforkRule::ChildStops && signalled_pids.contains(pid) {
            redirect_pending_stop(*pid);
        }
    }
    all_stopped.then(|| SeenStopped {
        pids: Some(states.keys().copied().collect()),
    })
}

/// True if a process that had received SIGSTOP was continued. The process must have been seen
/// running after the signal.
fn was_continued(pid: i32) -> bool {
    let has_pending_stop = || {
        let is_pending = |id: i32| {
            let pending = proc::status(id).map(|status| status.sigpnd | status.shdpnd);
            pending.is_none_or(|signals| signals & STOP_BIT != 0)
        };
        let threads = proc::thread_states(pid);
        threads.map_or(true, |threads| {
            threads.iter().any(|(id, _)| is_pending(*id))
        })
    };
    // The order matters. If the signal is not pending, one thread has accepted it and has stopped,
    // so it is in the state T unless the process was continued since.
    !has_pending_stop()
        && proc::thread_states(pid).is_ok_and(|t| t.iter().all(|(_, state)| *state != 'T'))
}

/// Stops a process whose SIGSTOP the kernel has assigned to a thread that waits in vfork. That
/// thread does not accept the signal before its child's exec, and the kernel wakes no other thread
/// for it.
fn redirect_pending_stop(pid: i32) {
    let Ok(threads) = proc::thread_states(pid) else {
        return;
    };
    let has_waiting_thread = threads.iter().any(|(_, state)| *state == 'D');
    let interruptible_thread = threads
        .iter()
        .find(|(_, state)| !matches!(state, 'D' | 'T' | 'Z' | 'X'));
    let (true, Some((thread, _))) = (has_waiting_thread, interruptible_thread) else {
        return;
    };
    if proc::status(pid).is_some_and(|status| status.shdpnd & STOP_BIT != 0) {
        // SIGCONT removes the pending SIGSTOP, and the second SIGSTOP removes a pending SIGCONT.
        // Both fail only if the process has ended.
        let _ = sys::send_signal(pid, libc::SIGCONT);
        let _ = sys::send_thread_signal(pid, *thread, libc::SIGSTOP);
    }
}

/// Kills these processes by SIGKILL; those that have ended are skipped.
pub(crate) fn kill<'a>(pids: impl IntoIterator<Item = &'a i32>) {
    for pid in pids {
        // Fails if the process has ended.
        let _ = sys::send_signal(*pid, libc::SIGKILL);
    }
}

/// Returns those of these processes that execute instructions, or are ready to. A process that
/// waits in the kernel without being interruptible is not one of them.
pub(crate) fn executing_pids(pids: &[i32]) -> Vec<i32> {
    let is_executing = |pid: &&i32| run_state(**pid) == RunState::Running;
    pids.iter().filter(is_executing).copied().collect()
}

/// Continues the stopped children for which their parents wait in vfork, so that the parents can
/// stop. See [`VforkRule`].
pub(crate) fn continue_vfork_children(pids: &[i32]) {
    for pid in pids.iter().filter(|pid| is_stopped_by_signal(**pid)) {
        let is_waited_for = parent_pid(*pid).is_some_and(|parent| {
            run_state(parent) == RunState::InKernel && facts::share_memory(*pid, parent)
        });
        if is_waited_for {
            let _ = sys::send_signal(*pid, libc::SIGCONT);
        }
    }
}

/// Returns those of these processes that have not stopped: they execute instructions, or wait in
/// the kernel without being interruptible.
pub(crate) fn running_pids(pids: &[i32]) -> Vec<i32> {
    let is_running = |pid: &&i32| run_state(**pid) != RunState::Stopped;
    pids.iter().filter(is_running).copied().collect()
}

/// Returns those of these processes that a requested freeze of their control group has not reached:
/// frozen processes are in interruptible sleep.
pub(crate) fn unfrozen_pids(pids: &[i32]) -> Vec<i32> {
    let is_unfrozen = |pid: &&i32| {
        let threads = proc::thread_states(**pid);
        threads.map_or(true, |threads| {
            threads.iter().any(|(_, s)| matches!(s, 'R' | 'D'))
        })
    };
    pids.iter().filter(is_unfrozen).copied().collect()
}

/// Continues each of these stopped processes that was stopped before it returned from fork(2): such
/// a process still has copies of the library's sockets, which cannot be dumped. Returns true if any
/// process was continued; the task must then be stopped again.
pub(crate) fn continue_unfinished_forks(
    pids: &[i32],
    already_stopped_pids: &[i32],
    signalled_pids: &mut BTreeSet<i32>,
) -> bool {
    if pids.len() < 2 {
        return false;
    }
    let forking_pids = without_already_stopped(pids.to_vec(), already_stopped_pids)
        .into_iter()
        .filter(|pid| facts::has_library_sockets(*pid));
    forking_pids
        .map(|pid| {
            signalled_pids.remove(&pid);
            // Fails only if the process has ended; it then has no open sockets.
            let _ = sys::send_signal(pid, libc::SIGCONT);
        })
        .count()
        > 0
}

/// Sends SIGSTOP to all processes of a frozen task that are not stopped yet, so that none of them
/// runs when the task is thawed. Returns the PIDs of these processes. A child between vfork and
/// exec receives no signal, as in [`signal_running`]: it must run until its parent can
/// stop.
pub(crate) fn send_stop_to_frozen(processes: &TaskProcesses<'_>) -> BTreeSet<i32> {
    let shares_memory =
        |pid: i32| parent_pid(pid).is_some_and(|parent| facts::share_memory(pid, parent));
    let signal_pids = processes
        .pids()
        .into_iter()
        .filter(|pid| !is_stopped_by_signal(*pid) && !shares_memory(*pid));
    // Fails only if the process has ended.
    signal_pids
        .inspect(|pid| drop(sys::send_signal(*pid, libc::SIGSTOP)))
        .collect()
}

/// Waits until these processes have stopped again, but at most [`STOP_AGAIN_TIMEOUT`]. They need a
/// short time to stop after an engine has detached from them.
pub(crate) fn wait_until_stopped(pids: &[i32]) {
    let deadline = Instant::now() + STOP_AGAIN_TIMEOUT;
    while !running_pids(pids).is_empty() && Instant::now() < deadline {
        std::thread::sleep(STOP_AGAIN_POLL_INTERVAL);
    }
}

fn run_state(pid: i32) -> RunState {
    let Ok(threads) = proc::thread_states(pid) else {
        return RunState::Running;
    };
    let letters = threads.into_iter().map(|(_, letter)| letter);
    let unstopped_letters: Vec<char> = letters
        .filter(|letter| !matches!(letter, 'T' | 'Z' | 'X'))
        .collect();
    if unstopped_letters.is_empty() {
        RunState::Stopped
    } else if unstopped_letters.iter().all(|letter| *letter == 'D') {
        RunState::InKernel
    } else {
        RunState::Running
    }
}

/// True if no thread of a process will execute another instruction. The process may not have been
/// reaped yet.
pub(crate) fn has_ended(pid: i32) -> bool {
    let has_ended = |(_, letter): &(i32, char)| matches!(letter, 'Z' | 'X');
    proc::thread_states(pid).is_ok_and(|threads| threads.iter().all(has_ended))
}

pub(crate) fn is_stopped_by_signal(pid: i32) -> bool {
    proc::stat(pid).is_some_and(|stat| stat.state == 'T')
}

fn parent_pid(pid: i32) -> Option<i32> {
    Some(proc::stat(pid)?.ppid)
}

/// Returns the resources that a process and its reaped children have used; all values are zero if
/// the process was already reaped.
///
/// The sum of the process's user and system time is exact. Its split into the two, and the times of
/// the children, have the resolution of the kernel's ticks.
pub(crate) fn resource_usage(pid: i32) -> Usage {
    let Some(stat) = proc::stat(pid) else {
        return Usage::default();
    };
    let (user_ticks, system_ticks) = (stat.utime, stat.stime);
    let child_ticks = [stat.cutime, stat.cstime].map(|ticks| u64::try_from(ticks).unwrap_or(0));
    let tick_rate = procfs::ticks_per_second();
    let micros = |ticks: u64| ticks * 1_000_000 / tick_rate;
    let total_us = cpu_time_us(pid).unwrap_or(micros(user_ticks + system_ticks));
    let user_us = (u128::from(total_us) * u128::from(user_ticks))
        .checked_div(u128::from(user_ticks + system_ticks));
    let user_us = user_us.map_or(total_us, |user_us| user_us as u64);
    let resident_max_kib = proc::status(pid).and_then(|status| status.vmhwm);
    Usage {
        user: Micros(user_us + micros(child_ticks[0])),
        system: Micros(total_us - user_us + micros(child_ticks[1])),
        resident_max_bytes: resident_max_kib.unwrap_or(0) * 1024,
    }
}

/// Returns the processor time of all threads of a process in microseconds, from its CPU clock;
/// `None` if the process was reaped.
fn cpu_time_us(pid: i32) -> Option<u64> {
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
        let python_code = "import os, sys, time\nif os.fork() == 0:\n  while time.process_time() < 0.2: pass\n  os._exit(0)\n\
                    os.wait(); held = bytearray(b'x') * (50 << 20); print(); sys.stdout.flush(); time.sleep(1000)";
        let python = std::process::Command::new("python3")
            .args(["-c", python_code])
            .stdout(std::process::Stdio::piped())
            .spawn();
        let mut child = python.expect("python3");
        let mut line = [0];
        std::io::Read::read_exact(&mut child.stdout.take().expect("a pipe"), &mut line)
            .expect("it says when");
        let usage = resource_usage(child.id() as i32);
        child.kill().expect("it is there");
        child.wait().expect("it ends");
        assert!(usage.user.0 + usage.system.0 >= 190_000, "{usage:?}");
        assert!(usage.resident_max_bytes >= 50 << 20, "{usage:?}");
        let tick_us = 10_000;
        assert!(
            !usage.user.0.is_multiple_of(tick_us) || !usage.system.0.is_multiple_of(tick_us),
            "its own part is exact: {usage:?}"
        );
        assert_eq!(resource_usage(-1), Usage::default());
    }

    #[test]
    fn parent_of_running_process_is_known() {
        assert_eq!(
            parent_pid(std::process::id() as i32),
            Some(std::os::unix::process::parent_id() as i32)
        );
    }
}
