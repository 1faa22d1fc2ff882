//! The thread that writes the log, and the thread of a snapshot.

use super::error::Notice;
use super::format::{FileKind, Header, RunId};
use super::log::LogWriter;
use super::mirror::Mirror;
use super::queue::{Entry, Queue, Work};
use super::record::Lsn;
use super::recovery::remove_before;
use super::snapshot::{SavedState, SnapshotJob};
use super::storage::Storage;
use super::{Callbacks, Settings};
use bytes::Bytes;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};

/// Bytes of one commit, unless one record alone is larger. The limit bounds the time until the
/// first record of a commit is durable.
const COMMIT_BYTES: usize = 8 << 20;

/// Owns the log and the mirror of the tasks.
pub(super) struct Writer {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) queue: Arc<Queue>,
    pub(super) callbacks: Arc<Callbacks>,
    pub(super) settings: Settings,
    pub(super) log: LogWriter,
    pub(super) mirror: Mirror,
    pub(super) run: RunId,
    pub(super) generation: u64,
    pub(super) snapshot_thread: Option<JoinHandle<()>>,
}

/// The records of the commit that is being gathered.
#[derive(Default)]
struct Batch {
    last: Option<Lsn>,
    /// Bytes of the records in the queue.
    queue_bytes: usize,
}

/// Marks the queue as stopped when the writer ends, also by a panic in a callback.
struct StopGuard(Arc<Queue>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.set_stopped();
    }
}

impl Writer {
    /// Writes until the queue is closed.
    pub(super) fn run(mut self) {
        let _guard = StopGuard(Arc::clone(&self.queue));
        loop {
            let step = match self.queue.take(self.log.is_mark_due()) {
                Work::Entries(entries) => self.write_entries(entries),
                Work::Idle => {
                    self.log.write_mark();
                    ControlFlow::Continue(())
                }
                Work::Close => ControlFlow::Break(()),
            };
            if step.is_break() {
                break;
            }
        }
        self.join_snapshot_thread();
        let records = self.queue.records_not_durable();
        if records > 0 {
            let dir = self.storage.path().to_path_buf();
            (self.callbacks.on_notice)(Notice::RecordsLost { dir, records });
        }
    }

    fn write_entries(&mut self, entries: Vec<Entry>) -> ControlFlow<()> {
        let mut batch = Batch::default();
        for entry in entries {
            match entry {
                Entry::Record(record) => {
                    batch.last = Some(self.log.push_record(&record));
                    batch.queue_bytes += record.stored_bytes();
                    self.mirror.apply(&record);
                    if self.log.unsynced_bytes() >= COMMIT_BYTES {
                        self.commit(std::mem::take(&mut batch))?;
                    }
                }
                Entry::Snapshot {
                    driver_state,
                    counters,
                } => {
                    self.commit(std::mem::take(&mut batch))?;
                    self.begin_snapshot(driver_state, counters)?;
                }
            }
        }
        self.commit(batch)
    }

    fn commit(&mut self, batch: Batch) -> ControlFlow<()> {
        let Some(last) = batch.last else {
            return ControlFlow::Continue(());
        };
        let synced_before = self.log.synced_bytes();
        self.retry(|writer| writer.log.commit())?;
        let log_bytes = self.log.synced_bytes() - synced_before;
        self.queue.set_durable(last, batch.queue_bytes, log_bytes);
        (self.callbacks.on_durable)(last);
        ControlFlow::Continue(())
    }

    /// Repeats an operation until it succeeds. Gives up at an error after the queue was closed.
    fn retry<T>(
        &mut self,
        mut operation: impl FnMut(&mut Self) -> io::Result<T>,
    ) -> ControlFlow<(), T> {
        let mut delay = self.settings.retry_min;
        let mut has_failed = false;
        loop {
            let cause = match operation(self) {
                Ok(value) => {
                    if has_failed {
                        (self.callbacks.on_notice)(Notice::WritesResumed);
                    }
                    return ControlFlow::Continue(value);
                }
                Err(cause) => cause,
            };
            if !std::mem::replace(&mut has_failed, true) {
                let dir = self.storage.path().to_path_buf();
                let retry = delay;
                (self.callbacks.on_notice)(Notice::WritesFail { dir, cause, retry });
            }
            if !self.queue.wait_for_retry(delay) {
                return ControlFlow::Break(());
            }
            delay = (delay * 2).min(self.settings.retry_max);
        }
    }

    /// Begins the next log, and a snapshot of what the logs before contain.
    fn begin_snapshot(&mut self, driver_state: Bytes, counters: Bytes) -> ControlFlow<()> {
        self.join_snapshot_thread();
        let number = self.log.number() + 1;
        let first = self.log.next();
        let header = Header {
            kind: FileKind::Log,
            number,
            run: self.run,
            program: self.settings.program.clone(),
            first,
        };
        self.log = self.retry(|writer| LogWriter::create(&*writer.storage, &header))?;
        let job = SnapshotJob {
            number,
            run: self.run,
            program: self.settings.program.clone(),
            first,
            state: SavedState {
                driver_state,
                counters,
                generation: self.generation,
            },
            mirror: self.mirror.clone(),
        };
        let (storage, queue) = (Arc::clone(&self.storage), Arc::clone(&self.queue));
        let callbacks = Arc::clone(&self.callbacks);
        let replaced_bytes = self.queue.log_bytes();
        let spawned = thread::Builder::new()
            .name("mw-snapshot".to_string())
            .spawn(move || write_snapshot(job, &*storage, &queue, &callbacks, replaced_bytes));
        match spawned {
            Ok(handle) => self.snapshot_thread = Some(handle),
            Err(cause) => {
                self.queue.end_snapshot(0);
                let dir = self.storage.path().to_path_buf();
                (self.callbacks.on_notice)(Notice::SnapshotFailed { dir, cause });
            }
        }
        ControlFlow::Continue(())
    }

    fn join_snapshot_thread(&mut self) {
        if let Some(handle) = self.snapshot_thread.take() {
            // The thread has reported its result; a panic there is in the caller's callback.
            let _ = handle.join();
        }
    }
}

fn write_snapshot(
    job: SnapshotJob,
    storage: &dyn Storage,
    queue: &Queue,
    callbacks: &Callbacks,
    replaced_bytes: u64,
) {
    let number = job.number;
    let dir = storage.path().to_path_buf();
    let result = job.run(storage, queue.snapshot_cancellation());
    let removal = match &result {
        Ok(_) => remove_before(storage, number),
        Err(_) => Ok(()),
    };
    queue.end_snapshot(if result.is_ok() { replaced_bytes } else { 0 });
    if let Err(cause) = removal {
        let dir = dir.clone();
        (callbacks.on_notice)(Notice::OldFilesKept { dir, cause });
    }
    match result {
        Ok(size) => (callbacks.on_notice)(Notice::SnapshotWritten {
            number,
            tasks: size.tasks,
            bytes: size.bytes,
        }),
        // The journal is closed, and the logs have everything.
        Err(_) if queue.snapshot_cancellation().load(Ordering::Relaxed) => {}
        Err(cause) => (callbacks.on_notice)(Notice::SnapshotFailed { dir, cause }),
    }
}
