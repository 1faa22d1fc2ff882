//! Guests on as many processors as the owner allows: all threads of all guests run on the same ones, so that together they
//! use no more, however many each has.

use crate::system::threads;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

/// Who keeps guests on some processors: the last ones of those that there are.
#[derive(Debug)]
pub struct Confine {
    /// Those that this process may use, in rising order: all that guests may ever have.
    all: Vec<usize>,
    /// On how many of them guests were kept since they last had all.
    kept: BTreeSet<usize>,
    /// Where that is noted, for whoever comes after this process.
    note: Option<PathBuf>,
}

impl Confine {
    /// Guests are where the last one kept them that had this note.
    ///
    /// # Errors
    /// The system does not say on which processors this process may run.
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

    /// True if guests have to be looked at, because the owner limits them, or did.
    pub fn is_needed(&self, cores: Option<u32>) -> bool {
        cores.is_some() || !self.kept.is_empty()
    }

    /// Keeps these processes on so many processors; `None`: on all. Threads that chose fewer among these keep them.
    pub fn keep(&mut self, cores: Option<u32>, pids: impl IntoIterator<Item = i32>) {
        let count = cores.map_or(self.all.len(), |cores| {
            (cores.max(1) as usize).min(self.all.len())
        });
        if count < self.all.len() && self.kept.insert(count) {
            // Before it is so: this process may be killed at any moment.
            self.write();
        }
        let now = self.last(count).to_vec();
        // One that has ended meanwhile needs none; of one that cannot be told, the next look may be luckier.
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

    /// What cannot be noted the next one does not know.
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
        // What it was kept on before was not its choice.
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

    #[test]
    fn a_guest_is_kept_on_as_many_processors_as_are_allowed_and_has_all_again_when_that_is_over() {
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

    #[test]
    fn who_comes_after_one_that_was_killed_frees_guests_of_a_limit_that_is_no_more() {
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

    #[test]
    fn a_thread_that_chose_some_of_the_processors_keeps_its_choice() {
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
