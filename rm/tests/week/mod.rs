//! Simulates a week of a thousand desktops and summarizes it.

use crate::pool::{DAY, HOUR, Job, Pool, Times};
use serde::Serialize;
use std::fmt::Write;

const HOSTS: u16 = 1000;
const DAYS: f64 = 7.0;
/// Number of jobs in the week, nearly all of which finish, and hours between two arrivals.
const JOBS: u32 = 600;
const PAUSE_H: f64 = 0.28;
const USERS: u32 = 5;
/// Processes of a job, and hours of work of each.
const PROCESSES: u32 = 61;
const WORK_H: f64 = 2.0;

/// Returns the probability that the owner is present, or `None` if always.
///
/// 186 of 1,000 machines are never free. Of the others about half are, more at night and on
/// Sundays.
fn office(host: u16, now: f64) -> Option<f64> {
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
pub(crate) struct Spread {
    pub(crate) count: usize,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) most: f64,
    /// The percentiles 0 to 100.
    pub(crate) hundredths: Vec<f64>,
}

impl Spread {
    pub(crate) fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let last = values.len().saturating_sub(1);
        let at = |part: f64| {
            values
                .get((last as f64 * part) as usize)
                .copied()
                .unwrap_or(0.0)
        };
        let hundredths = (0..=100).map(|n| at(f64::from(n) / 100.0)).collect();
        Spread {
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
pub(crate) struct Week {
    pub(crate) hosts: u16,
    pub(crate) seed: u64,
    /// Mean number of hosts without an owner.
    pub(crate) free_mean: f64,
    pub(crate) free_max: usize,
    pub(crate) jobs_ended: usize,
    pub(crate) jobs_waiting: usize,
    /// From an owner's login until no guest is left, where there was one.
    pub(crate) clean_s: Spread,
    /// How long each guest ran next to an owner, as measured on real hosts: guests stop there
    /// without a decision of the resource manager.
    pub(crate) stall_s: Spread,
    /// From an owner's first activity until each guest was evicted.
    pub(crate) untold_s: Spread,
    /// Guests next to an owner at the end of the week that were not evicted.
    pub(crate) left_beside: usize,
    pub(crate) moves_owner: usize,
    pub(crate) moves_load: usize,
    pub(crate) moves_by_hour: Vec<usize>,
    /// Hours of completed work.
    pub(crate) work_h: f64,
    /// Hours in which tasks were paused by migrations, and next to owners before their migrations.
    pub(crate) standing_h: f64,
    pub(crate) stuck_h: f64,
    /// `standing_h` as a fraction of the work.
    pub(crate) lost: f64,
    /// The work as a fraction of what an oracle achieves that uses every free host all the time.
    pub(crate) work: f64,
    /// Mean numbers of free hosts and running tasks, for each hour.
    pub(crate) by_hour: Vec<(f64, f64)>,
}

impl Week {
    /// Simulates the week with this seed.
    pub(crate) fn of(seed: u64, times: Times) -> Week {
        let job = |n: u32| {
            Job::new(
                n % USERS,
                f64::from(n) * PAUSE_H * HOUR,
                PROCESSES,
                WORK_H * HOUR,
            )
        };
        let mut pool = Pool::new(HOSTS, seed, office, (0..JOBS).map(job).collect(), times);
        pool.run(DAYS * DAY);
        let left_beside = pool.left_beside_owners();
        let seen = &mut pool.seen;
        let hours = (DAYS * 24.0) as u64;
        Week {
            hosts: HOSTS,
            seed,
            free_mean: seen.free / (DAYS * DAY),
            free_max: seen.free_max,
            jobs_ended: pool.jobs.iter().filter(|job| job.ended.is_some()).count(),
            jobs_waiting: pool.fair.waiting(),
            clean_s: Spread::of(std::mem::take(&mut seen.clean)),
            stall_s: Spread::of(std::mem::take(&mut seen.stalls)),
            untold_s: Spread::of(std::mem::take(&mut seen.untold)),
            left_beside,
            moves_owner: seen.evictions,
            moves_load: seen.shifts,
            moves_by_hour: (0..hours)
                .map(|hour| seen.moves_by_hour.get(&hour).copied().unwrap_or(0))
                .collect(),
            work_h: seen.work / HOUR,
            standing_h: seen.standing / HOUR,
            stuck_h: seen.stuck / HOUR,
            lost: seen.standing / seen.work,
            work: seen.work / seen.free,
            by_hour: (0..hours)
                .map(|hour| seen.by_hour.get(&hour).copied().unwrap_or_default())
                .collect(),
        }
    }

    /// Formats the results as text.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |what: &str, said: String| {
            let _ = writeln!(text, "{what:34}{said}");
        };
        let ms = |s: f64| format!("{:.0} ms", s * 1e3);
        let spread = |s: &Spread| {
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
