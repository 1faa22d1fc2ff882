//! Requests to spawn tasks, and the flags of `pvm_spawn`.

use crate::ids::{HostId, Tid};
use serde::{Deserialize, Serialize};

/// Destination of a task's output or trace records: a task, a context and a tag. `tid` NONE: the
/// log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sink {
    pub tid: Tid,
    pub ctx: i32,
    pub tag: i32,
}

/// A request of `pvm_spawn`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRequest {
    /// Executable, with or without a path.
    pub file: String,
    /// Arguments after argv[0], which is the path where the executable was found.
    pub args: Vec<Vec<u8>>,
    /// Bitwise combination of `PvmTask*` values.
    pub flags: i32,
    /// Host or architecture, and working directory: `host:dir`.
    pub place: String,
    /// Number of tasks to start.
    pub count: u32,
    /// `NAME=value` strings to add to the environment.
    pub env: Vec<Vec<u8>>,
    pub output: Sink,
    pub trace: Sink,
}

impl SpawnRequest {
    /// True if the request names one host or one architecture, so that there is no alternative.
    pub fn has_fixed_place(&self) -> bool {
        self.flags & (SPAWN_HOST | SPAWN_ARCH) != 0
    }

    /// True if the request names exactly one host. Such a host counts as the user's explicit
    /// choice.
    pub fn names_one_host(&self) -> bool {
        self.flags & SPAWN_HOST != 0 && self.flags & SPAWN_COMPLEMENT == 0
    }

    /// True if all properties that affect placement are equal, so that both requests get the same
    /// hosts.
    pub fn places_like(&self, other: &SpawnRequest) -> bool {
        let same = self.count == other.count && self.flags == other.flags;
        same && self.file == other.file && self.place == other.place && self.env == other.env
    }
}

/// A spawn on hosts of a placement lease, see [`crate::sm::PlacementLease`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedSpawn {
    /// The resource manager that issued the lease.
    pub rm: Tid,
    /// The lease's wait id.
    pub wid: i32,
    /// The host of each task.
    pub hosts: Vec<HostId>,
}

/// `PvmTaskHost`: `place` names a host.
pub const SPAWN_HOST: i32 = 1;
/// `PvmTaskArch`: `place` names an architecture.
pub const SPAWN_ARCH: i32 = 2;
pub const SPAWN_DEBUG: i32 = 4;
/// `PvmHostCompl`: use the other hosts.
pub const SPAWN_COMPLEMENT: i32 = 32;
/// `PvmNoSpawnParent`: hide the parent from the child.
pub const SPAWN_NO_PARENT: i32 = 64;
/// Not PVM's: the task is bound to its host and never migrates (load watchers). Outside the bits
/// that PVM uses.
pub const SPAWN_PINNED: i32 = 1 << 20;
