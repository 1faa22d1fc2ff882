//! What the tasks of the virtual machine use on this host, and so what others use: per-process times on descriptors that
//! stay open. A reading allocates nothing.
//!
//! The kernel's counters do not say what a process had used that has ended. So a span in which one of ours came or went
//! gives no figure, rather than a wrong one.

use crate::proc::{CpuTimes, used};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Tasks that are looked at; with more there is no figure.
pub const TASKS_MAX: usize = 512;
/// Bytes of /proc/PID/stat that are looked at; it is shorter.
const STAT_BYTES_MAX: usize = 1024;
/// Processors in use below which it does not matter whose they are.
pub const QUIET: f32 = 0.25;
/// Weight of a new measurement in the mean: with one every ten seconds, a mean over about half a minute.
const WEIGHT: f32 = 0.3;

/// The processes of our tasks.
#[derive(Debug)]
pub struct Ours {
    root: PathBuf,
    tasks: BTreeMap<i32, File>,
    changed: bool,
    before: Option<(CpuTimes, u64)>,
    mean: Option<f32>,
}

impl Ours {
    /// Nobody yet; `root` is /proc but in tests.
    pub fn new(root: &Path) -> Ours {
        Ours { root: root.to_path_buf(), tasks: BTreeMap::new(), changed: false, before: None, mean: None }
    }

    /// These are our processes now.
    pub fn set(&mut self, pids: &[i32]) {
        let before = self.tasks.len();
        self.tasks.retain(|pid, _| pids.contains(pid));
        self.changed |= self.tasks.len() != before;
        for pid in pids {
            if self.tasks.contains_key(pid) || self.tasks.len() >= TASKS_MAX {
                continue;
            }
            if let Ok(file) = File::open(self.root.join(pid.to_string()).join("stat")) {
                self.tasks.insert(*pid, file);
                self.changed = true;
            }
        }
    }

    /// True when what is busy on the host is more than what may be left out of account, so that it has to be known whose it
    /// is. `times` are those of the newest sample.
    pub fn is_needed(&self, times: CpuTimes, cores: u32) -> bool {
        let busy = self.before.and_then(|(before, _)| times.busy_since(before));
        busy.is_none_or(|busy| busy * cores as f32 >= QUIET)
    }

    /// Processors that others used since the last measurement, as a mean over some measurements. `None` while it cannot be
    /// told: the first time, and when tasks of ours came or went; unless so little was used by all that it does not matter.
    pub fn measure(&mut self, times: CpuTimes, cores: u32) -> Option<f32> {
        let mut text = [0; STAT_BYTES_MAX];
        let mut sum = 0;
        for file in self.tasks.values() {
            match file.read_at(&mut text, 0).ok().and_then(|len| used(&text[..len])) {
                Some(used) => sum += used.ticks,
                None => self.changed = true,
            }
        }
        let comparable = !std::mem::take(&mut self.changed);
        let (before, ours) = self.before.replace((times, sum))?;
        let total = times.total.checked_sub(before.total).filter(|total| *total > 0)?;
        let busy = times.busy_since(before)? * cores as f32;
        let own = sum.saturating_sub(ours) as f32 / total as f32 * cores as f32;
        let others = match comparable {
            true => (busy - own).max(0.0),
            false if busy < QUIET => busy,
            false => return None,
        };
        let mean = self.mean.map_or(others, |mean| mean + WEIGHT * (others - mean));
        self.mean = Some(mean);
        Some(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Proc(tempfile::TempDir);

    impl Proc {
        fn task(&self, pid: i32, ticks: u64) {
            let dir = self.0.path().join(pid.to_string());
            std::fs::create_dir_all(&dir).expect("the test's own folder");
            let text = format!("{pid} (x) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5 0");
            std::fs::write(dir.join("stat"), text).expect("the test's own file");
        }
    }

    fn times(total: u64, idle: u64) -> CpuTimes {
        CpuTimes { total, idle }
    }

    #[test]
    fn what_is_busy_and_not_ours_is_others() {
        let proc = Proc(tempfile::tempdir().expect("a folder"));
        let mut ours = Ours::new(proc.0.path());
        proc.task(5, 100);
        ours.set(&[5]);
        assert_eq!(ours.measure(times(0, 0), 2), None);
        // Two processors for a hundred ticks each: one and a half busy, one of it ours.
        proc.task(5, 200);
        assert_eq!(ours.measure(times(200, 50), 2), Some(0.5));
        // Then only ours; the mean follows.
        proc.task(5, 300);
        let mean = ours.measure(times(400, 150), 2).expect("comparable");
        assert!(mean > 0.0 && mean < 0.5, "{mean}");
    }

    #[test]
    fn a_span_in_which_tasks_came_or_went_gives_no_figure() {
        let proc = Proc(tempfile::tempdir().expect("a folder"));
        let mut ours = Ours::new(proc.0.path());
        assert_eq!(ours.measure(times(0, 0), 1), None);
        proc.task(5, 0);
        ours.set(&[5]);
        assert_eq!(ours.measure(times(100, 0), 1), None);
        assert_eq!(ours.measure(times(200, 100), 1), Some(0.0));
        ours.set(&[]);
        assert_eq!(ours.measure(times(300, 100), 1), None);
        assert_eq!(ours.measure(times(400, 200), 1), Some(0.0));
        proc.task(6, 0);
        ours.set(&[6]);
        assert!(ours.measure(times(500, 290), 1).is_some_and(|mean| mean < 0.1), "so little is nobody's in particular");
        ours.set(&[99]);
        std::fs::remove_dir_all(proc.0.path().join("6")).expect("the test's own folder");
        ours.measure(times(600, 290), 1);
        assert!(ours.measure(times(700, 290), 1).is_some(), "a process that is not there changes nothing");
    }

    #[test]
    fn a_quiet_host_is_not_looked_into() {
        let mut ours = Ours::new(Path::new("/nowhere"));
        assert!(ours.is_needed(times(0, 0), 2), "there is nothing to compare with");
        ours.measure(times(0, 0), 2);
        assert!(!ours.is_needed(times(200, 190), 2));
        assert!(ours.is_needed(times(200, 150), 2));
    }
}
