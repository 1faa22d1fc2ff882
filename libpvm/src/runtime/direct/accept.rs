//! Listening side of a direct route: stores this task's offers, and authenticates the peers that
//! connect.

use super::handshake::Handshake;
use super::{
    AUTHENTICATION_TIMEOUT, FrameStream, Identity, OFFER_TIMEOUT, OPEN_OFFERS_MAX, SetupError,
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

/// Magic number at the start of the plain-text preamble of a connection. The id of the offer
/// follows. The preamble selects the expected certificate and authenticates nothing.
const PREAMBLE_MAGIC: [u8; 8] = *b"sempa-d2";
pub(super) const PREAMBLE_BYTES: usize = 16;

/// Returns the preamble for an offer: the magic number and the id of the offer.
pub(super) fn encode_preamble(id: OfferId) -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..8].copy_from_slice(&PREAMBLE_MAGIC);
    bytes[8..].copy_from_slice(&id.0.to_le_bytes());
    bytes
}

struct OpenOffer {
    identity: Identity,
    /// Fingerprint of the expected certificate; `None` until the peer has accepted the offer.
    peer_fingerprint: Option<Fingerprint>,
    deadline: Micros,
}

/// Setup stage of a connection.
enum AcceptStage {
    /// The preamble has not arrived completely.
    Preamble(Vec<u8>, ProcessOwned<TcpStream>),
    /// The daemons have not delivered the peer's acceptance of this offer yet. The connection can
    /// arrive earlier than the acceptance.
    AwaitingAcceptance(OfferId, ProcessOwned<TcpStream>),
    Handshake(OfferId, Box<Handshake>),
}

struct PendingConn {
    stage: AcceptStage,
    deadline: Micros,
}

/// Listening side of all direct routes of this task: the open offers, and the unauthenticated
/// connections for these offers. Listens only while an offer is open.
#[derive(Default)]
pub(crate) struct Acceptor {
    listener: Option<ProcessOwned<TcpListener>>,
    port: u16,
    offers: BTreeMap<OfferId, OpenOffer>,
    pending_conns: Vec<PendingConn>,
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
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
    /// Opens an offer. Returns the port to which the peer must connect, and the fingerprint of this
    /// side's certificate.
    ///
    /// # Errors
    /// Too many offers are open, or this host provides no socket or key.
    pub(crate) fn open_offer(
        &mut self,
        now: Micros,
        id: OfferId,
    ) -> Result<(u16, Fingerprint), SetupError> {
        if self.offers.len() >= OPEN_OFFERS_MAX {
            return Err(SetupError::TooManyOffers);
        }
        let identity = Identity::new()?;
        if self.listener.is_none() {
            let listener =
                listen_on_any_port().map_err(|e| SetupError::LocalFailure(e.to_string()))?;
            self.port = listener
                .local_addr()
                .map_err(|e| SetupError::LocalFailure(e.to_string()))?
                .port();
            self.listener = Some(ProcessOwned::from_fd(listener));
        }
        let fingerprint = identity.fingerprint();
        self.offers.insert(
            id,
            OpenOffer {
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

    /// Withdraws an offer, so that connections for this offer are refused.
    pub(crate) fn withdraw_offer(&mut self, id: OfferId) {
        self.offers.remove(&id);
        self.stop_listening_without_offers();
    }

    /// Withdraws all offers and closes all connections.
    pub(crate) fn close_all(&mut self) {
        *self = Self::default();
    }

    /// True if no descriptor is open: there is no listening socket and no unauthenticated
    /// connection.
    pub(crate) fn is_idle(&self) -> bool {
        self.listener.is_none() && self.pending_conns.is_empty()
    }

    /// Adds to `fds` the descriptors that must be polled.
    pub(crate) fn add_poll_fds<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        if let Some(listener) = &self.listener {
            fds.push(PollFd::new(listener.get().as_fd(), PollFlags::POLLIN));
        }
        for conn in &self.pending_conns {
            match &conn.stage {
                AcceptStage::Preamble(_, socket) => {
                    fds.push(PollFd::new(socket.get().as_fd(), PollFlags::POLLIN))
                }
                // This descriptor is not polled, because data that the peer has already sent would
                // make the descriptor permanently readable. If the peer disconnects, the connection
                // is removed at its deadline.
                AcceptStage::AwaitingAcceptance(..) => {}
                AcceptStage::Handshake(_, handshake) => {
                    fds.push(PollFd::new(handshake.fd(), handshake.poll_flags()))
                }
            }
        }
    }

    /// Returns the time at which [`advance_connections`](Self::advance_connections) must be called
    /// even if no descriptor is ready.
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        self.offers
            .values()
            .map(|o| o.deadline)
            .chain(self.pending_conns.iter().map(|s| s.deadline))
            .min()
    }

    /// Advances all connections without blocking. Returns the offers whose route is established or
    /// whose setup has failed.
    pub(crate) fn advance_connections(
        &mut self,
        now: Micros,
    ) -> Vec<(OfferId, Result<FrameStream, SetupError>)> {
        self.accept_connections(now);
        let mut finished_offers = Vec::new();
        for conn in std::mem::take(&mut self.pending_conns) {
            if conn.deadline <= now {
                continue;
            }
            let conn_deadline = conn.deadline;
            match self.advance_stage(conn.stage) {
                // An unauthenticated peer that fails does not affect the offer. The offer stays
                // open for the intended peer.
                Err(_) => {}
                Ok(AdvanceOutcome::InProgress(stage)) => self.pending_conns.push(PendingConn {
                    stage,
                    deadline: conn_deadline,
                }),
                Ok(AdvanceOutcome::Established(id, frame_stream)) => {
                    self.offers.remove(&id);
                    finished_offers.push((id, Ok(*frame_stream)));
                }
            }
        }
        let expired_offers: Vec<OfferId> = self
            .offers
            .iter()
            .filter(|(_, o)| o.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in expired_offers {
            self.offers.remove(&id);
            finished_offers.push((id, Err(SetupError::TimedOut)));
        }
        self.stop_listening_without_offers();
        finished_offers
    }

    /// Stops listening if no offer is open any longer.
    fn stop_listening_without_offers(&mut self) {
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
                // There is no further connection, or the process has no free descriptor. The next
                // call tries again.
                Err(_) => return,
            };
            let setup_result = socket
                .set_nonblocking(true)
                .and_then(|()| socket.set_nodelay(true))
                .and_then(|()| mark_library_socket(&socket));
            if setup_result.is_err() {
                continue;
            }
            if self.pending_conns.len() >= UNAUTHENTICATED_CONNECTIONS_MAX {
                self.pending_conns.remove(0);
            }
            let stage = AcceptStage::Preamble(
                Vec::with_capacity(PREAMBLE_BYTES),
                ProcessOwned::from_fd(socket),
            );
            self.pending_conns.push(PendingConn {
                stage,
                deadline: now + AUTHENTICATION_TIMEOUT,
            });
        }
    }

