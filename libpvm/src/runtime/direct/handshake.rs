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
enum TlsSide {
    Connecting(UnbufferedClientConnection),
    Listening(UnbufferedServerConnection),
}

/// Next step of a handshake.
enum NextStep {
    /// The handshake can continue immediately.
    Continue,
    /// Data from the peer is needed.
    Read,
    /// The handshake is complete.
    Complete,
}

/// Handshake that is in progress.
pub(super) struct Handshake {
    socket: ProcessOwned<TcpStream>,
    tls: TlsSide,
    received_bytes: Vec<u8>,
    /// Number of bytes received so far, at most [`HANDSHAKE_BYTES_MAX`].
    received_bytes_total: usize,
    unsent_bytes: Vec<u8>,
}

fn unauthenticated(e: impl std::fmt::Display) -> SetupError {
    SetupError::Unauthenticated(e.to_string())
}

impl Handshake {
    /// Starts the handshake of the connecting side; `preamble` is sent first.
    pub(super) fn for_connecting_side(
        socket: ProcessOwned<TcpStream>,
        identity: &Identity,
        peer: Fingerprint,
        preamble: &[u8],
    ) -> Result<Handshake, SetupError> {
        let tls = TlsSide::Connecting(identity.client_connection(peer)?);
        Ok(Handshake {
            socket,
            tls,
            received_bytes: Vec::new(),
            received_bytes_total: 0,
            unsent_bytes: preamble.to_vec(),
        })
    }

    /// Starts the handshake of the listening side.
    pub(super) fn for_listening_side(
        socket: ProcessOwned<TcpStream>,
        identity: &Identity,
        peer: Fingerprint,
    ) -> Result<Handshake, SetupError> {
        let tls = TlsSide::Listening(identity.server_connection(peer)?);
        Ok(Handshake {
            socket,
            tls,
            received_bytes: Vec::new(),
            received_bytes_total: 0,
            unsent_bytes: Vec::new(),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }

    pub(super) fn poll_flags(&self) -> PollFlags {
        if self.unsent_bytes.is_empty() {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        }
    }

    /// Advances the handshake without blocking. Returns true when both sides are authenticated.
    pub(super) fn step(&mut self) -> Result<bool, SetupError> {
        loop {
            let (discard, next) = match &mut self.tls {
                TlsSide::Connecting(tls) => run_tls_action(
                    tls.process_tls_records(&mut self.received_bytes),
                    &mut self.unsent_bytes,
                ),
                TlsSide::Listening(tls) => run_tls_action(
                    tls.process_tls_records(&mut self.received_bytes),
                    &mut self.unsent_bytes,
                ),
            };
            self.received_bytes.drain(..discard);
            let next = next?;
            self.send()?;
            match next {
                NextStep::Continue => {}
                NextStep::Complete => return Ok(true),
                NextStep::Read => {
                    if !self.receive()? {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Converts a complete handshake into the end of the route.
    pub(super) fn finish(self) -> Result<FrameStream, SetupError> {
        let (secrets, keys) = match self.tls {
            TlsSide::Connecting(tls) => {
                let (secrets, keys) = tls
                    .dangerous_into_kernel_connection()
                    .map_err(unauthenticated)?;
                (secrets, KeySchedule::Connecting(keys))
            }
            TlsSide::Listening(tls) => {
                let (secrets, keys) = tls
                    .dangerous_into_kernel_connection()
                    .map_err(unauthenticated)?;
                (secrets, KeySchedule::Listening(keys))
            }
        };
        FrameStream::new(
            self.socket,
            secrets,
            keys,
            &self.unsent_bytes,
            &self.received_bytes,
        )
    }

    fn send(&mut self) -> Result<(), SetupError> {
        while !self.unsent_bytes.is_empty() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.fd().as_raw_fd(), &self.unsent_bytes, flags) {
                Ok(sent) => drop(self.unsent_bytes.drain(..sent)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(unauthenticated(e.desc())),
            }
        }
        Ok(())
    }

    /// Reads available data; returns false if there is none.
    fn receive(&mut self) -> Result<bool, SetupError> {
        let mut bytes = [0; HANDSHAKE_BYTES_MAX];
        match recv(self.fd().as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(unauthenticated("it closed the connection in the handshake")),
            Ok(got) => {
                self.received_bytes_total += got;
                if self.received_bytes_total > HANDSHAKE_BYTES_MAX {
                    return Err(unauthenticated("its handshake is too long"));
                }
                self.received_bytes.extend_from_slice(&bytes[..got]);
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(e) => Err(unauthenticated(e.desc())),
        }
    }
}

/// Performs the action that TLS requests. Returns the number of consumed input bytes and the next
/// step.
fn run_tls_action<MeasuredVm>(
    status: UnbufferedStatus<'_, '_, MeasuredVm>,
    unsent: &mut Vec<u8>,
) -> (usize, Result<NextStep, SetupError>) {
    let next = match status.state {
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            encode(|room| data.encode(room), unsent).map(|()| NextStep::Continue)
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // The data is in `unsent`, which is sent in order before anything else.
            data.done();
            Ok(NextStep::Continue)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(NextStep::Read),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(NextStep::Complete),
        Ok(_) => Err(unauthenticated(
            "it said something before the handshake was over",
        )),
        Err(e) => Err(unauthenticated(e)),
    };
    (status.discard, next)
}

fn encode(
    mut encode: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
    unsent: &mut Vec<u8>,
) -> Result<(), SetupError> {
    let before = unsent.len();
    let size = match encode(&mut []) {
        Ok(_) => return Ok(()),
        Err(EncodeError::InsufficientSize(size)) => size.required_size,
        Err(e) => return Err(SetupError::Local(e.to_string())),
    };
    unsent.resize(before + size, 0);
    let written = encode(&mut unsent[before..]).map_err(|e| SetupError::Local(e.to_string()))?;
    unsent.truncate(before + written);
    Ok(())
}
