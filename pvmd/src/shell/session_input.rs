//! Inputs that the daemon's loop receives from the sessions with other daemons, and the types of
//! their content. [`super::session`] produces the inputs, [`super::net`] handles them.

use super::outbox::Outbox;
use pvmd_machine::pair_streams::{LaneEntry, LaneId, MainEntry};
use quinn::Connection;
use sempa_proto::frame::FrameDecoder;
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::{HostId, MigrationId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Inputs of the daemon's loop from the sessions with other daemons.
#[derive(Debug)]
pub(crate) enum NetInput {
    /// A connection has completed its handshake.
    HandshakeDone {
        host: HostId,
        connection: Connection,
    },
    /// A session is established. `queues` contains its send queues.
    SessionUp {
        host: HostId,
        session_number: u64,
        queues: SessionQueues,
    },
    Control {
        host: HostId,
        session_number: u64,
        message: HostMsg,
    },
    /// An item of the data channel. The items of one stream are delivered in order.
    Data {
        host: HostId,
        session_number: u64,
        item: DataItem,
    },
    /// The peer announces an image transfer.
    ImagesAnnounced(TransferAnnouncement),
    /// The peer announces a post-copy memory transfer.
    MemoryAnnounced(TransferAnnouncement),
    /// The peer has opened a session stream for a bulk transfer, because TCP is blocked.
    FallbackStream {
        host: HostId,
        migration: MigrationId,
        content: BulkContent,
        streams: (quinn::SendStream, quinn::RecvStream),
    },
    /// A session has ended, or could not be established.
    SessionDown {
        host: HostId,
        session_number: u64,
        reason: String,
    },
    /// A connection attempt has ended. If the attempt succeeded, [`NetInput::HandshakeDone`] was
    /// sent before.
    ConnectEnded { host: HostId },
}

/// A transfer that another host announces on a separate stream. Further data about the transfer
/// follows on this stream.
#[derive(Debug)]
pub(crate) struct TransferAnnouncement {
    pub(crate) context: SessionContext,
    pub(crate) migration: MigrationId,
    pub(crate) session: Connection,
    pub(crate) stream: quinn::RecvStream,
    pub(crate) decoder: FrameDecoder,
}

/// The identity of a session: virtual machine, the two hosts, the number and the lease of the
/// session.
#[derive(Clone, Debug)]
pub(crate) struct SessionContext {
    pub(crate) vm: String,
    pub(crate) own_host: HostId,
    /// The peer, as its certificate names it.
    pub(crate) host: HostId,
    /// Number of the session; unique within this daemon.
    pub(crate) session_number: u64,
    /// Duration of silence after which the peer is considered lost.
    pub(crate) lease: Duration,
}

/// An item of one of the streams of the data channel.
#[derive(Debug)]
pub(crate) enum DataItem {
    /// An item of the main stream.
    Main(MainEntry<DataMsg>),
    /// An item of a pair stream.
    Lane(LaneId, LaneEntry<DataMsg>),
}

/// The queues of a session that is up.
#[derive(Clone, Debug)]
pub(crate) struct SessionQueues {
    /// Queue of the control stream. The items must be complete frames.
    pub(crate) control: Outbox,
    /// Queue of the main stream of the data channel.
    pub(crate) data: Outbox,
    /// The connection, for opening further streams and for closing the session.
    pub(crate) connection: Connection,
}

/// Content of a bulk transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum BulkContent {
    /// Images of a migration or checkpoint.
    Images,
    /// Memory of a task in post-copy.
    Memory,
}
