//! Errors of a member.

use crate::session_file::SessionFileError;
use sempa_broker_session::{Closing, GoneReason, Refusal, SessionEnd};
use std::fmt;
use thiserror::Error;

/// Exit status of a program that came after the end of its session. No other failure of Sempa's
/// programs has this status.
pub const EXIT_OVER: u8 = 79;

/// Reason why a call of a member failed. The text is a sentence for the user.
#[derive(Error)]
pub enum Error {
    /// The session is over. A program that meets this error ends with [`EXIT_OVER`].
    #[error("the session {session} is over: {end}; nothing is left to do here")]
    Over { session: String, end: SessionEnd },
    /// The broker counts this member as gone.
    #[error(
        "the broker of session {session} counts this member as gone ({reason}); messages that the member had not \
         received were returned or dropped; join again to get a new number"
    )]
    Gone { session: String, reason: GoneReason },
    #[error("the broker of session {session} refused this member: {refusal}")]
    Refused { session: String, refusal: Refusal },
    #[error(
        "another process has connected as this member of session {session}; only one process may use a member"
    )]
    Superseded { session: String },
    /// The time limit of the call has passed.
    #[error("the broker of session {session} did not answer in time; {advice}")]
    TimedOut {
        session: String,
        advice: &'static str,
    },
    #[error(transparent)]
    SessionFile(#[from] SessionFileError),
    /// The broker could not be found or started.
    #[error("no broker for session {session}: {reason}")]
    NoBroker { session: String, reason: String },
    #[error("joining the virtual machine: {0}")]
    Enroll(#[from] libpvm::EnrollError),
    #[error(transparent)]
    Vm(#[from] libpvm::Error),
    #[error("the operating system refused what a member needs: {0}")]
    System(#[from] std::io::Error),
}

impl Error {
    pub(crate) fn from_closing(session: &str, closing: Closing) -> Self {
        let session = session.to_string();
        match closing {
            Closing::Over(end) => Self::Over { session, end },
            Closing::Gone(reason) => Self::Gone { session, reason },
            Closing::Refused(refusal) => Self::Refused { session, refusal },
            Closing::Superseded => Self::Superseded { session },
        }
    }

    /// Returns the exit status for a program that ends because of this error.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::Over { .. } => EXIT_OVER,
            _ => 1,
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
