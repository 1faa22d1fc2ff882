//! Conversion of settings, statistics and other plain values from and to the structures of the
//! interface.

use crate::abi;
use crate::errors::{CallError, CallResult};
use master_worker::dispatch::Limits;
use master_worker::{
    PausePolicy, Progress, RetryPolicy, RunOutcome, Settings, StatisticsReport, WorkerOrder,
};
use std::time::Duration;

const PAUSE_KEEP: i32 = 0;
const PAUSE_MOVE: i32 = 1;
const PAUSE_REASSIGN: i32 = 2;
const PAUSE_DUPLICATE: i32 = 3;
const ORDER_BY_ID: i32 = 0;
const ORDER_BY_FACTOR: i32 = 1;

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

/// Returns a time in microseconds.
fn micros(name: &str, seconds: f64) -> CallResult<u64> {
    let duration = Duration::try_from_secs_f64(seconds)
        .map_err(|_| CallError::argument(format!("{name}: {seconds} is not a time in seconds")))?;
    Ok(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

/// Returns a duration; `default` for 0.
pub(crate) fn duration_or(
    name: &str,
    seconds: f64,
    default: Option<Duration>,
) -> CallResult<Option<Duration>> {
    match micros(name, seconds)? {
        0 => Ok(default),
        micros => Ok(Some(Duration::from_micros(micros))),
    }
}

/// Returns both time limits of a grain in microseconds; `None` if both are 0.
pub(crate) fn grain(shortest_s: f64, longest_s: f64) -> CallResult<Option<master_worker::Grain>> {
    let shortest = micros("shortest_s", shortest_s)?;
    let longest = micros("longest_s", longest_s)?;
    let grain = master_worker::Grain { shortest, longest };
    Ok((shortest > 0 || longest > 0).then_some(grain))
}

fn saturated(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl abi::Settings {
    pub(crate) fn new(settings: &Settings) -> Self {
        let (pause_policy, reassign_after) = match settings.pause_policy {
            PausePolicy::Keep => (PAUSE_KEEP, 0),
            PausePolicy::Move => (PAUSE_MOVE, 0),
            PausePolicy::Reassign { after } => (PAUSE_REASSIGN, after),
            PausePolicy::Duplicate => (PAUSE_DUPLICATE, 0),
        };
        let (retry, limits) = (settings.retry, settings.limits);
        Self {
            size: size_of::<Self>(),
            pause_policy,
            worker_order: match settings.worker_order {
                WorkerOrder::ById => ORDER_BY_ID,
                WorkerOrder::ByFactor => ORDER_BY_FACTOR,
            },
            reassign_after_s: seconds(reassign_after),
            attempts_max: retry.attempts_max,
            second_copies: settings.second_copies.into(),
            retry_delay_s: seconds(retry.delay),
            retry_delay_max_s: seconds(retry.delay_max),
            host_exclusion_s: seconds(retry.host_exclusion),
            look_ahead_s: seconds(settings.look_ahead),
            report_interval_s: seconds(settings.report_interval),
            attempt_timeout_s: seconds(settings.attempt_timeout.unwrap_or(0)),
            straggler_ratio: settings.straggler_ratio,
            straggler_age_min_s: seconds(settings.straggler_age_min),
            request_step: settings.request_step,
            starting_workers_max: limits.starting_workers,
            request_delay_s: seconds(settings.request_delay),
            request_delay_max_s: seconds(settings.request_delay_max),
            tasks_max: limits.tasks as u64,
            workers_max: limits.workers as u64,
            group_sets_max: limits.group_sets as u64,
            history_max: limits.history as u64,
            quarantined_max: limits.quarantined as u64,
            tasks_per_worker_max: limits.tasks_per_worker as u64,
        }
    }

    /// Returns these settings. `has_benchmark` follows from the driver, so that field is the one of
    /// `base`.
    ///
    /// # Errors
    /// A field has no meaning.
    pub(crate) fn to_settings(self, base: &Settings) -> CallResult<Settings> {
        let timeout = micros("attempt_timeout_s", self.attempt_timeout_s)?;
        if self.attempts_max == 0 {
            return Err(CallError::argument("attempts_max must be at least 1"));
        }
        if self.straggler_ratio.is_nan() {
            return Err(CallError::argument("straggler_ratio is not a number"));
        }
        Ok(Settings {
            pause_policy: self.to_pause_policy()?,
            worker_order: match self.worker_order {
                ORDER_BY_ID => WorkerOrder::ById,
                ORDER_BY_FACTOR => WorkerOrder::ByFactor,
                other => {
                    let text = format!("worker_order: {other} is not an order of workers");
                    return Err(CallError::argument(text));
                }
            },
            retry: RetryPolicy {
                attempts_max: self.attempts_max,
                delay: micros("retry_delay_s", self.retry_delay_s)?,
                delay_max: micros("retry_delay_max_s", self.retry_delay_max_s)?,
                host_exclusion: micros("host_exclusion_s", self.host_exclusion_s)?,
            },
            look_ahead: micros("look_ahead_s", self.look_ahead_s)?,
            report_interval: micros("report_interval_s", self.report_interval_s)?,
            attempt_timeout: (timeout > 0).then_some(timeout),
            second_copies: self.second_copies != 0,
            straggler_ratio: self.straggler_ratio,
            straggler_age_min: micros("straggler_age_min_s", self.straggler_age_min_s)?,
            has_benchmark: base.has_benchmark,
            request_step: self.request_step,
            request_delay: micros("request_delay_s", self.request_delay_s)?,
            request_delay_max: micros("request_delay_max_s", self.request_delay_max_s)?,
            limits: Limits {
                tasks: saturated(self.tasks_max),
                workers: saturated(self.workers_max),
                group_sets: saturated(self.group_sets_max),
                history: saturated(self.history_max),
                quarantined: saturated(self.quarantined_max),
                tasks_per_worker: saturated(self.tasks_per_worker_max),
                starting_workers: self.starting_workers_max,
            },
        })
    }

    fn to_pause_policy(self) -> CallResult<PausePolicy> {
        match self.pause_policy {
            PAUSE_KEEP => Ok(PausePolicy::Keep),
            PAUSE_MOVE => Ok(PausePolicy::Move),
            PAUSE_REASSIGN => Ok(PausePolicy::Reassign {
                after: micros("reassign_after_s", self.reassign_after_s)?,
            }),
            PAUSE_DUPLICATE => Ok(PausePolicy::Duplicate),
            other => {
                let text = format!("pause_policy: {other} is not a policy");
                Err(CallError::argument(text))
            }
        }
    }
}

impl abi::Progress {
    pub(crate) fn new(progress: &Progress) -> Self {
        Self {
            size: size_of::<Self>(),
            finished: progress.finished,
            running: progress.running as u64,
            waiting: progress.waiting as u64,
            delayed: progress.delayed as u64,
            quarantined: progress.quarantined as u64,
            workers: progress.workers as u64,
            computing_workers: progress.computing_workers as u64,
            remaining_s: progress.remaining_s.unwrap_or(f64::NAN),
            spread_s: progress.spread_s.unwrap_or(f64::NAN),
        }
    }
}

impl abi::Statistics {
    pub(crate) fn new(report: &StatisticsReport) -> Self {
        let counts = report.counts;
        let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
        Self {
            size: size_of::<Self>(),
            wall_s: report.wall_s,
            cpu_s: report.cpu_s,
            normalized_s: report.normalized_s,
            pool_performance: or_nan(report.pool_performance),
            average_workers: or_nan(report.average_workers),
            average_workers_with_paused: or_nan(report.average_workers_with_paused),
            efficiency: or_nan(report.efficiency),
            normalized_per_wall: or_nan(report.normalized_per_wall),
            working_share: or_nan(report.working_share),
            factor_mean: report.factor.mean,
            factor_min: report.factor.min,
            factor_max: report.factor.max,
            task_cpu_mean_s: report.task_cpu_s.mean,
            task_cpu_min_s: report.task_cpu_s.min,
            task_cpu_max_s: report.task_cpu_s.max,
            tasks_added: counts.tasks_added,
            results_accepted: counts.results_accepted,
            results_discarded: counts.results_discarded,
            attempts: counts.attempts,
            attempts_lost: counts.attempts_lost,
            attempts_failed: counts.attempts_failed,
            tasks_pruned: counts.tasks_pruned,
            tasks_quarantined: counts.tasks_quarantined,
            second_copies: counts.second_copies,
            tasks_recalled: counts.tasks_recalled,
            workers_started: counts.workers_started,
            workers_lost: counts.workers_lost,
            worker_migrations: counts.worker_migrations,
            worker_pauses: counts.worker_pauses,
        }
    }
}

impl abi::Outcome {
    pub(crate) fn new(outcome: &RunOutcome) -> Self {
        Self {
            size: size_of::<Self>(),
            is_finished: outcome.is_finished.into(),
            generation: outcome.generation,
            repeated_results: outcome.repeated_results as u64,
            statistics: abi::Statistics::new(&outcome.statistics),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_the_round_trip() {
        let policies = [
            PausePolicy::Keep,
            PausePolicy::Move,
            PausePolicy::Reassign { after: 2_500_000 },
            PausePolicy::Duplicate,
        ];
        for pause_policy in policies {
            let settings = Settings {
                pause_policy,
                worker_order: WorkerOrder::ById,
                attempt_timeout: Some(7_000_000),
                second_copies: false,
                has_benchmark: true,
                ..Settings::default()
            };
            let converted = abi::Settings::new(&settings).to_settings(&settings);
            assert_eq!(converted.expect("settings"), settings);
        }
    }

    #[test]
    fn fields_without_meaning_are_refused() {
        let valid = abi::Settings::new(&Settings::default());
        let invalid = [
            abi::Settings {
                pause_policy: 4,
                ..valid
            },
            abi::Settings {
                worker_order: -1,
                ..valid
            },
            abi::Settings {
                attempts_max: 0,
                ..valid
            },
            abi::Settings {
                look_ahead_s: -1.0,
                ..valid
            },
            abi::Settings {
                retry_delay_s: f64::NAN,
                ..valid
            },
            abi::Settings {
                straggler_ratio: f64::NAN,
                ..valid
            },
        ];
        for settings in invalid {
            assert!(
                settings.to_settings(&Settings::default()).is_err(),
                "{settings:?}"
            );
        }
    }
}
