//! Frames between members and the broker. Requests and mail have sequence numbers; each side drops
//! what it has already had, so a frame may be sent again after a connection has broken.

use crate::ids::{Incarnation, MailSeq, MemberId, Millis, RequestSeq, Token};
use crate::limits::LimitName;
use crate::report::SessionReport;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Version of this protocol. Both sides must have the same version.
pub const PROTOCOL_VERSION: u16 = 1;

/// Right of a member: a foreman may also end the session and list its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    Worker,
    Foreman,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Worker => "worker",
            Self::Foreman => "foreman",
        })
    }
}

/// Where a member runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// In the virtual machine, as the task with this tid.
    Inside { tid: i32 },
    /// Outside the virtual machine.
    Outside,
}

/// Description of a member by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    pub role: Role,
    /// Name of the member's host.
    pub host: String,
    pub program: String,
    /// Speed of the member in thousandths of a reference machine; 0 if unknown.
    pub factor: u32,
}

/// Reason why a member is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GoneReason {
    /// The member has left.
    Left,
    /// The member's connection, host or process was lost without a known cause.
    Lost,
    /// The member's process has ended without leaving.
    Killed,
    /// The member was silent for too long.
    TimedOut,
    /// The owner of the member's host has moved the member out.
    MovedOut,
    SessionOver,
    /// The broker no longer keeps the reason.
    Forgotten,
}

impl fmt::Display for GoneReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Left => "left",
            Self::Lost => "lost",
            Self::Killed => "killed",
            Self::TimedOut => "timed out",
            Self::MovedOut => "moved out by the owner",
            Self::SessionOver => "session over",
            Self::Forgotten => "gone for long",
        })
    }
}

/// Reason why a session ends or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionEnd {
    /// A foreman has ended the session.
    Finished,
    /// The user has ended the session from a command line.
    Operator,
    /// No member was there for the idle time.
    Idle,
    /// The last foreman is gone, and the session's policy is to end then.
    ForemanGone,
    /// The virtual machine has ended.
    VmEnded,
    /// The broker and its journal are lost.
    BrokerLost,
}

impl fmt::Display for SessionEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finished => "a foreman has ended it",
            Self::Operator => "a user has ended it",
            Self::Idle => "no member was there",
            Self::ForemanGone => "its foreman is gone",
            Self::VmEnded => "the virtual machine has ended",
            Self::BrokerLost => "its broker and the broker's journal are lost",
        })
    }
}

/// Receiver of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Destination {
    Member(MemberId),
    /// The foreman with the lowest number; one that is present comes before one that is away.
    Foreman,
}

impl From<MemberId> for Destination {
    fn from(member: MemberId) -> Self {
        Self::Member(member)
    }
}

/// Answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Verdict {
    /// The broker has the message: the receiver gets it, or the broker returns it or counts it as
    /// dropped.
    Taken,
    /// The request is carried out.
    Done,
    /// The receiver is gone. The broker did not keep the message.
    Gone(GoneReason),
    /// No member has had this number.
    Unknown,
    /// The session has no foreman at the moment.
    NoForeman,
    /// A limit was reached. The broker did not keep the message.
    Full(LimitName),
    /// The member's role does not allow the request.
    NotAllowed,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken => f.write_str("taken"),
            Self::Done => f.write_str("done"),
            Self::Gone(reason) => write!(f, "gone ({reason})"),
            Self::Unknown => f.write_str("unknown"),
            Self::NoForeman => f.write_str("no foreman"),
            Self::Full(limit) => write!(f, "full (limit {limit})"),
            Self::NotAllowed => f.write_str("not allowed"),
        }
    }
}

/// Reason why the broker does not accept a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// Contains the broker's version.
    WrongVersion(u16),
    Over(SessionEnd),
    /// This member counts as gone; its number is not used again.
    Gone(GoneReason),
    /// The broker does not know this member: its journal is lost, or this is another session.
    UnknownMember,
    /// The member was restored from a state that is older than what it has received since.
    OlderState,
    Limit(LimitName),
    /// The connection's secret is not that of a foreman.
    NotAllowed,
}

