//! The open and the quarantined tasks of a run, as the records leave them. The writer updates this
//! copy, so that a snapshot costs the serving thread nothing.

use super::record::{FailedAttempt, QuarantinedTask, Record, StoredTask};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Number of ids in one shard, the part that is copied when one of its tasks changes during a
/// snapshot. The copy takes some microseconds; a clone counts one reference for each shard. The ids
/// are consecutive: tasks that are added together end at about the same time, so few shards change.
const IDS_PER_SHARD: u64 = 64;
/// Number of failed attempts that are kept for one open task; the oldest are dropped. The master
/// quarantines a task much earlier, unless its failures do not count.
const FAILED_ATTEMPTS_KEPT_MAX: usize = 1024;

#[derive(Clone, Debug)]
struct OpenTask {
    task: StoredTask,
    failed: VecDeque<FailedAttempt>,
}

type Shard = FxHashMap<u64, OpenTask>;

/// A clone shares all tasks. A shard is copied when one of its tasks changes while a clone exists.
#[derive(Clone, Debug, Default)]
pub(super) struct Mirror {
    /// Only shards with tasks, by id / [`IDS_PER_SHARD`].
    shards: FxHashMap<u64, Arc<Shard>>,
    quarantined: Arc<BTreeMap<u64, QuarantinedTask>>,
}

impl Mirror {
    /// Returns the open tasks in the order of key, then position, then id.
    pub(super) fn open_tasks(&self) -> Vec<&StoredTask> {
        let open_tasks = self.shards.values().flat_map(|shard| shard.values());
        let mut tasks: Vec<&StoredTask> = open_tasks.map(|open| &open.task).collect();
        tasks.sort_unstable_by(|a, b| {
            let by_key = a.key.total_cmp(&b.key);
            by_key.then((a.position, a.id).cmp(&(b.position, b.id)))
        });
        tasks
    }

    /// Returns the failed attempts of open tasks; those of one task are in order.
    pub(super) fn failed_attempts(&self) -> impl Iterator<Item = &FailedAttempt> {
        let open_tasks = self.shards.values().flat_map(|shard| shard.values());
        open_tasks.flat_map(|open| &open.failed)
    }

    /// Returns the quarantined tasks in the order of their ids.
    pub(super) fn quarantined(&self) -> impl Iterator<Item = &QuarantinedTask> {
        self.quarantined.values()
    }

    pub(super) fn apply(&mut self, record: &Record) {
        match record {
            Record::TasksAdded { tasks } => self.add_tasks(tasks),
            Record::Accepted { task, added, .. } => {
                self.remove_task(*task);
                self.add_tasks(added);
            }
            Record::AttemptFailed(failed) => self.add_failed_attempt(failed.clone()),
            Record::Quarantined { task, history } => {
                if let Some(open) = self.remove_task(*task) {
                    self.add_quarantined(QuarantinedTask {
                        task: open.task,
                        history: history.clone(),
                    });
                }
            }
            Record::Pruned { tasks } => tasks.iter().for_each(|task| {
                self.remove_task(*task);
            }),
            Record::KeyChanged { task, key } => {
                if let Some(open) = self.open_task_mut(*task) {
                    open.task.key = *key;
                }
            }
            Record::Statistics { .. } | Record::Finished => {}
        }
    }

    pub(super) fn add_tasks(&mut self, tasks: &[StoredTask]) {
        for task in tasks {
            let open = OpenTask {
                task: task.clone(),
                failed: VecDeque::new(),
            };
            // A quarantined task that is added again is tried again.
            if self.quarantined.contains_key(&task.id) {
                Arc::make_mut(&mut self.quarantined).remove(&task.id);
            }
            let shard = self.shards.entry(task.id / IDS_PER_SHARD).or_default();
            Arc::make_mut(shard).insert(task.id, open);
        }
    }

    pub(super) fn add_failed_attempt(&mut self, failed: FailedAttempt) {
        if let Some(open) = self.open_task_mut(failed.task) {
            if open.failed.len() == FAILED_ATTEMPTS_KEPT_MAX {
                open.failed.pop_front();
            }
            open.failed.push_back(failed);
        }
    }

