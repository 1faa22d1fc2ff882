//! The host table and what is said about tasks.

use crate::error::PvmError;
use crate::ids::{Epoch, HostId, Tid};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// Hosts of one virtual machine at most: what 12 bits of a tid can name.
pub const HOSTS_MAX: usize = HostId::INDEX_MAX as usize;

/// One host of the virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostEntry {
    /// Its index.
    pub id: HostId,
    /// Its name as it was added.
    pub name: String,
    /// Architecture name, such as `LINUX64`.
    pub arch: String,
    /// Relative speed as given by the user, 1000 by default.
    pub speed: i32,
    /// Data signature: how its machine lays out numbers.
    pub dsig: i32,
    /// Where its daemon listens (QUIC over UDP); the first reachable one counts.
    pub addresses: Vec<SocketAddr>,
}

impl HostEntry {
    /// Hosts of one zone are near to each other: the part of its first address that neighbours share (24 bits of IPv4, 64 of
    /// IPv6).
    pub fn zone(&self) -> u32 {
        match self.addresses.first().map(SocketAddr::ip) {
            None => 0,
            Some(IpAddr::V4(ip)) => ip.to_bits() >> 8,
            Some(IpAddr::V6(ip)) => {
                let net = (ip.to_bits() >> 64) as u64;
                // Folded; two networks that fall together only look near to each other.
                ((net >> 32) ^ net) as u32 | 1 << 31
            }
        }
    }
}

/// All hosts, ordered by index, as of one epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTable {
    /// Rises with every change.
    pub epoch: Epoch,
    /// The hosts by rising index.
    pub hosts: Vec<HostEntry>,
}

impl HostTable {
    /// The host with this index.
    pub fn get(&self, id: HostId) -> Option<&HostEntry> {
        self.hosts.iter().find(|h| h.id == id)
    }

    /// The host with exactly this name.
    pub fn by_name(&self, name: &str) -> Option<&HostEntry> {
        self.hosts.iter().find(|h| h.name == name)
    }

    /// Number of distinct data signatures ("data formats").
    pub fn formats(&self) -> usize {
        let mut seen: Vec<i32> = self.hosts.iter().map(|h| h.dsig).collect();
        seen.sort_unstable();
        seen.dedup();
        seen.len()
    }
}

/// `ti_flag`: forked by the daemon.
pub const TASK_FORKED: i32 = 2;
/// `ti_flag`: connected to its daemon.
pub const TASK_CONNECTED: i32 = 4;
/// `ti_flag`: resource manager.
pub const TASK_RM: i32 = 0x100;
/// `ti_flag`: hoster.
pub const TASK_HOSTER: i32 = 0x200;
/// `ti_flag`: tasker.
pub const TASK_TASKER: i32 = 0x400;
/// `ti_flag`: tracer.
pub const TASK_TRACER: i32 = 0x800;
/// The flags of tasks that serve the virtual machine, and neither move nor stop for anybody.
pub const TASK_SERVES: i32 = TASK_RM | TASK_HOSTER | TASK_TASKER;

/// What `pvm_tasks` tells about a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo {
    /// Its id, for life.
    pub tid: Tid,
    /// Its parent: [`Tid::NONE`] for a task from a command line, −35 as raw value when the parent asked not to be known.
    pub parent: Tid,
    /// Where it runs now.
    pub host: HostId,
    /// `TASK_*` bits.
    pub flags: i32,
    /// Name as given to spawn; empty for a task from a command line.
    pub name: String,
    /// Process number on its host, as seen from outside.
    pub pid: i32,
    /// User id of its owner.
    pub uid: u32,
    /// True when it is in the middle of a move.
    pub moving: bool,
    /// True when it stands still because its host's owner wants that.
    pub stopped: bool,
    /// True when it stands still until somebody lets it go on.
    pub suspended: bool,
}

/// Outcome of adding one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedHost {
    /// The entry it got, or PVM's code.
    pub result: Result<HostEntry, PvmError>,
    /// What was tried, what happened and what to do, when it failed; empty otherwise.
    pub reason: String,
}
