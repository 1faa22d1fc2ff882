//! The queue between the threads that append and the thread that writes.

use super::error::{AppendError, SnapshotRefused};
use super::record::{Lsn, Record};
use bytes::Bytes;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of one record at most: the length field of a frame has 32 bits.
pub(super) const RECORD_BYTES_MAX: usize = 1 << 30;

#[derive(Debug)]
pub(super) enum Entry {
    Record(Record),
    Snapshot {
        driver_state: Bytes,
        counters: Bytes,
    },
}

/// What the writer does next.
pub(super) enum Work {
    Entries(Vec<Entry>),
    /// There are no entries at this moment.
    Idle,
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// The writer writes what is in the queue and ends.
    Closing,
    /// The writer has ended.
    Stopped,
}

struct State {
    entries: Vec<Entry>,
    /// Bytes of all records that are not durable, at least.
    bytes: usize,
    /// Position of the next record.
    next: u64,
    phase: Phase,
    is_snapshot_pending: bool,
}

pub(super) struct Queue {
    state: Mutex<State>,
    /// Wakes the writer: there is an entry, or the queue is closed.
    work: Condvar,
    /// Wakes callers: records are durable, or the writer has ended.
    progress: Condvar,
    durable: AtomicU64,
    /// Bytes of all logs since the last complete snapshot.
    log_bytes: AtomicU64,
    /// Stops the thread that writes a snapshot.
    is_snapshot_cancelled: AtomicBool,
    bytes_max: usize,
}

impl Queue {
    /// Returns a queue whose next record follows `durable`.
    pub(super) fn new(durable: Lsn, log_bytes: u64, bytes_max: usize) -> Self {
        Self {
            state: Mutex::new(State {
                entries: Vec::new(),
                bytes: 0,
                next: durable.0 + 1,
                phase: Phase::Open,
                is_snapshot_pending: false,
            }),
            work: Condvar::new(),
            progress: Condvar::new(),
            durable: AtomicU64::new(durable.0),
            log_bytes: AtomicU64::new(log_bytes),
            is_snapshot_cancelled: AtomicBool::new(false),
            bytes_max,
        }
    }

    pub(super) fn durable(&self) -> Lsn {
        Lsn(self.durable.load(Ordering::Acquire))
    }

    pub(super) fn log_bytes(&self) -> u64 {
        self.log_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn waiting_bytes(&self) -> usize {
        self.lock().bytes
    }

    /// Returns the number of appended records that are not durable.
    pub(super) fn records_not_durable(&self) -> u64 {
        self.lock().next - 1 - self.durable().0
    }

    pub(super) fn is_snapshot_pending(&self) -> bool {
        self.lock().is_snapshot_pending
    }

    pub(super) fn snapshot_cancellation(&self) -> &AtomicBool {
        &self.is_snapshot_cancelled
    }

    pub(super) fn append(&self, record: Record) -> Result<Lsn, AppendError> {
        let bytes = record.stored_bytes();
        if bytes > RECORD_BYTES_MAX {
            return Err(AppendError::TooLarge {
                record: Box::new(record),
                bytes,
                limit: RECORD_BYTES_MAX,
            });
        }
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(AppendError::Stopped(Box::new(record)));
        }
        // A record that alone exceeds the limit passes when nothing else waits.
        if state.bytes > 0 && state.bytes + bytes > self.bytes_max {
            return Err(AppendError::Full(Box::new(record)));
        }
        state.bytes += bytes;
        let lsn = Lsn(state.next);
        state.next += 1;
        state.entries.push(Entry::Record(record));
        if state.entries.len() == 1 {
            self.work.notify_one();
        }
        Ok(lsn)
    }

    pub(super) fn begin_snapshot(
        &self,
        driver_state: Bytes,
        counters: Bytes,
    ) -> Result<(), SnapshotRefused> {
        let bytes = driver_state.len() + counters.len();
        if bytes > RECORD_BYTES_MAX {
            let limit = RECORD_BYTES_MAX;
            return Err(SnapshotRefused::TooLarge { bytes, limit });
        }
        let mut state = self.lock();
        if state.phase != Phase::Open {
            return Err(SnapshotRefused::Stopped);
        }
        if state.is_snapshot_pending {
            return Err(SnapshotRefused::InProgress);
        }
        state.is_snapshot_pending = true;
        state.entries.push(Entry::Snapshot {
            driver_state,
            counters,
        });
        self.work.notify_one();
        Ok(())
    }

    /// Waits until fewer than `bytes` bytes wait, or the writer has ended. Returns false if the
    /// time is over.
    pub(super) fn wait_for_room(&self, bytes: usize, deadline: Instant) -> bool {
        self.wait_until(deadline, |state| {
            state.bytes == 0 || state.bytes + bytes <= self.bytes_max
        })
    }

    /// Waits until a record is durable. Returns false if the time is over or the writer has ended.
    pub(super) fn wait_durable(&self, lsn: Lsn, deadline: Instant) -> bool {
        self.wait_until(deadline, |_| self.durable() >= lsn) && self.durable() >= lsn
    }

    /// Tells the writer to end when the queue is empty, or at the first error.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        if state.phase == Phase::Open {
            state.phase = Phase::Closing;
        }
        self.is_snapshot_cancelled.store(true, Ordering::Relaxed);
        self.work.notify_all();
    }

    /// Returns the next work. If `has_idle_work` is false, waits for an entry or the close.
    pub(super) fn take(&self, has_idle_work: bool) -> Work {
        let mut state = self.lock();
        loop {
            if !state.entries.is_empty() {
                return Work::Entries(std::mem::take(&mut state.entries));
            }
            if has_idle_work {
                return Work::Idle;
            }
            if state.phase != Phase::Open {
                return Work::Close;
            }
            state = recover(self.work.wait(state));
        }
    }

    /// Waits until the next attempt after an error. Returns false if the queue is closed.
    pub(super) fn wait_for_retry(&self, delay: Duration) -> bool {
        let is_open = |state: &mut State| state.phase == Phase::Open;
        let wait = self.work.wait_timeout_while(self.lock(), delay, is_open);
        let (state, _) = recover(wait);
        state.phase == Phase::Open
    }

    /// Publishes that all records up to `lsn`, of `bytes` bytes in the queue, are durable.
    pub(super) fn set_durable(&self, lsn: Lsn, bytes: usize, log_bytes: u64) {
        let mut state = self.lock();
        state.bytes -= bytes;
        self.durable.store(lsn.0, Ordering::Release);
        self.log_bytes.fetch_add(log_bytes, Ordering::Relaxed);
        self.progress.notify_all();
    }

    /// The snapshot has ended. A complete one replaces `replaced_bytes` bytes of logs.
    pub(super) fn end_snapshot(&self, replaced_bytes: u64) {
        let mut state = self.lock();
        state.is_snapshot_pending = false;
        self.log_bytes.fetch_sub(replaced_bytes, Ordering::Relaxed);
        self.progress.notify_all();
    }

    pub(super) fn set_stopped(&self) {
        self.lock().phase = Phase::Stopped;
        self.progress.notify_all();
    }

    fn wait_until(&self, deadline: Instant, is_reached: impl Fn(&State) -> bool) -> bool {
        let must_wait = |state: &mut State| !is_reached(state) && state.phase != Phase::Stopped;
        let patience = deadline.saturating_duration_since(Instant::now());
        let wait = self
            .progress
            .wait_timeout_while(self.lock(), patience, must_wait);
        !recover(wait).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        recover(self.state.lock())
    }
}

/// A panic in a callback leaves the state valid: no callback runs while the state changes.
fn recover<T>(result: Result<T, PoisonError<T>>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
