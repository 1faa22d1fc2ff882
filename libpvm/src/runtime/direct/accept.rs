//! Listening side of a direct route: keeps the offers of this task, and authenticates the peers
//! that connect.

use super::handshake::Handshake;
use super::{
    DirectEnd, Identity, NoRoute, OFFER_WITHIN, OFFERS_MAX, STRANGER_WITHIN, STRANGERS_MAX,
};
use crate::runtime::process::{Own, mark};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{MsgFlags, recv};
use sempa_proto::Micros;
use sempa_proto::route::{Fingerprint, OfferId};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

/// First bytes of a connection, in plain text; the id of the offer follows. The preamble selects
/// the certificate and proves nothing.
const PREAMBLE: [u8; 8] = *b"sempa-d1";
pub(super) const PREAMBLE_BYTES: usize = 16;

/// Returns the preamble for an offer.
pub(super) fn preamble(id: OfferId) -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..8].copy_from_slice(&PREAMBLE);
    bytes[8..].copy_from_slice(&id.0.to_le_bytes());
    bytes
}

struct Offer {
    identity: Identity,
    /// Expected certificate; known when the peer has accepted the offer.
    peer: Option<Fingerprint>,
    until: Micros,
}

/// Setup stage of a connection.
enum Stage {
    /// The preamble has not arrived completely.
    Preamble(Vec<u8>, Own<TcpStream>),
    /// The peer's acceptance of this offer has not arrived: the daemons can be slower than the
    /// connection.
    Early(OfferId, Own<TcpStream>),
    Handshake(OfferId, Box<Handshake>),
}

struct Stranger {
    stage: Stage,
    until: Micros,
}

/// Offers of this task and the unauthenticated connections to them. Listens while an offer is open.
#[derive(Default)]
pub(crate) struct Acceptor {
    listener: Option<Own<TcpListener>>,
    port: u16,
    offers: BTreeMap<OfferId, Offer>,
    strangers: Vec<Stranger>,
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Acceptor {
            port,
            offers,
            strangers,
            ..
        } = self;
        write!(
            f,
            "Acceptor {{ port: {port}, offers: {}, strangers: {} }}",
            offers.len(),
            strangers.len()
        )
    }
}

impl Acceptor {
    /// Opens an offer. Returns the port to connect to and the fingerprint of this side's
    /// certificate.
    ///
    /// # Errors
    /// Too many offers are open, or this host provides no socket or key.
    pub(crate) fn offer(
        &mut self,
        now: Micros,
        id: OfferId,
    ) -> Result<(u16, Fingerprint), NoRoute> {
        if self.offers.len() >= OFFERS_MAX {
            return Err(NoRoute::TooMany);
        }
        let identity = Identity::new()?;
        if self.listener.is_none() {
            let listener = listen().map_err(|e| NoRoute::Here(e.to_string()))?;
            self.port = listener
                .local_addr()
                .map_err(|e| NoRoute::Here(e.to_string()))?
                .port();
            self.listener = Some(Own::fd(listener));
        }
        let fingerprint = identity.fingerprint();
        self.offers.insert(
            id,
            Offer {
                identity,
                peer: None,
                until: now + OFFER_WITHIN,
            },
        );
        Ok((self.port, fingerprint))
    }

    /// Records that the peer has accepted the offer and will use this certificate.
    pub(crate) fn accepted(&mut self, id: OfferId, fingerprint: Fingerprint) {
        if let Some(offer) = self.offers.get_mut(&id) {
            offer.peer = Some(fingerprint);
        }
    }

    /// Withdraws an offer, so that connections to it are refused.
    pub(crate) fn withdraw(&mut self, id: OfferId) {
        self.offers.remove(&id);
        self.tidy();
    }

    /// Withdraws all offers and closes all connections.
    pub(crate) fn close(&mut self) {
        *self = Acceptor::default();
    }

    /// True if no descriptor is open.
    pub(crate) fn is_idle(&self) -> bool {
        self.listener.is_none() && self.strangers.is_empty()
    }

