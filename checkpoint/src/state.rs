//! The files into which a program has written its own checkpoint. They take the place of images: copied beside each other, under
//! numbers, with a list that says which of them were there; and put back under their names before the program is started again.
//!
//! Nothing of what is there goes before everything that takes its place is there, too: the copies lie beside the files under names
//! of their own ([`crate::carried`]) until they get theirs. A file that was not there when the checkpoint was made is not there
//! afterwards.

use crate::carried::{Note, Notes};
use crate::facts::room;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use thiserror::Error;

/// Name of the list.
const LIST: &str = "sempa-state";
/// Bytes of it at most.
const LIST_BYTES_MAX: u64 = 1 << 20;
/// What is kept of a file's mode: who may do what, and no more.
const MODE_BITS: u32 = 0o777;

/// What went wrong with which file.
#[derive(Debug, Error)]
#[error("cannot {act} {}: {why}", .path.display())]
pub struct StateError {
    act: &'static str,
    path: PathBuf,
    why: io::Error,
}

/// For an act on a file.
fn failed<'a>(act: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> StateError + 'a {
    move |why| StateError {
        act,
        path: path.to_path_buf(),
        why,
    }
}

/// One of the files; what is not there has no mode.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    mode: Option<u32>,
    bytes: u64,
}

fn copy_of(images: &Path, number: usize) -> PathBuf {
    images.join(format!("{LIST}-{number}"))
}

fn made(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

/// A plain file, or none. What else there is under this name is refused, and not followed or waited for.
fn plain(path: &Path) -> io::Result<Option<File>> {
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

/// Copies these files, relative to `dir` unless they begin with a slash, into a directory of images, which is there and empty.
/// Answers how many were there, and their bytes.
///
/// # Errors
/// One is no regular file, or cannot be read, or there is no room for it.
pub fn collect(
    files: &[PathBuf],
    dir: &Path,
    images: &Path,
    room: &Room,
) -> Result<(u32, u64), StateError> {
    let _promised = room.promise(files, dir, images)?;
    let (mut list, mut count, mut sum) = (Vec::new(), 0, 0);
    for (number, file) in files.iter().enumerate() {
        let path = dir.join(file);
        let Some(mut from) = plain(&path).map_err(failed("keep", &path))? else {
            list.push(Entry {
                mode: None,
                bytes: 0,
            });
            continue;
        };
        let copied = made(&copy_of(images, number)).and_then(|mut to| {
            let mode = from.metadata()?.permissions().mode() & MODE_BITS;
            Ok(Entry {
                mode: Some(mode),
                bytes: io::copy(&mut from, &mut to)?,
            })
        });
        let entry = copied.map_err(failed("keep a copy of", &path))?;
        (count, sum) = (count + 1, sum + entry.bytes);
        list.push(entry);
    }
    let path = images.join(LIST);
    let written = postcard::to_allocvec(&list)
        .map_err(io::Error::other)
        .and_then(|b| made(&path)?.write_all(&b));
    written.map_err(failed("write", &path))?;
    Ok((count, sum))
}

/// Room for files on their way into images, of which several tasks may need some at the same time.
#[derive(Debug, Default)]
pub struct Room(Mutex<u64>);

/// Bytes of a [`Room`] that are somebody's until this is dropped.
#[derive(Debug)]
struct Promised<'a>(&'a Room, u64);

impl Room {
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Refuses files that would fill the file system of the images, or, where that is memory, take what others need. Better before
    /// anything is copied: a host without memory ends processes that have no part in this.
    fn promise(
        &self,
        files: &[PathBuf],
        dir: &Path,
        images: &Path,
    ) -> Result<Promised<'_>, StateError> {
        // What cannot be looked at is said when it is to be copied.
        let length = |file: &PathBuf| Some(plain(&dir.join(file)).ok()??.metadata().ok()?.len());
        let need = files.iter().filter_map(length).fold(0, u64::saturating_add);
        let mut promised = self.lock();
        // Of what others copy just now a part is counted twice.
        let have = room::in_folder(images)
            .map_err(failed("look for room in", images))?
            .saturating_sub(*promised);
        if need <= have {
            *promised += need;
            return Ok(Promised(self, need));
        }
        let why = format!("its files need {need} bytes there on their way, and {have} are left");
        Err(failed("keep files in", images)(io::Error::new(
            ErrorKind::StorageFull,
            why,
        )))
    }
}

impl Drop for Promised<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= self.1;
    }
}

