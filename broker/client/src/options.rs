//! Options of a join and of a send.

use sempa_broker_session::Role;
use std::path::PathBuf;
use std::time::Duration;

/// Environment variable with the name of the session.
const SESSION_VARIABLE: &str = "SEMPA_SESSION";
/// Environment variable with the path of a session file. With this variable a program dials the
/// broker from outside; the secret itself is only in the file.
const SESSION_FILE_VARIABLE: &str = "SEMPA_SESSION_FILE";
/// Time limit of a join.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How a program joins a session.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// Name of the session; ignored if there is a session file.
    pub session: String,
    pub role: Role,
    /// Speed of this member in thousandths of a reference machine; 0 if unknown.
    pub factor: u32,
    /// The session file of a member outside the virtual machine.
    pub session_file: Option<PathBuf>,
    /// Options for the broker if this member starts the broker, as for `pvm-broker start`.
    pub broker_options: Vec<String>,
    pub timeout: Duration,
}

impl JoinOptions {
    /// Options of a task that joins `session` within the virtual machine.
    pub fn new(session: &str, role: Role) -> Self {
        Self {
            session: session.to_string(),
            role,
            factor: 0,
            session_file: None,
            broker_options: Vec::new(),
            timeout: JOIN_TIMEOUT,
        }
    }

    /// Options of a program that dials the broker with this session file.
    pub fn outside(session_file: impl Into<PathBuf>, role: Role) -> Self {
        Self {
            session_file: Some(session_file.into()),
            ..Self::new("", role)
        }
    }

    /// Options from `SEMPA_SESSION_FILE`, or else from `SEMPA_SESSION`; `None` without both.
    pub fn from_env(role: Role) -> Option<Self> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(file) = variable(SESSION_FILE_VARIABLE) {
            return Some(Self::outside(file, role));
        }
        let session = variable(SESSION_VARIABLE)?.into_string().ok()?;
        Some(Self::new(&session, role))
    }
}

/// How a message is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// The message comes back if the receiver is gone before it has received the message.
    pub returns: bool,
    /// Time to wait for room if the receiver is full, or for a foreman.
    pub wait: Option<Duration>,
}

impl SendOptions {
    /// Asks for the message back if it is not received.
    #[must_use]
    pub fn returning(self) -> Self {
        Self {
            returns: true,
            ..self
        }
    }

    #[must_use]
    pub fn waiting(self, time: Duration) -> Self {
        Self {
            wait: Some(time),
            ..self
        }
    }
}
