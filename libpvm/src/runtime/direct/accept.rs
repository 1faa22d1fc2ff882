//! Listening side of a direct route: stores this task's offers, and authenticates the peers that
//! connect.

use super::handshake::Handshake;
use super::{
    AUTHENTICATION_TIMEOUT, FrameStream, Identity, OFFER_TIMEOUT, OFFERS_MAX, SetupError,
    UNAUTHENTICATED_CONNECTIONS_MAX,
};
use crate::runtime::process::{ProcessOwned, mark_library_socket};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{MsgFlags, recv};
use sempa_proto::Micros;
use sempa_proto::route::{Fingerprint, OfferId};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};

/// Magic number at the start of the plain-text preamble of a connection; the id of the offer
/// follows. The preamble selects the expected certificate and authenticates nothing.
const PREAMBLE_MAGIC: [u8; 8] = *b"sempa-d1";
pub(super) const PREAMBLE_BYTES: usize = 16;

/// Returns the preamble for an offer.
pub(super) fn preamble(id: OfferId) -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..8].copy_from_slice(&PREAMBLE_MAGIC);
    bytes[8..].copy_from_slice(&id.0.to_le_bytes());
    bytes
}

struct Offer {
    identity: Identity,
    /// Fingerprint of the expected certificate; `None` until the peer has accepted the offer.
    peer_fingerprint: Option<Fingerprint>,
    deadline: Micros,
}

/// Setup stage of a connection.
enum AcceptStage {
    /// The preamble has not arrived completely.
    Preamble(Vec<u8>, ProcessOwned<TcpStream>),
    /// The daemons have not delivered the peer's acceptance of this offer yet: the connection can
    /// be faster than the daemons.
    AwaitingAcceptance(OfferId, ProcessOwned<TcpStream>),
    Handshake(OfferId, Box<Handshake>),
}

struct PendingConn {
    stage: AcceptStage,
    deadline: Micros,
}

/// Listening side of all direct routes of this task: the open offers, and the unauthenticated
/// connections to them. Listens only while an offer is open.
#[derive(Default)]
pub(crate) struct Acceptor {
    listener: Option<ProcessOwned<TcpListener>>,
    port: u16,
    offers: BTreeMap<OfferId, Offer>,
    pending_conns: Vec<PendingConn>,
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Acceptor {
            port,
            offers,
            pending_conns,
            ..
        } = self;
        write!(
            f,
            "Acceptor {{ port: {port}, offers: {}, strangers: {} }}",
            offers.len(),
            pending_conns.len()
        )
    }
}

impl Acceptor {
    /// Opens an offer. Returns the port to connect to and the fingerprint of this side's
    /// certificate.
    ///
    /// # Errors
    /// Too many offers are open, or this host provides no socket or key.
    pub(crate) fn open_offer(
        &mut self,
        now: Micros,
        id: OfferId,
    ) -> Result<(u16, Fingerprint), SetupError> {
        if self.offers.len() >= OFFERS_MAX {
            return Err(SetupError::TooManyOffers);
        }
        let identity = Identity::new()?;
        if self.listener.is_none() {
            let listener = listen().map_err(|e| SetupError::Local(e.to_string()))?;
            self.port = listener
                .local_addr()
                .map_err(|e| SetupError::Local(e.to_string()))?
                .port();
            self.listener = Some(ProcessOwned::new_fd(listener));
        }
        let fingerprint = identity.fingerprint();
        self.offers.insert(
            id,
            Offer {
                identity,
                peer_fingerprint: None,
                deadline: now + OFFER_TIMEOUT,
            },
        );
        Ok((self.port, fingerprint))
    }

    /// Records that the peer has accepted the offer and will use the certificate with this
    /// fingerprint.
    pub(crate) fn record_acceptance(&mut self, id: OfferId, fingerprint: Fingerprint) {
        if let Some(offer) = self.offers.get_mut(&id) {
            offer.peer_fingerprint = Some(fingerprint);
        }
    }

    /// Withdraws an offer, so that connections to it are refused.
    pub(crate) fn withdraw(&mut self, id: OfferId) {
        self.offers.remove(&id);
        self.stop_without_offers();
    }

    /// Withdraws all offers and closes all connections.
    pub(crate) fn close(&mut self) {
        *self = Acceptor::default();
    }

    /// True if no descriptor is open.
    pub(crate) fn is_idle(&self) -> bool {
        self.listener.is_none() && self.pending_conns.is_empty()
    }

