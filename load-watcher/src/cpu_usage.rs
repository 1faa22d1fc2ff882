//! Measures the total CPU time of all processors at low cost.
//!
//! - Reading /proc/stat costs two thirds of the time of a whole sample, mostly for interrupt
//!   counters that are not needed.
//! - The CPU account is the file `cpu.stat` of the root control group (version 2). The account
//!   contains the used time. Reading the account costs a quarter of reading /proc/stat. The account
//!   does not contain the number of processors. Since Linux 6.18 at the latest, it does not contain
//!   stolen time either: the time that the hypervisor has used for other virtual machines.
//! - Therefore each sample reads the account. /proc/stat is read only once per [`STAT_INTERVAL`],
//!   for the number of processors and the share of stolen time.

use crate::proc::CpuTimes;
use sempa_proto::Micros;
use sempa_proto::cgroup::find_mount_point;
use std::fs::{self, File};
use std::path::Path;

/// Interval at which /proc/stat is read in addition to the CPU account. A change of the number of
/// processors is noticed after at most this time.
pub const STAT_INTERVAL: Micros = Micros::from_secs(30);
/// Minimum period over which the used CPU time is measured. The kernel's counters advance in steps
/// of this length.
const MEASURE_INTERVAL_MIN: Micros = Micros::from_millis(10);
/// Minimum period between two reference readings. The longer the period, the smaller the shares of
/// stolen time that can be detected.
const REFERENCE_INTERVAL_MIN: Micros = Micros::from_millis(900);

/// Opens the CPU account of the whole machine; `None` unless version 2 control groups are mounted
/// and the root group is visible. `process_dir` is the directory of a process in /proc.
pub fn open_root_cpu_account(process_dir: &Path) -> Option<File> {
    let outermost_group = find_mount_point(&fs::read(process_dir.join("mountinfo")).ok()?, None)?;
    // In a container, the outermost visible group is not the root group. Only the root group has no
    // `cgroup.type` (cgroup-v2.rst).
    let is_root_group = outermost_group.join("cgroup.procs").exists()
        && !outermost_group.join("cgroup.type").exists();
    File::open(outermost_group.join("cpu.stat"))
        .ok()
        .filter(|_| is_root_group)
}

/// Values of /proc/stat and of the CPU account of the root control group that were read at the same
/// time.
#[derive(Clone, Copy, Debug)]
struct ReferenceReading {
    at: Micros,
    stat: CpuTimes,
    account_us: u64,
}

/// Total CPU times of all processors, derived from the CPU account of the root control group and,
/// periodically, from /proc/stat. All times are measured by a monotonic clock that does not advance
/// while the machine is suspended.
#[derive(Debug)]
pub struct CpuUsage {
    times: CpuTimes,
    processor_count: u32,
    /// Time of the last reading of the CPU account. `account_us` is the value that was read at this
    /// time.
    account_read_at: Micros,
    account_us: u64,
    reference: ReferenceReading,
    /// Share of the time between the last two reference readings that was neither idle nor
    /// contained in the CPU account. `None` before the second reference reading.
    stolen_share: Option<f64>,
}

impl CpuUsage {
    /// Creates the state from the first readings: `used_us` from the CPU account, in microseconds,
    /// and `stat` and `cores` from /proc/stat.
    pub fn new(at: Micros, used_us: u64, stat: CpuTimes, cores: u32) -> Self {
        Self {
            times: stat,
            processor_count: cores,
            account_read_at: at,
            account_us: used_us,
            reference: ReferenceReading {
                at,
                stat,
                account_us: used_us,
            },
            stolen_share: None,
        }
    }

    /// True if /proc/stat must be read in addition to the CPU account.
    pub fn needs_stat(&self, at: Micros) -> bool {
        self.stolen_share.is_none() || at.since(self.reference.at) >= STAT_INTERVAL
    }

    /// Updates the times after readings of the CPU account (`used_us`, in microseconds) and of
    /// /proc/stat (`stat`, `cores`). Returns the times of all processors and the number of
    /// processors.
    pub fn update_with_stat(
        &mut self,
        read_at: Micros,
        used_us: u64,
        stat: CpuTimes,
        cores: u32,
    ) -> (CpuTimes, u32) {
        let previous_reference = self.reference;
        if read_at.since(previous_reference.at) >= REFERENCE_INTERVAL_MIN {
            let busy_share = stat.busy_since(previous_reference.stat).map(f64::from);
            let account_share = used_us.saturating_sub(previous_reference.account_us) as f64
                / stat
                    .total_us
                    .saturating_sub(previous_reference.stat.total_us) as f64;
            self.stolen_share = busy_share.map(|busy_share| (busy_share - account_share).max(0.0));
            self.reference = ReferenceReading {
                at: read_at,
                stat,
                account_us: used_us,
            };
        }
        self.processor_count = cores;
        self.update(read_at, used_us)
    }

