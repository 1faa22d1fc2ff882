//! How urgent the threads of a task are: while it has to let go, its own come behind everybody else's and those of its
//! library before them.

use crate::sys;
use std::collections::BTreeMap;

/// Names of the threads by which a task's library lets go.
const HELPERS: [&str; 2] = ["pvm-helper", "pvm-ear"];
/// What everything else of the task comes down to meanwhile.
const LAST: i32 = 19;
/// What the library's threads come up to.
const FIRST: i32 = -10;

/// Threads and how urgent they were before.
#[derive(Debug, Default)]
pub(crate) struct Lowered {
    before: BTreeMap<i32, i32>,
    /// Of the first process's first thread: what threads get that were made meanwhile.
    usual: i32,
}

impl Lowered {
    /// Lowers all threads of these processes but the library's. Without the right to raise them again nothing is changed.
    pub(crate) fn now(pids: &[i32]) -> Lowered {
        let usual = pids
            .iter()
            .min()
            .and_then(|pid| sys::nice_of(*pid))
            .unwrap_or_default();
        let mut lowered = Lowered {
            before: BTreeMap::new(),
            usual,
        };
        if !sys::may_raise() {
            return lowered;
        }
        for (thread, name) in pids.iter().flat_map(|pid| threads(*pid)) {
            let Some(nice) = sys::nice_of(thread) else {
                continue;
            };
            lowered.before.insert(thread, nice);
            sys::set_nice(
                thread,
                if HELPERS.contains(&name.trim_end()) {
                    FIRST
                } else {
                    LAST
                },
            );
        }
        lowered
    }

    /// Makes all threads of these processes as urgent as they were.
    pub(crate) fn restore(&self, pids: &[i32]) {
        if self.before.is_empty() {
            return;
        }
        for (thread, _) in pids.iter().flat_map(|pid| threads(*pid)) {
            let nice = self.before.get(&thread).copied().unwrap_or(self.usual);
            sys::set_nice(thread, nice);
        }
    }
}

/// Puts these processes behind everybody else: they are about to be killed, and what the kernel has to do for their end has time.
pub(crate) fn put_last(pids: &[i32]) {
    for (thread, _) in pids.iter().flat_map(|pid| threads(*pid)) {
        sys::set_nice(thread, LAST);
    }
}

/// The threads of these processes that are not their libraries'. None if no library is there to have any.
pub(crate) fn of_programs(pids: &[i32]) -> Vec<i32> {
    let is_library = |(_, name): &(i32, String)| HELPERS.contains(&name.trim_end());
    let all = pids.iter().flat_map(|pid| threads(*pid));
    let (libraries, programs): (Vec<_>, Vec<_>) = all.partition(is_library);
    if libraries.is_empty() {
        Vec::new()
    } else {
        programs.into_iter().map(|(thread, _)| thread).collect()
    }
}

/// The threads of a process and their names.
fn threads(pid: i32) -> Vec<(i32, String)> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return Vec::new();
    };
    let named = |thread: std::fs::DirEntry| {
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        Some((thread.file_name().to_str()?.parse().ok()?, name))
    };
    threads.flatten().filter_map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_as_urgent_as_before_when_it_was_lowered_for_a_while() {
        let mut child = Command::new("nice")
            .args(["-n", "3", "sleep", "60"])
            .spawn()
            .expect("nice");
        let pid = child.id() as i32;
        while sys::nice_of(pid) != Some(3) {
            std::thread::yield_now();
        }
        let lowered = Lowered::now(&[pid]);
        let meanwhile = sys::nice_of(pid);
        lowered.restore(&[pid]);
        assert_eq!(meanwhile, Some(if sys::may_raise() { LAST } else { 3 }));
        assert_eq!(sys::nice_of(pid), Some(3));
        child.kill().expect("it is there");
        child.wait().expect("a child");
    }
}
