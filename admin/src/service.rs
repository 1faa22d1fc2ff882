//! The state of the tasker service, as its socket shows it.

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use sempa_proto::tasker_service::{
    BODY_BYTES_MAX, HEAD_BYTES, NO_PROTOCOL, NO_SERVICE, SOCKET_PATH, SOCKET_VARIABLE,
    ServiceRefusal, ServiceReply, ServiceRequest, decode, encode,
};
use serde::Serialize;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time limit for the answer of the service. With socket activation, the service starts in this
/// time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The state of the tasker service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub(crate) enum ServiceState {
    Answers {
        version: String,
        protocol: u32,
    },
    /// There is no socket.
    Absent,
    /// The variable of the environment says that there is no service.
    SwitchedOff,
    /// The service does not answer as it should.
    Failed {
        why: String,
    },
}

/// Returns the path of the service's socket; `None` if the environment switches the service off.
pub(crate) fn socket_path() -> Option<PathBuf> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(value) if value == NO_SERVICE => None,
        Some(value) if !value.is_empty() => Some(value.into()),
        _ => Some(SOCKET_PATH.into()),
    }
}

/// Asks the service at this socket for its version.
pub(crate) fn query(path: Option<&Path>) -> ServiceState {
    let Some(path) = path else {
        return ServiceState::SwitchedOff;
    };
    match ask(path) {
        Ok(ServiceReply::Refused(ServiceRefusal::OtherVersion {
            service,
            service_protocol,
            ..
        })) => ServiceState::Answers {
            version: service,
            protocol: service_protocol,
        },
        Ok(reply) => ServiceState::Failed {
            why: format!("it gives an unexpected answer: {reply:?}"),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => ServiceState::Absent,
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => ServiceState::Failed {
            why: "nothing listens at its socket".into(),
        },
        Err(error) => ServiceState::Failed {
            why: match error.kind() {
                io::ErrorKind::WouldBlock => {
                    format!("it does not answer within {} s", ANSWER_TIMEOUT.as_secs())
                }
                _ => error.to_string(),
            },
        },
    }
}

/// Sends a request for no protocol, which the service refuses with its version.
fn ask(path: &Path) -> io::Result<ServiceReply> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    // A service with a full queue must not block this program.
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    let mut stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(&encode(&ServiceRequest::Start {
        protocol: NO_PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
    }))?;
    let mut answer = Vec::new();
    let mut bytes = [0; HEAD_BYTES + BODY_BYTES_MAX];
    loop {
        match decode(&answer).map_err(io::Error::other)? {
            Some((reply, _)) => return Ok(reply),
            None => match stream.read(&mut bytes)? {
                0 => return Err(io::Error::other("it closes the connection")),
                count => answer.extend_from_slice(&bytes[..count]),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn answer_once(path: &Path, answer: Vec<u8>) -> std::thread::JoinHandle<()> {
        let listener = UnixListener::bind(path).expect("the test's own socket");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut bytes = [0; HEAD_BYTES];
            stream.read_exact(&mut bytes).expect("a request");
            stream.write_all(&answer).expect("the client reads");
        })
    }

    /// A service answers with its version; anything else at the socket is a failure.
    #[test]
    fn state_follows_from_the_answer() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        assert_eq!(query(None), ServiceState::SwitchedOff);
        assert_eq!(query(Some(&path)), ServiceState::Absent);
        let refusal = ServiceReply::Refused(ServiceRefusal::OtherVersion {
            service: "9.9".into(),
            service_protocol: 7,
            daemon: "x".into(),
            daemon_protocol: NO_PROTOCOL,
        });
        let server = answer_once(&path, encode(&refusal));
        let expected = ServiceState::Answers {
            version: "9.9".into(),
            protocol: 7,
        };
        assert_eq!(query(Some(&path)), expected);
        server.join().expect("no panic");
        assert!(
            matches!(query(Some(&path)), ServiceState::Failed { why } if why.contains("nothing listens"))
        );
        for (name, answer) in [
            ("garbage", b"HTTP/1.1 400\r\n".to_vec()),
            ("closes", Vec::new()),
            ("other", encode(&ServiceReply::Killed)),
        ] {
            let path = dir.path().join(name);
            let server = answer_once(&path, answer);
            assert!(
                matches!(query(Some(&path)), ServiceState::Failed { .. }),
                "{name}"
            );
            server.join().expect("no panic");
        }
    }
}
