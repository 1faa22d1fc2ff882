//! Workers that are lost, paused or released, and what this means for their tasks.

use crate::dispatcher::Dispatcher;
use crate::held::HeldAttempt;
use crate::task_table::{AttemptRecord, Stage, Trouble};
use crate::worker::{Worker, WorkerCondition, WorkerStage};
use crate::{
    AttemptId, ClassId, LossReason, Micros, Output, PauseCause, PausePolicy, TaskFailure, TaskId,
    WorkerId,
};
use std::sync::Arc;

/// Host of a worker that is not part of the run.
const UNKNOWN_HOST: &str = "unknown";

/// End of an attempt without a result.
#[derive(Clone, Debug)]
pub(crate) struct AttemptEnd {
    pub(crate) worker: WorkerId,
    pub(crate) host: Arc<str>,
    pub(crate) attempt: AttemptId,
    pub(crate) started_at: Micros,
    pub(crate) reason: LossReason,
    /// The worker may have begun the attempt.
    pub(crate) may_have_begun: bool,
    /// The attempt counts against the task.
    pub(crate) is_counted: bool,
    /// The task is one of several that may have caused the loss.
    pub(crate) is_suspect: bool,
}

/// Returns the number of held tasks that may have caused the end of their worker. A worker executes
/// its tasks in order. Before a task with `report_each`, the worker reports all earlier results; so
/// a later task was not begun.
fn suspect_count<'a>(mut held: impl Iterator<Item = &'a HeldAttempt>) -> usize {
    held.position(|held| held.report_each)
        .map_or(usize::MAX, |position| position + 1)
}

impl Dispatcher {
    pub(crate) fn host_of(&self, id: WorkerId) -> Arc<str> {
        let worker = self.pool.get(id);
        worker.map_or_else(|| UNKNOWN_HOST.into(), |worker| worker.host.clone())
    }

    /// Handles the loss of a worker: its tasks wait again. If the reason counts, the task that was
    /// being executed is blamed; if this could be one of several, all of them are suspects, which
    /// are executed alone from then on.
    pub(crate) fn lose_worker(&mut self, now: Micros, id: WorkerId, reason: LossReason) {
        let Some(worker) = self.remove_worker(now, id) else {
            return;
        };
        self.statistics.counts.workers_lost += 1;
        self.end_attempts(now, &worker, reason);
    }

    /// Ends all attempts of a worker that is not in the pool any more.
    fn end_attempts(&mut self, now: Micros, worker: &Worker, reason: LossReason) {
        let begun = suspect_count(worker.held.iter()).min(worker.held.len());
        let suspects = if reason.counts() { begun } else { 0 };
        for (index, held) in worker.held.iter().enumerate() {
            if held.is_abandoned {
                continue;
            }
            let end = AttemptEnd {
                worker: worker.id,
                host: worker.host.clone(),
                attempt: held.attempt,
                started_at: if index == 0 { worker.first_since } else { now },
                reason,
                may_have_begun: index < begun,
                is_counted: suspects == 1 && index == 0,
                is_suspect: suspects > 1 && index < suspects,
            };
            self.end_attempt(now, held.task, end);
        }
    }

    /// Ends an attempt without a result, and decides when the task is tried again.
    pub(crate) fn end_attempt(&mut self, now: Micros, id: TaskId, end: AttemptEnd) {
        let counts = &mut self.statistics.counts;
        if end.is_counted {
            counts.attempts_failed += 1;
        } else {
            counts.attempts_lost += 1;
        }
        let history_max = self.settings.limits.history.max(1);
        let retry = self.settings.retry;
        let Some(task) = self.tasks.open.get_mut(&id) else {
            return;
        };
        let record = AttemptRecord {
            attempt: end.attempt,
            worker: end.worker,
            host: end.host.clone(),
            started_at: end.started_at,
            ended_at: now,
            reason: end.reason,
            is_counted: end.is_counted,
        };
        if !end.may_have_begun {
            self.place_again(now, id, end.worker, None);
            return;
        }
        let trouble = task.trouble.get_or_insert_default();
        if trouble.history.len() >= history_max {
            trouble.history.remove(0);
        }
        trouble.history.push(record.clone());
        trouble.is_suspect |= end.is_suspect;
        if end.is_counted {
            trouble.counted_attempts += 1;
            trouble.is_suspect = true;
            trouble.excluded_host = Some((end.host, now + retry.host_exclusion));
        }
        let (attempts, is_suspect) = (trouble.counted_attempts, trouble.is_suspect);
        let then = self.place_again(now, id, end.worker, end.is_counted.then_some(attempts));
        if is_suspect && then == TaskFailure::CopyContinues {
            self.mark_copy_suspect(id);
        }
        if end.is_counted {
            self.outputs.push_back(Output::AttemptFailed {
                task: id,
                record,
                then,
            });
        } else {
            self.outputs
                .push_back(Output::AttemptLost { task: id, record });
        }
        if then == TaskFailure::Quarantined {
            self.quarantine(id);
        }
    }

