//! Messages by which two tasks set up a route between each other: rings, a direct connection or a
//! shared pool. Their daemons forward these messages.
//!
//! - A message reaches the task on whatever host the task runs, in order with the other items of
//!   the task's daemon. If the task has ended, the sender receives
//!   [`crate::task::ToTask::PeerGone`].
//! - If each of two tasks sends an offer to the other, only the offer of the task with the smaller
//!   tid is valid; no further message is needed.
//! - If an offer is not answered because one of the two tasks migrates, both tasks discard the
//!   offer.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Maximum number of descriptors that are passed with one message.
pub const ROUTE_FDS_MAX: usize = 2;
pub const OFFER_ADDRESSES_MAX: usize = 16;

/// Environment variable that selects which direct routes there are; see
/// [`allows_automatic_routes`]. The library reads it for its task, and the daemon for all tasks of
/// its host.
pub const DIRECT_ROUTES_VARIABLE: &str = "SEMPA_DIRECT_ROUTES";

/// True if the value of [`DIRECT_ROUTES_VARIABLE`] permits direct routes that no program has
/// requested.
///
/// # Errors
/// The value is neither `automatic` nor `requested`.
pub fn allows_automatic_routes(value: Option<&str>) -> Result<bool, UnknownDirectRoutes> {
    match value {
        None | Some("" | "automatic") => Ok(true),
        Some("requested") => Ok(false),
        Some(other) => Err(UnknownDirectRoutes(other.to_string())),
    }
}

/// Error: the value of [`DIRECT_ROUTES_VARIABLE`] is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "SEMPA_DIRECT_ROUTES={0:?} is neither automatic nor requested: tasks have only the direct routes that programs \
     request"
)]
pub struct UnknownDirectRoutes(String);

/// Id that distinguishes an offer from other offers of the same task. The offering task chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OfferId(pub u64);

/// BLAKE3 hash of the certificate that a task created for one direct route.
pub type Fingerprint = [u8; 32];

/// A message about a route between two tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouteMsg {
    /// Offers shared memory for both directions to a task on the same host. Two descriptors are
    /// passed with the message: the rings and the offering task's doorbell.
    RingOffer {
        id: OfferId,
        /// Slot of this link in the offering task's doorbell.
        slot: u32,
    },
    /// Accepts the rings, which are used from now on. One descriptor is passed with the message:
    /// the accepting task's doorbell.
    RingAccept {
        id: OfferId,
        /// Slot of this link in the accepting task's doorbell.
        slot: u32,
    },
    /// Refuses the rings; a later offer may be accepted. The daemons continue to forward the
    /// messages.
    RingRefuse { id: OfferId },
    /// Offers a direct route, which the program (`PvmRouteDirect`) or its library requested.
    ///
    /// Two tasks on the same host use their rings as the direct route. Otherwise the accepting task
    /// connects by TLS to one of the addresses. Each task accepts only the certificate whose
    /// fingerprint the other task has sent in the offer or in the acceptance.
    DirectOffer {
        id: OfferId,
        /// Addresses on which the offering task listens; empty if the task cannot listen.
        addresses: Vec<SocketAddr>,
        /// Hash of the offering task's certificate.
        fingerprint: Fingerprint,
        /// Incarnation of the offering task's end of the link. Frames on a direct route do not
        /// contain an incarnation, so both tasks use the later one of their two incarnations.
        incarnation: u16,
        /// True if the library requested the route and the program knows nothing of it.
        is_automatic: bool,
    },
    /// Accepts the direct route. The library of the accepting task connects next, unless both tasks
    /// are on the same host.
    DirectAccept {
        id: OfferId,
        /// Hash of the accepting task's certificate.
        fingerprint: Fingerprint,
        /// Incarnation of the accepting task's end of the link.
        incarnation: u16,
    },
    /// Refuses the direct route, because the program does not allow direct routes (`PvmDontRoute`)
    /// or the task cannot have one. Also reports that the accepting task could not connect.
    DirectRefuse { id: OfferId },
    /// Offers a shared pool: memory that only the offering task can write, and in which its large
    /// messages are stored from now on. One descriptor is passed with the message. A task on
    /// another host ignores the offer.
    PoolOffer { id: OfferId },
    /// Accepts the pool. The accepting task has mapped the pool and can read it.
    PoolAccept { id: OfferId },
}

impl RouteMsg {
    /// Returns the number of descriptors that are passed with the message.
    pub fn fd_count(&self) -> usize {
        match self {
            Self::RingOffer { .. } => 2,
            Self::RingAccept { .. } | Self::PoolOffer { .. } => 1,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_values_permit_automatic_routes() {
        for (value, is_allowed) in [
            (None, true),
            (Some(""), true),
            (Some("automatic"), true),
            (Some("requested"), false),
        ] {
            assert_eq!(allows_automatic_routes(value), Ok(is_allowed));
        }
        let error = allows_automatic_routes(Some("Automatic")).expect_err("unknown");
        assert!(error.to_string().contains("\"Automatic\""), "{error}");
    }
}
