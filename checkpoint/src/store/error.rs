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
    /// Recording that a checkpoint is damaged, or is not.
    MarkDamage,
    /// Reading or changing the claim of a job.
    Claim,
}

impl StoreOperation {
    fn failure_text(self) -> &'static str {
        match self {
            Self::Open => "cannot open the checkpoint store",
            Self::Begin => "cannot begin a checkpoint",
            Self::Add => "cannot add a task to a checkpoint",
            Self::Finish => "cannot finish a checkpoint",
            Self::List => "cannot list the checkpoints",
            Self::Read => "cannot read a checkpoint",
            Self::Unpack => "cannot unpack the images of a checkpoint",
            Self::Remove => "cannot remove a checkpoint",
            Self::Sweep => "cannot remove old checkpoints",
            Self::Mark => "cannot record in a checkpoint whether its job has ended",
            Self::MarkDamage => "cannot record in a checkpoint whether it is damaged",
            Self::Claim => "cannot read or write which virtual machine runs a job",
        }
    }

    /// Returns the text that states what the failure means for the content of the store.
    fn consequence(self) -> &'static str {
        match self {
            Self::Open => "no checkpoint was read or changed",
            Self::Begin => "no checkpoint was begun; the existing ones are unchanged",
            Self::Add => "nothing of this task was kept; the complete checkpoints are unchanged",
            Self::Finish => "this checkpoint was removed; the earlier ones are unchanged",
            Self::List | Self::Read => "nothing was changed",
            Self::Mark => "it may be kept longer than needed",
            Self::MarkDamage => "it may be read again, and is then refused again",
            Self::Claim => "the checkpoints are unchanged",
            Self::Unpack => "nothing was left in the target directory; the checkpoint is unchanged",
            Self::Remove | Self::Sweep => {
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
        "{operation}: {path}: the disk is full{room}; {means}. Free space there, or remove checkpoints that are not \
         needed",
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
    /// The limits do not permit another checkpoint, because the existing checkpoints may not be
    /// removed.
    #[error(
        "{operation}: in {dir} the newest checkpoints of other jobs, which are not removed automatically, are \
         {checkpoints} with {bytes} bytes, this one needs at least {needed} bytes, and the limits are \
         {checkpoints_max} checkpoints and {bytes_max} bytes; {means}. Remove checkpoints of jobs that are not needed \
         any more, or raise the limits",
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
        "cannot add {tid} to a checkpoint: it exceeds the {bytes_max} bytes that the limits of the store leave for it \
         in addition to the newest checkpoints of other jobs; nothing of this task was kept, and the complete \
         checkpoints are unchanged. Raise the limit, or remove checkpoints that are not needed"
    )]
    CheckpointTooLarge {
        /// The task whose images were being added.
        tid: Tid,
        /// Maximum size in bytes of the checkpoint.
        bytes_max: u64,
    },
    /// The image directory contains a file that is not a regular file, or is too large.
    #[error(
        "cannot add the images in {path} to a checkpoint: {why}; nothing of this task was kept"
    )]
    UnusableImages {
        /// The image directory, or the unusable file in it.
        path: PathBuf,
        why: String,
    },
    /// The task is already in the checkpoint, so its images cannot be added.
    #[error("cannot add {0} to a checkpoint: it was added already, and is unchanged")]
    TaskExists(Tid),
    /// A maximum number of tasks or bytes in a checkpoint is exceeded.
    #[error("{operation}: the number of {what} is {count}, and the limit is {max}; {means}", means = operation.consequence())]
    TooMany {
        operation: StoreOperation,
        /// The limited quantity, in words.
        what: &'static str,
        count: u64,
        max: u64,
    },
    /// No complete checkpoint with this name exists in the store.
    #[error(
        "there is no complete checkpoint {0}: it was removed, or never finished; nothing was changed"
    )]
    NoCheckpoint(CheckpointId),
    /// A checkpoint cannot be copied to this store because the store already contains it.
    #[error(
        "the checkpoint {0} is in this store already, as the original or as a copy; nothing was changed"
    )]
    CheckpointExists(CheckpointId),
    /// The checkpoint does not contain images of this task.
    #[error("the checkpoint {id} has no task {tid}; nothing was unpacked")]
    NoTask { id: CheckpointId, tid: Tid },
    /// The store's directory contains a file that is not part of a checkpoint.
    #[error(
        "{0} is in the checkpoint store but is not a checkpoint; it was not touched. Move it elsewhere"
    )]
    ForeignFile(PathBuf),
    /// A file of a checkpoint was encrypted with another key.
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
    /// A file of a checkpoint was changed after it was written.
    #[error(
        "{path} is not as it was written: {why}. It is refused, because a changed checkpoint could execute any code, \
         and nothing of it was used. Use another checkpoint, and remove this one"
    )]
    Changed {
        path: PathBuf,
        /// How the change was detected.
        why: String,
    },
    /// The checkpoint cannot be removed because it is open for reading.
    #[error("the checkpoint {0} is being read, so it was not removed; try again later")]
    InUse(CheckpointId),
    /// Another process has held the lock of the store for longer than this process waits.
    #[error("{operation}: another process has kept {dir} locked for {seconds} s; {means}", means = operation.consequence())]
    Busy {
        operation: StoreOperation,
        /// Path of the store's directory.
        dir: PathBuf,
        /// Time limit in seconds of the wait for the lock.
        seconds: u64,
    },
}

impl StoreError {
    /// True if the checkpoint is not as it was written: reading it again fails again, while other
    /// checkpoints of the store may be intact.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Changed { .. })
    }

    /// True if the store has no checkpoint with this name.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::NoCheckpoint(_))
    }
}

fn space_text(unwritten_bytes: Option<u64>, free_space: Option<u64>) -> String {
    let free_space = free_space
        .map(|free_space| format!("{free_space} are free"))
        .into_iter();
    let unwritten_bytes = unwritten_bytes
        .map(|unwritten_bytes| format!("up to {unwritten_bytes} bytes were still to be written"))
        .into_iter();
    let text = unwritten_bytes
        .chain(free_space)
        .collect::<Vec<_>>()
        .join(", ");
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

/// Returns the error for a failed write: the I/O error with the operation and the path. If the disk
/// is full, the returned error also contains `unwritten_bytes`, the number of bytes that were still
/// to be written, and the free space.
pub(super) fn write_error(
    operation: StoreOperation,
    path: &Path,
    source: io::Error,
    unwritten_bytes: Option<u64>,
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
    // The file may no longer exist, but its directory is on the same file system.
    let free_space = path.parent().and_then(|dir| free_bytes(dir).ok());
    StoreError::DiskFull {
        operation,
        path: path.to_path_buf(),
        unwritten: unwritten_bytes,
        free: free_space,
    }
}
