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
    /// Nothing is written to it any more.
    Complete,
    /// It is no longer needed.
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

    /// Waits for a change of the state, at most `at_most`, and returns the state.
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

/// A directory that was opened once. Another directory that takes its name later is not confused
/// with it, and none of its files is found here. That matters because sent data is punched out:
/// data that must be sent again must never be punched out.
struct OpenedDir {
    open: File,
    /// Path by which its files are reached.
    path: PathBuf,
}

impl OpenedDir {
    fn open(path: &Path) -> io::Result<OpenedDir> {
        let open = File::open(path)?;
        // While it is open, no other directory can have its inode number.
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        Ok(OpenedDir { open, path })
    }

    /// Returns the names of its files.
    fn names(&self) -> io::Result<Vec<String>> {
        let unfit = |name| {
            io::Error::new(
                ErrorKind::InvalidData,
                format!("{name:?} is not a valid image name"),
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
struct PartlySentFile {
    number: u32,
    file: File,
    sent: u64,
    /// What was sent is punched out of the file.
    punches_holes: bool,
}

impl PartlySentFile {
    /// Punches the bytes sent last out of the file. A file system that cannot do that keeps them.
    fn punch_out(&self, bytes: usize) {
        if self.punches_holes {
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
    fn is_unchanged(&self, meta: &Metadata) -> bool {
        self.file.metadata().is_ok_and(|own| is_same(&own, meta)) && self.sent <= meta.len()
    }
}

/// Sends the files of a directory.
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
    /// Part of `bytes` that was sent before the directory was complete.
    early_bytes: u64,
    /// Bytes on the wire for the pieces.
    wire_bytes: u64,
    /// File bytes sent for directories that were replaced.
    void_bytes: u64,
}

/// The amounts of a finished transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) struct SentAmounts {
    /// Bytes of the files' contents, zeros included.
    pub(in crate::shell) bytes: u64,
    /// Part of `bytes` that was sent before the directory was complete.
    pub(in crate::shell) early_bytes: u64,
    /// Bytes on the wire for these files.
    pub(in crate::shell) wire_bytes: u64,
    /// File bytes sent for directories that were replaced.
    pub(in crate::shell) void_bytes: u64,
}

impl<'a, W: Write> Sender<'a, W> {
    /// Sends nothing yet. `rate_limit` limits the transfer.
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

    /// Sends all files, including what is written meanwhile, up to the end mark.
    pub(in crate::shell) fn send(
        mut self,
        progress: &SharedDirState,
    ) -> Result<SentAmounts, Failure> {
        loop {
            match progress.wait(POLL_INTERVAL) {
                DirState::Growing => {}
                DirState::Complete => return self.send_rest(),
                DirState::Dropped => {
                    return Err(Failure::Cancelled("the transfer was aborted".into()));
                }
            }
            let followed = self.send_growth();
            // An unreadable file may be a fault of its writer. The writer reports that by its
            // state, so wait for it before failing.
            if matches!(followed, Err(Failure::Io(_)))
                && progress.wait(Duration::MAX) == DirState::Dropped
            {
                continue;
            }
            followed?;
        }
    }

    /// Opens the directory. If another directory had its name before, everything sent is declared
    /// void.
    fn open_dir(&mut self) -> Result<(), Failure> {
        let there = std::fs::symlink_metadata(self.dir).map_err(io_failure("read", self.dir))?;
        let is_it = |folder: &OpenedDir| {
            folder
                .open
                .metadata()
                .is_ok_and(|own| is_same(&own, &there))
        };
        if self.opened_dir.as_ref().is_some_and(is_it) {
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

    /// Sends what the files have grown by.
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
        let there = |name: &String, begun: &PartlySentFile| {
            entries
                .iter()
                .any(|(other, meta)| other == name && begun.is_unchanged(meta))
        };
        if let Some((name, _)) = self
            .partly_sent
            .iter()
            .find(|(name, begun)| !there(name, begun))
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
                    bytes: done.sent,
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
                sent: 0,
                punches_holes,
            },
        );
        self.send_mark(&TransferMark::File { number, name })
    }

    /// Sends a file up to `length`.
    fn send_file_up_to(&mut self, name: &str, length: u64) -> Result<(), Failure> {
        let Some(begun) = self.partly_sent.get_mut(name) else {
            return Ok(());
        };
        while begun.sent < length {
            let bytes = usize::try_from(length - begun.sent)
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
            begun.sent += bytes as u64;
            begun.punch_out(bytes);
            self.bytes += bytes as u64;
        }
        Ok(())
    }

    pub(super) fn send_mark(&mut self, mark: &TransferMark) -> Result<(), Failure> {
        send_mark(&mut self.out, mark)
    }
}
