//! Errors of site keys and of sealed images.

use super::context::{SealContext, USER_NAME_BYTES_MAX};
use super::site_keys::{KeyId, PREVIOUS_KEYS_MAX};
use crate::sealed_stream::DecryptError;
use sempa_proto::migration::Failure;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// The reason why a site key cannot be used or changed. The key file is unchanged.
#[derive(Debug, Error)]
pub enum SiteKeyError {
    #[error(
        "there is no site key {}: create one on one host with `pvm-admin site-key create`, and copy this \
         file to all hosts of the site", .path.display()
    )]
    Missing { path: PathBuf },
    #[error(
        "the site key {} is not used, because it {why}: only root may have access (`chown root:root FILE`, \
         `chmod 600 FILE`); if another user may have read the key, replace it on all hosts \
         (`pvm-admin site-key rotate`)", .path.display()
    )]
    AccessibleKey { path: PathBuf, why: String },
    #[error(
        "the site key {} is not used, because the directory {} {why}: only root may change the \
         directories above the key (`chown root DIR`, `chmod go-w DIR`)",
        .path.display(), .dir.display()
    )]
    AccessibleDirectory {
        path: PathBuf,
        dir: PathBuf,
        why: String,
    },
    #[error(
        "the site key {} is not valid: {why}; copy the file of another host of the site, or remove the \
         file and create a new key with `pvm-admin site-key create`", .path.display()
    )]
    Invalid { path: PathBuf, why: String },
    #[error(
        "there is already a site key {}: replace it with `pvm-admin site-key rotate`, which keeps \
         existing checkpoints readable", .path.display()
    )]
    Exists { path: PathBuf },
    #[error(
        "the site key {} already has {PREVIOUS_KEYS_MAX} previous keys, the limit: forget these with \
         `pvm-admin site-key forget-previous`; checkpoints that they sealed are lost", .path.display()
    )]
    TooManyPreviousKeys { path: PathBuf },
    #[error("cannot {action} the site key {}: {cause}", .path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        cause: io::Error,
    },
}

/// The reason why images were not sealed or not unsealed. After a failure to unseal, the directory
/// is empty.
#[derive(Debug, Error)]
pub enum SealError {
    #[error(
        "the directory of images {} is not used, because {why}: only the user of this process may have \
         access", .path.display()
    )]
    UnsafeDirectory { path: PathBuf, why: String },
    #[error("the directory for images {} is not empty", .path.display())]
    DirectoryNotEmpty { path: PathBuf },
    #[error("the image {name:?} cannot be sealed: {why}")]
    UnsuitableImage { name: String, why: String },
    #[error("cannot write the sealed images: {0}")]
    WriteStream(io::Error),
    #[error("cannot read the sealed images: {0}")]
    ReadStream(io::Error),
    #[error("cannot write the image {name}: {cause}")]
    WriteImage { name: String, cause: io::Error },
    #[error("the images were not sealed completely, because an earlier image could not be sealed")]
    Incomplete,
    #[error("the user name has {bytes} bytes; sealed images support {USER_NAME_BYTES_MAX} bytes")]
    UserNameTooLong { bytes: usize },
    #[error(
        "the images are sealed with the site key {found}, and this host does not have this key (its \
         current key is {current}): copy the same site key file to all hosts of the site"
    )]
    OtherKey { found: KeyId, current: KeyId },
    #[error("the images are sealed for {found}, and not for {expected}")]
    OtherContext {
        found: Box<SealContext>,
        expected: Box<SealContext>,
    },
    #[error("the sealed images were changed or are damaged: {0}")]
    Changed(String),
    #[error("the sealed images exceed the limit of {limit} {unit}")]
    LimitExceeded { limit: u64, unit: &'static str },
}

impl From<DecryptError> for SealError {
    fn from(error: DecryptError) -> Self {
        match error {
            DecryptError::Io(cause) => Self::ReadStream(cause),
            DecryptError::OtherKey => Self::Changed("it names another key".into()),
            DecryptError::Changed(why) => Self::Changed(why),
        }
    }
}

impl From<SealError> for Failure {
    fn from(error: SealError) -> Self {
        let text = error.to_string();
        match error {
            SealError::OtherKey { .. }
            | SealError::OtherContext { .. }
            | SealError::Changed(_)
            | SealError::LimitExceeded { .. } => Self::Images(text),
            _ => Self::Io(text),
        }
    }
}
