//! TLS handshake that turns a TCP connection into a [`DirectEnd`], without blocking.

use super::end::{DirectEnd, Keys};
use super::{HANDSHAKE_BYTES_MAX, Identity, NoRoute};
use crate::runtime::process::Own;
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
enum Tls {
    Connecting(UnbufferedClientConnection),
    Listening(UnbufferedServerConnection),
}

/// Next step of a handshake.
enum Next {
    /// The handshake can continue immediately.
    Again,
    /// Data from the peer is needed.
    Read,
    /// The handshake is complete.
    Over,
}

/// Handshake that is in progress.
pub(super) struct Handshake {
    socket: Own<TcpStream>,
    tls: Tls,
    come: Vec<u8>,
    /// Total number of bytes received.
    total: usize,
    unsent: Vec<u8>,
}

fn stranger(e: impl std::fmt::Display) -> NoRoute {
    NoRoute::Stranger(e.to_string())
}

impl Handshake {
    /// Starts the handshake of the side that connected; `preamble` is sent first.
    pub(super) fn connecting(
        socket: Own<TcpStream>,
        identity: &Identity,
        peer: Fingerprint,
        preamble: &[u8],
    ) -> Result<Handshake, NoRoute> {
        let tls = Tls::Connecting(identity.connecting(peer)?);
        Ok(Handshake {
            socket,
            tls,
            come: Vec::new(),
            total: 0,
            unsent: preamble.to_vec(),
        })
    }

    /// Starts the handshake of the side that listened.
    pub(super) fn listening(
        socket: Own<TcpStream>,
        identity: &Identity,
        peer: Fingerprint,
    ) -> Result<Handshake, NoRoute> {
        let tls = Tls::Listening(identity.listening(peer)?);
        Ok(Handshake {
            socket,
            tls,
            come: Vec::new(),
            total: 0,
            unsent: Vec::new(),
        })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }

    pub(super) fn wants(&self) -> PollFlags {
        if self.unsent.is_empty() {
            PollFlags::POLLIN
        } else {
            PollFlags::POLLIN | PollFlags::POLLOUT
        }
    }

    /// Advances without blocking. Returns true when both sides are authenticated.
    pub(super) fn step(&mut self) -> Result<bool, NoRoute> {
        loop {
            let (discard, next) = match &mut self.tls {
                Tls::Connecting(tls) => {
                    take(tls.process_tls_records(&mut self.come), &mut self.unsent)
                }
                Tls::Listening(tls) => {
                    take(tls.process_tls_records(&mut self.come), &mut self.unsent)
                }
            };
            self.come.drain(..discard);
            let next = next?;
            self.send()?;
            match next {
                Next::Again => {}
                Next::Over => return Ok(true),
                Next::Read => {
                    if !self.receive()? {
                        return Ok(false);
                    }
                }
            }
        }
    }

    /// Converts a complete handshake into the end of the route.
    pub(super) fn finish(self) -> Result<DirectEnd, NoRoute> {
        let (secrets, keys) = match self.tls {
            Tls::Connecting(tls) => {
                let (secrets, keys) = tls.dangerous_into_kernel_connection().map_err(stranger)?;
                (secrets, Keys::Connecting(keys))
            }
            Tls::Listening(tls) => {
                let (secrets, keys) = tls.dangerous_into_kernel_connection().map_err(stranger)?;
                (secrets, Keys::Listening(keys))
            }
        };
        DirectEnd::new(self.socket, secrets, keys, &self.unsent, &self.come)
    }

    fn send(&mut self) -> Result<(), NoRoute> {
        while !self.unsent.is_empty() {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(self.fd().as_raw_fd(), &self.unsent, flags) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => return Err(stranger(e.desc())),
            }
        }
        Ok(())
    }

    /// Reads available data; returns false if there is none.
    fn receive(&mut self) -> Result<bool, NoRoute> {
        let mut bytes = [0; HANDSHAKE_BYTES_MAX];
        match recv(self.fd().as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Err(stranger("it closed the connection in the handshake")),
            Ok(got) => {
                self.total += got;
                if self.total > HANDSHAKE_BYTES_MAX {
                    return Err(stranger("its handshake is too long"));
                }
                self.come.extend_from_slice(&bytes[..got]);
                Ok(true)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(e) => Err(stranger(e.desc())),
        }
    }
}

/// Performs the action that TLS requests. Returns the number of consumed input bytes and the next
/// step.
fn take<Side>(
    status: UnbufferedStatus<'_, '_, Side>,
    unsent: &mut Vec<u8>,
) -> (usize, Result<Next, NoRoute>) {
    let next = match status.state {
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            encode(|room| data.encode(room), unsent).map(|()| Next::Again)
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // The data is in `unsent`, which is sent in order before anything else.
            data.done();
            Ok(Next::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Next::Read),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(Next::Over),
        Ok(_) => Err(stranger("it said something before the handshake was over")),
        Err(e) => Err(stranger(e)),
    };
    (status.discard, next)
}

fn encode(
    mut encode: impl FnMut(&mut [u8]) -> Result<usize, EncodeError>,
    unsent: &mut Vec<u8>,
) -> Result<(), NoRoute> {
    let before = unsent.len();
    let size = match encode(&mut []) {
        Ok(_) => return Ok(()),
        Err(EncodeError::InsufficientSize(size)) => size.required_size,
        Err(e) => return Err(NoRoute::Here(e.to_string())),
    };
    unsent.resize(before + size, 0);
    let written = encode(&mut unsent[before..]).map_err(|e| NoRoute::Here(e.to_string()))?;
    unsent.truncate(before + written);
    Ok(())
}
