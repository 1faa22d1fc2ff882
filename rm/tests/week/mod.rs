//! Simulates a week of a thousand desktop machines and computes its statistics.

use crate::desktop_pool::{DAY_S, DesktopPool, HOUR_S, MeasuredTimes, PoolJob};
use serde::Serialize;
use std::fmt::Write;

const HOST_COUNT: u16 = 1000;
const DAY_COUNT: f64 = 7.0;
/// Number of jobs that arrive in the week. Nearly all of them finish.
const JOB_COUNT: u32 = 600;
/// Interval between the arrivals of two jobs in hours.
const ARRIVAL_INTERVAL_H: f64 = 0.28;
const USER_COUNT: u32 = 5;
/// Number of processes per job.
const PROCESS_COUNT: u32 = 61;
/// Mean work of each process in hours.
const WORK_H: f64 = 2.0;

/// Returns the probability that the owner of a host is present at the time `now_s` (in seconds
/// since Monday, 0:00). `None`: the owner is always present.
///
/// 186 of 1,000 hosts always have an owner. About half of the remaining hosts have no owner at a
/// time, more at night and on Sundays.
fn owner_presence(host: u16, now_s: f64) -> Option<f64> {
    if host > 814 {
        return None;
    }
    let (day, hour) = ((now_s / DAY_S) as u64 % 7, (now_s / HOUR_S) as u64 % 24);
    let is_weekend = day >= 5;
    Some(match (is_weekend, hour) {
        (false, 8..=18) => 0.82,
        (false, 19..) => 0.55,
        (false, _) => 0.27,
        (true, 10..=19) => 0.50,
        (true, 4..=6) if day == 6 => 0.01,
        (true, _) => 0.17,
    })
}

/// Distribution of durations in seconds.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DurationDistribution {
    pub(crate) count: usize,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) most: f64,
    /// The percentiles 0 to 100, one per entry.
    pub(crate) hundredths: Vec<f64>,
}

impl DurationDistribution {
    pub(crate) fn from_values(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let last_index = values.len().saturating_sub(1);
        let quantile = |fraction: f64| {
            values
                .get((last_index as f64 * fraction) as usize)
                .copied()
                .unwrap_or(0.0)
        };
        let hundredths = (0..=100).map(|n| quantile(f64::from(n) / 100.0)).collect();
        Self {
            count: values.len(),
            median: quantile(0.5),
            p99: quantile(0.99),
            most: quantile(1.0),
            hundredths,
        }
    }
}

/// Statistics of the simulated week: free hosts, jobs, evictions, rebalancing and completed work.
#[derive(Debug, Serialize)]
pub(crate) struct WeekResults {
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Mean number of hosts without a present owner.
    pub(crate) free_mean: f64,
    pub(crate) free_max: usize,
    pub(crate) jobs_ended: usize,
    pub(crate) jobs_waiting: usize,
    /// Time from an owner's first activity until no guest is left on the host, for each host with
    /// guests.
    pub(crate) clean_s: DurationDistribution,
    /// Time for which each guest ran after the owner of its host had arrived. The values are drawn
    /// from measurements on real hosts, where guests stop without a decision of the resource
    /// manager.
    pub(crate) stall_s: DurationDistribution,
    /// Time from an owner's first activity until the eviction of each guest.
    pub(crate) untold_s: DurationDistribution,
    /// Number of guests that at the end of the week are on a host with a present owner and are not
    /// migrating.
    pub(crate) left_beside: usize,
    pub(crate) moves_owner: usize,
    pub(crate) moves_load: usize,
    pub(crate) moves_by_hour: Vec<usize>,
    /// Completed work in hours.
    pub(crate) work_h: f64,
    /// Total time for which migrations paused tasks, in hours.
    pub(crate) standing_h: f64,
    /// Total time from owners' arrivals until the migrations of their guests began, in hours. The
    /// guests are paused in this time.
    pub(crate) stuck_h: f64,
    /// `standing_h` as a fraction of the completed work.
    pub(crate) lost: f64,
    /// Completed work as a fraction of the total time for which hosts had no owner present. This
    /// time is an upper bound of the work.
    pub(crate) work: f64,
    /// (mean number of free hosts, mean number of running tasks) for each hour.
    pub(crate) by_hour: Vec<(f64, f64)>,
}

