//! Reads facts about processes from /proc, with the crate `procfs` where the crate can read them.
//!
//! The following files are read here by hand, because the crate does not read them or loses
//! information that is needed:
//!
//! | file | reason |
//! | --- | --- |
//! | the list of processes | The crate opens each process. The tasker lists the processes repeatedly while it stops a task. |
//! | the list of a process's threads with their states | The crate omits threads that it cannot open, for example because no descriptor is free. |
//! | `PID/fdinfo/N` | The crate does not read it. |
//! | `PID/fd/N` | The crate replaces bytes of a path that are not UTF-8, but a target needs the path as it is. |
//! | `PID/maps`, `PID/smaps` | One name that is not UTF-8 makes the crate fail, and a name such as `/SYSV1` makes it panic. A task chooses these names. |
//! | `PID/environ` | Of two entries with the same name the first counts, but the crate returns the last. |
//! | `PID/ns/NAME` | The crate reads all namespaces or none; a PID namespace for children that has no process is an error. |
//! | `sysvipc/NAME` | The crate reads only `shm`, and fails for a user ID above 65535. |
//! | `sys/kernel/osrelease` | The crate returns three numbers, not the whole text. |
//!
//! Other modules read the remaining files:
//!
//! - `PID/mem` and `PID/pagemap`, on which the dump spends its time; they are read at offsets and
//!   with an ioctl,
//! - `self/mountinfo` and `self/cgroup`, which the pure module `sempa_proto::cgroup` parses,
//! - paths such as `self/fd/N`, by which files are opened.

use procfs::process::Process;
pub use procfs::process::{Stat, Status};
use procfs::{FromRead, ProcError};
use std::fs::{DirEntry, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Returns the status of the process or thread with the id `id`; `None` if no such process or
/// thread exists.
pub fn status(id: i32) -> Option<Status> {
    Process::new(id).ok()?.status().ok()
}

/// Returns the status of the process or thread with the id `id`; `None` if no such process or
/// thread exists.
///
/// # Errors
/// The status exists, but cannot be read.
pub(crate) fn read_status(id: i32) -> io::Result<Option<Status>> {
    let status = Process::new(id).and_then(|process| process.status());
    none_if_ended(status.map_err(into_io_error))
}

/// Converts the error that a process or thread does not exist into `None`.
///
/// # Errors
/// All other errors.
pub fn none_if_ended<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e) if has_ended(&e) => Ok(None),
        Err(e) => Err(e),
    }
}

/// True for the errors of files in /proc of a process or thread that does not exist.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
        || error.kind() == io::ErrorKind::NotFound
}

/// Returns the parsed `/proc/PID/stat` of a process; `None` if the process does not exist.
pub fn stat(pid: i32) -> Option<Stat> {
    Process::new(pid).ok()?.stat().ok()
}

/// Returns the parsed `/proc/PID/stat` of the process or thread with the id `id`; `None` if it does
/// not exist.
///
/// # Errors
/// The file exists, but cannot be read.
pub fn read_stat(id: i32) -> io::Result<Option<Stat>> {
    none_if_ended(read_stat_file(&format!("/proc/{id}/stat")))
}

fn read_stat_file(path: &str) -> io::Result<Stat> {
    let bytes = std::fs::read(path)?;
    Stat::from_read(bytes.as_slice()).map_err(into_io_error)
}

/// Returns the threads of a process, each with its state letter; empty if the process does not
/// exist.
///
/// # Errors
/// A thread exists, but its state cannot be read.
pub fn thread_states(pid: i32) -> io::Result<Vec<(i32, char)>> {
    let dir = format!("/proc/{pid}/task");
    let Some(entries) = none_if_ended(std::fs::read_dir(&dir))? else {
        return Ok(Vec::new());
    };
    let mut states = Vec::new();
    for entry in entries {
        // The process may end while its threads are listed.
        let Some(entry) = none_if_ended(entry)? else {
            break;
        };
        let path = format!("{dir}/{}/stat", entry.file_name().to_string_lossy());
        if let Some(stat) = none_if_ended(read_stat_file(&path))? {
            states.push((stat.pid, stat.state));
        }
    }
    Ok(states)
}

