//! The sender: sends the files of a directory, even while they are being written.

use super::super::bulk_tcp::RecordWriter;
use super::super::rate_limit::RateLimit;
use super::{
    OPEN_FILES_MAX, PIECE_BYTES_MAX, PIECE_HEAD_BYTES, RECORD_PIECE, TransferMark, io_failure,
    send_failure, send_mark,
};
use crate::shell::transfer_counters::TransferCounter;
use nix::fcntl::{FallocateFlags, fallocate};
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Interval at which a directory is checked while it is being written.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Prefix and suffix of the names of the engine's memory files. Data is only appended to these
/// files.
const GROWING_FILE_NAME: (&str, &str) = ("pages-", ".img");

/// State of a directory that is being sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) enum DirState {
    #[default]
    Growing,
    /// No more data is written to the directory.
    Complete,
    /// The directory is no longer needed.
    Dropped,
}

/// State of a directory; shared with the thread that sends the directory.
#[derive(Debug, Default)]
pub(in crate::shell) struct SharedDirState {
    state: Mutex<DirState>,
    state_changed: Condvar,
}

impl SharedDirState {
    /// Sets the state. Only the first change takes effect.
    pub(in crate::shell) fn set_state(&self, state: DirState) {
        let mut stored_state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if *stored_state == DirState::Growing {
            *stored_state = state;
        }
        drop(stored_state);
        self.state_changed.notify_all();
    }

    /// Waits for a change of the state, but at most `timeout`. Returns the state.
    fn wait_for_change(&self, timeout: Duration) -> DirState {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let wait_result = self
            .state_changed
            .wait_timeout_while(state, timeout, |state| *state == DirState::Growing);
        *wait_result.unwrap_or_else(PoisonError::into_inner).0
    }
}

fn is_same_file(first: &Metadata, second: &Metadata) -> bool {
    (first.dev(), first.ino()) == (second.dev(), second.ino())
}

/// A directory, identified by an open descriptor. If another directory later gets the same name,
/// the files of the other directory cannot be reached through this descriptor. This is important
/// because sent data is punched out of the files: a file of the other directory must not lose data
/// that is not sent yet.
struct OpenedDir {
    descriptor: File,
    /// Path through the descriptor, by which the files of the directory are opened.
    path: PathBuf,
}

impl OpenedDir {
    fn open(path: &Path) -> io::Result<Self> {
        let descriptor = File::open(path)?;
        // While the directory is open, no other directory can have the same inode number.
        let path = PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
        Ok(Self { descriptor, path })
    }

    /// Returns the names of all files in the directory.
    fn file_names(&self) -> io::Result<Vec<String>> {
        let invalid_name_error = |name| {
            io::Error::new(
                ErrorKind::InvalidData,
                format!("{name:?} is not a valid image name"),
            )
        };
        std::fs::read_dir(&self.path)?
            .map(|entry| entry?.file_name().into_string().map_err(invalid_name_error))
            .collect()
    }

    /// Returns the files of the directory in the order of their names, with their metadata.
    fn files_with_metadata(&self) -> io::Result<Vec<(String, Metadata)>> {
        let mut names = self.file_names()?;
        names.sort();
        let with_metadata = |name: String| {
            std::fs::symlink_metadata(self.path.join(&name)).map(|meta| (name, meta))
        };
        names.into_iter().map(with_metadata).collect()
    }
}

/// A file of which a prefix was sent.
struct PartlySentFile {
    number: u32,
    file: File,
    sent_bytes: u64,
    /// True if sent data is punched out of the file.
    punches_holes: bool,
}

impl PartlySentFile {
    /// Punches the last `bytes` sent bytes out of the file. Has no effect if the file system does
    /// not support holes.
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

    /// True if `meta` is the metadata of this file, and the file has not been truncated below the
    /// sent length.
    fn is_unchanged(&self, meta: &Metadata) -> bool {
        self.file
            .metadata()
            .is_ok_and(|file_meta| is_same_file(&file_meta, meta))
            && self.sent_bytes <= meta.len()
    }
}

/// Sender of the files of one directory, with the counts of the transfer.
pub(in crate::shell) struct Sender<'a, W> {
    dir: &'a Path,
    /// The directory whose data was sent since the last restart; `None` if nothing was sent.
    opened_dir: Option<OpenedDir>,
    pub(super) writer: RecordWriter<W>,
    rate: &'a RateLimit,
    /// Partly sent files; the key is the file's name.
    partly_sent_files: BTreeMap<String, PartlySentFile>,
    file_count: u32,
    byte_count: u64,
    /// Number of the bytes in `byte_count` that were sent before the directory was complete.
    early_bytes: u64,
    /// Number of bytes on the wire that the pieces have taken.
    wire_bytes: u64,
    /// Number of file bytes that were sent for directories that were later replaced.
    void_bytes: u64,
    /// Counter of all file bytes, which progress reports read.
    counter: TransferCounter,
}

