//! State files: files into which a program has written its own checkpoint. They replace the images
//! of a task.
//!
//! - [`collect`] copies the state files into the image directory under numbered names, with a list
//!   that records which of the files existed.
//! - [`stage`] copies the files back, next to their destinations under temporary names that a
//!   journal records ([`crate::file_transfer_journal`]).
//! - [`StagedFiles::install`] gives all files their final names before the program is restarted,
//!   and deletes files that did not exist at the checkpoint.
//!
//! No existing file is replaced before the copies of all files are complete.

use crate::facts::available_resources;
use crate::file_transfer_journal::{FileTransferJournal, JournalEntry};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use thiserror::Error;

/// File name of the list in the image directory. The name of a copy is this name followed by `-`
/// and its number.
const LIST_FILE: &str = "sempa-state";
/// Maximum size of the list in bytes.
const LIST_BYTES_MAX: u64 = 1 << 20;
/// Bits of a file's mode that are restored: the permissions only.
const MODE_BITS: u32 = 0o777;

/// A failed operation on a file.
#[derive(Debug, Error)]
#[error("cannot {action} {}: {why}", .path.display())]
pub struct StateFileError {
    action: &'static str,
    path: PathBuf,
    why: io::Error,
}

/// Returns a function that adds the action and the path to an I/O error.
fn error_for<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> StateFileError + 'a {
    move |why| StateFileError {
        action,
        path: path.to_path_buf(),
        why,
    }
}

/// A file in the list. `mode` is `None` if the file did not exist.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ListEntry {
    mode: Option<u32>,
    bytes: u64,
}

/// Returns the path of a copy in the image directory.
fn copy_path(images: &Path, number: usize) -> PathBuf {
    images.join(format!("{LIST_FILE}-{number}"))
}

/// Creates a file for writing; fails if it already exists.
fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Opens a regular file for reading; `None` if it does not exist. Fails for other kinds of files.
/// Symbolic links are not followed, and the open never blocks.
fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let other = || io::Error::new(ErrorKind::InvalidInput, "it is no regular file");
    match opened {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        // ELOOP: a symbolic link; ENXIO: a socket.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => Err(other()),
        Err(e) => Err(e),
        Ok(file) if file.metadata()?.is_file() => Ok(Some(file)),
        Ok(_) => Err(other()),
    }
}

/// Copies these files into an empty image directory. Relative paths start at `dir`. Returns the
/// number of files that exist, and their total size in bytes.
///
/// # Errors
/// A file is not a regular file or cannot be read, or there is not enough space for the copies.
pub fn collect(
    files: &[PathBuf],
    dir: &Path,
    images: &Path,
    reservations: &SpaceReservations,
) -> Result<(u32, u64), StateFileError> {
    let _reserved = reservations.reserve(files, dir, images)?;
    let (mut list, mut count, mut total_bytes) = (Vec::new(), 0, 0);
    for (number, file) in files.iter().enumerate() {
        let path = dir.join(file);
        let Some(mut from) = open_regular(&path).map_err(error_for("keep", &path))? else {
            list.push(ListEntry {
                mode: None,
                bytes: 0,
            });
            continue;
        };
        let copied = create_new(&copy_path(images, number)).and_then(|mut to| {
            let mode = from.metadata()?.permissions().mode() & MODE_BITS;
            Ok(ListEntry {
                mode: Some(mode),
                bytes: io::copy(&mut from, &mut to)?,
            })
        });
        let entry = copied.map_err(error_for("keep a copy of", &path))?;
        (count, total_bytes) = (count + 1, total_bytes + entry.bytes);
        list.push(entry);
    }
    let path = images.join(LIST_FILE);
    let written = postcard::to_allocvec(&list)
        .map_err(io::Error::other)
        .and_then(|b| create_new(&path)?.write_all(&b));
    written.map_err(error_for("write", &path))?;
    Ok((count, total_bytes))
}

/// Number of bytes that are reserved for state files that are being copied into image directories.
/// Several tasks may need space at the same time.
#[derive(Debug, Default)]
pub struct SpaceReservations(Mutex<u64>);

