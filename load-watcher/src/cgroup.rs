//! Measures how much processor time the host's control group may use and does use, if the group has
//! a limit (version 1 `cpu` and `cpuacct`, or version 2 `cpu`).
//!
//! In a container or a virtual host, /proc describes the whole machine; this module describes the
//! part of the machine that the host may use.

use crate::proc::{
    CpuTimes, group_cpu_time, leading_numbers, named_number, quota_v2, read_from_start,
};
use sempa_proto::Micros;
use sempa_proto::cgroup::group_dir;
use std::fs::{self, File};
use std::path::Path;

/// Maximum number of bytes that are read from a file.
const TEXT_BYTES_MAX: usize = 1024;
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
    pub total_ns: u64,
}

impl LimitUsage {
    /// Converts the group's use into the form of /proc/stat, for a machine with `cores` processors
    /// at this time of day.
    pub fn cpu_times(&self, at: Micros, cores: u32) -> CpuTimes {
        let total = at.0.saturating_mul(u64::from(cores));
        CpuTimes {
            total,
            idle: total.saturating_sub(self.total_ns / 1000),
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
struct Reading {
    at: Micros,
    used_ns: u64,
    throttled_ns: u64,
}

/// The control group that limits this process.
#[derive(Debug)]
pub struct LimitingGroup {
    files: GroupFiles,
    text: Box<[u8; TEXT_BYTES_MAX]>,
    previous: Option<Reading>,
}

impl GroupFiles {
    fn v1(cpu: &Path, cpuacct: &Path) -> Option<GroupFiles> {
        let open = |folder: &Path, name: &str| File::open(folder.join(name)).ok();
        Some(GroupFiles::V1 {
            quota: open(cpu, "cpu.cfs_quota_us")?,
            period: open(cpu, "cpu.cfs_period_us")?,
            usage: open(cpuacct, "cpuacct.usage")?,
            stat: open(cpu, "cpu.stat")?,
        })
    }

    fn v2(folder: &Path) -> Option<GroupFiles> {
        let open = |name: &str| File::open(folder.join(name)).ok();
        Some(GroupFiles::V2 {
            quota: open("cpu.max")?,
            stat: open("cpu.stat")?,
        })
    }

    /// Returns the number of processors that the group may use; `None` if there is no limit.
    fn processor_limit(&self, text: &mut [u8]) -> Option<f32> {
        match self {
            GroupFiles::V1 { quota, period, .. } => {
                // The value −1, which is not parsed as a number, means no limit.
                let quota = leading_numbers(read_from_start(quota, text).ok()?).next()?;
                let period = leading_numbers(read_from_start(period, text).ok()?)
                    .next()
                    .filter(|period| *period > 0)?;
                Some(quota as f32 / period as f32)
            }
            GroupFiles::V2 { quota, .. } => quota_v2(read_from_start(quota, text).ok()?),
        }
    }

    /// Returns the CPU time used and the throttled time, in nanoseconds.
    fn times(&self, text: &mut [u8]) -> Option<(u64, u64)> {
        match self {
            GroupFiles::V1 { usage, stat, .. } => {
                let used = leading_numbers(read_from_start(usage, text).ok()?).next()?;
                Some((
                    used,
                    named_number(read_from_start(stat, text).ok()?, b"throttled_time")?,
                ))
            }
            GroupFiles::V2 { stat, .. } => {
                let text = read_from_start(stat, text).ok()?;
                let held = named_number(text, b"throttled_usec").unwrap_or(0);
                Some((
                    group_cpu_time(text)?.saturating_mul(1000),
                    held.saturating_mul(1000),
                ))
            }
        }
    }
}

impl LimitingGroup {
    /// Returns the control group with the tightest processor limit among the group of a process and
    /// all groups that enclose it; `None` if there is no limit. `process` is the directory of the
    /// process in /proc.
    pub fn of_process(process: &Path) -> Option<LimitingGroup> {
        let cgroups = fs::read(process.join("cgroup")).ok()?;
        let mounts = fs::read(process.join("mountinfo")).ok()?;
        let group_folder = |controller| group_dir(&mounts, &cgroups, controller);
        let mut text = Box::new([0; TEXT_BYTES_MAX]);
        let mut tightest: Option<(f32, GroupFiles)> = None;
        let mut consider = |files: Option<GroupFiles>, text: &mut [u8]| {
            let Some((share, files)) =
                files.and_then(|files| Some((files.processor_limit(text)?, files)))
            else {
                return;
            };
            if tightest.as_ref().is_none_or(|(least, _)| share < *least) {
                tightest = Some((share, files));
            }
        };
        if let (Some(cpu), Some(accounts)) =
            (group_folder(Some("cpu")), group_folder(Some("cpuacct")))
        {
            // The use of a group is known only if both hierarchies have a group of the same name.
            for (cpu, accounts) in cpu.ancestors().zip(accounts.ancestors()) {
                if cpu.file_name() == accounts.file_name() {
                    consider(GroupFiles::v1(cpu, accounts), &mut text[..]);
                }
            }
        }
        if let Some(folder) = group_folder(None) {
            folder
                .ancestors()
                .for_each(|folder| consider(GroupFiles::v2(folder), &mut text[..]));
        }
        let (_, files) = tightest?;
        Some(LimitingGroup {
            files,
            text,
            previous: None,
        })
    }

    /// Returns the limit, and its use since the previous measurement; `None` if the limit was
    /// removed. The first measurement returns a use of 0. Allocates no memory.
    pub fn measure(&mut self, at: Micros) -> Option<LimitUsage> {
        let share = self.files.processor_limit(&mut self.text[..])?;
        let (used, held) = self.files.times(&mut self.text[..])?;
        let reading = Reading {
            at,
            used_ns: used,
            throttled_ns: held,
        };
        let before = *self.previous.get_or_insert(reading);
        let span = at.since(before.at);
        if span < MEASURE_INTERVAL_MIN {
            return Some(LimitUsage {
                processor_limit: share,
                used_processors: 0.0,
                throttled_threads: 0.0,
                total_ns: used,
            });
        }
        self.previous = Some(reading);
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f32 / 1000.0 / span.0 as f32;
        Some(LimitUsage {
            processor_limit: share,
            used_processors: rate(used, before.used_ns),
            throttled_threads: rate(held, before.throttled_ns),
            total_ns: used,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// Creates a process in the group `/a/b` of a version 2 hierarchy in `dir`. Returns the
    /// directories of the process and of the group.
    fn process(dir: &Path) -> (PathBuf, PathBuf) {
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

    fn write(folder: &Path, max: &str, used: u64, held: u64) {
        fs::write(folder.join("cpu.max"), max).expect("written");
        fs::write(
            folder.join("cpu.stat"),
            format!("usage_usec {used}\nuser_usec 1\nthrottled_usec {held}\n"),
        )
        .expect("written");
    }

    #[test]
    fn tightest_limit_and_its_use_are_measured() {
        let dir = tempfile::tempdir().expect("a folder");
        let (process, group) = process(dir.path());
        assert!(LimitingGroup::of_process(&process).is_none(), "no files");
        write(&group, "max 100000", 0, 0);
        assert!(LimitingGroup::of_process(&process).is_none(), "no limit");
        let around = dir.path().join("tree/a");
        write(&around, "50000 100000", 1_000_000, 0);
        write(&group, "200000 100000", 0, 0);
        let mut limited = LimitingGroup::of_process(&process).expect("a limit");
        let at = Micros::from_secs;
        assert_eq!(
            limited.measure(at(10)),
            Some(LimitUsage {
                processor_limit: 0.5,
                used_processors: 0.0,
                throttled_threads: 0.0,
                total_ns: 1_000_000_000
            })
        );
        write(&around, "50000 100000", 1_900_000, 3_000_000);
        let measured = limited.measure(at(12)).expect("a limit");
        assert_eq!(
            measured,
            LimitUsage {
                processor_limit: 0.5,
                used_processors: 0.45,
                throttled_threads: 1.5,
                total_ns: 1_900_000_000
            }
        );
        assert_eq!(
            measured.cpu_times(at(12), 2),
            CpuTimes {
                total: 24_000_000,
                idle: 24_000_000 - 1_900_000
            }
        );
        write(&around, "max 100000", 2_000_000, 3_000_000);
        assert_eq!(limited.measure(at(13)), None, "the limit is gone");
    }

    /// A malformed limit counts as no limit.
    #[test]
    fn malformed_limit_is_ignored() {
        let dir = tempfile::tempdir().expect("a folder");
        let (process, group) = process(dir.path());
        for text in ["", "50000", "x 100000", "50000 0", "-1 100000"] {
            write(&group, text, 0, 0);
            assert!(LimitingGroup::of_process(&process).is_none(), "{text:?}");
        }
    }
}
