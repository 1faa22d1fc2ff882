//! Snapshot files: the driver's state, the counters, and all tasks that are open or quarantined.

use super::error::Damage;
use super::format::{FileKind, FrameKey, FrameKind, FrameReader, FrameStep, Header, RunId};
use super::mirror::Mirror;
use super::record::{FailedAttempt, QuarantinedTask, StoredTask};
use super::storage::{Storage, StoredFile, create_complete};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of tasks in one part of a snapshot, unless one task alone is larger.
const PART_BYTES: usize = 1 << 20;
/// Bytes that a snapshot writes between two syncs. The log shares the disk: without these syncs,
/// one sync of the log could wait for a whole snapshot.
const SLICE_BYTES: usize = 4 << 20;

/// The opaque part of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SavedState {
    pub(super) driver_state: Bytes,
    pub(super) counters: Bytes,
    /// Number of opens of the journal.
    pub(super) generation: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Totals {
    open: u64,
    failed: u64,
    quarantined: u64,
}

#[derive(Serialize, Deserialize)]
enum Part {
    State(SavedState),
    Open(Vec<StoredTask>),
    Failed(Vec<FailedAttempt>),
    Quarantined(Vec<QuarantinedTask>),
    End(Totals),
}

/// Everything that a snapshot contains.
#[derive(Debug)]
pub(super) struct SnapshotContents {
    pub(super) header: Header,
    pub(super) state: SavedState,
    pub(super) open_tasks: Vec<StoredTask>,
    pub(super) failed_attempts: Vec<FailedAttempt>,
    pub(super) quarantined: Vec<QuarantinedTask>,
}

/// A snapshot that is to be written.
pub(super) struct SnapshotJob {
    pub(super) number: u64,
    pub(super) run: RunId,
    pub(super) program: String,
    pub(super) first: u64,
    pub(super) state: SavedState,
    pub(super) mirror: Mirror,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SnapshotSize {
    pub(super) tasks: u64,
    pub(super) bytes: u64,
}

struct SnapshotWriter<'a> {
    file: &'a mut dyn StoredFile,
    key: FrameKey,
    buffer: Vec<u8>,
    written: u64,
    parts: u64,
    is_cancelled: &'a AtomicBool,
}

pub(super) fn snapshot_name(number: u64) -> String {
    format!("snapshot-{number}")
}

impl SnapshotJob {
    /// Writes the snapshot. Afterwards the file is durable under its name.
    ///
    /// # Errors
    /// A call fails, or the journal is closed. There is no file of this name then, unless only the
    /// sync of the folder failed.
    pub(super) fn run(
        self,
        storage: &dyn Storage,
        is_cancelled: &AtomicBool,
    ) -> io::Result<SnapshotSize> {
        let header = Header {
            kind: FileKind::Snapshot,
            number: self.number,
            run: self.run,
            program: self.program.clone(),
            first: self.first,
        };
        let (buffer, key) = header.encode();
        let mut size = SnapshotSize { tasks: 0, bytes: 0 };
        create_complete(storage, &snapshot_name(self.number), |file| {
            let writer = SnapshotWriter {
                file,
                key,
                buffer,
                written: 0,
                parts: 0,
                is_cancelled,
            };
            size = writer.write(self.state, &self.mirror)?;
            Ok(())
        })?;
        Ok(size)
    }
}

impl SnapshotWriter<'_> {
    fn write(mut self, state: SavedState, mirror: &Mirror) -> io::Result<SnapshotSize> {
        self.push(&Part::State(state))?;
        let open_tasks = mirror.open_tasks();
        let totals = Totals {
            open: open_tasks.len() as u64,
            failed: self.push_all(
                mirror.failed_attempts(),
                |failed| failed.reason.len(),
                Part::Failed,
            )?,
            quarantined: self.push_all(
                mirror.quarantined(),
                |q| q.task.stored_bytes() + q.history.len(),
                Part::Quarantined,
            )?,
        };
        self.push_all(open_tasks, |task| task.stored_bytes(), Part::Open)?;
        self.push(&Part::End(totals))?;
        self.flush()?;
        Ok(SnapshotSize {
            tasks: totals.open,
            bytes: self.written,
        })
    }

    /// Writes items in parts of about [`PART_BYTES`]. Returns the number of items.
    fn push_all<'t, T: Clone + 't>(
        &mut self,
        items: impl IntoIterator<Item = &'t T>,
        size_of: impl Fn(&T) -> usize,
        part: impl Fn(Vec<T>) -> Part,
    ) -> io::Result<u64> {
        let (mut chunk, mut chunk_bytes, mut count) = (Vec::new(), 0, 0);
        for item in items {
            count += 1;
            chunk_bytes += size_of(item) + size_of_val(item);
            chunk.push(item.clone());
            if chunk_bytes >= PART_BYTES {
                self.push(&part(std::mem::take(&mut chunk)))?;
                chunk_bytes = 0;
            }
        }
        if !chunk.is_empty() {
            self.push(&part(chunk))?;
        }
        Ok(count)
    }

    fn push(&mut self, part: &Part) -> io::Result<()> {
        if self.is_cancelled.load(Ordering::Relaxed) {
            return Err(io::Error::other("the journal is closed"));
        }
        let kind = FrameKind::SnapshotPart;
        self.key
            .push_frame(&mut self.buffer, kind, self.parts, part);
        self.parts += 1;
        if self.buffer.len() >= SLICE_BYTES {
            self.flush()?;
            self.file.sync()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.write_all_at(&self.buffer, self.written)?;
        self.written += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

/// The reason why a snapshot cannot be read.
pub(super) enum SnapshotError {
    Io(io::Error),
    Damaged(Damage),
}

impl From<io::Error> for SnapshotError {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

impl From<Damage> for SnapshotError {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

/// Reads the frames of a snapshot. A snapshot got its name when all of the file was durable, so
/// each damage is corruption.
///
/// # Errors
/// The file cannot be read, or is damaged.
pub(super) fn read_snapshot(
    header: Header,
    mut frames: FrameReader,
) -> Result<SnapshotContents, SnapshotError> {
    let mut state = None;
    let (mut open_tasks, mut failed_attempts, mut quarantined) = (vec![], vec![], vec![]);
    let mut totals = None;
    for expected in 0.. {
        let offset = frames.offset();
        let damage = |what| SnapshotError::Damaged(Damage { offset, what });
        let frame = match frames.next()? {
            FrameStep::Frame(_) if totals.is_some() => {
                return Err(damage("there is more after the end of the snapshot"));
            }
            FrameStep::Frame(frame) => frame,
            FrameStep::End => break,
            FrameStep::Bad(damage) => return Err(damage.into()),
        };
        if frame.kind != FrameKind::SnapshotPart || frame.sequence != expected {
            return Err(damage("a part of the snapshot is out of order"));
        }
        match frame.decode()? {
            Part::State(saved) => state = Some(saved),
            Part::Open(tasks) => open_tasks.extend(tasks),
            Part::Failed(failed) => failed_attempts.extend(failed),
            Part::Quarantined(tasks) => quarantined.extend(tasks),
            Part::End(end) => totals = Some(end),
        }
    }
    let found = Totals {
        open: open_tasks.len() as u64,
        failed: failed_attempts.len() as u64,
        quarantined: quarantined.len() as u64,
    };
    let end = Damage {
        offset: frames.offset(),
        what: "the snapshot ends too early",
    };
    if totals != Some(found) {
        return Err(end.into());
    }
    Ok(SnapshotContents {
        header,
        state: state.ok_or(end)?,
        open_tasks,
        failed_attempts,
        quarantined,
    })
}
