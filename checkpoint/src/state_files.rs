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
const LIST_FILE_NAME: &str = "sempa-state";
/// Maximum size of the list in bytes.
const LIST_BYTES_MAX: u64 = 1 << 20;
/// Mask of the bits of a file's mode that are restored: only the permissions.
const MODE_MASK: u32 = 0o777;

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

/// A file in the list. `mode` is `None` if the file did not exist; `bytes` is the file's size.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct ListEntry {
    mode: Option<u32>,
    bytes: u64,
}

/// Returns the path, in the image directory, of the copy of the file at position `index` in the
/// list.
fn copy_path(image_dir: &Path, index: usize) -> PathBuf {
    image_dir.join(format!("{LIST_FILE_NAME}-{index}"))
}

/// Creates a file for writing; fails if it already exists.
fn create_new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// Opens a regular file for reading; `None` if the file does not exist. Fails for other kinds of
/// files. Symbolic links are not followed, and the open never blocks.
fn open_regular_file(path: &Path) -> io::Result<Option<File>> {
    let open_result = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let not_regular_error = || io::Error::new(ErrorKind::InvalidInput, "it is not a regular file");
    match open_result {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        // ELOOP: a symbolic link; ENXIO: a socket.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENXIO)) => {
            Err(not_regular_error())
        }
        Err(e) => Err(e),
        Ok(file) if file.metadata()?.is_file() => Ok(Some(file)),
        Ok(_) => Err(not_regular_error()),
    }
}

/// Copies these files into an empty image directory. Relative paths start at `work_dir`. Returns
/// the number of files that exist, and their total size in bytes.
///
/// # Errors
/// A file is not a regular file or cannot be read, or there is not enough space for the copies.
pub fn collect(
    files: &[PathBuf],
    work_dir: &Path,
    image_dir: &Path,
    reservations: &SpaceReservations,
) -> Result<(u32, u64), StateFileError> {
    let _reserved_space = reservations.reserve(files, work_dir, image_dir)?;
    let (mut entries, mut file_count, mut total_bytes) = (Vec::new(), 0, 0);
    for (index, file) in files.iter().enumerate() {
        let path = work_dir.join(file);
        let Some(mut source_file) = open_regular_file(&path).map_err(error_for("keep", &path))?
        else {
            entries.push(ListEntry {
                mode: None,
                bytes: 0,
            });
            continue;
        };
        let copy_result =
            create_new_file(&copy_path(image_dir, index)).and_then(|mut copy_file| {
                let mode = source_file.metadata()?.permissions().mode() & MODE_MASK;
                Ok(ListEntry {
                    mode: Some(mode),
                    bytes: io::copy(&mut source_file, &mut copy_file)?,
                })
            });
        let entry = copy_result.map_err(error_for("copy", &path))?;
        (file_count, total_bytes) = (file_count + 1, total_bytes + entry.bytes);
        entries.push(entry);
    }
    let path = image_dir.join(LIST_FILE_NAME);
    let write_result = postcard::to_allocvec(&entries)
        .map_err(io::Error::other)
        .and_then(|b| create_new_file(&path)?.write_all(&b));
    write_result.map_err(error_for("write", &path))?;
    Ok((file_count, total_bytes))
}

/// Number of bytes that are reserved for state files that are being copied into image directories.
/// Several tasks may need space at the same time.
#[derive(Debug, Default)]
pub struct SpaceReservations(Mutex<u64>);

/// Reserved bytes of a [`SpaceReservations`]. Dropping this value frees the bytes.
#[derive(Debug)]
struct ReservedSpace<'a>(&'a SpaceReservations, u64);

