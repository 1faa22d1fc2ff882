//! Guests on as many processors as the owner allows: all threads of all guests run on the same ones, so that together they
//! use no more, however many each has.

use crate::system::threads;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::io;

/// Who keeps guests on some processors.
#[derive(Debug)]
pub struct Confine {
    /// Those that this process may use, in rising order: all that guests may ever have.
    all: Vec<usize>,
    /// Those that guests were kept on last.
    kept: Vec<usize>,
}

impl Confine {
    /// Nobody is kept anywhere yet.
    ///
    /// # Errors
    /// The system does not say on which processors this process may run.
    pub fn new() -> io::Result<Confine> {
        let all = processors(&sched_getaffinity(Pid::from_raw(0))?);
        Ok(Confine { kept: all.clone(), all })
    }

    /// True if guests have to be looked at, because the owner limits them, or did.
    pub fn is_needed(&self, cores: Option<u32>) -> bool {
        cores.is_some() || self.kept.len() < self.all.len()
    }

    /// Keeps these processes on so many processors, the last ones; `None`: on all. Threads that chose fewer among these keep them.
    pub fn keep(&mut self, cores: Option<u32>, pids: impl IntoIterator<Item = i32>) {
        let count = cores.map_or(self.all.len(), |cores| (cores.max(1) as usize).min(self.all.len()));
        let now = self.all[self.all.len() - count..].to_vec();
        // One that has ended meanwhile needs none; of one that cannot be told, the next look may be luckier.
        for thread in pids.into_iter().filter_map(|pid| threads(pid).ok()).flatten() {
            let _ = self.keep_thread(Pid::from_raw(thread), &now);
        }
        self.kept = now;
    }

    fn keep_thread(&self, thread: Pid, now: &[usize]) -> Result<(), Errno> {
        let has = processors(&sched_getaffinity(thread)?);
        let among: Vec<usize> = has.iter().copied().filter(|one| now.contains(one)).collect();
        // What it was kept on before was not its choice.
        let wanted = if has == self.kept || among.is_empty() { now } else { &among };
        if has == wanted {
            return Ok(());
        }
        let mut set = CpuSet::new();
        wanted.iter().try_for_each(|one| set.set(*one))?;
        sched_setaffinity(thread, &set)
    }
}

fn processors(set: &CpuSet) -> Vec<usize> {
    (0..CpuSet::count()).filter(|one| set.is_set(*one).unwrap_or(false)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_guest_is_kept_on_as_many_processors_as_are_allowed_and_has_all_again_when_that_is_over() {
        let mut confine = Confine::new().expect("the system says it");
        let mut child = Command::new("sleep").arg("60").spawn().expect("sleep");
        let pid = child.id().cast_signed();
        let has = || processors(&sched_getaffinity(Pid::from_raw(pid)).expect("it lives"));
        let (all, last) = (confine.all.clone(), confine.all[confine.all.len() - 1..].to_vec());
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
        assert_eq!((needed, confine.is_needed(None), confine.is_needed(Some(1))), (all.len() > 1, false, true));
        confine.keep(Some(1), [pid]);
    }

    #[test]
    fn a_thread_that_chose_some_of_the_processors_keeps_its_choice() {
        let mut confine = Confine::new().expect("the system says it");
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
