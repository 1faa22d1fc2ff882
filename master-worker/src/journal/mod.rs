//! The journal of a master-worker run: a master that starts again goes on where the last one ended.
//!
//! The master appends a [`Record`] for each change of its state. [`Journal::append`] only puts the
//! record into a queue. A thread writes what has gathered, makes all of it durable with one
//! `fdatasync`, and then reports the last durable position. The master acknowledges a result to
//! nobody before that.
//!
//! # Files
//!
//! ```text
//! DIR/run.lock     held by the master (flock); contains its process id and host
//! DIR/snapshot-N   driver's state, counters, open tasks by key and id, quarantined tasks
//! DIR/log-N        the records after snapshot-N
//! ```
//!
//! Log 1 has no snapshot. [`Journal::begin_snapshot`] begins log N + 1 at once; later records go
//! there. A second thread writes snapshot N + 1 from a copy of the tasks that shares all
//! payloads, under a temporary name, and removes the older files when the snapshot is durable.
//! Until then the state is snapshot N, log N and log N + 1. At each moment the folder contains one
//! complete state.
//!
//! # After a crash
//!
//! An incomplete end of the last log is cut, and [`Recovered::truncated`] has the place. A mark
//! after each sync (module `format`) distinguishes such an end from damage to durable records. That
//! is [`OpenError::Corrupt`], and nothing is changed. A run that was finished is never started
//! again: [`Previous::Finished`].
//!
//! Recovered is all that was reported durable, and perhaps more, in order and without gaps. The end
//! of a run's setup may therefore be missing, unless the initial tasks are one record.
//!
//! # Errors while the run goes on
//!
//! A failed write or sync is repeated with growing delays, and reported once. Records stay in
//! memory meanwhile and none is reported durable. [`AppendError::Full`] is the back-pressure.
//!
//! # Measured
//!
//! With `examples/journal_speed.rs`, built for release, on two processors that other work shares
//! (load average 7) and an ext4 file system whose `fdatasync` takes 4 ms. Three runs.
//!
//! | what | value |
//! | --- | --- |
//! | durable records of 100 bytes, group commit | 245,000 to 354,000/s |
//! | one record alone until it is durable | median 4.0 ms, p99 8 to 12 ms |
//! | snapshot of 1,000,000 open tasks of 100 bytes | 1.9 to 3.0 s, 114 MB |
//! | `append` meanwhile | median 0.07 to 0.16 µs, p99 5 µs, p99.9 43 to 106 µs |
//! | until durable meanwhile | median 2 to 14 ms, p99 91 to 250 ms, at most 264 ms |

mod error;
mod format;
mod log;
mod mirror;
mod queue;
mod record;
mod recovery;
mod snapshot;
mod storage;
#[cfg(test)]
mod tests;
mod writer;

pub use error::{AppendError, FinishError, Notice, OpenError, SnapshotRefused};
pub use format::RunId;
pub use log::TruncatedTail;
pub use record::{FailedAttempt, Lsn, QuarantinedTask, Record, StoredTask, TaskStats};
pub use recovery::{Previous, Recovered};

use bytes::Bytes;
use queue::Queue;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use storage::{Folder, Storage};
use writer::Writer;

/// Default limit of the bytes that are not durable yet.
pub const QUEUE_BYTES_MAX: usize = 64 << 20;
/// Delay after the first failed write.
const RETRY_MIN: Duration = Duration::from_millis(50);
/// Delay between attempts at most.
const RETRY_MAX: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Settings {
    /// Name and version of the program. A journal of another program is refused.
    pub program: String,
    /// A random number, for the case that a new run begins.
    pub new_run: RunId,
    /// The only run that may go on here. If there is no such run, the open fails.
    pub resume: Option<RunId>,
    /// Limit of the bytes that are not durable yet.
    pub queue_bytes_max: usize,
    /// Delay after the first failed write. Each further delay is twice as long.
    pub retry_min: Duration,
    pub retry_max: Duration,
}

/// Functions that the journal's threads call. They must return soon and must not panic.
pub struct Callbacks {
    /// All records up to this position are durable. Called by one thread, with growing positions.
    pub on_durable: Box<dyn Fn(Lsn) + Send + Sync>,
    pub on_notice: Box<dyn Fn(Notice) + Send + Sync>,
}

/// The journal of a run that this process has locked.
///
/// Dropping the journal writes what is in the queue, unless a write fails, and keeps the files: the
/// next open goes on with the run.
pub struct Journal {
    queue: Arc<Queue>,
    storage: Arc<dyn Storage>,
    writer: Option<JoinHandle<()>>,
    run: RunId,
    generation: u64,
}

impl Settings {
    pub fn new(program: impl Into<String>, new_run: RunId) -> Self {
        Self {
            program: program.into(),
            new_run,
            resume: None,
            queue_bytes_max: QUEUE_BYTES_MAX,
            retry_min: RETRY_MIN,
            retry_max: RETRY_MAX,
        }
    }
}

