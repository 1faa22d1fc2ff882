//! Confines guests to the number of processors that the owner allows.
//!
//! All threads of all guests run on the same processors. Therefore the guests together never use
//! more processors, however many threads they have.

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
    /// Processors that this process may use, in ascending order. Guests are never confined to other
    /// processors.
    available_processors: Vec<usize>,
    /// Numbers of processors to which guests have been confined, and from which they have not been
    /// released since. Cleared when guests may use all processors again.
    unreleased_limits: BTreeSet<usize>,
    /// File in which `unreleased_limits` is recorded for the load watcher that replaces this
    /// process; `None` if the limits are not recorded.
    record_path: Option<PathBuf>,
}

impl CpuConfinement {
    /// Creates a confinement that continues with the limits that the previous load watcher recorded
    /// in the file `record_path_arg`. A missing or unreadable file counts as empty.
    ///
    /// # Errors
    /// The system does not report the processors of this process.
    pub fn new(record_path_arg: Option<PathBuf>) -> io::Result<Self> {
        let own_processors = processor_ids(&sched_getaffinity(Pid::from_raw(0))?);
        let text = record_path_arg
            .as_ref()
            .and_then(|record_path_arg| std::fs::read_to_string(record_path_arg).ok())
            .unwrap_or_default();
        let recorded_limits = text
            .split_whitespace()
            .filter_map(|count| count.parse().ok());
        let recorded_limits = recorded_limits
            .filter(|count| (1..own_processors.len()).contains(count))
            .collect();
        Ok(Self {
            available_processors: own_processors,
            unreleased_limits: recorded_limits,
            record_path: record_path_arg,
        })
    }

    /// True if guests must be checked, because the owner sets the limit `cores` or an earlier limit
    /// may still apply to some of them.
    pub fn is_needed(&self, cores: Option<u32>) -> bool {
        cores.is_some() || !self.unreleased_limits.is_empty()
    }

    /// Confines the processes `pids` to `cores` processors, or to all available ones if `cores` is
    /// `None`. A thread that has itself selected a subset of these processors keeps its selection.
    pub fn apply(&mut self, cores: Option<u32>, pids: impl IntoIterator<Item = i32>) {
        let processor_count = cores.map_or(self.available_processors.len(), |cores| {
            (cores.max(1) as usize).min(self.available_processors.len())
        });
        if processor_count < self.available_processors.len()
            && self.unreleased_limits.insert(processor_count)
        {
            // The limit is recorded before the change, because this process may be killed at any
            // moment.
            self.write_record();
        }
        let allowed_processors = self.last_processors(processor_count).to_vec();
        // A process that has exited needs no limit. If a thread cannot be changed, the next call of
        // this function tries again.
        for thread_id in pids
            .into_iter()
            .filter_map(|pid| thread_ids(pid).ok())
            .flatten()
        {
            let _ = self.apply_to_thread(Pid::from_raw(thread_id), &allowed_processors);
        }
        if processor_count == self.available_processors.len() && !self.unreleased_limits.is_empty()
        {
            self.unreleased_limits.clear();
            self.write_record();
        }
    }

    fn last_processors(&self, count: usize) -> &[usize] {
        &self.available_processors[self.available_processors.len() - count..]
    }

    /// Writes `unreleased_limits` to the record file, or removes the file if there are no such
    /// limits. Errors are ignored; the next load watcher then does not know these limits.
    fn write_record(&self) {
        let Some(path) = &self.record_path else {
            return;
        };
        let counts: Vec<String> = self
            .unreleased_limits
            .iter()
            .map(usize::to_string)
            .collect();
        let _ = match counts.is_empty() {
            true => std::fs::remove_file(path),
            false => std::fs::write(path, counts.join(" ")),
        };
    }

