//! Ids, keys and groups.

use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::fmt;

/// Microseconds since an arbitrary start that the shell selects. Times never decrease.
pub type Micros = u64;

/// Number of a task. The shell assigns the numbers; a number is never used twice in a run, also
/// after a restart of the master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TaskId(pub u64);

/// Number of a worker, which the shell assigns and never uses twice in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct WorkerId(pub u64);

/// Number of a class of workers: workers that the same program implements.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ClassId(pub u16);

/// Number of an attempt. Numbers of all attempts of a run differ, also after a restart of the
/// master: the upper half is the number of the master's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AttemptId(pub u64);

impl AttemptId {
    /// Returns the attempt with the number `count` of the master with the number `generation`.
    pub(crate) fn new(generation: u32, count: u32) -> Self {
        Self(u64::from(generation) << 32 | u64::from(count))
    }

    /// Returns the number of the master's start, which counts from 1.
    pub fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}.{}", self.generation(), self.0 as u32)
    }
}

/// Key of a task. Tasks with lower keys are better and are dispatched first.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Key(f64);

impl Key {
    /// Returns the key with this value; `None` if the value is not a number.
    pub fn new(value: f64) -> Option<Self> {
        // Adding zero changes -0.0 to 0.0, so that equal numbers are equal keys.
        (!value.is_nan()).then_some(Self(value + 0.0))
    }

    /// Returns the value, which is never NaN.
    pub fn value(self) -> f64 {
        self.0
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Set of groups, one bit per group. A task goes only to workers that share a group with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Groups(u64);

impl Groups {
    /// Number of different groups.
    pub const COUNT: u32 = 64;
    /// The set of all groups, to which tasks and workers belong by default.
    pub const ALL: Self = Self(u64::MAX);

    /// Returns the set with this group; `None` if `group` is not below [`Groups::COUNT`].
    pub fn single(group: u32) -> Option<Self> {
        (group < Self::COUNT).then(|| Self(1 << group))
    }

    /// Returns the set with these bits; `None` for the empty set, which matches no worker.
    pub fn from_bits(bits: u64) -> Option<Self> {
        (bits != 0).then_some(Self(bits))
    }

    /// Returns the set as bits.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the groups of both sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if the sets share a group.
    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

impl Default for Groups {
    fn default() -> Self {
        Self::ALL
    }
}
