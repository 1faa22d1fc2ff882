//! Open and quarantined tasks.

use crate::waiting::Place;
use crate::{AttemptId, Groups, LossReason, Micros, TaskId, WorkerId};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An attempt that ended without a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptRecord {
    pub attempt: AttemptId,
    pub worker: WorkerId,
    /// Name of the worker's host at the end of the attempt.
    pub host: Arc<str>,
    /// Time at which the worker began the task, as far as the dispatcher knows.
    pub started_at: Micros,
    pub ended_at: Micros,
    pub reason: LossReason,
    /// The attempt counts against the task.
    pub is_counted: bool,
}

/// A task that is not tried again, with its latest attempts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuarantinedTask {
    pub task: TaskId,
    pub history: Vec<AttemptRecord>,
}

/// A running attempt of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunningCopy {
    pub(crate) worker: WorkerId,
    pub(crate) attempt: AttemptId,
}

/// Attempts of a task that run at the same time: one, or two if there is a second copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copies {
    One(RunningCopy),
    Two(RunningCopy, RunningCopy),
}

impl Copies {
    pub(crate) fn iter(self) -> impl Iterator<Item = RunningCopy> {
        let (first, second) = match self {
            Self::One(copy) => (copy, None),
            Self::Two(first, second) => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }

    /// Returns the copies without the one at `worker`; `None` if no copy remains.
    pub(crate) fn without(self, worker: WorkerId) -> Option<Self> {
        match self {
            Self::One(copy) => (copy.worker != worker).then_some(self),
            Self::Two(first, second) if first.worker == worker => Some(Self::One(second)),
            Self::Two(first, second) if second.worker == worker => Some(Self::One(first)),
            Self::Two(..) => Some(self),
        }
    }
}

/// Where a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Waiting,
    /// The task waits again at this time.
    Delayed(Micros),
    Running(Copies),
}

/// Part of a task's state that only tasks with failed attempts have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trouble {
    pub(crate) history: Vec<AttemptRecord>,
    /// Number of attempts that count against the task.
    pub(crate) counted_attempts: u32,
    /// The task must run alone in its worker, so that a loss of the worker shows its cause.
    pub(crate) is_suspect: bool,
    /// Host that the task avoids, and the time until which the task avoids the host.
    pub(crate) excluded_host: Option<(Arc<str>, Micros)>,
}

#[derive(Debug)]
pub(crate) struct OpenTask {
    pub(crate) groups: Groups,
    pub(crate) place: Place,
    pub(crate) stage: Stage,
    pub(crate) trouble: Option<Box<Trouble>>,
}

impl OpenTask {
    pub(crate) fn is_suspect(&self) -> bool {
        self.trouble
            .as_ref()
            .is_some_and(|trouble| trouble.is_suspect)
    }

    /// True if the task avoids `host` at the time `now`.
    pub(crate) fn avoids(&self, host: &str, now: Micros) -> bool {
        let excluded = self.trouble.as_ref().and_then(|t| t.excluded_host.as_ref());
        excluded.is_some_and(|(excluded, until)| **excluded == *host && now < *until)
    }
}

/// All tasks that have no accepted result, except pruned ones.
#[derive(Debug, Default)]
pub(crate) struct TaskTable {
    pub(crate) open: FxHashMap<TaskId, OpenTask>,
    pub(crate) quarantined: BTreeMap<TaskId, Vec<AttemptRecord>>,
    /// Greatest number that a task of this run has had.
    pub(crate) greatest_id: Option<TaskId>,
    /// Number of open tasks of each set of groups.
    pub(crate) group_sets: BTreeMap<Groups, usize>,
}

impl TaskTable {
    pub(crate) fn insert(&mut self, task: OpenTask) {
        let id = task.place.task;
        *self.group_sets.entry(task.groups).or_default() += 1;
        self.greatest_id = self.greatest_id.max(Some(id));
        self.open.insert(id, task);
    }

    /// Removes an open task and returns it.
    pub(crate) fn remove(&mut self, id: TaskId) -> Option<OpenTask> {
        let task = self.open.remove(&id)?;
        if let Some(count) = self.group_sets.get_mut(&task.groups) {
            *count -= 1;
            if *count == 0 {
                self.group_sets.remove(&task.groups);
            }
        }
        Some(task)
    }

    /// True if the task is open and must run alone in its worker.
    pub(crate) fn is_suspect(&self, id: TaskId) -> bool {
        self.open.get(&id).is_some_and(OpenTask::is_suspect)
    }

    /// True if a task with this number was added at some time.
    pub(crate) fn was_added(&self, id: TaskId) -> bool {
        self.greatest_id.is_some_and(|greatest| id <= greatest)
    }
}
