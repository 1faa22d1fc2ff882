//! All changes that the store makes on the disk, in single steps. Tests observe the steps and
//! simulate a crash or a full disk at any step.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// A change that is about to be made.
#[cfg_attr(
    not(test),
    allow(dead_code, reason = "only tests look at what is about to be done")
)]
#[derive(Debug)]
pub(super) enum DiskStep<'a> {
    MakeDir(&'a Path),
    /// Create an empty file.
    MakeFile(&'a Path),
    /// Append to a file.
    Append(&'a Path, &'a File, &'a [u8]),
    /// Flush a file to the disk.
    Sync(&'a Path),
    /// Flush a directory to the disk.
    SyncDir(&'a Path),
    /// Rename a directory, atomically.
    Rename(&'a Path, &'a Path),
    /// Create an additional name for a file; fails if the name exists.
    Link(&'a Path),
    RemoveFile(&'a Path),
    /// Remove an empty directory.
    RemoveDir(&'a Path),
}

/// An observer that is notified of each step before it is executed.
pub(super) trait DiskObserver: Send + Sync {
    /// Called before each step. If the observer returns an error, the step is not executed.
    fn before_step(&self, step: &DiskStep<'_>) -> io::Result<()>;
}

/// The observer of production code: does nothing.
struct NoObserver;

impl DiskObserver for NoObserver {
    fn before_step(&self, _: &DiskStep<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// Executes the steps, and notifies the observer before each step. All clones have the same
/// observer.
#[derive(Clone)]
pub(super) struct Disk(Arc<dyn DiskObserver>);

impl Disk {
    pub(super) fn new() -> Self {
        Self(Arc::new(NoObserver))
    }

    #[cfg(test)]
    pub(super) fn with_observer(observer: Arc<dyn DiskObserver>) -> Self {
        Self(observer)
    }

    /// Creates a directory with mode 0700.
    pub(super) fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.0.before_step(&DiskStep::MakeDir(path))?;
        DirBuilder::new().mode(0o700).create(path)
    }

    /// Creates a file with mode 0600. Fails if the file exists.
    pub(super) fn make_file(&self, path: &Path) -> io::Result<File> {
        self.0.before_step(&DiskStep::MakeFile(path))?;
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
    }

    /// Appends bytes to a file.
    pub(super) fn append(&self, path: &Path, mut file: &File, bytes: &[u8]) -> io::Result<()> {
        self.0.before_step(&DiskStep::Append(path, file, bytes))?;
        file.write_all(bytes)
    }

    /// Flushes the content of a file to the disk.
    pub(super) fn sync(&self, path: &Path, file: &File) -> io::Result<()> {
        self.0.before_step(&DiskStep::Sync(path))?;
        file.sync_all()
    }

    /// Flushes the entries of a directory to the disk.
    pub(super) fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.before_step(&DiskStep::SyncDir(path))?;
        File::open(path)?.sync_all()
    }

    /// Renames a directory or a file. The new name of a directory must not exist, or be an empty
    /// directory. A file replaces an existing one.
    pub(super) fn rename(&self, old_path: &Path, new_path: &Path) -> io::Result<()> {
        self.0.before_step(&DiskStep::Rename(old_path, new_path))?;
        std::fs::rename(old_path, new_path)
    }

    /// Creates an additional name for a file. Fails if the name exists.
    pub(super) fn add_link(&self, existing_path: &Path, new_path: &Path) -> io::Result<()> {
        self.0.before_step(&DiskStep::Link(new_path))?;
        std::fs::hard_link(existing_path, new_path)
    }

    /// Removes a file. Succeeds if the file does not exist.
    pub(super) fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.0.before_step(&DiskStep::RemoveFile(path))?;
        ok_if_not_found(std::fs::remove_file(path))
    }

    /// Removes a directory and its content. Another process may remove the same directory at the
    /// same time.
    pub(super) fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let entries = match std::fs::read_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            match entry.file_type() {
                // The store creates no subdirectories in this directory. Symbolic links are not
                // followed.
                Ok(file_type) if file_type.is_dir() => {
                    ok_if_not_found(std::fs::remove_dir_all(entry.path()))?
                }
                _ => self.remove_file(&entry.path())?,
            }
        }
        self.0.before_step(&DiskStep::RemoveDir(path))?;
        ok_if_not_found(std::fs::remove_dir(path))
    }
}

/// Converts the error "not found" to success.
fn ok_if_not_found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
