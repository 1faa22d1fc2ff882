//! The report of a session for its users.

use crate::ids::{Incarnation, MemberId, Millis};
use crate::protocol::{GoneReason, Place, Profile, SessionEnd};
use serde::{Deserialize, Serialize};

/// Connection state of a member that is not gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemberState {
    /// Welcomed; has not answered yet.
    Joining,
    Present,
    /// Not connected; its messages are kept.
    Away,
    Gone(GoneReason),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    pub member: MemberId,
    pub incarnation: Incarnation,
    pub state: MemberState,
    pub profile: Profile,
    pub place: Place,
    /// Messages that the broker has taken from the member.
    pub sent: u64,
    /// Messages that the member's program has received.
    pub received: u64,
    /// Messages that wait for the member.
    pub waiting: u64,
    pub waiting_bytes: u64,
    /// Age of the oldest waiting message; 0 if none waits.
    pub oldest: Millis,
}

/// Numbers of messages by their fate: `taken` = `delivered` + `returned` + `dropped` + those that
/// wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    pub joins: u64,
    pub taken: u64,
    pub delivered: u64,
    pub returned: u64,
    pub dropped: u64,
    /// Messages that were refused: the receiver was gone, unknown or full.
    pub refused: u64,
    /// Notices that were dropped because too many waited for one member.
    pub dropped_notices: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionReport {
    pub session: String,
    /// Reason of the end, if the session ends or has ended.
    pub end: Option<SessionEnd>,
    pub counts: Counts,
    pub waiting: u64,
    pub waiting_bytes: u64,
    /// Members that are not gone, then those that are gone, by number.
    pub members: Vec<MemberReport>,
}
