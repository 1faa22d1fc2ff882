//! Errors and notices of the journal, as sentences for the user.

use super::format::{FORMAT_VERSION, RunId};
use super::record::Record;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// A place in a file that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    /// Bytes from the begin of the file.
    pub(super) offset: u64,
    pub(super) what: &'static str,
}

/// The reason why a journal cannot be opened. No file was changed, unless the variant is `Io`: an
/// operation that failed may have left a temporary file, which the next open removes.
#[derive(Debug, Error)]
pub enum OpenError {
    #[error(
        "The run in {} belongs to another master: {holder}. Two masters would hand out the same \
         tasks. Wait for its end, end it, or use another folder.", .dir.display()
    )]
    Locked { dir: PathBuf, holder: String },
    #[error(
        "The folder {} {why}, so other users could change the journal of the run. Nothing was \
         written. Use a folder of your own that only you can write to.", .dir.display()
    )]
    UnsafeFolder { dir: PathBuf, why: &'static str },
    #[error(
        "{} is not part of a journal of a master-worker run. It was not changed. Use another folder \
         for the run, or move this file away.", .file.display()
    )]
    NotAJournal { file: PathBuf },
    #[error(
        "{} has version {found} of the journal's format; this program reads version \
         {FORMAT_VERSION}. The run is complete on the disk. Go on with the version of Sempa that \
         has written the run, or use another folder for a new run.", .file.display()
    )]
    FormatVersion { file: PathBuf, found: u32 },
    #[error(
        "The run in {} was begun by {found}; this program is {expected}. The run is complete on \
         the disk. Go on with {found}, or use another folder for a new run.", .dir.display()
    )]
    OtherProgram {
        dir: PathBuf,
        found: String,
        expected: String,
    },
    #[error(
        "The folder {} has the run {found}; the run {expected} was to go on. The run {found} is \
         complete on the disk. Give the folder of the run {expected}.", .dir.display()
    )]
    OtherRun {
        dir: PathBuf,
        found: RunId,
        expected: RunId,
    },
    #[error(
        "The folder {} has no journal; the run {expected} was to go on. Give the folder of that \
         run, or begin a new run.", .dir.display()
    )]
    NoSuchRun { dir: PathBuf, expected: RunId },
    #[error(
        "The journal of the run is damaged: in {} at byte {offset}, {what}. The run cannot go on \
         without a loss, so nothing was changed. Restore the folder from a copy, or use another \
         folder for a new run.", .file.display()
    )]
    Corrupt {
        file: PathBuf,
        offset: u64,
        what: &'static str,
    },
    #[error(
        "The journal of the run is incomplete: {} is missing. Nothing was changed. Restore this \
         file from a copy, or use another folder for a new run.", .file.display()
    )]
    MissingFile { file: PathBuf },
    #[error(
        "The journal in {} cannot be opened: {action}: {cause}. What was durable is still on the \
         disk. Remove the cause and start the program again.", .dir.display()
    )]
    Io {
        dir: PathBuf,
        action: &'static str,
        cause: io::Error,
    },
}

/// The reason why a record was not appended. The record is returned.
#[derive(Debug, Error)]
pub enum AppendError {
    #[error("the records that are not on the disk yet exceed the limit of the journal's queue")]
    Full(Box<Record>),
    #[error("a record of {bytes} bytes exceeds the {limit} bytes that the journal accepts")]
    TooLarge {
        record: Box<Record>,
        bytes: usize,
        limit: usize,
    },
    #[error("the thread that writes the journal has ended")]
    Stopped(Box<Record>),
}

/// The reason why a snapshot was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SnapshotRefused {
    #[error("the previous snapshot is not complete yet")]
    InProgress,
    #[error("the driver's state has {bytes} bytes; the journal accepts {limit}")]
    TooLarge { bytes: usize, limit: usize },
    #[error("the thread that writes the journal has ended")]
    Stopped,
}

/// The reason why the files of a finished run are still there.
#[derive(Debug, Error)]
pub enum FinishError {
    #[error(
        "The end of the run could not be written to {} within {} s. All results were delivered; \
         the next master in this folder finds the run without open tasks.",
        .dir.display(), .patience.as_secs()
    )]
    NotDurable { dir: PathBuf, patience: Duration },
    #[error(
        "The run is complete, but its files in {} cannot be removed: {cause}. Remove the folder, \
         or leave it: the next master in this folder removes them.", .dir.display()
    )]
    Files { dir: PathBuf, cause: io::Error },
}

/// What happens to the journal while the run goes on.
#[derive(Debug)]
pub enum Notice {
    /// Records cannot be written. The journal tries again and reports this once.
    WritesFail {
        dir: PathBuf,
        cause: io::Error,
        /// Time until the next attempt; it grows up to `retry_max` of the settings.
        retry: Duration,
    },
    /// All records that were waiting are on the disk again.
    WritesResumed,
    /// The journal was closed while writes failed.
    RecordsLost {
        dir: PathBuf,
        records: u64,
    },
    SnapshotWritten {
        number: u64,
        tasks: u64,
        bytes: u64,
    },
    /// The log grows until the next snapshot succeeds.
    SnapshotFailed {
        dir: PathBuf,
        cause: io::Error,
    },
    /// A snapshot is complete, but older files are still there. The next snapshot removes them.
    OldFilesKept {
        dir: PathBuf,
        cause: io::Error,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WritesFail { dir, cause, retry } => write!(
                f,
                "The journal in {} cannot be written: {cause}. Results stay in memory and count \
                 only when they are on the disk; the next attempt is in {} ms. If the disk is \
                 full, free some space.",
                dir.display(),
                retry.as_millis()
            ),
            Self::WritesResumed => f.write_str("The journal is written again; nothing was lost."),
            Self::RecordsLost { dir, records } => write!(
                f,
                "The journal in {} was closed before {records} records could be written. The next \
                 master in this folder repeats the tasks whose results they were.",
                dir.display()
            ),
            Self::SnapshotWritten {
                number,
                tasks,
                bytes,
            } => write!(
                f,
                "The journal's snapshot {number} has {tasks} open tasks and {bytes} bytes."
            ),
            Self::SnapshotFailed { dir, cause } => write!(
                f,
                "A snapshot in {} cannot be written: {cause}. Nothing is lost; the log grows until \
                 a snapshot succeeds.",
                dir.display()
            ),
            Self::OldFilesKept { dir, cause } => write!(
                f,
                "Old files of the journal in {} cannot be removed: {cause}. The next snapshot \
                 tries again.",
                dir.display()
            ),
        }
    }
}
