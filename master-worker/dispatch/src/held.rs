//! The tasks that one worker holds.

use crate::{AttemptId, TaskId};
use std::collections::VecDeque;

/// A task that a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldAttempt {
    pub(crate) task: TaskId,
    pub(crate) attempt: AttemptId,
    /// The worker reports all earlier results before it begins this task. So if the worker is
    /// lost, no earlier task can be the cause.
    pub(crate) report_each: bool,
    /// The task is closed or waits again, and the worker has not reported the attempt.
    pub(crate) is_abandoned: bool,
    /// The task must run alone: the worker gets no task ahead.
    pub(crate) is_suspect: bool,
}

/// The tasks of a worker in the order in which the worker executes them. The first one is being
/// executed. Reports come in this order, so that each report costs O(1) however many tasks the
/// worker holds; only tasks that are canceled or taken back are searched.
#[derive(Debug, Default)]
pub(crate) struct HeldTasks {
    list: VecDeque<HeldAttempt>,
    suspect_count: usize,
    /// Number of tasks that operations have examined.
    #[cfg(test)]
    pub(crate) examined: std::cell::Cell<usize>,
}

impl HeldTasks {
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the task that is being executed.
    pub(crate) fn first(&self) -> Option<&HeldAttempt> {
        self.list.front()
    }

    /// Returns all tasks. Takes O(n).
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &HeldAttempt> + ExactSizeIterator {
        self.list.iter().inspect(|_| self.note_examined(1))
    }

    pub(crate) fn push(&mut self, held: HeldAttempt) {
        self.suspect_count += usize::from(held.is_suspect);
        self.list.push_back(held);
    }

    /// True if the worker holds a task that must run alone.
    pub(crate) fn has_suspect(&self) -> bool {
        self.suspect_count > 0
    }

    /// Removes an attempt of a task and returns it with its position.
    pub(crate) fn remove(
        &mut self,
        task: TaskId,
        attempt: AttemptId,
    ) -> Option<(usize, HeldAttempt)> {
        let position = self.position(attempt)?;
        if self.list.get(position)?.task != task {
            return None;
        }
        let held = self.list.remove(position)?;
        self.suspect_count -= usize::from(held.is_suspect);
        Some((position, held))
    }

    /// Notes that the task of an attempt must run alone.
    pub(crate) fn mark_suspect(&mut self, attempt: AttemptId) {
        self.set_suspect(attempt, true);
    }

    /// Abandons an attempt whose task is closed.
    pub(crate) fn abandon_closed(&mut self, attempt: AttemptId) {
        if let Some(held) = self.set_suspect(attempt, false) {
            held.is_abandoned = true;
        }
    }

    /// Abandons the first attempt, whose task becomes a suspect. Returns the attempt; `None` if it
    /// was abandoned before.
    pub(crate) fn abandon_first(&mut self) -> Option<HeldAttempt> {
        let first = self.list.front_mut().filter(|held| !held.is_abandoned)?;
        first.is_abandoned = true;
        let attempt = first.attempt;
        self.set_suspect(attempt, true).copied()
    }

    /// Abandons all attempts and returns the tasks of those that were not abandoned before.
    pub(crate) fn abandon_all(&mut self) -> Vec<TaskId> {
        self.note_examined(self.list.len());
        let live = self.list.iter_mut().filter(|held| !held.is_abandoned);
        live.map(|held| {
            held.is_abandoned = true;
            held.task
        })
        .collect()
    }

    fn set_suspect(&mut self, attempt: AttemptId, is_suspect: bool) -> Option<&mut HeldAttempt> {
        let position = self.position(attempt)?;
        let held = self.list.get_mut(position)?;
        let was_suspect = std::mem::replace(&mut held.is_suspect, is_suspect);
        self.suspect_count += usize::from(is_suspect);
        self.suspect_count -= usize::from(was_suspect);
        Some(held)
    }

    /// Returns the position of an attempt. Reports concern the first task; what is taken back is
    /// at the end.
    fn position(&self, attempt: AttemptId) -> Option<usize> {
        self.note_examined(1);
        if self
            .list
            .front()
            .is_some_and(|held| held.attempt == attempt)
        {
            return Some(0);
        }
        let position = self.list.iter().rposition(|held| held.attempt == attempt);
        self.note_examined(self.list.len() - position.unwrap_or(0));
        position
    }

    #[cfg(test)]
    fn note_examined(&self, count: usize) {
        self.examined.set(self.examined.get() + count);
    }

    #[cfg(not(test))]
    #[expect(clippy::unused_self, reason = "tests count the examined tasks")]
    fn note_examined(&self, _count: usize) {}
}
