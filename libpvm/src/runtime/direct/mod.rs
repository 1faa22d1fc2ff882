//! Connections of direct routes between two tasks on different hosts: TLS 1.3 over TCP, without a
//! daemon in between.
//!
//! Each side creates a key and a certificate for one route only. The daemons, which have
//! authenticated each other, carry the certificates' fingerprints. In the handshake each side
//! accepts exactly the certificate with the announced fingerprint; before that, it reads nothing
//! but the handshake. The task that offers the route listens ([`Acceptor`]), the task that accepts
//! it connects ([`Dialer`]). Both get a [`FrameStream`], which carries whole frames.
//!
//! No function here blocks: the caller polls the descriptors and calls again.
//!
//! | Module | Content |
//! | --- | --- |
//! | `identity` | keys, certificates, and the check of the peer's certificate |
//! | `handshake` | TLS handshake on a TCP connection |
//! | `accept`, `dial` | the two sides of the setup |
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

/// Maximum length of a frame.
pub(crate) const FRAME_BYTES_MAX: usize = LINK_HEAD_BYTES + FRAGMENT_BYTES_MAX;
/// Maximum number of bytes read from an unauthenticated peer. The library's own handshake takes
/// less than 2 KiB per side.
const HANDSHAKE_BYTES_MAX: usize = 16 << 10;
/// Time within which a peer that has connected must authenticate.
pub(crate) const AUTHENTICATION_TIMEOUT: Micros = Micros::from_secs(5);
/// Maximum number of unauthenticated connections; a further one replaces the oldest.
pub(crate) const UNAUTHENTICATED_MAX: usize = 32;
/// Maximum number of open offers.
pub(crate) const OFFERS_MAX: usize = 256;
/// Time within which an offer must become a route.
pub(crate) const OFFER_TIMEOUT: Micros = Micros::from_secs(15);
/// Timeout for one address, including the handshake.
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
    #[error("the peer could not be authenticated: {0}")]
    Unauthenticated(String),
    /// The setup timed out.
    #[error("the peer took too long")]
    TimedOut,
    /// The maximum number of open offers is reached.
    #[error("{OFFERS_MAX} offers of direct routes are open already")]
    TooManyOffers,
}

/// Reason why an established route ended. Frames in transit are lost; the links send them again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RouteEnd {
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
