//! The session file: what a member outside the virtual machine needs to reach and trust the broker,
//! and to prove that it belongs to the session. Only its owner may read it.

use sempa_broker_session::Role;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Largest size of a session file.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Reason why a session file cannot be used.
#[derive(Debug, Error)]
pub enum SessionFileError {
    #[error("the session file {} cannot be {action}: {source}", path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        source: std::io::Error,
    },
    #[error(
        "the session file {} was not used, because others may read it (mode {mode:o}); if nobody has read it, run: \
         chmod 600 {}", path.display(), path.display()
    )]
    Readable { path: PathBuf, mode: u32 },
    #[error(
        "the session file {} was not used, because it belongs to user {owner}; copy it as the user of this program",
        path.display()
    )]
    Foreign { path: PathBuf, owner: u32 },
    #[error(
        "{} is not a session file of this version ({reason}); write a new one with 'pvm-broker secret'",
        path.display()
    )]
    Malformed { path: PathBuf, reason: String },
}

/// Secret of a session for one role.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionFile {
    pub session: String,
    pub role: Role,
    /// Addresses of the broker as `host:port`; a member tries them in order.
    pub addresses: Vec<String>,
    /// SHA-256 of the broker's certificate, in hexadecimal digits.
    pub fingerprint: String,
    pub secret: Secret,
}

impl SessionFile {
    /// Reads a session file that belongs to the user and that nobody else may read.
    ///
    /// # Errors
    /// See [`SessionFileError`].
    pub fn read(path: &Path) -> Result<Self, SessionFileError> {
        let io_error = |source| SessionFileError::Io {
            path: path.to_path_buf(),
            action: "read",
            source,
        };
        let file = File::open(path).map_err(io_error)?;
        let metadata = file.metadata().map_err(io_error)?;
        let path = path.to_path_buf();
        if metadata.mode() & 0o077 != 0 {
            let mode = metadata.mode() & 0o777;
            return Err(SessionFileError::Readable { path, mode });
        }
        if metadata.uid() != nix::unistd::geteuid().as_raw() {
            let owner = metadata.uid();
            return Err(SessionFileError::Foreign { path, owner });
        }
        let mut text = String::new();
        file.take(FILE_BYTES_MAX)
            .read_to_string(&mut text)
            .map_err(io_error)?;
        serde_json::from_str(&text).map_err(|error| SessionFileError::Malformed {
            path,
            reason: error.to_string(),
        })
    }

    /// Writes the file so that only the user may read it; replaces an earlier file in one step.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), SessionFileError> {
        let io_error = |source| SessionFileError::Io {
            path: path.to_path_buf(),
            action: "written",
            source,
        };
        let text = serde_json::to_string_pretty(self).map_err(|error| io_error(error.into()))?;
        write_private(path, text.as_bytes()).map_err(io_error)
    }
}

/// Writes a file with mode 0600 and replaces an earlier file in one step.
///
/// # Errors
/// The file cannot be written.
pub fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut temporary_name = path.file_name().unwrap_or_default().to_os_string();
    temporary_name.push(format!(".new{}", std::process::id()));
    let temporary_path = path.with_file_name(temporary_name);
    let _ = fs::remove_file(&temporary_path);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary_path)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary_path, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn example() -> SessionFile {
        SessionFile {
            session: "search".into(),
            role: Role::Worker,
            addresses: vec!["h1:4000".into()],
            fingerprint: "00".into(),
            secret: Secret("hush".into()),
        }
    }

    /// A file is read back as written, with mode 0600, and its secret is never printed.
    #[test]
    fn written_files_are_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("search.json");
        example().write(&path).expect("written");
        assert_eq!(SessionFile::read(&path).expect("read"), example());
        let mode = path.metadata().expect("exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(!format!("{:?}", example()).contains("hush"));
    }

    /// A file that others may read is refused.
    #[test]
    fn readable_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("search.json");
        example().write(&path).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("mode");
        let refusal = SessionFile::read(&path).expect_err("others may read it");
        assert!(matches!(
            refusal,
            SessionFileError::Readable { mode: 0o640, .. }
        ));
    }
}
