//! Why hosts are not used.

use super::{Condition, Figure, Has};
use sempa_proto::Tid;
use std::fmt;
use std::sync::Arc;

/// Why a host is not used. `S` is its text: decisions look at many hosts whose reasons nobody will read, and borrow it from
/// the snapshot until it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason<S = String> {
    /// The request names another host.
    OtherHost,
    /// The architecture is another one.
    OtherArch {
        /// What the host is.
        has: S,
    },
    /// The request wants the hosts that it does not name.
    Complement,
    /// Its owner is there.
    Owner {
        /// The watcher's sentence.
        why: S,
    },
    /// Its owner wants no guests at this time.
    Closed {
        /// The watcher's sentence.
        why: S,
    },
    /// Somebody has it emptied.
    Drained {
        /// Who asked for it.
        by: Tid,
    },
    /// As many tasks are there as its owner allows.
    Cores {
        /// How many.
        most: u32,
    },
    /// Its owner keeps the memory that is free.
    Memory {
        /// Bytes that are to stay free.
        keeps: u64,
        /// Bytes that are free.
        has: u64,
    },
    /// Its owner blocks this program.
    Program {
        /// The owner's words for it.
        pattern: S,
    },
    /// Its owner blocks this user.
    User {
        /// The user.
        user: u32,
    },
    /// A condition of the request does not hold there.
    Unmet {
        /// The condition.
        condition: Arc<Condition>,
        /// What the host has instead.
        has: Has<S>,
    },
    /// It is kept for a request that has waited for long.
    Kept,
    /// It was lost or did not answer while this request was carried out.
    NoAnswer,
    /// It said a moment ago that it takes no more tasks, because of its owner or for want of room.
    Declined,
    /// It cannot take over running tasks at present.
    NoMoves {
        /// Why.
        why: S,
    },
    /// It did not take this task the last time.
    Refused {
        /// Why.
        why: S,
    },
}

impl Reason<&str> {
    /// The same with a text of its own.
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
            Reason::OtherHost => f.write_str("another host was asked for"),
            Reason::OtherArch { has } => write!(f, "architecture is {has}"),
            Reason::Complement => f.write_str("the others were asked for"),
            Reason::Owner { why } => write!(f, "owner present ({why})"),
            Reason::Closed { why } => write!(f, "no guests now ({why})"),
            Reason::Drained { by } => write!(f, "it is being emptied ({by} asked for it)"),
            Reason::Cores { most: 0 } => f.write_str("its owner allows no tasks"),
            Reason::Cores { most: 1 } => f.write_str("its owner allows one task, and it is there"),
            Reason::Cores { most } => {
                write!(f, "its owner allows {most} tasks, and they are there")
            }
            Reason::Memory { keeps, has } => {
                let (has, keeps) = (Figure::Memory.text(*has), Figure::Memory.text(*keeps));
                write!(f, "{has} of memory are free, and its owner keeps {keeps}")
            }
            Reason::Program { pattern } => write!(f, "its owner blocks the program {pattern:?}"),
            Reason::User { user } => write!(f, "its owner blocks user {user}"),
            Reason::Unmet { condition, has } => write!(f, "{condition} does not hold ({has})"),
            Reason::Kept => f.write_str("it is kept for a spawn that has waited for long"),
            Reason::NoAnswer => f.write_str("no answer"),
            Reason::Declined => f.write_str("it took no more tasks when it was asked"),
            Reason::NoMoves { why } | Reason::Refused { why } => write!(f, "{why}"),
        }
    }
}
