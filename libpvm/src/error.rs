//! What can go wrong, in sentences that can be shown to the user.

use sempa_proto::PvmError;
use sempa_proto::task::{MoveError, Reply};
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why this process did not become a task. Nothing is left open after any of these.
#[derive(Debug, Error)]
pub enum EnrollError {
    /// Nobody listens where the daemon should.
    #[error("no daemon answers at {}: {source}; start a virtual machine with 'pvm' or 'pvmd', or set PVM_TMP and PVM_VMID as it was started", path.display())]
    NoDaemon {
        /// Its socket.
        path: PathBuf,
        /// What connecting said.
        source: io::Error,
    },
    /// The process runs as root without permission.
    #[error(
        "a task may not run as root: use an ordinary user, or set PVM_ALLOW_ROOT=1 if you mean it"
    )]
    Root,
    /// The daemon did not want this task.
    #[error("the daemon refused this task: {0}")]
    Refused(String),
    /// The daemon answered in another language.
    #[error("the daemon at {} speaks another version ({why}); use library and daemon of one installation", path.display())]
    Version {
        /// Its socket.
        path: PathBuf,
        /// What could not be read.
        why: String,
    },
    /// Somebody else listens where the daemon should.
    #[error("{} belongs to user {owner}, not to you; it was not used", path.display())]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// User id of the listener.
        owner: u32,
    },
    /// The environment names no usable place.
    #[error("{0}")]
    Place(String),
    /// The conversation broke off, or the process has no descriptor or thread left.
    #[error("connecting to the daemon at {}: {source}", path.display())]
    Io {
        /// Its socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A request that was not done: PVM's code and a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{reason}")]
pub struct Error {
    /// PVM's code.
    pub code: PvmError,
    /// What was tried, what happened, and what to do.
    pub reason: String,
}

impl Error {
    /// An error with its sentence.
    pub fn new(code: PvmError, reason: impl Into<String>) -> Error {
        Error {
            code,
            reason: reason.into(),
        }
    }

    /// A reply that does not fit the request: the failure it reports, or a protocol error.
    pub(crate) fn from_reply(asked: &str, reply: Reply) -> Error {
        match reply {
            Reply::Failed { error, reason } if reason.is_empty() => {
                Error::new(error, format!("{asked}: {error}"))
            }
            Reply::Failed { error, reason } => Error::new(error, reason),
            _ => Error::new(
                PvmError::BadMsg,
                format!(
                    "{asked}: the daemon gave an answer to another question; use one version everywhere"
                ),
            ),
        }
    }
}

impl From<PvmError> for Error {
    fn from(code: PvmError) -> Error {
        Error::new(code, code.text())
    }
}

/// Why a move was not made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MigrateError {
    /// The move was begun and failed; the task goes on where it was.
    #[error(transparent)]
    Failed(#[from] MoveError),
    /// The move was not begun.
    #[error(transparent)]
    Refused(#[from] Error),
}
