//! Measures the processor limit of the host's control group and the use of this limit (version 1
//! `cpu` and `cpuacct`, or version 2 `cpu`).
//!
//! In a container or a virtual host, /proc describes the whole machine; the control group describes
//! the processors that the host may use.

use crate::proc::{
    CpuTimes, group_cpu_time_us, leading_numbers, named_number, processor_limit_v2, read_from_start,
};
use sempa_proto::Micros;
use sempa_proto::cgroup::group_dir;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Maximum number of bytes that are read from a file of a control group.
const GROUP_FILE_BYTES_MAX: usize = 1024;
/// Minimum period over which the use is measured.
const MEASURE_INTERVAL_MIN: Micros = Micros::from_millis(10);

/// The limit of a control group and the use of that limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitUsage {
    /// Number of processors that the group may use.
    pub processor_limit: f32,
    /// Mean number of processors used since the previous measurement.
    pub used_processors: f32,
    /// Mean number of threads that the limit throttled since the previous measurement.
    pub throttled_threads: f32,
    /// CPU time used since the group was created, in nanoseconds.
    pub used_ns: u64,
}

impl LimitUsage {
    /// Converts the group's use into the form of /proc/stat, for a machine with `cores` processors.
    /// `measured_at` is the time of the measurement and serves as the total time of each processor.
    pub fn cpu_times(&self, measured_at: Micros, cores: u32) -> CpuTimes {
        let total_us = measured_at.0.saturating_mul(u64::from(cores));
        CpuTimes {
            total_us,
            idle_us: total_us.saturating_sub(self.used_ns / 1000),
        }
    }
}

/// The open files of a control group of version 1 or 2.
#[derive(Debug)]
enum GroupFiles {
    V1 {
        quota: File,
        period: File,
        usage: File,
        stat: File,
    },
    V2 {
        quota: File,
        stat: File,
    },
}

/// Counters of a control group at one time, in nanoseconds of CPU time.
#[derive(Clone, Copy, Debug)]
struct GroupReading {
    at: Micros,
    used_ns: u64,
    throttled_ns: u64,
}

/// The control group that limits this process.
#[derive(Debug)]
pub struct LimitingGroup {
    /// Directory of the group; in version 1, its directory below the controller `cpu`.
    dir: PathBuf,
    files: GroupFiles,
    buffer: Box<[u8; GROUP_FILE_BYTES_MAX]>,
    previous_reading: Option<GroupReading>,
}

impl GroupFiles {
    fn open_v1(cpu: &Path, cpuacct: &Path) -> Option<Self> {
        let open = |folder: &Path, name: &str| File::open(folder.join(name)).ok();
        Some(Self::V1 {
            quota: open(cpu, "cpu.cfs_quota_us")?,
            period: open(cpu, "cpu.cfs_period_us")?,
            usage: open(cpuacct, "cpuacct.usage")?,
            stat: open(cpu, "cpu.stat")?,
        })
    }

    fn open_v2(group_dir: &Path) -> Option<Self> {
        let open = |name: &str| File::open(group_dir.join(name)).ok();
        Some(Self::V2 {
            quota: open("cpu.max")?,
            stat: open("cpu.stat")?,
        })
    }

    /// Returns the number of processors that the group may use; `None` if there is no limit.
    fn processor_limit(&self, buffer: &mut [u8]) -> Option<f32> {
        match self {
            Self::V1 { quota, period, .. } => {
                // The value −1, which is not parsed as a number, means no limit.
                let quota = leading_numbers(read_from_start(quota, buffer).ok()?).next()?;
                let period = leading_numbers(read_from_start(period, buffer).ok()?)
                    .next()
                    .filter(|period| *period > 0)?;
                Some(quota as f32 / period as f32)
            }
            Self::V2 { quota, .. } => processor_limit_v2(read_from_start(quota, buffer).ok()?),
        }
    }

    /// Returns the CPU time that the group has used and the time for which its threads were
    /// throttled, in nanoseconds.
    fn used_and_throttled_ns(&self, buffer: &mut [u8]) -> Option<(u64, u64)> {
        match self {
            Self::V1 { usage, stat, .. } => {
                let used_ns = leading_numbers(read_from_start(usage, buffer).ok()?).next()?;
                Some((
                    used_ns,
                    named_number(read_from_start(stat, buffer).ok()?, b"throttled_time")?,
                ))
            }
            Self::V2 { stat, .. } => {
                let buffer = read_from_start(stat, buffer).ok()?;
                let throttled_us = named_number(buffer, b"throttled_usec").unwrap_or(0);
                Some((
                    group_cpu_time_us(buffer)?.saturating_mul(1000),
                    throttled_us.saturating_mul(1000),
                ))
            }
        }
    }
}

impl LimitingGroup {
    /// Selects among the control group of a process and all groups that enclose this group. Returns
    /// the group with the lowest processor limit; `None` if no group has a limit. `process_dir` is
    /// the directory of the process in /proc.
    pub fn of_process(process_dir: &Path) -> Option<Self> {
        let cgroups = fs::read(process_dir.join("cgroup")).ok()?;
        let mounts = fs::read(process_dir.join("mountinfo")).ok()?;
        let group_folder = |controller| group_dir(&mounts, &cgroups, controller);
        let mut buffer = Box::new([0; GROUP_FILE_BYTES_MAX]);
        let mut tightest: Option<(f32, PathBuf, GroupFiles)> = None;
        let mut keep_tighter_limit = |dir: &Path, files: Option<GroupFiles>, buffer: &mut [u8]| {
            let Some((limit, files)) =
                files.and_then(|files| Some((files.processor_limit(buffer)?, files)))
            else {
                return;
            };
            if tightest
                .as_ref()
                .is_none_or(|(least_limit, ..)| limit < *least_limit)
            {
                tightest = Some((limit, dir.to_path_buf(), files));
            }
        };
        if let (Some(cpu), Some(cpuacct)) =
            (group_folder(Some("cpu")), group_folder(Some("cpuacct")))
        {
            // The use of a group is known only if both hierarchies have a group of the same name.
            for (cpu, cpuacct) in cpu.ancestors().zip(cpuacct.ancestors()) {
                if cpu.file_name() == cpuacct.file_name() {
                    keep_tighter_limit(cpu, GroupFiles::open_v1(cpu, cpuacct), &mut buffer[..]);
                }
            }
        }
        if let Some(folder) = group_folder(None) {
            folder.ancestors().for_each(|folder| {
                keep_tighter_limit(folder, GroupFiles::open_v2(folder), &mut buffer[..])
            });
        }
        let (_, dir, files) = tightest?;
        Some(Self {
            dir,
            files,
            buffer,
            previous_reading: None,
        })
    }

