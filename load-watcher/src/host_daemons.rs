//! Finds the daemons of this host in the process table, with the processes of their tasks. So users
//! of the host learn of virtual machines whose load watcher does not answer.
//!
//! The names of processes prove nothing: any user can give any name to a process. What is found is
//! therefore only reported, with the user of the process, and never trusted.

use procfs::process::{Process, all_processes};
use std::collections::BTreeMap;

/// Name of a daemon's process.
const DAEMON_PROGRAM: &str = "pvmd";
/// Name of the process that starts the tasks of a daemon.
pub const TASKER_PROGRAM: &str = "pvm-tasker";
/// Option of a tasker of the service, before the uid of its user.
const TASKER_USER_OPTION: &str = "--user";
/// Name of the first process of the PID namespace of a task, which the tasker starts.
pub const INIT_PROGRAM: &str = "pvm-init";
/// Names of processes that serve a virtual machine, as the kernel truncates them.
const SERVICE_PROGRAMS: [&str; 3] = [TASKER_PROGRAM, WATCHER_PROGRAM, "pvm-rm"];
/// Name of the process of a load watcher, as the kernel truncates it.
const WATCHER_PROGRAM: &str = "pvm-load-watche";
/// Largest number of daemons that are reported.
pub const DAEMONS_MAX: usize = 256;

/// A process of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProcessEntry {
    parent: i32,
    name: String,
}

/// A daemon of this host, or the tasker that the tasker service runs for a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDaemon {
    pub pid: i32,
    /// Uid of the user of the virtual machine.
    pub uid: u32,
    /// The processes of its tasks, with their names.
    pub task_processes: Vec<(i32, String)>,
}

/// Returns the resident memory of a process in bytes; 0 if it has exited.
pub fn resident_bytes(pid: i32) -> u64 {
    let pages = Process::new(pid).and_then(|process| process.statm());
    pages.map_or(0, |pages| pages.resident * procfs::page_size())
}

/// Returns the daemons of this host, at most [`DAEMONS_MAX`], except those that are ancestors of
/// the processes `watchers`: their load watchers have answered. Processes that this user may not
/// see are missing.
pub fn daemons_without_watcher(watchers: &[i32]) -> Vec<HostDaemon> {
    let entries = read_process_table();
    let pids = find_daemons(&entries, watchers);
    let pids = pids.into_iter().filter(|pid| is_on_this_host(*pid));
    let daemons = pids.take(DAEMONS_MAX).filter_map(|pid| {
        Some(HostDaemon {
            pid,
            uid: user_of(pid)?,
            task_processes: task_processes(&entries, pid),
        })
    });
    daemons.collect()
}

fn read_process_table() -> BTreeMap<i32, ProcessEntry> {
    all_processes()
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|process| {
            let stat = process.stat().ok()?;
            let (parent, name) = (stat.ppid, stat.comm);
            Some((stat.pid, ProcessEntry { parent, name }))
        })
        .collect()
}

/// A tasker of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostTasker {
    pub pid: i32,
    /// Uid of the user of the virtual machine.
    pub uid: u32,
    /// PIDs of the load watchers that the tasker has started.
    pub watchers: Vec<i32>,
    /// The processes of its tasks, with their names.
    pub task_processes: Vec<(i32, String)>,
}

/// Returns the taskers of this host, at most [`DAEMONS_MAX`]. Processes that this user may not see
/// are missing.
pub fn taskers() -> Vec<HostTasker> {
    let entries = read_process_table();
    let pids = find_taskers(&entries).into_iter();
    let taskers = pids.filter(|pid| is_on_this_host(*pid)).filter_map(|pid| {
        Some(HostTasker {
            pid,
            uid: user_of(pid)?,
            watchers: watchers_below(&entries, pid),
            task_processes: task_processes(&entries, pid),
        })
    });
    taskers.take(DAEMONS_MAX).collect()
}

