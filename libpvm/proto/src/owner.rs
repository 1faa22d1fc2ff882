//! Permissions of guests on a host. The host's load watcher derives the permissions from the
//! owner's policy, and sends them to the host's daemon and to the resource manager.

use crate::error::PvmError;
use crate::ids::Micros;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Maximum size, in bytes, of [`GuestDirective::reason`]; longer sentences are truncated.
pub const REASON_BYTES_MAX: usize = 512;
/// Error of a spawn on a host whose owner permits no guests at present, no more guests, or not this
/// program. The placement then tries other hosts, unless the spawn names one host.
pub const GUEST_REFUSED_ERROR: PvmError = PvmError::OutOfRes;

/// How guests are evicted from a host; in policy files "move", "kill" and "checkpoint".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionMode {
    /// Guests migrate to another host. If no host accepts the guests, they stay paused.
    #[default]
    Move,
    /// Guests are ended without an attempt to migrate them.
    Kill,
    /// Guests migrate to another host. If no host accepts a guest, its job is checkpointed and
    /// ended, and restarted when a host accepts the job.
    Checkpoint,
}

impl fmt::Display for EvictionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Move => "move",
            Self::Kill => "kill",
            Self::Checkpoint => "checkpoint",
        })
    }
}

/// Permission of guests to run on a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GuestAccess {
    #[default]
    Welcome,
    /// Guests must be paused immediately.
    Paused {
        /// Time at which guests are evicted if the owner is still present, in microseconds since
        /// 1970; `None` if guests stay paused.
        evict_at: Option<Micros>,
        /// Action that the daemon takes on guests at `evict_at`.
        eviction: EvictionMode,
    },
}

/// A load watcher's directive to the daemon of its host. The directive is in force until the next
/// directive arrives, or until the load watcher ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestDirective {
    pub access: GuestAccess,
    /// Reason for the directive, in one sentence for users.
    pub reason: String,
    /// Limits for guests while they may run. The daemon enforces these limits for every placement,
    /// except the memory limit, which the load watcher checks by measurement.
    pub limits: GuestLimits,
}

/// Limits of the owner for guests while they may run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GuestLimits {
    /// Maximum number of guests of this virtual machine at the same time; `None` if there is no
    /// limit.
    pub guests_max: Option<u32>,
    /// Number of guests of other virtual machines that the owner's limit also counts. They are
    /// already subtracted from `guests_max`.
    pub other_guests: u32,
    /// Bytes of memory that must stay free for the owner.
    pub free_memory_bytes: u64,
    /// Programs that must not run on this host, as name or path patterns in which `*` stands for
    /// any characters.
    pub blocked_programs: Vec<String>,
    /// User ids whose tasks must not run on this host.
    pub blocked_users: Vec<u32>,
}

impl GuestLimits {
    /// Returns the number of guests that the owner allows to all virtual machines that the limit
    /// counts; `None` if there is no limit.
    pub fn stated_guests_max(&self) -> Option<u32> {
        let guests_max = self.guests_max?;
        Some(guests_max.saturating_add(self.other_guests))
    }

    /// Returns the pattern that blocks a program, given by its path or name; `None` if the program
    /// may run.
    pub fn blocking_pattern(&self, program: &str) -> Option<&str> {
        let name = program.rsplit('/').next().unwrap_or(program);
        self.blocked_programs
            .iter()
            .map(String::as_str)
            .find(|pattern| matches_pattern(pattern, name) || matches_pattern(pattern, program))
    }
}

/// True if `name` matches the pattern, in which `*` stands for any characters.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((head, mut rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(head) else {
        return false;
    };
    while let Some((part, remaining_pattern)) = rest.split_once('*') {
        let Some(part_start) = name.find(part) else {
            return false;
        };
        (name, rest) = (&name[part_start + part.len()..], remaining_pattern);
    }
    name.ends_with(rest)
}
