//! The sender: sends the files of a directory, also while they are being written.

use super::super::bulk_tcp::RecordWriter;
use super::super::rate_limit::RateLimit;
use super::{
    OPEN_FILES_MAX, PIECE_BYTES, PIECE_HEAD_BYTES, RECORD_PIECE, TransferMark, io_failure,
    send_failure, send_mark,
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
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Prefix and suffix of the engine's files that only grow while they are written: memory contents.
const GROWING_FILE_NAME: (&str, &str) = ("pages-", ".img");

/// State of a directory that is being sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) enum DirState {
    #[default]
    Growing,
    /// No more data is written to the directory.
    Complete,
    /// The directory is not needed any more.
    Dropped,
}

/// The shared state of a directory, for the thread that sends it.
#[derive(Debug, Default)]
pub(in crate::shell) struct SharedDirState {
    state: Mutex<DirState>,
    changed: Condvar,
}

impl SharedDirState {
    /// Sets the state. Only the first change takes effect.
    pub(in crate::shell) fn set(&self, state: DirState) {
        let mut now = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *now == DirState::Growing {
            *now = state;
        }
        drop(now);
        self.changed.notify_all();
    }

    /// Waits at most `at_most` for a change of the state, and returns the state.
    fn wait(&self, at_most: Duration) -> DirState {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .changed
            .wait_timeout_while(state, at_most, |state| *state == DirState::Growing);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// A directory, identified by an open descriptor. Another directory that gets the same name later
/// is not confused with it, and its files are not found through this descriptor. This matters
/// because sent data is punched out of the files: a file of the new directory must not lose data
/// that must still be sent.
struct OpenedDir {
    descriptor: File,
    /// Path by which the files of the directory are reached.
    path: PathBuf,
}

impl OpenedDir {
    fn open(path: &Path) -> io::Result<OpenedDir> {
        let open = File::open(path)?;
        // While the directory is open, no other directory can have its inode number.
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        Ok(OpenedDir {
            descriptor: open,
            path,
        })
    }

    /// Returns the names of the files in the directory.
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

    /// Returns the files of the directory in the order of their names, with their metadata.
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
struct PartlySentFile {
    number: u32,
    file: File,
    sent_bytes: u64,
    /// True if sent data is punched out of the file.
    punches_holes: bool,
}

impl PartlySentFile {
    /// Punches the bytes sent last out of the file. Has no effect on a file system that cannot do
    /// this.
    fn punch_out(&self, bytes: usize) {
        if self.punches_holes {
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let _ = fallocate(
                &self.file,
                flags,
                (self.sent_bytes - bytes as u64) as i64,
                bytes as i64,
            );
        }
    }

    /// True if `meta` belongs to this file, and the file has not been truncated below the sent
    /// length.
    fn is_unchanged(&self, meta: &Metadata) -> bool {
        self.file.metadata().is_ok_and(|own| is_same(&own, meta)) && self.sent_bytes <= meta.len()
    }
}

/// Sender of the files of one directory, with the counts of the transfer.
pub(in crate::shell) struct Sender<'a, W> {
    dir: &'a Path,
    /// The directory to which everything sent so far belongs.
    opened_dir: Option<OpenedDir>,
    pub(super) out: RecordWriter<W>,
    rate: &'a RateLimit,
    /// Partly sent files by name.
    partly_sent: BTreeMap<String, PartlySentFile>,
    files: u32,
    bytes: u64,
    /// Number of the `bytes` that were sent before the directory was complete.
    early_bytes: u64,
    /// Number of bytes on the wire for the pieces.
    wire_bytes: u64,
    /// Number of file bytes sent for directories that were replaced.
    void_bytes: u64,
}

/// The amounts of a finished transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) struct SentAmounts {
    /// Bytes of the files' contents, zeros included.
    pub(in crate::shell) bytes: u64,
    /// Number of the `bytes` that were sent before the directory was complete.
    pub(in crate::shell) early_bytes: u64,
    /// Number of bytes on the wire for these files.
    pub(in crate::shell) wire_bytes: u64,
    /// Number of file bytes sent for directories that were replaced.
    pub(in crate::shell) void_bytes: u64,
}

impl<'a, W: Write> Sender<'a, W> {
    /// Creates a sender for the directory `dir`. Nothing is sent before [`Sender::send`]. `rate`
    /// limits the transfer rate.
    pub(in crate::shell) fn new(
        dir: &'a Path,
        out: RecordWriter<W>,
        rate: &'a RateLimit,
    ) -> Sender<'a, W> {
        Sender {
            dir,
            opened_dir: None,
            out,
            rate,
            partly_sent: BTreeMap::new(),
            files: 0,
            bytes: 0,
            early_bytes: 0,
            wire_bytes: 0,
            void_bytes: 0,
        }
    }

    /// Sends all files, including data that is written during the transfer, up to the end mark.
    pub(in crate::shell) fn send(
        mut self,
        dir_state: &SharedDirState,
    ) -> Result<SentAmounts, Failure> {
        loop {
            match dir_state.wait(POLL_INTERVAL) {
                DirState::Growing => {}
                DirState::Complete => return self.send_rest(),
                DirState::Dropped => {
                    return Err(Failure::Cancelled("the transfer was broken off".into()));
                }
            }
            let followed = self.send_growth();
            // An unreadable file may be a fault of its writer. The writer reports that by its
            // state, so wait for it before failing.
            if matches!(followed, Err(Failure::Io(_)))
                && dir_state.wait(Duration::MAX) == DirState::Dropped
            {
                continue;
            }
            followed?;
        }
    }