/// Returns the processes with the name of a tasker that are not below another one: a tasker that
/// starts a task has, for a moment, a child with its own name.
fn find_taskers(entries: &BTreeMap<i32, ProcessEntry>) -> Vec<i32> {
    let is_tasker = |pid: &i32| entries.get(pid).is_some_and(|e| e.name == TASKER_PROGRAM);
    let pids = entries.keys().filter(|pid| is_tasker(pid));
    pids.filter(|pid| !ancestors(entries, **pid).iter().any(is_tasker))
        .copied()
        .collect()
}

fn watchers_below(entries: &BTreeMap<i32, ProcessEntry>, tasker: i32) -> Vec<i32> {
    let is_watcher = |entry: &ProcessEntry| entry.name == WATCHER_PROGRAM;
    let watchers = entries.iter().filter(|(_, entry)| is_watcher(entry));
    watchers
        .map(|(pid, _)| *pid)
        .filter(|pid| ancestors(entries, *pid).contains(&tasker))
        .collect()
}

/// True unless the process belongs to a container: it has a PID namespace of its own, or another
/// network namespace, where its load watcher answers.
fn is_on_this_host(pid: i32) -> bool {
    let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net"));
    let is_in_container = Process::new(pid)
        .and_then(|process| process.status())
        .is_ok_and(|status| status.nspid.is_some_and(|pids| pids.len() > 1));
    // The network namespace of another user's process cannot be read.
    let has_other_network = match (network(&pid.to_string()), network("self")) {
        (Ok(other), Ok(own)) => other != own,
        _ => false,
    };
    !is_in_container && !has_other_network
}

/// Returns the user whose virtual machine the daemon or tasker `pid` serves; `None` if the process
/// has ended.
fn user_of(pid: i32) -> Option<u32> {
    let process = Process::new(pid).ok()?;
    let arguments = process.cmdline().unwrap_or_default();
    let served_user = arguments
        .windows(2)
        .find(|pair| pair[0] == TASKER_USER_OPTION)
        .and_then(|pair| pair[1].parse().ok());
    served_user.or_else(|| process.uid().ok())
}

/// Returns the ancestors of a process, nearest first.
fn ancestors(entries: &BTreeMap<i32, ProcessEntry>, pid: i32) -> Vec<i32> {
    let mut ancestors = Vec::new();
    let mut current = pid;
    while let Some(entry) = entries.get(&current) {
        // The table was not read at one moment, so it may contain a cycle.
        if entry.parent == pid || ancestors.contains(&entry.parent) {
            break;
        }
        ancestors.push(entry.parent);
        current = entry.parent;
    }
    ancestors
}

/// Returns the daemons that run a tasker, and the taskers of the service, that are not an ancestor
/// of one of the processes `watchers`.
fn find_daemons(entries: &BTreeMap<i32, ProcessEntry>, watchers: &[i32]) -> Vec<i32> {
    let watched: Vec<i32> = watchers
        .iter()
        .flat_map(|pid| ancestors(entries, *pid))
        .collect();
    let is_daemon = |pid: &i32| entries.get(pid).is_some_and(|e| e.name == DAEMON_PROGRAM);
    let is_tasker = |pid: &i32| entries.get(pid).is_some_and(|e| e.name == TASKER_PROGRAM);
    let taskers = entries
        .iter()
        .filter(|(_, entry)| entry.name == TASKER_PROGRAM && !is_tasker(&entry.parent));
    let mut daemons: Vec<i32> = taskers
        .map(|(pid, tasker)| match is_daemon(&tasker.parent) {
            true => tasker.parent,
            false => *pid,
        })
        .filter(|pid| !watched.contains(pid))
        .collect();
    daemons.sort_unstable();
    daemons.dedup();
    daemons
}

