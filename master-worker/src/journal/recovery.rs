//! Opening a folder: finds the newest complete state, cuts an incomplete end, and removes what is
//! left of older states.
//!
//! The state is the newest snapshot `B` (none before the first) and the logs `B`, `B + 1`, …
//! without a gap. There is more than one log while a snapshot is written, and after one has failed.

use super::Settings;
use super::error::{Damage, OpenError};
use super::format::{FileKind, FrameReader, Header, HeaderError, RunId};
use super::log::{FIRST_SEQUENCE, LogContents, LogError, LogWriter, TruncatedTail, log_name};
use super::mirror::Mirror;
use super::record::{FailedAttempt, QuarantinedTask, Record, StoredTask};
use super::snapshot::{SnapshotContents, SnapshotError, read_snapshot, snapshot_name};
use super::storage::{Storage, TEMPORARY_PREFIX};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::io;

/// Number of the first log of a run.
const FIRST_FILE: u64 = 1;

/// What was in the folder before it was opened.
#[derive(Debug)]
pub enum Previous {
    /// There was no record. The folder may have had an empty journal.
    Nothing,
    /// A run that goes on.
    Unfinished(Box<Recovered>),
    /// A run that was complete. Its files were removed, and a new run was begun.
    Finished,
}

/// The recorded part of a run: first the tables, then `records` in order.
#[derive(Debug, Default)]
pub struct Recovered {
    /// The driver's state in the last snapshot; `None` if there was none.
    pub driver_state: Option<Bytes>,
    /// The counters in the last snapshot; empty if there was none.
    pub counters: Bytes,
    /// Open tasks of the last snapshot, in the order of key, then position, then id.
    pub open_tasks: Vec<StoredTask>,
    /// Failed attempts of these open tasks. Those of one task are in the order of the records.
    pub failed_attempts: Vec<FailedAttempt>,
    pub quarantined: Vec<QuarantinedTask>,
    /// The records after the snapshot.
    pub records: Vec<Record>,
    pub truncated: Option<TruncatedTail>,
}

/// An open journal before its threads run.
pub(super) struct Opened {
    pub(super) log: LogWriter,
    /// Bytes of all logs since the last snapshot.
    pub(super) log_bytes: u64,
    pub(super) mirror: Mirror,
    pub(super) run: RunId,
    pub(super) generation: u64,
    pub(super) previous: Previous,
}

#[derive(Default)]
struct FileNames {
    logs: BTreeSet<u64>,
    snapshots: BTreeSet<u64>,
    temporary: Vec<String>,
}

/// The files of a run that was not finished.
struct Chain {
    snapshot: Option<SnapshotContents>,
    /// The logs before the last one, in order.
    earlier: Vec<LogContents>,
    last: LogContents,
}

/// Makes errors that name the folder and its files.
struct Context<'a> {
    storage: &'a dyn Storage,
    settings: &'a Settings,
}

/// Opens the folder. Afterwards the new generation is durable.
///
/// # Errors
/// The reason why the run cannot go on. Files change only after everything was read.
pub(super) fn open(storage: &dyn Storage, settings: &Settings) -> Result<Opened, OpenError> {
    let context = Context { storage, settings };
    let names = FileNames::list(storage).map_err(context.io("list the folder"))?;
    let Some(&last_number) = names.logs.last() else {
        return context.open_without_log(&names);
    };
    let last = context.read_log(last_number, None)?;
    context.check_owner(&last.header)?;
    if last.is_finished() {
        remove_finished(storage).map_err(context.io("remove a finished run"))?;
        return context.begin(Previous::Finished);
    }
    let chain = context.read_chain(&names, last)?;
    context.go_on(names, chain)
}

/// Removes all files of a finished run. The log with the last record goes last, so that the next
/// open recognizes the run as finished when this is interrupted.
///
/// # Errors
/// A call fails. The call may be repeated.
pub(super) fn remove_finished(storage: &dyn Storage) -> io::Result<()> {
    let mut names = FileNames::list(storage)?;
    let last = names.logs.pop_last();
    names.remove_all(storage)?;
    storage.sync()?;
    if let Some(last) = last {
        storage.remove(&log_name(last))?;
        storage.sync()?;
    }
    Ok(())
}

/// Removes the files that a snapshot has replaced.
///
/// # Errors
/// A call fails. The call may be repeated.
pub(super) fn remove_before(storage: &dyn Storage, base: u64) -> io::Result<()> {
    let mut names = FileNames::list(storage)?;
    names.logs = names.logs.range(..base).copied().collect();
    names.snapshots = names.snapshots.range(..base).copied().collect();
    // Another thread may write a temporary file.
    names.temporary.clear();
    names.remove_all(storage)
}

