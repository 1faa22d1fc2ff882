//! Confines guests to as many processors as the owner allows.
//!
//! All threads of all guests run on the same processors, so together they never use more, however
//! many threads there are.

use crate::system::threads;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

/// Confines guests to the last of the available processors.
#[derive(Debug)]
pub struct Confine {
    /// Processors that this process may use, in ascending order. Guests never get others.
    all: Vec<usize>,
    /// Numbers of processors to which guests were confined since they last had all.
    kept: BTreeSet<usize>,
    /// File that records these numbers for the successor of this process.
    note: Option<PathBuf>,
}

impl Confine {
    /// Continues with the limits that a predecessor recorded in `note`.
    ///
    /// # Errors
    /// If the system does not report the processors of this process.
    pub fn new(note: Option<PathBuf>) -> io::Result<Confine> {
        let all = processors(&sched_getaffinity(Pid::from_raw(0))?);
        let text = note
            .as_ref()
            .and_then(|note| std::fs::read_to_string(note).ok())
            .unwrap_or_default();
        let kept = text
            .split_whitespace()
            .filter_map(|count| count.parse().ok());
        let kept = kept
            .filter(|count| (1..all.len()).contains(count))
            .collect();
        Ok(Confine { all, kept, note })
    }

    /// True if guests must be checked, because the owner limits them or did so before.
    pub fn is_needed(&self, cores: Option<u32>) -> bool {
        cores.is_some() || !self.kept.is_empty()
    }

    /// Confines these processes to `cores` processors, or to all with `None`. A thread that chose a
    /// subset of these keeps its choice.
    pub fn keep(&mut self, cores: Option<u32>, pids: impl IntoIterator<Item = i32>) {
        let count = cores.map_or(self.all.len(), |cores| {
            (cores.max(1) as usize).min(self.all.len())
        });
        if count < self.all.len() && self.kept.insert(count) {
            // Recorded before the change, because this process may be killed at any moment.
            self.write();
        }
        let now = self.last(count).to_vec();
        // A process that has exited needs no limit; a thread that cannot be changed is tried again
        // in the next call.
        for thread in pids
            .into_iter()
            .filter_map(|pid| threads(pid).ok())
            .flatten()
        {
            let _ = self.keep_thread(Pid::from_raw(thread), &now);
        }
        if count == self.all.len() && !self.kept.is_empty() {
            self.kept.clear();
            self.write();
        }
    }

    fn last(&self, count: usize) -> &[usize] {
        &self.all[self.all.len() - count..]
    }

    /// Records the limits. Errors are ignored: a successor then does not know these limits.
    fn write(&self) {
        let Some(note) = &self.note else { return };
        let counts: Vec<String> = self.kept.iter().map(usize::to_string).collect();
        let _ = match counts.is_empty() {
            true => std::fs::remove_file(note),
            false => std::fs::write(note, counts.join(" ")),
        };
    }

    fn keep_thread(&self, thread: Pid, now: &[usize]) -> Result<(), Errno> {
        let has = processors(&sched_getaffinity(thread)?);
        let among: Vec<usize> = has
            .iter()
            .copied()
            .filter(|one| now.contains(one))
            .collect();
        // A confinement of an earlier call was not the thread's own choice.
        let was_kept = self.kept.contains(&has.len()) && has == self.last(has.len());
        let wanted = if was_kept || among.is_empty() {
            now
        } else {
            &among
        };
        if has == wanted {
            return Ok(());
        }
        let mut set = CpuSet::new();
        wanted.iter().try_for_each(|one| set.set(*one))?;
        sched_setaffinity(thread, &set)
    }
}

fn processors(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count())
        .filter(|one| set.is_set(*one).unwrap_or(false))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A guest is confined to the allowed number of processors, and has all again afterwards.
    #[test]
    fn guest_is_confined_and_released() {
        let mut confine = Confine::new(None).expect("the system says it");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let has = || processors(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let (all, last) = (
            confine.all.clone(),
            confine.all[confine.all.len() - 1..].to_vec(),
        );
        confine.keep(Some(1), [pid]);
        let one = has();
        let needed = confine.is_needed(None);
        confine.keep(Some(1000), [pid]);
        let many = has();
        confine.keep(Some(1), [pid]);
        confine.keep(None, [pid]);
        let none = has();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!((one, many, none), (last, all.clone(), all.clone()));
        assert_eq!(
            (needed, confine.is_needed(None), confine.is_needed(Some(1))),
            (all.len() > 1, false, true)
        );
        confine.keep(Some(1), [pid]);
    }

    /// The successor of a killed load watcher releases guests from a limit that is no longer set.
    #[test]
    fn successor_releases_recorded_confinement() {
        let folder = tempfile::tempdir().expect("a folder");
        let note = folder.path().join("confined");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let has = || processors(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let mut killed = Confine::new(Some(note.clone())).expect("the system says it");
        killed.keep(Some(1), [pid]);
        let all = killed.all.clone();
        let mut next = Confine::new(Some(note.clone())).expect("the system says it");
        let (one, needed) = (has(), next.is_needed(None));
        next.keep(None, [pid]);
        let after = has();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!((one.len(), needed), (1, all.len() > 1));
        assert_eq!(
            (after, next.is_needed(None), note.exists()),
            (all, false, false)
        );
        std::fs::write(&note, "0 x 99999").expect("written");
        assert!(
            !Confine::new(Some(note))
                .expect("the system says it")
                .is_needed(None),
            "what is no number of them is none"
        );
    }

    /// A thread that chose a subset of the processors keeps its choice.
    #[test]
    fn own_affinity_of_thread_is_kept() {
        let mut confine = Confine::new(None).expect("the system says it");
        let last = confine.all[confine.all.len() - 1];
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = Pid::from_raw(child.id().cast_signed());
        let mut set = CpuSet::new();
        set.set(last).expect("it is there");
        sched_setaffinity(pid, &set).expect("it is ours");
        confine.keep(None, [pid.as_raw()]);
        let has = processors(&sched_getaffinity(pid).expect("it lives"));
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!(has, [last]);
    }
}
