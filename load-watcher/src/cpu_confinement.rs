//! Confines guests to the number of processors that the owner allows.
//!
//! All threads of all guests run on the same processors, so the guests together never use more
//! processors, however many threads they have.

use crate::system::thread_ids;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

/// Confines guests to the last of the processors that are available to this process.
#[derive(Debug)]
pub struct CpuConfinement {
    /// Processors that this process may use, in ascending order. Guests never get other processors.
    available_processors: Vec<usize>,
    /// Each number of processors to which guests were confined since they last had all processors.
    past_limits: BTreeSet<usize>,
    /// File in which `past_limits` is recorded for the load watcher that replaces this process;
    /// `None` if nothing is recorded.
    record_path: Option<PathBuf>,
}

impl CpuConfinement {
    /// Creates a confinement that continues with the limits that the previous load watcher recorded
    /// in the file `note`.
    ///
    /// # Errors
    /// The system does not report the processors of this process.
    pub fn new(note: Option<PathBuf>) -> io::Result<CpuConfinement> {
        let all = processor_ids(&sched_getaffinity(Pid::from_raw(0))?);
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
        Ok(CpuConfinement {
            available_processors: all,
            past_limits: kept,
            record_path: note,
        })
    }

    /// True if guests must be checked, because the owner limits them now or limited them before.
    pub fn is_needed(&self, cores: Option<u32>) -> bool {
        cores.is_some() || !self.past_limits.is_empty()
    }

    /// Confines these processes to `cores` processors, or to all available ones if `cores` is
    /// `None`. A thread that has itself selected a subset of these processors keeps its selection.
    pub fn apply(&mut self, cores: Option<u32>, pids: impl IntoIterator<Item = i32>) {
        let count = cores.map_or(self.available_processors.len(), |cores| {
            (cores.max(1) as usize).min(self.available_processors.len())
        });
        if count < self.available_processors.len() && self.past_limits.insert(count) {
            // Must be recorded before the change, because this process may be killed at any moment.
            self.write_record();
        }
        let now = self.last_processors(count).to_vec();
        // A process that has exited needs no limit. If a thread cannot be changed, the next call
        // tries again.
        for thread in pids
            .into_iter()
            .filter_map(|pid| thread_ids(pid).ok())
            .flatten()
        {
            let _ = self.apply_to_thread(Pid::from_raw(thread), &now);
        }
        if count == self.available_processors.len() && !self.past_limits.is_empty() {
            self.past_limits.clear();
            self.write_record();
        }
    }

    fn last_processors(&self, count: usize) -> &[usize] {
        &self.available_processors[self.available_processors.len() - count..]
    }

    /// Records `past_limits`. Errors are ignored: the next load watcher then does not know these
    /// limits.
    fn write_record(&self) {
        let Some(note) = &self.record_path else {
            return;
        };
        let counts: Vec<String> = self.past_limits.iter().map(usize::to_string).collect();
        let _ = match counts.is_empty() {
            true => std::fs::remove_file(note),
            false => std::fs::write(note, counts.join(" ")),
        };
    }

    fn apply_to_thread(&self, thread: Pid, allowed: &[usize]) -> Result<(), Errno> {
        let current = processor_ids(&sched_getaffinity(thread)?);
        let own_choice: Vec<usize> = current
            .iter()
            .copied()
            .filter(|one| allowed.contains(one))
            .collect();
        // A confinement by an earlier call is not the thread's own selection.
        let was_kept = self.past_limits.contains(&current.len())
            && current == self.last_processors(current.len());
        let wanted = if was_kept || own_choice.is_empty() {
            allowed
        } else {
            &own_choice
        };
        if current == wanted {
            return Ok(());
        }
        let mut set = CpuSet::new();
        wanted.iter().try_for_each(|one| set.set(*one))?;
        sched_setaffinity(thread, &set)
    }
}

fn processor_ids(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count())
        .filter(|one| set.is_set(*one).unwrap_or(false))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A guest is confined to the allowed number of processors, and gets all processors again
    /// afterwards.
    #[test]
    fn guest_is_confined_and_released() {
        let mut confine = CpuConfinement::new(None).expect("the system says it");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let has = || processor_ids(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let (all, last) = (
            confine.available_processors.clone(),
            confine.available_processors[confine.available_processors.len() - 1..].to_vec(),
        );
        confine.apply(Some(1), [pid]);
        let one = has();
        let needed = confine.is_needed(None);
        confine.apply(Some(1000), [pid]);
        let many = has();
        confine.apply(Some(1), [pid]);
        confine.apply(None, [pid]);
        let none = has();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!((one, many, none), (last, all.clone(), all.clone()));
        assert_eq!(
            (needed, confine.is_needed(None), confine.is_needed(Some(1))),
            (all.len() > 1, false, true)
        );
        confine.apply(Some(1), [pid]);
    }

    /// The load watcher that replaces a killed one releases guests from a limit that is not set any
    /// more.
    #[test]
    fn successor_releases_recorded_confinement() {
        let folder = tempfile::tempdir().expect("a folder");
        let note = folder.path().join("confined");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let has = || processor_ids(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let mut killed = CpuConfinement::new(Some(note.clone())).expect("the system says it");
        killed.apply(Some(1), [pid]);
        let all = killed.available_processors.clone();
        let mut next = CpuConfinement::new(Some(note.clone())).expect("the system says it");
        let (one, needed) = (has(), next.is_needed(None));
        next.apply(None, [pid]);
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
            !CpuConfinement::new(Some(note))
                .expect("the system says it")
                .is_needed(None),
            "what is no number of them is none"
        );
    }

    /// A thread that has selected a subset of the processors keeps its selection.
    #[test]
    fn own_affinity_of_thread_is_kept() {
        let mut confine = CpuConfinement::new(None).expect("the system says it");
        let last = confine.available_processors[confine.available_processors.len() - 1];
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = Pid::from_raw(child.id().cast_signed());
        let mut set = CpuSet::new();
        set.set(last).expect("it is there");
        sched_setaffinity(pid, &set).expect("it is ours");
        confine.apply(None, [pid.as_raw()]);
        let has = processor_ids(&sched_getaffinity(pid).expect("it lives"));
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!(has, [last]);
    }
}
