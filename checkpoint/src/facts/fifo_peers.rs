//! Finds processes outside a task that have one of the task's named pipes open. A migration would
//! close the task's end of the pipe without notifying the other process.

use crate::proc;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Returns the device and inode number of a file, following symbolic links; `None` if the file
/// cannot be accessed.
pub(super) fn file_identity(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

/// Returns the path of the first pipe of `pipes` that a process outside `task_processes` has open;
/// `None` if all pipes are open only in the task. `pipes` maps the device and inode number of each
/// pipe to its path. Processes that cannot be inspected are skipped.
pub(super) fn pipe_open_outside_task(
    pipes: &BTreeMap<(u64, u64), PathBuf>,
    task_processes: &[i32],
) -> Option<PathBuf> {
    if pipes.is_empty() {
        return None;
    }
    proc::process_ids()
        .into_iter()
        .filter(|pid| !task_processes.contains(pid))
        .find_map(|pid| pipe_open_in_process(pid, pipes))
}

fn pipe_open_in_process(pid: i32, pipes: &BTreeMap<(u64, u64), PathBuf>) -> Option<PathBuf> {
    proc::descriptors(pid).ok()?.find_map(|entry| {
        // Only descriptors with a path are inspected further: reading the metadata of other files
        // may block.
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
        assert_eq!(pipe_open_outside_task(&pipes, &[]), None);
        let read_end = std::fs::File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&path)
            .expect("open");
        assert_eq!(pipe_open_outside_task(&pipes, &[]), Some(path));
        assert_eq!(
            pipe_open_outside_task(&pipes, &[std::process::id() as i32]),
            None
        );
        drop(read_end);
    }
}
