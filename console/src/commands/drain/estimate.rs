//! Estimates how long migrations and checkpoints of the remaining tasks take. Pure.

use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Seconds that a checkpoint of a job takes in addition to the time for writing its bytes.
const JOB_OVERHEAD_SECONDS: f64 = 2.0;
/// Maximum rate at which memory is assumed to be written to the store, which encrypts the data and
/// flushes the data to disk. If the measured migrations are slower, their rate is used.
const WRITE_BYTES_PER_SECOND_MAX: f64 = 50e6;
/// Margin on the estimated write time, because disks are shared.
const WRITE_TIME_FACTOR: f64 = 1.5;
/// Minimum of the estimated time for checkpoints.
const WRITE_TIME_MIN: Duration = Duration::from_secs(5);
/// Age at which an estimate is computed again. A computation sends queries to all hosts.
pub(super) const ESTIMATE_AGE_MAX: Duration = Duration::from_secs(1);
/// Maximum number of tasks whose memory is queried during a drain.
const MEMORY_QUERIES_MAX: usize = 256;
/// Time limit for the memory queries of one estimate.
pub(super) const MEMORY_QUERIES_TIMEOUT: Duration = Duration::from_millis(500);

/// Sums over the measured migrations: bytes, and transfer time.
pub(super) type TransferTotals = (u64, Micros);

/// Estimate of the time for checkpoints.
#[derive(Debug, Default)]
pub(super) struct WriteEstimate {
    /// Bytes of memory of each task that has answered a query.
    task_bytes: BTreeMap<Tid, u64>,
    /// Time of the last computation, and the estimated time for checkpoints of all jobs. The
    /// estimated time is zero if checkpoints are due but no job is ready. `None` if the next call
    /// must compute the estimate.
    pub(super) last_estimate: Option<(Instant, Duration)>,
}

impl WriteEstimate {
    /// Returns the total bytes of memory of `tasks`. Calls `query_bytes` for tasks whose memory is
    /// unknown, up to [`MEMORY_QUERIES_MAX`] tasks in total. A task whose memory stays unknown
    /// counts with the mean of the known tasks.
    pub(super) fn total_bytes(
        &mut self,
        tasks: &[Tid],
        query_bytes: impl Fn(Tid) -> Option<u64>,
    ) -> u64 {
        for tid in tasks {
            if self.task_bytes.len() < MEMORY_QUERIES_MAX && !self.task_bytes.contains_key(tid) {
                self.task_bytes
                    .extend(query_bytes(*tid).map(|bytes| (*tid, bytes)));
            }
        }
        let known_bytes = self.task_bytes.values().fold(0, |known_bytes: u64, bytes| {
            known_bytes.saturating_add(*bytes)
        });
        let mean_bytes = known_bytes / self.task_bytes.len().max(1) as u64;
        let bytes = tasks
            .iter()
            .map(|tid| self.task_bytes.get(tid).copied().unwrap_or(mean_bytes));
        bytes.fold(0, u64::saturating_add)
    }
}

/// Returns the seconds that checkpoints of `job_count` jobs take. `bytes` is the total memory of
/// the jobs, and `transfer_totals` is measured from migrations.
pub(super) fn write_seconds(job_count: usize, bytes: u64, transfer_totals: TransferTotals) -> f64 {
    let measured_bytes_per_second = transfer_totals.0 as f64 / (transfer_totals.1.0 as f64 / 1e6);
    let bytes_per_second = if transfer_totals.1.0 > 0 {
        measured_bytes_per_second.clamp(1.0, WRITE_BYTES_PER_SECOND_MAX)
    } else {
        WRITE_BYTES_PER_SECOND_MAX
    };
    JOB_OVERHEAD_SECONDS * job_count as f64 + bytes as f64 / bytes_per_second
}

