//! Measures the total CPU time of all processors at low cost.
//!
//! - Reading /proc/stat costs two thirds of a whole sample, mostly for interrupt counters that are
//!   not needed.
//! - The CPU account of the root control group (version 2) contains the used time, at a quarter of
//!   that cost. It contains neither the number of processors nor, since Linux 6.18 at the latest,
//!   the time that the hypervisor has given to other virtual machines (steal).
//! - Therefore each sample reads the account, and /proc/stat is read only once per
//!   [`STAT_INTERVAL`], for the number of processors and the share of stolen time.

use crate::proc::CpuTimes;
use sempa_proto::Micros;
use sempa_proto::cgroup::find_mount_point;
use std::fs::{self, File};
use std::path::Path;

/// Interval at which /proc/stat is read in addition to the account. It bounds the time until a
/// change of the number of processors is noticed.
pub const STAT_INTERVAL: Micros = Micros::from_secs(30);
/// Minimum period over which the use is measured; the kernel's own counters advance in steps of
/// this length.
const MEASURE_INTERVAL_MIN: Micros = Micros::from_millis(10);
/// Minimum period between two reference readings. A longer period resolves smaller shares of the
/// time.
const REFERENCE_INTERVAL_MIN: Micros = Micros::from_millis(900);

/// Opens the CPU account of the whole machine; `None` unless version 2 control groups are mounted
/// and the root group is visible. `process` is the directory of a process in /proc.
pub fn open_root_cpu_account(process: &Path) -> Option<File> {
    let outermost = find_mount_point(&fs::read(process.join("mountinfo")).ok()?, None)?;
    // In a container the outermost visible group is one of many groups. Only the real root group
    // has no `cgroup.type` (cgroup-v2.rst).
    let is_whole =
        outermost.join("cgroup.procs").exists() && !outermost.join("cgroup.type").exists();
    File::open(outermost.join("cpu.stat"))
        .ok()
        .filter(|_| is_whole)
}

/// Values of /proc/stat and of the account that were read at the same time.
#[derive(Clone, Copy, Debug)]
struct ReferenceReading {
    at: Micros,
    stat: CpuTimes,
    used_us: u64,
}

/// Total CPU times of all processors, derived from the account and, periodically, from /proc/stat.
/// All times are measured by a monotonic clock that does not advance while the machine is
/// suspended.
#[derive(Debug)]
pub struct CpuUsage {
    times: CpuTimes,
    cores: u32,
    /// Time of the last reading of the account, and the value read.
    read_at: Micros,
    used_us: u64,
    reference: ReferenceReading,
    /// Share of the time between the last two reference readings that was neither idle nor in the
    /// account. `None` before the second reference reading.
    stolen_share: Option<f64>,
}

impl CpuUsage {
    /// Creates the state from the first reading of account (`used`) and /proc/stat (`stat`,
    /// `cores`).
    pub fn new(at: Micros, used: u64, stat: CpuTimes, cores: u32) -> CpuUsage {
        CpuUsage {
            times: stat,
            cores,
            read_at: at,
            used_us: used,
            reference: ReferenceReading {
                at,
                stat,
                used_us: used,
            },
            stolen_share: None,
        }
    }

    /// True if /proc/stat must be read in addition to the account.
    pub fn needs_stat(&self, at: Micros) -> bool {
        self.stolen_share.is_none() || at.since(self.reference.at) >= STAT_INTERVAL
    }

    /// Updates the times after a reading of account (`used`) and /proc/stat (`stat`, `cores`).
    /// Returns the times of all processors and their number.
    pub fn update_with_stat(
        &mut self,
        at: Micros,
        used: u64,
        stat: CpuTimes,
        cores: u32,
    ) -> (CpuTimes, u32) {
        let before = self.reference;
        if at.since(before.at) >= REFERENCE_INTERVAL_MIN {
            let busy = stat.busy_since(before.stat).map(f64::from);
            let accounted = used.saturating_sub(before.used_us) as f64
                / stat.total.saturating_sub(before.stat.total) as f64;
            self.stolen_share = busy.map(|busy| (busy - accounted).max(0.0));
            self.reference = ReferenceReading {
                at,
                stat,
                used_us: used,
            };
        }
        self.cores = cores;
        self.update(at, used)
    }