/// Reserved bytes of a [`SpaceReservations`]. Dropping it frees them.
#[derive(Debug)]
struct ReservedSpace<'a>(&'a SpaceReservations, u64);

impl SpaceReservations {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reserves space for these files.
    ///
    /// Fails if the files would fill the file system of the images or, if that file system is in
    /// memory, would use memory that other processes need. The check precedes the copying, because
    /// a host without free memory kills unrelated processes.
    fn reserve(
        &self,
        files: &[PathBuf],
        dir: &Path,
        images: &Path,
    ) -> Result<ReservedSpace<'_>, StateFileError> {
        // Files that cannot be read are reported when they are copied.
        let length =
            |file: &PathBuf| Some(open_regular(&dir.join(file)).ok()??.metadata().ok()?.len());
        let needed_bytes = files.iter().filter_map(length).fold(0, u64::saturating_add);
        let mut reserved = self.lock();
        // Files that are being copied are partly counted twice: as reserved bytes and as used
        // space.
        let free_bytes = available_resources::writable_bytes(images)
            .map_err(error_for("look for room in", images))?
            .saturating_sub(*reserved);
        if needed_bytes <= free_bytes {
            *reserved += needed_bytes;
            return Ok(ReservedSpace(self, needed_bytes));
        }
        let why = format!(
            "its files need {needed_bytes} bytes there on their way, and {free_bytes} are left"
        );
        Err(error_for("keep files in", images)(io::Error::new(
            ErrorKind::StorageFull,
            why,
        )))
    }
}

impl Drop for ReservedSpace<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= self.1;
    }
}

/// Copies of state files next to their destinations under temporary names. Dropping the value
/// removes the copies.
#[derive(Debug)]
pub struct StagedFiles {
    /// The destination of each file and its temporary path; `None` if the file must not exist.
    files: Vec<(PathBuf, Option<PathBuf>)>,
    journal: FileTransferJournal,
}

/// Copies the files of [`collect`] from the image directory to temporary names next to their
/// destinations. Relative paths start at `dir`. `files` must be the list that was collected.
///
/// # Errors
/// - The image directory does not contain what [`collect`] writes.
/// - A directory is missing.
/// - An existing file at a destination is not a regular file, or belongs to another user.
/// - There is not enough space.
pub fn stage(files: &[PathBuf], dir: &Path, images: &Path) -> Result<StagedFiles, StateFileError> {
    let list = read_list(files.len(), images)?;
    let journal = FileTransferJournal::create_next_to(images)
        .map_err(error_for("note files beside", images))?;
    let mut staged = StagedFiles {
        files: Vec::new(),
        journal,
    };
    for (number, (file, entry)) in files.iter().zip(list).enumerate() {
        let path = dir.join(file);
        let existing =
            open_regular(&path).and_then(|file| file.map(|file| file.metadata()).transpose());
        let own_uid = nix::unistd::geteuid().as_raw();
        if existing
            .map_err(error_for("replace", &path))?
            .is_some_and(|existing| existing.uid() != own_uid)
        {
            let why = io::Error::new(ErrorKind::PermissionDenied, "it belongs to somebody else");
            return Err(error_for("replace", &path)(why));
        }
        let Some(mode) = entry.mode else {
            staged.files.push((path, None));
            continue;
        };
        let copy = copy_path(images, number);
        let temporary =
            temporary_path(&path, number, images).map_err(error_for("put back", &path))?;
        let copied = copy_to_temporary(&copy, &temporary, (mode, entry.bytes), &mut staged.journal);
        copied.map_err(error_for("put back", &path))?;
        staged.files.push((path, Some(temporary)));
    }
    Ok(staged)
}

fn read_list(files: usize, images: &Path) -> Result<Vec<ListEntry>, StateFileError> {
    let path = images.join(LIST_FILE);
    let invalid_list = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_string());
    let read = || {
        let file = open_regular(&path)?.ok_or_else(|| invalid_list("it is not there"))?;
        if file.metadata()?.len() > LIST_BYTES_MAX {
            return Err(invalid_list("it is too long"));
        }
        let list: Vec<ListEntry> =
            postcard::from_bytes(&std::fs::read(&path)?).map_err(io::Error::other)?;
        if list.len() == files {
            Ok(list)
        } else {
            Err(invalid_list("it is about other files"))
        }
    };
    read().map_err(error_for("read", &path))
}

