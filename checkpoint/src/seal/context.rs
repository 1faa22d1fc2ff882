//! The context of sealed images.

use super::error::SealError;
use sempa_proto::Tid;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum length of a user name in bytes. Linux programs accept 32 bytes; directories of large
/// sites have longer names.
pub const USER_NAME_BYTES_MAX: usize = 256;
/// Maximum length in bytes of an encoded context.
pub(super) const CONTEXT_BYTES_MAX: usize = 512;

/// The purpose of sealed images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SealPurpose {
    /// One migration. The target chooses a random nonce when it accepts the migration, and opens
    /// images with this nonce only once. Therefore the images of an earlier migration do not open.
    Migration { nonce: [u8; 16] },
    /// A checkpoint of a job. There is no nonce, because users may restart their old checkpoints.
    Checkpoint,
}

/// The user and the task of sealed images, and the purpose of the seal. The context is not secret.
/// The seal authenticates the context: images open only in the context in which they were sealed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealContext {
    pub purpose: SealPurpose,
    /// User id of the task's owner. User id and name must agree between the hosts, because the
    /// images contain the id, and access to files depends on the id.
    pub uid: u32,
    /// User name of the task's owner, at most [`USER_NAME_BYTES_MAX`] bytes.
    pub user_name: String,
    pub tid: Tid,
}

impl SealContext {
    /// Encodes the context. Different contexts have different encodings.
    pub(super) fn encode(&self) -> Result<Vec<u8>, SealError> {
        if self.user_name.len() > USER_NAME_BYTES_MAX {
            return Err(SealError::UserNameTooLong {
                bytes: self.user_name.len(),
            });
        }
        postcard::to_stdvec(self).map_err(|e| SealError::Changed(e.to_string()))
    }

    /// Checks that a stream with the encoded context `found` was sealed in this context. The
    /// stream is not authenticated yet: an attacker may have written `found`.
    pub(super) fn check_equal(&self, encoded: &[u8], found: &[u8]) -> Result<(), SealError> {
        if encoded == found {
            return Ok(());
        }
        match postcard::from_bytes::<Self>(found) {
            Ok(found) if found != *self && found.user_name.len() <= USER_NAME_BYTES_MAX => {
                Err(SealError::OtherContext {
                    found: Box::new(found),
                    expected: Box::new(self.clone()),
                })
            }
            _ => Err(SealError::Changed("its context is not valid".into())),
        }
    }
}

impl fmt::Display for SealContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (user_name, uid, tid) = (self.user_name.escape_debug(), self.uid, self.tid);
        match self.purpose {
            SealPurpose::Migration { nonce } => {
                let nonce = u128::from_be_bytes(nonce);
                write!(f, "migration {nonce:032x}")?;
            }
            SealPurpose::Checkpoint => write!(f, "a checkpoint")?,
        }
        write!(f, " of task {tid} of user {user_name} (user id {uid})")
    }
}