    pub(super) fn add_quarantined(&mut self, quarantined: QuarantinedTask) {
        Arc::make_mut(&mut self.quarantined).insert(quarantined.task.id, quarantined);
    }

    fn remove_task(&mut self, id: u64) -> Option<OpenTask> {
        let number = id / IDS_PER_SHARD;
        let shard = Arc::make_mut(self.shards.get_mut(&number)?);
        let open = shard.remove(&id);
        if shard.is_empty() {
            self.shards.remove(&number);
        }
        open
    }

    fn open_task_mut(&mut self, id: u64) -> Option<&mut OpenTask> {
        let shard = self.shards.get_mut(&(id / IDS_PER_SHARD))?;
        Arc::make_mut(shard).get_mut(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn task(id: u64, key: f64) -> StoredTask {
        StoredTask {
            id,
            key,
            groups: 0,
            position: 0,
            payload: Bytes::from_static(b"p"),
        }
    }

    fn failed(attempt: u64) -> FailedAttempt {
        FailedAttempt {
            task: 1,
            attempt,
            reason: Bytes::new(),
        }
    }

    #[test]
    fn open_tasks_are_sorted_by_key_position_and_id() {
        let mut mirror = Mirror::default();
        mirror.add_tasks(&[task(5, 1.0), task(4000, -2.0), task(3, 1.0), task(9, 7.0)]);
        mirror.apply(&Record::KeyChanged { task: 9, key: 0.5 });
        mirror.add_tasks(&[StoredTask {
            position: -1,
            ..task(8, 1.0)
        }]);
        let ids: Vec<u64> = mirror.open_tasks().iter().map(|task| task.id).collect();
        assert_eq!(ids, [4000, 9, 8, 3, 5]);
    }

    #[test]
    fn quarantined_task_that_is_added_again_is_open() {
        let mut mirror = Mirror::default();
        mirror.add_tasks(&[task(1, 0.0)]);
        mirror.apply(&Record::Quarantined {
            task: 1,
            history: Bytes::new(),
        });
        mirror.apply(&Record::TasksAdded {
            tasks: vec![task(1, 0.0)],
        });
        assert_eq!(mirror.open_tasks(), [&task(1, 0.0)]);
        assert_eq!(mirror.quarantined().count(), 0);
    }

    #[test]
    fn clone_does_not_see_later_changes() {
        let mut mirror = Mirror::default();
        mirror.add_tasks(&[task(1, 0.0), task(2, 0.0)]);
        let clone = mirror.clone();
        mirror.apply(&Record::Pruned { tasks: vec![1] });
        mirror.apply(&Record::Quarantined {
            task: 2,
            history: Bytes::from_static(b"twice"),
        });
        assert_eq!(clone.open_tasks().len(), 2);
        assert_eq!(clone.quarantined().count(), 0);
        assert_eq!(mirror.open_tasks().len(), 0);
        let quarantined: Vec<_> = mirror.quarantined().collect();
        assert_eq!(quarantined[0].task, task(2, 0.0));
        assert_eq!(quarantined[0].history, "twice");
    }

    #[test]
    fn oldest_failed_attempts_are_dropped_above_the_limit() {
        let mut mirror = Mirror::default();
        mirror.add_tasks(&[task(1, 0.0)]);
        let attempts = FAILED_ATTEMPTS_KEPT_MAX as u64 + 2;
        (0..attempts).for_each(|attempt| mirror.apply(&Record::AttemptFailed(failed(attempt))));
        let kept: Vec<u64> = mirror.failed_attempts().map(|f| f.attempt).collect();
        assert_eq!(kept, (2..attempts).collect::<Vec<u64>>());
        // A closed task takes its failed attempts along.
        mirror.apply(&Record::Pruned { tasks: vec![1] });
        mirror.apply(&Record::AttemptFailed(failed(7)));
        assert_eq!(mirror.failed_attempts().count(), 0);
    }
}
