//! Connecting side of a direct route: accepts a peer's offer and connects to the peer.

use super::accept::encode_preamble;
use super::handshake::Handshake;
use super::{ADDRESS_ATTEMPT_TIMEOUT, DIAL_TIMEOUT, FrameStream, Identity, SetupError};
use crate::runtime::process::{ProcessOwned, mark_library_socket};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};
use sempa_proto::Micros;
use sempa_proto::route::{Fingerprint, OfferId};
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

enum DialStage {
    /// No connection attempt is in progress.
    Idle,
    /// The TCP connection is being established.
    Connecting(ProcessOwned<TcpStream>),
    Handshake(Box<Handshake>),
    /// The peer is authenticated, but the peer has not confirmed yet that it has authenticated this
    /// side.
    Unconfirmed(Box<FrameStream>),
}

/// Connection attempt to a peer that has offered a route.
pub(crate) struct Dialer {
    id: OfferId,
    identity: Identity,
    peer_fingerprint: Fingerprint,
    untried_addresses: VecDeque<SocketAddr>,
    stage: DialStage,
    /// Deadline for the connection attempt to the current address.
    address_deadline: Micros,
    deadline: Micros,
    /// Error of the last failed address.
    last_error: SetupError,
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer")
            .field("id", &self.id)
            .field("addresses", &self.untried_addresses)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// Creates an attempt to connect to one of `addresses`. The peer's certificate must have the
    /// fingerprint `certificate_fingerprint`. The peer needs this side's
    /// [`fingerprint`](Self::fingerprint), which the caller may send after this call.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub(crate) fn new(
        now: Micros,
        id: OfferId,
        addresses: &[SocketAddr],
        certificate_fingerprint: Fingerprint,
    ) -> Result<Self, SetupError> {
        Ok(Self {
            id,
            identity: Identity::new()?,
            peer_fingerprint: certificate_fingerprint,
            untried_addresses: addresses.iter().copied().collect(),
            stage: DialStage::Idle,
            address_deadline: now,
            deadline: now + DIAL_TIMEOUT,
            last_error: SetupError::Unreachable("none was offered".into()),
        })
    }

    /// Returns the fingerprint of this side's certificate.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.identity.fingerprint()
    }

    /// Adds to `fds` the descriptor that must be polled.
    pub(crate) fn add_poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        match &self.stage {
            DialStage::Idle => {}
            DialStage::Connecting(socket) => {
                fds.push(PollFd::new(socket.get().as_fd(), PollFlags::POLLOUT))
            }
            DialStage::Handshake(handshake) => {
                fds.push(PollFd::new(handshake.fd(), handshake.poll_flags()))
            }
            DialStage::Unconfirmed(frame_stream) => {
                let poll_flags = if frame_stream.has_unwritten_data() {
                    PollFlags::POLLIN | PollFlags::POLLOUT
                } else {
                    PollFlags::POLLIN
                };
                fds.push(PollFd::new(frame_stream.as_fd(), poll_flags));
            }
        }
    }

    /// Returns the time at which [`advance_attempt`](Self::advance_attempt) must be called even if
    /// no descriptor is ready.
    pub(crate) fn next_wakeup(&self) -> Micros {
        match self.stage {
            DialStage::Idle => Micros::default(),
            _ => self.address_deadline.min(self.deadline),
        }
    }

    /// Advances the attempt without blocking. Returns the route, or the reason why the attempt
    /// failed; `None` while the attempt is in progress. The first call must follow [`Dialer::new`]
    /// without a poll.
    pub(crate) fn advance_attempt(
        &mut self,
        now: Micros,
    ) -> Option<Result<FrameStream, SetupError>> {
        loop {
            if now >= self.deadline {
                self.stage = DialStage::Idle;
                return Some(Err(SetupError::TimedOut));
            }
            let stage = std::mem::replace(&mut self.stage, DialStage::Idle);
            let next_stage = match stage {
                DialStage::Idle => {
                    let Some(address) = self.untried_addresses.pop_front() else {
                        return Some(Err(self.last_error.clone()));
                    };
                    self.address_deadline = now + ADDRESS_ATTEMPT_TIMEOUT;
                    start_connect(address).map(DialStage::Connecting)
                }
                _ if now >= self.address_deadline => Err(SetupError::TimedOut),
                stage => match self.advance_stage(stage) {
                    Ok((stage, false)) => {
                        self.stage = stage;
                        return None;
                    }
                    Ok((DialStage::Unconfirmed(frame_stream), true)) => {
                        return Some(Ok(*frame_stream));
                    }
                    Ok((stage, true)) => Ok(stage),
                    Err(e) => Err(e),
                },
            };
            match next_stage {
                Ok(stage) => self.stage = stage,
                Err(e) => self.last_error = e,
            }
        }
    }

    /// Returns the next stage. The second part is true if the caller can continue with this stage
    /// immediately. For [`DialStage::Unconfirmed`], true means that the confirmation has arrived.
    fn advance_stage(&mut self, stage: DialStage) -> Result<(DialStage, bool), SetupError> {
        match stage {
            DialStage::Idle => Ok((DialStage::Idle, true)),
            DialStage::Connecting(socket) => {
                if !is_connected(&socket)? {
                    return Ok((DialStage::Connecting(socket), false));
                }
                let handshake = Handshake::start_as_client(
                    socket,
                    &self.identity,
                    self.peer_fingerprint,
                    &encode_preamble(self.id),
                )?;
                Ok((DialStage::Handshake(Box::new(handshake)), true))
            }
            DialStage::Handshake(mut handshake) => {
                if !handshake.advance()? {
                    return Ok((DialStage::Handshake(handshake), false));
                }
                let (mut frame_stream, to_setup_error) =
                    (Box::new(handshake.into_frame_stream()?), |e| {
                        SetupError::Unauthenticated(format!("{e}"))
                    });
                frame_stream.write_queued().map_err(to_setup_error)?;
                let is_confirmed = frame_stream.read_confirmation().map_err(to_setup_error)?;
                Ok((DialStage::Unconfirmed(frame_stream), is_confirmed))
            }
            DialStage::Unconfirmed(mut frame_stream) => {
                let to_setup_error = |e| SetupError::Unauthenticated(format!("{e}"));
                frame_stream.write_queued().map_err(to_setup_error)?;
                let is_confirmed = frame_stream.read_confirmation().map_err(to_setup_error)?;
                Ok((DialStage::Unconfirmed(frame_stream), is_confirmed))
            }
        }
    }
}

