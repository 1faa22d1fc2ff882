//! Errors of the store. Each message says what failed, what that means for the content of the
//! store, and what can be done.

use super::id::CheckpointId;
use crate::facts::available_resources::free_bytes;
use sempa_proto::Tid;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOperation {
    Open,
    Begin,
    Add,
    Finish,
    List,
    Read,
    Unpack,
    Remove,
    Sweep,
    /// Recording that a job has ended, or has been restarted.
    Mark,
}

impl StoreOperation {
    fn failure_text(self) -> &'static str {
        match self {
            StoreOperation::Open => "cannot open the checkpoint store",
            StoreOperation::Begin => "cannot begin a checkpoint",
            StoreOperation::Add => "cannot add a task to a checkpoint",
            StoreOperation::Finish => "cannot finish a checkpoint",
            StoreOperation::List => "cannot list the checkpoints",
            StoreOperation::Read => "cannot read a checkpoint",
            StoreOperation::Unpack => "cannot unpack the images of a checkpoint",
            StoreOperation::Remove => "cannot remove a checkpoint",
            StoreOperation::Sweep => "cannot remove old checkpoints",
            StoreOperation::Mark => "cannot record in a checkpoint whether its job has ended",
        }
    }

    /// Returns what the failure means for the content of the store.
    fn consequence(self) -> &'static str {
        match self {
            StoreOperation::Open => "no checkpoint was read or changed",
            StoreOperation::Begin => "no checkpoint was begun; the existing ones are unchanged",
            StoreOperation::Add => {
                "nothing of this task was kept; the complete checkpoints are unchanged"
            }
            StoreOperation::Finish => "this checkpoint was removed; the earlier ones are unchanged",
            StoreOperation::List | StoreOperation::Read => "nothing was changed",
            StoreOperation::Mark => "it may be kept longer than needed",
            StoreOperation::Unpack => {
                "nothing was left in the target directory; the checkpoint is unchanged"
            }
            StoreOperation::Remove | StoreOperation::Sweep => {
                "the checkpoint is either complete or no longer listed; what remains of it is removed by the next sweep"
            }
        }
    }
}

impl fmt::Display for StoreOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.failure_text())
    }
}

