//! Reasons why a decision excludes a host.

use super::{Condition, Figure, Has};
use sempa_proto::Tid;
use std::fmt;
use std::sync::Arc;

/// Reason why a host is excluded.
///
/// `S` is the text type. Decisions examine many hosts whose reasons are never reported, so they
/// borrow the text from the snapshot until a reason is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason<S = String> {
    /// The request names another host.
    OtherHost,
    /// The host has another architecture.
    OtherArch { has: S },
    /// The request asks for the hosts that it does not name, and names this one.
    Complement,
    /// The owner is present.
    Owner {
        /// The load watcher's explanation.
        why: S,
    },
    /// The owner accepts no guests at this time.
    Closed {
        /// The load watcher's explanation.
        why: S,
    },
    /// The host is being drained.
    Drained {
        /// Task that requested the drain.
        by: Tid,
    },
    /// The owner's task limit is reached.
    Cores { most: u32 },
    /// The free memory does not exceed what the owner keeps free by enough for a task.
    Memory {
        /// Bytes that must stay free.
        keeps: u64,
        /// Bytes that are free.
        has: u64,
    },
    /// The owner blocks this program.
    Program {
        /// The owner's pattern that matches the program.
        pattern: S,
    },
    /// The owner blocks this user.
    User { user: u32 },
    /// A condition of the request does not hold.
    Unmet {
        condition: Arc<Condition>,
        has: Has<S>,
    },
    /// The host is reserved for a request that has waited long.
    Kept,
    /// The host was lost or did not answer while this request was carried out.
    NoAnswer,
    /// The host's daemon declined further tasks shortly before, because of its owner or for lack of
    /// room.
    Declined,
    /// The host cannot accept migrations at present.
    NoMoves { why: S },
    /// The host refused this task at the last attempt.
    Refused { why: S },
}

impl Reason<&str> {
    /// Converts borrowed text to owned text.
    pub(super) fn own(self) -> Reason {
        match self {
            Reason::OtherHost => Reason::OtherHost,
            Reason::OtherArch { has } => Reason::OtherArch { has: has.into() },
            Reason::Complement => Reason::Complement,
            Reason::Owner { why } => Reason::Owner { why: why.into() },
            Reason::Closed { why } => Reason::Closed { why: why.into() },
            Reason::Drained { by } => Reason::Drained { by },
            Reason::Cores { most } => Reason::Cores { most },
            Reason::Memory { keeps, has } => Reason::Memory { keeps, has },
            Reason::Program { pattern } => Reason::Program {
                pattern: pattern.into(),
            },
            Reason::User { user } => Reason::User { user },
            Reason::Unmet { condition, has } => Reason::Unmet {
                condition,
                has: has.own(),
            },
            Reason::Kept => Reason::Kept,
            Reason::NoAnswer => Reason::NoAnswer,
            Reason::Declined => Reason::Declined,
            Reason::NoMoves { why } => Reason::NoMoves { why: why.into() },
            Reason::Refused { why } => Reason::Refused { why: why.into() },
        }
    }
}

impl<S: fmt::Display + fmt::Debug> fmt::Display for Reason<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::OtherHost => f.write_str("the request names another host"),
            Reason::OtherArch { has } => write!(f, "architecture is {has}"),
            Reason::Complement => f.write_str("the request excludes it"),
            Reason::Owner { why } => write!(f, "owner present ({why})"),
            Reason::Closed { why } => write!(f, "no guests now ({why})"),
            Reason::Drained { by } => write!(f, "it is being drained (requested by {by})"),
            Reason::Cores { most: 0 } => f.write_str("its owner allows no tasks"),
            Reason::Cores { most: 1 } => {
                f.write_str("its owner allows one task, and one is present")
            }
            Reason::Cores { most } => {
                write!(f, "its owner allows {most} tasks, and as many are present")
            }
            Reason::Memory { keeps, has } => {
                let (has, keeps) = (Figure::Memory.text(*has), Figure::Memory.text(*keeps));
                write!(
                    f,
                    "{has} of memory are free, and its owner reserves {keeps}"
                )
            }
            Reason::Program { pattern } => write!(f, "its owner blocks the program {pattern:?}"),
            Reason::User { user } => write!(f, "its owner blocks user {user}"),
            Reason::Unmet { condition, has } => write!(f, "{condition} does not hold ({has})"),
            Reason::Kept => f.write_str("it is reserved for a spawn that has waited long"),
            Reason::NoAnswer => f.write_str("no answer"),
            Reason::Declined => f.write_str("it declined further tasks"),
            Reason::NoMoves { why } | Reason::Refused { why } => write!(f, "{why}"),
        }
    }
}
