//! Reasons why a decision excludes a host.

use super::{ActualValue, Condition, Metric};
use sempa_proto::Tid;
use std::fmt;
use std::sync::Arc;

/// Reason why a host is excluded.
///
/// `S` is the text type. Decisions examine many hosts whose reasons are never reported, so they
/// borrow the text from the snapshot until a reason is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExclusionReason<S = String> {
    /// The request names another host.
    OtherHost,
    /// The host has another architecture.
    OtherArch { has: S },
    /// The request excludes the hosts that it names, and names this one.
    Complement,
    /// The owner is present.
    OwnerPresent {
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
    /// The owner's limit on the number of guests is reached.
    TaskLimit { limit: u32 },
    /// The owner reserves memory, and the free memory beyond it is too small for a task.
    MemoryKept {
        /// Memory in bytes that the owner wants to keep free.
        keeps: u64,
        /// Free memory in bytes.
        has: u64,
    },
    /// The owner blocks this program.
    ProgramBlocked {
        /// The owner's pattern that matches the program.
        pattern: S,
    },
    /// The owner blocks this user.
    UserBlocked { user: u32 },
    /// A condition of the request does not hold.
    Unmet {
        condition: Arc<Condition>,
        has: ActualValue<S>,
    },
    /// The host is reserved for a request that has waited long.
    Reserved,
    /// The host was lost or did not answer while this request was carried out.
    NoAnswer,
    /// The host's daemon has just declined tasks of this request, because of its owner or for lack
    /// of room.
    Declined,
    /// The host cannot accept migrations at present.
    NoMigrations { why: S },
    /// The host refused this task at the last attempt.
    Refused { why: S },
}

impl ExclusionReason<&str> {
    /// Converts borrowed text to owned text.
    pub(super) fn into_owned(self) -> ExclusionReason {
        match self {
            ExclusionReason::OtherHost => ExclusionReason::OtherHost,
            ExclusionReason::OtherArch { has } => ExclusionReason::OtherArch { has: has.into() },
            ExclusionReason::Complement => ExclusionReason::Complement,
            ExclusionReason::OwnerPresent { why } => {
                ExclusionReason::OwnerPresent { why: why.into() }
            }
            ExclusionReason::Closed { why } => ExclusionReason::Closed { why: why.into() },
            ExclusionReason::Drained { by } => ExclusionReason::Drained { by },
            ExclusionReason::TaskLimit { limit: most } => {
                ExclusionReason::TaskLimit { limit: most }
            }
            ExclusionReason::MemoryKept { keeps, has } => {
                ExclusionReason::MemoryKept { keeps, has }
            }
            ExclusionReason::ProgramBlocked { pattern } => ExclusionReason::ProgramBlocked {
                pattern: pattern.into(),
            },
            ExclusionReason::UserBlocked { user } => ExclusionReason::UserBlocked { user },
            ExclusionReason::Unmet { condition, has } => ExclusionReason::Unmet {
                condition,
                has: has.into_owned(),
            },
            ExclusionReason::Reserved => ExclusionReason::Reserved,
            ExclusionReason::NoAnswer => ExclusionReason::NoAnswer,
            ExclusionReason::Declined => ExclusionReason::Declined,
            ExclusionReason::NoMigrations { why } => {
                ExclusionReason::NoMigrations { why: why.into() }
            }
            ExclusionReason::Refused { why } => ExclusionReason::Refused { why: why.into() },
        }
    }
}

impl<S: fmt::Display + fmt::Debug> fmt::Display for ExclusionReason<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExclusionReason::OtherHost => f.write_str("the request names another host"),
            ExclusionReason::OtherArch { has } => write!(f, "architecture is {has}"),
            ExclusionReason::Complement => f.write_str("the request excludes it"),
            ExclusionReason::OwnerPresent { why } => write!(f, "owner present ({why})"),
            ExclusionReason::Closed { why } => write!(f, "no guests now ({why})"),
            ExclusionReason::Drained { by } => write!(f, "it is being drained (requested by {by})"),
            ExclusionReason::TaskLimit { limit: 0 } => f.write_str("its owner allows no tasks"),
            ExclusionReason::TaskLimit { limit: 1 } => {
                f.write_str("its owner allows one task, and one is present")
            }
            ExclusionReason::TaskLimit { limit: most } => {
                write!(f, "its owner allows {most} tasks, and as many are present")
            }
            ExclusionReason::MemoryKept { keeps, has } => {
                let (has, keeps) = (
                    Metric::Memory.format_value(*has),
                    Metric::Memory.format_value(*keeps),
                );
                write!(
                    f,
                    "{has} of memory are free, and its owner reserves {keeps}"
                )
            }
            ExclusionReason::ProgramBlocked { pattern } => {
                write!(f, "its owner blocks the program {pattern:?}")
            }
            ExclusionReason::UserBlocked { user } => write!(f, "its owner blocks user {user}"),
            ExclusionReason::Unmet { condition, has } => {
                write!(f, "{condition} does not hold ({has})")
            }
            ExclusionReason::Reserved => {
                f.write_str("it is reserved for a spawn that has waited long")
            }
            ExclusionReason::NoAnswer => f.write_str("no answer"),
            ExclusionReason::Declined => f.write_str("it declined further tasks"),
            ExclusionReason::NoMigrations { why } | ExclusionReason::Refused { why } => {
                write!(f, "{why}")
            }
        }
    }
}
