//! Simulates a week of a thousand desktop machines and computes its statistics.

use crate::pool::{DAY, DesktopPool, HOUR, MeasuredTimes, PoolJob};
use serde::Serialize;
use std::fmt::Write;

const HOSTS: u16 = 1000;
const DAYS: f64 = 7.0;
/// Number of jobs that arrive in the week. Nearly all of them finish.
const JOB_COUNT: u32 = 600;
/// Interval between the arrivals of two jobs in hours.
const ARRIVAL_INTERVAL_H: f64 = 0.28;
const USERS: u32 = 5;
/// Number of processes per job.
const PROCESSES: u32 = 61;
/// Mean work of each process in hours.
const WORK_H: f64 = 2.0;

/// Returns the probability that the owner of a host is present at the time `now`; `None` if the
/// owner is always present.
///
/// 186 of 1,000 hosts always have an owner. About half of the others have no owner at a time, more
/// at night and on Sundays.
fn owner_presence(host: u16, now: f64) -> Option<f64> {
    if host > 814 {
        return None;
    }
    let (day, hour) = ((now / DAY) as u64 % 7, (now / HOUR) as u64 % 24);
    let weekend = day >= 5;
    Some(match (weekend, hour) {
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
pub(crate) struct Distribution {
    pub(crate) count: usize,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) most: f64,
    /// The percentiles 0 to 100.
    pub(crate) hundredths: Vec<f64>,
}

impl Distribution {
    pub(crate) fn of(mut values: Vec<f64>) -> Distribution {
        values.sort_by(f64::total_cmp);
        let last = values.len().saturating_sub(1);
        let at = |part: f64| {
            values
                .get((last as f64 * part) as usize)
                .copied()
                .unwrap_or(0.0)
        };
        let hundredths = (0..=100).map(|n| at(f64::from(n) / 100.0)).collect();
        Distribution {
            count: values.len(),
            median: at(0.5),
            p99: at(0.99),
            most: at(1.0),
            hundredths,
        }
    }
}

/// Results of the week.
#[derive(Debug, Serialize)]
pub(crate) struct WeekResults {
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Mean number of hosts without an owner.
    pub(crate) free_mean: f64,
    pub(crate) free_max: usize,
    pub(crate) jobs_ended: usize,
    pub(crate) jobs_waiting: usize,
    /// Time from an owner's login until no guest is left, for each host with guests.
    pub(crate) clean_s: Distribution,
    /// Time for which each guest ran after its host's owner had arrived. Drawn from measurements on
    /// real hosts, where guests stop without a decision of the resource manager.
    pub(crate) stall_s: Distribution,
    /// Time from an owner's first activity until the eviction of each guest.
    pub(crate) untold_s: Distribution,
    /// Number of guests at the end of the week that were not evicted although their host's owner
    /// was present.
    pub(crate) left_beside: usize,
    pub(crate) moves_owner: usize,
    pub(crate) moves_load: usize,
    pub(crate) moves_by_hour: Vec<usize>,
    /// Completed work in hours.
    pub(crate) work_h: f64,
    /// Total time for which tasks were paused by migrations, in hours.
    pub(crate) standing_h: f64,
    /// Total time for which tasks were paused because of owners before their migration began, in
    /// hours.
    pub(crate) stuck_h: f64,
    /// `standing_h` as a fraction of the completed work.
    pub(crate) lost: f64,
    /// Completed work as a fraction of the time for which hosts had no owner present, which is an
    /// upper bound.
    pub(crate) work: f64,
    /// (mean number of free hosts, mean number of running tasks) for each hour.
    pub(crate) by_hour: Vec<(f64, f64)>,
}

impl WeekResults {
    /// Simulates the week with this seed.
    pub(crate) fn simulate(seed: u64, times: MeasuredTimes) -> WeekResults {
        let job = |n: u32| {
            PoolJob::new(
                n % USERS,
                f64::from(n) * ARRIVAL_INTERVAL_H * HOUR,
                PROCESSES,
                WORK_H * HOUR,
            )
        };
        let mut pool = DesktopPool::new(
            HOSTS,
            seed,
            owner_presence,
            (0..JOB_COUNT).map(job).collect(),
            times,
        );
        pool.run(DAYS * DAY);
        let left_beside = pool.left_beside_owners();
        let seen = &mut pool.statistics;
        let hours = (DAYS * 24.0) as u64;
        WeekResults {
            hosts: HOSTS,
            seed,
            free_mean: seen.free_seconds / (DAYS * DAY),
            free_max: seen.free_max,
            jobs_ended: pool.jobs.iter().filter(|job| job.ended.is_some()).count(),
            jobs_waiting: pool.fair.queue_len(),
            clean_s: Distribution::of(std::mem::take(&mut seen.clear_times)),
            stall_s: Distribution::of(std::mem::take(&mut seen.runs_beside_owner)),
            untold_s: Distribution::of(std::mem::take(&mut seen.eviction_delays)),
            left_beside,
            moves_owner: seen.evictions,
            moves_load: seen.rebalances,
            moves_by_hour: (0..hours)
                .map(|hour| seen.moves_by_hour.get(&hour).copied().unwrap_or(0))
                .collect(),
            work_h: seen.work_seconds / HOUR,
            standing_h: seen.paused_seconds / HOUR,
            stuck_h: seen.stuck_seconds / HOUR,
            lost: seen.paused_seconds / seen.work_seconds,
            work: seen.work_seconds / seen.free_seconds,
            by_hour: (0..hours)
                .map(|hour| seen.by_hour.get(&hour).copied().unwrap_or_default())
                .collect(),
        }
    }

    /// Formats the results as text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |label: &str, said: String| {
            let _ = writeln!(text, "{label:34}{said}");
        };
        let ms = |s: f64| format!("{:.0} ms", s * 1e3);
        let spread = |s: &Distribution| {
            format!(
                "{} (median), {} (99 %), {} (worst), {} times",
                ms(s.median),
                ms(s.p99),
                ms(s.most),
                s.count
            )
        };
        let moves = (self.moves_owner + self.moves_load) as f64 / self.moves_by_hour.len() as f64;
        let busiest = self.moves_by_hour.iter().max().copied().unwrap_or(0);
        line(
            "free hosts",
            format!(
                "{:.0} on average, {} at most, of {}",
                self.free_mean, self.free_max, self.hosts
            ),
        );
        line(
            "jobs of 61 processes",
            format!("{} ended, {} wait", self.jobs_ended, self.jobs_waiting),
        );
        line("a guest runs on an owner's host for", spread(&self.stall_s));
        line("a guest is evicted after", spread(&self.untold_s));
        line("no guest is left after", spread(&self.clean_s));
        line("guests never evicted", self.left_beside.to_string());
        line(
            "moves",
            format!(
                "{} for owners, {} for the load",
                self.moves_owner, self.moves_load
            ),
        );
        line(
            "migrations per hour",
            format!("{moves:.0} on average, {busiest} in the worst"),
        );
        line(
            "work lost in migrations",
            format!(
                "{:.1} h of {:.0} h, {:.3} %",
                self.standing_h,
                self.work_h,
                100.0 * self.lost
            ),
        );
        line(
            "paused without a target host",
            format!("{:.1} h", self.stuck_h),
        );
        line(
            "work against an oracle's",
            format!("{:.1} % (all free hosts, all the time)", 100.0 * self.work),
        );
        text
    }
}
