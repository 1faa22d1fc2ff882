//! Notes of the files that are put where they belong before the task to which they belong runs. They lie beside the images of a
//! move, and go when it runs. If its tasker is killed before that, whoever finds them removes the files.
//!
//! A file gets its name when its content and its note are there. What has no name yet lies beside it under one that nobody else
//! uses, noted before; so what is removed was never somebody else's.

use crate::facts::folder_of;
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

/// In front of the name of the directory of the images.
const NAME: &str = "carried-";
/// Notes that are read at most, in bytes: more than all files of one task can need.
const NOTES_BYTES_MAX: u64 = 32 << 20;
/// The length in front of a note.
const HEAD_BYTES: usize = 4;

/// A file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Note {
    /// Being made under a name that nobody else uses.
    Nameless(PathBuf),
    /// Where it belongs, with device and inode number.
    Named(PathBuf, u64, u64),
}

impl Note {
    /// Removes the file, unless another one is there.
    fn undo(&self) {
        let (Note::Nameless(path) | Note::Named(path, ..)) = self;
        let Ok((folder, name)) = folder_of(path) else {
            return;
        };
        let there = fstatat(&folder, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
        let is_ours = match self {
            Note::Nameless(_) => there.is_ok(),
            // Somebody may have put another one in its place.
            Note::Named(_, device, inode) => {
                there.is_ok_and(|is| (is.st_dev, is.st_ino) == (*device, *inode))
            }
        };
        if is_ours {
            let _ = unlinkat(&folder, name.as_os_str(), UnlinkatFlags::NoRemoveDir);
        }
    }
}

/// The notes of one move. Dropping them removes the files and then the notes.
#[derive(Debug)]
pub struct Notes {
    path: PathBuf,
    file: File,
    all: Vec<Note>,
}

impl Notes {
    /// None yet, beside this directory of images. What is left there of another try is undone.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn beside(images: &Path) -> io::Result<Notes> {
        let name = images.file_name().ok_or(ErrorKind::InvalidInput)?;
        let mut own = OsString::from(NAME);
        own.push(name);
        let path = images.with_file_name(own);
        undo(&path);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok(Notes {
            path,
            file,
            all: Vec::new(),
        })
    }

    /// Notes a file before it is there.
    ///
    /// # Errors
    /// It cannot be written: then the file may not be made.
    pub fn add(&mut self, note: Note) -> io::Result<()> {
        let body = postcard::to_allocvec(&note).map_err(io::Error::other)?;
        let head = u32::try_from(body.len())
            .map_err(io::Error::other)?
            .to_le_bytes();
        self.file.write_all(&[&head[..], &body].concat())?;
        self.all.push(note);
        Ok(())
    }

    /// The task runs: they are its own.
    pub fn keep(mut self) {
        self.all.clear();
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        self.all.iter().rev().for_each(Note::undo);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Gives a file its name in a folder, if nothing has it; false if something has.
///
/// # Errors
/// The file system refuses.
pub fn name_it(folder: impl AsFd, nameless: &OsStr, name: &OsStr) -> io::Result<bool> {
    let folder = folder.as_fd();
    match linkat(folder, nameless, folder, name, LinkatFlags::empty()) {
        Ok(()) => {
            let _ = unlinkat(folder, nameless, UnlinkatFlags::NoRemoveDir);
            Ok(true)
        }
        Err(Errno::EEXIST) => Ok(false),
        // Not all file systems have links.
        Err(Errno::EPERM | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EMLINK) => {
            match renameat2(
                folder,
                nameless,
                folder,
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

/// Undoes what all notes in a directory say: those who wrote them are gone, and the tasks do not run.
pub fn undo_all(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(NAME) {
            undo(&entry.path());
        }
    }
}

fn undo(path: &Path) {
    let open = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let mut bytes = Vec::new();
    if let Ok(file) = open {
        // What cannot be read is not there.
        let _ = file.take(NOTES_BYTES_MAX).read_to_end(&mut bytes);
    }
    read(&bytes).iter().rev().for_each(Note::undo);
    let _ = std::fs::remove_file(path);
}

/// All whole notes; the last one may have been cut off.
fn read(mut bytes: &[u8]) -> Vec<Note> {
    let mut all = Vec::new();
    while let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() {
        let length = usize::try_from(u32::from_le_bytes(*head)).unwrap_or(usize::MAX);
        let Some((body, rest)) = rest.split_at_checked(length) else {
            break;
        };
        let Ok(note) = postcard::from_bytes(body) else {
            break;
        };
        all.push(note);
        bytes = rest;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn named(path: &Path) -> Note {
        let meta = std::fs::metadata(path).expect("there");
        Note::Named(path.into(), meta.dev(), meta.ino())
    }

    #[test]
    fn what_is_noted_is_undone_by_whoever_finds_the_notes_and_nothing_else_is() {
        let dir = tempfile::tempdir().expect("dir");
        let real = dir.path().canonicalize().expect("there");
        let file = |name: &str| {
            let path = real.join(name);
            std::fs::write(&path, name).expect("written");
            path
        };
        let (nameless, own, replaced, kept) = (
            file("nameless"),
            file("own"),
            file("replaced"),
            file("kept"),
        );
        let mut notes = Notes::beside(&real.join("images-1")).expect("notes");
        notes.add(Note::Nameless(nameless.clone())).expect("noted");
        notes.add(named(&own)).expect("noted");
        notes.add(named(&replaced)).expect("noted");
        notes
            .add(Note::Nameless(real.join("never made")))
            .expect("noted");
        std::fs::rename(&replaced, real.join("elsewhere")).expect("renamed");
        std::fs::write(&replaced, "somebody else's").expect("written");
        // As if it had been killed in the middle of a note.
        notes.file.write_all(&[200, 0, 0, 0, 1]).expect("written");
        std::mem::forget(notes);
        undo_all(&real);
        assert!(!nameless.exists() && !own.exists());
        assert!(replaced.exists() && kept.exists() && real.join("elsewhere").exists());
        assert!(
            !real.join("carried-images-1").exists(),
            "the notes go with the files"
        );
    }

    #[test]
    fn files_go_with_their_notes_unless_they_are_kept() {
        let dir = tempfile::tempdir().expect("dir");
        let real = dir.path().canonicalize().expect("there");
        for keep in [false, true] {
            std::fs::write(real.join("file"), "").expect("written");
            let mut notes = Notes::beside(&real.join("images-1")).expect("notes");
            notes.add(named(&real.join("file"))).expect("noted");
            if keep {
                notes.keep()
            } else {
                drop(notes)
            }
            assert_eq!(real.join("file").exists(), keep);
            assert!(!real.join("carried-images-1").exists());
        }
    }

    #[test]
    fn a_name_that_is_taken_is_not_taken_away() {
        let dir = tempfile::tempdir().expect("dir");
        let folder = File::open(dir.path()).expect("open");
        std::fs::write(dir.path().join("new"), "new").expect("written");
        std::fs::write(dir.path().join("old"), "old").expect("written");
        assert!(!name_it(&folder, OsStr::new("new"), OsStr::new("old")).expect("it is told"));
        assert_eq!(
            std::fs::read(dir.path().join("old")).expect("there"),
            b"old"
        );
        assert!(name_it(&folder, OsStr::new("new"), OsStr::new("free")).expect("it is named"));
        assert!(!dir.path().join("new").exists() && dir.path().join("free").exists());
    }
}
