//! The first messages on a connection to the tasker service of a host (`pvm-taskerd`).
//!
//! The service is root and starts a tasker for each daemon that connects. The kernel tells the
//! service which user the daemon belongs to. After [`ServiceReply::Started`] the other end of the
//! connection is the tasker, and the messages are those of [`crate::tasker`].
//!
//! Each of these messages is [`MAGIC`], the length of its body in two bytes, and the body. A
//! message of a later version may have a body that this version cannot decode; the magic number
//! stays.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Path of the service's socket. All users of the host may connect to the socket.
pub const SOCKET_PATH: &str = "/run/sempa/tasker.sock";
/// Environment variable with another path of the socket, or with [`NO_SERVICE`].
pub const SOCKET_VARIABLE: &str = "SEMPA_TASKERD";
/// Value of [`SOCKET_VARIABLE`] of a daemon that starts its tasker itself.
pub const NO_SERVICE: &str = "off";
/// Version of the messages between daemon and tasker. The service and the daemon must have the same
/// version; a daemon of another version starts its tasker itself.
pub const PROTOCOL_VERSION: u32 = 1;
/// Version of a program that only asks for the version of the service.
pub const NO_PROTOCOL: u32 = 0;
/// First bytes of each message.
pub const MAGIC: [u8; 4] = *b"SPTS";
/// Maximum length in bytes of the body of a message.
pub const BODY_BYTES_MAX: usize = 1024;
/// Length in bytes of the magic number and of the length.
pub const HEAD_BYTES: usize = MAGIC.len() + 2;

/// Returns the path of the socket. `setting` is the value of [`SOCKET_VARIABLE`], if any. Returns
/// `None` if the service must not be used.
pub fn socket_path(setting: Option<OsString>) -> Option<PathBuf> {
    match setting {
        Some(value) if value == NO_SERVICE => None,
        Some(value) if !value.is_empty() => Some(value.into()),
        _ => Some(SOCKET_PATH.into()),
    }
}

/// Number of a tasker that the service has started: its PID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub i32);

/// Directory of the records of sessions. Only root can change the directory.
pub const SESSIONS_DIR: &str = "/run/sempa/sessions";

/// The record of a running tasker: the content of the file whose name is the [`SessionId`]. The
/// start time distinguishes the tasker from a later process with the same PID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRecord {
    /// Uid of the user whose tasks the tasker runs.
    pub uid: u32,
    /// Start time of the process, in clock ticks since boot.
    pub start_ticks: u64,
}

impl fmt::Display for SessionRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} {}", self.uid, self.start_ticks)
    }
}

/// A text that is not the record of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it is no record of a session")]
pub struct InvalidRecord;

impl FromStr for SessionRecord {
    type Err = InvalidRecord;

    fn from_str(text: &str) -> Result<Self, InvalidRecord> {
        let (uid, start_ticks) = text.trim_end().split_once(' ').ok_or(InvalidRecord)?;
        Ok(Self {
            uid: uid.parse().map_err(|_| InvalidRecord)?,
            start_ticks: start_ticks.parse().map_err(|_| InvalidRecord)?,
        })
    }
}

/// The first message of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServiceRequest {
    /// Start a tasker for this connection. → [`ServiceReply::Started`] or [`ServiceReply::Refused`]
    Start {
        /// Must be [`PROTOCOL_VERSION`]. The service refuses [`NO_PROTOCOL`] and names its version.
        protocol: u32,
        /// Version of the daemon's program, for error messages.
        version: String,
    },
    /// Kill a tasker that hangs, and with it all its tasks. Only the tasker's user and root may do
    /// so. → [`ServiceReply::Killed`] or [`ServiceReply::Refused`]
    Kill { session: SessionId },
}

/// The answer of the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ServiceReply {
    Started { session: SessionId },
    Killed,
    Refused(ServiceRefusal),
}

/// Why the service does not do what a daemon has requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum ServiceRefusal {
    #[error(
        "the tasker service has version {service} (protocol {service_protocol}), and this daemon has version \
         {daemon} (protocol {daemon_protocol}): install the same version of both"
    )]
    OtherVersion {
        service: String,
        service_protocol: u32,
        daemon: String,
        daemon_protocol: u32,
    },
    #[error("this user has {0} taskers on this host, the limit of the tasker service")]
    TooManyOfUser(usize),
    #[error("this host has {0} taskers, the limit of the tasker service")]
    TooMany(usize),
    #[error("the tasker service cannot start a tasker: {0}")]
    StartFailed(String),
    #[error("the tasker service has no such tasker of this user")]
    NoSuchSession,
    #[error("the tasker service does not understand the request")]
    Malformed,
}

/// Why CRIU cannot migrate the tasks of an ordinary user on a host: the tasker service of the host
/// is missing or not usable. The text continues "tasks cannot be migrated on HOST: ", and says what
/// the administrator does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum ServiceObstacle {
    #[error(
        "the service pvm-taskerd does not run there; the administrator adds it by the package sempa-node and \
         'systemctl enable --now sempa-taskerd.socket', see docs/ADMIN.md"
    )]
    NotRunning,
    /// The user does not want the service.
    #[error("{SOCKET_VARIABLE}={NO_SERVICE} excludes the service pvm-taskerd")]
    Excluded,
    #[error(
        "the service pvm-taskerd has version {service} (protocol {service_protocol}) there, and the daemon version \
         {daemon} (protocol {daemon_protocol}); the administrator installs the same version of both"
    )]
    OtherVersion {
        service: String,
        service_protocol: u32,
        daemon: String,
        daemon_protocol: u32,
    },
    /// The service gives this user no tasker, for the reason in the text.
    #[error(
        "the service pvm-taskerd cannot be used there: {0}; the administrator finds more by 'pvm-admin doctor'"
    )]
    Failed(String),
    /// The service runs without capabilities that it needs, which the text names.
    #[error(
        "the service pvm-taskerd runs there without {0}, as in an unprivileged container; the administrator adds \
         these capabilities"
    )]
    Unprivileged(String),
}

