//! Second copies of tasks, tasks that are taken back, and attempts that take too long.

use crate::dispatcher::Dispatcher;
use crate::held::HeldAttempt;
use crate::losses::AttemptEnd;
use crate::task_table::{Copies, RunningCopy, Stage};
use crate::worker::WorkerCondition;
use crate::{LossReason, Micros, Output, PausePolicy, TaskId, WorkerId};

/// Minimum duration of the tasks that a worker holds ahead, for which an idle worker takes some of
/// them.
const RECALL_DURATION_MIN: f64 = 5_000.0;

impl Dispatcher {
    /// Examines all attempts: ends those that take too long, lets tasks of paused workers wait
    /// again, and starts second copies for idle workers.
    pub(crate) fn check_attempts(&mut self, now: Micros) {
        if let Some(timeout) = self.settings.attempt_timeout {
            self.end_overdue_attempts(now, timeout);
        }
        if let PausePolicy::Reassign { after } = self.settings.pause_policy {
            self.reassign_paused(now, after);
        }
        self.start_second_copies(now);
    }

    /// Ends attempts that take longer than `timeout`. The worker may still return the result, which
    /// counts if it is the first one.
    fn end_overdue_attempts(&mut self, now: Micros, timeout: Micros) {
        let executing = self.pool.executing_by_age(now).into_iter();
        let overdue: Vec<_> = executing.take_while(|(age, _)| *age > timeout).collect();
        for (_, id) in overdue {
            let Some(worker) = self.pool.get_mut(id) else {
                continue;
            };
            let (host, started_at) = (worker.host.clone(), worker.first_since);
            let Some(held) = worker.held.abandon_first() else {
                continue;
            };
            let (task, attempt) = (held.task, held.attempt);
            let end = AttemptEnd {
                worker: id,
                host,
                attempt,
                started_at,
                reason: LossReason::OverTime,
                may_have_begun: true,
                is_counted: true,
                is_suspect: false,
            };
            self.end_attempt(now, task, end);
            self.outputs.push_back(Output::Cancel {
                worker: id,
                task,
                attempt,
            });
        }
    }

    /// Lets the tasks of workers wait again that have been paused for the time `after`.
    fn reassign_paused(&mut self, now: Micros, after: Micros) {
        let is_due = |condition: WorkerCondition| match condition {
            WorkerCondition::Computing => false,
            WorkerCondition::Paused { since, .. } => now.saturating_sub(since) >= after,
        };
        let workers = self.pool.iter();
        let due = workers.filter(|worker| is_due(worker.condition) && !worker.was_reassigned);
        let ids: Vec<WorkerId> = due.map(|worker| worker.id).collect();
        for id in ids {
            let Some(worker) = self.pool.get_mut(id) else {
                continue;
            };
            worker.was_reassigned = true;
            for task in worker.held.abandon_all() {
                self.statistics.counts.attempts_lost += 1;
                if self.detach(task, id) {
                    self.make_waiting(task);
                }
            }
        }
    }

    /// Gives idle workers second copies of tasks: those of paused workers first, then those that
    /// have taken longest. The first attempt continues, and the first result counts.
    fn start_second_copies(&mut self, now: Micros) {
        let duplicates_paused = self.settings.pause_policy == PausePolicy::Duplicate;
        if !self.waiting.is_empty() || !(self.settings.second_copies || duplicates_paused) {
            return;
        }
        let mut idle_workers = self.pool.first_idle();
        if idle_workers.is_empty() {
            return;
        }
        for (age, id) in self.pool.executing_by_age(now) {
            let Some(worker) = self.pool.get(id) else {
                continue;
            };
            let is_paused = !worker.is_computing();
            let is_straggler = self.settings.second_copies && self.is_straggler(worker.factor, age);
            if !(is_straggler || is_paused && duplicates_paused) {
                continue;
            }
            // No task of a paused worker makes progress; a slow worker has begun only its first.
            let copied = if is_paused { worker.held.len() } else { 1 };
            let tasks: Vec<TaskId> = worker.held.iter().take(copied).map(|h| h.task).collect();
            for task in tasks {
                if let Some(position) = self.copy_position(task, &idle_workers) {
                    let idle_worker = idle_workers.swap_remove(position);
                    self.start_copy(now, task, idle_worker);
                    idle_workers = self.pool.first_idle();
                }
            }
            if idle_workers.is_empty() {
                return;
            }
        }
    }

