//! The summary of a virtual machine that the master sends to all hosts, for the case that the
//! master is lost: what ran, and from which checkpoints it can be restarted.

use crate::ids::{HostId, Micros, Tid};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// Maximum number of hosts in a summary.
pub const SUMMARY_HOSTS_MAX: usize = 64;
/// Maximum number of addresses of each host in a summary.
pub const SUMMARY_ADDRESSES_MAX: usize = 4;
/// Maximum number of tasks in a summary.
pub const SUMMARY_TASKS_MAX: usize = 128;
/// Maximum number of checkpoints in a summary.
pub const SUMMARY_CHECKPOINTS_MAX: usize = 32;
/// Maximum length, in bytes, of a program's name in a summary.
pub const SUMMARY_NAME_BYTES_MAX: usize = 256;

/// The state of a virtual machine at one moment. Lists are cut at their limits; the counts are
/// those of the whole lists.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSummary {
    /// Time at which the master started, in microseconds since 1970. Identifies the virtual
    /// machine; checkpoints contain the same number.
    pub created_at: Micros,
    /// Time of the summary, in microseconds since 1970.
    pub made_at: Micros,
    /// The hosts; the master is the first one.
    pub hosts: Vec<SummaryHost>,
    pub host_count: u32,
    /// Tasks that were spawned, without the servers of the virtual machine.
    pub tasks: Vec<SummaryTask>,
    pub task_count: u32,
    /// The newest checkpoint of each job that may need it, the newest one first.
    pub checkpoints: Vec<SummaryCheckpoint>,
    pub checkpoint_count: u32,
    /// Directory of the store on the master's host; empty if the master has no store.
    pub store: String,
}

impl VmSummary {
    /// Returns the name of the master's host.
    pub fn master_name(&self) -> &str {
        self.hosts.first().map_or("?", |host| &host.name)
    }
}

/// A host of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SummaryHost {
    pub id: HostId,
    pub name: String,
    /// Addresses on which the host's daemon listens (QUIC over UDP).
    pub addresses: Vec<SocketAddr>,
}

/// A task of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SummaryTask {
    pub tid: Tid,
    /// First task of the job.
    pub job: Tid,
    /// Name of the task's program.
    pub program: String,
    /// Name of the task's host.
    pub host: String,
}

/// The newest checkpoint of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SummaryCheckpoint {
    /// First task of the job.
    pub job: Tid,
    /// Name of the program of that task; empty if the task had ended.
    pub program: String,
    /// Name of the checkpoint in the store.
    pub name: String,
    /// Time at which the checkpoint was complete, in microseconds since 1970; `None` if another
    /// virtual machine has made the checkpoint.
    pub made_at: Option<Micros>,
    /// Names of the hosts that have a copy of the checkpoint in their own stores.
    pub copy_hosts: Vec<String>,
}
