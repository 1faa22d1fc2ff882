//! A route of their own between two tasks on different hosts: TLS 1.3 over TCP, without a daemon in between.
//!
//! Each side makes a key and a certificate for this one route. Their fingerprints go through the daemons, which have
//! proved themselves to each other; in the handshake each side accepts exactly the certificate with the fingerprint that
//! it was told, and nothing is read beyond the handshake before. The task that offers listens ([`Acceptor`]), the one that
//! accepts connects ([`Dialer`]); both end up with a [`DirectEnd`], which carries whole frames.
//!
//! Nothing here waits. The owner polls on the descriptors and calls on.
//!
//! * `identity`: keys, certificates, who is believed. `handshake`: from a connection to an end.
//! * `accept`, `dial`: the two sides of the way to a route.
//! * `record`: TLS records. `end`: frames.

mod accept;
mod dial;
mod end;
mod handshake;
mod identity;
mod record;
#[cfg(test)]
mod tests;

pub(crate) use accept::Acceptor;
pub(crate) use dial::Dialer;
pub(crate) use end::DirectEnd;
pub(crate) use identity::Identity;

use sempa_proto::Micros;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, LINK_HEAD_BYTES};

/// Longest frame.
pub(crate) const FRAME_BYTES_MAX: usize = LINK_HEAD_BYTES + FRAGMENT_BYTES_MAX;
/// Bytes that may come before a peer has proved who it is; a handshake of ours takes less than 2 KiB per side.
const HANDSHAKE_BYTES_MAX: usize = 16 << 10;
/// Time for a stranger who has connected to prove who it is.
pub(crate) const STRANGER_WITHIN: Micros = Micros::from_secs(5);
/// Connections that have not proved who they are; another one takes the place of the oldest.
pub(crate) const STRANGERS_MAX: usize = 32;
/// Offers open at a time.
pub(crate) const OFFERS_MAX: usize = 256;
/// Time for an offer to become a route.
pub(crate) const OFFER_WITHIN: Micros = Micros::from_secs(15);
/// Time for one address to answer.
pub(crate) const ADDRESS_WITHIN: Micros = Micros::from_secs(2);
/// Time for all addresses together, the handshake included.
pub(crate) const DIAL_WITHIN: Micros = Micros::from_secs(10);

/// Why there is no direct route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoRoute {
    /// The system gives us no socket, or no key.
    #[error("a direct route cannot be set up here: {0}")]
    Here(String),
    /// No address of the peer could be reached.
    #[error("no address of the peer answers: {0}")]
    Unreachable(String),
    /// The peer is not who it should be, or speaks something else.
    #[error("who answered is not the peer: {0}")]
    Stranger(String),
    /// It took too long.
    #[error("the peer took too long")]
    Late,
    /// As many offers are open as there may be.
    #[error("{OFFERS_MAX} offers of direct routes are open already")]
    TooMany,
}

/// Why a route that stood is no more. What was on its way is lost; links send it again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Ended {
    /// The peer closed it in order.
    #[error("the peer has closed the direct route")]
    Closed,
    /// The connection broke, or the peer died.
    #[error("the direct route broke: {0}")]
    Broken(String),
    /// What came is not what a peer sends.
    #[error("the direct route was closed because of what came on it: {0}")]
    Garbage(&'static str),
}
