//! Stopping and continuing all processes of a task, and seeing from /proc that they are stopped.

use crate::namespace::Namespace;
use crate::sys;

/// What /proc says about all threads of a process together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It is stopped (or nothing of it runs because it has ended).
    Still,
    /// A thread of it may run.
    Moving,
}

/// Processes of the namespace that are stopped already, by the numbers they have inside it.
pub(crate) fn stopped_now(namespace: &Namespace) -> Vec<i32> {
    let stopped = namespace.pids().into_iter().filter(|pid| is_stopped_by_signal(*pid));
    stopped.filter_map(inner_pid).collect()
}

/// Sends SIGSTOP to everybody in the namespace.
pub(crate) fn stop_all(namespace: &Namespace) {
    for pid in namespace.pids() {
        // One that has ended needs no stopping.
        let _ = sys::kill_raw(pid, libc::SIGSTOP);
    }
}

/// Sends SIGCONT to everybody in the namespace but those who had been stopped before.
pub(crate) fn continue_all(namespace: &Namespace, stopped_before: &[i32]) {
    for pid in namespace.pids() {
        if stopped_before.is_empty() || !inner_pid(pid).is_some_and(|inner| stopped_before.contains(&inner)) {
            let _ = sys::kill_raw(pid, libc::SIGCONT);
        }
    }
}

/// True if nobody in the namespace runs. Whoever is found running (it may have been forked meanwhile) is told again.
pub(crate) fn all_still(namespace: &Namespace) -> bool {
    let seen = namespace.pids();
    let moving: Vec<i32> = seen.iter().copied().filter(|pid| state(*pid) == State::Moving).collect();
    for &pid in &moving {
        let _ = sys::kill_raw(pid, libc::SIGSTOP);
    }
    // Somebody seen stopped may have made a process after the list was read; a second list shows it.
    moving.is_empty() && namespace.pids().iter().all(|pid| seen.contains(pid))
}

fn state(pid: i32) -> State {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return State::Still };
    let moving = threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        !matches!(letter(&stat), None | Some('T' | 'Z' | 'X'))
    });
    if moving { State::Moving } else { State::Still }
}

fn is_stopped_by_signal(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| letter(&stat) == Some('T'))
}

/// The state letter of a line of /proc/PID/stat. The name before it may hold anything, even parentheses.
fn letter(stat: &str) -> Option<char> {
    stat[stat.rfind(')')? + 1..].trim_start().chars().next()
}

/// The number that a process has in its own namespace.
fn inner_pid(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_found_behind_any_name() {
        assert_eq!(letter("12 (a) T (x)) R 1 2"), Some('R'));
        assert_eq!(letter("12 (sh) T 1 2"), Some('T'));
        assert_eq!(letter(""), None);
    }
}