/// Files that are where they belong, but for their names. Dropping it removes them.
#[derive(Debug)]
pub struct Staged {
    /// Where each belongs, and where it is; nowhere if it is not to be there.
    files: Vec<(PathBuf, Option<PathBuf>)>,
    notes: Notes,
}

/// Copies what [`collect`] has put into a directory of images to where these files belong, relative to `dir` unless they begin
/// with a slash. There have to be as many as were collected.
///
/// # Errors
/// It is not what [`collect`] has made, a folder is not there, what is there under such a name is no regular file, or there is
/// no room.
pub fn stage(files: &[PathBuf], dir: &Path, images: &Path) -> Result<Staged, StateError> {
    let list = read_list(files.len(), images)?;
    let notes = Notes::beside(images).map_err(failed("note files beside", images))?;
    let mut staged = Staged {
        files: Vec::new(),
        notes,
    };
    for (number, (file, entry)) in files.iter().zip(list).enumerate() {
        let path = dir.join(file);
        let there = plain(&path).and_then(|file| file.map(|file| file.metadata()).transpose());
        let own = nix::unistd::geteuid().as_raw();
        if there
            .map_err(failed("replace", &path))?
            .is_some_and(|there| there.uid() != own)
        {
            let why = io::Error::new(ErrorKind::PermissionDenied, "it belongs to somebody else");
            return Err(failed("replace", &path)(why));
        }
        let Some(mode) = entry.mode else {
            staged.files.push((path, None));
            continue;
        };
        let copy = copy_of(images, number);
        let nameless = nameless(&path, number, images).map_err(failed("put back", &path))?;
        let put = put(&copy, &nameless, (mode, entry.bytes), &mut staged.notes);
        put.map_err(failed("put back", &path))?;
        staged.files.push((path, Some(nameless)));
    }
    Ok(staged)
}

fn read_list(files: usize, images: &Path) -> Result<Vec<Entry>, StateError> {
    let path = images.join(LIST);
    let wrong = |why: &str| io::Error::new(ErrorKind::InvalidData, why.to_string());
    let read = || {
        let file = plain(&path)?.ok_or_else(|| wrong("it is not there"))?;
        if file.metadata()?.len() > LIST_BYTES_MAX {
            return Err(wrong("it is too long"));
        }
        let list: Vec<Entry> =
            postcard::from_bytes(&std::fs::read(&path)?).map_err(io::Error::other)?;
        if list.len() == files {
            Ok(list)
        } else {
            Err(wrong("it is about other files"))
        }
    };
    read().map_err(failed("read", &path))
}