    fn advance_stage(&self, stage: AcceptStage) -> Result<AdvanceOutcome, SetupError> {
        match stage {
            AcceptStage::Preamble(mut received_bytes, socket) => {
                match self.read_preamble(&mut received_bytes, &socket)? {
                    None => Ok(AdvanceOutcome::InProgress(AcceptStage::Preamble(
                        received_bytes,
                        socket,
                    ))),
                    Some(id) => self.advance_stage(AcceptStage::AwaitingAcceptance(id, socket)),
                }
            }
            AcceptStage::AwaitingAcceptance(id, socket) => {
                let offer = self.offers.get(&id).ok_or_else(unknown_offer_error)?;
                match offer.peer_fingerprint {
                    None => Ok(AdvanceOutcome::InProgress(AcceptStage::AwaitingAcceptance(
                        id, socket,
                    ))),
                    Some(expected_fingerprint) => {
                        let handshake = Handshake::start_as_server(
                            socket,
                            &offer.identity,
                            expected_fingerprint,
                        )?;
                        self.advance_stage(AcceptStage::Handshake(id, Box::new(handshake)))
                    }
                }
            }
            AcceptStage::Handshake(id, mut handshake) => {
                if !self.offers.contains_key(&id) {
                    return Err(unknown_offer_error());
                }
                if !handshake.advance()? {
                    return Ok(AdvanceOutcome::InProgress(AcceptStage::Handshake(
                        id, handshake,
                    )));
                }
                let mut frame_stream = handshake.into_frame_stream()?;
                // The empty frame confirms to the peer that this side has authenticated the peer.
                // Before this frame arrives the peer sends nothing.
                frame_stream.try_queue_frame(&[&[]; 3], 0);
                frame_stream
                    .write_queued()
                    .map_err(|e| SetupError::Unauthenticated(e.to_string()))?;
                Ok(AdvanceOutcome::Established(id, Box::new(frame_stream)))
            }
        }
    }

    fn read_preamble(
        &self,
        received_bytes: &mut Vec<u8>,
        socket: &ProcessOwned<TcpStream>,
    ) -> Result<Option<OfferId>, SetupError> {
        let mut preamble_buffer = [0; PREAMBLE_BYTES];
        let missing_bytes = &mut preamble_buffer[received_bytes.len()..];
        match recv(
            socket.get().as_raw_fd(),
            missing_bytes,
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(0) => return Err(unknown_offer_error()),
            Ok(read_bytes) => received_bytes.extend_from_slice(&missing_bytes[..read_bytes]),
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(SetupError::Unauthenticated(e.desc().into())),
        }
        if !PREAMBLE_MAGIC
            .starts_with(&received_bytes[..received_bytes.len().min(PREAMBLE_MAGIC.len())])
        {
            return Err(unknown_offer_error());
        }
        let Ok(preamble) = <[u8; PREAMBLE_BYTES]>::try_from(&received_bytes[..]) else {
            return Ok(None);
        };
        let id = OfferId(u64::from_le_bytes(
            *preamble.last_chunk().expect("sixteen bytes"),
        ));
        if self.offers.contains_key(&id) {
            Ok(Some(id))
        } else {
            Err(unknown_offer_error())
        }
    }
}

enum AdvanceOutcome {
    InProgress(AcceptStage),
    Established(OfferId, Box<FrameStream>),
}

fn unknown_offer_error() -> SetupError {
    SetupError::Unauthenticated("it names no open offer".into())
}

/// Listens on a port that the kernel chooses, for IPv6 and IPv4 if the host supports both.
fn listen_on_any_port() -> std::io::Result<TcpListener> {
    let wildcard_addresses = [
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
    ];
    let listener = TcpListener::bind(&wildcard_addresses[..])?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