/// Returns the time that checkpoints of `job_count` jobs take, with a margin for shared disks. The
/// time is at least [`WRITE_TIME_MIN`].
pub(super) fn write_time_with_margin(
    job_count: usize,
    bytes: u64,
    transfer_totals: TransferTotals,
) -> Duration {
    // The result is at most about a year, which exceeds any deadline.
    let write_time = Duration::from_secs_f64(
        (write_seconds(job_count, bytes, transfer_totals) * WRITE_TIME_FACTOR).min(3e7),
    );
    write_time.max(WRITE_TIME_MIN)
}

/// True if tasks with `bytes` of memory can migrate in the time `remaining_time`, at the rate of
/// the tasks that have migrated so far. Before the first task has migrated, true during the first
/// quarter of the whole time.
pub(super) fn can_leave_in_time(
    elapsed: Duration,
    departed_bytes: u64,
    bytes: u64,
    remaining_time: Duration,
) -> bool {
    match departed_bytes {
        0 => elapsed < remaining_time / 3,
        departed_bytes => {
            elapsed.as_secs_f64() * bytes as f64
                <= remaining_time.as_secs_f64() * departed_bytes as f64
        }
    }
}

pub(super) fn megabytes_text(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::super::order::DEADLINE_MAX;
    use super::*;

    /// The estimated time for checkpoints follows from the jobs' memory and the rate of migrations.
    #[test]
    fn write_time_depends_on_memory_and_rate() {
        let seconds = |job_count, bytes, transfer_totals| {
            write_time_with_margin(job_count, bytes, transfer_totals).as_secs()
        };
        assert_eq!(
            seconds(1, 1 << 20, (0, Micros(0))),
            5,
            "never later than that"
        );
        assert_eq!(seconds(2, 1_000_000_000, (0, Micros(0))), 36);
        assert_eq!(
            seconds(2, 1_000_000_000, (900_000_000, Micros::from_secs(1))),
            36,
            "the rate of a disk is the limit"
        );
        assert_eq!(
            seconds(2, 1_000_000_000, (30_000_000, Micros::from_secs(3))),
            156,
            "tasks leave slowly"
        );
        assert!(seconds(1, u64::MAX, (1, Micros::from_secs(9))) > DEADLINE_MAX.as_secs());
        let tid = |n: i32| Tid::from_raw(0x40000 + n);
        let (mut estimate, query_count) = (WriteEstimate::default(), std::cell::Cell::new(0));
        let query_bytes = |_| {
            query_count.set(query_count.get() + 1);
            Some(10)
        };
        let tids = |count| (1..=count).map(tid).collect::<Vec<Tid>>();
        assert_eq!(estimate.total_bytes(&tids(3), query_bytes), 30);
        assert_eq!(
            (
                estimate.total_bytes(&tids(4), query_bytes),
                query_count.get()
            ),
            (40, 4),
            "each task is queried once"
        );
        assert_eq!(
            estimate.total_bytes(&tids(6), |_| None),
            60,
            "an unknown task counts with the mean"
        );
        let count = 2 * MEMORY_QUERIES_MAX as i32;
        assert_eq!(
            estimate.total_bytes(&tids(count), query_bytes),
            10 * count as u64
        );
        assert!(query_count.get() <= MEMORY_QUERIES_MAX);
        assert_eq!(WriteEstimate::default().total_bytes(&[], query_bytes), 0);
    }

    #[test]
    fn leave_in_time_extrapolates_rate() {
        let can_leave = |elapsed_s, departed_bytes, bytes, remaining_s| {
            can_leave_in_time(
                Duration::from_secs(elapsed_s),
                departed_bytes,
                bytes,
                Duration::from_secs(remaining_s),
            )
        };
        assert!(
            can_leave(9, 0, 1 << 40, 30) && !can_leave(10, 0, 1, 30),
            "before the first task has left there is no rate"
        );
        assert!(can_leave(10, 50, 100, 20) && !can_leave(10, 50, 101, 20));
        assert!(!can_leave(u64::from(u32::MAX), 1, u64::MAX, 1) && can_leave(1, 1, 0, 0));
    }
}
