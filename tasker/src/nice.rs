//! Priorities of a task's threads while the task quiesces. The threads of the program have the
//! lowest priority, and those of PVM's library a high one.

use crate::sys;
use procfs::process::{Process, Task};
use std::collections::BTreeMap;

/// Names of the threads of PVM's library that quiesce a task.
const LIBRARY_THREADS: [&str; 2] = ["pvm-helper", "pvm-ear"];
/// Nice value of the program's threads while the task quiesces.
const LOWEST_NICE: i32 = 19;
/// Nice value of the library's threads while the task quiesces.
const LIBRARY_NICE: i32 = -10;

/// The previous nice values, by thread id, of the threads whose priorities were changed.
#[derive(Debug, Default)]
pub(crate) struct DeprioritizedThreads {
    previous_nice: BTreeMap<i32, i32>,
    /// Nice value for threads that the task has created since its priorities were changed. It is
    /// the previous nice value of the first thread of the first process.
    default_nice: i32,
}

impl DeprioritizedThreads {
    /// Lowers the priorities of the program's threads in these processes, and raises those of the
    /// library's threads. Changes nothing if the tasker may not raise priorities, because the
    /// tasker could not restore the previous priorities.
    pub(crate) fn change_priorities(pids: &[i32]) -> Self {
        let default_nice = pids
            .iter()
            .min()
            .and_then(|pid| sys::nice_of(*pid))
            .unwrap_or_default();
        let mut changed_threads = Self {
            previous_nice: BTreeMap::new(),
            default_nice,
        };
        if !sys::can_raise_priority() {
            return changed_threads;
        }
        for (tid, name) in pids.iter().flat_map(|pid| threads_of(*pid)) {
            let Some(nice) = sys::nice_of(tid) else {
                continue;
            };
            changed_threads.previous_nice.insert(tid, nice);
            sys::set_nice(
                tid,
                if LIBRARY_THREADS.contains(&name.trim_end()) {
                    LIBRARY_NICE
                } else {
                    LOWEST_NICE
                },
            );
        }
        changed_threads
    }

    /// Restores the priorities of all threads of these processes.
    pub(crate) fn restore_priorities(&self, pids: &[i32]) {
        if self.previous_nice.is_empty() {
            return;
        }
        for (tid, _) in pids.iter().flat_map(|pid| threads_of(*pid)) {
            let nice = self
                .previous_nice
                .get(&tid)
                .copied()
                .unwrap_or(self.default_nice);
            sys::set_nice(tid, nice);
        }
    }
}

/// Sets all threads of these processes to the lowest priority. The processes are about to be
/// killed, and the kernel's work for their exit is not urgent.
pub(crate) fn deprioritize(pids: &[i32]) {
    for (thread, _) in pids.iter().flat_map(|pid| threads_of(*pid)) {
        sys::set_nice(thread, LOWEST_NICE);
    }
}

/// Returns the ids of the threads of these processes except those of PVM's library; empty if the
/// processes have no library threads.
pub(crate) fn program_threads(pids: &[i32]) -> Vec<i32> {
    let is_library_thread = |(_, name): &(i32, String)| LIBRARY_THREADS.contains(&name.trim_end());
    let task_threads = pids.iter().flat_map(|pid| threads_of(*pid));
    let (library_threads, other_threads): (Vec<_>, Vec<_>) =
        task_threads.partition(is_library_thread);
    if library_threads.is_empty() {
        Vec::new()
    } else {
        other_threads
            .into_iter()
            .map(|(thread, _)| thread)
            .collect()
    }
}

/// Returns the id and the name of each thread of a process.
fn threads_of(pid: i32) -> Vec<(i32, String)> {
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let thread_with_name = |thread: Task| {
        let name = thread
            .stat()
            .map_or_else(|_| String::new(), |stat| stat.comm);
        (thread.tid, name)
    };
    threads
        .into_iter()
        .flatten()
        .flatten()
        .map(thread_with_name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn nice_value_is_restored_after_lowering() {
        let test_nice =
            sys::nice_of(std::process::id() as i32).expect("this process has a nice value");
        let child_nice = (test_nice + 3).min(LOWEST_NICE);
        let mut child = Command::new("nice")
            .args(["-n", "3", "sleep", "60"])
            .spawn()
            .expect("nice");
        let pid = child.id() as i32;
        while sys::nice_of(pid) != Some(child_nice) {
            let exit_status = child.try_wait().expect("a child");
            assert!(
                exit_status.is_none(),
                "the child ended before it had the nice value {child_nice}: {exit_status:?}"
            );
            std::thread::yield_now();
        }
        let changed_threads = DeprioritizedThreads::change_priorities(&[pid]);
        let lowered_nice = sys::nice_of(pid);
        changed_threads.restore_priorities(&[pid]);
        assert_eq!(
            lowered_nice,
            Some(if sys::can_raise_priority() {
                LOWEST_NICE
            } else {
                child_nice
            })
        );
        assert_eq!(sys::nice_of(pid), Some(child_nice));
        child.kill().expect("it is there");
        child.wait().expect("a child");
    }
}
