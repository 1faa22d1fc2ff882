//! Directories that belong to one running tasker each. A tasker holds a lock on its directory, so
//! other taskers recognize the directories of killed taskers.

use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Maximum number of attempts to create a directory. Another tasker may remove the new directory as
/// stale before this tasker has locked it.
const CREATE_ATTEMPTS_MAX: usize = 3;

/// Creates a directory in `parent` whose name begins with `prefix`, and locks it.
///
/// # Errors
/// The system's error; `WouldBlock` if other taskers have removed each new directory.
pub(crate) fn create(parent: &Path, prefix: &str) -> io::Result<(PathBuf, Flock<File>)> {
    (0..CREATE_ATTEMPTS_MAX)
        .find_map(|_| try_create(parent, prefix).transpose())
        .unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
}

/// Returns `None` if another tasker has removed the new directory as stale.
fn try_create(parent: &Path, prefix: &str) -> io::Result<Option<(PathBuf, Flock<File>)>> {
    let path = nix::unistd::mkdtemp(&parent.join(format!("{prefix}XXXXXX")))?;
    let lock = lock(&path).filter(|_| path.exists());
    Ok(lock.map(|lock| (path, lock)))
}

/// Calls `remove` with each directory in `parent` whose name begins with `prefix` and whose tasker
/// has ended.
pub(crate) fn remove_stale(parent: &Path, prefix: &str, remove: impl Fn(&Path)) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with(prefix)
            && let Some(_lock) = lock(&path)
        {
            remove(&path);
        }
    }
}

/// Locks a directory; `None` if it does not exist or a running tasker holds its lock.
fn lock(path: &Path) -> Option<Flock<File>> {
    Flock::lock(File::open(path).ok()?, FlockArg::LockExclusiveNonblock).ok()
}
