//! Statistics of a run, as MW's paper defines them (section "Performance Evaluation").
//!
//! f is the factor of a worker, u the time that the worker was available, t the processor time of a
//! task, W the duration of the run.
//!
//! | quantity | formula |
//! | --- | --- |
//! | N, normalized time | Σ f t over all tasks |
//! | P, pool performance | Σ f u / W over all workers |
//! | A, average number of workers | Σ u / W |
//! | η, parallel efficiency | Σ t / Σ u |
//!
//! u counts from the end of the benchmark and excludes pauses. All sums continue over restarts of
//! the master.

use crate::pool::WorkerPool;
use crate::worker::{Worker, WorkerCondition, WorkerStage};
use crate::{Micros, RunCounts, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

const MICROS_PER_SECOND: f64 = 1e6;

/// Count, mean, variance, least and greatest value of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NumberSummary {
    pub count: u64,
    pub mean: f64,
    /// Sum of the squared differences from the mean.
    sum_of_squares: f64,
    pub min: f64,
    pub max: f64,
}

impl NumberSummary {
    /// Adds a value by Welford's method.
    pub fn add(&mut self, value: f64) {
        if self.count == 0 {
            (self.min, self.max) = (value, value);
        }
        self.count += 1;
        let difference = value - self.mean;
        self.mean += difference / self.count as f64;
        self.sum_of_squares += difference * (value - self.mean);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// Returns the variance of the values; 0 for fewer than two values.
    pub fn variance(&self) -> f64 {
        match self.count {
            0 | 1 => 0.0,
            count => self.sum_of_squares / (count - 1) as f64,
        }
    }
}

/// Times of a worker in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerTimes {
    /// Time since the worker was ready, without pauses (u).
    pub available: Micros,
    pub paused: Micros,
    /// Part of the available time in which the worker held a task.
    pub working: Micros,
    /// Processor time of the worker's accepted tasks.
    pub cpu: Micros,
    /// Time up to which the other fields count.
    counted_until: Micros,
}

impl Worker {
    /// Adds the time since the last call to the worker's times. Must be called before each change
    /// of the worker's stage, condition or tasks.
    pub(crate) fn account(&mut self, now: Micros) {
        let elapsed = now.saturating_sub(self.times.counted_until);
        self.times.counted_until = now;
        match (self.stage, self.condition) {
            (WorkerStage::Starting, _) => {}
            (_, WorkerCondition::Paused { .. }) => self.times.paused += elapsed,
            (_, WorkerCondition::Computing) => {
                self.times.available += elapsed;
                if !self.held.is_empty() {
                    self.times.working += elapsed;
                }
            }
        }
    }

    /// Returns the worker's times up to `now`.
    pub(crate) fn times_at(&self, now: Micros) -> WorkerTimes {
        let mut copy = Self::new(self.id, self.class, self.groups, self.host.clone(), now);
        copy.stage = self.stage;
        copy.condition = self.condition;
        if let Some(first) = self.held.first() {
            copy.held.push(*first);
        }
        copy.times = self.times;
        copy.account(now);
        copy.times
    }
}

/// Sums over the workers of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerTotals {
    pub available: Micros,
    pub paused: Micros,
    pub working: Micros,
    /// P times W in microseconds: Σ f u.
    weighted_available: f64,
    factor: NumberSummary,
    available_s: NumberSummary,
    working_s: NumberSummary,
    cpu_s: NumberSummary,
    paused_s: NumberSummary,
}

impl WorkerTotals {
    fn add(&mut self, factor: f64, times: WorkerTimes) {
        self.available += times.available;
        self.paused += times.paused;
        self.working += times.working;
        self.weighted_available += factor * times.available as f64;
        self.factor.add(factor);
        let summaries = [
            (&mut self.available_s, times.available),
            (&mut self.working_s, times.working),
            (&mut self.cpu_s, times.cpu),
            (&mut self.paused_s, times.paused),
        ];
        for (summary, time) in summaries {
            summary.add(time as f64 / MICROS_PER_SECOND);
        }
    }
}

/// Statistics of a run up to some moment. The shell stores this value from time to time, and passes
/// the newest one to the dispatcher of the next master.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStatistics {
    /// Duration of the run before the present master.
    wall_before: Micros,
    /// Time at which the present master started.
    #[serde(skip)]
    started_at: Micros,
    /// Workers that have left, and those of earlier masters.
    departed: WorkerTotals,
    /// T: processor time of all accepted tasks.
    cpu: Micros,
    /// Normalized time N in microseconds.
    weighted_cpu: f64,
    task_cpu_s: NumberSummary,
    task_wall_s: NumberSummary,
    /// Duration of the first benchmark, whose worker has the factor 1.
    pub(crate) reference_benchmark: Option<Micros>,
    pub counts: RunCounts,
}

impl RunStatistics {
    /// Marks the start of the present master.
    pub(crate) fn begin(&mut self, now: Micros) {
        self.started_at = now;
    }

    /// Duration of the run.
    pub(crate) fn wall(&self, now: Micros) -> Micros {
        self.wall_before + now.saturating_sub(self.started_at)
    }

    /// Counts an accepted task.
    pub(crate) fn add_task(&mut self, factor: f64, cpu: Micros, wall: Micros) {
        self.cpu += cpu;
        self.weighted_cpu += factor * cpu as f64;
        self.task_cpu_s.add(cpu as f64 / MICROS_PER_SECOND);
        self.task_wall_s.add(wall as f64 / MICROS_PER_SECOND);
        let counts = &mut self.counts;
        counts.results_accepted += 1;
        // The stored statistics of an earlier master may lack the attempt.
        counts.attempts = counts.attempts.max(counts.results_accepted);
    }

