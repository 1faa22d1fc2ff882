//! Connections of direct routes between two tasks on different hosts: TLS 1.3 over TCP, without a
//! daemon in between.
//!
//! Each side creates a key and a certificate for one route only. The daemons, which have
//! authenticated each other, carry the certificates' fingerprints. In the handshake each side
//! accepts exactly the certificate with the announced fingerprint; before the peer is
//! authenticated, each side reads only the handshake. The task that offers the route listens
//! ([`Acceptor`]), the task that accepts the offer connects ([`Dialer`]). Both tasks then have a
//! [`FrameStream`], which carries whole frames.
//!
//! No function here blocks: the caller polls the descriptors and calls again.
//!
//! | Module | Content |
//! | --- | --- |
//! | `identity` | keys, certificates, and the check of the peer's certificate |
//! | `handshake` | TLS handshake on a TCP connection |
//! | `accept`, `dial` | the listening and the connecting side of the setup |
//! | `record` | TLS records |
//! | `frame_stream` | frames on an established route |

mod accept;
mod dial;
mod frame_stream;
mod handshake;
mod identity;
mod record;
#[cfg(test)]
mod tests;

pub(crate) use accept::Acceptor;
pub(crate) use dial::Dialer;
pub(crate) use frame_stream::FrameStream;
pub(crate) use identity::Identity;

use sempa_proto::Micros;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, LINK_HEAD_BYTES};

/// Maximum length of a frame in bytes: a link header and a fragment of maximum size.
pub(crate) const FRAME_BYTES_MAX: usize = LINK_HEAD_BYTES + FRAGMENT_BYTES_MAX;
/// Maximum number of bytes read from an unauthenticated peer. The library's own handshake takes
/// less than 2 KiB per side.
const HANDSHAKE_BYTES_MAX: usize = 16 << 10;
/// Timeout for the authentication of a peer that has connected.
pub(crate) const AUTHENTICATION_TIMEOUT: Micros = Micros::from_secs(5);
/// Maximum number of unauthenticated connections; a further one replaces the oldest.
pub(crate) const UNAUTHENTICATED_CONNECTIONS_MAX: usize = 32;
/// Maximum number of open offers.
pub(crate) const OFFERS_MAX: usize = 256;
/// Timeout from an offer until its route is established.
pub(crate) const OFFER_TIMEOUT: Micros = Micros::from_secs(15);
/// Timeout of the connection attempt to one address, including the handshake.
pub(crate) const ADDRESS_TIMEOUT: Micros = Micros::from_secs(2);
/// Timeout for all addresses together, including the handshakes.
pub(crate) const DIAL_TIMEOUT: Micros = Micros::from_secs(10);

/// Reason why a direct route was not established.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SetupError {
    /// This host provides no socket or no key.
    #[error("a direct route cannot be set up here: {0}")]
    Local(String),
    /// No address of the peer could be reached.
    #[error("no address of the peer answers: {0}")]
    Unreachable(String),
    /// The peer failed to authenticate, or uses another protocol.
    #[error("who answered is not the peer: {0}")]
    Unauthenticated(String),
    #[error("the peer took too long")]
    TimedOut,
    #[error("{OFFERS_MAX} offers of direct routes are open already")]
    TooManyOffers,
}

/// Reason why an established route ended. Frames in transit are lost; the links send them again on
/// another route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RouteEnd {
    /// The peer closed the route properly.
    #[error("the peer has closed the direct route")]
    Closed,
    /// The connection broke, or the peer died.
    #[error("the direct route broke: {0}")]
    Broken(String),
    /// The peer sent data that violates the protocol.
    #[error("the direct route was closed because of what came on it: {0}")]
    ProtocolError(&'static str),
}
