//! Estimates how long migrations and checkpoints of the remaining tasks take. Pure.

use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Seconds for a checkpoint of a job, in addition to the time for its bytes.
const JOB_OVERHEAD_SECONDS: f64 = 2.0;
/// Maximum rate that is assumed for writing memory to the store: to disk, encrypted and flushed. If
/// the measured migrations are slower, their rate is used.
const WRITE_BYTES_PER_SECOND_MAX: f64 = 50e6;
/// Margin on the estimated write time, because disks are shared.
const WRITE_TIME_FACTOR: f64 = 1.5;
/// Minimum of the estimated time for checkpoints.
const WRITE_TIME_MIN: Duration = Duration::from_secs(5);
/// Age at which the estimate is computed again; a computation sends queries to all hosts.
pub(super) const ESTIMATE_MAX_AGE: Duration = Duration::from_secs(1);
/// Maximum number of tasks whose memory is queried during a drain.
const MEMORY_QUERIES_MAX: usize = 256;
/// Time limit for the memory queries of one estimate.
pub(super) const MEMORY_QUERIES_TIMEOUT: Duration = Duration::from_millis(500);

/// Sums over the measured migrations: bytes, and duration.
pub(super) type TransferTotals = (u64, Micros);

/// Estimate of the time for checkpoints.
#[derive(Debug, Default)]
pub(super) struct WriteEstimate {
    /// Memory of tasks that answered a query, in bytes.
    memory: BTreeMap<Tid, u64>,
    /// When the estimate was computed, and its result.
    pub(super) last_result: Option<(Instant, Duration)>,
}

impl WriteEstimate {
    /// Returns the bytes of memory of these tasks. Calls `ask` for tasks whose memory is unknown,
    /// up to [`MEMORY_QUERIES_MAX`] tasks in total. A task that stays unknown counts with the mean
    /// of the known tasks.
    pub(super) fn bytes(&mut self, tasks: &[Tid], ask: impl Fn(Tid) -> Option<u64>) -> u64 {
        for tid in tasks {
            if self.memory.len() < MEMORY_QUERIES_MAX && !self.memory.contains_key(tid) {
                self.memory.extend(ask(*tid).map(|bytes| (*tid, bytes)));
            }
        }
        let sum = self
            .memory
            .values()
            .fold(0, |sum: u64, bytes| sum.saturating_add(*bytes));
        let mean = sum / self.memory.len().max(1) as u64;
        let bytes = tasks
            .iter()
            .map(|tid| self.memory.get(tid).copied().unwrap_or(mean));
        bytes.fold(0, u64::saturating_add)
    }
}

/// Returns the seconds that checkpoints of this number of jobs take, given their total bytes and
/// the measured migrations.
pub(super) fn write_seconds(jobs: usize, bytes: u64, transferred: TransferTotals) -> f64 {
    let measured = transferred.0 as f64 / (transferred.1.0 as f64 / 1e6);
    let rate = if transferred.1.0 > 0 {
        measured.clamp(1.0, WRITE_BYTES_PER_SECOND_MAX)
    } else {
        WRITE_BYTES_PER_SECOND_MAX
    };
    JOB_OVERHEAD_SECONDS * jobs as f64 + bytes as f64 / rate
}

/// Returns the time for checkpoints of this number of jobs, with the margin for shared disks and at
/// least [`WRITE_TIME_MIN`].
pub(super) fn write_time_with_margin(jobs: usize, bytes: u64, rate: TransferTotals) -> Duration {
    // Limits the result to a year, which exceeds any deadline.
    let time =
        Duration::from_secs_f64((write_seconds(jobs, bytes, rate) * WRITE_TIME_FACTOR).min(3e7));
    time.max(WRITE_TIME_MIN)
}

/// True if tasks with `bytes` of memory can migrate in the time `left`, at the rate of the tasks
/// that have left so far. Before the first task has left, true during the first quarter of the
/// whole time.
pub(super) fn can_leave_in_time(
    elapsed: Duration,
    departed_bytes: u64,
    bytes: u64,
    left: Duration,
) -> bool {
    match departed_bytes {
        0 => elapsed < left / 3,
        departed_bytes => {
            elapsed.as_secs_f64() * bytes as f64 <= left.as_secs_f64() * departed_bytes as f64
        }
    }
}

pub(super) fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::super::order::DEADLINE_MAX;
    use super::*;

    /// The estimated time for checkpoints follows from the jobs' memory and the rate of migrations.
    #[test]
    fn write_time_depends_on_memory_and_rate() {
        let seconds = |jobs, bytes, moved| write_time_with_margin(jobs, bytes, moved).as_secs();
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
        let (mut writing, asked) = (WriteEstimate::default(), std::cell::Cell::new(0));
        let ask = |_| {
            asked.set(asked.get() + 1);
            Some(10)
        };
        let tids = |many| (1..=many).map(tid).collect::<Vec<Tid>>();
        assert_eq!(writing.bytes(&tids(3), ask), 30);
        assert_eq!(
            (writing.bytes(&tids(4), ask), asked.get()),
            (40, 4),
            "each task is queried once"
        );
        assert_eq!(
            writing.bytes(&tids(6), |_| None),
            60,
            "an unknown task counts with the mean"
        );
        let many = 2 * MEMORY_QUERIES_MAX as i32;
        assert_eq!(writing.bytes(&tids(many), ask), 10 * many as u64);
        assert!(asked.get() <= MEMORY_QUERIES_MAX);
        assert_eq!(WriteEstimate::default().bytes(&[], ask), 0);
    }

    /// Whether tasks leave in time is extrapolated from the rate of the tasks that have left.
    #[test]
    fn leave_in_time_extrapolates_rate() {
        let leave = |over, gone, bytes, left| {
            can_leave_in_time(
                Duration::from_secs(over),
                gone,
                bytes,
                Duration::from_secs(left),
            )
        };
        assert!(
            leave(9, 0, 1 << 40, 30) && !leave(10, 0, 1, 30),
            "before the first task has left there is no rate"
        );
        assert!(leave(10, 50, 100, 20) && !leave(10, 50, 101, 20));
        assert!(!leave(u64::from(u32::MAX), 1, u64::MAX, 1) && leave(1, 1, 0, 0));
    }
}
