//! Errors of the Rust API. The text of each error is a sentence for the user, also in the form
//! `{:?}`, because a program whose `main` returns an error prints this form.

use sempa_proto::PvmError;
use sempa_proto::runtime_paths::VmNameError;
use sempa_proto::task::{MigrationError, Reply};
use std::fmt;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Reason why this process could not enroll as a task. Before the error is returned, all
/// descriptors and threads of the attempt are released.
#[derive(Error)]
pub enum EnrollError {
    /// No process listens on the daemon's socket.
    #[error(
        "no daemon answers at {}: {source}; start a virtual machine with 'pvm' or 'pvmd', or set PVM_TMP and PVM_VMID \
         to the values with which it was started",
        path.display(),
    )]
    NoDaemon { path: PathBuf, source: io::Error },
    /// The process runs as root without `PVM_ALLOW_ROOT`.
    #[error(
        "a task may not run as root: use an ordinary user, or set PVM_ALLOW_ROOT=1 to allow it"
    )]
    Root,
    /// The daemon refused this task; contains the reason.
    #[error("the daemon refused this task: {0}")]
    Refused(String),
    /// The daemon's answer does not follow this version of the protocol.
    #[error(
        "the daemon at {} uses another protocol version ({reason}); use library and daemon of one installation",
        path.display(),
    )]
    VersionMismatch {
        path: PathBuf,
        /// Description of the field that could not be decoded.
        reason: String,
    },
    /// The listener on the daemon's socket belongs to another user.
    #[error("{} belongs to user {owner}, not to you; it was not used", path.display())]
    ForeignOwner {
        path: PathBuf,
        /// User id of the listening process.
        owner: u32,
    },
    /// The environment variables do not determine a usable socket path.
    #[error(transparent)]
    BadEnvironment(#[from] VmNameError),
    /// The connection broke, or the process cannot open another descriptor or thread.
    #[error("connecting to the daemon at {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl fmt::Debug for EnrollError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Failed request: PVM's error code and a sentence for the user.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{reason}")]
pub struct Error {
    pub code: PvmError,
    /// Sentence that says what was tried, what happened, and what the user can do.
    pub reason: String,
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    pub fn new(code: PvmError, reason: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason.into(),
        }
    }

    /// Converts a reply that `operation` does not expect into an error: a failure reply into the
    /// failure that it reports, any other reply into a protocol error.
    pub(crate) fn from_reply(operation: &str, reply: Reply) -> Self {
        match reply {
            Reply::Failed { error, reason } if reason.is_empty() => {
                Self::new(error, format!("{operation}: {error}"))
            }
            Reply::Failed { error, reason } => Self::new(error, reason),
            _ => Self::new(
                PvmError::BadMsg,
                format!(
                    "{operation}: the daemon's reply does not fit the request; use the same version everywhere"
                ),
            ),
        }
    }
}

impl From<PvmError> for Error {
    fn from(code: PvmError) -> Self {
        Self::new(code, code.text())
    }
}

/// Reason why a migration did not take place.
#[derive(Clone, PartialEq, Eq, Error)]
pub enum MigrateError {
    /// The migration began and failed; the task continues on its host.
    #[error(transparent)]
    Failed(#[from] MigrationError),
    /// The migration did not begin.
    #[error(transparent)]
    Refused(#[from] Error),
}

impl fmt::Debug for MigrateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program whose `main` returns an error prints the form `{:?}` of the error.
    #[test]
    fn debug_form_is_the_sentence() {
        let no_daemon = EnrollError::NoDaemon {
            path: "/x/pvmd.sock".into(),
            source: io::ErrorKind::NotFound.into(),
        };
        let sentence = no_daemon.to_string();
        assert!(sentence.starts_with("no daemon answers at /x/pvmd.sock"));
        assert_eq!(format!("{no_daemon:?}"), sentence);
        let refused = MigrateError::Refused(Error::new(PvmError::NoHost, "h9 is unknown"));
        assert_eq!(format!("{refused:?}"), "h9 is unknown");
    }
}