    /// Moves a task to its next stage after the end of the attempt at `worker`. `counted_attempts`
    /// is the number of counted attempts if the latest one counts.
    fn place_again(
        &mut self,
        now: Micros,
        id: TaskId,
        worker: WorkerId,
        counted_attempts: Option<u32>,
    ) -> TaskFailure {
        let retry = self.settings.retry;
        if counted_attempts.is_some_and(|count| count >= retry.attempts_max.max(1)) {
            return TaskFailure::Quarantined;
        }
        if !self.detach(id, worker) {
            return TaskFailure::CopyContinues;
        }
        let Some(count) = counted_attempts else {
            self.make_waiting(id);
            return TaskFailure::Waits;
        };
        let doublings = count.saturating_sub(1).min(32);
        let delay = retry
            .delay
            .saturating_mul(1 << doublings)
            .min(retry.delay_max);
        if let Some(task) = self.tasks.open.get_mut(&id) {
            task.stage = Stage::Delayed(now + delay);
            self.delayed.insert((now + delay, id));
        }
        TaskFailure::Delayed(delay)
    }

    /// Gives the worker that executes the remaining copy of a suspect no further task ahead.
    fn mark_copy_suspect(&mut self, id: TaskId) {
        let Some(Stage::Running(copies)) = self.tasks.open.get(&id).map(|task| task.stage) else {
            return;
        };
        for copy in copies.iter() {
            if let Some(worker) = self.pool.get_mut(copy.worker) {
                worker.held.mark_suspect(copy.attempt);
            }
            self.index(copy.worker);
        }
    }

    fn quarantine(&mut self, id: TaskId) {
        let task = self.tasks.open.get_mut(&id);
        let history = task.and_then(|task| task.trouble.take());
        let history = history.map_or_else(Vec::new, |trouble: Box<Trouble>| trouble.history);
        self.close_task(id, None);
        self.statistics.counts.tasks_quarantined += 1;
        self.tasks.quarantined.insert(id, history.clone());
        self.outputs
            .push_back(Output::Quarantined { task: id, history });
        let count = self.tasks.quarantined.len();
        if count >= self.settings.limits.quarantined {
            self.outputs.push_back(Output::TooManyQuarantined { count });
        }
    }

    /// Removes a worker from the pool and adds its times to the statistics.
    fn remove_worker(&mut self, now: Micros, id: WorkerId) -> Option<Worker> {
        self.pool.get_mut(id)?.account(now);
        let worker = self.pool.remove(id)?;
        self.statistics.add_departed(&worker);
        if worker.stage != WorkerStage::Leaving {
            self.targets.remove_present(worker.class);
        }
        Some(worker)
    }

    /// Removes a worker and tells it to end. Its tasks wait again.
    pub(crate) fn release(&mut self, now: Micros, id: WorkerId) {
        if let Some(worker) = self.remove_worker(now, id) {
            self.end_attempts(now, &worker, LossReason::Released);
            self.outputs.push_back(Output::ReleaseWorker { worker: id });
        }
    }

    /// Gives a worker no further task, and releases the worker when its tasks are finished.
    pub(crate) fn retire_worker(&mut self, now: Micros, id: WorkerId) {
        let Some(worker) = self.pool.get_mut(id) else {
            return;
        };
        if worker.stage == WorkerStage::Leaving {
            return;
        }
        worker.account(now);
        if worker.stage == WorkerStage::Starting {
            self.release(now, id);
            return;
        }
        worker.stage = WorkerStage::Leaving;
        let class = worker.class;
        self.targets.remove_present(class);
        self.index(id);
        self.finish_leaving(now, id);
    }

    /// Releases workers of classes that have more than their target number: idle ones first, then
    /// paused ones, then those that hold the fewest tasks.
    pub(crate) fn release_surplus(&mut self, now: Micros) {
        for (class, count) in self.targets.surplus() {
            for id in self.surplus_candidates(class, count as usize) {
                let is_paused = self
                    .pool
                    .get(id)
                    .is_some_and(|worker| !worker.is_computing());
                if is_paused {
                    self.release(now, id);
                } else {
                    self.retire_worker(now, id);
                }
            }
        }
    }

    fn surplus_candidates(&self, class: ClassId, count: usize) -> Vec<WorkerId> {
        let of_class =
            |worker: &&Worker| worker.class == class && worker.stage != WorkerStage::Leaving;
        let rank = |worker: &Worker| match (worker.stage, worker.is_computing()) {
            (WorkerStage::Starting, _) => 0,
            (_, true) if worker.held.is_empty() => 1,
            (_, false) => 2,
            (_, true) => 3,
        };
        let mut workers: Vec<&Worker> = self.pool.iter().filter(of_class).collect();
        workers.sort_by_key(|worker| (rank(worker), worker.held.len(), worker.id));
        workers
            .into_iter()
            .take(count)
            .map(|worker| worker.id)
            .collect()
    }

    pub(crate) fn pause_worker(&mut self, now: Micros, id: WorkerId, cause: PauseCause) {
        let Some(worker) = self.pool.get_mut(id) else {
            return;
        };
        worker.account(now);
        if worker.is_computing() {
            worker.condition = WorkerCondition::Paused { cause, since: now };
            self.statistics.counts.worker_pauses += 1;
            if self.settings.pause_policy == PausePolicy::Move {
                self.outputs.push_back(Output::MoveWorker { worker: id });
            }
        }
        // The check of the attempts applies the other policies.
        self.next_check = now;
        self.index(id);
    }

    pub(crate) fn resume_worker(&mut self, now: Micros, id: WorkerId) {
        let Some(worker) = self.pool.get_mut(id) else {
            return;
        };
        worker.account(now);
        if let WorkerCondition::Paused { since, .. } = worker.condition {
            worker.paused_since_first += now.saturating_sub(since.max(worker.first_since));
            worker.condition = WorkerCondition::Computing;
            worker.was_reassigned = false;
        }
        self.index(id);
        self.targets.end_delays(now);
    }
}