impl Journal {
    /// Locks the folder and returns the journal with what it contains. Creates the folder if
    /// necessary.
    ///
    /// # Errors
    /// The reason why the run cannot go on, and what to do.
    pub fn open(
        dir: &Path,
        settings: Settings,
        callbacks: Callbacks,
    ) -> Result<(Self, Previous), OpenError> {
        Self::open_storage(Arc::new(Folder::open(dir)?), settings, callbacks)
    }

    fn open_storage(
        storage: Arc<dyn Storage>,
        settings: Settings,
        callbacks: Callbacks,
    ) -> Result<(Self, Previous), OpenError> {
        let opened = recovery::open(&*storage, &settings)?;
        let durable = Lsn(opened.log.next() - 1);
        let bytes_max = settings.queue_bytes_max;
        let queue = Arc::new(Queue::new(durable, opened.log_bytes, bytes_max));
        let (run, generation) = (opened.run, opened.generation);
        let writer = Writer {
            storage: Arc::clone(&storage),
            queue: Arc::clone(&queue),
            callbacks: Arc::new(callbacks),
            settings,
            log: opened.log,
            mirror: opened.mirror,
            run,
            generation,
            snapshot_thread: None,
        };
        let spawned = thread::Builder::new()
            .name("mw-journal".to_string())
            .spawn(move || writer.run());
        let handle = spawned.map_err(|cause| OpenError::Io {
            dir: storage.path().to_path_buf(),
            action: "start a thread",
            cause,
        })?;
        let journal = Self {
            queue,
            storage,
            writer: Some(handle),
            run,
            generation,
        };
        Ok((journal, opened.previous))
    }

    /// Returns the run of the files. It differs from `Settings::new_run` if an older run goes on.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// Returns the number of opens of this run, 1 for a new run. The number is durable, so no other
    /// master of this run has had the same one.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the position up to which all records are durable.
    pub fn durable(&self) -> Lsn {
        self.queue.durable()
    }

    /// Returns the bytes of records that are not durable yet.
    pub fn waiting_bytes(&self) -> usize {
        self.queue.waiting_bytes()
    }

    /// Returns the bytes of the log since the last complete snapshot. A restart reads them all, so
    /// the size decides when the next snapshot is due.
    pub fn log_bytes(&self) -> u64 {
        self.queue.log_bytes()
    }

    pub fn is_snapshot_pending(&self) -> bool {
        self.queue.is_snapshot_pending()
    }

    /// Puts a record into the queue, and returns its position. Never waits for the disk.
    ///
    /// # Errors
    /// The queue is full, or the record is too large. The error returns the record.
    pub fn append(&self, record: Record) -> Result<Lsn, AppendError> {
        self.queue.append(record)
    }

    /// Waits until a record that was refused as `Full` fits. Returns false if the time is over.
    pub fn wait_for_room(&self, record: &Record, patience: Duration) -> bool {
        let deadline = deadline_after(patience);
        self.queue.wait_for_room(record.stored_bytes(), deadline)
    }

    /// Waits until a record is durable. Returns false if the time is over or the writer has ended.
    pub fn wait_durable(&self, lsn: Lsn, patience: Duration) -> bool {
        self.queue.wait_durable(lsn, deadline_after(patience))
    }

    /// Begins a snapshot that contains exactly the records appended so far. `driver_state` and
    /// `counters` describe the state after these records. The result is a [`Notice`].
    ///
    /// # Errors
    /// Another snapshot is being written, or the state is too large.
    pub fn begin_snapshot(
        &self,
        driver_state: Bytes,
        counters: Bytes,
    ) -> Result<(), SnapshotRefused> {
        self.queue.begin_snapshot(driver_state, counters)
    }

    /// Ends the run: makes all records durable and removes the files. `patience` limits the wait
    /// for a disk that fails.
    ///
    /// # Errors
    /// The files are still there, and the next open of the folder is safe.
    pub fn finish(mut self, patience: Duration) -> Result<(), FinishError> {
        let dir = self.storage.path().to_path_buf();
        if !self.append_finished(deadline_after(patience)) {
            return Err(FinishError::NotDurable { dir, patience });
        }
        self.close();
        recovery::remove_finished(&*self.storage)
            .and_then(|()| self.storage.remove_folder())
            .map_err(|cause| FinishError::Files { dir, cause })
    }

    /// Returns true if the last record of the run is durable.
    fn append_finished(&self, deadline: Instant) -> bool {
        let mut record = Record::Finished;
        loop {
            record = match self.queue.append(record) {
                Ok(lsn) => return self.queue.wait_durable(lsn, deadline),
                Err(AppendError::Full(record)) => *record,
                Err(AppendError::TooLarge { .. } | AppendError::Stopped(_)) => return false,
            };
            if !self.queue.wait_for_room(record.stored_bytes(), deadline) {
                return false;
            }
        }
    }

    fn close(&mut self) {
        self.queue.close();
        if let Some(writer) = self.writer.take() {
            // A panic there is in the caller's callback and was printed.
            let _ = writer.join();
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("dir", &self.storage.path())
            .field("run", &self.run)
            .field("generation", &self.generation)
            .field("durable", &self.durable())
            .finish_non_exhaustive()
    }
}

fn deadline_after(patience: Duration) -> Instant {
    const FOREVER: Duration = Duration::from_secs(1 << 32);
    Instant::now() + patience.min(FOREVER)
}
