//! Determines the memory, processes and disk space that are available on this host. Takes the
//! limits of the control groups of this process into account.

use super::verdict::MEMORY_SLACK_BYTES;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::statvfs;
use procfs::{Current, Meminfo};
use sempa_proto::cgroup::{find_mount_point, group_dir};
use std::fs::read_to_string;
use std::io;
use std::path::{Path, PathBuf};

/// Names of the files of a cgroup controller that contain its limit and its usage. The names depend
/// on the version of control groups.
struct ControllerFiles {
    limit: &'static str,
    usage: &'static str,
    /// Field of `memory.stat` with the memory that the kernel reclaims when it is needed. That
    /// memory counts as free.
    reclaimable: Option<&'static str>,
}

const MEMORY_V2: ControllerFiles = ControllerFiles {
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: Some("inactive_file"),
};
const MEMORY_V1: ControllerFiles = ControllerFiles {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: Some("total_inactive_file"),
};
const PIDS: ControllerFiles = ControllerFiles {
    limit: "pids.max",
    usage: "pids.current",
    reclaimable: None,
};

/// Returns the number of bytes of memory that are available on this host and within the control
/// groups of this process.
pub fn memory_available_bytes() -> u64 {
    let machine = Meminfo::current().ok().and_then(|info| info.mem_available);
    let machine = machine.unwrap_or(0);
    cgroup_memory().map_or(machine, |left| left.min(machine))
}

/// Returns the number of bytes of memory until a control group of this process reaches its limit;
/// `None` if no group has a limit.
fn cgroup_memory() -> Option<u64> {
    smallest_remainder([(None, &MEMORY_V2), (Some("memory"), &MEMORY_V1)])
}

/// Returns the number of processes and threads until a control group of this process reaches its
/// limit; `None` if no group has a limit.
pub(super) fn threads_available() -> Option<u64> {
    smallest_remainder([(None, &PIDS), (Some("pids"), &PIDS)])
}

/// Returns the number of bytes that may be written in the directory `folder`: the free space of its
/// file system. If the file system is in memory, the result is at most the available memory of the
/// host.
///
/// # Errors
/// The directory cannot be accessed.
pub(crate) fn writable_bytes(folder: &Path) -> io::Result<u64> {
    let free = free_bytes(folder)?;
    match statfs(folder)?.filesystem_type() == TMPFS_MAGIC {
        true => Ok(free.min(memory_available_bytes().saturating_sub(MEMORY_SLACK_BYTES))),
        false => Ok(free),
    }
}

/// Returns the free space of a directory's file system for ordinary users, in bytes.
///
/// # Errors
/// The directory cannot be accessed.
pub(crate) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let stat = statvfs(folder)?;
    // The types of the fields depend on the architecture.
    #[allow(clippy::useless_conversion)]
    Ok(u64::from(stat.blocks_available()).saturating_mul(u64::from(stat.fragment_size())))
}

/// Returns the smallest difference between limit and usage over all control groups of this process,
/// in both versions of control groups.
fn smallest_remainder(hierarchies: [(Option<&str>, &ControllerFiles); 2]) -> Option<u64> {
    let (mounts, groups) = (
        std::fs::read("/proc/self/mountinfo").ok()?,
        std::fs::read("/proc/self/cgroup").ok()?,
    );
    let remainder_in = |(controller, files): (Option<&str>, &ControllerFiles)| {
        let group = group_dir(&mounts, &groups, controller)?;
        remainder_with_ancestors(&group, &find_mount_point(&mounts, controller)?, files)
    };
    hierarchies.into_iter().filter_map(remainder_in).min()
}

/// Returns the smallest difference between limit and usage over this control group and its
/// ancestors, up to `root`, the mount point of the hierarchy.
fn remainder_with_ancestors(group: &Path, root: &Path, files: &ControllerFiles) -> Option<u64> {
    let groups: Vec<PathBuf> = group
        .ancestors()
        .take_while(|at| at.starts_with(root))
        .map(Path::to_path_buf)
        .collect();
    groups
        .iter()
        .filter_map(|group| remainder(group, files))
        .min()
}

/// Returns the difference between limit and usage of one control group; `None` if it has no limit.
fn remainder(group: &Path, files: &ControllerFiles) -> Option<u64> {
    let number = |name: &str| {
        read_to_string(group.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    // "max" is not a number. Version 1 reports a number close to 2^63 instead.
    let limit = number(files.limit).filter(|limit| *limit < 1 << 60)?;
    let reclaimable = files.reclaimable.and_then(|field| {
        let text = read_to_string(group.join("memory.stat")).ok()?;
        text.lines()
            .find_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
    });
    Some(
        limit
            .saturating_add(reclaimable.unwrap_or(0))
            .saturating_sub(number(files.usage)?),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The group with the smallest remainder determines the result, and reclaimable memory counts
    /// as free.
    #[test]
    fn smallest_group_limit_counts_minus_reclaimable() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, inner) = (dir.path().join("root"), dir.path().join("root/inner"));
        std::fs::create_dir_all(&inner).expect("made");
        let write = |at: &Path, name: &str, text: &str| {
            std::fs::write(at.join(name), text).expect("written")
        };
        write(dir.path(), "memory.max", "1\n");
        write(&root, "memory.max", "1000\n");
        write(&root, "memory.current", "800\n");
        write(&root, "memory.stat", "anon 5\ninactive_file 100\n");
        write(&inner, "memory.max", "max\n");
        write(&inner, "memory.current", "700\n");
        assert_eq!(
            remainder_with_ancestors(&inner, &root, &MEMORY_V2),
            Some(300)
        );
        write(&inner, "memory.max", "750\n");
        assert_eq!(
            remainder_with_ancestors(&inner, &root, &MEMORY_V2),
            Some(50)
        );
        assert_eq!(remainder_with_ancestors(&inner, &root, &PIDS), None);
        write(&inner, "pids.max", "10\n");
        write(&inner, "pids.current", "12\n");
        assert_eq!(remainder_with_ancestors(&inner, &root, &PIDS), Some(0));
        write(&inner, "memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(remainder(&inner, &MEMORY_V1), None);
    }
}
