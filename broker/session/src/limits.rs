//! The limits and time limits of a session. Each limit has a name that refusals contain.

use crate::ids::Millis;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Limits of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Largest number of members that are not gone.
    pub members_max: usize,
    /// Largest number of joins in one second.
    pub joins_per_second_max: u32,
    /// Largest number of messages that wait for one member, counted until the member's program has
    /// received them.
    pub member_messages_max: usize,
    /// Largest number of bytes that wait for one member.
    pub member_bytes_max: usize,
    /// Largest number of messages that wait in the session.
    pub session_messages_max: usize,
    /// Largest number of bytes that wait in the session.
    pub session_bytes_max: usize,
    /// Largest size of one message, in bytes.
    pub message_bytes_max: usize,
    /// Largest number of requests of one member whose verdicts the member has not confirmed.
    pub requests_max: usize,
    /// Number of gone members of which the broker keeps the reason. Of older ones it knows only
    /// that they are gone.
    pub gone_members_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            members_max: 1024,
            joins_per_second_max: 200,
            member_messages_max: 10_000,
            member_bytes_max: 64 << 20,
            session_messages_max: 200_000,
            session_bytes_max: 512 << 20,
            message_bytes_max: 16 << 20,
            requests_max: 1024,
            gone_members_max: 65_536,
        }
    }
}

/// Names the limit that refused something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LimitName {
    Members,
    JoinsPerSecond,
    MemberMessages,
    MemberBytes,
    SessionMessages,
    SessionBytes,
    MessageBytes,
}

impl LimitName {
    /// Returns the name in options, documents and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Members => "members",
            Self::JoinsPerSecond => "joins-per-second",
            Self::MemberMessages => "member-messages",
            Self::MemberBytes => "member-bytes",
            Self::SessionMessages => "session-messages",
            Self::SessionBytes => "session-bytes",
            Self::MessageBytes => "message-bytes",
        }
    }
}

impl fmt::Display for LimitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Time limits of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Largest time without a frame, in each direction, on a connection from outside.
    pub heartbeat: Millis,
    /// Silence after which a connection from outside counts as broken.
    pub silence_max: Millis,
    /// Time that a member outside may be away before it is gone.
    pub grace: Millis,
    /// Time without any member after which the session ends.
    pub idle: Millis,
    /// Time that members get to finish when the session ends without a time of its own.
    pub finish: Millis,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat: Millis(5_000),
            silence_max: Millis(15_000),
            grace: Millis(30_000),
            idle: Millis(60_000),
            finish: Millis(10_000),
        }
    }
}

/// What happens when the last foreman is gone without having ended the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum ForemanPolicy {
    /// Workers wait for the next foreman.
    #[default]
    Wait,
    /// Members are told, and the session ends after the time to finish.
    End,
}

/// Settings of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Settings {
    pub limits: Limits,
    pub timing: Timing,
    pub foreman_policy: ForemanPolicy,
}