    /// Opens the directory. If the name belonged to another directory before, everything sent is
    /// declared void.
    fn open_dir(&mut self) -> Result<(), Failure> {
        let there = std::fs::symlink_metadata(self.dir).map_err(io_failure("read", self.dir))?;
        let is_same_dir = |folder: &OpenedDir| {
            folder
                .descriptor
                .metadata()
                .is_ok_and(|own| is_same(&own, &there))
        };
        if self.opened_dir.as_ref().is_some_and(is_same_dir) {
            return Ok(());
        }
        let folder = OpenedDir::open(self.dir).map_err(io_failure("read", self.dir))?;
        self.opened_dir = Some(folder);
        if self.files > 0 {
            self.send_mark(&TransferMark::Restart)?;
            self.partly_sent.clear();
            self.void_bytes += self.bytes;
            (self.files, self.bytes, self.wire_bytes) = (0, 0, 0);
        }
        Ok(())
    }

    /// Sends the data by which the files have grown.
    fn send_growth(&mut self) -> Result<(), Failure> {
        // The directory may not exist yet, or no longer; it is opened again when it is complete.
        match self.open_dir() {
            Err(Failure::Io(_)) => return Ok(()),
            found => found?,
        }
        let Some(folder) = &self.opened_dir else {
            return Ok(());
        };
        let path = folder.path.clone();
        // A file may have been removed meanwhile.
        for name in folder.names().unwrap_or_default() {
            let grows =
                name.starts_with(GROWING_FILE_NAME.0) && name.ends_with(GROWING_FILE_NAME.1);
            if grows
                && !self.partly_sent.contains_key(&name)
                && self.partly_sent.len() < OPEN_FILES_MAX - 1
            {
                let Ok(file) = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(path.join(&name))
                else {
                    continue;
                };
                self.begin_file(name, file, true)?;
            }
        }
        let names: Vec<String> = self.partly_sent.keys().cloned().collect();
        for rename_staged in names {
            let length = self.partly_sent[&rename_staged]
                .file
                .metadata()
                .map_err(io_failure("read", &self.dir.join(&rename_staged)))?
                .len();
            // Only whole pieces: the remainder will grow or is sent at the end.
            let whole = length - length % PIECE_BYTES as u64;
            self.send_file_up_to(&rename_staged, whole)?;
        }
        Ok(())
    }

    /// Sends the rest of all files.
    fn send_rest(mut self) -> Result<SentAmounts, Failure> {
        self.open_dir()?;
        let folder = self.opened_dir.as_ref().expect("it was found");
        let entries = folder.entries().map_err(io_failure("read", self.dir))?;
        let path = folder.path.clone();
        if let Some((name, _)) = entries.iter().find(|(_, meta)| !meta.is_file()) {
            return Err(Failure::Images(format!(
                "{} is not a plain file",
                self.dir.join(name).display()
            )));
        }
        let is_present = |name: &String, begun: &PartlySentFile| {
            entries
                .iter()
                .any(|(other, meta)| other == name && begun.is_unchanged(meta))
        };
        if let Some((name, _)) = self
            .partly_sent
            .iter()
            .find(|(name, begun)| !is_present(name, begun))
        {
            let path = self.dir.join(name);
            return Err(Failure::Images(format!(
                "{} was replaced while it was sent",
                path.display()
            )));
        }
        self.early_bytes = self.bytes;
        for (name, meta) in entries {
            if !self.partly_sent.contains_key(&name) {
                let file = File::open(path.join(&name))
                    .map_err(io_failure("open", &self.dir.join(&name)))?;
                self.begin_file(name.clone(), file, false)?;
            }
            self.send_file_up_to(&name, meta.len())?;
            if let Some(done) = self.partly_sent.remove(&name) {
                self.send_mark(&TransferMark::FileEnd {
                    number: done.number,
                    bytes: done.sent_bytes,
                })?;
            }
        }
        self.send_mark(&TransferMark::End {
            files: self.files,
            bytes: self.bytes,
        })?;
        Ok(SentAmounts {
            bytes: self.bytes,
            early_bytes: self.early_bytes,
            wire_bytes: self.wire_bytes,
            void_bytes: self.void_bytes,
        })
    }

    fn begin_file(&mut self, name: String, file: File, punches_holes: bool) -> Result<(), Failure> {
        let number = self.files;
        self.files += 1;
        self.partly_sent.insert(
            name.clone(),
            PartlySentFile {
                number,
                file,
                sent_bytes: 0,
                punches_holes,
            },
        );
        self.send_mark(&TransferMark::File { number, name })
    }

    /// Sends a file up to the offset `length`.
    fn send_file_up_to(&mut self, name: &str, length: u64) -> Result<(), Failure> {
        let Some(begun) = self.partly_sent.get_mut(name) else {
            return Ok(());
        };
        while begun.sent_bytes < length {
            let bytes = usize::try_from(length - begun.sent_bytes)
                .unwrap_or(PIECE_BYTES)
                .min(PIECE_BYTES);
            let mut front = [RECORD_PIECE; PIECE_HEAD_BYTES];
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
            self.wire_bytes += sent.map_err(send_failure)? as u64;
            begun.sent_bytes += bytes as u64;
            begun.punch_out(bytes);
            self.bytes += bytes as u64;
        }
        Ok(())
    }

    pub(super) fn send_mark(&mut self, mark: &TransferMark) -> Result<(), Failure> {
        send_mark(&mut self.out, mark)
    }
}
