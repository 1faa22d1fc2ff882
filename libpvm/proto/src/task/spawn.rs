//! What a task asks for when it spawns others.

use super::Sink;
use crate::ids::{HostId, Tid};
use serde::{Deserialize, Serialize};

/// What a spawn asks for (`pvm_spawn`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnRequest {
    /// Executable, with or without a path.
    pub file: String,
    /// Further arguments; argv[0] is the path as found.
    pub args: Vec<Vec<u8>>,
    /// `PvmTask*` bits.
    pub flags: i32,
    /// Host, architecture, directory: `host:dir`.
    pub place: String,
    /// Number of tasks.
    pub count: u32,
    /// `NAME=value` strings to add to the environment.
    pub env: Vec<Vec<u8>>,
    /// Where standard output goes.
    pub output: Sink,
    /// Where trace records go.
    pub trace: Sink,
}

impl SpawnRequest {
    /// True when the request names one host or one architecture: if that fails, there is no other place.
    pub fn is_bound(&self) -> bool {
        self.flags & (SPAWN_HOST | SPAWN_ARCH) != 0
    }

    /// True when the request names exactly one host, which counts as a person's word.
    pub fn names_host(&self) -> bool {
        self.flags & SPAWN_HOST != 0 && self.flags & SPAWN_COMPLEMENT == 0
    }

    /// True for a request that gets the same places: all that decides on them is the same.
    pub fn is_like(&self, other: &SpawnRequest) -> bool {
        let same = self.count == other.count && self.flags == other.flags;
        same && self.file == other.file && self.place == other.place && self.env == other.env
    }
}

/// Places of a grant that a task takes, see [`crate::sm::Grant`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantOf {
    /// The resource manager that gave it.
    pub rm: Tid,
    /// The grant's wait id.
    pub wid: i32,
    /// The place of each task.
    pub hosts: Vec<HostId>,
}

/// `PvmTaskHost`: `place` names a host.
pub const SPAWN_HOST: i32 = 1;
/// `PvmTaskArch`: `place` names an architecture.
pub const SPAWN_ARCH: i32 = 2;
/// `PvmTaskDebug`.
pub const SPAWN_DEBUG: i32 = 4;
/// `PvmHostCompl`: use the other hosts.
pub const SPAWN_COMPLEMENT: i32 = 32;
/// `PvmNoSpawnParent`: do not tell the child who its parent is.
pub const SPAWN_NO_PARENT: i32 = 64;
/// Ours: the task belongs to its host and is never moved (load watchers). Outside the bits that PVM uses.
pub const SPAWN_PINNED: i32 = 1 << 20;
