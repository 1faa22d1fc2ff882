//! Tasks that wait for a worker, in the order of their keys.

use crate::{Groups, Key, TaskId};
use std::collections::{BTreeMap, BTreeSet};

/// Number of tasks that a search examines for one that may run on the host of a worker.
const EXAMINED_TASKS_MAX: usize = 16;

/// Place of a task in the order: the task with the lowest key first; among equal keys, the one
/// with the lowest position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) key: Key,
    /// A task keeps its position when its attempt fails, so it does not go behind newer tasks.
    pub(crate) position: i64,
    pub(crate) task: TaskId,
}

/// The waiting tasks. Each operation takes O(log n) for n tasks, times the number of different sets
/// of groups, which is limited.
#[derive(Debug, Default)]
pub(crate) struct WaitingTasks {
    by_groups: BTreeMap<Groups, BTreeSet<Place>>,
    count: usize,
}

impl WaitingTasks {
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn insert(&mut self, groups: Groups, place: Place) {
        if self.by_groups.entry(groups).or_default().insert(place) {
            self.count += 1;
        }
    }

    /// Removes a task; returns false if the task does not wait.
    pub(crate) fn remove(&mut self, groups: Groups, place: &Place) -> bool {
        let Some(places) = self.by_groups.get_mut(&groups) else {
            return false;
        };
        let was_waiting = places.remove(place);
        if places.is_empty() {
            self.by_groups.remove(&groups);
        }
        self.count -= usize::from(was_waiting);
        was_waiting
    }

    /// True if a task waits that shares a group with `groups`.
    pub(crate) fn has_task_for(&self, groups: Groups) -> bool {
        self.by_groups.keys().any(|set| set.intersects(groups))
    }

    /// Returns the best task that shares a group with `groups` and for which `may_run` is true. If
    /// there is none among the first [`EXAMINED_TASKS_MAX`] of each set of groups, returns the best
    /// task, because a task must not wait for ever.
    pub(crate) fn best_for(
        &self,
        groups: Groups,
        may_run: impl Fn(TaskId) -> bool,
    ) -> Option<Place> {
        let matching_sets = || {
            self.by_groups
                .iter()
                .filter(|(set, _)| set.intersects(groups))
        };
        let suitable = matching_sets().filter_map(|(_, places)| {
            let mut first_places = places.iter().take(EXAMINED_TASKS_MAX);
            first_places.find(|place| may_run(place.task))
        });
        suitable
            .min()
            .or_else(|| {
                matching_sets()
                    .filter_map(|(_, places)| places.first())
                    .min()
            })
            .copied()
    }

    /// Returns the lowest key.
    pub(crate) fn best_key(&self) -> Option<Key> {
        let first_places = self.by_groups.values().filter_map(BTreeSet::first);
        first_places.map(|place| place.key).min()
    }

    /// Removes the tasks whose keys are greater than `bound`, and returns them.
    pub(crate) fn remove_worse_than(&mut self, bound: Key) -> Vec<TaskId> {
        let mut removed_tasks = Vec::new();
        let first_worse = Place {
            key: bound,
            position: i64::MAX,
            task: TaskId(u64::MAX),
        };
        self.by_groups.retain(|_, places| {
            let worse_places = places.split_off(&first_worse);
            removed_tasks.extend(worse_places.into_iter().map(|place| place.task));
            !places.is_empty()
        });
        self.count -= removed_tasks.len();
        removed_tasks
    }

    /// Returns the tasks in their order, for tests and listings.
    #[cfg(test)]
    pub(crate) fn ordered_tasks(&self) -> Vec<TaskId> {
        let mut places: Vec<&Place> = self.by_groups.values().flatten().collect();
        places.sort();
        places.into_iter().map(|place| place.task).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(key: f64, position: i64, task: u64) -> Place {
        Place {
            key: Key::new(key).expect("a number"),
            position,
            task: TaskId(task),
        }
    }

    fn single(group: u32) -> Groups {
        Groups::single(group).expect("a group")
    }

    #[test]
    fn lowest_key_comes_first_whatever_the_order_of_insertion() {
        let mut waiting = WaitingTasks::default();
        for (task, key) in [(1, 5.0), (2, -1.0), (3, 5.0), (4, 2.0)] {
            waiting.insert(Groups::ALL, place(key, task as i64, task));
        }
        let order: Vec<u64> = waiting.ordered_tasks().iter().map(|task| task.0).collect();
        assert_eq!(order, [2, 4, 1, 3]);
        assert_eq!(waiting.best_key(), Key::new(-1.0));
    }

    #[test]
    fn tasks_of_other_groups_are_not_offered() {
        let mut waiting = WaitingTasks::default();
        waiting.insert(single(1), place(0.0, 0, 1));
        waiting.insert(single(2), place(1.0, 0, 2));
        let best = waiting.best_for(single(2), |_| true).expect("a task");
        assert_eq!(best.task, TaskId(2));
        assert!(!waiting.has_task_for(single(3)));
        assert!(waiting.has_task_for(Groups::ALL));
    }

    #[test]
    fn excluded_task_is_offered_if_there_is_no_other() {
        let mut waiting = WaitingTasks::default();
        waiting.insert(Groups::ALL, place(0.0, 0, 1));
        waiting.insert(Groups::ALL, place(1.0, 1, 2));
        let not_first = |task: TaskId| task != TaskId(1);
        let best = waiting.best_for(Groups::ALL, not_first).expect("a task");
        assert_eq!(best.task, TaskId(2));
        assert!(waiting.remove(Groups::ALL, &best));
        let best = waiting.best_for(Groups::ALL, not_first).expect("a task");
        assert_eq!(best.task, TaskId(1));
    }

    #[test]
    fn pruning_keeps_keys_equal_to_the_bound() {
        let mut waiting = WaitingTasks::default();
        for (task, key) in [(1, 1.0), (2, 2.0), (3, 2.5)] {
            waiting.insert(single(task as u32), place(key, 0, task));
        }
        let bound = Key::new(2.0).expect("a number");
        assert_eq!(waiting.remove_worse_than(bound), [TaskId(3)]);
        assert_eq!(waiting.len(), 2);
        assert!(!waiting.remove(single(3), &place(2.5, 0, 3)));
    }
}