    /// Adds the descriptors to poll.
    pub(crate) fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        if let Some(listener) = &self.listener {
            fds.push(PollFd::new(listener.get().as_fd(), PollFlags::POLLIN));
        }
        for stranger in &self.strangers {
            match &stranger.stage {
                Stage::Preamble(_, socket) => {
                    fds.push(PollFd::new(socket.get().as_fd(), PollFlags::POLLIN))
                }
                // Not polled: data that the peer has sent already would keep the descriptor
                // readable. If the peer disconnects, the deadline removes it.
                Stage::Early(..) => {}
                Stage::Handshake(_, handshake) => {
                    fds.push(PollFd::new(handshake.fd(), handshake.wants()))
                }
            }
        }
    }

    /// Returns the time at which [`step`](Self::step) must be called even if no descriptor is
    /// ready.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        self.offers
            .values()
            .map(|o| o.until)
            .chain(self.strangers.iter().map(|s| s.until))
            .min()
    }

    /// Advances all connections without blocking. Returns the offers that have become routes or
    /// have failed.
    pub(crate) fn step(&mut self, now: Micros) -> Vec<(OfferId, Result<DirectEnd, NoRoute>)> {
        self.admit(now);
        let mut done = Vec::new();
        for stranger in std::mem::take(&mut self.strangers) {
            if stranger.until <= now {
                continue;
            }
            let until = stranger.until;
            match self.advance(stranger.stage) {
                // An unauthenticated peer that fails does not affect the offer, which stays open
                // for the right peer.
                Err(_) => {}
                Ok(Advanced::Stage(stage)) => self.strangers.push(Stranger { stage, until }),
                Ok(Advanced::Done(id, end)) => {
                    self.offers.remove(&id);
                    done.push((id, Ok(*end)));
                }
            }
        }
        let late: Vec<OfferId> = self
            .offers
            .iter()
            .filter(|(_, o)| o.until <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.offers.remove(&id);
            done.push((id, Err(NoRoute::Late)));
        }
        self.tidy();
        done
    }

    /// Stops listening if no offer is open.
    fn tidy(&mut self) {
        if self.offers.is_empty() {
            self.listener = None;
            self.strangers.clear();
        }
    }

    fn admit(&mut self, now: Micros) {
        while let Some(listener) = &self.listener {
            let socket = match listener.get().accept() {
                Ok((socket, _)) => socket,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                // No further connection, or no descriptor left: the next call tries again.
                Err(_) => return,
            };
            let prepared = socket
                .set_nonblocking(true)
                .and_then(|()| socket.set_nodelay(true))
                .and_then(|()| mark(&socket));
            if prepared.is_err() {
                continue;
            }
            if self.strangers.len() >= STRANGERS_MAX {
                self.strangers.remove(0);
            }
            let stage = Stage::Preamble(Vec::with_capacity(PREAMBLE_BYTES), Own::fd(socket));
            self.strangers.push(Stranger {
                stage,
                until: now + STRANGER_WITHIN,
            });
        }
    }

    fn advance(&self, stage: Stage) -> Result<Advanced, NoRoute> {
        match stage {
            Stage::Preamble(mut said, socket) => match self.read_preamble(&mut said, &socket)? {
                None => Ok(Advanced::Stage(Stage::Preamble(said, socket))),
                Some(id) => self.advance(Stage::Early(id, socket)),
            },
            Stage::Early(id, socket) => {
                let offer = self.offers.get(&id).ok_or_else(unknown)?;
                match offer.peer {
                    None => Ok(Advanced::Stage(Stage::Early(id, socket))),
                    Some(peer) => {
                        let handshake = Handshake::listening(socket, &offer.identity, peer)?;
                        self.advance(Stage::Handshake(id, Box::new(handshake)))
                    }
                }
            }
            Stage::Handshake(id, mut handshake) => {
                if !self.offers.contains_key(&id) {
                    return Err(unknown());
                }
                if !handshake.step()? {
                    return Ok(Advanced::Stage(Stage::Handshake(id, handshake)));
                }
                let mut end = handshake.finish()?;
                // Confirms to the peer that it is authenticated. Until then the peer sends nothing.
                end.push(&[]);
                end.flush().map_err(|e| NoRoute::Stranger(e.to_string()))?;
                Ok(Advanced::Done(id, Box::new(end)))
            }
        }
    }

    fn read_preamble(
        &self,
        said: &mut Vec<u8>,
        socket: &Own<TcpStream>,
    ) -> Result<Option<OfferId>, NoRoute> {
        let mut bytes = [0; PREAMBLE_BYTES];
        let missing = &mut bytes[said.len()..];
        match recv(socket.get().as_raw_fd(), missing, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(unknown()),
            Ok(got) => said.extend_from_slice(&missing[..got]),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(NoRoute::Stranger(e.desc().into())),
        }
        if !PREAMBLE.starts_with(&said[..said.len().min(PREAMBLE.len())]) {
            return Err(unknown());
        }
        let Ok(whole) = <[u8; PREAMBLE_BYTES]>::try_from(&said[..]) else {
            return Ok(None);
        };
        let id = OfferId(u64::from_le_bytes(
            *whole.last_chunk().expect("sixteen bytes"),
        ));
        if self.offers.contains_key(&id) {
            Ok(Some(id))
        } else {
            Err(unknown())
        }
    }
}

enum Advanced {
    Stage(Stage),
    Done(OfferId, Box<DirectEnd>),
}

fn unknown() -> NoRoute {
    NoRoute::Stranger("it names no offer that is open".into())
}

/// Listens on a port that the kernel chooses, for IPv6 and IPv4 if the host supports both.
fn listen() -> std::io::Result<TcpListener> {
    let any = [
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
    ];
    let listener = TcpListener::bind(&any[..])?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
