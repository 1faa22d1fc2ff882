//! The sender: sends the files of a directory, also while they are being written.

use super::super::bulk::Outgoing;
use super::super::rate::Rate;
use super::{
    Mark, OPEN_FILES_MAX, PIECE, PIECE_BYTES, PIECE_HEAD_BYTES, io_failure, not_taken, send_mark,
};
use nix::fcntl::{FallocateFlags, fallocate};
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Interval at which a directory is checked while it is being written.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Prefix and suffix of the engine's files that only grow while they are written: memory contents.
const GROWS: (&str, &str) = ("pages-", ".img");

/// State of a directory that is being sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) enum State {
    #[default]
    Growing,
    /// Nothing is written to it any more.
    Complete,
    /// It is no longer needed.
    Void,
}

/// The shared state of a directory, for the thread that sends it.
#[derive(Debug, Default)]
pub(in crate::shell) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

impl Progress {
    /// Sets the state. Only the first change takes effect.
    pub(in crate::shell) fn turn(&self, state: State) {
        let mut now = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *now == State::Growing {
            *now = state;
        }
        drop(now);
        self.changed.notify_all();
    }

    /// Waits for a change of the state, at most `at_most`, and returns the state.
    fn wait(&self, at_most: Duration) -> State {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(state, at_most, |state| *state == State::Growing);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// A directory that was opened once. Another directory that takes its name later is not confused
/// with it, and none of its files is found here. That matters because sent data is punched out:
/// data that must be sent again must never be punched out.
struct Folder {
    open: File,
    /// Path by which its files are reached.
    path: PathBuf,
}

impl Folder {
    fn open(path: &Path) -> io::Result<Folder> {
        let open = File::open(path)?;
        // While it is open, no other directory can have its inode number.
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        Ok(Folder { open, path })
    }

    /// Returns the names of its files.
    fn names(&self) -> io::Result<Vec<String>> {
        let unfit = |name| {
            io::Error::new(
                ErrorKind::InvalidData,
                format!("{name:?} is no name of an image"),
            )
        };
        std::fs::read_dir(&self.path)?
            .map(|entry| entry?.file_name().into_string().map_err(unfit))
            .collect()
    }

    /// Returns its files in the order of their names, with their metadata.
    fn entries(&self) -> io::Result<Vec<(String, Metadata)>> {
        let mut names = self.names()?;
        names.sort();
        let about = |name: String| {
            std::fs::symlink_metadata(self.path.join(&name)).map(|meta| (name, meta))
        };
        names.into_iter().map(about).collect()
    }
}

/// A file that was sent in part.
struct Begun {
    number: u32,
    file: File,
    sent: u64,
    /// What was sent is punched out of the file.
    used_up: bool,
}

impl Begun {
    /// Punches the bytes sent last out of the file. A file system that cannot do that keeps them.
    fn give_back(&self, bytes: usize) {
        if self.used_up {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let _ = fallocate(
                &self.file,
                flags,
                (self.sent - bytes as u64) as i64,
                bytes as i64,
            );
        }
    }

    /// True if this is the same file and it has not been truncated below what was sent.
    fn is(&self, meta: &Metadata) -> bool {
        self.file.metadata().is_ok_and(|own| is_same(&own, meta)) && self.sent <= meta.len()
    }
}

/// Sends the files of a directory.
pub(in crate::shell) struct Sender<'a, W> {
    dir: &'a Path,
    /// The directory to which everything sent so far belongs.
    folder: Option<Folder>,
    pub(super) out: Outgoing<W>,
    rate: &'a Rate,
    /// Partly sent files by name.
    begun: BTreeMap<String, Begun>,
    files: u32,
    bytes: u64,
    /// Part of `bytes` that was sent before the directory was complete.
    ahead: u64,
    /// Bytes on the wire for the pieces.
    left: u64,
    /// File bytes sent for directories that were replaced.
    in_vain: u64,
}

/// The amounts of a finished transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) struct Sent {
    /// Bytes of the files' contents, zeros included.
    pub(in crate::shell) bytes: u64,
    /// Part of `bytes` that was sent before the directory was complete.
    pub(in crate::shell) ahead: u64,
    /// Bytes on the wire for these files.
    pub(in crate::shell) left: u64,
    /// File bytes sent for directories that were replaced.
    pub(in crate::shell) in_vain: u64,
}