impl Refusal {
    /// True if the same member may be accepted later.
    pub fn is_temporary(self) -> bool {
        matches!(self, Self::Limit(_))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongVersion(version) => write!(
                f,
                "the broker uses version {version} of the protocol, this program version {PROTOCOL_VERSION}; use \
                 programs of one installation"
            ),
            Self::Over(end) => write!(f, "the session is over: {end}"),
            Self::Gone(reason) => write!(
                f,
                "the broker counts this member as gone ({reason}); join again to get a new number"
            ),
            Self::UnknownMember => f.write_str(
                "the broker does not know this member; its journal is lost or the session is another one of the same \
                 name",
            ),
            Self::OlderState => f.write_str(
                "this member was restored from an older state than the messages that it has received; join again",
            ),
            Self::Limit(limit) => write!(f, "the limit {limit} of the session is reached; try later"),
            Self::NotAllowed => {
                f.write_str("the secret is that of a worker; a foreman needs the foreman's session file")
            }
        }
    }
}

/// First frame of a member on a connection: a join, or a resume if the broker knows the token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub version: u16,
    pub token: Token,
    pub profile: Profile,
    /// The member's number from an earlier welcome.
    pub member: Option<MemberId>,
    /// The newest mail that has arrived.
    pub received: MailSeq,
    /// Mail that has arrived and that the program has not received yet.
    pub held: Vec<MailSeq>,
    /// All verdicts up to this request have arrived.
    pub seen_verdicts: RequestSeq,
    /// The broker may send mail up to this number.
    pub credit: MailSeq,
}

/// Selects whose end is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WatchTarget {
    /// Every member that is gone from now on.
    All,
    Member(MemberId),
}

/// A request with a verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Send {
        to: Destination,
        /// The application's type of the message.
        kind: i32,
        body: Bytes,
        /// True: the broker returns the message if the receiver is gone before it has received
        /// the message.
        returns: bool,
    },
    Watch(WatchTarget),
    Leave {
        /// True if the owner of the host has moved the member out.
        moved_out: bool,
    },
    /// Ends the session after this time.
    Finish {
        within: Millis,
    },
}

/// Frames to the broker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToBroker {
    Hello(Box<Hello>),
    Request {
        seq: RequestSeq,
        request: Request,
    },
    Progress {
        /// Mail that the program has received since the last progress.
        consumed: Vec<MailSeq>,
        seen_verdicts: RequestSeq,
        credit: MailSeq,
    },
    Heartbeat,
    /// Requests a report. Needs a foreman's right, but no member.
    Inspect,
    /// Ends the session for the user. Needs a foreman's right, but no member.
    End {
        within: Millis,
    },
}

/// An entry in a member's mailbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mail {
    Message {
        from: MemberId,
        kind: i32,
        body: Bytes,
    },
    /// A watched member is gone. All messages that it has sent to this member come before.
    Gone {
        member: MemberId,
        reason: GoneReason,
        /// Number of messages that the gone member had not received.
        undelivered: u64,
    },
    /// A message of this member that its receiver did not receive.
    Returned {
        to: MemberId,
        kind: i32,
        body: Bytes,
        reason: GoneReason,
    },
}

impl Mail {
    /// Returns the number of bytes that count against the limits.
    pub fn byte_count(&self) -> usize {
        match self {
            Self::Message { body, .. } | Self::Returned { body, .. } => body.len(),
            Self::Gone { .. } => 0,
        }
    }
}

/// Frames to a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToMember {
    Welcome {
        session: String,
        member: MemberId,
        incarnation: Incarnation,
        /// The broker has processed all requests up to this one.
        accepted: RequestSeq,
        heartbeat: Millis,
        silence_max: Millis,
        /// Largest number of messages that wait for the member.
        mail_max: u64,
    },
    Refused(Refusal),
    Verdict {
        seq: RequestSeq,
        verdict: Verdict,
    },
    Mail {
        seq: MailSeq,
        mail: Mail,
    },
    /// The broker now has room for messages to a receiver that was full, or the receiver is gone.
    Room(Destination),
    Heartbeat,
    /// The session ends after this time.
    Over {
        end: SessionEnd,
        within: Millis,
    },
    /// The member is gone; the broker closes the connection.
    Closed(GoneReason),
    /// Another connection of the same member has replaced this one.
    Superseded,
    Report(Box<SessionReport>),
    /// Answers [`ToBroker::End`] with the reason of the end.
    Ending(SessionEnd),
    /// The connection's rights do not allow a report or an end; nothing else changes.
    NotAllowed,
}
