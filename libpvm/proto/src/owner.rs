//! Permissions of guests (foreign tasks) on a host. The host's load watcher sends them to the
//! host's daemon and the resource manager, as the owner's policy requires.

use crate::error::PvmError;
use crate::ids::Micros;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Largest size of [`GuestDirective::reason`]; longer sentences are truncated.
pub const REASON_BYTES_MAX: usize = 512;
/// Error of a host whose owner permits no guests at present, no more of them, or not this program.
/// The placement then tries other hosts, unless the spawn names one.
pub const GUEST_REFUSED: PvmError = PvmError::OutOfRes;

/// How guests are evicted from a host; in files "move", "kill" and "checkpoint".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionMode {
    /// Migrate to another host. Without one they stay paused.
    #[default]
    Move,
    /// End the tasks without a migration.
    Kill,
    /// Migrate to another host. Without one their jobs are checkpointed, ended, and restarted when
    /// there is room.
    Checkpoint,
}

impl fmt::Display for EvictionMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EvictionMode::Move => "move",
            EvictionMode::Kill => "kill",
            EvictionMode::Checkpoint => "checkpoint",
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
        /// Time of the eviction if the owner is still present then, in microseconds since 1970;
        /// `None`: guests stay paused.
        evict_at: Option<Micros>,
        /// How guests are evicted.
        eviction: EvictionMode,
    },
}

/// A load watcher's directive to the daemon of its host. It is in force until the next one, or
/// until the watcher ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestDirective {
    pub access: GuestAccess,
    /// The reason in one sentence.
    pub reason: String,
    /// Limits for guests while they may run. The host enforces them regardless of who places tasks,
    /// except the memory limit, which is measured.
    pub limits: GuestLimits,
}

/// The owner's limits for guests while they may run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GuestLimits {
    /// Largest number of guests at the same time.
    pub guests_max: Option<u32>,
    /// Bytes of memory that stay free for the owner.
    pub memory_free: u64,
    /// Programs that must not run here: name patterns, in which `*` stands for any characters.
    pub programs: Vec<String>,
    /// Users whose tasks must not run here.
    pub users: Vec<u32>,
}

impl GuestLimits {
    /// Returns the pattern that blocks a program, given by its path or name.
    pub fn blocking_pattern(&self, program: &str) -> Option<&str> {
        let name = program.rsplit('/').next().unwrap_or(program);
        self.programs
            .iter()
            .map(String::as_str)
            .find(|pattern| matches_pattern(pattern, name) || matches_pattern(pattern, program))
    }
}

/// True if a name matches the pattern; `*` stands for any characters.
fn matches_pattern(pattern: &str, name: &str) -> bool {
    let Some((head, mut rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(head) else {
        return false;
    };
    while let Some((part, behind)) = rest.split_once('*') {
        let Some(at) = name.find(part) else {
            return false;
        };
        (name, rest) = (&name[at + part.len()..], behind);
    }
    name.ends_with(rest)
}
