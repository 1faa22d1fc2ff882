//! Incoming handshakes, and the limits of the work for peers that have not proved who they are.
//!
//! An unfinished handshake costs the daemon some 70 KB. Anybody who can send a datagram can begin
//! one, also with a forged source address. Therefore few peers are served at once without a proof
//! that they receive what is sent to their address (RFC 9000 8.1.2). All others are asked for that
//! proof, which costs no memory. Of the peers that have given the proof, each network is served
//! within a limit of its own. So hosts of other networks can still connect while a host floods this
//! daemon.

use super::input::{Input, InputSender, LogRateLimit};
use super::pki::host_of_certificate;
use super::session::{CLOSE_EXPELLED, describe_close};
use super::session_input::NetInput;
use pvmd_machine::Event;
use quinn::{Connection, Endpoint, Incoming};
use rustc_hash::FxHashMap;
use rustls::pki_types::CertificateDer;
use sempa_proto::HostId;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Time limit of an incoming handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a failed handshake counts as unfinished: the QUIC library keeps a closed
/// connection for three probe timeouts (RFC 9000 10.2), which are 3 s without a measured round
/// trip.
const CLOSED_CONNECTION_TIME: Duration = Duration::from_secs(4);
/// Maximum number of unfinished handshakes with peers whose address is not validated. Further peers
/// must validate their address first.
const UNVALIDATED_HANDSHAKES_MAX: usize = 32;
/// Maximum number of unfinished handshakes with peers whose address is validated. Further packets
/// that would begin a handshake are ignored, and their senders repeat them.
const VALIDATED_HANDSHAKES_MAX: usize = 224;
/// Maximum number of unfinished handshakes with validated addresses of one network: one IPv4
/// address, or the 64 bits of an IPv6 address that an ordinary network owns.
const HANDSHAKES_PER_NETWORK_MAX: usize = 16;
/// Maximum number of datagrams that begin a handshake and have not been read by the daemon yet.
pub(super) const UNREAD_HANDSHAKES_MAX: usize = 256;
/// Maximum number of bytes stored for a handshake that has not begun, and for all of them. A client
/// sends at most a few datagrams before the first reply.
pub(super) const UNREAD_HANDSHAKE_BYTES_MAX: u64 = 32 << 10;
pub(super) const UNREAD_BYTES_MAX: u64 = 1 << 20;

/// The part of an address that one user can be expected to own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Network {
    V4([u8; 4]),
    V6([u8; 8]),
}

impl Network {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(v4) => Self::V4(v4.octets()),
            IpAddr::V6(v6) => {
                let [a, b, c, d, e, f, g, h, ..] = v6.octets();
                Self::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

/// What happens with a datagram that would begin a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Serve(Slot),
    /// The peer must validate its address and begin again.
    ValidateAddress,
    /// The datagram is ignored. The peer repeats it.
    Ignore(Full),
}

/// The limit that an ignored datagram would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Full {
    Total,
    Network,
}

/// The counter that counts an unfinished handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Unvalidated,
    Validated(Network),
}

/// Numbers of unfinished handshakes.
#[derive(Debug, Default)]
struct HandshakeCounts {
    unvalidated_count: usize,
    validated_count: usize,
    /// Handshakes of validated addresses by network; only networks with at least one.
    network_counts: FxHashMap<Network, usize>,
}

impl HandshakeCounts {
    /// Decides about a datagram that would begin a handshake, and counts the handshake if it is
    /// served. [`HandshakeCounts::release`] must be called when it has ended.
    fn admit(&mut self, address: IpAddr, is_validated: bool) -> Admission {
        if !is_validated {
            if self.unvalidated_count >= UNVALIDATED_HANDSHAKES_MAX {
                return Admission::ValidateAddress;
            }
            self.unvalidated_count += 1;
            return Admission::Serve(Slot::Unvalidated);
        }
        if self.validated_count >= VALIDATED_HANDSHAKES_MAX {
            return Admission::Ignore(Full::Total);
        }
        let network = Network::of(address);
        let network_count = self.network_counts.entry(network).or_default();
        if *network_count >= HANDSHAKES_PER_NETWORK_MAX {
            return Admission::Ignore(Full::Network);
        }
        *network_count += 1;
        self.validated_count += 1;
        Admission::Serve(Slot::Validated(network))
    }

    fn release(&mut self, slot: Slot) {
        match slot {
            Slot::Unvalidated => self.unvalidated_count -= 1,
            Slot::Validated(network) => {
                self.validated_count -= 1;
                if let Some(network_count) = self.network_counts.get_mut(&network) {
                    *network_count -= 1;
                    if *network_count == 0 {
                        self.network_counts.remove(&network);
                    }
                }
            }
        }
    }