impl SpaceReservations {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reserves space for these files.
    ///
    /// # Errors
    /// The files would fill the file system of the images or, if that file system is in memory,
    /// would use memory that other processes need. The check precedes the copying, because a host
    /// without free memory kills unrelated processes.
    fn reserve(
        &self,
        files: &[PathBuf],
        work_dir: &Path,
        image_dir: &Path,
    ) -> Result<ReservedSpace<'_>, StateFileError> {
        // Files that cannot be read are reported when they are copied.
        let file_bytes = |file: &PathBuf| {
            Some(
                open_regular_file(&work_dir.join(file))
                    .ok()??
                    .metadata()
                    .ok()?
                    .len(),
            )
        };
        let needed_bytes = files
            .iter()
            .filter_map(file_bytes)
            .fold(0, u64::saturating_add);
        let mut reserved_bytes = self.lock();
        // Files that are being copied are partly counted twice: as reserved bytes and as used
        // space.
        let free_bytes = available_resources::writable_bytes(image_dir)
            .map_err(error_for("determine the free space of", image_dir))?
            .saturating_sub(*reserved_bytes);
        if needed_bytes <= free_bytes {
            *reserved_bytes += needed_bytes;
            return Ok(ReservedSpace(self, needed_bytes));
        }
        let reason =
            format!("its files need {needed_bytes} bytes there, and {free_bytes} are free");
        Err(error_for("store files in", image_dir)(io::Error::new(
            ErrorKind::StorageFull,
            reason,
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
/// destinations. Relative paths start at `work_dir`. `files` must be the list that was collected.
///
/// # Errors
/// - The image directory does not contain what [`collect`] writes.
/// - A directory is missing.
/// - An existing file at a destination is not a regular file, or belongs to another user.
/// - There is not enough space.
pub fn stage(
    files: &[PathBuf],
    work_dir: &Path,
    image_dir: &Path,
) -> Result<StagedFiles, StateFileError> {
    let entries = read_list(files.len(), image_dir)?;
    let journal = FileTransferJournal::create_next_to(image_dir)
        .map_err(error_for("record files next to", image_dir))?;
    let mut staged_files = StagedFiles {
        files: Vec::new(),
        journal,
    };
    for (index, (file, entry)) in files.iter().zip(entries).enumerate() {
        let path = work_dir.join(file);
        let existing_metadata =
            open_regular_file(&path).and_then(|file| file.map(|file| file.metadata()).transpose());
        let own_uid = nix::unistd::geteuid().as_raw();
        if existing_metadata
            .map_err(error_for("replace", &path))?
            .is_some_and(|existing_metadata| existing_metadata.uid() != own_uid)
        {
            let cause = io::Error::new(ErrorKind::PermissionDenied, "it belongs to another user");
            return Err(error_for("replace", &path)(cause));
        }
        let Some(mode) = entry.mode else {
            staged_files.files.push((path, None));
            continue;
        };
        let copied_path = copy_path(image_dir, index);
        let temporary =
            temporary_path(&path, index, image_dir).map_err(error_for("put back", &path))?;
        let copy_result = copy_to_temporary(
            &copied_path,
            &temporary,
            (mode, entry.bytes),
            &mut staged_files.journal,
        );
        copy_result.map_err(error_for("put back", &path))?;
        staged_files.files.push((path, Some(temporary)));
    }
    Ok(staged_files)
}

fn read_list(file_count: usize, image_dir: &Path) -> Result<Vec<ListEntry>, StateFileError> {
    let path = image_dir.join(LIST_FILE_NAME);
    let invalid_list_error =
        |reason: &str| io::Error::new(ErrorKind::InvalidData, reason.to_string());
    let read_entries = || {
        let file =
            open_regular_file(&path)?.ok_or_else(|| invalid_list_error("it does not exist"))?;
        if file.metadata()?.len() > LIST_BYTES_MAX {
            return Err(invalid_list_error("it is too long"));
        }
        let list: Vec<ListEntry> =
            postcard::from_bytes(&std::fs::read(&path)?).map_err(io::Error::other)?;
        if list.len() == file_count {
            Ok(list)
        } else {
            Err(invalid_list_error("it lists other files"))
        }
    };
    read_entries().map_err(error_for("read", &path))
}

/// Returns the temporary path of a file, in the same directory as the destination.
fn temporary_path(path: &Path, index: usize, image_dir: &Path) -> io::Result<PathBuf> {
    // The journal needs paths without symbolic links.
    let parent_dir = path
        .parent()
        .ok_or(ErrorKind::InvalidInput)?
        .canonicalize()?;
    let image_dir_name = image_dir
        .file_name()
        .ok_or(ErrorKind::InvalidInput)?
        .to_string_lossy();
    Ok(parent_dir.join(format!(
        ".sempa-{image_dir_name}-{index}-{}",
        std::process::id()
    )))
}

/// Copies one file to its temporary name, with this mode, and checks that its length is `bytes`.
fn copy_to_temporary(
    copied_path: &Path,
    temporary_path: &Path,
    (mode, bytes): (u32, u64),
    journal: &mut FileTransferJournal,
) -> io::Result<()> {
    let mut copy_file = open_regular_file(copied_path)?.ok_or(ErrorKind::NotFound)?;
    journal.record(JournalEntry::Temporary(temporary_path.to_path_buf()))?;
    let mut temporary_file = create_new_file(temporary_path)?;
    if io::copy(&mut copy_file, &mut temporary_file)? != bytes {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "the length of its copy has changed",
        ));
    }
    temporary_file.set_permissions(Permissions::from_mode(mode & MODE_MASK))
}

impl StagedFiles {
    /// Renames all files to their final names, and deletes the files that did not exist at the
    /// checkpoint.
    ///
    /// # Errors
    /// The file system refuses to rename or delete a file. Some files may already have their final
    /// names.
    pub fn install(self) -> Result<(), StateFileError> {
        for (path, temporary_path) in &self.files {
            let result = match temporary_path {
                Some(temporary_path) => std::fs::rename(temporary_path, path),
                None => match std::fs::remove_file(path) {
                    Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
                    result => result,
                },
            };
            result.map_err(error_for("put back", path))?;
        }
        self.journal.retain_files();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns a temporary directory, and in it a working directory and an image directory.
    fn create_test_dirs() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let scratch_dir = tempfile::tempdir().expect("a directory");
        let real_dir = scratch_dir.path().canonicalize().expect("there");
        let (work_dir, image_dir) = (real_dir.join("work"), real_dir.join("images-1"));
        fs::create_dir(&work_dir).expect("made");
        fs::create_dir(&image_dir).expect("made");
        (scratch_dir, work_dir, image_dir)
    }

    fn file_names(dir: &Path) -> Vec<String> {
        let entry_name = |entry: io::Result<fs::DirEntry>| {
            entry
                .expect("read")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        let mut names: Vec<String> = fs::read_dir(dir)
            .expect("a directory")
            .map(entry_name)
            .collect();
        names.sort();
        names
    }

    /// Staging and installing restores the content and the mode of the collected files, and deletes
    /// a file that did not exist when the files were collected.
    #[test]
    fn staging_restores_the_collected_state() {
        let (_scratch_dir, work_dir, image_dir) = create_test_dirs();
        let other_file = image_dir.with_file_name("other");
        let files = [PathBuf::from("state"), other_file.clone(), "later".into()];
        fs::write(work_dir.join("state"), "one").expect("written");
        fs::set_permissions(work_dir.join("state"), Permissions::from_mode(0o640)).expect("set");
        fs::write(&other_file, "").expect("written");
        assert_eq!(
            collect(&files, &work_dir, &image_dir, &SpaceReservations::default()).expect("kept"),
            (2, 3)
        );
        fs::write(work_dir.join("state"), "another one").expect("written");
        fs::write(work_dir.join("later"), "it went on").expect("written");
        fs::remove_file(&other_file).expect("removed");
        let staged_files = stage(&files, &work_dir, &image_dir).expect("staged");
        assert_eq!(
            fs::read(work_dir.join("state")).expect("read"),
            b"another one",
            "not yet"
        );
        staged_files.install().expect("named");
        assert_eq!(fs::read(work_dir.join("state")).expect("read"), b"one");
        assert_eq!(
            fs::metadata(work_dir.join("state"))
                .expect("there")
                .permissions()
                .mode()
                & 0o7777,
            0o640
        );
        assert_eq!(
            (file_names(&work_dir), fs::read(&other_file).expect("back")),
            (vec!["state".to_string()], vec![])
        );
        assert_eq!(
            file_names(image_dir.parent().expect("a folder")),
            ["images-1", "other", "work"]
        );
    }

    /// Existing files are unchanged if the staging fails, is dropped, or is undone by its journal.
    #[test]
    fn abandoned_staging_changes_nothing() {
        let (_scratch_dir, work_dir, image_dir) = create_test_dirs();
        let files = [PathBuf::from("state"), "later".into()];
        fs::write(work_dir.join("state"), "one").expect("written");
        collect(&files, &work_dir, &image_dir, &SpaceReservations::default()).expect("kept");
        fs::write(work_dir.join("later"), "new").expect("written");
        let staged_files = stage(&files, &work_dir, &image_dir).expect("staged");
        assert_eq!(file_names(&work_dir).len(), 3);
        drop(staged_files);
        assert_eq!(file_names(&work_dir), ["later", "state"]);
        // Undoing the journal has the same effect as dropping the staged files.
        std::mem::forget(stage(&files, &work_dir, &image_dir).expect("staged"));
        crate::file_transfer_journal::undo_all_journals(image_dir.parent().expect("a folder"));
        assert_eq!(file_names(&work_dir), ["later", "state"]);
        // The directory of one file is missing.
        let files_in_missing_dir = [PathBuf::from("state"), "nowhere/later".into()];
        fs::remove_file(image_dir.join("sempa-state")).expect("removed");
        fs::remove_file(image_dir.join("sempa-state-0")).expect("removed");
        fs::create_dir(work_dir.join("nowhere")).expect("made");
        fs::write(work_dir.join("nowhere/later"), "new").expect("written");
        collect(
            &files_in_missing_dir,
            &work_dir,
            &image_dir,
            &SpaceReservations::default(),
        )
        .expect("kept");
        fs::remove_dir_all(work_dir.join("nowhere")).expect("removed");
        let error_text = stage(&files_in_missing_dir, &work_dir, &image_dir)
            .expect_err("no folder")
            .to_string();
        assert!(
            error_text.contains("nowhere/later") && error_text.contains("No such file"),
            "{error_text}"
        );
        assert_eq!(file_names(&work_dir), ["later", "state"]);
    }

    /// Files that need more space than the free, unreserved space are refused before any file is
    /// copied.
    #[test]
    fn collecting_without_space_copies_nothing() {
        let (_scratch_dir, work_dir, image_dir) = create_test_dirs();
        let files = ["small", "large"].map(PathBuf::from);
        fs::write(work_dir.join("small"), "here").expect("written");
        // A sparse file, which uses no space.
        File::create(work_dir.join("large"))
            .and_then(|file| file.set_len(15 << 40))
            .expect("it takes no room");
        let error = collect(&files, &work_dir, &image_dir, &SpaceReservations::default())
            .expect_err("no host has so much")
            .to_string();
        assert!(
            error.contains("its files need 16492674416644 bytes there"),
            "{error}"
        );
        assert_eq!(fs::read_dir(&image_dir).expect("there").count(), 0);
        fs::remove_file(work_dir.join("large")).expect("there");
        let reservations = SpaceReservations::default();
        *reservations.lock() = u64::MAX;
        let error = collect(&files, &work_dir, &image_dir, &reservations)
            .expect_err("all was promised to others")
            .to_string();
        assert!(
            error.ends_with("need 4 bytes there, and 0 are free"),
            "{error}"
        );
        *reservations.lock() = 0;
        assert_eq!(
            collect(&files, &work_dir, &image_dir, &reservations).expect("there is room for one"),
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
        let (_scratch_dir, work_dir, image_dir) = create_test_dirs();
        let files = [PathBuf::from("state")];
        std::os::unix::fs::symlink("/etc/hostname", work_dir.join("state")).expect("linked");
        let error_text = collect(&files, &work_dir, &image_dir, &SpaceReservations::default())
            .expect_err("a link")
            .to_string();
        assert!(
            error_text.contains("not a regular file") && error_text.contains("state"),
            "{error_text}"
        );
        fs::remove_file(work_dir.join("state")).expect("removed");
        collect(&files, &work_dir, &image_dir, &SpaceReservations::default())
            .expect("nothing to keep");
        fs::create_dir(work_dir.join("state")).expect("made");
        let error_text = stage(&files, &work_dir, &image_dir)
            .expect_err("a directory")
            .to_string();
        assert!(error_text.contains("not a regular file"), "{error_text}");
        let error_text = stage(&[], &work_dir, &image_dir)
            .expect_err("others")
            .to_string();
        assert!(error_text.contains("other files"), "{error_text}");
    }
}