/// Returns the temporary path of a file, in the same directory as the destination.
fn temporary_path(path: &Path, number: usize, images: &Path) -> io::Result<PathBuf> {
    // The journal needs paths without symbolic links.
    let folder = path
        .parent()
        .ok_or(ErrorKind::InvalidInput)?
        .canonicalize()?;
    let unique = images
        .file_name()
        .ok_or(ErrorKind::InvalidInput)?
        .to_string_lossy();
    Ok(folder.join(format!(".sempa-{unique}-{number}-{}", std::process::id())))
}

/// Copies one file to its temporary name, with this mode, and checks that its length is `bytes`.
fn copy_to_temporary(
    copy: &Path,
    temporary: &Path,
    (mode, bytes): (u32, u64),
    journal: &mut FileTransferJournal,
) -> io::Result<()> {
    let mut from = open_regular(copy)?.ok_or(ErrorKind::NotFound)?;
    journal.record(JournalEntry::Temporary(temporary.to_path_buf()))?;
    let mut to = create_new(temporary)?;
    if io::copy(&mut from, &mut to)? != bytes {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "its copy is not as long as it was",
        ));
    }
    to.set_permissions(Permissions::from_mode(mode & MODE_BITS))
}

impl StagedFiles {
    /// Gives all files their final names, and deletes those that did not exist at the checkpoint.
    ///
    /// # Errors
    /// The file system refuses. Some files may already have their final names.
    pub fn install(self) -> Result<(), StateFileError> {
        for (path, temporary) in &self.files {
            let done = match temporary {
                Some(temporary) => std::fs::rename(temporary, path),
                None => match std::fs::remove_file(path) {
                    Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
                    done => done,
                },
            };
            done.map_err(error_for("put back", path))?;
        }
        self.journal.keep_files();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns a temporary directory, and in it a working directory and an image directory.
    fn create_test_dirs() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let scratch = tempfile::tempdir().expect("a directory");
        let real = scratch.path().canonicalize().expect("there");
        let (work, images) = (real.join("work"), real.join("images-1"));
        fs::create_dir(&work).expect("made");
        fs::create_dir(&images).expect("made");
        (scratch, work, images)
    }

