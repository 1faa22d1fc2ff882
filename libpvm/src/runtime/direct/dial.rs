//! Connecting side of a direct route: accepts a peer's offer and connects to it.

use super::accept::preamble;
use super::handshake::Handshake;
use super::{ADDRESS_WITHIN, DIAL_WITHIN, DirectEnd, Identity, NoRoute};
use crate::runtime::process::{Own, mark};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};
use sempa_proto::Micros;
use sempa_proto::route::{Fingerprint, OfferId};
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

enum Stage {
    /// No connection attempt is in progress.
    None,
    /// The TCP connection is being established.
    Connecting(Own<TcpStream>),
    Handshake(Box<Handshake>),
    /// The peer is authenticated, but has not confirmed that this side is.
    Unconfirmed(Box<DirectEnd>),
}

/// Connection attempt to a peer that has offered a route.
pub(crate) struct Dialer {
    id: OfferId,
    identity: Identity,
    peer: Fingerprint,
    addresses: VecDeque<SocketAddr>,
    stage: Stage,
    /// Deadline of the current address.
    address_until: Micros,
    until: Micros,
    /// Error of the last address that failed.
    last: NoRoute,
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer")
            .field("id", &self.id)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// Creates an attempt to connect to one of these addresses, where the peer must have this
    /// certificate. The peer must be sent this side's [`fingerprint`](Self::fingerprint), which may
    /// happen later.
    ///
    /// # Errors
    /// The system provides no randomness.
    pub(crate) fn new(
        now: Micros,
        id: OfferId,
        addresses: &[SocketAddr],
        peer: Fingerprint,
    ) -> Result<Dialer, NoRoute> {
        Ok(Dialer {
            id,
            identity: Identity::new()?,
            peer,
            addresses: addresses.iter().copied().collect(),
            stage: Stage::None,
            address_until: now,
            until: now + DIAL_WITHIN,
            last: NoRoute::Unreachable("none was offered".into()),
        })
    }

    /// Returns the fingerprint of this side's certificate.
    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.identity.fingerprint()
    }

    /// Adds the descriptors to poll.
    pub(crate) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        match &self.stage {
            Stage::None => {}
            Stage::Connecting(socket) => {
                fds.push(PollFd::new(socket.get().as_fd(), PollFlags::POLLOUT))
            }
            Stage::Handshake(handshake) => fds.push(PollFd::new(handshake.fd(), handshake.wants())),
            Stage::Unconfirmed(end) => {
                let wants = if end.wants_write() {
                    PollFlags::POLLIN | PollFlags::POLLOUT
                } else {
                    PollFlags::POLLIN
                };
                fds.push(PollFd::new(end.as_fd(), wants));
            }
        }
    }

    /// Returns the time at which [`step`](Self::step) must be called even if no descriptor is
    /// ready.
    pub(crate) fn next_wakeup(&self) -> Micros {
        match self.stage {
            Stage::None => Micros::default(),
            _ => self.address_until.min(self.until),
        }
    }

    /// Advances the attempt without blocking. Returns the route, or the reason why there is none;
    /// `None` while the attempt is in progress. Must be called once at the beginning.
    pub(crate) fn step(&mut self, now: Micros) -> Option<Result<DirectEnd, NoRoute>> {
        loop {
            if now >= self.until {
                self.stage = Stage::None;
                return Some(Err(NoRoute::Late));
            }
            let stage = std::mem::replace(&mut self.stage, Stage::None);
            let next = match stage {
                Stage::None => {
                    let Some(address) = self.addresses.pop_front() else {
                        return Some(Err(self.last.clone()));
                    };
                    self.address_until = now + ADDRESS_WITHIN;
                    begin(address).map(Stage::Connecting)
                }
                _ if now >= self.address_until => Err(NoRoute::Late),
                stage => match self.advance(stage) {
                    Ok((stage, false)) => {
                        self.stage = stage;
                        return None;
                    }
                    Ok((Stage::Unconfirmed(end), true)) => return Some(Ok(*end)),
                    Ok((stage, true)) => Ok(stage),
                    Err(e) => Err(e),
                },
            };
            match next {
                Ok(stage) => self.stage = stage,
                Err(e) => self.last = e,
            }
        }
    }

    /// Returns the next stage, and whether to continue immediately. With `true`, an unconfirmed end
    /// has been confirmed.
    fn advance(&mut self, stage: Stage) -> Result<(Stage, bool), NoRoute> {
        match stage {
            Stage::None => Ok((Stage::None, true)),
            Stage::Connecting(socket) => {
                if !is_connected(&socket)? {
                    return Ok((Stage::Connecting(socket), false));
                }
                let handshake =
                    Handshake::connecting(socket, &self.identity, self.peer, &preamble(self.id))?;
                Ok((Stage::Handshake(Box::new(handshake)), true))
            }
            Stage::Handshake(mut handshake) => {
                if !handshake.step()? {
                    return Ok((Stage::Handshake(handshake), false));
                }
                let (mut end, told) = (Box::new(handshake.finish()?), |e| {
                    NoRoute::Stranger(format!("{e}"))
                });
                end.flush().map_err(told)?;
                let confirmed = end.is_confirmed().map_err(told)?;
                Ok((Stage::Unconfirmed(end), confirmed))
            }
            Stage::Unconfirmed(mut end) => {
                let told = |e| NoRoute::Stranger(format!("{e}"));
                end.flush().map_err(told)?;
                let confirmed = end.is_confirmed().map_err(told)?;
                Ok((Stage::Unconfirmed(end), confirmed))
            }
        }
    }
}

/// Starts a TCP connection.
fn begin(address: SocketAddr) -> Result<Own<TcpStream>, NoRoute> {
    let family = if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None)
        .map_err(|e| NoRoute::Here(e.desc().into()))?;
    mark(&socket).map_err(|e| NoRoute::Here(e.to_string()))?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) | Err(Errno::EINPROGRESS) => {}
        Err(e) => return Err(NoRoute::Unreachable(format!("{address}: {}", e.desc()))),
    }
    let socket = TcpStream::from(socket);
    socket
        .set_nodelay(true)
        .map_err(|e| NoRoute::Here(e.to_string()))?;
    Ok(Own::fd(socket))
}

fn is_connected(socket: &Own<TcpStream>) -> Result<bool, NoRoute> {
    let unreachable = |e: std::io::Error| NoRoute::Unreachable(e.to_string());
    let mut fds = [PollFd::new(socket.get().as_fd(), PollFlags::POLLOUT)];
    if poll(&mut fds, PollTimeout::ZERO).map_err(|e| NoRoute::Here(e.desc().into()))? == 0 {
        return Ok(false);
    }
    match socket.get().take_error().map_err(unreachable)? {
        Some(e) => Err(unreachable(e)),
        None => Ok(true),
    }
}
