//! The host table, the records of tasks for `pvm_tasks`, and the results of adding hosts.

use crate::error::PvmError;
use crate::ids::{Epoch, HostId, Micros, MigrationId, Tid};
use crate::migration::Usage;
use crate::owner::GuestAccess;
use crate::tasker_service::ServiceObstacle;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};

/// Maximum number of hosts, limited by the 12 bits of a tid.
pub const HOSTS_MAX: usize = HostId::INDEX_MAX as usize;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostEntry {
    pub id: HostId,
    /// Name by which the user added the host.
    pub name: String,
    /// Architecture name, such as `LINUX64`.
    pub arch: String,
    /// Relative speed set by the user, in thousandths of the default speed.
    pub speed: i32,
    /// Data signature of the machine, which describes its number formats.
    pub dsig: i32,
    /// Addresses on which the host's daemon listens (QUIC over UDP). Peers use the first reachable
    /// address.
    pub addresses: Vec<SocketAddr>,
}

impl HostEntry {
    /// Returns a number that is equal for hosts in the same network: the first 24 bits of the first
    /// address for IPv4, the first 64 bits (folded to 32) for IPv6; 0 for a host without an
    /// address.
    pub fn network_zone(&self) -> u32 {
        match self.addresses.first().map(SocketAddr::ip) {
            None => 0,
            Some(IpAddr::V4(ip)) => ip.to_bits() >> 8,
            Some(IpAddr::V6(ip)) => {
                let network = (ip.to_bits() >> 64) as u64;
                // 64 bits are folded into 32. Two different networks with the same folded value are
                // treated as neighbors.
                ((network >> 32) ^ network) as u32 | 1 << 31
            }
        }
    }
}

/// All hosts of the virtual machine in one epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTable {
    /// Number of the table's version; increases with every change.
    pub epoch: Epoch,
    /// Hosts in ascending order of their index.
    pub hosts: Vec<HostEntry>,
}

impl HostTable {
    pub fn get(&self, id: HostId) -> Option<&HostEntry> {
        self.hosts.iter().find(|h| h.id == id)
    }

    pub fn find_by_name(&self, name: &str) -> Option<&HostEntry> {
        self.hosts.iter().find(|h| h.name == name)
    }

    /// Returns the number of distinct data signatures (PVM's "data formats").
    pub fn data_format_count(&self) -> usize {
        let mut signatures: Vec<i32> = self.hosts.iter().map(|h| h.dsig).collect();
        signatures.sort_unstable();
        signatures.dedup();
        signatures.len()
    }
}

/// State of a host, as its daemon describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    /// Version of the daemon's program.
    pub version: String,
    /// Duration of silence after which the host is lost.
    pub lease: Micros,
    /// Number of spawned tasks that run on the host, without those that serve the virtual machine.
    pub task_count: u32,
    /// Number of these tasks that are paused for the owner or suspended.
    pub stopped_task_count: u32,
    /// Permission of guests by the owner's directive that is in force.
    pub guest_access: GuestAccess,
    /// Reason for the directive; empty if there is none.
    pub access_reason: String,
    /// Load and memory; `None` if the kernel does not tell them.
    pub usage: Option<HostUsage>,
    /// The spawned tasks with the resources that they have used so far, on all hosts; empty if they
    /// were not requested.
    pub task_usages: Vec<(Tid, Usage)>,
    /// The tasks that are migrating from this host.
    pub departures: Vec<Departure>,
    /// Why CRIU migrates no task of an ordinary user from or to this host; `None` if the tasker
    /// service can, if the daemon runs as root, or if no tasker has reported yet.
    pub service_obstacle: Option<ServiceObstacle>,
}

/// A task that is migrating from a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departure {
    pub tid: Tid,
    pub migration: MigrationId,
    /// Number of bytes of images and memory that have been sent so far.
    pub sent_bytes: u64,
}

/// Load and memory of a host at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostUsage {
    /// Mean number of runnable processes in the last minute, in hundredths.
    pub load_hundredths: u32,
    /// Number of processors that are online.
    pub processor_count: u32,
    /// Memory that programs can allocate without swapping, in bytes.
    pub available_bytes: u64,
    pub total_bytes: u64,
}

/// Flag in PVM's field `ti_flag`: the daemon has started the task.
pub const TASK_FORKED: i32 = 2;
/// Flag in PVM's field `ti_flag`: the task has connected to its daemon.
pub const TASK_CONNECTED: i32 = 4;
pub const TASK_RM: i32 = 0x100;
pub const TASK_HOSTER: i32 = 0x200;
pub const TASK_TASKER: i32 = 0x400;
pub const TASK_TRACER: i32 = 0x800;
/// Flag of a task that programs must not see, because PVM does not have it: a load watcher that a
/// daemon has started by itself, while no resource manager uses its reports.
pub const TASK_HIDDEN: i32 = 0x1_0000;
/// Flags of tasks that provide a service to the virtual machine. Such tasks are never migrated,
/// paused or suspended.
pub const TASK_SERVICE_FLAGS: i32 = TASK_RM | TASK_HOSTER | TASK_TASKER;

/// A task as `pvm_tasks` reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskInfo {
    /// The task id, which never changes.
    pub tid: Tid,
    /// Tid of the parent; [`Tid::NONE`] for a task from a command line, raw value −35 if the parent
    /// requested not to be known.
    pub parent: Tid,
    /// The host on which the task runs.
    pub host: HostId,
    /// Bitwise combination of `TASK_*` values.
    pub flags: i32,
    /// Program name from the spawn request; empty for a task from a command line.
    pub name: String,
    /// Process id of the task on its host, outside the task's PID namespace. Other processes of
    /// the host use this number for the task.
    pub pid: i32,
    pub uid: u32,
    /// True while a migration of the task is in progress.
    pub migrating: bool,
    /// True while the task is paused for the owner of its host: none of its processes runs.
    pub paused: bool,
    /// True while the task is suspended by a request.
    pub suspended: bool,
    /// Process id that `getpid()` returns in the task, and that a migration does not change
    /// (`ti_pid` of `pvm_tasks`).
    pub namespace_pid: i32,
    /// True while the task must stop, for the owner or because it is suspended, and the tasker has
    /// not confirmed that it has stopped.
    pub stopping: bool,
    /// Number of processes that the task has left behind on `host` at its end; 0 for a task that
    /// has not ended. While it is above 0, `pid` is the id of one of these processes.
    pub leftover_processes: u32,
}

impl TaskInfo {
    /// True for a task that programs and task lists of users must not show.
    pub fn is_hidden(&self) -> bool {
        self.flags & TASK_HIDDEN != 0
    }

    /// True if the entry describes the leftover processes of a task that has ended.
    pub fn is_leftover(&self) -> bool {
        self.leftover_processes > 0
    }
}

/// Outcome of adding one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedHost {
    /// The new host's table entry, or PVM's error code.
    pub result: Result<HostEntry, PvmError>,
    /// One sentence with the failed operation, the reason and a remedy; empty on success.
    pub reason: String,
}