    /// Updates the times after a reading of the account. Returns the times of all processors and
    /// their number.
    pub fn update(&mut self, at: Micros, used: u64) -> (CpuTimes, u32) {
        let span = at.since(self.read_at);
        if span >= MEASURE_INTERVAL_MIN {
            let total = span.0 * u64::from(self.cores);
            let stolen = (total as f64 * self.stolen_share.unwrap_or(0.0)) as u64;
            let busy = used.saturating_sub(self.used_us).saturating_add(stolen);
            self.times.total += total;
            self.times.idle += total.saturating_sub(busy);
            (self.read_at, self.used_us) = (at, used);
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

    /// Returns the state for two processors after reference readings at seconds 10 and 20. Between
    /// the readings one processor was used, and `stolen` seconds were stolen from each processor.
    fn tally(stolen: u64) -> CpuUsage {
        let mut tally = CpuUsage::new(at(10), 5 * SECOND, stat(100, 50), 2);
        assert!(tally.needs_stat(at(11)), "nobody knows what is stolen");
        tally.update_with_stat(at(20), 15 * SECOND, stat(120, 60 - stolen), 2);
        tally
    }

    /// Between two readings of /proc/stat, the account determines the use.
    #[test]
    fn account_measures_use_between_stat_readings() {
        let mut tally = tally(0);
        let (before, _) = tally.update(at(20), 15 * SECOND);
        assert!(!tally.needs_stat(at(49)) && tally.needs_stat(at(50)));
        // Two processors have four seconds of CPU time in two seconds; one and a half seconds are
        // used.
        let (after, cores) = tally.update(at(22), 16 * SECOND + SECOND / 2);
        assert_eq!((after.busy_since(before), cores), (Some(0.375), 2));
        let (all, _) = tally.update(at(23), 30 * SECOND);
        assert_eq!(
            all.busy_since(after),
            Some(1.0),
            "more than there was cannot be used"
        );
        let (none, _) = tally.update(at(24), 30 * SECOND);
        assert_eq!(none.busy_since(all), Some(0.0));
    }

    /// Between reference readings, the stolen share of the last reference reading is assumed.
    #[test]
    fn stolen_share_of_last_reading_applies() {
        let mut tally = tally(5);
        let (before, _) = tally.update(at(20), 15 * SECOND);
        let (after, _) = tally.update(at(21), 15 * SECOND);
        assert_eq!(after.busy_since(before), Some(0.25));
        tally.update_with_stat(at(31), 15 * SECOND, stat(142, 77), 2);
        let (before, _) = tally.update(at(40), 15 * SECOND);
        let (after, _) = tally.update(at(41), 15 * SECOND);
        assert_eq!(
            after.busy_since(before),
            Some(0.0),
            "nobody takes anything any more"
        );
    }

    /// A reading of /proc/stat changes only the times since the last reading of the account.
    #[test]
    fn stat_reading_causes_no_jump() {
        let mut tally = tally(0);
        tally.update(at(39), 15 * SECOND);
        let (before, _) = tally.update(at(49), 15 * SECOND);
        // Half of the time was stolen since the start, which the previous readings did not show.
        let (after, cores) = tally.update_with_stat(at(50), 15 * SECOND, stat(240, 120), 4);
        assert_eq!(
            (after.busy_since(before), cores),
            (Some(0.5), 4),
            "the last second only"
        );
    }

    /// A period below the minimum yields no use; its time counts in the next period.
    #[test]
    fn too_short_period_gives_no_use() {
        let mut tally = tally(0);
        let (before, _) = tally.update(at(20), 15 * SECOND);
        let soon = at(20) + Micros(MEASURE_INTERVAL_MIN.0 - 1);
        assert_eq!(tally.update(soon, 99 * SECOND).0.busy_since(before), None);
        assert_eq!(
            tally
                .update_with_stat(soon, 99 * SECOND, stat(120, 60), 2)
                .0
                .busy_since(before),
            None
        );
        assert_eq!(
            tally.update(at(21), 16 * SECOND).0.busy_since(before),
            Some(0.5)
        );
    }

    /// The account of a container's outermost group is not used for the machine.
    #[test]
    fn container_account_is_not_used() {
        let dir = tempfile::tempdir().expect("a folder");
        let groups = dir.path().join("groups");
        fs::create_dir(&groups).expect("the test's own folder");
        let put = |path: &Path, text: &str| fs::write(path, text).expect("the test's own file");
        put(
            &dir.path().join("mountinfo"),
            &format!("9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n", groups.display()),
        );
        assert!(
            open_root_cpu_account(dir.path()).is_none(),
            "nothing is there"
        );
        put(&groups.join("cpu.stat"), "usage_usec 7\nuser_usec 1\n");
        put(&groups.join("cgroup.procs"), "");
        assert!(open_root_cpu_account(dir.path()).is_some());
        put(&groups.join("cgroup.type"), "domain\n");
        assert!(open_root_cpu_account(dir.path()).is_none());
    }
}
