//! Finds processes outside a task that have one of the task's named pipes open. A migration would
//! close the task's end of the pipe without notifying the other process.

use crate::proc;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::sys::stat::fstatat;
use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the device and inode number of a file, following symbolic links; `None` if the file
/// cannot be accessed. Asks no server of a file system, which may belong to another user and never
/// answer.
pub(super) fn file_identity(path: &Path) -> Option<(u64, u64)> {
    let without_server = AtFlags::from_bits_retain(libc::AT_STATX_DONT_SYNC);
    let meta = fstatat(AT_FDCWD, path, without_server).ok()?;
    Some((meta.st_dev, meta.st_ino))
}

/// Returns the path of the first pipe of `pipes` that a process outside `task_processes` has open;
/// `None` if all pipes are open only in the task. `pipes` maps the device and inode number of each
/// pipe to its path.
///
/// # Errors
/// The processes, or the descriptors of a process, cannot be read.
pub(super) fn pipe_open_outside_task(
    pipes: &BTreeMap<(u64, u64), PathBuf>,
    task_processes: &[i32],
) -> io::Result<Option<PathBuf>> {
    if pipes.is_empty() {
        return Ok(None);
    }
    let other_processes = proc::process_ids()?
        .into_iter()
        .filter(|pid| !task_processes.contains(pid));
    for pid in other_processes {
        // Processes that have ended are skipped, and those of other users if access is denied.
        match proc::descriptors(pid) {
            Ok(fd_entries) => {
                if let Some(path) = open_pipe(fd_entries, pipes) {
                    return Ok(Some(path));
                }
            }
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied || proc::has_ended(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

fn open_pipe(
    mut fd_entries: impl Iterator<Item = DirEntry>,
    pipes: &BTreeMap<(u64, u64), PathBuf>,
) -> Option<PathBuf> {
    fd_entries.find_map(|entry| {
        // A named pipe has a path.
        let is_path = std::fs::read_link(entry.path()).is_ok_and(|link| link.is_absolute());
        let identity = if is_path {
            file_identity(&entry.path())
        } else {
            None
        };
        pipes.get(&identity?).cloned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn pipe_open_in_other_process_is_found() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("fifo");
        let pipes = BTreeMap::from([(file_identity(&path).expect("it exists"), path.clone())]);
        let open_outside = |task_processes: &[i32]| {
            pipe_open_outside_task(&pipes, task_processes).expect("readable")
        };
        assert_eq!(open_outside(&[]), None);
        let read_end = std::fs::File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .expect("open");
        assert_eq!(open_outside(&[]), Some(path));
        assert_eq!(open_outside(&[std::process::id() as i32]), None);
        drop(read_end);
    }
}