    fn file_names(dir: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| {
            entry
                .expect("read")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        let mut all: Vec<String> = fs::read_dir(dir).expect("a directory").map(name).collect();
        all.sort();
        all
    }

    /// Staging restores the content and the mode of the files, and deletes a file that did not
    /// exist when the files were collected.
    #[test]
    fn staging_restores_the_collected_state() {
        let (_scratch, work, images) = create_test_dirs();
        let other = images.with_file_name("other");
        let files = [PathBuf::from("state"), other.clone(), "later".into()];
        fs::write(work.join("state"), "one").expect("written");
        fs::set_permissions(work.join("state"), Permissions::from_mode(0o640)).expect("set");
        fs::write(&other, "").expect("written");
        assert_eq!(
            collect(&files, &work, &images, &SpaceReservations::default()).expect("kept"),
            (2, 3)
        );
        fs::write(work.join("state"), "another one").expect("written");
        fs::write(work.join("later"), "it went on").expect("written");
        fs::remove_file(&other).expect("removed");
        let staged = stage(&files, &work, &images).expect("staged");
        assert_eq!(
            fs::read(work.join("state")).expect("read"),
            b"another one",
            "not yet"
        );
        staged.install().expect("named");
        assert_eq!(fs::read(work.join("state")).expect("read"), b"one");
        assert_eq!(
            fs::metadata(work.join("state"))
                .expect("there")
                .permissions()
                .mode()
                & 0o7777,
            0o640
        );
        assert_eq!(
            (file_names(&work), fs::read(&other).expect("back")),
            (vec!["state".to_string()], vec![])
        );
        assert_eq!(
            file_names(images.parent().expect("a folder")),
            ["images-1", "other", "work"]
        );
    }

    /// Existing files are unchanged if the staging fails, is dropped, or is undone by its journal.
    #[test]
    fn abandoned_staging_changes_nothing() {
        let (_scratch, work, images) = create_test_dirs();
        let files = [PathBuf::from("state"), "later".into()];
        fs::write(work.join("state"), "one").expect("written");
        collect(&files, &work, &images, &SpaceReservations::default()).expect("kept");
        fs::write(work.join("later"), "new").expect("written");
        let staged = stage(&files, &work, &images).expect("staged");
        assert_eq!(file_names(&work).len(), 3);
        drop(staged);
        assert_eq!(file_names(&work), ["later", "state"]);
        // Undoing the journal has the same effect as dropping the staged files.
        std::mem::forget(stage(&files, &work, &images).expect("staged"));
        crate::file_transfer_journal::undo_all(images.parent().expect("a folder"));
        assert_eq!(file_names(&work), ["later", "state"]);
        // The directory of one file is missing.
        let far = [PathBuf::from("state"), "nowhere/later".into()];
        fs::remove_file(images.join("sempa-state")).expect("removed");
        fs::remove_file(images.join("sempa-state-0")).expect("removed");
        fs::create_dir(work.join("nowhere")).expect("made");
        fs::write(work.join("nowhere/later"), "new").expect("written");
        collect(&far, &work, &images, &SpaceReservations::default()).expect("kept");
        fs::remove_dir_all(work.join("nowhere")).expect("removed");
        let why = stage(&far, &work, &images)
            .expect_err("no folder")
            .to_string();
        assert!(
            why.contains("nowhere/later") && why.contains("No such file"),
            "{why}"
        );
        assert_eq!(file_names(&work), ["later", "state"]);
    }

    /// Files that need more space than the free, unreserved space are refused before any file is
    /// copied.
    #[test]
    fn collecting_without_space_copies_nothing() {
        let (_scratch, work, images) = create_test_dirs();
        let files = ["small", "large"].map(PathBuf::from);
        fs::write(work.join("small"), "here").expect("written");
        // A sparse file, which uses no space.
        File::create(work.join("large"))
            .and_then(|file| file.set_len(15 << 40))
            .expect("it takes no room");
        let error = collect(&files, &work, &images, &SpaceReservations::default())
            .expect_err("no host has so much")
            .to_string();
        assert!(
            error.contains("its files need 16492674416644 bytes there on their way"),
            "{error}"
        );
        assert_eq!(fs::read_dir(&images).expect("there").count(), 0);
        fs::remove_file(work.join("large")).expect("there");
        let reservations = SpaceReservations::default();
        *reservations.lock() = u64::MAX;
        let error = collect(&files, &work, &images, &reservations)
            .expect_err("all was promised to others")
            .to_string();
        assert!(
            error.ends_with("need 4 bytes there on their way, and 0 are left"),
            "{error}"
        );
        *reservations.lock() = 0;
        assert_eq!(
            collect(&files, &work, &images, &reservations).expect("there is room for one"),
            (1, 4)
        );
        assert_eq!(
            *reservations.lock(),
            0,
            "nothing is promised to anybody any more"
        );
    }

    /// Symbolic links and directories are neither collected nor replaced.
    #[test]
    fn other_than_regular_files_are_refused() {
        let (_scratch, work, images) = create_test_dirs();
        let files = [PathBuf::from("state")];
        std::os::unix::fs::symlink("/etc/hostname", work.join("state")).expect("linked");
        let why = collect(&files, &work, &images, &SpaceReservations::default())
            .expect_err("a link")
            .to_string();
        assert!(
            why.contains("no regular file") && why.contains("state"),
            "{why}"
        );
        fs::remove_file(work.join("state")).expect("removed");
        collect(&files, &work, &images, &SpaceReservations::default()).expect("nothing to keep");
        fs::create_dir(work.join("state")).expect("made");
        let why = stage(&files, &work, &images)
            .expect_err("a directory")
            .to_string();
        assert!(why.contains("no regular file"), "{why}");
        let why = stage(&[], &work, &images).expect_err("others").to_string();
        assert!(why.contains("other files"), "{why}");
    }
}
