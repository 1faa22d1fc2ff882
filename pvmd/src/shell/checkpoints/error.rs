//! Errors of the master's checkpoint store and of its settings.

use super::{CHECKPOINT_LIMIT_MAX, STORE_LIMIT_BYTES_MIN};
use checkpoint::store::{InvalidCheckpointId, StoreError};
use pvmd_machine::COPIES_MAX;
use sempa_proto::checkpoint::{MetaError, RestartFailure, StoreFailure};
use sempa_proto::frame::FrameError;
use thiserror::Error;

/// Reason why the settings of the store are invalid. Nothing was read or written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum StoreSettingsError {
    #[error("there is no directory for checkpoints: set {variable} or HOME to an absolute path")]
    NoLocation { variable: &'static str },
    #[error(
        "SEMPA_STORE_SETS={text:?} is not a number of checkpoints from 1 to {}: no checkpoint is written until this is corrected",
        CHECKPOINT_LIMIT_MAX
    )]
    InvalidCheckpointLimit { text: String },
    #[error(
        "SEMPA_STORE_BYTES={text:?} is not a number of bytes of at least {}: no checkpoint is written until this is corrected",
        STORE_LIMIT_BYTES_MIN
    )]
    InvalidSizeLimit { text: String },
    #[error(
        "SEMPA_STORE_COPIES={text:?} is neither a number of hosts from 0 to {} nor a list of at most as many host names \
         separated by commas: no checkpoint is written until this is corrected",
        COPIES_MAX
    )]
    InvalidCopies { text: String },
}

/// Reason why an operation on the store failed. The text of a [`StoreError`] describes the
/// resulting state of the store.
#[derive(Debug, Error)]
pub(crate) enum CheckpointError {
    /// The settings are invalid. The store was neither opened nor created.
    #[error(transparent)]
    Settings(StoreSettingsError),
    /// The store could not be opened. No checkpoint was read or written.
    #[error(transparent)]
    OpenStore(StoreError),
    /// The checkpoints could not be listed. Nothing has changed.
    #[error(transparent)]
    List(StoreError),
    /// The checkpoint could not be begun. No draft was created.
    #[error(transparent)]
    Begin(StoreError),
    /// The checkpoint was abandoned before this operation. Nothing was added to the store.
    #[error("the checkpoint was abandoned")]
    Abandoned,
    /// The images of a task were not added. The checkpoint stays incomplete.
    #[error(transparent)]
    AddPart(StoreError),
    /// The checkpoint's metadata could not be encoded. The checkpoint was removed.
    #[error(transparent)]
    EncodeMeta(FrameError),
    /// The checkpoint was not completed, and was removed.
    #[error(transparent)]
    Finish(StoreError),
    /// The text names no checkpoint. The store was not read.
    #[error(transparent)]
    InvalidName(InvalidCheckpointId),
    /// The checkpoint could not be opened. Nothing has changed.
    #[error(transparent)]
    OpenCheckpoint(StoreError),
    /// The metadata of the checkpoint could not be decoded. Nothing has changed.
    #[error("{name} cannot be read: {source}")]
    DecodeMeta { name: String, source: MetaError },
    /// The claim of a job could not be read or written. It is unchanged.
    #[error(transparent)]
    Claim(StoreError),
    /// The claim of a job could not be decoded. It is unchanged.
    #[error(
        "the record that says where the job runs cannot be read: {0}; nothing was changed. If the job does not run \
         anywhere, remove its file claim-… from the store"
    )]
    DecodeClaim(FrameError),
    /// A checkpoint that must not be used was not removed. Other checkpoints that must not be used
    /// may have been removed.
    #[error(transparent)]
    Discard(StoreError),
    /// The mark that a job has ended, or that it runs again, was not written to all checkpoints of
    /// the job.
    #[error(transparent)]
    MarkJobEnd(StoreError),
    /// Checkpoints that exceed the limits of the store were not all removed.
    #[error(transparent)]
    RemoveExpired(StoreError),
}

/// The state machine forwards the text of the error.
impl From<CheckpointError> for StoreFailure {
    fn from(error: CheckpointError) -> Self {
        Self(error.to_string())
    }
}

impl From<CheckpointError> for RestartFailure {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::DecodeMeta {
                source: MetaError::OtherVersion(version),
                ..
            } => Self::OtherVersion(version),
            error => Self::Store(error.into()),
        }
    }
}