/// The amounts of a finished transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::shell) struct SentAmounts {
    /// Bytes of the files' contents, including zeros.
    pub(in crate::shell) file_bytes: u64,
    /// Number of the bytes in `file_bytes` that were sent before the directory was complete.
    pub(in crate::shell) early_bytes: u64,
    /// Number of bytes on the wire that the contents of these files have taken.
    pub(in crate::shell) wire_bytes: u64,
    /// Number of file bytes that were sent for directories that were later replaced.
    pub(in crate::shell) void_bytes: u64,
}

impl<'a, W: Write> Sender<'a, W> {
    /// Creates a sender for the directory `dir`. Nothing is sent before [`Sender::send`]. `rate`
    /// limits the transfer rate.
    pub(in crate::shell) fn new(
        dir: &'a Path,
        writer: RecordWriter<W>,
        rate: &'a RateLimit,
    ) -> Self {
        Sender {
            dir,
            opened_dir: None,
            writer,
            rate,
            partly_sent_files: BTreeMap::new(),
            file_count: 0,
            byte_count: 0,
            early_bytes: 0,
            wire_bytes: 0,
            void_bytes: 0,
            counter: TransferCounter::default(),
        }
    }

    /// Adds all sent bytes to `counter`.
    pub(in crate::shell) fn with_counter(mut self, counter: TransferCounter) -> Self {
        self.counter = counter;
        self
    }

    /// Sends all files, including data that is written during the transfer, and then the end mark.
    /// Blocks until everything is sent or `dir_state` is [`DirState::Dropped`]. Returns the sent
    /// amounts.
    pub(in crate::shell) fn send(
        mut self,
        dir_state: &SharedDirState,
    ) -> Result<SentAmounts, Failure> {
        loop {
            match dir_state.wait_for_change(POLL_INTERVAL) {
                DirState::Growing => {}
                DirState::Complete => return self.send_remainder(),
                DirState::Dropped => {
                    return Err(Failure::Cancelled("the transfer was aborted".into()));
                }
            }
            let growth_result = self.send_growth();
            // A file may be unreadable because its writer has failed. The writer reports its
            // failure by the state. Therefore the sender waits for a change of the state before it
            // returns an error.
            if matches!(growth_result, Err(Failure::Io(_)))
                && dir_state.wait_for_change(Duration::MAX) == DirState::Dropped
            {
                continue;
            }
            growth_result?;
        }
    }

    /// Opens the directory. If the name belonged to another directory before, sends a restart mark,
    /// which voids all data of the other directory.
    fn open_dir(&mut self) -> Result<(), Failure> {
        let dir_meta = std::fs::symlink_metadata(self.dir).map_err(io_failure("read", self.dir))?;
        let is_same_dir = |new_dir: &OpenedDir| {
            new_dir
                .descriptor
                .metadata()
                .is_ok_and(|opened_meta| is_same_file(&opened_meta, &dir_meta))
        };
        if self.opened_dir.as_ref().is_some_and(is_same_dir) {
            return Ok(());
        }
        let new_dir = OpenedDir::open(self.dir).map_err(io_failure("read", self.dir))?;
        self.opened_dir = Some(new_dir);
        if self.file_count > 0 {
            self.send_mark(&TransferMark::Restart)?;
            self.partly_sent_files.clear();
            self.void_bytes += self.byte_count;
            (self.file_count, self.byte_count, self.wire_bytes) = (0, 0, 0);
        }
        Ok(())
    }