/// Where a file lies until it has its name, beside the place where it belongs.
fn nameless(path: &Path, number: usize, images: &Path) -> io::Result<PathBuf> {
    // Notes are about real names.
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

/// Copies one file there, with these bits of its mode and so many bytes.
fn put(
    copy: &Path,
    nameless: &Path,
    (mode, bytes): (u32, u64),
    notes: &mut Notes,
) -> io::Result<()> {
    let mut from = plain(copy)?.ok_or(ErrorKind::NotFound)?;
    notes.add(Note::Nameless(nameless.to_path_buf()))?;
    let mut to = made(nameless)?;
    if io::copy(&mut from, &mut to)? != bytes {
        return Err(io::Error::new(
            ErrorKind::InvalidData,
            "its copy is not as long as it was",
        ));
    }
    to.set_permissions(Permissions::from_mode(mode & MODE_BITS))
}

impl Staged {
    /// Gives all of them their names, and removes what was not there.
    ///
    /// # Errors
    /// The file system refuses. Some may have their names then.
    pub fn name(self) -> Result<(), StateError> {
        for (path, nameless) in &self.files {
            let done = match nameless {
                Some(nameless) => std::fs::rename(nameless, path),
                None => match std::fs::remove_file(path) {
                    Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
                    done => done,
                },
            };
            done.map_err(failed("put back", path))?;
        }
        self.notes.keep();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A working directory, and one for images.
    fn scratch() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let scratch = tempfile::tempdir().expect("a directory");
        let real = scratch.path().canonicalize().expect("there");
        let (work, images) = (real.join("work"), real.join("images-1"));
        fs::create_dir(&work).expect("made");
        fs::create_dir(&images).expect("made");
        (scratch, work, images)
    }

    fn names(dir: &Path) -> Vec<String> {
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

    #[test]
    fn files_are_as_they_were_and_what_was_not_there_is_not() {
        let (_scratch, work, images) = scratch();
        let other = images.with_file_name("other");
        let files = [PathBuf::from("state"), other.clone(), "later".into()];
        fs::write(work.join("state"), "one").expect("written");
        fs::set_permissions(work.join("state"), Permissions::from_mode(0o640)).expect("set");
        fs::write(&other, "").expect("written");
        assert_eq!(
            collect(&files, &work, &images, &Room::default()).expect("kept"),
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
        staged.name().expect("named");
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
            (names(&work), fs::read(&other).expect("back")),
            (vec!["state".to_string()], vec![])
        );
        assert_eq!(
            names(images.parent().expect("a folder")),
            ["images-1", "other", "work"]
        );
    }

    #[test]
    fn what_is_given_up_leaves_everything_as_it_is() {
        let (_scratch, work, images) = scratch();
        let files = [PathBuf::from("state"), "later".into()];
        fs::write(work.join("state"), "one").expect("written");
        collect(&files, &work, &images, &Room::default()).expect("kept");
        fs::write(work.join("later"), "new").expect("written");
        let staged = stage(&files, &work, &images).expect("staged");
        assert_eq!(names(&work).len(), 3);
        drop(staged);
        assert_eq!(names(&work), ["later", "state"]);
        // Also by whoever finds the notes.
        std::mem::forget(stage(&files, &work, &images).expect("staged"));
        crate::carried::undo_all(images.parent().expect("a folder"));
        assert_eq!(names(&work), ["later", "state"]);
        // One of them has no place.
        let far = [PathBuf::from("state"), "nowhere/later".into()];
        fs::remove_file(images.join("sempa-state")).expect("removed");
        fs::remove_file(images.join("sempa-state-0")).expect("removed");
        fs::create_dir(work.join("nowhere")).expect("made");
        fs::write(work.join("nowhere/later"), "new").expect("written");
        collect(&far, &work, &images, &Room::default()).expect("kept");
        fs::remove_dir_all(work.join("nowhere")).expect("removed");
        let why = stage(&far, &work, &images)
            .expect_err("no folder")
            .to_string();
        assert!(
            why.contains("nowhere/later") && why.contains("No such file"),
            "{why}"
        );
        assert_eq!(names(&work), ["later", "state"]);
    }

    #[test]
    fn files_for_which_there_is_no_room_on_their_way_are_refused_before_any_is_copied() {
        let (_scratch, work, images) = scratch();
        let files = ["small", "large"].map(PathBuf::from);
        fs::write(work.join("small"), "here").expect("written");
        // All of it a hole.
        File::create(work.join("large"))
            .and_then(|file| file.set_len(15 << 40))
            .expect("it takes no room");
        let error = collect(&files, &work, &images, &Room::default())
            .expect_err("no host has so much")
            .to_string();
        assert!(
            error.contains("its files need 16492674416644 bytes there on their way"),
            "{error}"
        );
        assert_eq!(fs::read_dir(&images).expect("there").count(), 0);
        fs::remove_file(work.join("large")).expect("there");
        let room = Room::default();
        *room.lock() = u64::MAX;
        let error = collect(&files, &work, &images, &room)
            .expect_err("all was promised to others")
            .to_string();
        assert!(
            error.ends_with("need 4 bytes there on their way, and 0 are left"),
            "{error}"
        );
        *room.lock() = 0;
        assert_eq!(
            collect(&files, &work, &images, &room).expect("there is room for one"),
            (1, 4)
        );
        assert_eq!(*room.lock(), 0, "nothing is promised to anybody any more");
    }

    #[test]
    fn what_is_no_regular_file_is_neither_kept_nor_replaced() {
        let (_scratch, work, images) = scratch();
        let files = [PathBuf::from("state")];
        std::os::unix::fs::symlink("/etc/hostname", work.join("state")).expect("linked");
        let why = collect(&files, &work, &images, &Room::default())
            .expect_err("a link")
            .to_string();
        assert!(
            why.contains("no regular file") && why.contains("state"),
            "{why}"
        );
        fs::remove_file(work.join("state")).expect("removed");
        collect(&files, &work, &images, &Room::default()).expect("nothing to keep");
        fs::create_dir(work.join("state")).expect("made");
        let why = stage(&files, &work, &images)
            .expect_err("a directory")
            .to_string();
        assert!(why.contains("no regular file"), "{why}");
        let why = stage(&[], &work, &images).expect_err("others").to_string();
        assert!(why.contains("other files"), "{why}");
    }
}
