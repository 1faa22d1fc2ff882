//! Determines the memory, processes and disk space that are available on this host, within the
//! limits of the control groups of this process.

use super::verdict::MEMORY_SLACK_BYTES;
use crate::proc;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::sys::statvfs::statvfs;
use procfs::{Current, Meminfo};
use sempa_proto::cgroup::{find_mount_point, group_dir};
use std::fs::read_to_string;
use std::io;
use std::path::Path;

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
/// groups of this process; zero if that cannot be read.
pub fn memory_available_bytes() -> u64 {
    read_memory_available_bytes().unwrap_or(0)
}

/// Returns the same as [`memory_available_bytes`].
///
/// # Errors
/// It cannot be read.
pub(super) fn read_memory_available_bytes() -> io::Result<u64> {
    let info = Meminfo::current().map_err(proc::into_io_error)?;
    let host_bytes = info.mem_available.ok_or(io::ErrorKind::Unsupported)?;
    let cgroup_bytes = cgroup_available_bytes()?;
    Ok(cgroup_bytes.map_or(host_bytes, |cgroup_bytes| cgroup_bytes.min(host_bytes)))
}

/// Returns the number of bytes of memory until a control group of this process reaches its limit;
/// `None` if no group has a limit.
fn cgroup_available_bytes() -> io::Result<Option<u64>> {
    smallest_available([(None, &MEMORY_V2), (Some("memory"), &MEMORY_V1)])
}

/// Returns the number of processes and threads until a control group of this process reaches its
/// limit; `None` if no group has a limit.
///
/// # Errors
/// A limit cannot be read.
pub(super) fn threads_available() -> io::Result<Option<u64>> {
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
fn smallest_available(
    hierarchies: [(Option<&str>, &ControllerFiles); 2],
) -> io::Result<Option<u64>> {
    // A kernel without control groups lacks the second file.
    let (Some(mounts), Some(groups)) = (
        none_if_missing(std::fs::read("/proc/self/mountinfo"))?,
        none_if_missing(std::fs::read("/proc/self/cgroup"))?,
    ) else {
        return Ok(None);
    };
    let mut smallest = None;
    for (controller, files) in hierarchies {
        let group = group_dir(&mounts, &groups, controller);
        if let Some((group, mount_point)) = group.zip(find_mount_point(&mounts, controller)) {
            let available = available_with_ancestors(&group, &mount_point, files)?;
            smallest = smallest.into_iter().chain(available).min();
        }
    }
    Ok(smallest)
}

/// Converts the error that a file does not exist into `None`. A control group may lack a file, and
/// may be removed at any time (ENODEV).
fn none_if_missing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns the smallest difference between limit and usage over this control group and its
/// ancestors. `mount_point` is the mount point of the hierarchy, where the ancestors end. `None` if
/// no group has a limit.
fn available_with_ancestors(
    group: &Path,
    mount_point: &Path,
    files: &ControllerFiles,
) -> io::Result<Option<u64>> {
    let mut smallest = None;
    for group in group
        .ancestors()
        .take_while(|ancestor| ancestor.starts_with(mount_point))
    {
        let available = available_in_group(group, files)?;
        smallest = smallest.into_iter().chain(available).min();
    }
    Ok(smallest)
}

/// Returns the difference between limit and usage of one control group; `None` if the group has no
/// limit. Reclaimable memory does not count as usage.
fn available_in_group(group: &Path, files: &ControllerFiles) -> io::Result<Option<u64>> {
    let read_number = |name: &str| -> io::Result<Option<u64>> {
        let text = none_if_missing(read_to_string(group.join(name)))?;
        Ok(text.and_then(|text| text.trim().parse::<u64>().ok()))
    };
    // "max" is not a number. Version 1 reports a number close to 2^63 instead.
    let limit = read_number(files.limit_file)?.filter(|limit| *limit < 1 << 60);
    let Some((limit, usage)) = limit.zip(read_number(files.usage_file)?) else {
        return Ok(None);
    };
    let mut reclaimable_bytes = None;
    if let Some(field) = files.reclaimable_field {
        let text = none_if_missing(read_to_string(group.join("memory.stat")))?;
        reclaimable_bytes = text.and_then(|text| {
            text.lines()
                .find_map(|line| line.strip_prefix(field)?.trim().parse::<u64>().ok())
        });
    }
    let permitted = limit.saturating_add(reclaimable_bytes.unwrap_or(0));
    Ok(Some(permitted.saturating_sub(usage)))
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
            available_with_ancestors(&inner_group, &outer_group, &MEMORY_V2).expect("readable"),
            Some(300)
        );
        write(&inner_group, "memory.max", "750\n");
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &MEMORY_V2).expect("readable"),
            Some(50)
        );
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &PIDS).expect("readable"),
            None
        );
        write(&inner_group, "pids.max", "10\n");
        write(&inner_group, "pids.current", "12\n");
        assert_eq!(
            available_with_ancestors(&inner_group, &outer_group, &PIDS).expect("readable"),
            Some(0)
        );
        write(
            &inner_group,
            "memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        let available = available_in_group(&inner_group, &MEMORY_V1);
        assert_eq!(available.expect("readable"), None);
    }

    /// A limit that exists but cannot be read is an error, not the absence of a limit.
    #[test]
    fn unreadable_limit_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(
            available_in_group(dir.path(), &PIDS).expect("no limit"),
            None
        );
        std::fs::create_dir(dir.path().join("pids.max")).expect("made");
        let error = available_in_group(dir.path(), &PIDS).expect_err("it is a directory");
        assert_eq!(error.raw_os_error(), Some(libc::EISDIR));
    }
}
