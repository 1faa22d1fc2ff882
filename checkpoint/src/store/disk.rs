//! Everything that the store changes on the disk, one step at a time. Somebody may watch the steps: the tests end the
//! world before each of them, or fill the disk there.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// One change that is about to be made.
#[cfg_attr(
    not(test),
    allow(dead_code, reason = "only tests look at what is about to be done")
)]
#[derive(Debug)]
pub(super) enum Step<'a> {
    /// A directory is made.
    MakeDir(&'a Path),
    /// An empty file is made.
    MakeFile(&'a Path),
    /// A file grows.
    Write(&'a Path, &'a File, &'a [u8]),
    /// What is in a file goes to the disk.
    Sync(&'a Path),
    /// What is in a directory goes to the disk.
    SyncDir(&'a Path),
    /// A directory gets another name, at once and wholly.
    Rename(&'a Path, &'a Path),
    /// A file gets this name as well, which must not have been there.
    Link(&'a Path),
    /// A file goes.
    RemoveFile(&'a Path),
    /// An empty directory goes.
    RemoveDir(&'a Path),
}

/// Whoever watches.
pub(super) trait Watch: Send + Sync {
    /// Called before each step. The step is not made if this fails.
    fn before(&self, step: &Step<'_>) -> io::Result<()>;
}

/// Nobody watches.
struct Nobody;

impl Watch for Nobody {
    fn before(&self, _: &Step<'_>) -> io::Result<()> {
        Ok(())
    }
}

/// The disk. All clones are watched by the same.
#[derive(Clone)]
pub(super) struct Disk(Arc<dyn Watch>);

impl Disk {
    /// The disk as it is.
    pub(super) fn new() -> Disk {
        Disk(Arc::new(Nobody))
    }

    /// One whose steps are watched.
    #[cfg(test)]
    pub(super) fn watched(watch: Arc<dyn Watch>) -> Disk {
        Disk(watch)
    }

    /// A new directory for its owner only.
    pub(super) fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.0.before(&Step::MakeDir(path))?;
        DirBuilder::new().mode(0o700).create(path)
    }

    /// A new file for its owner only.
    pub(super) fn make_file(&self, path: &Path) -> io::Result<File> {
        self.0.before(&Step::MakeFile(path))?;
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
    }

    /// Puts bytes at the end of a file.
    pub(super) fn write(&self, path: &Path, mut file: &File, bytes: &[u8]) -> io::Result<()> {
        self.0.before(&Step::Write(path, file, bytes))?;
        file.write_all(bytes)
    }

    /// Returns when the file's content is on the disk.
    pub(super) fn sync(&self, path: &Path, file: &File) -> io::Result<()> {
        self.0.before(&Step::Sync(path))?;
        file.sync_all()
    }

    /// Returns when the directory's names are on the disk.
    pub(super) fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.0.before(&Step::SyncDir(path))?;
        File::open(path)?.sync_all()
    }

    /// Renames a directory; the new name must not be that of anything but an empty directory.
    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.before(&Step::Rename(from, to))?;
        std::fs::rename(from, to)
    }

    /// Gives a file one more name; fails if there is something of that name.
    pub(super) fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.0.before(&Step::Link(to))?;
        std::fs::hard_link(from, to)
    }

    /// Removes a file. That it has gone already is as good.
    pub(super) fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.0.before(&Step::RemoveFile(path))?;
        good_if_gone(std::fs::remove_file(path))
    }

    /// Removes a directory and what is in it. Somebody else may do the same at the same time.
    pub(super) fn remove_tree(&self, path: &Path) -> io::Result<()> {
        let entries = match std::fs::read_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            match entry.file_type() {
                // Nothing of the store's own; follows no links.
                Ok(kind) if kind.is_dir() => good_if_gone(std::fs::remove_dir_all(entry.path()))?,
                _ => self.remove_file(&entry.path())?,
            }
        }
        self.0.before(&Step::RemoveDir(path))?;
        good_if_gone(std::fs::remove_dir(path))
    }
}

fn good_if_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
