//! The state of the tasker service, as its socket shows it.

use sempa_proto::tasker_service::{
    self, NO_PROTOCOL, SOCKET_VARIABLE, ServiceRefusal, ServiceReply, ServiceRequest,
};
use sempa_socket::{ExchangeError, ask_tasker_service};
use serde::Serialize;
use std::io::ErrorKind;
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
    tasker_service::socket_path(std::env::var_os(SOCKET_VARIABLE))
}

/// Asks the service at this socket for its version.
pub(crate) fn query(path: Option<&Path>) -> ServiceState {
    let Some(path) = path else {
        return ServiceState::SwitchedOff;
    };
    // The service refuses a request for no protocol, and names its version.
    let request = ServiceRequest::Start {
        protocol: NO_PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
    };
    match ask_tasker_service(path, &request, ANSWER_TIMEOUT) {
        Ok((
            _,
            ServiceReply::Refused(ServiceRefusal::OtherVersion {
                service,
                service_protocol,
                ..
            }),
        )) => ServiceState::Answers {
            version: service,
            protocol: service_protocol,
        },
        Ok((_, reply)) => ServiceState::Failed {
            why: format!("it gives an unexpected answer: {reply:?}"),
        },
        Err(ExchangeError::Connect(error)) if error.kind() == ErrorKind::NotFound => {
            ServiceState::Absent
        }
        Err(error) => ServiceState::Failed {
            why: failure_reason(error),
        },
    }
}

fn failure_reason(error: ExchangeError) -> String {
    match error {
        ExchangeError::Connect(error) if error.kind() == ErrorKind::ConnectionRefused => {
            "nothing listens at its socket".into()
        }
        ExchangeError::Connect(error) | ExchangeError::NoReply(error) => match error.kind() {
            ErrorKind::WouldBlock => {
                format!("it does not answer within {} s", ANSWER_TIMEOUT.as_secs())
            }
            ErrorKind::UnexpectedEof => "it closes the connection".into(),
            _ => error.to_string(),
        },
        ExchangeError::Decode(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::tasker_service::{HEAD_BYTES, encode};
    use std::io::{Read, Write};
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
