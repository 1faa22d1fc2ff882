//! Priorities of a task's threads while the task quiesces: the threads of the program get the
//! lowest priority, and those of its library a high one.

use crate::sys;
use procfs::process::{Process, Task};
use std::collections::BTreeMap;

/// Names of the library's threads that quiesce a task.
const LIBRARY_THREADS: [&str; 2] = ["pvm-helper", "pvm-ear"];
/// Nice value of the program's threads while the task quiesces.
const LOWEST_NICE: i32 = 19;
/// Nice value of the library's threads while the task quiesces.
const LIBRARY_NICE: i32 = -10;

/// The previous nice values of threads whose priorities were changed, by thread id.
#[derive(Debug, Default)]
pub(crate) struct DeprioritizedThreads {
    previous_nice: BTreeMap<i32, i32>,
    /// Nice value for threads that were created after the change: that of the first thread of the
    /// first process.
    default_nice: i32,
}

impl DeprioritizedThreads {
    /// Lowers the priorities of the program's threads in these processes, and raises those of the
    /// library's threads. Changes nothing if the tasker lacks the capability to restore the
    /// priorities.
    pub(crate) fn lower(pids: &[i32]) -> DeprioritizedThreads {
        let default_nice = pids
            .iter()
            .min()
            .and_then(|pid| sys::nice_of(*pid))
            .unwrap_or_default();
        let mut deprioritized = DeprioritizedThreads {
            previous_nice: BTreeMap::new(),
            default_nice,
        };
        if !sys::can_raise_priority() {
            return deprioritized;
        }
        for (thread, name) in pids.iter().flat_map(|pid| threads(*pid)) {
            let Some(nice) = sys::nice_of(thread) else {
                continue;
            };
            deprioritized.previous_nice.insert(thread, nice);
            sys::set_nice(
                thread,
                if LIBRARY_THREADS.contains(&name.trim_end()) {
                    LIBRARY_NICE
                } else {
                    LOWEST_NICE
                },
            );
        }
        deprioritized
    }

    /// Restores the priorities of all threads of these processes.
    pub(crate) fn restore(&self, pids: &[i32]) {
        if self.previous_nice.is_empty() {
            return;
        }
        for (thread, _) in pids.iter().flat_map(|pid| threads(*pid)) {
            let nice = self
                .previous_nice
                .get(&thread)
                .copied()
                .unwrap_or(self.default_nice);
            sys::set_nice(thread, nice);
        }
    }
}

/// Gives these processes the lowest priority. They are about to be killed, and the kernel's work
/// for their exit is not urgent.
pub(crate) fn deprioritize(pids: &[i32]) {
    for (thread, _) in pids.iter().flat_map(|pid| threads(*pid)) {
        sys::set_nice(thread, LOWEST_NICE);
    }
}

/// Returns the threads of these processes that do not belong to a library; empty if the processes
/// have no library threads.
pub(crate) fn program_threads(pids: &[i32]) -> Vec<i32> {
    let is_library = |(_, name): &(i32, String)| LIBRARY_THREADS.contains(&name.trim_end());
    let all = pids.iter().flat_map(|pid| threads(*pid));
    let (libraries, programs): (Vec<_>, Vec<_>) = all.partition(is_library);
    if libraries.is_empty() {
        Vec::new()
    } else {
        programs.into_iter().map(|(thread, _)| thread).collect()
    }
}

/// Returns the ids of a process's threads with their names.
fn threads(pid: i32) -> Vec<(i32, String)> {
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let named = |thread: Task| {
        let name = thread
            .stat()
            .map_or_else(|_| String::new(), |stat| stat.comm);
        (thread.tid, name)
    };
    threads.into_iter().flatten().flatten().map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn nice_value_is_restored_after_lowering() {
        let own = sys::nice_of(std::process::id() as i32).expect("this process has a nice value");
        let expected = (own + 3).min(LOWEST_NICE);
        let mut child = Command::new("nice")
            .args(["-n", "3", "sleep", "60"])
            .spawn()
            .expect("nice");
        let pid = child.id() as i32;
        while sys::nice_of(pid) != Some(expected) {
            let ended = child.try_wait().expect("a child");
            assert!(
                ended.is_none(),
                "the child ended before it had the nice value {expected}: {ended:?}"
            );
            std::thread::yield_now();
        }
        let deprioritized = DeprioritizedThreads::lower(&[pid]);
        let meanwhile = sys::nice_of(pid);
        deprioritized.restore(&[pid]);
        assert_eq!(
            meanwhile,
            Some(if sys::can_raise_priority() {
                LOWEST_NICE
            } else {
                expected
            })
        );
        assert_eq!(sys::nice_of(pid), Some(expected));
        child.kill().expect("it is there");
        child.wait().expect("a child");
    }
}
