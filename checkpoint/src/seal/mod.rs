//! Sealed images of tasks. The tasker of the system dumps and restores the tasks of all users as
//! root, and images are code that root's engine runs. The daemons that transport and store images
//! belong to users, who are not trusted. Therefore images leave the tasker only as a sealed stream:
//! without the site key nobody can create, read or change one.
//!
//! - [`SiteKeys`] are the keys of a site. All its hosts have the same key file, which only root can
//!   read.
//! - [`ImageSealer`] and [`seal_images`] write the files of a dump as one stream.
//! - [`unseal_images`] writes the files of a stream to an empty directory.
//! - [`SealContext`] says whose images they are and for what purpose. Images of another user,
//!   another task, or an earlier migration do not open.
//!
//! A stream begins with the head of `sealed_stream`, followed by the context: a length of
//! two bytes and the encoded context. Head and context are readable by everybody and authenticated
//! by each chunk. The encrypted content is a sequence of records (`Tag`).

mod context;
mod error;
mod key_file;
mod key_path;
mod sealer;
mod site_keys;
#[cfg(test)]
mod tests;
mod unsealer;

pub use context::{SealContext, USER_NAME_BYTES_MAX};
pub use error::{SealError, SiteKeyError};
pub use key_path::{SITE_KEY_VARIABLE, site_key_path};
pub use sealer::{ImageSealer, seal_images};
pub use site_keys::{KeyId, PREVIOUS_KEYS_MAX, SiteKeys};
pub use unsealer::{UnsealLimits, unseal_images};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::geteuid;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Magic number of sealed images. The last byte is the version of the format.
const MAGIC: [u8; 8] = *b"sempaim\x01";
/// Maximum length in bytes of an image's file name.
const NAME_BYTES_MAX: usize = 100;

/// The first byte of a record, which determines the rest of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    /// The end of the stream: number of files (u32), total length of the files (u64).
    End = 0,
    /// The start of a file: length of the name (u8), name.
    File = 1,
    /// Content of the file: length (u32), bytes.
    Data = 2,
    /// Zeros in the content of the file: length (u64).
    Zeros = 3,
    /// The end of the file: length of the file (u64).
    FileEnd = 4,
}

impl Tag {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::End,
            Self::File,
            Self::Data,
            Self::Zeros,
            Self::FileEnd,
        ]
        .into_iter()
        .find(|tag| *tag as u8 == byte)
    }
}

/// The size of the sealed images of one task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealedSize {
    /// Number of image files.
    pub files: usize,
    /// Total length of the files in bytes.
    pub image_bytes: u64,
    /// Length of the sealed stream in bytes.
    pub sealed_bytes: u64,
}

/// True if the name of an image is acceptable: letters, digits, `-`, `_` and `.`, not hidden.
fn is_image_name(name: &str) -> bool {
    let is_name_character =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !name.starts_with('.')
        && name.bytes().all(is_name_character)
}

/// Opens an image directory. Other users must not have access, so that they can neither replace
/// images nor read them.
fn open_image_dir(dir: &Path) -> Result<OwnedFd, SealError> {
    let unsafe_directory = |why: String| SealError::UnsafeDirectory {
        path: dir.to_path_buf(),
        why,
    };
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let dir_fd = open(dir, flags, Mode::empty())
        .map_err(|e| unsafe_directory(format!("it cannot be opened as a directory: {e}")))?;
    let metadata = fstat(&dir_fd).map_err(|e| unsafe_directory(e.to_string()))?;
    if metadata.st_uid != geteuid().as_raw() {
        return Err(unsafe_directory(format!(
            "it belongs to user {}",
            metadata.st_uid
        )));
    }
    let mode = metadata.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        return Err(unsafe_directory(format!(
            "other users have access (mode {mode:04o})"
        )));
    }
    Ok(dir_fd)
}