impl WeekResults {
    /// Simulates the week with this seed, and with durations drawn from `times`.
    pub(crate) fn simulate(seed: u64, times: MeasuredTimes) -> Self {
        let job = |n: u32| {
            PoolJob::new(
                n % USER_COUNT,
                f64::from(n) * ARRIVAL_INTERVAL_H * HOUR_S,
                PROCESS_COUNT,
                WORK_H * HOUR_S,
            )
        };
        let mut pool = DesktopPool::new(
            HOST_COUNT,
            seed,
            owner_presence,
            (0..JOB_COUNT).map(job).collect(),
            times,
        );
        pool.run(DAY_COUNT * DAY_S);
        let left_beside = pool.count_tasks_beside_owners();
        let statistics = &mut pool.statistics;
        let hour_count = (DAY_COUNT * 24.0) as u64;
        Self {
            hosts: HOST_COUNT,
            seed,
            free_mean: statistics.free_seconds / (DAY_COUNT * DAY_S),
            free_max: statistics.free_hosts_max,
            jobs_ended: pool
                .jobs
                .iter()
                .filter(|job| job.ended_at_s.is_some())
                .count(),
            jobs_waiting: pool.fair_share.queue_len(),
            clean_s: DurationDistribution::from_values(std::mem::take(
                &mut statistics.clear_times_s,
            )),
            stall_s: DurationDistribution::from_values(std::mem::take(
                &mut statistics.runs_beside_owner_s,
            )),
            untold_s: DurationDistribution::from_values(std::mem::take(
                &mut statistics.eviction_delays_s,
            )),
            left_beside,
            moves_owner: statistics.eviction_count,
            moves_load: statistics.rebalance_count,
            moves_by_hour: (0..hour_count)
                .map(|hour| {
                    statistics
                        .migrations_by_hour
                        .get(&hour)
                        .copied()
                        .unwrap_or(0)
                })
                .collect(),
            work_h: statistics.work_seconds / HOUR_S,
            standing_h: statistics.paused_seconds / HOUR_S,
            stuck_h: statistics.stuck_seconds / HOUR_S,
            lost: statistics.paused_seconds / statistics.work_seconds,
            work: statistics.work_seconds / statistics.free_seconds,
            by_hour: (0..hour_count)
                .map(|hour| {
                    statistics
                        .means_by_hour
                        .get(&hour)
                        .copied()
                        .unwrap_or_default()
                })
                .collect(),
        }
    }

    /// Returns the results as text, one labelled line for each result.
    pub(crate) fn format_text(&self) -> String {
        let mut text = String::new();
        let mut write_line = |label: &str, content: String| {
            let _ = writeln!(text, "{label:34}{content}");
        };
        let format_ms = |s: f64| format!("{:.0} ms", s * 1e3);
        let format_distribution = |s: &DurationDistribution| {
            format!(
                "{} (median), {} (99 %), {} (worst), {} times",
                format_ms(s.median),
                format_ms(s.p99),
                format_ms(s.most),
                s.count
            )
        };
        let moves_per_hour =
            (self.moves_owner + self.moves_load) as f64 / self.moves_by_hour.len() as f64;
        let busiest_hour_count = self.moves_by_hour.iter().max().copied().unwrap_or(0);
        write_line(
            "free hosts",
            format!(
                "{:.0} on average, {} at most, of {}",
                self.free_mean, self.free_max, self.hosts
            ),
        );
        write_line(
            "jobs of 61 processes",
            format!("{} ended, {} wait", self.jobs_ended, self.jobs_waiting),
        );
        write_line(
            "a guest runs on an owner's host for",
            format_distribution(&self.stall_s),
        );
        write_line(
            "a guest is evicted after",
            format_distribution(&self.untold_s),
        );
        write_line("no guest is left after", format_distribution(&self.clean_s));
        write_line("guests never evicted", self.left_beside.to_string());
        write_line(
            "moves",
            format!(
                "{} for owners, {} for the load",
                self.moves_owner, self.moves_load
            ),
        );
        write_line(
            "migrations per hour",
            format!("{moves_per_hour:.0} on average, {busiest_hour_count} in the worst"),
        );
        write_line(
            "work lost in migrations",
            format!(
                "{:.1} h of {:.0} h, {:.3} %",
                self.standing_h,
                self.work_h,
                100.0 * self.lost
            ),
        );
        write_line(
            "paused without a target host",
            format!("{:.1} h", self.stuck_h),
        );
        write_line(
            "work against an oracle's",
            format!("{:.1} % (all free hosts, all the time)", 100.0 * self.work),
        );
        text
    }
}
