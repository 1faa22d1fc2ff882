//! Exchanges one request and its reply with the tasker service of this host.

use crate::connect_without_waiting;
use nix::sys::socket::UnixAddr;
use sempa_proto::tasker_service::{
    BODY_BYTES_MAX, DecodeError, HEAD_BYTES, ServiceReply, ServiceRequest, decode, encode,
};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Why there is no reply of the service.
#[derive(Debug)]
pub enum ExchangeError {
    /// `WouldBlock` if too many connections wait for the service.
    Connect(io::Error),
    /// `WouldBlock` if the service did not answer in time.
    NoReply(io::Error),
    Decode(DecodeError),
}

/// Sends a request to the service at `path`. Returns the connection, from which nothing after the
/// reply was read, and the reply. The service may take `timeout` for each read and each write.
///
/// # Errors
/// The service is not there, or does not answer as it should.
pub fn ask_tasker_service(
    path: &Path,
    request: &ServiceRequest,
    timeout: Duration,
) -> Result<(UnixStream, ServiceReply), ExchangeError> {
    let mut stream = connect_to(path, timeout).map_err(ExchangeError::Connect)?;
    stream
        .write_all(&encode(request))
        .map_err(ExchangeError::NoReply)?;
    // The bytes after the reply come from the tasker, so the reply is read byte by byte.
    let mut bytes = Vec::with_capacity(HEAD_BYTES + BODY_BYTES_MAX);
    loop {
        if let Some((reply, _)) = decode(&bytes).map_err(ExchangeError::Decode)? {
            return Ok((stream, reply));
        }
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(0) => return Err(ExchangeError::NoReply(ErrorKind::UnexpectedEof.into())),
            Ok(_) => bytes.push(byte[0]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(ExchangeError::NoReply(error)),
        }
    }
}

fn connect_to(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let stream = connect_without_waiting(&UnixAddr::new(path)?)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, bind, listen, socket};
    use sempa_proto::tasker_service::SessionId;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    const TIMEOUT: Duration = Duration::from_secs(60);
    const REQUEST: ServiceRequest = ServiceRequest::Kill {
        session: SessionId(1),
    };

    /// The bytes after the reply are left for the caller.
    #[test]
    fn bytes_after_the_reply_stay_in_the_connection() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).expect("the test's own socket");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut request = vec![0; encode(&REQUEST).len()];
            stream.read_exact(&mut request).expect("a request");
            let reply = encode(&ServiceReply::Killed);
            stream
                .write_all(&[&reply[..], b"next"].concat())
                .expect("the client reads");
        });
        let (mut stream, reply) =
            ask_tasker_service(&path, &REQUEST, TIMEOUT).expect("the server replies");
        assert_eq!(reply, ServiceReply::Killed);
        let mut rest = String::new();
        stream.read_to_string(&mut rest).expect("the server ends");
        assert_eq!(rest, "next");
        server.join().expect("no panic");
    }

    /// A service that accepts no connection does not block the caller.
    #[test]
    fn full_queue_is_an_error() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("s");
        let listener = socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .expect("a socket");
        bind(
            listener.as_raw_fd(),
            &UnixAddr::new(&path).expect("a short path"),
        )
        .expect("the test's own socket");
        listen(&listener, Backlog::new(0).expect("a length")).expect("a queue");
        let mut waiting = Vec::new();
        let error = loop {
            match connect_to(&path, TIMEOUT) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 1000, "the queue has no end");
        };
        assert_eq!(error.kind(), ErrorKind::WouldBlock);
    }
}