    /// Sends the data that was appended to the files since the last call.
    fn send_growth(&mut self) -> Result<(), Failure> {
        // The directory may not exist yet, or may have been removed. The next call, or the call
        // when the directory is complete, opens the directory again.
        match self.open_dir() {
            Err(Failure::Io(_)) => return Ok(()),
            open_result => open_result?,
        }
        let Some(opened_dir) = &self.opened_dir else {
            return Ok(());
        };
        let path = opened_dir.path.clone();
        // A file may have been removed since its name was read; such a file is skipped.
        for name in opened_dir.file_names().unwrap_or_default() {
            let is_growing_file =
                name.starts_with(GROWING_FILE_NAME.0) && name.ends_with(GROWING_FILE_NAME.1);
            if is_growing_file
                && !self.partly_sent_files.contains_key(&name)
                && self.partly_sent_files.len() < OPEN_FILES_MAX - 1
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
        let names: Vec<String> = self.partly_sent_files.keys().cloned().collect();
        for file_name in names {
            let length = self.partly_sent_files[&file_name]
                .file
                .metadata()
                .map_err(io_failure("read", &self.dir.join(&file_name)))?
                .len();
            // Only whole pieces are sent. The remainder of a file grows further, or is sent when
            // the directory is complete.
            let whole_pieces_bytes = length - length % PIECE_BYTES_MAX as u64;
            self.send_file_up_to(&file_name, whole_pieces_bytes)?;
        }
        Ok(())
    }

    /// Sends the remaining data of all files, and the end mark.
    fn send_remainder(mut self) -> Result<SentAmounts, Failure> {
        self.open_dir()?;
        let opened_dir = self.opened_dir.as_ref().expect("it was found");
        let entries = opened_dir
            .files_with_metadata()
            .map_err(io_failure("read", self.dir))?;
        let path = opened_dir.path.clone();
        if let Some((name, _)) = entries.iter().find(|(_, meta)| !meta.is_file()) {
            return Err(Failure::Images(format!(
                "{} is not a plain file",
                self.dir.join(name).display()
            )));
        }
        let is_present_and_unchanged = |name: &String, partly_sent_file: &PartlySentFile| {
            entries
                .iter()
                .any(|(entry_name, meta)| entry_name == name && partly_sent_file.is_unchanged(meta))
        };
        if let Some((name, _)) = self
            .partly_sent_files
            .iter()
            .find(|(name, partly_sent_file)| !is_present_and_unchanged(name, partly_sent_file))
        {
            let path = self.dir.join(name);
            return Err(Failure::Images(format!(
                "{} was replaced while it was sent",
                path.display()
            )));
        }
        self.early_bytes = self.byte_count;
        for (name, meta) in entries {
            if !self.partly_sent_files.contains_key(&name) {
                let file = File::open(path.join(&name))
                    .map_err(io_failure("open", &self.dir.join(&name)))?;
                self.begin_file(name.clone(), file, false)?;
            }
            self.send_file_up_to(&name, meta.len())?;
            if let Some(complete_file) = self.partly_sent_files.remove(&name) {
                self.send_mark(&TransferMark::FileEnd {
                    number: complete_file.number,
                    bytes: complete_file.sent_bytes,
                })?;
            }
        }
        self.send_mark(&TransferMark::End {
            file_count: self.file_count,
            byte_count: self.byte_count,
        })?;
        Ok(SentAmounts {
            file_bytes: self.byte_count,
            early_bytes: self.early_bytes,
            wire_bytes: self.wire_bytes,
            void_bytes: self.void_bytes,
        })
    }

    fn begin_file(&mut self, name: String, file: File, punches_holes: bool) -> Result<(), Failure> {
        let number = self.file_count;
        self.file_count += 1;
        self.partly_sent_files.insert(
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
        let Some(partly_sent_file) = self.partly_sent_files.get_mut(name) else {
            return Ok(());
        };
        while partly_sent_file.sent_bytes < length {
            let piece_bytes = usize::try_from(length - partly_sent_file.sent_bytes)
                .unwrap_or(PIECE_BYTES_MAX)
                .min(PIECE_BYTES_MAX);
            let mut piece_head = [RECORD_PIECE; PIECE_HEAD_BYTES];
            piece_head[1..].copy_from_slice(&partly_sent_file.number.to_le_bytes());
            let fill = |buffer: &mut [u8]| {
                partly_sent_file
                    .file
                    .read_exact(buffer)
                    .map_err(io_failure("read", &self.dir.join(name)))
            };
            let send_result =
                self.writer
                    .send_packed(&piece_head, piece_bytes, fill, |record_bytes| {
                        self.rate.wait_for_slot(record_bytes)
                    })?;
            self.wire_bytes += send_result.map_err(send_failure)? as u64;
            partly_sent_file.sent_bytes += piece_bytes as u64;
            partly_sent_file.punch_out(piece_bytes);
            self.byte_count += piece_bytes as u64;
            self.counter
                .fetch_add(piece_bytes as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    pub(super) fn send_mark(&mut self, mark: &TransferMark) -> Result<(), Failure> {
        send_mark(&mut self.writer, mark)
    }
}