/// Starts to connect to `address` and does not wait for the connection.
fn start_connect(address: SocketAddr) -> Result<ProcessOwned<TcpStream>, SetupError> {
    let family = if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None)
        .map_err(|e| SetupError::LocalFailure(e.desc().into()))?;
    mark_library_socket(&socket).map_err(|e| SetupError::LocalFailure(e.to_string()))?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(e) => return Err(SetupError::Unreachable(format!("{address}: {}", e.desc()))),
    }
    let socket = TcpStream::from(socket);
    socket
        .set_nodelay(true)
        .map_err(|e| SetupError::LocalFailure(e.to_string()))?;
    Ok(ProcessOwned::from_fd(socket))
}

fn is_connected(socket: &ProcessOwned<TcpStream>) -> Result<bool, SetupError> {
    let to_setup_error = |e: std::io::Error| SetupError::Unreachable(e.to_string());
    let mut fds = [PollFd::new(socket.get().as_fd(), PollFlags::POLLOUT)];
    if poll(&mut fds, PollTimeout::ZERO).map_err(|e| SetupError::LocalFailure(e.desc().into()))?
        == 0
    {
        return Ok(false);
    }
    match socket.get().take_error().map_err(to_setup_error)? {
        Some(e) => Err(to_setup_error(e)),
        None => Ok(true),
    }
}