#[derive(Debug, Error)]
pub enum StoreError {
    /// The directory cannot be used as a store.
    #[error(
        "cannot keep checkpoints in {path}: {why}; nothing was read or written. Name a directory to which only you \
         have access (mode 0700), or one that does not exist yet"
    )]
    UnusableDirectory { path: PathBuf, why: String },
    /// The key file cannot be used.
    #[error(
        "cannot use the key file {path}: {why}; nothing was read or written. It must be a file of 32 bytes that only \
         you can read (mode 0600), outside the store; if it does not exist, it is created"
    )]
    UnusableKey { path: PathBuf, why: String },
    /// The system reported an error.
    #[error("{operation}: {path}: {source}; {means}", means = operation.consequence())]
    Io {
        operation: StoreOperation,
        /// The file or directory that the operation accessed.
        path: PathBuf,
        source: io::Error,
    },
    /// The disk, or the quota of this user, is full.
    #[error(
        "{operation}: {path}: the disk is full{room}; {means}. Free space there, or remove checkpoints that are not \
         needed",
        room = space_text(*unwritten, *free), means = operation.consequence()
    )]
    DiskFull {
        operation: StoreOperation,
        /// The file that was being written.
        path: PathBuf,
        /// Largest number of bytes that were still to be written, if known.
        unwritten: Option<u64>,
        /// Free bytes of the file system, if known.
        free: Option<u64>,
    },
    /// The limits do not permit another checkpoint, because the existing ones may not be removed.
    #[error(
        "{operation}: in {dir} the newest checkpoints of other jobs, which are not removed automatically, are \
         {checkpoints} with {bytes} bytes, this one needs at least {needed} bytes, and the limits are \
         {checkpoints_max} checkpoints and {bytes_max} bytes; {means}. Remove checkpoints of jobs that are not needed \
         any more, or raise the limits",
        means = operation.consequence()
    )]
    LimitsExceeded {
        operation: StoreOperation,
        /// The directory of the store.
        dir: PathBuf,
        /// Size of the checkpoint; 1 if not known.
        needed: u64,
        /// Number of the newest checkpoints of other jobs.
        checkpoints: usize,
        /// Total size of these checkpoints.
        bytes: u64,
        checkpoints_max: usize,
        bytes_max: u64,
    },
    /// The checkpoint exceeds the size that the limits permit.
    #[error(
        "cannot add {tid} to a checkpoint: it exceeds the {bytes_max} bytes that the limits of the store leave for it \
         in addition to the newest checkpoints of other jobs; nothing of this task was kept, and the complete \
         checkpoints are unchanged. Raise the limit, or remove checkpoints that are not needed"
    )]
    CheckpointTooLarge {
        /// The task that was being added.
        tid: Tid,
        /// Largest size of the checkpoint.
        bytes_max: u64,
    },
    /// The image directory contains a file that is not a regular file, or is too large.
    #[error(
        "cannot add the images in {path} to a checkpoint: {why}; nothing of this task was kept"
    )]
    UnusableImages {
        /// The directory, or the file in it.
        path: PathBuf,
        why: String,
    },
    /// The task is already in the checkpoint.
    #[error("cannot add {0} to a checkpoint: it was added already, and is unchanged")]
    TaskExists(Tid),
    /// A limit of a checkpoint is exceeded.
    #[error(
        "{operation}: the number of {what} is {count}, and the limit is {max}; {means}",
        means = operation.consequence()
    )]
    TooMany {
        operation: StoreOperation,
        /// The limited quantity, in words.
        what: &'static str,
        count: u64,
        max: u64,
    },
    /// The checkpoint does not exist.
    #[error(
        "there is no complete checkpoint {0}: it was removed, or never finished; nothing was changed"
    )]
    NoCheckpoint(CheckpointId),
    /// The checkpoint to copy exists in this store.
    #[error(
        "the checkpoint {0} is in this store already, as the original or as a copy; nothing was changed"
    )]
    CheckpointExists(CheckpointId),
    /// The checkpoint has no such task.
    #[error("the checkpoint {id} has no task {tid}; nothing was unpacked")]
    NoTask { id: CheckpointId, tid: Tid },
    /// A file in the store that is not a checkpoint.
    #[error(
        "{0} is in the checkpoint store but is not a checkpoint; it was not touched. Move it elsewhere"
    )]
    ForeignFile(PathBuf),
    /// A file that was encrypted with another key.
    #[error(
        "{path} was encrypted with another key than that in {key}, so it can neither be read nor trusted; nothing of \
         it was used. Use the key file of the store in which it was made"
    )]
    OtherKey {
        /// The file that was being read.
        path: PathBuf,
        /// The key file of this store.
        key: PathBuf,
    },
    /// A file that was changed.
    #[error(
        "{path} is not as it was written: {why}. It is refused, because a changed checkpoint could execute any code, \
         and nothing of it was used. Use another checkpoint, and remove this one"
    )]
    Changed {
        path: PathBuf,
        /// How the change was detected.
        why: String,
    },
    /// The checkpoint is open for reading.
    #[error("the checkpoint {0} is being read, so it was not removed; try again later")]
    InUse(CheckpointId),
    /// Another process holds the lock of the store.
    #[error("{operation}: another process has kept {dir} locked for {seconds} s; {means}", means = operation.consequence())]
    Busy {
        operation: StoreOperation,
        /// The directory of the store.
        dir: PathBuf,
        /// How long this process waited.
        seconds: u64,
    },
}

fn space_text(unwritten: Option<u64>, free: Option<u64>) -> String {
    let free = free.map(|free| format!("{free} are free")).into_iter();
    let unwritten = unwritten
        .map(|unwritten| format!("up to {unwritten} bytes were still to be written"))
        .into_iter();
    let text = unwritten.chain(free).collect::<Vec<_>>().join(", ");
    if text.is_empty() {
        text
    } else {
        format!(" ({text})")
    }
}

/// Returns a function that converts an error of the system.
pub(super) fn io_error(
    operation: StoreOperation,
    path: &Path,
) -> impl FnOnce(io::Error) -> StoreError {
    move |source| write_error(operation, path, source, None)
}

/// Converts an error of the system. `unwritten` is the number of bytes that were still to be
/// written, if known.
pub(super) fn write_error(
    operation: StoreOperation,
    path: &Path,
    source: io::Error,
    unwritten: Option<u64>,
) -> StoreError {
    if !matches!(
        source.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    ) {
        return StoreError::Io {
            operation,
            path: path.to_path_buf(),
            source,
        };
    }
    // The file may not exist any more; its directory is on the same file system.
    let free = path.parent().and_then(|dir| free_bytes(dir).ok());
    StoreError::DiskFull {
        operation,
        path: path.to_path_buf(),
        unwritten,
        free,
    }
}
