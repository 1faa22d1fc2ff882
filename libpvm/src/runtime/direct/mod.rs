//! Connections of direct routes between two tasks on different hosts: TLS 1.3 over TCP, without a
//! daemon on the path.
//!
//! Each side creates a key and a certificate for one route only. The daemons, which have
//! authenticated each other, transfer the certificates' fingerprints. In the handshake each side
//! accepts exactly the certificate with the announced fingerprint. Before the peer is
//! authenticated, each side reads only the handshake. The task that offers the route listens
//! ([`Acceptor`]); the task that accepts the offer connects ([`Dialer`]). Both tasks then have a
//! [`FrameStream`], which transfers whole frames.
//!
//! No function in this module blocks: the caller polls the descriptors and calls again.
//!
//! | Module | Content |
//! | --- | --- |
//! | `identity` | keys, certificates, and the check of the peer's certificate |
//! | `handshake` | TLS handshake on a TCP connection |
//! | `accept`, `dial` | the listening and the connecting side of the setup |
//! | `record` | TLS records |
//! | `frame_stream` | an established route; writes frames |
//! | `frame_reader` | reads frames |

mod accept;
mod dial;
mod frame_reader;
mod frame_stream;
mod handshake;
mod identity;
mod record;
#[cfg(test)]
pub(in crate::runtime) mod tests;

pub(crate) use accept::Acceptor;
pub(crate) use dial::Dialer;
pub(crate) use frame_stream::FrameStream;
pub(crate) use identity::Identity;
#[cfg(test)]
pub(crate) use record::RECORD_BYTES_MAX;

use sempa_proto::Micros;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, LINK_HEAD_BYTES, SHORT_HEAD_BYTES};

/// Maximum length of a frame in bytes: a link header and a fragment of maximum size.
pub(crate) const FRAME_BYTES_MAX: usize = LINK_HEAD_BYTES + FRAGMENT_BYTES_MAX;
/// Maximum number of bytes that are read from an unauthenticated peer. A regular handshake needs
/// less than 2 KiB per side.
const HANDSHAKE_BYTES_MAX: usize = 16 << 10;
/// Maximum time from the connection of a peer until the peer is authenticated.
pub(crate) const AUTHENTICATION_TIMEOUT: Micros = Micros::from_secs(5);
/// Maximum number of unauthenticated connections. A further connection replaces the oldest.
pub(crate) const UNAUTHENTICATED_CONNECTIONS_MAX: usize = 32;
/// Maximum number of open offers.
pub(crate) const OPEN_OFFERS_MAX: usize = 256;
/// Maximum time from an offer until its route is established.
pub(crate) const OFFER_TIMEOUT: Micros = Micros::from_secs(15);
/// Maximum duration of the connection attempt to one address, including the handshake.
pub(crate) const ADDRESS_ATTEMPT_TIMEOUT: Micros = Micros::from_secs(2);
/// Maximum duration of the connection attempts to all addresses together, including the handshakes.
pub(crate) const DIAL_TIMEOUT: Micros = Micros::from_secs(10);

/// Reason why a direct route was not established.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SetupError {
    /// This host cannot provide a socket or a key.
    #[error("a direct route cannot be set up here: {0}")]
    LocalFailure(String),
    /// No address of the peer could be reached.
    #[error("no address of the peer answers: {0}")]
    Unreachable(String),
    /// The peer failed to authenticate, or it uses another protocol.
    #[error("the peer could not be authenticated: {0}")]
    Unauthenticated(String),
    #[error("the peer took too long")]
    TimedOut,
    #[error("{OPEN_OFFERS_MAX} offers of direct routes are open already")]
    TooManyOffers,
}

/// Reason why an established route ended. Frames in transit are lost. The links send these frames
/// again on another route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RouteEndReason {
    /// The peer closed the route properly.
    #[error("the peer has closed the direct route")]
    Closed,
    /// The connection broke, or the peer died.
    #[error("the direct route broke: {0}")]
    Broken(String),
    /// The peer sent data that violates the protocol.
    #[error("the direct route was closed because of invalid data: {0}")]
    ProtocolError(&'static str),
}

/// Receives the frames of a route. The payload of a large frame is written to its message, for
/// which the sink has the memory. The head of a frame is a short head of the link.
pub(crate) trait FrameSink {
    /// Receives a whole frame.
    fn on_frame(&mut self, frame: &[u8]);

    /// True if the payload of a frame with this head may be appended to [`FrameSink::message`]: it
    /// is the next fragment.
    fn begins_placement(&mut self, head: &[u8; SHORT_HEAD_BYTES]) -> bool;

    /// True if the payload of the frame with this head, of which the message has the first
    /// `placed_bytes`, may be completed. It may not if the fragment has arrived on another route.
    fn continues_placement(&mut self, head: &[u8; SHORT_HEAD_BYTES], placed_bytes: usize) -> bool;

    /// True if the frame with this head ends a message.
    fn is_last_of_message(&self, head: &[u8; SHORT_HEAD_BYTES]) -> bool;

    /// Returns the message that is being received.
    fn message(&mut self) -> &mut Vec<u8>;

    /// Records how many bytes of an incomplete payload are at the end of the message.
    fn set_placed_bytes(&mut self, byte_count: usize);

    /// Accepts the payload of the frame with this head, which is complete in the message. If the
    /// frame is the last of its message, nothing follows the payload.
    fn accept_payload(&mut self, head: &[u8; SHORT_HEAD_BYTES], payload_bytes: usize);
}

/// What reading or writing has cost so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IoCounts {
    /// Number of bytes that this process has copied; the cipher and the kernel do not count.
    pub(crate) copied_bytes: u64,
    /// Number of calls to the kernel that read or write.
    pub(crate) calls: u64,
    /// Number of times that reading stopped inside a large payload, because the rest had not
    /// arrived.
    pub(crate) interruptions: u64,
}
