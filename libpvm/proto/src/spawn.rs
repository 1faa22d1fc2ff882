//! Requests to spawn tasks, and the flags of `pvm_spawn`.

use crate::causal::Past;
use crate::ids::{HostId, Tid};
use serde::{Deserialize, Serialize};

/// Destination of a task's output or trace records: a task, a context and a tag. If `tid` is
/// [`Tid::NONE`], the destination is the daemon's log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sink {
    pub tid: Tid,
    pub ctx: i32,
    pub tag: i32,
}

/// A request to spawn tasks (`pvm_spawn`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRequest {
    /// Executable, with or without a path.
    pub program: String,
    /// Arguments after `argv[0]`. `argv[0]` itself is the path at which the executable was found.
    pub args: Vec<Vec<u8>>,
    /// Bitwise combination of `PvmTask*` values.
    pub flags: i32,
    /// The argument `where` of `pvm_spawn`: host or architecture, and working directory, as
    /// `host:dir`. Both parts are optional.
    pub where_arg: String,
    /// Number of tasks to start.
    pub task_count: u32,
    /// `NAME=value` strings to add to the environment.
    pub env: Vec<Vec<u8>>,
    pub output_sink: Sink,
    pub trace_sink: Sink,
    /// The past of the request. The spawner's daemon sets it.
    pub past: Past,
}

impl SpawnRequest {
    /// True if the request names a host or an architecture, which restricts the choice of the
    /// resource manager.
    pub fn names_host_or_arch(&self) -> bool {
        self.flags & (SPAWN_HOST | SPAWN_ARCH) != 0
    }

    /// True if the request names exactly one host, which then counts as an explicit choice of the
    /// user.
    pub fn names_one_host(&self) -> bool {
        self.flags & SPAWN_HOST != 0 && self.flags & SPAWN_COMPLEMENT == 0
    }

    /// True if both requests are equal in all properties that affect placement, so that they get
    /// the same hosts.
    pub fn has_same_placement_as(&self, other: &Self) -> bool {
        let has_same_count_and_flags =
            self.task_count == other.task_count && self.flags == other.flags;
        has_same_count_and_flags
            && self.program == other.program
            && self.where_arg == other.where_arg
            && self.env == other.env
    }
}

/// The hosts that one spawn takes from a placement lease; see [`crate::sm::PlacementLease`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedSpawn {
    /// The resource manager that issued the lease.
    pub rm: Tid,
    /// Wait id of the message that granted the lease.
    pub lease_wid: i32,
    /// The host of each task, in the order of the tasks.
    pub hosts: Vec<HostId>,
}

/// `PvmTaskHost`: `where_arg` names a host.
pub const SPAWN_HOST: i32 = 1;
/// `PvmTaskArch`: `where_arg` names an architecture.
pub const SPAWN_ARCH: i32 = 2;
pub const SPAWN_DEBUG: i32 = 4;
/// `PvmHostCompl`: tasks are placed on all hosts except those that `where_arg` names.
pub const SPAWN_COMPLEMENT: i32 = 32;
/// `PvmNoSpawnParent`: the spawned tasks do not learn the tid of their parent.
pub const SPAWN_NO_PARENT: i32 = 64;
/// Flag that PVM does not have: the task is bound to its host and never migrates (load watchers).
/// PVM uses no flag with this bit.
pub const SPAWN_PINNED: i32 = 1 << 20;
/// Bit of the spawn flags: a host on which the working directory of the request does not exist
/// starts no task. Without this bit tasks start in the host's default directory then, as in PVM.
pub const SPAWN_STRICT_DIR: i32 = 1 << 21;