/// Returns the memory of a process in bytes: resident memory plus swapped-out memory, which is
/// dumped as well. `None` for an exiting process that has released its memory.
pub fn memory_bytes(status: &Status) -> Option<u64> {
    let kib = status.vmrss?.saturating_add(status.vmswap.unwrap_or(0));
    Some(kib.saturating_mul(1024))
}

/// Returns the PID of a process in its innermost PID namespace. `None` if the process does not
/// exist.
pub fn innermost_pid(pid: i32) -> Option<i32> {
    status(pid)?.nspid?.last().copied()
}

/// Returns the ids of all processes in the PID namespace of /proc.
///
/// # Errors
/// /proc cannot be read, for example because no descriptor is free.
pub fn process_ids() -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        if let Some(pid) = entry?.file_name().to_str().and_then(|n| n.parse().ok()) {
            pids.push(pid);
        }
    }
    Ok(pids)
}

/// Returns the ids of a process's threads.
///
/// # Errors
/// The process does not exist.
pub fn thread_ids(pid: i32) -> io::Result<Vec<i32>> {
    let threads = Process::new(pid).and_then(|process| process.tasks());
    let threads = threads.map_err(into_io_error)?;
    Ok(threads.flatten().map(|thread| thread.tid).collect())
}

/// Returns the PIDs of the children that the main thread of a process has started; `None` if the
/// process does not exist.
pub fn children(pid: i32) -> Option<Vec<i32>> {
    let children = Process::new(pid).ok()?.task_main_thread().ok()?.children();
    Some(children.ok()?.into_iter().map(u32::cast_signed).collect())
}

/// Returns the child of the calling process that has the PID `innermost_pid` in the PID namespace
/// `namespace`, in the caller's own namespace; `None` if there is none.
///
/// # Errors
/// The children cannot be read.
pub(crate) fn child_with_innermost_pid(
    namespace: &OwnedFd,
    innermost_pid: i32,
) -> io::Result<Option<i32>> {
    let inode = File::from(namespace.try_clone()?).metadata()?.ino();
    let is_inside = |pid: &i32| {
        self::innermost_pid(*pid) == Some(innermost_pid)
            && std::fs::metadata(format!("/proc/{pid}/ns/pid"))
                .is_ok_and(|metadata| metadata.ino() == inode)
    };
    let own_pid = std::process::id().cast_signed();
    for thread in thread_ids(own_pid)? {
        let path = format!("/proc/{own_pid}/task/{thread}/children");
        let children = none_if_ended(std::fs::read_to_string(path))?.unwrap_or_default();
        let mut pids = children
            .split_ascii_whitespace()
            .filter_map(|pid| pid.parse().ok());
        if let Some(pid) = pids.find(is_inside) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

pub(crate) fn into_io_error(error: ProcError) -> io::Error {
    match error {
        ProcError::NotFound(_) => io::Error::from_raw_os_error(libc::ENOENT),
        ProcError::PermissionDenied(_) => io::Error::from_raw_os_error(libc::EACCES),
        ProcError::Io(error, _) => error,
        other => io::Error::new(io::ErrorKind::InvalidData, other.to_string()),
    }
}

/// Lists the entries of `/proc/PID/fd`.
///
/// # Errors
/// The process does not exist, or access is denied.
pub(crate) fn descriptors(pid: i32) -> io::Result<impl Iterator<Item = DirEntry>> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.flatten())
}

/// Returns the text of `/proc/PID/fdinfo/NUMBER`.
///
/// # Errors
/// The descriptor was closed.
pub(crate) fn descriptor_info(pid: i32, fd_number: &str) -> io::Result<String> {
    std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd_number}"))
}