    fn total(&self) -> usize {
        self.unvalidated_count + self.validated_count
    }
}

/// The counts that all handshakes of an endpoint share.
#[derive(Clone, Debug, Default)]
struct HandshakeGate {
    counts: Arc<Mutex<HandshakeCounts>>,
}

impl HandshakeGate {
    fn lock(&self) -> MutexGuard<'_, HandshakeCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts an unfinished handshake until it is dropped.
struct HeldSlot {
    gate: HandshakeGate,
    slot: Slot,
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        self.gate.lock().release(self.slot);
    }
}

/// Accepts connections until the endpoint is closed, and passes each connection to the loop after
/// its handshake. The handshake fails for a peer without a certificate of this virtual machine. The
/// endpoint ignores all packets that are not QUIC.
pub(super) async fn accept_connections(endpoint: Endpoint, vm: String, inputs: InputSender) {
    let acceptor = Acceptor {
        vm,
        inputs,
        gate: HandshakeGate::default(),
        refusal_log_limit: Arc::new(LogRateLimit::new()),
        validation_log_limit: Arc::new(LogRateLimit::new()),
        ignored_log_limit: Arc::new(LogRateLimit::new()),
    };
    while let Some(incoming) = endpoint.accept().await {
        acceptor.admit(incoming);
    }
}

#[derive(Clone)]
struct Acceptor {
    vm: String,
    inputs: InputSender,
    gate: HandshakeGate,
    refusal_log_limit: Arc<LogRateLimit>,
    validation_log_limit: Arc<LogRateLimit>,
    ignored_log_limit: Arc<LogRateLimit>,
}

impl Acceptor {
    fn admit(&self, incoming: Incoming) {
        let peer_address = incoming.remote_address();
        let is_validated = incoming.remote_address_validated();
        let (admission, total) = {
            let mut counts = self.gate.lock();
            let admission = counts.admit(peer_address.ip(), is_validated);
            (admission, counts.total())
        };
        let slot = match admission {
            Admission::Serve(slot) => slot,
            Admission::ValidateAddress => {
                if self.validation_log_limit.try_acquire() {
                    tracing::warn!(
                        "{total} handshakes are unfinished, {UNVALIDATED_HANDSHAKES_MAX} of them with peers whose \
                         address is not validated, the limit: {peer_address} must validate its address first"
                    );
                }
                // Retrying fails only for a validated address.
                let _ = incoming.retry();
                return;
            }
            Admission::Ignore(full) => {
                if self.ignored_log_limit.try_acquire() {
                    let (limit, whose) = match full {
                        Full::Total => (VALIDATED_HANDSHAKES_MAX, "of validated addresses"),
                        Full::Network => (HANDSHAKES_PER_NETWORK_MAX, "of its network"),
                    };
                    tracing::warn!(
                        "{total} handshakes are unfinished, {limit} of them {whose}, the limit: {peer_address} must wait"
                    );
                }
                return incoming.ignore();
            }
        };
        let held_slot = HeldSlot {
            gate: self.gate.clone(),
            slot,
        };
        tokio::spawn(self.clone().serve(incoming, peer_address, held_slot));
    }

    async fn serve(self, incoming: Incoming, peer_address: SocketAddr, held_slot: HeldSlot) {
        let handshake_result = complete_handshake(incoming, &self.vm).await;
        match handshake_result {
            Ok((host, connection)) => {
                drop(held_slot);
                let input = NetInput::HandshakeDone { host, connection };
                let _ = self.inputs.send(Input::Net(input)).await;
            }
            Err(why) => {
                if self.refusal_log_limit.try_acquire() {
                    let text = format!("refused a connection from {peer_address}: {why}");
                    let event = Event::UnauthenticatedPeer { text };
                    let _ = self.inputs.send(Input::Event(event)).await;
                }
                sleep(CLOSED_CONNECTION_TIME).await;
                drop(held_slot);
            }
        }
    }
}

