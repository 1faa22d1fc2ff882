//! The records of a journal: what a master appends for each change of its state.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes that a task or a record needs in the log besides its payload, at most.
const OVERHEAD_BYTES: usize = 64;

/// The position of a record in the journal of a run. A larger number was appended later. Positions
/// start at 1 and go on after a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lsn(pub(super) u64);

/// A task that waits or runs, as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoredTask {
    pub id: u64,
    pub key: f64,
    /// Set of the groups to which the task belongs, one bit for each.
    pub groups: u64,
    /// Place among the tasks of equal key; lower ones come first.
    pub position: i64,
    pub payload: Bytes,
}

/// What one accepted attempt has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskStats {
    /// Processor time in microseconds.
    pub cpu_us: u64,
    /// Wall time in microseconds.
    pub wall_us: u64,
    /// Benchmark factor of the worker.
    pub factor: f64,
}

/// An attempt without a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FailedAttempt {
    pub task: u64,
    pub attempt: u64,
    /// The reason, serialized by the caller.
    pub reason: Bytes,
}

/// A task that is not handed out any more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuarantinedTask {
    pub task: StoredTask,
    /// The attempts, serialized by the caller.
    pub history: Bytes,
}

/// One change of the master's state.
///
/// A variant's position is part of the file format: new variants go to the end, and
/// `FORMAT_VERSION` is raised when a variant changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    TasksAdded {
        tasks: Vec<StoredTask>,
    },
    /// The first result of a task, and the tasks that the driver's callback has added for it. Both
    /// are one record, so that a restart finds both or neither.
    Accepted {
        task: u64,
        attempt: u64,
        result: Bytes,
        /// The first tasks of `added` are returned work of the attempt: this number of tasks.
        returned: u32,
        added: Vec<StoredTask>,
        stats: TaskStats,
    },
    AttemptFailed(FailedAttempt),
    Quarantined {
        task: u64,
        /// The attempts, serialized by the caller.
        history: Bytes,
    },
    Pruned {
        tasks: Vec<u64>,
    },
    KeyChanged {
        task: u64,
        key: f64,
    },
    /// Statistics of the run up to this record.
    Statistics {
        /// Serialized by the caller.
        statistics: Bytes,
    },
    /// The run is complete. `Journal::finish` appends this record.
    Finished,
}

impl Lsn {
    /// Returns the position as a number, counted from 1. 0 is the position before all records.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StoredTask {
    /// Returns an upper bound of the task's size in a file.
    pub(super) fn stored_bytes(&self) -> usize {
        OVERHEAD_BYTES + self.payload.len()
    }
}

impl Record {
    /// Returns an upper bound of the record's size in the log.
    pub(super) fn stored_bytes(&self) -> usize {
        let all_bytes = |tasks: &[StoredTask]| tasks.iter().map(StoredTask::stored_bytes).sum();
        let body: usize = match self {
            Self::TasksAdded { tasks } => all_bytes(tasks),
            Self::Accepted { result, added, .. } => result.len() + all_bytes(added),
            Self::AttemptFailed(failed) => failed.reason.len(),
            Self::Quarantined { history, .. } => history.len(),
            Self::Pruned { tasks } => tasks.len() * postcard_u64_bytes_max(),
            Self::Statistics { statistics } => statistics.len(),
            Self::KeyChanged { .. } | Self::Finished => 0,
        };
        OVERHEAD_BYTES + body
    }
}

/// Returns the length of the longest number in postcard's format: seven bits in a byte.
const fn postcard_u64_bytes_max() -> usize {
    u64::BITS.div_ceil(7) as usize
}
