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

/// The user and the task of sealed images. The context is not secret. The seal authenticates the
/// context: images open only in the context in which they were sealed. There is no nonce against a
/// replay, because users may restart their old checkpoints, and an image gives no right that the
/// user has lost since: each restore verifies the processes by the present accounts and files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealContext {
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
        write!(f, "task {tid} of user {user_name} (user id {uid})")
    }
}