    /// Confines one thread to the processors `allowed_processors`. If the thread itself has
    /// selected some of these processors, confines the thread to its own selection.
    fn apply_to_thread(&self, thread: Pid, allowed_processors: &[usize]) -> Result<(), Errno> {
        let current_processors = processor_ids(&sched_getaffinity(thread)?);
        let selected_processors: Vec<usize> = current_processors
            .iter()
            .copied()
            .filter(|processor| allowed_processors.contains(processor))
            .collect();
        // A confinement by an earlier call does not count as the thread's own selection.
        let was_confined = self.unreleased_limits.contains(&current_processors.len())
            && current_processors == self.last_processors(current_processors.len());
        let new_processors = if was_confined || selected_processors.is_empty() {
            allowed_processors
        } else {
            &selected_processors
        };
        if current_processors == new_processors {
            return Ok(());
        }
        let mut set = CpuSet::new();
        new_processors
            .iter()
            .try_for_each(|processor| set.set(*processor))?;
        sched_setaffinity(thread, &set)
    }
}

fn processor_ids(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count())
        .filter(|processor| set.is_set(*processor).unwrap_or(false))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// After the confinement ends, the guest may use all processors again.
    #[test]
    fn guest_is_confined_and_released() {
        let mut confinement = CpuConfinement::new(None).expect("the system says it");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let guest_processors =
            || processor_ids(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let (all_processors, last_processor) = (
            confinement.available_processors.clone(),
            confinement.available_processors[confinement.available_processors.len() - 1..].to_vec(),
        );
        confinement.apply(Some(1), [pid]);
        let processors_with_limit_one = guest_processors();
        let was_needed = confinement.is_needed(None);
        confinement.apply(Some(1000), [pid]);
        let processors_with_high_limit = guest_processors();
        confinement.apply(Some(1), [pid]);
        confinement.apply(None, [pid]);
        let processors_without_limit = guest_processors();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!(
            (
                processors_with_limit_one,
                processors_with_high_limit,
                processors_without_limit
            ),
            (
                last_processor,
                all_processors.clone(),
                all_processors.clone()
            )
        );
        assert_eq!(
            (
                was_needed,
                confinement.is_needed(None),
                confinement.is_needed(Some(1))
            ),
            (all_processors.len() > 1, false, true)
        );
        confinement.apply(Some(1), [pid]);
    }

    /// The load watcher that replaces a killed one releases guests from a recorded limit that is
    /// not set any more.
    #[test]
    fn successor_releases_recorded_confinement() {
        let folder = tempfile::tempdir().expect("a folder");
        let record_path = folder.path().join("confined");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let guest_processors =
            || processor_ids(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let mut previous_confinement =
            CpuConfinement::new(Some(record_path.clone())).expect("the system says it");
        previous_confinement.apply(Some(1), [pid]);
        let all_processors = previous_confinement.available_processors.clone();
        let mut new_confinement =
            CpuConfinement::new(Some(record_path.clone())).expect("the system says it");
        let (confined_processors, is_needed) =
            (guest_processors(), new_confinement.is_needed(None));
        new_confinement.apply(None, [pid]);
        let released_processors = guest_processors();
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!(
            (confined_processors.len(), is_needed),
            (1, all_processors.len() > 1)
        );
        assert_eq!(
            (
                released_processors,
                new_confinement.is_needed(None),
                record_path.exists()
            ),
            (all_processors, false, false)
        );
        std::fs::write(&record_path, "0 x 99999").expect("written");
        assert!(
            !CpuConfinement::new(Some(record_path))
                .expect("the system says it")
                .is_needed(None),
            "what is no number of them is none"
        );
    }

    /// A thread that has selected a subset of the processors keeps its selection.
    #[test]
    fn own_affinity_of_thread_is_kept() {
        let mut confinement = CpuConfinement::new(None).expect("the system says it");
        let last_processor =
            confinement.available_processors[confinement.available_processors.len() - 1];
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = Pid::from_raw(child.id().cast_signed());
        let mut set = CpuSet::new();
        set.set(last_processor).expect("it is there");
        sched_setaffinity(pid, &set).expect("it is ours");
        confinement.apply(None, [pid.as_raw()]);
        let guest_processors = processor_ids(&sched_getaffinity(pid).expect("it lives"));
        child.kill().expect("it is ours");
        child.wait().expect("it is ours");
        assert_eq!(guest_processors, [last_processor]);
    }
}
