//! All workers of a run, with an index of those that can take a task.

use crate::worker::{Worker, WorkerStage};
use crate::{Groups, Micros, WorkerId, WorkerOrder};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Rank of a worker among those that can take a task; the lowest is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    /// Number of tasks that the worker holds: idle workers first.
    held_tasks: usize,
    /// Bits of the factor, which is positive, so that their order is the order of the factors.
    factor: Reverse<u64>,
    worker: WorkerId,
}

/// Index entries of one worker.
#[derive(Clone, Copy, Debug)]
struct Entry {
    groups: Groups,
    rank: Rank,
    is_hungry: bool,
    accepts_tasks: bool,
    is_paused: bool,
    /// Number of tasks that the worker could return.
    spare_tasks: usize,
}

/// All workers. Each operation takes O(log n) for n workers, times the number of different sets of
/// groups of workers.
#[derive(Debug, Default)]
pub(crate) struct WorkerPool {
    workers: BTreeMap<WorkerId, Worker>,
    entries: BTreeMap<WorkerId, Entry>,
    hungry: BTreeMap<Groups, BTreeSet<Rank>>,
    /// Workers that hold tasks which they have not begun, by the number of these tasks.
    spare: BTreeSet<(usize, WorkerId)>,
    /// Number of workers that accept tasks.
    computing_count: usize,
    paused_count: usize,
}

impl WorkerPool {
    pub(crate) fn len(&self) -> usize {
        self.workers.len()
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(&id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// Inserts or replaces a worker.
    pub(crate) fn insert(&mut self, worker: Worker) {
        let id = worker.id;
        self.clear_entry(id);
        self.workers.insert(id, worker);
    }

    /// Removes a worker and returns it.
    pub(crate) fn remove(&mut self, id: WorkerId) -> Option<Worker> {
        self.clear_entry(id);
        self.workers.remove(&id)
    }

    /// Returns a worker for a change. The caller must call [`WorkerPool::index`] afterwards.
    pub(crate) fn get_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&id)
    }

    /// Updates the index after a change of a worker. `capacity` is the number of tasks that the
    /// worker should hold.
    pub(crate) fn index(&mut self, id: WorkerId, order: WorkerOrder, capacity: usize) {
        self.clear_entry(id);
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let held_tasks = worker.held.len();
        // A batch is refilled when half of it is left, so that messages contain several tasks.
        let is_hungry =
            worker.accepts_tasks() && held_tasks <= capacity / 2 && held_tasks < capacity;
        let rank = Rank {
            held_tasks,
            factor: Reverse(match order {
                WorkerOrder::ById => 0,
                WorkerOrder::ByFactor => worker.factor.to_bits(),
            }),
            worker: id,
        };
        let can_return = worker.stage == WorkerStage::Ready && !worker.is_recalling;
        let entry = Entry {
            groups: worker.groups,
            rank,
            is_hungry,
            accepts_tasks: worker.accepts_tasks(),
            is_paused: !worker.is_computing(),
            spare_tasks: if can_return {
                held_tasks.saturating_sub(1)
            } else {
                0
            },
        };
        if entry.is_hungry {
            self.hungry.entry(entry.groups).or_default().insert(rank);
        }
        if entry.spare_tasks > 0 {
            self.spare.insert((entry.spare_tasks, id));
        }
        self.computing_count += usize::from(entry.accepts_tasks);
        self.paused_count += usize::from(entry.is_paused);
        self.entries.insert(id, entry);
    }

    fn clear_entry(&mut self, id: WorkerId) {
        let Some(entry) = self.entries.remove(&id) else {
            return;
        };
        self.computing_count -= usize::from(entry.accepts_tasks);
        self.paused_count -= usize::from(entry.is_paused);
        if entry.is_hungry
            && let Some(ranks) = self.hungry.get_mut(&entry.groups)
        {
            ranks.remove(&entry.rank);
            if ranks.is_empty() {
                self.hungry.remove(&entry.groups);
            }
        }
        if entry.spare_tasks > 0 {
            self.spare.remove(&(entry.spare_tasks, id));
        }
    }

    /// Returns the first worker that can take a task of groups for which `has_task` is true.
    pub(crate) fn next_hungry(&self, has_task: impl Fn(Groups) -> bool) -> Option<WorkerId> {
        let first_ranks = self.hungry.iter().filter(|(groups, _)| has_task(**groups));
        let first_ranks = first_ranks.filter_map(|(_, ranks)| ranks.first());
        first_ranks.min().map(|rank| rank.worker)
    }

    /// Returns the first worker of each set of groups, if that worker holds no task.
    pub(crate) fn first_idle(&self) -> Vec<WorkerId> {
        let first_ranks = self.hungry.values().filter_map(BTreeSet::first);
        let idle_ranks = first_ranks.filter(|rank| rank.held_tasks == 0);
        idle_ranks.map(|rank| rank.worker).collect()
    }

    /// Returns the worker that could return most tasks.
    pub(crate) fn with_most_spare_tasks(&self) -> Option<&Worker> {
        let (_, id) = self.spare.last()?;
        self.workers.get(id)
    }

    /// Number of workers that are ready and compute.
    pub(crate) fn computing_count(&self) -> usize {
        self.computing_count
    }

    pub(crate) fn has_paused_worker(&self) -> bool {
        self.paused_count > 0
    }

    /// True if there is a worker on another host than `host`.
    pub(crate) fn has_other_host(&self, host: &str) -> bool {
        let is_elsewhere = |worker: &Worker| *worker.host != *host && worker.accepts_tasks();
        self.workers.values().any(is_elsewhere)
    }

    /// Returns the workers that execute a task with the ages of their attempts, oldest first. Takes
    /// O(n log n).
    pub(crate) fn executing_by_age(&self, now: Micros) -> Vec<(Micros, WorkerId)> {
        let executing = self
            .workers
            .values()
            .filter(|worker| !worker.held.is_empty());
        let mut ages: Vec<_> = executing.map(|w| (w.first_age(now), w.id)).collect();
        ages.sort_by_key(|(age, id)| (Reverse(*age), *id));
        ages
    }
}