    /// Updates the times after a reading of the CPU account (`used_us`, in microseconds). Returns
    /// the times of all processors and the number of processors.
    pub fn update(&mut self, read_at: Micros, used_us: u64) -> (CpuTimes, u32) {
        let elapsed = read_at.since(self.account_read_at);
        if elapsed >= MEASURE_INTERVAL_MIN {
            let total_us = elapsed.0 * u64::from(self.processor_count);
            let stolen_us = (total_us as f64 * self.stolen_share.unwrap_or(0.0)) as u64;
            let busy_us = used_us
                .saturating_sub(self.account_us)
                .saturating_add(stolen_us);
            self.times.total_us += total_us;
            self.times.idle_us += total_us.saturating_sub(busy_us);
            (self.account_read_at, self.account_us) = (read_at, used_us);
        }
        (self.times, self.processor_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    fn cpu_times_from_seconds(total_s: u64, idle_s: u64) -> CpuTimes {
        CpuTimes {
            total_us: total_s * SECOND_US,
            idle_us: idle_s * SECOND_US,
        }
    }

    fn at_second(seconds: u64) -> Micros {
        Micros::from_secs(seconds)
    }

    /// Returns the state for two processors after reference readings at seconds 10 and 20. Between
    /// the readings, one of the two processors was used, and `stolen_s` seconds of CPU time were
    /// stolen.
    fn two_processor_usage(stolen_s: u64) -> CpuUsage {
        let mut usage = CpuUsage::new(
            at_second(10),
            5 * SECOND_US,
            cpu_times_from_seconds(100, 50),
            2,
        );
        assert!(
            usage.needs_stat(at_second(11)),
            "nobody knows what is stolen"
        );
        usage.update_with_stat(
            at_second(20),
            15 * SECOND_US,
            cpu_times_from_seconds(120, 60 - stolen_s),
            2,
        );
        usage
    }

    /// Between two readings of /proc/stat, the account determines the use.
    #[test]
    fn account_measures_use_between_stat_readings() {
        let mut usage = two_processor_usage(0);
        let (first_times, _) = usage.update(at_second(20), 15 * SECOND_US);
        assert!(!usage.needs_stat(at_second(49)) && usage.needs_stat(at_second(50)));
        // Two processors have four seconds of CPU time in two seconds; one and a half seconds are
        // used.
        let (times_after_partial_use, cores) =
            usage.update(at_second(22), 16 * SECOND_US + SECOND_US / 2);
        assert_eq!(
            (times_after_partial_use.busy_since(first_times), cores),
            (Some(0.375), 2)
        );
        let (times_after_full_use, _) = usage.update(at_second(23), 30 * SECOND_US);
        assert_eq!(
            times_after_full_use.busy_since(times_after_partial_use),
            Some(1.0),
            "more than there was cannot be used"
        );
        let (times_without_use, _) = usage.update(at_second(24), 30 * SECOND_US);
        assert_eq!(
            times_without_use.busy_since(times_after_full_use),
            Some(0.0)
        );
    }

    #[test]
    fn stolen_share_of_last_reading_applies() {
        let mut usage = two_processor_usage(5);
        let (start_times, _) = usage.update(at_second(20), 15 * SECOND_US);
        let (end_times, _) = usage.update(at_second(21), 15 * SECOND_US);
        assert_eq!(end_times.busy_since(start_times), Some(0.25));
        usage.update_with_stat(
            at_second(31),
            15 * SECOND_US,
            cpu_times_from_seconds(142, 77),
            2,
        );
        let (start_times, _) = usage.update(at_second(40), 15 * SECOND_US);
        let (end_times, _) = usage.update(at_second(41), 15 * SECOND_US);
        assert_eq!(
            end_times.busy_since(start_times),
            Some(0.0),
            "nobody takes anything any more"
        );
    }

    /// A reading of /proc/stat changes only the times since the last reading of the CPU account.
    #[test]
    fn stat_reading_causes_no_jump() {
        let mut usage = two_processor_usage(0);
        usage.update(at_second(39), 15 * SECOND_US);
        let (start_times, _) = usage.update(at_second(49), 15 * SECOND_US);
        // Half of the time since second 20 was stolen. This reading of /proc/stat is the first that
        // shows the stolen time.
        let (end_times, cores) = usage.update_with_stat(
            at_second(50),
            15 * SECOND_US,
            cpu_times_from_seconds(240, 120),
            4,
        );
        assert_eq!(
            (end_times.busy_since(start_times), cores),
            (Some(0.5), 4),
            "the last second only"
        );
    }

    /// A period shorter than `MEASURE_INTERVAL_MIN` yields no use. The period is counted together
    /// with the next period.
    #[test]
    fn too_short_period_gives_no_use() {
        let mut usage = two_processor_usage(0);
        let (start_times, _) = usage.update(at_second(20), 15 * SECOND_US);
        let end_of_short_period = at_second(20) + Micros(MEASURE_INTERVAL_MIN.0 - 1);
        assert_eq!(
            usage
                .update(end_of_short_period, 99 * SECOND_US)
                .0
                .busy_since(start_times),
            None
        );
        assert_eq!(
            usage
                .update_with_stat(
                    end_of_short_period,
                    99 * SECOND_US,
                    cpu_times_from_seconds(120, 60),
                    2
                )
                .0
                .busy_since(start_times),
            None
        );
        assert_eq!(
            usage
                .update(at_second(21), 16 * SECOND_US)
                .0
                .busy_since(start_times),
            Some(0.5)
        );
    }

    /// The CPU account of a container's outermost control group is not used for the whole machine.
    #[test]
    fn container_account_is_not_used() {
        let dir = tempfile::tempdir().expect("a folder");
        let cgroup_root = dir.path().join("groups");
        fs::create_dir(&cgroup_root).expect("the test's own folder");
        let write_file =
            |path: &Path, text: &str| fs::write(path, text).expect("the test's own file");
        write_file(
            &dir.path().join("mountinfo"),
            &format!(
                "9 8 0:1 / {} rw - cgroup2 cgroup2 rw\n",
                cgroup_root.display()
            ),
        );
        assert!(
            open_root_cpu_account(dir.path()).is_none(),
            "nothing is there"
        );
        write_file(&cgroup_root.join("cpu.stat"), "usage_usec 7\nuser_usec 1\n");
        write_file(&cgroup_root.join("cgroup.procs"), "");
        assert!(open_root_cpu_account(dir.path()).is_some());
        write_file(&cgroup_root.join("cgroup.type"), "domain\n");
        assert!(open_root_cpu_account(dir.path()).is_none());
    }
}