impl<'a, W: Write> Sender<'a, W> {
    /// Sends nothing yet. `rate` limits the transfer.
    pub(in crate::shell) fn new(dir: &'a Path, out: Outgoing<W>, rate: &'a Rate) -> Sender<'a, W> {
        Sender {
            dir,
            folder: None,
            out,
            rate,
            begun: BTreeMap::new(),
            files: 0,
            bytes: 0,
            ahead: 0,
            left: 0,
            in_vain: 0,
        }
    }

    /// Sends all files, including what is written meanwhile, up to the end mark.
    pub(in crate::shell) fn send(mut self, progress: &Progress) -> Result<Sent, Failure> {
        loop {
            match progress.wait(LOOK_EVERY) {
                State::Growing => {}
                State::Complete => return self.finish(),
                State::Void => {
                    return Err(Failure::CalledOff("the transfer was broken off".into()));
                }
            }
            let followed = self.follow();
            // An unreadable file may be a fault of its writer. The writer reports that by its
            // state, so wait for it before failing.
            if matches!(followed, Err(Failure::Io(_)))
                && progress.wait(Duration::MAX) == State::Void
            {
                continue;
            }
            followed?;
        }
    }

    /// Opens the directory. If another directory had its name before, everything sent is declared
    /// void.
    fn find(&mut self) -> Result<(), Failure> {
        let there = std::fs::symlink_metadata(self.dir).map_err(io_failure("read", self.dir))?;
        let is_it = |folder: &Folder| {
            folder
                .open
                .metadata()
                .is_ok_and(|own| is_same(&own, &there))
        };
        if self.folder.as_ref().is_some_and(is_it) {
            return Ok(());
        }
        let folder = Folder::open(self.dir).map_err(io_failure("read", self.dir))?;
        self.folder = Some(folder);
        if self.files > 0 {
            self.mark(&Mark::Anew)?;
            self.begun.clear();
            self.in_vain += self.bytes;
            (self.files, self.bytes, self.left) = (0, 0, 0);
        }
        Ok(())
    }

    /// Sends what the files have grown by.
    fn follow(&mut self) -> Result<(), Failure> {
        // The directory may not exist yet, or no longer; it is opened again when it is complete.
        match self.find() {
            Err(Failure::Io(_)) => return Ok(()),
            found => found?,
        }
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        let path = folder.path.clone();
        // A file may have been removed meanwhile.
        for name in folder.names().unwrap_or_default() {
            let grows = name.starts_with(GROWS.0) && name.ends_with(GROWS.1);
            if grows && !self.begun.contains_key(&name) && self.begun.len() < OPEN_FILES_MAX - 1 {
                let Ok(file) = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(path.join(&name))
                else {
                    continue;
                };
                self.begin(name, file, true)?;
            }
        }
        let names: Vec<String> = self.begun.keys().cloned().collect();
        for name in names {
            let length = self.begun[&name]
                .file
                .metadata()
                .map_err(io_failure("read", &self.dir.join(&name)))?
                .len();
            // Only whole pieces: the remainder will grow or is sent at the end.
            let whole = length - length % PIECE_BYTES as u64;
            self.send_to(&name, whole)?;
        }
        Ok(())
    }

    /// Sends the rest of all files.
    fn finish(mut self) -> Result<Sent, Failure> {
        self.find()?;
        let folder = self.folder.as_ref().expect("it was found");
        let entries = folder.entries().map_err(io_failure("read", self.dir))?;
        let path = folder.path.clone();
        if let Some((name, _)) = entries.iter().find(|(_, meta)| !meta.is_file()) {
            return Err(Failure::Images(format!(
                "{} is not a plain file",
                self.dir.join(name).display()
            )));
        }
        let there = |name: &String, begun: &Begun| {
            entries
                .iter()
                .any(|(other, meta)| other == name && begun.is(meta))
        };
        if let Some((name, _)) = self.begun.iter().find(|(name, begun)| !there(name, begun)) {
            let path = self.dir.join(name);
            return Err(Failure::Images(format!(
                "{} was replaced while it was sent",
                path.display()
            )));
        }
        self.ahead = self.bytes;
        for (name, meta) in entries {
            if !self.begun.contains_key(&name) {
                let file = File::open(path.join(&name))
                    .map_err(io_failure("open", &self.dir.join(&name)))?;
                self.begin(name.clone(), file, false)?;
            }
            self.send_to(&name, meta.len())?;
            if let Some(done) = self.begun.remove(&name) {
                self.mark(&Mark::FileEnd {
                    number: done.number,
                    bytes: done.sent,
                })?;
            }
        }
        self.mark(&Mark::End {
            files: self.files,
            bytes: self.bytes,
        })?;
        Ok(Sent {
            bytes: self.bytes,
            ahead: self.ahead,
            left: self.left,
            in_vain: self.in_vain,
        })
    }

    fn begin(&mut self, name: String, file: File, used_up: bool) -> Result<(), Failure> {
        let number = self.files;
        self.files += 1;
        self.begun.insert(
            name.clone(),
            Begun {
                number,
                file,
                sent: 0,
                used_up,
            },
        );
        self.mark(&Mark::File { number, name })
    }

    /// Sends a file up to `length`.
    fn send_to(&mut self, name: &str, length: u64) -> Result<(), Failure> {
        let Some(begun) = self.begun.get_mut(name) else {
            return Ok(());
        };
        while begun.sent < length {
            let bytes = usize::try_from(length - begun.sent)
                .unwrap_or(PIECE_BYTES)
                .min(PIECE_BYTES);
            let mut front = [PIECE; PIECE_HEAD_BYTES];
            front[1..].copy_from_slice(&begun.number.to_le_bytes());
            let read = |room: &mut [u8]| {
                begun
                    .file
                    .read_exact(room)
                    .map_err(io_failure("read", &self.dir.join(name)))
            };
            let sent = self
                .out
                .send_packed(&front, bytes, read, |leave| self.rate.wait(leave))?;
            self.left += sent.map_err(not_taken)? as u64;
            begun.sent += bytes as u64;
            begun.give_back(bytes);
            self.bytes += bytes as u64;
        }
        Ok(())
    }

    pub(super) fn mark(&mut self, mark: &Mark) -> Result<(), Failure> {
        send_mark(&mut self.out, mark)
    }
}
