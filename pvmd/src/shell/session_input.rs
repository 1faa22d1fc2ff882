//! Inputs from the sessions with other daemons to the loop, and the types that these inputs carry.
//! [`super::session`] produces them, [`super::net`] handles them.

use super::outbox::Outbox;
use pvmd_machine::pair_streams::{LaneEntry, LaneId, MainEntry};
use quinn::Connection;
use sempa_proto::frame::FrameDecoder;
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Inputs from the sessions to the loop.
#[derive(Debug)]
pub(crate) enum NetInput {
    /// A connection has completed its handshake.
    HandshakeDone {
        host: HostId,
        connection: Connection,
    },
    /// A session is established; `channels` are its send queues.
    SessionUp {
        host: HostId,
        number: u64,
        channels: SessionQueues,
    },
    Control {
        host: HostId,
        number: u64,
        message: HostMsg,
    },
    /// An item of the data channel, in the order of its stream.
    Data {
        host: HostId,
        number: u64,
        item: DataItem,
    },
    /// Announces an image transfer.
    Images(TransferAnnouncement),
    /// Announces a post-copy memory transfer.
    Memory(TransferAnnouncement),
    /// A session stream for a bulk transfer, because TCP is blocked.
    FallbackStream {
        host: HostId,
        migration: MigrationId,
        what: BulkContent,
        streams: (quinn::SendStream, quinn::RecvStream),
    },
    /// A session has ended, or failed to come up.
    SessionDown {
        host: HostId,
        number: u64,
        why: String,
    },
    /// A connection attempt has ended. A successful one was reported before as
    /// [`NetInput::HandshakeDone`].
    ConnectEnded { host: HostId },
}

/// A transfer that another host announces on a stream of its own; the stream carries further data.
#[derive(Debug)]
pub(crate) struct TransferAnnouncement {
    pub(crate) context: SessionContext,
    pub(crate) migration: MigrationId,
    pub(crate) session: Connection,
    pub(crate) stream: quinn::RecvStream,
    pub(crate) decoder: FrameDecoder,
}

/// The two ends of a session, and its lease.
#[derive(Clone, Debug)]
pub(crate) struct SessionContext {
    pub(crate) vm: String,
    pub(crate) own_host: HostId,
    /// The peer, as named by its certificate.
    pub(crate) host: HostId,
    /// Number of the session, unique in this daemon.
    pub(crate) number: u64,
    /// Silence after which the peer is considered lost.
    pub(crate) lease: Duration,
}

/// An item of one of the streams that make up the data channel.
#[derive(Debug)]
pub(crate) enum DataItem {
    /// From the main stream.
    Main(MainEntry<DataMsg>),
    /// From a pair stream.
    Lane(LaneId, LaneEntry<DataMsg>),
}

/// The queues of a session that is up.
#[derive(Clone, Debug)]
pub(crate) struct SessionQueues {
    /// Queue of the control stream; accepts complete frames.
    pub(crate) control: Outbox,
    /// Queue of the main stream of the data channel.
    pub(crate) data: Outbox,
    /// For opening further streams and for closing the session.
    pub(crate) connection: Connection,
}

/// Kind of data that a bulk transfer carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum BulkContent {
    /// Images of a migration or checkpoint.
    Images,
    /// Memory of a task in post-copy.
    Memory,
}
