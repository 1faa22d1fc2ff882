//! Journal of the files that are copied to the target before their task runs there.
//!
//! The journal is a file next to the image directory of a migration. It exists until the task runs.
//! If the tasker is killed earlier, the process that later finds the journal removes the copied
//! files.
//!
//! Each file is created under a temporary name that no other program uses; the journal records that
//! name before the file is created. The file gets its final name only after its content is complete
//! and the journal has recorded the final name. Therefore only files that this migration has
//! created are removed.

use crate::facts::open_parent_dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, RenameFlags, renameat2};
use nix::sys::stat::fstatat;
use nix::unistd::{LinkatFlags, UnlinkatFlags, linkat, unlinkat};
use serde::{Deserialize, Serialize};
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Prefix of the journal's file name; the name of the image directory follows.
const JOURNAL_PREFIX: &str = "carried-";
/// Maximum size in bytes of a journal that is read. The journal of one task is always smaller.
const JOURNAL_BYTES_MAX: u64 = 32 << 20;
/// Size in bytes of the length field before each entry.
const LENGTH_BYTES: usize = 4;

/// An entry of the journal: one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JournalEntry {
    /// The file is being created under this temporary name.
    Temporary(PathBuf),
    /// The file's final path, device number and inode number.
    Final(PathBuf, u64, u64),
}

