//! What happens to the results of attempts: the first result of a task counts, all others are
//! discarded and counted.

use crate::dispatcher::Dispatcher;
use crate::held::HeldAttempt;
use crate::losses::AttemptEnd;
use crate::task_table::{Copies, RunningCopy, Stage};
use crate::worker::WorkerStage;
use crate::{
    AttemptId, AttemptOutcome, AttemptReport, LossReason, Micros, Output, TaskId, UncountedResult,
    WorkerId,
};

/// An attempt that was removed from a worker's list.
struct RemovedAttempt {
    held: HeldAttempt,
    /// Time at which the worker may have begun the attempt.
    started_at: Micros,
    /// Time that the worker was paused during the attempt.
    paused: Micros,
}

impl Dispatcher {
    /// Handles what a worker reports about an attempt. The worker may be one that was believed
    /// lost, and the attempt one of an earlier master.
    pub(crate) fn handle_report(&mut self, now: Micros, worker: WorkerId, report: AttemptReport) {
        let removed = self.remove_held(now, worker, report.task, report.attempt);
        match report.outcome {
            AttemptOutcome::Completed if self.tasks.open.contains_key(&report.task) => {
                self.accept(worker, report, removed.map_or(0, |removed| removed.paused));
            }
            AttemptOutcome::Completed => self.discard(worker, report),
            AttemptOutcome::Failed => {
                if let Some(removed) = removed.filter(|removed| !removed.held.is_abandoned) {
                    let end = AttemptEnd {
                        worker,
                        host: self.host_of(worker),
                        attempt: report.attempt,
                        started_at: removed.started_at,
                        reason: LossReason::Failed,
                        may_have_begun: true,
                        is_counted: true,
                        is_suspect: false,
                    };
                    self.end_attempt(now, report.task, end);
                } else {
                    self.discard(worker, report);
                }
            }
        }
        self.finish_leaving(now, worker);
    }

    fn accept(&mut self, worker: WorkerId, report: AttemptReport, paused: Micros) {
        self.close_task(report.task, Some(worker));
        let mut factor = 1.0;
        if let Some(state) = self.pool.get_mut(worker) {
            factor = state.factor;
            let wall = report.wall.saturating_sub(paused) as f64;
            state.durations.add(wall);
            state.tasks_finished += 1;
            state.times.cpu += report.cpu;
            state.task_cpu.add(report.cpu as f64 / 1e6);
            self.durations.add(wall * factor);
        }
        self.statistics.add_task(factor, report.cpu, report.wall);
        self.index(worker);
        self.outputs.push_back(Output::Accept {
            worker,
            task: report.task,
            attempt: report.attempt,
        });
    }

    fn discard(&mut self, worker: WorkerId, report: AttemptReport) {
        let why = if self.tasks.quarantined.contains_key(&report.task) {
            UncountedResult::Quarantined
        } else if self.tasks.was_added(report.task) {
            UncountedResult::TaskClosed
        } else {
            UncountedResult::UnknownTask
        };
        self.statistics.counts.results_discarded += 1;
        self.outputs.push_back(Output::Discard {
            worker,
            task: report.task,
            attempt: report.attempt,
            why,
        });
    }

    /// Closes a task: removes it from all lists, and has all its attempts canceled except that of
    /// the worker `except`.
    pub(crate) fn close_task(&mut self, id: TaskId, except: Option<WorkerId>) {
        let Some(task) = self.tasks.remove(id) else {
            return;
        };
        match task.stage {
            Stage::Waiting => {
                self.waiting.remove(task.groups, &task.place);
            }
            Stage::Delayed(at) => {
                self.delayed.remove(&(at, id));
            }
            Stage::Running(copies) => {
                self.running_keys.remove(&(task.place.key, id));
                for copy in copies.iter().filter(|copy| Some(copy.worker) != except) {
                    self.cancel_copy(id, copy);
                }
            }
        }
    }

    fn cancel_copy(&mut self, task: TaskId, copy: RunningCopy) {
        if let Some(worker) = self.pool.get_mut(copy.worker) {
            worker.held.abandon_closed(copy.attempt);
        }
        self.outputs.push_back(Output::Cancel {
            worker: copy.worker,
            task,
            attempt: copy.attempt,
        });
    }

