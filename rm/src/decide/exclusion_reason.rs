//! Reasons why a decision excludes a host.

use super::{ActualValue, Condition, Metric};
use sempa_proto::Tid;
use std::fmt;
use std::sync::Arc;

/// Reason why a host is excluded.
///
/// `S` is the text type. Decisions examine many hosts whose reasons are never reported. The reasons
/// therefore borrow their texts from the snapshot until they are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExclusionReason<S = String> {
    /// The request names another host.
    OtherHost,
    /// The host has another architecture.
    OtherArch { arch: S },
    /// The request asks for all hosts except those that it names, and this host is among the named
    /// hosts.
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
        requester: Tid,
    },
    /// The owner's limit on the number of guests is reached.
    TaskLimit { limit: u32 },
    /// The owner reserves memory. The free memory beyond the reserved amount is too small for a
    /// task.
    MemoryReserved {
        /// Memory in bytes that the owner reserves.
        reserved_bytes: u64,
        /// Free memory in bytes.
        free_bytes: u64,
    },
    /// The owner blocks this program.
    ProgramBlocked {
        /// The owner's pattern that matches the program.
        pattern: S,
    },
    /// The owner blocks this user.
    UserBlocked { user: u32 },
    /// A condition of the request does not hold.
    UnmetCondition {
        condition: Arc<Condition>,
        actual: ActualValue<S>,
    },
    /// The host is reserved for a request that has waited for a long time.
    Reserved,
    /// The host was lost or did not answer while this request was carried out.
    NoAnswer,
    /// The host's daemon has just declined tasks of this request, because of the host's owner or
    /// because the host has no room.
    Declined,
    /// The host cannot accept migrations at present.
    NoMigrations { why: S },
    /// The host refused this task at the last attempt.
    Refused { why: S },
}

impl ExclusionReason<&str> {
    /// Returns the same reason with owned texts.
    pub(super) fn into_owned(self) -> ExclusionReason {
        match self {
            ExclusionReason::OtherHost => ExclusionReason::OtherHost,
            ExclusionReason::OtherArch { arch: found_value } => ExclusionReason::OtherArch {
                arch: found_value.into(),
            },
            ExclusionReason::Complement => ExclusionReason::Complement,
            ExclusionReason::OwnerPresent { why } => {
                ExclusionReason::OwnerPresent { why: why.into() }
            }
            ExclusionReason::Closed { why } => ExclusionReason::Closed { why: why.into() },
            ExclusionReason::Drained {
                requester: drain_requester,
            } => ExclusionReason::Drained {
                requester: drain_requester,
            },
            ExclusionReason::TaskLimit { limit: guests_max } => {
                ExclusionReason::TaskLimit { limit: guests_max }
            }
            ExclusionReason::MemoryReserved {
                reserved_bytes: reserved_amount,
                free_bytes: found_value,
            } => ExclusionReason::MemoryReserved {
                reserved_bytes: reserved_amount,
                free_bytes: found_value,
            },
            ExclusionReason::ProgramBlocked { pattern } => ExclusionReason::ProgramBlocked {
                pattern: pattern.into(),
            },
            ExclusionReason::UserBlocked { user } => ExclusionReason::UserBlocked { user },
            ExclusionReason::UnmetCondition {
                condition,
                actual: found_value,
            } => ExclusionReason::UnmetCondition {
                condition,
                actual: found_value.into_owned(),
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
            Self::OtherHost => f.write_str("the request names another host"),
            Self::OtherArch { arch: found_value } => write!(f, "architecture is {found_value}"),
            Self::Complement => f.write_str("the request excludes it"),
            Self::OwnerPresent { why } => write!(f, "owner present ({why})"),
            Self::Closed { why } => write!(f, "no guests now ({why})"),
            Self::Drained {
                requester: drain_requester,
            } => write!(f, "it is being drained (requested by {drain_requester})"),
            Self::TaskLimit { limit: 0 } => f.write_str("its owner allows no tasks"),
            Self::TaskLimit { limit: 1 } => {
                f.write_str("its owner allows one task, and one is present")
            }
            Self::TaskLimit { limit: guests_max } => {
                write!(
                    f,
                    "its owner allows {guests_max} tasks, and as many are present"
                )
            }
            Self::MemoryReserved {
                reserved_bytes: reserved_memory,
                free_bytes: found_value,
            } => {
                let (found_value, reserved_memory) = (
                    Metric::Memory.format_value(*found_value),
                    Metric::Memory.format_value(*reserved_memory),
                );
                write!(
                    f,
                    "{found_value} of memory are free, and its owner reserves {reserved_memory}"
                )
            }
            Self::ProgramBlocked { pattern } => {
                write!(f, "its owner blocks the program {pattern:?}")
            }
            Self::UserBlocked { user } => write!(f, "its owner blocks user {user}"),
            Self::UnmetCondition {
                condition,
                actual: found_value,
            } => {
                write!(f, "{condition} does not hold ({found_value})")
            }
            Self::Reserved => f.write_str("it is reserved for a spawn that has waited long"),
            Self::NoAnswer => f.write_str("no answer"),
            Self::Declined => f.write_str("it declined further tasks"),
            Self::NoMigrations { why } | Self::Refused { why } => {
                write!(f, "{why}")
            }
        }
    }
}
