//! What the owner of a host wants done with foreign tasks on it, as its load watcher tells the host's daemon and the resource
//! manager.

use crate::error::PvmError;
use crate::ids::Micros;
use crate::load::GuestLimits;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes of [`GuestsWord::why`] at most; the rest is cut.
pub const WHY_BYTES_MAX: usize = 512;
/// The answer of a host whose owner wants no guests now, no more of them, or not this program. Who places tasks then tries other
/// hosts, if the spawn names none.
pub const NO_GUESTS: PvmError = PvmError::OutOfRes;

/// How foreign tasks leave a host whose owner does not want them any more; in files as "move", "kill" and
/// "checkpoint".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leave {
    /// To another host; without one they stay and stand still.
    #[default]
    Move,
    /// They are ended.
    Kill,
    /// To another host; without one their jobs are checkpointed and ended, and go on when there is room.
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

/// What foreign tasks may do on a host now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Guests {
    /// Work.
    #[default]
    Welcome,
    /// Stand still, from this moment.
    Stopped {
        /// When they are to leave if the owner is still there then, in microseconds since 1970; `None`: they only wait.
        leave_at: Option<Micros>,
        /// How they leave.
        then: Leave,
    },
}

/// A load watcher's word to the daemon of its host. It counts until the next one, or until the watcher ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestsWord {
    /// What they may do.
    pub guests: Guests,
    /// One plain sentence that says why.
    pub why: String,
    /// What they may have while they may work; the host keeps to it whoever places tasks, but for the memory, which is measured.
    pub limits: GuestLimits,
}
