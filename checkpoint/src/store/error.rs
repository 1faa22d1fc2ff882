//! Errors of the store. Each message states what failed, what the failure means for the content of
//! the store, and what the user can do.

use super::id::CheckpointId;
use crate::facts::available_resources::free_bytes;
use sempa_proto::Tid;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The store operation that failed, for error messages.
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
            StoreOperation::Begin => "cannot begin a set of checkpoints",
            StoreOperation::Add => "cannot add a task to a set of checkpoints",
            StoreOperation::Finish => "cannot finish a set of checkpoints",
            StoreOperation::List => "cannot look at the sets of checkpoints",
            StoreOperation::Read => "cannot read a set of checkpoints",
            StoreOperation::Unpack => "cannot unpack a checkpoint",
            StoreOperation::Remove => "cannot remove a set of checkpoints",
            StoreOperation::Sweep => "cannot remove superfluous sets of checkpoints",
            StoreOperation::Mark => "cannot note in a set of checkpoints whether its job has ended",
        }
    }

    /// Returns the text that states what the failure means for the content of the store.
    fn consequence(self) -> &'static str {
        match self {
            StoreOperation::Open => "no set was read or changed",
            StoreOperation::Begin => "no set was begun; those that are there are as they were",
            StoreOperation::Add => {
                "nothing of this task was kept; the sets that are complete are as they were"
            }
            StoreOperation::Finish => {
                "this set was removed; those that were complete before are as they were"
            }
            StoreOperation::List | StoreOperation::Read => "nothing was changed",
            StoreOperation::Mark => "it may be kept longer than it is needed",
            StoreOperation::Unpack => "nothing was left where it was to go; the set is as it was",
            StoreOperation::Remove | StoreOperation::Sweep => {
                "a set that was to go is either whole or no longer shown; what is left of it goes with the next sweep"
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
        "cannot keep checkpoints in {path}: {why}; nothing was read or written. Name a directory that is yours alone \
         (mode 0700), or one that is not there yet"
    )]
    UnusableDirectory { path: PathBuf, why: String },
    /// The key file cannot be used.
    #[error(
        "cannot use the key file {path}: {why}; nothing was read or written. It has to be a file of 32 bytes that only \
         you can read (mode 0600), outside the store; where there is none, one is made"
    )]
    UnusableKey { path: PathBuf, why: String },
    /// A file operation failed with an error of the system.
    #[error("{operation}: {path}: {source}; {means}", means = operation.consequence())]
    Io {
        operation: StoreOperation,
        /// The file or directory that the operation accessed.
        path: PathBuf,
        source: io::Error,
    },
    /// The disk, or the quota of this user, is full.
    #[error(
        "{operation}: {path}: the disk is full{room}; {means}. Make room there, or remove sets that are not needed",
        room = space_text(*unwritten, *free), means = operation.consequence()
    )]
    DiskFull {
        operation: StoreOperation,
        /// The file that was being written.
        path: PathBuf,
        /// Maximum number of bytes that were still to be written; `None` if unknown.
        unwritten: Option<u64>,
        /// Number of free bytes of the file system; `None` if unknown.
        free: Option<u64>,
    },
    /// The limits do not permit another checkpoint, because the existing ones may not be removed.
    #[error(
        "{operation}: in {dir} the newest sets of other jobs, which are not removed by themselves, are {checkpoints} with {bytes} bytes, \
         this one needs {needed} bytes at least, and the limits are {checkpoints_max} sets and {bytes_max} bytes; {means}. Remove \
         sets of jobs that are not needed any more, or raise the limits",
        means = operation.consequence()
    )]
    LimitsExceeded {
        operation: StoreOperation,
        /// Path of the store's directory.
        dir: PathBuf,
        /// Size in bytes of the new checkpoint; 1 if unknown.
        needed: u64,
        /// Number of newest checkpoints of other jobs, which may not be removed.
        checkpoints: usize,
        /// Total size in bytes of the checkpoints that may not be removed.
        bytes: u64,
        checkpoints_max: usize,
        bytes_max: u64,
    },
    /// The checkpoint exceeds the size that the store's limits permit.
    #[error(
        "cannot add {tid} to a set of checkpoints: the set has more than the {bytes_max} bytes that the limits of the store \
         leave for it beside the newest sets of other jobs; nothing of this task was kept, and the sets that are \
         complete are as they were. Raise the limit, or remove sets that are not needed"
    )]
    CheckpointTooLarge {
        /// The task whose images were being added.
        tid: Tid,
        /// Maximum size in bytes of the checkpoint.
        bytes_max: u64,
    },
    /// The image directory contains a file that is not a regular file, or is too large.
    #[error(
        "cannot add the images in {path} to a set of checkpoints: {why}; nothing of this task was kept"
    )]
    UnusableImages {
        /// The image directory, or the unusable file in it.
        path: PathBuf,
        why: String,
    },
    /// The task is already in the checkpoint, so its images cannot be added.
    #[error(
        "cannot add {0} to a set of checkpoints: it is in it already, and what is in it stays as it is"
    )]
    TaskExists(Tid),
    /// A maximum number of tasks or bytes in a checkpoint is exceeded.
    #[error("{operation}: {what} are {count}, and at most {max} are possible; {means}", means = operation.consequence())]
    TooMany {
        operation: StoreOperation,
        /// The limited quantity, in words.
        what: &'static str,
        count: u64,
        max: u64,
    },
    /// No complete checkpoint with this name exists in the store.
    #[error(
        "there is no complete set of checkpoints {0}: it was removed, or never finished; nothing was changed"
    )]
    NoCheckpoint(CheckpointId),
    /// A checkpoint cannot be copied to this store because the store already contains it.
    #[error(
        "the set of checkpoints {0} is in this store already: it is the store that the set was made in, or has a copy of it; nothing \
         was changed"
    )]
    CheckpointExists(CheckpointId),
    /// The checkpoint does not contain images of this task.
    #[error("the set of checkpoints {id} has no task {tid}; nothing was unpacked")]
    NoTask { id: CheckpointId, tid: Tid },
    /// The store's directory contains a file that is not part of a checkpoint.
    #[error(
        "{0} is in the checkpoint store and is not the name of a set; it is left alone. Move it elsewhere"
    )]
    ForeignFile(PathBuf),
    /// A file of a checkpoint was encrypted with another key.
    #[error(
        "{path} was sealed with another key than that in {key}, so it can neither be read nor be trusted; nothing of it was \
         used. Bring the key file of the store in which it was made"
    )]
    OtherKey {
        /// The file that was being read.
        path: PathBuf,
        /// The key file of this store.
        key: PathBuf,
    },
    /// A file of a checkpoint was changed after it was written.
    #[error(
        "{path} is not as it was written: {why}. It is refused, for a changed checkpoint could run anything, and nothing \
         of it was used. Go back to another set, and remove this one"
    )]
    Changed {
        path: PathBuf,
        /// How the change was detected.
        why: String,
    },
    /// The checkpoint cannot be removed because it is open for reading.
    #[error(
        "the set of checkpoints {0} is being read, so it was not removed; try again when that has ended"
    )]
    InUse(CheckpointId),
    /// Another process holds the lock of the store for too long.
    #[error("{operation}: another process has kept {dir} locked for {seconds} s; {means}", means = operation.consequence())]
    Busy {
        operation: StoreOperation,
        /// Path of the store's directory.
        dir: PathBuf,
        /// Time in seconds for which this process waited for the lock.
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

/// Returns a function that adds the operation and the path to an I/O error.
pub(super) fn io_error(
    operation: StoreOperation,
    path: &Path,
) -> impl FnOnce(io::Error) -> StoreError {
    move |source| write_error(operation, path, source, None)
}

/// Adds the operation and the path to an I/O error. If the disk is full, also adds `unwritten`, the
/// number of bytes that were still to be written, and the free space.
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
    // The file may no longer exist; its directory is on the same file system.
    let free = path.parent().and_then(|dir| free_bytes(dir).ok());
    StoreError::DiskFull {
        operation,
        path: path.to_path_buf(),
        unwritten,
        free,
    }
}
