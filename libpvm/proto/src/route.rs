//! Messages by which two tasks set up a route of their own. Their daemons carry these messages.
//!
//! - A message reaches the task wherever it runs, in order with the other items of its daemon. If
//!   the task has ended, the sender receives [`crate::task::ToTask::PeerGone`].
//! - If two offers cross, the one of the smaller tid counts; no further message is needed.
//! - Both ends forget an offer that stays unanswered because a task migrates.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Largest number of descriptors that travel with one message.
pub const ROUTE_FDS_MAX: usize = 2;
pub const OFFER_ADDRESSES_MAX: usize = 16;

/// Distinguishes an offer from earlier ones of the same task. The offering task chooses it, unique
/// among its offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OfferId(pub u64);

/// BLAKE3 hash of the certificate that a task created for one direct route.
pub type Fingerprint = [u8; 32];

/// A message about a route between two tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouteMsg {
    /// Offers shared memory for both directions, to a task on the same host. Two descriptors travel
    /// along: the rings and the offering task's doorbell.
    RingOffer {
        id: OfferId,
        /// The link's slot in the offering task's doorbell.
        slot: u32,
    },
    /// The rings are in use. One descriptor travels along: the accepting task's doorbell.
    RingAccept {
        id: OfferId,
        /// The link's slot in the accepting task's doorbell.
        slot: u32,
    },
    /// The rings are refused for the moment; the daemons continue to carry the messages.
    RingRefuse { id: OfferId },
    /// Offers a direct route, which the program requested (`PvmRouteDirect`).
    ///
    /// Tasks on one host use their rings for it. Others connect to one of the addresses by TLS,
    /// with exactly the two certificates that offer and acceptance name.
    DirectOffer {
        id: OfferId,
        /// Addresses on which the offering task listens; empty if it cannot listen.
        addresses: Vec<SocketAddr>,
        /// Hash of the offering task's certificate.
        fingerprint: Fingerprint,
        /// Incarnation of the offering end's link. Frames on a direct route do not carry it, so
        /// both ends use the later one.
        incarnation: u16,
    },
    /// The peer's program accepts the route. Its library connects next, unless both tasks are on
    /// one host.
    DirectAccept {
        id: OfferId,
        /// Hash of the accepting task's certificate.
        fingerprint: Fingerprint,
        /// Incarnation of the accepting end's link.
        incarnation: u16,
    },
    /// The peer's program does not allow direct routes (`PvmDontRoute`), or cannot have one.
    DirectRefuse { id: OfferId },
    /// Offers a shared pool: memory that only its task can write and in which large messages lie
    /// from now on. One descriptor travels along. Has effect only for a task on the same host.
    PoolOffer { id: OfferId },
    /// The pool is mapped and can be read.
    PoolAccept { id: OfferId },
}

impl RouteMsg {
    /// Returns the number of descriptors that travel with the message.
    pub fn fd_count(&self) -> usize {
        match self {
            RouteMsg::RingOffer { .. } => 2,
            RouteMsg::RingAccept { .. } | RouteMsg::PoolOffer { .. } => 1,
            _ => 0,
        }
    }
}
