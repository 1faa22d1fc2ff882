//! One log file: reads the records of a log, and appends to a log.

use super::error::Damage;
use super::format::{
    FileKind, Frame, FrameKey, FrameKind, FrameReader, FrameStep, Header, HeaderError,
};
use super::record::{Lsn, Record};
use super::storage::{Storage, StoredFile, StoredReader, create_complete};
use std::fmt;
use std::io::{self, Read};

/// Sequence number of the first frame of a run.
pub(super) const FIRST_SEQUENCE: u64 = 1;

/// The end of a log that was cut, because the write was not complete when the master ended. Nobody
/// was told that its records are durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TruncatedTail {
    pub file: String,
    /// Length of the file after the cut.
    pub offset: u64,
    /// Number of bytes that were cut.
    pub bytes: u64,
}

/// The content of a log up to its last whole frame.
pub(super) struct LogContents {
    pub(super) header: Header,
    pub(super) records: Vec<Record>,
    /// The last generation in this log; 0 if there is none.
    pub(super) generation: u64,
    key: FrameKey,
    /// Sequence number of the next frame.
    next: u64,
    len: u64,
    /// The last mark and the frames after it. They may be in the system's memory only.
    unmarked: Vec<u8>,
    pub(super) truncated: Option<TruncatedTail>,
}

pub(super) enum LogError {
    Header(HeaderError),
    Damaged(Damage),
}

/// Appends frames to a log.
pub(super) struct LogWriter {
    file: Box<dyn StoredFile>,
    key: FrameKey,
    number: u64,
    /// Length of the file that is durable.
    synced: u64,
    /// Frames that follow the durable part. They are kept until a sync succeeds, because the system
    /// may drop written pages when a sync fails.
    unsynced: Vec<u8>,
    /// Bytes of `unsynced` that need not be written again.
    written: usize,
    /// Sequence number of the next frame.
    next: u64,
    /// True if no mark follows the durable part.
    is_mark_due: bool,
}

impl fmt::Display for TruncatedTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "The last {} bytes of {} were not written completely when the previous master ended, \
             and were cut at byte {}. No result in them was acknowledged.",
            self.bytes, self.file, self.offset
        )
    }
}

impl From<io::Error> for LogError {
    fn from(cause: io::Error) -> Self {
        Self::Header(HeaderError::Io(cause))
    }
}

impl From<HeaderError> for LogError {
    fn from(error: HeaderError) -> Self {
        Self::Header(error)
    }
}

impl From<Damage> for LogError {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

impl LogContents {
    /// Reads a log. `end` is the sequence number with which the next log begins, if there is one:
    /// a log with a successor is complete.
    ///
    /// # Errors
    /// The file cannot be read, or a part that was durable is damaged.
    pub(super) fn read(
        storage: &dyn Storage,
        number: u64,
        end: Option<u64>,
    ) -> Result<Self, LogError> {
        let name = log_name(number);
        let (header, mut frames) = FrameReader::open(storage.reader(&name)?)?;
        if header.kind != FileKind::Log || header.number != number {
            let what = "the file has the name of another file of the journal";
            return Err(Damage { offset: 0, what }.into());
        }
        let mut contents = Self {
            next: header.first,
            len: frames.offset(),
            key: frames.key().clone(),
            header,
            records: Vec::new(),
            generation: 0,
            unmarked: Vec::new(),
            truncated: None,
        };
        while end != Some(contents.next) {
            let step = frames.next()?;
            let damage = match step {
                FrameStep::Frame(frame) => match contents.accept(frame)? {
                    Ok(()) => continue,
                    Err(damage) => damage,
                },
                FrameStep::End if end.is_none() => break,
                FrameStep::End => Damage {
                    offset: frames.offset(),
                    what: "the log ends too early",
                },
                FrameStep::Bad(damage) => damage,
            };
            if end.is_some() {
                return Err(damage.into());
            }
            contents.truncated = Some(contents.unwritten_tail(storage, &name, damage)?);
            break;
        }
        Ok(contents)
    }

    /// Returns the length of the log up to its last whole frame.
    pub(super) fn bytes(&self) -> u64 {
        self.len
    }

    /// True if the run is complete.
    pub(super) fn is_finished(&self) -> bool {
        self.records.contains(&Record::Finished)
    }

    /// Takes in the next frame, or returns why the frame cannot be the next one.
    ///
    /// # Errors
    /// The frame is undamaged, but this program does not know the content.
    fn accept(&mut self, frame: Frame) -> Result<Result<(), Damage>, Damage> {
        let what = "a record is out of order";
        let (offset, len) = (frame.offset, frame.raw.len() as u64);
        if frame.sequence != self.next {
            return Ok(Err(Damage { offset, what }));
        }
        match frame.kind {
            FrameKind::Mark if self.key.finds_mark(&frame.raw, offset) => {
                self.unmarked = frame.raw;
            }
            FrameKind::Mark | FrameKind::SnapshotPart => return Ok(Err(Damage { offset, what })),
            FrameKind::Record | FrameKind::Opened => {
                if frame.kind == FrameKind::Record {
                    self.records.push(frame.decode()?);
                } else {
                    self.generation = frame.decode()?;
                }
                self.unmarked.extend(frame.raw);
                self.next += 1;
            }
        }
        self.len = offset + len;
        Ok(Ok(()))
    }