    /// Returns the directory of the group.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the limit of the group and its use since the previous measurement; `None` if the
    /// limit was removed or a file of the group cannot be read. Only `used_ns` contains a use in
    /// the first measurement, and in a measurement less than `MEASURE_INTERVAL_MIN` after the
    /// previous measurement. Allocates no memory.
    pub fn measure(&mut self, at: Micros) -> Option<LimitUsage> {
        let limit = self.files.processor_limit(&mut self.buffer[..])?;
        let (used_time_ns, throttled_time_ns) =
            self.files.used_and_throttled_ns(&mut self.buffer[..])?;
        let reading = GroupReading {
            at,
            used_ns: used_time_ns,
            throttled_ns: throttled_time_ns,
        };
        let previous_reading = *self.previous_reading.get_or_insert(reading);
        let elapsed = at.since(previous_reading.at);
        if elapsed < MEASURE_INTERVAL_MIN {
            return Some(LimitUsage {
                processor_limit: limit,
                used_processors: 0.0,
                throttled_threads: 0.0,
                used_ns: used_time_ns,
            });
        }
        self.previous_reading = Some(reading);
        let rate = |later_ns: u64, earlier_ns: u64| {
            later_ns.saturating_sub(earlier_ns) as f32 / 1000.0 / elapsed.0 as f32
        };
        Some(LimitUsage {
            processor_limit: limit,
            used_processors: rate(used_time_ns, previous_reading.used_ns),
            throttled_threads: rate(throttled_time_ns, previous_reading.throttled_ns),
            used_ns: used_time_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// Creates the /proc directory of a process in the group `/a/b` of a version 2 hierarchy in
    /// `dir`. Returns the directories of the process and of the group.
    fn create_process_in_group(dir: &Path) -> (PathBuf, PathBuf) {
        let (process, group) = (dir.join("proc"), dir.join("tree/a/b"));
        fs::create_dir_all(&process).expect("a folder");
        fs::create_dir_all(&group).expect("a folder");
        fs::write(process.join("cgroup"), "0::/a/b\n").expect("written");
        let tree = dir.join("tree");
        fs::write(
            process.join("mountinfo"),
            format!("1 1 0:1 / {} rw - cgroup2 none rw\n", tree.display()),
        )
        .expect("written");
        (process, group)
    }

    fn write_group_files(group_dir: &Path, cpu_max: &str, used_us: u64, throttled_us: u64) {
        fs::write(group_dir.join("cpu.max"), cpu_max).expect("written");
        fs::write(
            group_dir.join("cpu.stat"),
            format!("usage_usec {used_us}\nuser_usec 1\nthrottled_usec {throttled_us}\n"),
        )
        .expect("written");
    }

    #[test]
    fn tightest_limit_and_its_use_are_measured() {
        let dir = tempfile::tempdir().expect("a folder");
        let (process, group) = create_process_in_group(dir.path());
        assert!(LimitingGroup::of_process(&process).is_none(), "no files");
        write_group_files(&group, "max 100000", 0, 0);
        assert!(LimitingGroup::of_process(&process).is_none(), "no limit");
        let parent_group = dir.path().join("tree/a");
        write_group_files(&parent_group, "50000 100000", 1_000_000, 0);
        write_group_files(&group, "200000 100000", 0, 0);
        let mut limiting_group = LimitingGroup::of_process(&process).expect("a limit");
        let at = Micros::from_secs;
        assert_eq!(
            limiting_group.measure(at(10)),
            Some(LimitUsage {
                processor_limit: 0.5,
                used_processors: 0.0,
                throttled_threads: 0.0,
                used_ns: 1_000_000_000
            })
        );
        write_group_files(&parent_group, "50000 100000", 1_900_000, 3_000_000);
        let limit_usage = limiting_group.measure(at(12)).expect("a limit");
        assert_eq!(
            limit_usage,
            LimitUsage {
                processor_limit: 0.5,
                used_processors: 0.45,
                throttled_threads: 1.5,
                used_ns: 1_900_000_000
            }
        );
        assert_eq!(
            limit_usage.cpu_times(at(12), 2),
            CpuTimes {
                total_us: 24_000_000,
                idle_us: 24_000_000 - 1_900_000
            }
        );
        write_group_files(&parent_group, "max 100000", 2_000_000, 3_000_000);
        assert_eq!(limiting_group.measure(at(13)), None, "the limit is gone");
    }

    /// A malformed limit counts as no limit.
    #[test]
    fn malformed_limit_is_ignored() {
        let dir = tempfile::tempdir().expect("a folder");
        let (process, group) = create_process_in_group(dir.path());
        for text in ["", "50000", "x 100000", "50000 0", "-1 100000"] {
            write_group_files(&group, text, 0, 0);
            assert!(LimitingGroup::of_process(&process).is_none(), "{text:?}");
        }
    }
}
