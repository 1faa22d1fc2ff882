//! A member of a broker session: a task of the virtual machine, or a program outside that dials the
//! broker's TLS port.
//!
//! ```no_run
//! use sempa_broker_client::{JoinOptions, Mail, Member, Pattern, Role, SendOptions};
//!
//! # fn main() -> Result<(), sempa_broker_client::Error> {
//! let foreman = Member::join(JoinOptions::new("search", Role::Foreman))?;
//! while let Mail::Message { from, body, .. } = foreman.recv(Pattern::any().kind(1))? {
//!   println!("{from}: {} bytes", body.len());
//!   foreman.send(from.into(), 2, body, SendOptions::default())?;
//! }
//! # Ok(())
//! # }
//! ```

pub mod directory;
mod error;
mod inside;
mod member;
mod options;
mod outside;
pub mod session_file;
pub mod tls;
pub mod wire;

pub use error::{EXIT_OVER, Error};
pub use member::{Member, Ticket};
pub use options::{JoinOptions, SendOptions};
pub use sempa_broker_session::{
    Counts, Destination, GoneReason, LimitName, Mail, MailHead, MailKind, MailSeq, MemberId,
    MemberReport, MemberState, Pattern, Refusal, Role, SessionEnd, SessionReport, Verdict,
    WatchTarget,
};