/// Returns the processes of a daemon's tasks: everything that its tasker has started, except
/// services.
fn task_processes(entries: &BTreeMap<i32, ProcessEntry>, daemon: i32) -> Vec<(i32, String)> {
    let is_service = |entry: &ProcessEntry| SERVICE_PROGRAMS.contains(&entry.name.as_str());
    let belongs_to_tasks = |pid: i32| {
        let line = ancestors(entries, pid);
        let tasker = line.iter().position(|ancestor| {
            entries.get(ancestor).is_some_and(|entry| {
                entry.name == TASKER_PROGRAM && (entry.parent == daemon || *ancestor == daemon)
            })
        });
        tasker.is_some_and(|position| {
            let between = line[..position].iter();
            !between.filter_map(|pid| entries.get(pid)).any(is_service)
        })
    };
    let is_task = |entry: &ProcessEntry| !is_service(entry) && entry.name != INIT_PROGRAM;
    let candidates = entries.iter().filter(|(_, entry)| is_task(entry));
    candidates
        .filter(|(pid, _)| belongs_to_tasks(**pid))
        .map(|(pid, entry)| (*pid, entry.name.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process_table(lines: &[(i32, i32, &str)]) -> BTreeMap<i32, ProcessEntry> {
        let entry = |(pid, parent, name): &(i32, i32, &str)| {
            let (parent, name) = (*parent, name.to_string());
            (*pid, ProcessEntry { parent, name })
        };
        lines.iter().map(entry).collect()
    }

    /// Daemons whose load watcher has answered are omitted. A process that is named like a daemon
    /// and has no tasker is none. Guests are all processes below a tasker except services.
    #[test]
    fn daemons_without_watcher_are_found_with_their_guests() {
        let table = process_table(&[
            (1, 0, "init"),
            (10, 1, "pvmd"),
            (11, 10, "pvm-tasker"),
            (12, 11, "pvm-load-watche"),
            (13, 11, "worker"),
            (20, 1, "pvmd"),
            (21, 20, "pvm-tasker"),
            (22, 21, "pvm-rm"),
            (23, 21, "pvm-tasker"),
            (27, 21, "pvm-init"),
            (24, 27, "worker"),
            (25, 24, "child"),
            (26, 20, "ssh"),
            (30, 1, "pvmd"),
            (40, 1, "pvm-taskerd"),
            (41, 40, "pvm-tasker"),
            (42, 41, "pvm-init"),
            (43, 42, "served"),
            (44, 40, "pvm-tasker"),
            (45, 44, "pvm-load-watche"),
        ]);
        assert_eq!(find_daemons(&table, &[12, 45]), [20, 41]);
        assert_eq!(find_daemons(&table, &[]), [10, 20, 41, 44]);
        assert_eq!(task_processes(&table, 41), [(43, "served".to_string())]);
        let guests = task_processes(&table, 20);
        let names: Vec<&str> = guests.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["worker", "child"]);
    }

    /// A child of a tasker with the tasker's name is no tasker. The tasks of each tasker are its
    /// own, also if the tasker service has started it.
    #[test]
    fn taskers_are_found_with_their_tasks() {
        let table = process_table(&[
            (5, 1, "pvm-taskerd"),
            (11, 5, "pvm-tasker"),
            (12, 11, "pvm-load-watche"),
            (13, 11, "pvm-init"),
            (14, 13, "worker"),
            (15, 11, "pvm-tasker"),
            (20, 1, "pvmd"),
            (21, 20, "pvm-tasker"),
            (22, 21, "other"),
        ]);
        assert_eq!(find_taskers(&table), [11, 21]);
        assert_eq!(watchers_below(&table, 11), [12]);
        assert!(watchers_below(&table, 21).is_empty());
        let tasks = |tasker| task_processes(&table, tasker);
        assert_eq!(tasks(11), [(14, "worker".to_string())]);
        assert_eq!(tasks(21), [(22, "other".to_string())]);
    }

    #[test]
    fn own_process_is_on_this_host() {
        let pid = std::process::id().cast_signed();
        assert!(is_on_this_host(pid));
        assert!(resident_bytes(pid) > 0);
    }

    /// A table that was not read at one moment may contain a cycle.
    #[test]
    fn cycle_of_parents_ends() {
        let table = process_table(&[(2, 3, "a"), (3, 2, "b")]);
        assert_eq!(ancestors(&table, 2), [3]);
    }
}