    /// Returns the tail that begins with a damaged frame, if no mark follows the frame.
    ///
    /// # Errors
    /// A mark proves that the damaged part was durable, or the file cannot be read.
    fn unwritten_tail(
        &self,
        storage: &dyn Storage,
        name: &str,
        damage: Damage,
    ) -> Result<TruncatedTail, LogError> {
        let StoredReader { mut source, .. } = storage.reader(name)?;
        io::copy(&mut (&mut source).take(damage.offset), &mut io::sink())?;
        let mut tail = Vec::new();
        source.read_to_end(&mut tail)?;
        if self.key.finds_mark(&tail, damage.offset) {
            return Err(damage.into());
        }
        Ok(TruncatedTail {
            file: name.to_string(),
            offset: damage.offset,
            bytes: tail.len() as u64,
        })
    }
}

impl LogWriter {
    /// Creates a log file. Afterwards the file is durable and has no frame.
    ///
    /// # Errors
    /// A call fails. The call may be repeated.
    pub(super) fn create(storage: &dyn Storage, header: &Header) -> io::Result<Self> {
        let (bytes, key) = header.encode();
        let name = log_name(header.number);
        let file = create_complete(storage, &name, |file| file.write_all_at(&bytes, 0))?;
        Ok(Self {
            file,
            key,
            number: header.number,
            synced: bytes.len() as u64,
            unsynced: Vec::new(),
            written: 0,
            next: header.first,
            is_mark_due: false,
        })
    }

    /// Opens a log to append, and cuts an incomplete tail. The next commit writes all from the last
    /// mark on again, because the last sync may have failed.
    ///
    /// # Errors
    /// A call fails. The call may be repeated.
    pub(super) fn resume(storage: &dyn Storage, contents: LogContents) -> io::Result<Self> {
        let number = contents.header.number;
        let mut file = storage.open(&log_name(number))?;
        if contents.truncated.is_some() {
            file.truncate(contents.len)?;
            // Old frames must not follow new ones.
            file.sync()?;
        }
        Ok(Self {
            file,
            key: contents.key,
            number,
            synced: contents.len - contents.unmarked.len() as u64,
            unsynced: contents.unmarked,
            written: 0,
            next: contents.next,
            is_mark_due: false,
        })
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the sequence number of the next frame.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the number of bytes that the next commit makes durable.
    pub(super) fn unsynced_bytes(&self) -> usize {
        self.unsynced.len()
    }

    /// Returns the length of the file that is durable, in bytes.
    pub(super) fn synced_bytes(&self) -> u64 {
        self.synced
    }

    pub(super) fn is_mark_due(&self) -> bool {
        self.is_mark_due
    }

    /// Adds a record to the next commit.
    pub(super) fn push_record(&mut self, record: &Record) -> Lsn {
        self.push(FrameKind::Record, record)
    }

    /// Adds a generation to the next commit.
    pub(super) fn push_opened(&mut self, generation: u64) -> Lsn {
        self.push(FrameKind::Opened, &generation)
    }

    /// Makes all frames durable.
    ///
    /// # Errors
    /// A call fails. The next call writes the same frames again.
    pub(super) fn commit(&mut self) -> io::Result<()> {
        self.write()?;
        if let Err(e) = self.file.sync() {
            self.written = 0;
            return Err(e);
        }
        self.synced += self.unsynced.len() as u64;
        self.unsynced.clear();
        self.written = 0;
        self.is_mark_due = true;
        Ok(())
    }

    /// Writes the mark that is due, without a sync. If the write fails, the mark is part of the
    /// next commit.
    pub(super) fn write_mark(&mut self) {
        self.push_due_mark();
        // The next commit reports an error that lasts.
        let _ = self.write();
    }

    fn push<T: serde::Serialize>(&mut self, kind: FrameKind, body: &T) -> Lsn {
        self.push_due_mark();
        let sequence = self.next;
        self.key
            .push_frame(&mut self.unsynced, kind, sequence, body);
        self.next += 1;
        Lsn(sequence)
    }

    fn push_due_mark(&mut self) {
        if std::mem::take(&mut self.is_mark_due) {
            let offset = self.synced + self.unsynced.len() as u64;
            self.key.push_mark(&mut self.unsynced, offset, self.next);
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let offset = self.synced + self.written as u64;
        self.file
            .write_all_at(&self.unsynced[self.written..], offset)?;
        self.written = self.unsynced.len();
        Ok(())
    }
}

pub(super) fn log_name(number: u64) -> String {
    format!("log-{number}")
}
