//! What an application decides about a run, and the limits of a run.

use crate::Micros;
use serde::{Deserialize, Serialize};

/// What happens to the tasks of a worker that an owner pauses (MW: suspension policies).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PausePolicy {
    /// The worker keeps its tasks until the worker is resumed.
    Keep,
    /// The shell migrates the worker; its tasks stay with the worker.
    Move,
    /// The tasks wait again when the pause has lasted this time.
    Reassign { after: Micros },
    /// Another worker gets a second copy of a task as soon as a worker would be idle otherwise.
    #[default]
    Duplicate,
}

/// Which idle worker gets the next task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerOrder {
    /// In the order of their numbers.
    ById,
    /// Fastest first: by the factor of the benchmark.
    #[default]
    ByFactor,
}

/// When a task is tried again after an attempt that counts against the task, and when the task is
/// quarantined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// Number of counted attempts after which a task is quarantined; at least 1.
    pub attempts_max: u32,
    /// Delay after the first counted attempt; the delay doubles with each further one.
    pub delay: Micros,
    pub delay_max: Micros,
    /// Time for which the task does not return to the host of its last counted attempt, if there
    /// are workers on other hosts.
    pub host_exclusion: Micros,
}

/// Limits of a run. An event that would exceed a limit is refused as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Open tasks: those that wait, run or are delayed.
    pub tasks: usize,
    pub workers: usize,
    /// Different sets of groups among the open tasks. Each costs a little time per dispatch.
    pub group_sets: usize,
    /// Attempts in the history of a task; older ones are forgotten.
    pub history: usize,
    /// Quarantined tasks. When the limit is reached, the run ends with a failure: a program that
    /// kills many workers is wrong.
    pub quarantined: usize,
    /// Tasks that a worker may hold.
    pub tasks_per_worker: usize,
    /// Workers of one class whose start was requested and that have not reported.
    pub starting_workers: u32,
}

/// What an application decides about a run. Settings may be changed at any time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    pub pause_policy: PausePolicy,
    pub worker_order: WorkerOrder,
    pub retry: RetryPolicy,
    /// Time that the tasks which a worker holds should last. A worker holds at least one task ahead
    /// if tasks last less than 50 times this time. 0 disables look-ahead: a worker holds one task.
    pub look_ahead: Micros,
    /// Tasks of at least this mean duration are reported one by one; shorter ones together.
    pub report_interval: Micros,
    /// A task whose attempt lasts longer than this waits again, and the attempt counts against the
    /// task. `None`: no limit.
    pub attempt_timeout: Option<Micros>,
    /// Whether idle workers get second copies of tasks that take long (stragglers), when no task
    /// waits.
    pub second_copies: bool,
    /// A task is a straggler when its attempt has lasted this many times the mean.
    pub straggler_ratio: f64,
    /// Minimum duration of a straggler's attempt.
    pub straggler_age_min: Micros,
    /// Whether workers execute a benchmark task first, whose duration is their factor.
    pub has_benchmark: bool,
    /// Number of workers that are requested at once for one class.
    pub request_step: u32,
    /// Delay after a request for workers that failed; doubles up to `request_delay_max`. A new host
    /// ends the delay.
    pub request_delay: Micros,
    pub request_delay_max: Micros,
    pub limits: Limits,
}

const SECOND: Micros = 1_000_000;

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts_max: 5,
            delay: SECOND,
            delay_max: 60 * SECOND,
            host_exclusion: 60 * SECOND,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            tasks: 20_000_000,
            workers: 10_000,
            group_sets: 64,
            history: 16,
            quarantined: 10_000,
            tasks_per_worker: 512,
            starting_workers: 12,
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            pause_policy: PausePolicy::default(),
            worker_order: WorkerOrder::default(),
            retry: RetryPolicy::default(),
            look_ahead: 20_000,
            report_interval: 5_000,
            attempt_timeout: None,
            second_copies: true,
            straggler_ratio: 3.0,
            straggler_age_min: SECOND,
            has_benchmark: false,
            request_step: 6,
            request_delay: SECOND,
            request_delay_max: 60 * SECOND,
            limits: Limits::default(),
        }
    }
}
