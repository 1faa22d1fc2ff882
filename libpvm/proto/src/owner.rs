//! Permissions of guests (foreign tasks) on a host. The host's load watcher sends them to the
//! host's daemon and the resource manager, as the owner's policy requires.

use crate::error::PvmError;
use crate::ids::Micros;
use crate::load::GuestLimits;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Largest size of [`GuestsWord::why`]; longer sentences are truncated.
pub const WHY_BYTES_MAX: usize = 512;
/// Error of a host whose owner permits no guests at present, no more of them, or not this program.
/// The placement then tries other hosts, unless the spawn names one.
pub const NO_GUESTS: PvmError = PvmError::OutOfRes;

/// How guests are evicted from a host; in files "move", "kill" and "checkpoint".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leave {
    /// Migrate to another host. Without one they stay paused.
    #[default]
    Move,
    /// End the tasks without a migration.
    Kill,
    /// Migrate to another host. Without one their jobs are checkpointed, ended, and restarted when
    /// there is room.
    Checkpoint,
}

impl fmt::Display for Leave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Leave::Move => "move",
            Leave::Kill => "kill",
            Leave::Checkpoint => "checkpoint",
        })
    }
}

/// Permission of guests to run on a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Guests {
    #[default]
    Welcome,
    /// Guests must be paused immediately.
    Stopped {
        /// Time of the eviction if the owner is still present then, in microseconds since 1970;
        /// `None`: guests stay paused.
        leave_at: Option<Micros>,
        /// How guests are evicted.
        then: Leave,
    },
}

/// A load watcher's directive to the daemon of its host. It is in force until the next one, or
/// until the watcher ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestsWord {
    pub guests: Guests,
    /// The reason in one sentence.
    pub why: String,
    /// Limits for guests while they may run. The host enforces them regardless of who places tasks,
    /// except the memory limit, which is measured.
    pub limits: GuestLimits,
}