impl From<ServiceRefusal> for ServiceObstacle {
    fn from(refusal: ServiceRefusal) -> Self {
        match refusal {
            ServiceRefusal::OtherVersion {
                service,
                service_protocol,
                daemon,
                daemon_protocol,
            } => Self::OtherVersion {
                service,
                service_protocol,
                daemon,
                daemon_protocol,
            },
            other => Self::Failed(other.to_string()),
        }
    }
}

/// The bytes of the other side are no message of the service.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    #[error("it does not begin like a message of the tasker service")]
    Magic,
    #[error("it has {0} bytes, and the limit is {BODY_BYTES_MAX}")]
    TooLong(usize),
    #[error("its body is malformed")]
    Body,
}

/// Encodes a message. A text that is too long is the only reason for a body that exceeds the limit;
/// the body is then left out, which the other side reports as malformed.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    let body = postcard::to_stdvec(message).unwrap_or_default();
    let body = match body.len() {
        0..=BODY_BYTES_MAX => body,
        _ => Vec::new(),
    };
    let length = u16::try_from(body.len()).unwrap_or(0);
    [&MAGIC[..], &length.to_le_bytes(), &body].concat()
}

/// Decodes a message from the first bytes of a connection. Returns the message and its length;
/// `None` if more bytes must be read. Never asks for more than a message of the greatest length.
///
/// # Errors
/// The bytes are no message.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<(T, usize)>, DecodeError> {
    let known_magic = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(known_magic) {
        return Err(DecodeError::Magic);
    }
    let Some(head) = bytes.get(..HEAD_BYTES) else {
        return Ok(None);
    };
    let length = usize::from(u16::from_le_bytes([head[4], head[5]]));
    if length > BODY_BYTES_MAX {
        return Err(DecodeError::TooLong(length));
    }
    let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + length) else {
        return Ok(None);
    };
    let message = postcard::from_bytes(body).map_err(|_| DecodeError::Body)?;
    Ok(Some((message, HEAD_BYTES + length)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn requests() -> Vec<ServiceRequest> {
        vec![
            ServiceRequest::Start {
                protocol: PROTOCOL_VERSION,
                version: "1.2.3".into(),
            },
            ServiceRequest::Kill {
                session: SessionId(77),
            },
        ]
    }

    /// A message is complete with its last byte, and not before; what follows is left.
    #[test]
    fn messages_arrive_in_pieces() {
        for request in requests() {
            let mut bytes = encode(&request);
            let length = bytes.len();
            for end in 0..length {
                assert_eq!(decode::<ServiceRequest>(&bytes[..end]), Ok(None), "{end}");
            }
            bytes.extend(b"next");
            assert_eq!(decode(&bytes), Ok(Some((request, length))));
        }
    }

    /// Each kind of malformed message is refused as early as its bytes show it.
    #[test]
    fn malformed_messages_are_refused() {
        assert_eq!(decode::<ServiceRequest>(b"SPX"), Err(DecodeError::Magic));
        let long = [&MAGIC[..], &u16::MAX.to_le_bytes()].concat();
        assert_eq!(
            decode::<ServiceRequest>(&long),
            Err(DecodeError::TooLong(65_535))
        );
        let unknown = [&MAGIC[..], &[1, 0, 99]].concat();
        assert_eq!(decode::<ServiceRequest>(&unknown), Err(DecodeError::Body));
        let oversized = ServiceRequest::Start {
            protocol: 1,
            version: "v".repeat(BODY_BYTES_MAX),
        };
        assert_eq!(encode(&oversized).len(), HEAD_BYTES);
    }

    #[test]
    fn session_record_is_parsed_and_written() {
        let record = SessionRecord {
            uid: 1000,
            start_ticks: 5,
        };
        assert_eq!(record.to_string().parse(), Ok(record));
        for text in ["", "1", "x 1", "1 x", "1 2 3", "-1 2"] {
            assert_eq!(text.parse::<SessionRecord>(), Err(InvalidRecord), "{text}");
        }
    }

    /// A refusal because of the version keeps both versions; any other keeps its text.
    #[test]
    fn refusal_becomes_an_obstacle() {
        let refusal = ServiceRefusal::OtherVersion {
            service: "2.0.0".into(),
            service_protocol: 2,
            daemon: "1.0.0".into(),
            daemon_protocol: 1,
        };
        let text = ServiceObstacle::from(refusal).to_string();
        assert!(text.contains("2.0.0 (protocol 2)") && text.contains("1.0.0 (protocol 1)"));
        let refusal = ServiceRefusal::TooMany(7);
        let text = refusal.to_string();
        assert_eq!(
            ServiceObstacle::from(refusal),
            ServiceObstacle::Failed(text)
        );
    }

    proptest! {
        /// No input makes the decoder fail otherwise, or read beyond the message.
        #[test]
        fn any_input_is_decoded_or_refused(bytes: Vec<u8>) {
            if let Ok(Some((_, length))) = decode::<ServiceRequest>(&bytes) {
                prop_assert!(length <= bytes.len());
            }
        }
    }
}
