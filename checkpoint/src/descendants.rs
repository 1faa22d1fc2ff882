//! Kills everything that descends from a tasker. Without PID namespaces the kernel kills only the
//! first processes of its tasks with it.

use crate::proc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of readings of all processes. More are needed only if processes fork faster than
/// they are read.
const KILL_ROUNDS_MAX: usize = 16;

/// Kills all processes that descend from the process `root_pid`, which must be their subreaper: so
/// their orphans are its children. The process itself is not killed.
pub fn kill_descendants(root_pid: i32) {
    let mut killed_pids = BTreeSet::new();
    for _ in 0..KILL_ROUNDS_MAX {
        // A process may have forked after it was read and before it was killed.
        let mut pids = descendants(&read_parents(), root_pid);
        pids.retain(|pid| killed_pids.insert(*pid));
        if pids.is_empty() {
            return;
        }
        for pid in pids {
            // Fails if the process has ended.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Returns the parent of each process of the host that has not ended; empty if /proc cannot be
/// read.
fn read_parents() -> BTreeMap<i32, i32> {
    let pids = proc::process_ids().unwrap_or_default();
    let processes = pids.into_iter().filter_map(proc::stat);
    let living = processes.filter(|stat| !matches!(stat.state, 'Z' | 'X'));
    living.map(|stat| (stat.pid, stat.ppid)).collect()
}

/// Returns the processes that descend from `root_pid`, those with living parents before their
/// children. `parents` contains the parent of each process.
fn descendants(parents: &BTreeMap<i32, i32>, root_pid: i32) -> Vec<i32> {
    let mut children = BTreeMap::<i32, Vec<i32>>::new();
    for (pid, parent) in parents {
        children.entry(*parent).or_default().push(*pid);
    }
    let (mut pids, mut next_index) = (children.remove(&root_pid).unwrap_or_default(), 0);
    while let Some(pid) = pids.get(next_index).copied() {
        pids.extend(children.remove(&pid).unwrap_or_default());
        next_index += 1;
    }
    pids
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn only_descendants_are_found() {
        let parents = BTreeMap::from([(10, 1), (20, 10), (21, 20), (5, 21), (30, 1)]);
        assert_eq!(descendants(&parents, 10), [20, 21, 5]);
        assert!(descendants(&parents, 30).is_empty());
    }

    /// The child of a shell is killed, and the shell sees it.
    #[test]
    fn descendant_of_other_process_is_killed() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 1000 & echo started; wait $!; echo $?; read x"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let output = BufReader::new(shell.stdout.take().expect("a pipe"));
        let mut lines = output.lines().map_while(Result::ok);
        assert_eq!(lines.next().as_deref(), Some("started"));
        kill_descendants(shell.id().cast_signed());
        assert_eq!(lines.next().as_deref(), Some("137"));
        drop(shell.stdin.take());
        shell.wait().expect("it is a child");
    }
}
