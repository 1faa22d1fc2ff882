//! What two tasks say to each other, through their daemons, to set up a route of their own.
//!
//! A word goes to the task wherever it runs, in order with other items of its daemon; one to a task that has ended comes
//! back as [`crate::task::ToTask::PeerGone`]. Two offers that cross are settled without a further word: the one of the smaller
//! tid counts. An offer that is not answered because a task moves meanwhile is forgotten by both.

use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Descriptors that may travel with one word.
pub const WORD_DESCRIPTORS_MAX: usize = 2;
/// Addresses in one offer.
pub const OFFER_ADDRESSES_MAX: usize = 16;

/// Tells an offer from earlier ones of the same task; chosen by the task that offers, unique for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OfferId(pub u64);

/// BLAKE3 hash of the certificate that a task has made for one direct route.
pub type Fingerprint = [u8; 32];

/// One word.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouteWord {
    /// Shared memory for both directions. Two descriptors travel along: the rings, and the bell of the task that offers.
    /// Only to a task on the same host.
    RingOffer {
        /// The offer.
        id: OfferId,
        /// Place of this conversation in the offering task's bell.
        slot: u32,
    },
    /// The rings are in use. One descriptor travels along: the bell of the task that accepts.
    RingAccept {
        /// The offer.
        id: OfferId,
        /// Place of this conversation in the accepting task's bell.
        slot: u32,
    },
    /// Not now: the daemons go on carrying the messages.
    RingRefuse {
        /// The offer.
        id: OfferId,
    },
    /// A direct route, as a program asks for it (`PvmRouteDirect`). Tasks on one host have their rings for it; others connect
    /// to one of the addresses, by TLS with exactly these certificates on the two sides.
    DirectOffer {
        /// The offer.
        id: OfferId,
        /// Where the offering task listens; empty when it cannot.
        addresses: Vec<SocketAddr>,
        /// Its certificate.
        fingerprint: Fingerprint,
        /// The timeline of its link, because what goes directly says nothing of it: both ends go on with the later one.
        line: u16,
    },
    /// The program there does not mind; its library connects next, unless both are on one host.
    DirectAccept {
        /// The offer.
        id: OfferId,
        /// Its certificate.
        fingerprint: Fingerprint,
        /// The timeline of its link.
        line: u16,
    },
    /// The program there wants no direct routes (`PvmDontRoute`), or cannot have one.
    DirectRefuse {
        /// The offer.
        id: OfferId,
    },
    /// Large messages lie in this memory from now on, which only its task can write. One descriptor travels along. Only to a
    /// task on the same host; to others it comes to nothing.
    StoreOffer {
        /// The offer.
        id: OfferId,
    },
    /// The store can be read.
    StoreAccept {
        /// The offer.
        id: OfferId,
    },
}

impl RouteWord {
    /// Number of descriptors that travel with it.
    pub fn descriptors(&self) -> usize {
        match self {
            RouteWord::RingOffer { .. } => 2,
            RouteWord::RingAccept { .. } | RouteWord::StoreOffer { .. } => 1,
            _ => 0,
        }
    }
}