    fn is_straggler(&self, factor: f64, age: Micros) -> bool {
        let mean = self.durations.mean().map(|mean| mean / factor);
        let is_old = |mean: f64| age as f64 > mean * self.settings.straggler_ratio;
        age >= self.settings.straggler_age_min && mean.is_some_and(is_old)
    }

    /// Returns the position of an idle worker that may execute a second copy of a task; `None` if
    /// the task has two copies, is closed or must run alone.
    fn copy_position(&self, id: TaskId, idle_workers: &[WorkerId]) -> Option<usize> {
        let task = self.tasks.open.get(&id).filter(|task| !task.is_suspect())?;
        let Stage::Running(Copies::One(first)) = task.stage else {
            return None;
        };
        idle_workers.iter().position(|id| {
            let worker = self.pool.get(*id);
            *id != first.worker && worker.is_some_and(|w| w.groups.intersects(task.groups))
        })
    }

    fn start_copy(&mut self, now: Micros, task: TaskId, id: WorkerId) {
        let attempt = self.next_attempt();
        let second = RunningCopy {
            worker: id,
            attempt,
        };
        let Some(state) = self.tasks.open.get_mut(&task) else {
            return;
        };
        let Stage::Running(Copies::One(first)) = state.stage else {
            return;
        };
        state.stage = Stage::Running(Copies::Two(first, second));
        self.statistics.counts.second_copies += 1;
        if let Some(worker) = self.pool.get_mut(id) {
            worker.account(now);
            worker.restart_first(now);
            worker.held.push(HeldAttempt {
                task,
                attempt,
                report_each: true,
                is_abandoned: false,
                is_suspect: false,
            });
        }
        self.index(id);
        self.outputs.push_back(Output::Dispatch {
            worker: id,
            attempts: vec![(task, attempt)],
            report_each: true,
        });
    }

    /// Takes tasks back from the worker that holds most of them, if another worker is idle and no
    /// task waits.
    pub(crate) fn recall_tasks(&mut self) {
        if !self.waiting.is_empty() {
            return;
        }
        let idle_workers = self.pool.first_idle();
        let Some(worker) = self.pool.with_most_spare_tasks() else {
            return;
        };
        let spare_count = worker.held.len() - 1;
        let duration = worker
            .expected_duration(self.durations.mean())
            .unwrap_or(0.0);
        if idle_workers.is_empty() || duration * (spare_count as f64) < RECALL_DURATION_MIN {
            return;
        }
        let is_wanted = |held: &&HeldAttempt| {
            let task = self.tasks.open.get(&held.task);
            let fits = |groups: crate::Groups| {
                let mut workers = idle_workers.iter().filter_map(|id| self.pool.get(*id));
                workers.any(|worker| worker.groups.intersects(groups))
            };
            !held.is_abandoned && task.is_some_and(|task| fits(task.groups))
        };
        // The last ones are those that the worker will begin last.
        let recalled = worker.held.iter().skip(1).rev().filter(is_wanted);
        let recalled = recalled.take(spare_count.div_ceil(2));
        let attempts: Vec<_> = recalled.map(|held| (held.task, held.attempt)).collect();
        if attempts.is_empty() {
            return;
        }
        let id = worker.id;
        if let Some(worker) = self.pool.get_mut(id) {
            worker.is_recalling = true;
        }
        self.index(id);
        self.outputs.push_back(Output::Recall {
            worker: id,
            attempts,
        });
    }
}
