//! What all processors together have done, as cheaply as the kernel tells it. Gathering /proc/stat takes the kernel two thirds of
//! a whole sample's time, most of it for interrupts that nobody here wants to know of. The account of the outermost control group
//! of version 2 says what was used at a quarter of that. It does not say how many processors there are, nor, since Linux 6.18 at
//! the latest, what the host of a virtual machine has taken for others. So /proc/stat is read now and then, and tells both.

use crate::proc::CpuTimes;
use sempa_proto::Micros;
use sempa_proto::cgroup::mount_point;
use std::fs::{self, File};
use std::path::Path;

/// /proc/stat is read no more often than this beside the account. So a processor that is switched off or on is noticed.
pub const LOOK_SPAN: Micros = Micros::from_secs(30);
/// Shorter than this is no span to measure use over: the kernel itself counts in such steps.
const SPAN_MIN: Micros = Micros::from_millis(10);
/// The same between two looks, which are to tell a small part of the time.
const LOOK_SPAN_MIN: Micros = Micros::from_millis(900);

/// The account of the whole machine in control groups of version 2, if they are mounted and it can be seen: `process` is the
/// folder of a process in /proc.
pub fn account(process: &Path) -> Option<File> {
    let outermost = mount_point(&fs::read(process.join("mountinfo")).ok()?, None)?;
    // In a container the outermost group that is seen is one of many. Only the outermost of all has no type (cgroup-v2.rst).
    let is_whole =
        outermost.join("cgroup.procs").exists() && !outermost.join("cgroup.type").exists();
    File::open(outermost.join("cpu.stat"))
        .ok()
        .filter(|_| is_whole)
}

/// What /proc/stat and the account said at the same time.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Micros,
    stat: CpuTimes,
    used: u64,
}

/// Times of all processors together by an account, and now and then by /proc/stat. All times are by a clock that nobody sets and
/// that stands still while the machine sleeps.
#[derive(Debug)]
pub struct Tally {
    times: CpuTimes,
    cores: u32,
    /// When the account was read last, and what it said.
    at: Micros,
    used: u64,
    look: Look,
    /// Share of the time that was not idle and not in the account either, between the last two looks.
    stolen: Option<f64>,
}

impl Tally {
    /// From the first look.
    pub fn new(at: Micros, used: u64, stat: CpuTimes, cores: u32) -> Tally {
        Tally {
            times: stat,
            cores,
            at,
            used,
            look: Look { at, stat, used },
            stolen: None,
        }
    }

    /// True when /proc/stat is to be read beside the account.
    pub fn must_look(&self, at: Micros) -> bool {
        self.stolen.is_none() || at.since(self.look.at) >= LOOK_SPAN
    }

    /// /proc/stat was read beside the account.
    pub fn look(&mut self, at: Micros, used: u64, stat: CpuTimes, cores: u32) -> (CpuTimes, u32) {
        let before = self.look;
        if at.since(before.at) >= LOOK_SPAN_MIN {
            let busy = stat.busy_since(before.stat).map(f64::from);
            let accounted = used.saturating_sub(before.used) as f64
                / stat.total.saturating_sub(before.stat.total) as f64;
            self.stolen = busy.map(|busy| (busy - accounted).max(0.0));
            self.look = Look { at, stat, used };
        }
        self.cores = cores;
        self.step(at, used)
    }