impl JournalEntry {
    /// Removes the file. Does nothing if another file has replaced a file with a final path.
    /// Temporary paths are used by no other program.
    fn undo(&self) {
        let (Self::Temporary(path) | Self::Final(path, ..)) = self;
        let Ok((parent_dir, name)) = open_parent_dir(path) else {
            return;
        };
        let stat_result = fstatat(&parent_dir, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
        let is_own_file = match self {
            Self::Temporary(_) => stat_result.is_ok(),
            // Another program may have replaced the file.
            Self::Final(_, device, inode) => {
                stat_result.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (*device, *inode))
            }
        };
        if is_own_file {
            let _ = unlinkat(&parent_dir, name.as_os_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// The journal of one migration. Dropping this value removes the recorded files, then the journal.
#[derive(Debug)]
pub struct FileTransferJournal {
    path: PathBuf,
    file: File,
    entries: Vec<JournalEntry>,
}

impl FileTransferJournal {
    /// Creates an empty journal next to this image directory. A journal that exists there belongs
    /// to a previous attempt; its files are removed.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn create_next_to(image_dir: &Path) -> io::Result<Self> {
        let name = image_dir.file_name().ok_or(ErrorKind::InvalidInput)?;
        let mut journal_name = OsString::from(JOURNAL_PREFIX);
        journal_name.push(name);
        let path = image_dir.with_file_name(journal_name);
        undo_journal(&path);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok(Self {
            path,
            file,
            entries: Vec::new(),
        })
    }

    /// Records a file that is about to be created.
    ///
    /// # Errors
    /// The entry cannot be written. Then the file must not be created.
    pub fn record(&mut self, entry: JournalEntry) -> io::Result<()> {
        let body = postcard::to_allocvec(&entry).map_err(io::Error::other)?;
        let length_field = u32::try_from(body.len())
            .map_err(io::Error::other)?
            .to_le_bytes();
        self.file.write_all(&[&length_field[..], &body].concat())?;
        self.entries.push(entry);
        Ok(())
    }

    /// Removes the journal but not the files: the task runs and owns them.
    pub fn retain_files(mut self) {
        self.entries.clear();
    }
}

impl Drop for FileTransferJournal {
    fn drop(&mut self) {
        self.entries.iter().rev().for_each(JournalEntry::undo);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Renames a file within a directory. Returns false if a file with the new name already exists.
///
/// # Errors
/// The file system refuses.
pub fn rename_no_replace(
    dir_fd: impl AsFd,
    temporary_name: &OsStr,
    name: &OsStr,
) -> io::Result<bool> {
    let dir_fd = dir_fd.as_fd();
    match linkat(dir_fd, temporary_name, dir_fd, name, LinkatFlags::empty()) {
        Ok(()) => {
            let _ = unlinkat(dir_fd, temporary_name, UnlinkatFlags::NoRemoveDir);
            Ok(true)
        }
        Err(Errno::EEXIST) => Ok(false),
        // Some file systems do not support hard links.
        Err(Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EMLINK) => {
            match renameat2(
                dir_fd,
                temporary_name,
                dir_fd,
                name,
                RenameFlags::RENAME_NOREPLACE,
            ) {
                Ok(()) => Ok(true),
                Err(Errno::EEXIST) => Ok(false),
                Err(e) => Err(e.into()),
            }
        }
        Err(e) => Err(e.into()),
    }
}

/// Removes the recorded files of all journals in a directory. The processes that wrote the journals
/// must have ended, and the tasks must not run.
pub fn undo_all_journals(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_string_lossy()
            .starts_with(JOURNAL_PREFIX)
        {
            undo_journal(&entry.path());
        }
    }
}

fn undo_journal(path: &Path) {
    let open_result = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let mut bytes = Vec::new();
    if let Ok(file) = open_result {
        // After a read error, the entries that were read are used.
        let _ = file.take(JOURNAL_BYTES_MAX).read_to_end(&mut bytes);
    }
    parse_entries(&bytes)
        .iter()
        .rev()
        .for_each(JournalEntry::undo);
    let _ = std::fs::remove_file(path);
}

/// Parses all complete entries; ignores a last entry that is truncated.
fn parse_entries(mut bytes: &[u8]) -> Vec<JournalEntry> {
    let mut entries = Vec::new();
    while let Some((length_field, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() {
        let length = usize::try_from(u32::from_le_bytes(*length_field)).unwrap_or(usize::MAX);
        let Some((body, rest)) = rest.split_at_checked(length) else {
            break;
        };
        let Ok(entry) = postcard::from_bytes(body) else {
            break;
        };
        entries.push(entry);
        bytes = rest;
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn final_entry(path: &Path) -> JournalEntry {
        let meta = std::fs::metadata(path).expect("there");
        JournalEntry::Final(path.into(), meta.dev(), meta.ino())
    }

    /// Undoing a journal removes the recorded files and the journal, but no file that has replaced
    /// a recorded file.
    #[test]
    fn undo_removes_exactly_the_recorded_files() {
        let dir = tempfile::tempdir().expect("dir");
        let real_dir = dir.path().canonicalize().expect("there");
        let create_file = |name: &str| {
            let path = real_dir.join(name);
            std::fs::write(&path, name).expect("written");
            path
        };
        let (temporary_path, recorded_path, replaced_path, unrecorded_path) = (
            create_file("nameless"),
            create_file("own"),
            create_file("replaced"),
            create_file("kept"),
        );
        let mut journal =
            FileTransferJournal::create_next_to(&real_dir.join("images-1")).expect("notes");
        journal
            .record(JournalEntry::Temporary(temporary_path.clone()))
            .expect("noted");
        journal.record(final_entry(&recorded_path)).expect("noted");
        journal.record(final_entry(&replaced_path)).expect("noted");
        journal
            .record(JournalEntry::Temporary(real_dir.join("never made")))
            .expect("noted");
        std::fs::rename(&replaced_path, real_dir.join("elsewhere")).expect("renamed");
        std::fs::write(&replaced_path, "somebody else's").expect("written");
        // A truncated entry, as written by a tasker that was killed.
        journal.file.write_all(&[200, 0, 0, 0, 1]).expect("written");
        std::mem::forget(journal);
        undo_all_journals(&real_dir);
        assert!(!temporary_path.exists() && !recorded_path.exists());
        assert!(
            replaced_path.exists()
                && unrecorded_path.exists()
                && real_dir.join("elsewhere").exists()
        );
        assert!(
            !real_dir.join("carried-images-1").exists(),
            "the notes go with the files"
        );
    }

    /// Dropping a journal removes its files; after `retain_files` dropping removes only the
    /// journal.
    #[test]
    fn dropping_journal_removes_files_unless_kept() {
        let dir = tempfile::tempdir().expect("dir");
        let real_dir = dir.path().canonicalize().expect("there");
        for is_retained in [false, true] {
            std::fs::write(real_dir.join("file"), "").expect("written");
            let mut journal =
                FileTransferJournal::create_next_to(&real_dir.join("images-1")).expect("notes");
            journal
                .record(final_entry(&real_dir.join("file")))
                .expect("noted");
            if is_retained {
                journal.retain_files()
            } else {
                drop(journal)
            }
            assert_eq!(real_dir.join("file").exists(), is_retained);
            assert!(!real_dir.join("carried-images-1").exists());
        }
    }

    /// Renaming a file never replaces an existing file.
    #[test]
    fn existing_name_is_not_replaced() {
        let dir = tempfile::tempdir().expect("dir");
        let dir_file = File::open(dir.path()).expect("open");
        std::fs::write(dir.path().join("new"), "new").expect("written");
        std::fs::write(dir.path().join("old"), "old").expect("written");
        assert!(
            !rename_no_replace(&dir_file, OsStr::new("new"), OsStr::new("old"))
                .expect("it is told")
        );
        assert_eq!(
            std::fs::read(dir.path().join("old")).expect("there"),
            b"old"
        );
        assert!(
            rename_no_replace(&dir_file, OsStr::new("new"), OsStr::new("free"))
                .expect("it is named")
        );
        assert!(!dir.path().join("new").exists() && dir.path().join("free").exists());
    }
}