    /// Counts a task that an earlier master accepted after it had stored its last statistics.
    pub fn add_recovered_task(&mut self, factor: f64, cpu: Micros, wall: Micros) {
        self.add_task(factor, cpu, wall);
    }

    /// Counts a worker that has left.
    pub(crate) fn add_departed(&mut self, worker: &Worker) {
        if worker.stage != WorkerStage::Starting {
            self.departed.add(worker.factor, worker.times);
        }
    }

    /// Returns the factor of a worker with this duration of the benchmark.
    pub(crate) fn factor_of(&mut self, benchmark: Option<Micros>) -> f64 {
        let Some(benchmark) = benchmark else {
            return 1.0;
        };
        let reference = *self.reference_benchmark.get_or_insert(benchmark);
        reference.max(1) as f64 / benchmark.max(1) as f64
    }

    /// Returns the statistics with those of the present workers, for the next master.
    pub(crate) fn up_to(&self, now: Micros, pool: &WorkerPool) -> Self {
        Self {
            wall_before: self.wall(now),
            departed: self.totals(now, pool),
            ..self.clone()
        }
    }

    fn totals(&self, now: Micros, pool: &WorkerPool) -> WorkerTotals {
        let mut totals = self.departed;
        for worker in pool.iter().filter(|w| w.stage != WorkerStage::Starting) {
            totals.add(worker.factor, worker.times_at(now));
        }
        totals
    }

    /// Mean duration of an accepted task in seconds and its standard deviation; `None` before the
    /// first task.
    pub(crate) fn task_duration(&self) -> Option<(f64, f64)> {
        let summary = &self.task_wall_s;
        (summary.count > 0).then(|| (summary.mean, summary.variance().sqrt()))
    }

    pub(crate) fn report(&self, now: Micros, pool: &WorkerPool) -> StatisticsReport {
        let totals = self.totals(now, pool);
        let wall = self.wall(now) as f64;
        let seconds = |micros: f64| micros / MICROS_PER_SECOND;
        let ratio = |value: f64, by: f64| (by > 0.0).then(|| value / by);
        let available = totals.available as f64;
        let worker_report = |worker: &Worker| WorkerReport {
            worker: worker.id,
            host: worker.host.clone(),
            factor: worker.factor,
            tasks: worker.tasks_finished,
            times: worker.times_at(now),
            task_cpu_s: worker.task_cpu,
        };
        StatisticsReport {
            wall_s: seconds(wall),
            cpu_s: seconds(self.cpu as f64),
            normalized_s: seconds(self.weighted_cpu),
            pool_performance: ratio(totals.weighted_available, wall),
            average_workers: ratio(available, wall),
            average_workers_with_paused: ratio(available + totals.paused as f64, wall),
            efficiency: ratio(self.cpu as f64, available),
            normalized_per_wall: ratio(self.weighted_cpu, wall),
            working_share: ratio(totals.working as f64, available),
            factor: totals.factor,
            available_s: totals.available_s,
            working_s: totals.working_s,
            worker_cpu_s: totals.cpu_s,
            paused_s: totals.paused_s,
            task_cpu_s: self.task_cpu_s,
            counts: self.counts,
            workers: pool.iter().map(worker_report).collect(),
        }
    }
}

/// Statistics of a run for its users. Times are in seconds; a quotient is `None` if its divisor is
/// 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatisticsReport {
    /// W, the duration of the run.
    pub wall_s: f64,
    /// T, the processor time of all accepted tasks.
    pub cpu_s: f64,
    /// N, the processor time weighted with the factors.
    pub normalized_s: f64,
    /// P, the sum of the factors of an average moment.
    pub pool_performance: Option<f64>,
    /// A, the average number of workers.
    pub average_workers: Option<f64>,
    /// As A, but with the time of pauses.
    pub average_workers_with_paused: Option<f64>,
    /// η, the share of the available time that tasks have used.
    pub efficiency: Option<f64>,
    /// N / W, which MW's later releases print as the pool performance.
    pub normalized_per_wall: Option<f64>,
    /// Share of the available time in which workers held a task.
    pub working_share: Option<f64>,
    pub factor: NumberSummary,
    pub available_s: NumberSummary,
    pub working_s: NumberSummary,
    pub worker_cpu_s: NumberSummary,
    pub paused_s: NumberSummary,
    pub task_cpu_s: NumberSummary,
    pub counts: RunCounts,
    /// One entry for each present worker.
    pub workers: Vec<WorkerReport>,
}

impl fmt::Display for StatisticsReport {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let number = |value: Option<f64>| match value {
            Some(value) => format!("{value:.2}"),
            None => "-".to_string(),
        };
        writeln!(
            f,
            "W {:.1} s, T {:.1} s, N {:.1} s, P {}, A {}, efficiency {}, N/W {}",
            self.wall_s,
            self.cpu_s,
            self.normalized_s,
            number(self.pool_performance),
            number(self.average_workers),
            number(self.efficiency),
            number(self.normalized_per_wall),
        )?;
        let counts = &self.counts;
        write!(
            f,
            "{} tasks in {} attempts; {} workers lost, {} migrations, {} pauses; {} results \
             discarded",
            counts.results_accepted,
            counts.attempts,
            counts.workers_lost,
            counts.worker_migrations,
            counts.worker_pauses,
            counts.results_discarded,
        )
    }
}

/// Statistics of one present worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    pub worker: WorkerId,
    pub host: Arc<str>,
    pub factor: f64,
    pub tasks: u64,
    pub times: WorkerTimes,
    pub task_cpu_s: NumberSummary,
}
