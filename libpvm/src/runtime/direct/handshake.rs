//! TLS handshake that turns a TCP connection into a [`FrameStream`], without blocking.

use super::frame_stream::{FrameStream, KeySchedule};
use super::{HANDSHAKE_BYTES_MAX, Identity, SetupError};
use crate::runtime::process::ProcessOwned;
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::socket::{MsgFlags, recv, send};
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use sempa_proto::route::Fingerprint;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// TLS state of the connecting or the listening side.
enum TlsConnection {
    Connecting(UnbufferedClientConnection),
    Listening(UnbufferedServerConnection),
}

/// Next step of a handshake.
enum NextStep {
    /// The handshake can continue immediately.
    Continue,
    /// Data from the peer is needed.
    AwaitData,
    /// The handshake is complete.
    Complete,
}

/// Handshake that is in progress.
pub(super) struct Handshake {
    socket: ProcessOwned<TcpStream>,
    tls: TlsConnection,
    input: Vec<u8>,
    /// Number of bytes received so far, at most [`HANDSHAKE_BYTES_MAX`].
    received_byte_count: usize,
    unsent_output: Vec<u8>,
}

fn unauthenticated_error(e: impl std::fmt::Display) -> SetupError {
    SetupError::Unauthenticated(e.to_string())
}

impl Handshake {
    /// Starts the handshake of the connecting side. `preamble` is sent before the first handshake
    /// message.
    pub(super) fn start_as_client(
        socket: ProcessOwned<TcpStream>,
        identity: &Identity,
        peer_fingerprint: Fingerprint,
        preamble: &[u8],
    ) -> Result<Self, SetupError> {
        let tls = TlsConnection::Connecting(identity.client_connection(peer_fingerprint)?);
        Ok(Self {
            socket,
            tls,
            input: Vec::new(),
            received_byte_count: 0,
            unsent_output: preamble.to_vec(),
        })
    }

    /// Starts the handshake of the listening side.
    pub(super) fn start_as_server(
        socket: ProcessOwned<TcpStream>,
        identity: &Identity,
        peer_fingerprint: Fingerprint,
    ) -> Result<Self, SetupError> {
        let tls = TlsConnection::Listening(identity.server_connection(peer_fingerprint)?);
        Ok(Self {
            socket,
            tls,
            input: Vec::new(),
            received_byte_count: 0,
            unsent_output: Vec::new(),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }

    pub(super) fn poll_flags(&self) -> PollFlags {
        if self.unsent_output.is_empty() {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        }
    }

    /// Advances the handshake without blocking. Returns true when both sides are authenticated.
    pub(super) fn advance(&mut self) -> Result<bool, SetupError> {
        loop {
            let (consumed_bytes, next_step) = match &mut self.tls {
                TlsConnection::Connecting(tls) => run_tls_action(
                    tls.process_tls_records(&mut self.input),
                    &mut self.unsent_output,
                ),
                TlsConnection::Listening(tls) => run_tls_action(
                    tls.process_tls_records(&mut self.input),
                    &mut self.unsent_output,
                ),
            };
            self.input.drain(..consumed_bytes);
            let next_step = next_step?;
            self.write_unsent()?;
            match next_step {
                NextStep::Continue => {}
                NextStep::Complete => return Ok(true),
                NextStep::AwaitData => {
                    if !self.read_available()? {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Converts a complete handshake into this side's frame stream.
    pub(super) fn into_frame_stream(self) -> Result<FrameStream, SetupError> {
        let (secrets, keys) = match self.tls {
            TlsConnection::Connecting(tls) => {
                let (secrets, keys) = tls
                    .dangerous_into_kernel_connection()
                    .map_err(unauthenticated_error)?;
                (secrets, KeySchedule::Connecting(keys))
            }
            TlsConnection::Listening(tls) => {
                let (secrets, keys) = tls
                    .dangerous_into_kernel_connection()
                    .map_err(unauthenticated_error)?;
                (secrets, KeySchedule::Listening(keys))
            }
        };
        FrameStream::new(self.socket, secrets, keys, &self.unsent_output, &self.input)
    }

    fn write_unsent(&mut self) -> Result<(), SetupError> {
        while !self.unsent_output.is_empty() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.fd().as_raw_fd(), &self.unsent_output, flags) {
                Ok(sent_bytes) => drop(self.unsent_output.drain(..sent_bytes)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(unauthenticated_error(e.desc())),
            }
        }
        Ok(())
    }

    /// Reads available data. Returns false if no data is available.
    fn read_available(&mut self) -> Result<bool, SetupError> {
        let mut bytes = [0; HANDSHAKE_BYTES_MAX];
        match recv(self.fd().as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(unauthenticated_error(
                "it closed the connection in the handshake",
            )),
            Ok(read_bytes) => {
                self.received_byte_count += read_bytes;
                if self.received_byte_count > HANDSHAKE_BYTES_MAX {
                    return Err(unauthenticated_error("its handshake is too long"));
                }
                self.input.extend_from_slice(&bytes[..read_bytes]);
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(e) => Err(unauthenticated_error(e.desc())),
        }
    }
}

/// Performs the action that TLS requests. Returns the number of consumed input bytes and the next
/// step of the handshake.
fn run_tls_action<MeasuredVm>(
    status: UnbufferedStatus<'_, '_, MeasuredVm>,
    unsent_bytes: &mut Vec<u8>,
) -> (usize, Result<NextStep, SetupError>) {
    let next_step = match status.state {
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            append_encoded(|buffer| data.encode(buffer), unsent_bytes).map(|()| NextStep::Continue)
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // The data is already in `unsent_bytes`, which is sent in order before later data.
            data.done();
            Ok(NextStep::Continue)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(NextStep::AwaitData),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(NextStep::Complete),
        Ok(_) => Err(unauthenticated_error(
            "it sent data before the handshake was complete",
        )),
        Err(e) => Err(unauthenticated_error(e)),
    };
    (status.discard, next_step)
}

fn append_encoded(
    mut encode: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
    unsent_bytes: &mut Vec<u8>,
) -> Result<(), SetupError> {
    let old_len = unsent_bytes.len();
    let required_bytes = match encode(&mut []) {
        Ok(_) => return Ok(()),
        Err(EncodeError::InsufficientSize(required_bytes)) => required_bytes.required_size,
        Err(e) => return Err(SetupError::LocalFailure(e.to_string())),
    };
    unsent_bytes.resize(old_len + required_bytes, 0);
    let written_bytes = encode(&mut unsent_bytes[old_len..])
        .map_err(|e| SetupError::LocalFailure(e.to_string()))?;
    unsent_bytes.truncate(old_len + written_bytes);
    Ok(())
}
