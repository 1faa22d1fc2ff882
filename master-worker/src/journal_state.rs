//! The journal of a run as its master uses it: when statistics and snapshots are due, and which
//! results wait to be stored.

use crate::journal::{AppendError, Journal, Lsn, Record};
use crate::master::RunError;
use sempa_work_dispatch::{AttemptId, Micros, WorkerId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Interval of the statistics in the journal.
const STATISTICS_INTERVAL: Micros = 5_000_000;
/// Interval of the snapshots in the journal.
const SNAPSHOT_INTERVAL: Micros = 60_000_000;
/// Size of the log at which a snapshot is due before the interval is over.
const LOG_BYTES_MAX: u64 = 256 << 20;
/// Time for which the master waits for the disk when the queue of the journal is full.
const JOURNAL_PATIENCE: Duration = Duration::from_secs(600);

/// Outcome of the first snapshot of this master.
#[derive(Debug, Default)]
pub(crate) struct FirstSnapshot {
    outcome: Mutex<Option<Result<(), String>>>,
    changed: Condvar,
}

impl FirstSnapshot {
    /// Notes the outcome of a snapshot.
    pub(crate) fn note(&self, outcome: Result<(), String>) {
        if let Ok(mut first) = self.outcome.lock() {
            first.get_or_insert(outcome);
        }
        self.changed.notify_all();
    }

    /// Waits for the first snapshot.
    ///
    /// # Errors
    /// The snapshot has failed, or `patience` is over.
    fn wait(&self, patience: Duration) -> Result<(), String> {
        let late = || format!("nothing was stored for {} s", patience.as_secs());
        let outcome = self.outcome.lock().map_err(|error| error.to_string())?;
        let waited = self
            .changed
            .wait_timeout_while(outcome, patience, |first| first.is_none());
        let (outcome, _) = waited.map_err(|error| error.to_string())?;
        outcome.clone().unwrap_or_else(|| Err(late()))
    }
}

/// The journal of a run, and the results that wait to be stored.
#[derive(Debug)]
pub(crate) struct JournalState {
    pub(crate) journal: Journal,
    first_snapshot: Arc<FirstSnapshot>,
    unacknowledged: VecDeque<(Lsn, WorkerId, AttemptId)>,
    next_statistics: Micros,
    next_snapshot: Micros,
}

impl JournalState {
    pub(crate) fn new(journal: Journal, first_snapshot: Arc<FirstSnapshot>, now: Micros) -> Self {
        Self {
            journal,
            first_snapshot,
            unacknowledged: VecDeque::new(),
            next_statistics: now + STATISTICS_INTERVAL,
            next_snapshot: now + SNAPSHOT_INTERVAL,
        }
    }

    /// Appends a record. Waits for the disk if too much is not stored yet.
    pub(crate) fn append(&self, mut record: Record) -> Result<Lsn, RunError> {
        loop {
            record = match self.journal.append(record) {
                Ok(lsn) => return Ok(lsn),
                Err(AppendError::Full(record)) => *record,
                Err(error) => return Err(RunError::Journal(error.to_string())),
            };
            if !self.journal.wait_for_room(&record, JOURNAL_PATIENCE) {
                let reason = format!(
                    "nothing could be stored for {} s",
                    JOURNAL_PATIENCE.as_secs()
                );
                return Err(RunError::Journal(reason));
            }
        }
    }

    /// Notes that the result of an attempt counts when the record `lsn` is stored.
    pub(crate) fn acknowledge_later(&mut self, lsn: Lsn, worker: WorkerId, attempt: AttemptId) {
        self.unacknowledged.push_back((lsn, worker, attempt));
    }

    /// Returns the attempts whose results were stored since the last call.
    pub(crate) fn take_stored(&mut self) -> BTreeMap<WorkerId, Vec<AttemptId>> {
        let durable = self.journal.durable();
        let mut stored: BTreeMap<WorkerId, Vec<AttemptId>> = BTreeMap::new();
        while let Some((lsn, worker, attempt)) = self.unacknowledged.front().copied()
            && lsn <= durable
        {
            self.unacknowledged.pop_front();
            stored.entry(worker).or_default().push(attempt);
        }
        stored
    }

    /// True if statistics or a snapshot are due.
    pub(crate) fn has_turn(&self, now: Micros) -> bool {
        now >= self.next_statistics || self.wants_snapshot(now)
    }

    fn wants_snapshot(&self, now: Micros) -> bool {
        let is_wanted = now >= self.next_snapshot || self.journal.log_bytes() > LOG_BYTES_MAX;
        is_wanted && !self.journal.is_snapshot_pending()
    }

    /// True once in each interval of the statistics.
    pub(crate) fn take_statistics_turn(&mut self, now: Micros) -> bool {
        let is_due = now >= self.next_statistics;
        if is_due {
            self.next_statistics = now + STATISTICS_INTERVAL;
        }
        is_due
    }

    /// True once in each interval of the snapshots, and earlier if the log is large.
    pub(crate) fn take_snapshot_turn(&mut self, now: Micros) -> bool {
        let is_due = self.wants_snapshot(now);
        if is_due {
            self.next_snapshot = now + SNAPSHOT_INTERVAL;
        }
        is_due
    }

    /// Returns the time at which the next statistics are due.
    pub(crate) fn next_statistics(&self) -> Micros {
        self.next_statistics
    }

    /// Waits until the first state of the run is durable.
    ///
    /// # Errors
    /// The state was not stored in time.
    pub(crate) fn wait_for_first_snapshot(&self, patience: Duration) -> Result<(), RunError> {
        self.first_snapshot
            .wait(patience)
            .map_err(RunError::Journal)
    }
}
