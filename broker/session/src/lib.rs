//! Pure state machines of a broker session: [`Session`] is the broker, [`Endpoint`] a member.
//!
//! Both have no clock, socket, file or random number. A shell feeds events and carries out outputs
//! in their order. The broker's durable state changes only by [`Record`]s, so the journal of these
//! records restores a killed broker.

mod backoff;
mod endpoint;
mod ids;
mod limits;
mod mailbox;
mod protocol;
mod report;
mod session;
mod state;
#[cfg(test)]
mod tests;

pub use backoff::Backoff;
pub use endpoint::{Closing, Endpoint, MailHead, MailKind, Pattern, Phase};
pub use ids::{Incarnation, LinkId, MailSeq, MemberId, Millis, RequestSeq, Token};
pub use limits::{ForemanPolicy, LimitName, Limits, Settings, Timing};
pub use protocol::{
    Destination, GoneReason, Hello, Mail, PROTOCOL_VERSION, Place, Profile, Refusal, Request, Role,
    SessionEnd, ToBroker, ToMember, Verdict, WatchTarget,
};
pub use report::{Counts, MemberReport, MemberState, SessionReport};
pub use session::{Event, Output, Session, SessionEvent};
pub use state::{Record, State};