    /// Adds the descriptors that must be polled to `fds`.
    pub(crate) fn add_poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        if let Some(listener) = &self.listener {
            fds.push(PollFd::new(listener.get().as_fd(), PollFlags::POLLIN));
        }
        for stranger in &self.pending_conns {
            match &stranger.stage {
                AcceptStage::Preamble(_, socket) => {
                    fds.push(PollFd::new(socket.get().as_fd(), PollFlags::POLLIN))
                }
                // Not polled: data that the peer has sent already would keep the descriptor
                // readable. If the peer disconnects, the connection is removed at its deadline.
                AcceptStage::AwaitingAcceptance(..) => {}
                AcceptStage::Handshake(_, handshake) => {
                    fds.push(PollFd::new(handshake.fd(), handshake.poll_flags()))
                }
            }
        }
    }

    /// Returns the time at which [`step`](Self::step) must be called even if no descriptor is
    /// ready.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        self.offers
            .values()
            .map(|o| o.deadline)
            .chain(self.pending_conns.iter().map(|s| s.deadline))
            .min()
    }

    /// Advances all connections without blocking. Returns the offers that have become routes, and
    /// those that have failed.
    pub(crate) fn step(&mut self, now: Micros) -> Vec<(OfferId, Result<FrameStream, SetupError>)> {
        self.accept_connections(now);
        let mut done = Vec::new();
        for conn in std::mem::take(&mut self.pending_conns) {
            if conn.deadline <= now {
                continue;
            }
            let until = conn.deadline;
            match self.advance(conn.stage) {
                // An unauthenticated peer that fails does not affect the offer, which stays open
                // for the intended peer.
                Err(_) => {}
                Ok(AdvanceOutcome::Stage(stage)) => self.pending_conns.push(PendingConn {
                    stage,
                    deadline: until,
                }),
                Ok(AdvanceOutcome::Done(id, end)) => {
                    self.offers.remove(&id);
                    done.push((id, Ok(*end)));
                }
            }
        }
        let expired: Vec<OfferId> = self
            .offers
            .iter()
            .filter(|(_, o)| o.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in expired {
            self.offers.remove(&id);
            done.push((id, Err(SetupError::TimedOut)));
        }
        self.stop_without_offers();
        done
    }

    /// Stops listening if no offer is open.
    fn stop_without_offers(&mut self) {
        if self.offers.is_empty() {
            self.listener = None;
            self.pending_conns.clear();
        }
    }

    fn accept_connections(&mut self, now: Micros) {
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
                .and_then(|()| mark_library_socket(&socket));
            if prepared.is_err() {
                continue;
            }
            if self.pending_conns.len() >= UNAUTHENTICATED_CONNECTIONS_MAX {
                self.pending_conns.remove(0);
            }
            let stage = AcceptStage::Preamble(
                Vec::with_capacity(PREAMBLE_BYTES),
                ProcessOwned::new_fd(socket),
            );
            self.pending_conns.push(PendingConn {
                stage,
                deadline: now + AUTHENTICATION_TIMEOUT,
            });
        }
    }

    fn advance(&self, stage: AcceptStage) -> Result<AdvanceOutcome, SetupError> {
        match stage {
            AcceptStage::Preamble(mut received, socket) => {
                match self.read_preamble(&mut received, &socket)? {
                    None => Ok(AdvanceOutcome::Stage(AcceptStage::Preamble(
                        received, socket,
                    ))),
                    Some(id) => self.advance(AcceptStage::AwaitingAcceptance(id, socket)),
                }
            }
            AcceptStage::AwaitingAcceptance(id, socket) => {
                let offer = self.offers.get(&id).ok_or_else(unknown_offer)?;
                match offer.peer_fingerprint {
                    None => Ok(AdvanceOutcome::Stage(AcceptStage::AwaitingAcceptance(
                        id, socket,
                    ))),
                    Some(peer) => {
                        let handshake =
                            Handshake::for_listening_side(socket, &offer.identity, peer)?;
                        self.advance(AcceptStage::Handshake(id, Box::new(handshake)))
                    }
                }
            }
            AcceptStage::Handshake(id, mut handshake) => {
                if !self.offers.contains_key(&id) {
                    return Err(unknown_offer());
                }
                if !handshake.step()? {
                    return Ok(AdvanceOutcome::Stage(AcceptStage::Handshake(id, handshake)));
                }
                let mut end = handshake.finish()?;
                // The empty frame confirms to the peer that this side has authenticated it. Before
                // this frame the peer sends nothing.
                end.push(&[]);
                end.flush()
                    .map_err(|e| SetupError::Unauthenticated(e.to_string()))?;
                Ok(AdvanceOutcome::Done(id, Box::new(end)))
            }
        }
    }

    fn read_preamble(
        &self,
        received: &mut Vec<u8>,
        socket: &ProcessOwned<TcpStream>,
    ) -> Result<Option<OfferId>, SetupError> {
        let mut bytes = [0; PREAMBLE_BYTES];
        let missing = &mut bytes[received.len()..];
        match recv(socket.get().as_raw_fd(), missing, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(unknown_offer()),
            Ok(got) => received.extend_from_slice(&missing[..got]),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(SetupError::Unauthenticated(e.desc().into())),
        }
        if !PREAMBLE_MAGIC.starts_with(&received[..received.len().min(PREAMBLE_MAGIC.len())]) {
            return Err(unknown_offer());
        }
        let Ok(whole) = <[u8; PREAMBLE_BYTES]>::try_from(&received[..]) else {
            return Ok(None);
        };
        let id = OfferId(u64::from_le_bytes(
            *whole.last_chunk().expect("sixteen bytes"),
        ));
        if self.offers.contains_key(&id) {
            Ok(Some(id))
        } else {
            Err(unknown_offer())
        }
    }
}

enum AdvanceOutcome {
    Stage(AcceptStage),
    Done(OfferId, Box<FrameStream>),
}

fn unknown_offer() -> SetupError {
    SetupError::Unauthenticated("it names no offer that is open".into())
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
