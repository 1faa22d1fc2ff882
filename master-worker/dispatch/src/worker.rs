//! State of one worker.

use crate::held::HeldTasks;
use crate::statistics::{NumberSummary, WorkerTimes};
use crate::{ClassId, Groups, Micros, PauseCause, TaskId, WorkerId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Weight of a new duration in the moving average.
const AVERAGE_WEIGHT: f64 = 0.125;
/// Number of tasks after which a worker's own average replaces the average of all workers.
const OWN_AVERAGE_TASKS_MIN: u64 = 4;

/// Progress of a worker from its start to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerStage {
    /// The worker has no init data yet, or executes the benchmark.
    Starting,
    Ready,
    /// The worker gets no further task and is released when its tasks are finished.
    Leaving,
}

/// Whether a worker computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerCondition {
    Computing,
    Paused { cause: PauseCause, since: Micros },
}

/// Moving average of durations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MovingAverage {
    count: u64,
    mean: f64,
}

impl MovingAverage {
    pub(crate) fn add(&mut self, value: f64) {
        self.count += 1;
        let weight = AVERAGE_WEIGHT.max(1.0 / self.count as f64);
        self.mean += (value - self.mean) * weight;
    }

    pub(crate) fn mean(self) -> Option<f64> {
        (self.count > 0).then_some(self.mean)
    }
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) class: ClassId,
    pub(crate) groups: Groups,
    pub(crate) host: Arc<str>,
    pub(crate) stage: WorkerStage,
    pub(crate) condition: WorkerCondition,
    pub(crate) held: HeldTasks,
    /// Time since which the first held task may be executing.
    pub(crate) first_since: Micros,
    /// Time that the worker was paused since `first_since`.
    pub(crate) paused_since_first: Micros,
    /// The worker was asked to return tasks and has not answered.
    pub(crate) is_recalling: bool,
    /// The tasks of a paused worker wait again.
    pub(crate) was_reassigned: bool,
    /// Speed relative to the worker that executed the benchmark first; 1 without a benchmark.
    pub(crate) factor: f64,
    /// Duration of the worker's tasks.
    pub(crate) durations: MovingAverage,
    pub(crate) tasks_finished: u64,
    pub(crate) times: WorkerTimes,
    pub(crate) task_cpu: NumberSummary,
}

impl Worker {
    pub(crate) fn new(
        id: WorkerId,
        class: ClassId,
        groups: Groups,
        host: Arc<str>,
        now: Micros,
    ) -> Self {
        Self {
            id,
            class,
            groups,
            host,
            stage: WorkerStage::Starting,
            condition: WorkerCondition::Computing,
            held: HeldTasks::default(),
            first_since: now,
            paused_since_first: 0,
            is_recalling: false,
            was_reassigned: false,
            factor: 1.0,
            durations: MovingAverage::default(),
            tasks_finished: 0,
            times: WorkerTimes::default(),
            task_cpu: NumberSummary::default(),
        }
    }

    pub(crate) fn is_computing(&self) -> bool {
        matches!(self.condition, WorkerCondition::Computing)
    }

    /// True if the worker may get tasks.
    pub(crate) fn accepts_tasks(&self) -> bool {
        self.stage == WorkerStage::Ready && self.is_computing()
    }

    /// Number of held tasks that are not abandoned.
    pub(crate) fn live_task_count(&self) -> usize {
        self.held.iter().filter(|held| !held.is_abandoned).count()
    }

    /// Time for which the first held task has been executing, without pauses.
    pub(crate) fn first_age(&self, now: Micros) -> Micros {
        let current_pause = match self.condition {
            WorkerCondition::Computing => 0,
            WorkerCondition::Paused { since, .. } => {
                now.saturating_sub(since.max(self.first_since))
            }
        };
        now.saturating_sub(self.first_since)
            .saturating_sub(self.paused_since_first + current_pause)
    }

    /// Marks the time at which the first held task may begin.
    pub(crate) fn restart_first(&mut self, now: Micros) {
        self.first_since = now;
        self.paused_since_first = 0;
    }

    /// Returns the expected duration of a task in microseconds. `overall` is the average of all
    /// workers. `None` if no duration is known.
    pub(crate) fn expected_duration(&self, overall: Option<f64>) -> Option<f64> {
        if self.tasks_finished >= OWN_AVERAGE_TASKS_MIN {
            self.durations.mean()
        } else {
            overall.map(|mean| mean / self.factor)
        }
    }
}

/// What is known about a worker, for listings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerView {
    pub worker: WorkerId,
    pub class: ClassId,
    pub host: Arc<str>,
    pub stage: WorkerStage,
    pub condition: WorkerCondition,
    pub factor: f64,
    pub held_tasks: usize,
    /// The task that is being executed.
    pub current_task: Option<TaskId>,
    /// Time for which the task has been executing, without pauses.
    pub current_age: Micros,
    pub tasks_finished: u64,
    /// Times up to now.
    pub times: WorkerTimes,
}