/// Reason why an incoming connection was refused. No data after the handshake was processed.
#[derive(Debug, thiserror::Error)]
enum HandshakeError {
    #[error(transparent)]
    Accept(quinn::ConnectionError),
    #[error("the handshake did not end")]
    Timeout,
    #[error("{}", describe_close(.0))]
    Failed(#[source] quinn::ConnectionError),
    #[error("its certificate names no host of this virtual machine")]
    UnknownHost,
}

async fn complete_handshake(
    incoming: Incoming,
    vm: &str,
) -> Result<(HostId, Connection), HandshakeError> {
    let handshake = incoming.accept().map_err(HandshakeError::Accept)?;
    let connection = timeout(HANDSHAKE_TIMEOUT, handshake)
        .await
        .map_err(|_| HandshakeError::Timeout)?
        .map_err(HandshakeError::Failed)?;
    match peer_host(&connection, vm) {
        Some(host) => Ok((host, connection)),
        None => {
            connection.close(CLOSE_EXPELLED, b"");
            Err(HandshakeError::UnknownHost)
        }
    }
}

/// Returns the host that the peer's verified certificate names; `None` if the certificate names no
/// host of this virtual machine.
fn peer_host(connection: &Connection, vm: &str) -> Option<HostId> {
    let chain = connection
        .peer_identity()?
        .downcast::<Vec<CertificateDer<'static>>>()
        .ok()?;
    host_of_certificate(chain.first()?, vm)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// Serves handshakes until one is not served. Returns their slots and the last answer.
    fn serve_all(
        counts: &mut HandshakeCounts,
        mut next_peer: impl FnMut(usize) -> (IpAddr, bool),
    ) -> (Vec<Slot>, Admission) {
        let mut slots = Vec::new();
        loop {
            let (address, is_validated) = next_peer(slots.len());
            match counts.admit(address, is_validated) {
                Admission::Serve(slot) => slots.push(slot),
                other_admission => return (slots, other_admission),
            }
        }
    }

    /// Above the limit of peers whose address may be forged, every peer must prove its address. A
    /// peer that has done so is served.
    #[test]
    fn forged_addresses_take_no_room_of_proved_ones() {
        let mut counts = HandshakeCounts::default();
        let (slots, admission) = serve_all(&mut counts, |_| (address(1), false));
        assert_eq!(
            (slots.len(), admission),
            (UNVALIDATED_HANDSHAKES_MAX, Admission::ValidateAddress)
        );
        assert_eq!(counts.admit(address(2), false), Admission::ValidateAddress);
        for peer in [1, 2] {
            let admission = counts.admit(address(peer), true);
            assert!(matches!(admission, Admission::Serve(_)), "{admission:?}");
        }
        slots.into_iter().for_each(|slot| counts.release(slot));
        let admission = counts.admit(address(3), false);
        assert_eq!(admission, Admission::Serve(Slot::Unvalidated));
    }

    #[test]
    fn one_network_leaves_room_for_others() {
        let mut counts = HandshakeCounts::default();
        let (slots, admission) = serve_all(&mut counts, |_| (address(1), true));
        assert_eq!(
            (slots.len(), admission),
            (HANDSHAKES_PER_NETWORK_MAX, Admission::Ignore(Full::Network))
        );
        let admission = counts.admit(address(2), true);
        assert!(matches!(admission, Admission::Serve(_)), "{admission:?}");
        counts.release(slots[0]);
        let admission = counts.admit(address(1), true);
        assert!(matches!(admission, Admission::Serve(_)), "{admission:?}");
    }

    /// The addresses of one IPv6 network of 64 bits count together, and so do the two forms of an
    /// IPv4 address.
    #[test]
    fn addresses_of_one_network_count_together() {
        let mut counts = HandshakeCounts::default();
        let v6 =
            |subnet: u16, n: usize| IpAddr::from([0x2001, 0xdb8, 0, subnet, 0, 0, 0, n as u16]);
        let (slots, _) = serve_all(&mut counts, |n| (v6(0, n), true));
        assert_eq!(slots.len(), HANDSHAKES_PER_NETWORK_MAX);
        let admission = counts.admit(v6(1, 0), true);
        assert!(matches!(admission, Admission::Serve(_)), "{admission:?}");
        let mapped_address = IpAddr::from([0, 0, 0, 0, 0, 0xffff, 0x0a00, 1]);
        assert_eq!(Network::of(mapped_address), Network::of(address(1)));
    }

    #[test]
    fn all_networks_together_stay_within_the_limit() {
        let mut counts = HandshakeCounts::default();
        let peer = |n: usize| (address((n / HANDSHAKES_PER_NETWORK_MAX) as u8), true);
        let (slots, admission) = serve_all(&mut counts, peer);
        assert_eq!(
            (slots.len(), admission),
            (VALIDATED_HANDSHAKES_MAX, Admission::Ignore(Full::Total))
        );
        assert_eq!(counts.total(), VALIDATED_HANDSHAKES_MAX);
        slots.into_iter().for_each(|slot| counts.release(slot));
        assert_eq!((counts.total(), counts.network_counts.len()), (0, 0));
    }
}