/// Returns the signal sets of all signalfds of a process: bit 0 is signal 1. Descriptors that have
/// just been closed are omitted.
pub fn signalfd_masks(pid: i32) -> Vec<u64> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter();
    let read_mask = |entry: DirEntry| {
        let text = std::fs::read_to_string(entry.path()).ok()?;
        let hex = text.lines().find_map(|line| line.strip_prefix("sigmask:"));
        u64::from_str_radix(hex?.trim(), 16).ok()
    };
    entries.flatten().flatten().filter_map(read_mask).collect()
}

/// Returns the text of the file `maps` or `smaps` of a process; bytes that are not UTF-8 are
/// replaced.
///
/// # Errors
/// The process does not exist, or access is denied.
pub(crate) fn mappings(pid: i32, file_name: &str) -> io::Result<String> {
    let text = std::fs::read(format!("/proc/{pid}/{file_name}"))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the environment of a process: entries that end with a zero byte. The environment is
/// empty if the process or its main thread has exited.
///
/// # Errors
/// The environment exists, but cannot be read.
pub(crate) fn environment(pid: i32) -> io::Result<Vec<u8>> {
    let environment = std::fs::read(format!("/proc/{pid}/environ"));
    Ok(none_if_ended(environment)?.unwrap_or_default())
}

/// Returns the identity of a namespace, as the kernel prints it; `None` if the identity cannot be
/// read. `process` is the PID of a process in the namespace, or "self".
pub(crate) fn namespace(process: &str, name: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/{name}")).ok()
}

/// Returns the table of all System V objects of one type: `shm`, `msg` or `sem`. The table is empty
/// if the kernel does not have these objects.
///
/// # Errors
/// The table exists, but cannot be read.
pub(crate) fn sysv_table(name: &str) -> io::Result<String> {
    let table = std::fs::read_to_string(format!("/proc/sysvipc/{name}"));
    Ok(none_if_ended(table)?.unwrap_or_default())
}

/// Returns the number below which all PIDs in this process's PID namespace are; `None` if it cannot
/// be read.
pub fn pid_limit() -> Option<u32> {
    u32::try_from(procfs::sys::kernel::pid_max().ok()?).ok()
}

/// Returns the release of this host's kernel.
pub(crate) fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_status() -> Status {
        status(std::process::id().cast_signed()).expect("it runs")
    }

    #[test]
    fn swapped_memory_counts() {
        let memory_of = |resident_kib, swapped_kib| {
            let mut status = own_status();
            (status.vmrss, status.vmswap) = (resident_kib, swapped_kib);
            memory_bytes(&status)
        };
        assert_eq!(
            memory_of(Some(344), Some(2 << 20)),
            Some((344 + (2 << 20)) << 10)
        );
        assert_eq!(
            memory_of(Some(344), None),
            Some(344 << 10),
            "a kernel without swap"
        );
        assert_eq!(memory_of(None, None), None, "a zombie");
    }

    #[test]
    fn status_exists_for_running_process() {
        assert_eq!(
            own_status().ppid.cast_unsigned(),
            std::os::unix::process::parent_id()
        );
        assert!(status(-1).is_none());
    }

    /// A process that does not exist has no threads; the error is that of the system call.
    #[test]
    fn missing_process_is_not_found() {
        let error = thread_ids(-1).expect_err("no process has this id");
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        let own_pid = std::process::id().cast_signed();
        assert!(thread_ids(own_pid).expect("it runs").contains(&own_pid));
        assert!(process_ids().expect("the kernel has it").contains(&own_pid));
        let states = thread_states(own_pid).expect("it runs");
        assert!(states.iter().any(|(thread, _)| *thread == own_pid));
        assert!(thread_states(-1).expect("no process").is_empty());
        assert!(read_stat(-1).expect("no process").is_none());
    }
}
