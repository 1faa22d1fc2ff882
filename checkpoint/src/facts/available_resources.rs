//! Determines the memory, processes and disk space that are available on this host, within the
//! limits of the control groups of this process.

use super::verdict::MEMORY_SLACK_BYTES;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::statvfs;
use procfs::{Current, Meminfo};
use sempa_proto::cgroup::{find_mount_point, group_dir};
use std::fs::read_to_string;
use std::io;
use std::path::{Path, PathBuf};

/// Names of two files of a cgroup controller: the file with the limit and the file with the usage.
/// The names depend on the version of control groups.
struct ControllerFiles {
    limit_file: &'static str,
    usage_file: &'static str,
    /// Field of `memory.stat` that contains the memory in bytes that the kernel reclaims on demand.
    /// This memory counts as free. `None` if the controller has no such field.
    reclaimable_field: Option<&'static str>,
}

const MEMORY_V2: ControllerFiles = ControllerFiles {
    limit_file: "memory.max",
    usage_file: "memory.current",
    reclaimable_field: Some("inactive_file"),
};
const MEMORY_V1: ControllerFiles = ControllerFiles {
    limit_file: "memory.limit_in_bytes",
    usage_file: "memory.usage_in_bytes",
    reclaimable_field: Some("total_inactive_file"),
};
const PIDS: ControllerFiles = ControllerFiles {
    limit_file: "pids.max",
    usage_file: "pids.current",
    reclaimable_field: None,
};

/// Returns the number of bytes of memory that are available on this host and within the control
/// groups of this process.
pub fn memory_available_bytes() -> u64 {
    let host_bytes = Meminfo::current().ok().and_then(|info| info.mem_available);
    let host_bytes = host_bytes.unwrap_or(0);
    cgroup_available_bytes().map_or(host_bytes, |cgroup_bytes| cgroup_bytes.min(host_bytes))
}

/// Returns the number of bytes of memory until a control group of this process reaches its limit;
/// `None` if no group has a limit.
fn cgroup_available_bytes() -> Option<u64> {
    smallest_available([(None, &MEMORY_V2), (Some("memory"), &MEMORY_V1)])
}

/// Returns the number of processes and threads until a control group of this process reaches its
/// limit; `None` if no group has a limit.
pub(super) fn threads_available() -> Option<u64> {
    smallest_available([(None, &PIDS), (Some("pids"), &PIDS)])
}

/// Returns the number of bytes that may be written in the directory `dir`: the free space of its
/// file system. If the file system is in memory, the result is at most the available memory of the
/// host minus [`MEMORY_SLACK_BYTES`].
///
/// # Errors
/// The directory cannot be accessed.
pub(crate) fn writable_bytes(dir: &Path) -> io::Result<u64> {
    let free_space = free_bytes(dir)?;
    match statfs(dir)?.filesystem_type() == TMPFS_MAGIC {
        true => Ok(free_space.min(memory_available_bytes().saturating_sub(MEMORY_SLACK_BYTES))),
        false => Ok(free_space),
    }
}

/// Returns the free space of a directory's file system for ordinary users, in bytes.
///
/// # Errors
/// The directory cannot be accessed.
pub(crate) fn free_bytes(dir: &Path) -> io::Result<u64> {
    let stat = statvfs(dir)?;
    // The types of the fields depend on the architecture.
    #[allow(clippy::useless_conversion)]
    Ok(u64::from(stat.blocks_available()).saturating_mul(u64::from(stat.fragment_size())))
}

/// Returns the smallest difference between limit and usage over all control groups of this process,
/// in both versions of control groups. `None` if no group has a limit.
fn smallest_available(hierarchies: [(Option<&str>, &ControllerFiles); 2]) -> Option<u64> {
    let (mounts, groups) = (
        std::fs::read("/proc/self/mountinfo").ok()?,
        std::fs::read("/proc/self/cgroup").ok()?,
    );
    let remainder_in = |(controller, files): (Option<&str>, &ControllerFiles)| {
        let group = group_dir(&mounts, &groups, controller)?;
        available_with_ancestors(&group, &find_mount_point(&mounts, controller)?, files)
    };
    hierarchies.into_iter().filter_map(remainder_in).min()
}

/// Returns the smallest difference between limit and usage over this control group and its
/// ancestors. `mount_point` is the mount point of the hierarchy, where the ancestors end. `None` if
/// no group has a limit.
fn available_with_ancestors(
    group: &Path,
    mount_point: &Path,
    files: &ControllerFiles,
) -> Option<u64> {
    let groups: Vec<PathBuf> = group
        .ancestors()
        .take_while(|ancestor| ancestor.starts_with(mount_point))
        .map(Path::to_path_buf)
        .collect();
    groups
        .iter()
        .filter_map(|group| available_in_group(group, files))
        .min()
}

/// Returns the difference between limit and usage of one control group; `None` if the group has no
/// limit. Reclaimable memory does not count as usage.
fn available_in_group(group: &Path, files: &ControllerFiles) -> Option<u64> {
    let read_number = |name: &str| {
        read_to_string(group.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    // "max" is not a number. Version 1 reports a number close to 2^63 instead.
    let limit = read_number(files.limit_file).filter(|limit| *limit < 1 << 60)?;
    let reclaimable_bytes = files.reclaimable_field.and_then(|field| {
        let text = read_to_string(group.join("memory.stat")).ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
    });
    Some(
        limit
            .saturating_add(reclaimable_bytes.unwrap_or(0))
            .saturating_sub(read_number(files.usage_file)?),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The group with the least available memory determines the result. Reclaimable memory counts
    /// as free.
    #[test]
    fn group_with_least_available_memory_decides() {
        let dir = tempfile::tempdir().expect("a directory");
        let (outer_group, inner_group) = (dir.path().join("root"), dir.path().join("root/inner"));
        std::fs::create_dir_all(&inner_group).expect("made");
        let write = |group_dir: &Path, name: &str, text: &str| {
            std::fs::write(group_dir.join(name), text).expect("written")
        };
        write(dir.path(), "memory.max", "1\n");
        write(&outer_group, "memory.max", "1000\n");
        write(&outer_group, "memory.current", "800\n");
        write(&outer_group, "memory.stat", "anon 5\ninactive_file 100\n");
        write(&inner_group, "memory.max", "max\n");
        write(&inner_group, "memory.current", "700\n");
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &MEMORY_V2),
            Some(300)
        );
        write(&inner_group, "memory.max", "750\n");
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &MEMORY_V2),
            Some(50)
        );
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &PIDS),
            None
        );
        write(&inner_group, "pids.max", "10\n");
        write(&inner_group, "pids.current", "12\n");
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &PIDS),
            Some(0)
        );
        write(
            &inner_group,
            "memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        assert_eq!(available_in_group(&inner_group, &MEMORY_V1), None);
    }
}