    /// Removes an attempt from a worker's list. `None` if the worker does not hold the attempt.
    fn remove_held(
        &mut self,
        now: Micros,
        id: WorkerId,
        task: TaskId,
        attempt: AttemptId,
    ) -> Option<RemovedAttempt> {
        let worker = self.pool.get_mut(id)?;
        worker.account(now);
        let (position, held) = worker.held.remove(task, attempt)?;
        let mut removed = RemovedAttempt {
            held,
            started_at: now,
            paused: 0,
        };
        if position == 0 {
            removed.started_at = worker.first_since;
            removed.paused = worker.paused_since_first;
            worker.restart_first(now);
        }
        self.index(id);
        Some(removed)
    }

    /// Takes back tasks that a worker has not begun.
    pub(crate) fn take_back(
        &mut self,
        now: Micros,
        id: WorkerId,
        attempts: &[(TaskId, AttemptId)],
    ) {
        if let Some(worker) = self.pool.get_mut(id) {
            worker.is_recalling = false;
        }
        for (task, attempt) in attempts {
            let Some(removed) = self.remove_held(now, id, *task, *attempt) else {
                continue;
            };
            if removed.held.is_abandoned {
                continue;
            }
            self.statistics.counts.tasks_recalled += 1;
            if self.detach(*task, id) {
                self.make_waiting(*task);
            }
        }
        self.index(id);
        self.finish_leaving(now, id);
    }

    /// Removes the attempt of a worker from a running task. Returns true if no attempt is left, so
    /// that the caller must give the task another stage.
    pub(crate) fn detach(&mut self, id: TaskId, worker: WorkerId) -> bool {
        let Some(task) = self.tasks.open.get_mut(&id) else {
            return false;
        };
        let Stage::Running(copies) = task.stage else {
            return false;
        };
        if let Some(remaining) = copies.without(worker) {
            task.stage = Stage::Running(remaining);
            return false;
        }
        self.running_keys.remove(&(task.place.key, id));
        true
    }

    /// Adds the attempts that a worker of an earlier master holds.
    pub(crate) fn adopt_attempts(
        &mut self,
        now: Micros,
        id: WorkerId,
        attempts: &[(TaskId, AttemptId)],
    ) {
        for (task, attempt) in attempts {
            let copy = RunningCopy {
                worker: id,
                attempt: *attempt,
            };
            let is_abandoned = !self.adopt_copy(*task, copy);
            if is_abandoned {
                self.outputs.push_back(Output::Cancel {
                    worker: id,
                    task: *task,
                    attempt: *attempt,
                });
            }
            let is_suspect = self.tasks.is_suspect(*task);
            if let Some(worker) = self.pool.get_mut(id) {
                worker.account(now);
                worker.held.push(HeldAttempt {
                    task: *task,
                    attempt: *attempt,
                    report_each: true,
                    is_abandoned,
                    is_suspect,
                });
            }
        }
        self.index(id);
    }

    /// Adds an attempt to an open task. Returns false if the task is closed or has two attempts.
    fn adopt_copy(&mut self, id: TaskId, copy: RunningCopy) -> bool {
        let Some(task) = self.tasks.open.get_mut(&id) else {
            return false;
        };
        let copies = match task.stage {
            Stage::Waiting => {
                self.waiting.remove(task.groups, &task.place);
                Copies::One(copy)
            }
            Stage::Delayed(at) => {
                self.delayed.remove(&(at, id));
                Copies::One(copy)
            }
            Stage::Running(Copies::One(other)) if other.worker != copy.worker => {
                Copies::Two(other, copy)
            }
            Stage::Running(_) => return false,
        };
        task.stage = Stage::Running(copies);
        self.running_keys.insert((task.place.key, id));
        true
    }

    /// Releases a leaving worker that holds no task.
    pub(crate) fn finish_leaving(&mut self, now: Micros, id: WorkerId) {
        let is_done = |stage: WorkerStage, held: usize| stage == WorkerStage::Leaving && held == 0;
        let worker = self.pool.get(id);
        if worker.is_some_and(|worker| is_done(worker.stage, worker.held.len())) {
            self.release(now, id);
        }
    }
}