impl FileNames {
    fn list(storage: &dyn Storage) -> io::Result<Self> {
        let mut names = Self::default();
        for name in storage.list()? {
            let number_after = |prefix| {
                let number: u64 = name.strip_prefix(prefix)?.parse().ok()?;
                (name == format!("{prefix}{number}")).then_some(number)
            };
            if let Some(number) = number_after("log-") {
                names.logs.insert(number);
            } else if let Some(number) = number_after("snapshot-") {
                names.snapshots.insert(number);
            } else if name.starts_with(TEMPORARY_PREFIX) {
                names.temporary.push(name);
            }
        }
        Ok(names)
    }

    fn remove_all(&self, storage: &dyn Storage) -> io::Result<()> {
        let logs = self.logs.iter().map(|number| log_name(*number));
        let snapshots = self.snapshots.iter().map(|number| snapshot_name(*number));
        let temporary = self.temporary.iter().cloned();
        let mut all_files = temporary.chain(snapshots).chain(logs);
        all_files.try_for_each(|name| storage.remove(&name))
    }
}

impl Context<'_> {
    fn open_without_log(&self, names: &FileNames) -> Result<Opened, OpenError> {
        if let Some(number) = names.snapshots.last() {
            return Err(self.missing(log_name(*number)));
        }
        if let Some(expected) = self.settings.resume {
            let removal = self.storage.remove_folder();
            removal.map_err(self.io("remove the empty folder"))?;
            let dir = self.storage.path().to_path_buf();
            return Err(OpenError::NoSuchRun { dir, expected });
        }
        names
            .remove_all(self.storage)
            .map_err(self.io("remove incomplete files"))?;
        self.begin(Previous::Nothing)
    }

    /// Begins a new run in a folder without files of a journal.
    fn begin(&self, previous: Previous) -> Result<Opened, OpenError> {
        let run = self.settings.new_run;
        let header = Header {
            kind: FileKind::Log,
            number: FIRST_FILE,
            run,
            program: self.settings.program.clone(),
            first: FIRST_SEQUENCE,
        };
        let created = LogWriter::create(self.storage, &header);
        let mut log = created.map_err(self.io("create the log"))?;
        let generation = 1;
        log.push_opened(generation);
        log.commit().map_err(self.io("write the log"))?;
        Ok(Opened {
            log_bytes: log.synced_bytes(),
            log,
            mirror: Mirror::default(),
            run,
            generation,
            previous,
        })
    }

    fn read_chain(&self, names: &FileNames, last: LogContents) -> Result<Chain, OpenError> {
        let base = names.snapshots.last().copied();
        let first_log = base.unwrap_or(FIRST_FILE);
        let mut numbers = first_log..=last.header.number;
        if numbers.is_empty() {
            return Err(self.missing(log_name(first_log)));
        }
        if let Some(number) = numbers.find(|number| !names.logs.contains(number)) {
            return Err(self.missing(log_name(number)));
        }
        let snapshot = base.map(|number| self.read_snapshot(number)).transpose()?;
        let mut earlier: Vec<LogContents> = Vec::new();
        for number in (first_log..last.header.number).rev() {
            let successor = earlier.last().unwrap_or(&last);
            let log = self.read_log(number, Some(successor.header.first))?;
            self.check_same_run(&log.header, &last.header, &log_name(number))?;
            earlier.push(log);
        }
        earlier.reverse();
        let first_header = &earlier.first().unwrap_or(&last).header;
        let expected_first = snapshot.as_ref().map_or(FIRST_SEQUENCE, |s| s.header.first);
        if first_header.first != expected_first {
            let what = "the log does not continue the snapshot";
            return Err(self.corrupt(log_name(first_log), Damage { offset: 0, what }));
        }
        if let Some(snapshot) = &snapshot {
            let name = snapshot_name(snapshot.header.number);
            self.check_same_run(&snapshot.header, &last.header, &name)?;
        }
        Ok(Chain {
            snapshot,
            earlier,
            last,
        })
    }

    /// Makes the folder ready for the next records.
    fn go_on(&self, mut names: FileNames, mut chain: Chain) -> Result<Opened, OpenError> {
        // The names of the files that were read may be in the system's memory only.
        self.storage.sync().map_err(self.io("sync the folder"))?;
        let base = chain
            .snapshot
            .as_ref()
            .map_or(FIRST_FILE, |s| s.header.number);
        names.logs.retain(|number| *number < base);
        names.snapshots.retain(|number| *number < base);
        let removal = names.remove_all(self.storage);
        removal.map_err(self.io("remove files of an older state"))?;

        let run = chain.last.header.run;
        let truncated = chain.last.truncated.clone();
        let generation = 1 + chain.last_generation();
        let records = chain.take_records();
        let earlier_bytes: u64 = chain.earlier.iter().map(LogContents::bytes).sum();
        let resumed = LogWriter::resume(self.storage, chain.last);
        let mut log = resumed.map_err(self.io("cut the incomplete end of the log"))?;
        log.push_opened(generation);
        log.commit().map_err(self.io("write the log"))?;

        let has_content = chain.snapshot.is_some() || !records.is_empty();
        let mut recovered = Recovered {
            records,
            truncated,
            ..Recovered::default()
        };
        if let Some(snapshot) = chain.snapshot {
            recovered.driver_state = Some(snapshot.state.driver_state);
            recovered.counters = snapshot.state.counters;
            recovered.open_tasks = snapshot.open_tasks;
            recovered.failed_attempts = snapshot.failed_attempts;
            recovered.quarantined = snapshot.quarantined;
        }
        Ok(Opened {
            log_bytes: earlier_bytes + log.synced_bytes(),
            log,
            mirror: recovered.to_mirror(),
            run,
            generation,
            previous: if has_content {
                Previous::Unfinished(Box::new(recovered))
            } else {
                Previous::Nothing
            },
        })
    }

    fn read_log(&self, number: u64, end: Option<u64>) -> Result<LogContents, OpenError> {
        let name = log_name(number);
        LogContents::read(self.storage, number, end).map_err(|error| match error {
            LogError::Header(error) => self.header_error(&name, error),
            LogError::Damaged(damage) => self.corrupt(name, damage),
        })
    }

    fn read_snapshot(&self, number: u64) -> Result<SnapshotContents, OpenError> {
        let name = snapshot_name(number);
        let reader = self.storage.reader(&name);
        let reader = reader.map_err(self.io("open a snapshot"))?;
        let (header, frames) =
            FrameReader::open(reader).map_err(|error| self.header_error(&name, error))?;
        if header.kind != FileKind::Snapshot || header.number != number {
            let what = "the file has the name of another file of the journal";
            return Err(self.corrupt(name, Damage { offset: 0, what }));
        }
        read_snapshot(header, frames).map_err(|error| match error {
            SnapshotError::Io(cause) => self.io("read a snapshot")(cause),
            SnapshotError::Damaged(damage) => self.corrupt(name, damage),
        })
    }

    fn check_owner(&self, header: &Header) -> Result<(), OpenError> {
        let dir = self.storage.path().to_path_buf();
        if header.program != self.settings.program {
            return Err(OpenError::OtherProgram {
                dir,
                found: header.program.clone(),
                expected: self.settings.program.clone(),
            });
        }
        match self.settings.resume {
            Some(expected) if expected != header.run => Err(OpenError::OtherRun {
                dir,
                found: header.run,
                expected,
            }),
            _ => Ok(()),
        }
    }

    fn check_same_run(&self, header: &Header, last: &Header, name: &str) -> Result<(), OpenError> {
        if header.run == last.run && header.program == last.program {
            return Ok(());
        }
        let what = "the file belongs to another run";
        Err(self.corrupt(name.to_string(), Damage { offset: 0, what }))
    }

    fn header_error(&self, name: &str, error: HeaderError) -> OpenError {
        let file = self.storage.path().join(name);
        match error {
            HeaderError::Io(cause) => self.io("read a file of the journal")(cause),
            HeaderError::NotAJournal => OpenError::NotAJournal { file },
            HeaderError::Version(found) => OpenError::FormatVersion { file, found },
            HeaderError::Damaged => OpenError::Corrupt {
                file,
                offset: 0,
                what: "the header is damaged",
            },
        }
    }

    fn corrupt(&self, name: String, damage: Damage) -> OpenError {
        OpenError::Corrupt {
            file: self.storage.path().join(name),
            offset: damage.offset,
            what: damage.what,
        }
    }

    fn missing(&self, name: String) -> OpenError {
        let file = self.storage.path().join(name);
        OpenError::MissingFile { file }
    }

    fn io(&self, action: &'static str) -> impl Fn(io::Error) -> OpenError {
        let dir = self.storage.path().to_path_buf();
        move |cause| OpenError::Io {
            dir: dir.clone(),
            action,
            cause,
        }
    }
}

impl Chain {
    /// Returns the largest generation in the files; 0 if the journal was never opened completely.
    fn last_generation(&self) -> u64 {
        let in_snapshot = self.snapshot.as_ref().map_or(0, |s| s.state.generation);
        let logs = self.earlier.iter().chain([&self.last]);
        logs.fold(in_snapshot, |max, log| max.max(log.generation))
    }

    fn take_records(&mut self) -> Vec<Record> {
        let logs = self.earlier.iter_mut().chain([&mut self.last]);
        logs.flat_map(|log| std::mem::take(&mut log.records))
            .collect()
    }
}

impl Recovered {
    fn to_mirror(&self) -> Mirror {
        let mut mirror = Mirror::default();
        mirror.add_tasks(&self.open_tasks);
        for failed in &self.failed_attempts {
            mirror.add_failed_attempt(failed.clone());
        }
        for quarantined in &self.quarantined {
            mirror.add_quarantined(quarantined.clone());
        }
        self.records.iter().for_each(|record| mirror.apply(record));
        mirror
    }
}