    /// The account was read; times of all processors now, and how many there are.
    pub fn step(&mut self, at: Micros, used: u64) -> (CpuTimes, u32) {
        let span = at.since(self.at);
        if span >= SPAN_MIN {
            let total = span.0 * u64::from(self.cores);
            let stolen = (total as f64 * self.stolen.unwrap_or(0.0)) as u64;
            let busy = used.saturating_sub(self.used).saturating_add(stolen);
            self.times.total += total;
            self.times.idle += total.saturating_sub(busy);
            (self.at, self.used) = (at, used);
        }
        (self.times, self.cores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn stat(total: u64, idle: u64) -> CpuTimes {
        CpuTimes {
            total: total * SECOND,
            idle: idle * SECOND,
        }
    }

    fn at(seconds: u64) -> Micros {
        Micros::from_secs(seconds)
    }

    /// Two processors, after two looks at seconds 10 and 20, in which one of them was used and `stolen` was taken from both.
    fn tally(stolen: u64) -> Tally {
        let mut tally = Tally::new(at(10), 5 * SECOND, stat(100, 50), 2);
        assert!(tally.must_look(at(11)), "nobody knows what is stolen");
        tally.look(at(20), 15 * SECOND, stat(120, 60 - stolen), 2);
        tally
    }

    #[test]
    fn what_was_used_is_told_by_the_account_between_two_looks() {
        let mut tally = tally(0);
        let (before, _) = tally.step(at(20), 15 * SECOND);
        assert!(!tally.must_look(at(49)) && tally.must_look(at(50)));
        // A second and a half of the four that two processors have in two seconds.
        let (after, cores) = tally.step(at(22), 16 * SECOND + SECOND / 2);
        assert_eq!((after.busy_since(before), cores), (Some(0.375), 2));
        let (all, _) = tally.step(at(23), 30 * SECOND);
        assert_eq!(
            all.busy_since(after),
            Some(1.0),
            "more than there was cannot be used"
        );
        let (none, _) = tally.step(at(24), 30 * SECOND);
        assert_eq!(none.busy_since(all), Some(0.0));
    }

    #[test]
    fn what_is_taken_by_others_outside_of_the_machine_counts_as_it_was_at_the_last_look() {
        let mut tally = tally(5);
        let (before, _) = tally.step(at(20), 15 * SECOND);
        let (after, _) = tally.step(at(21), 15 * SECOND);
        assert_eq!(after.busy_since(before), Some(0.25));
        tally.look(at(31), 15 * SECOND, stat(142, 77), 2);
        let (before, _) = tally.step(at(40), 15 * SECOND);
        let (after, _) = tally.step(at(41), 15 * SECOND);
        assert_eq!(
            after.busy_since(before),
            Some(0.0),
            "nobody takes anything any more"
        );
    }

    #[test]
    fn a_look_makes_no_leap() {
        let mut tally = tally(0);
        tally.step(at(39), 15 * SECOND);
        let (before, _) = tally.step(at(49), 15 * SECOND);
        // Half of all was taken in all that time, which was not known.
        let (after, cores) = tally.look(at(50), 15 * SECOND, stat(240, 120), 4);
        assert_eq!(
            (after.busy_since(before), cores),
            (Some(0.5), 4),
            "the last second only"
        );
    }

    #[test]
    fn too_short_a_span_says_nothing() {
        let mut tally = tally(0);
        let (before, _) = tally.step(at(20), 15 * SECOND);
        let soon = at(20) + Micros(SPAN_MIN.0 - 1);
        assert_eq!(tally.step(soon, 99 * SECOND).0.busy_since(before), None);
        assert_eq!(
            tally
                .look(soon, 99 * SECOND, stat(120, 60), 2)
                .0
                .busy_since(before),
            None
        );
        assert_eq!(
            tally.step(at(21), 16 * SECOND).0.busy_since(before),
            Some(0.5)
        );
    }

    #[test]
    fn the_account_of_a_container_is_not_that_of_the_machine() {
        let dir = tempfile::tempdir().expect("a folder");
        let groups = dir.path().join("groups");
        fs::create_dir(&groups).expect("the test's own folder");
        let put = |path: &Path, text: &str| fs::write(path, text).expect("the test's own file");
        put(
            &dir.path().join("mountinfo"),
            &format!("9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n", groups.display()),
        );
        assert!(account(dir.path()).is_none(), "nothing is there");
        put(&groups.join("cpu.stat"), "usage_usec 7\nuser_usec 1\n");
        put(&groups.join("cgroup.procs"), "");
        assert!(account(dir.path()).is_some());
        put(&groups.join("cgroup.type"), "domain\n");
        assert!(account(dir.path()).is_none());
    }
}
