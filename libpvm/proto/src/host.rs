//! Control messages between daemons, over QUIC.

use crate::ids::Tid;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// On the control channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostMsg {
    /// The sender leaves the virtual machine in good order.
    Leaving,
}

/// On the data channel: for a task on the receiving host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Carried {
    /// A link frame's body as it came from the sending task.
    Link(Bytes),
    /// What a daemon has for a task.
    Item {
        /// The task.
        dst: Tid,
    },
}
