//! The history file: a database that a separate thread writes, so that no decision waits for a
//! disk.
//!
//! A batch is one transaction. While one is being written, further changes accumulate in the
//! history. The queue to the thread therefore has one slot, and the limits of the history bound the
//! amount of unwritten changes.
//!
//! A file that cannot be read is renamed and reported, and the history starts empty: the resource
//! manager must start in any case.

use super::history::{Batch, Table};
use redb::{Database, DatabaseError, ReadableTable, TableDefinition};
use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Version of the tables and their entries. A file with another version is renamed and replaced by
/// an empty one.
pub const SCHEMA_VERSION: u64 = 6;
/// Maximum size of the database's page cache in bytes.
const CACHE_BYTES_MAX: usize = 8 << 20;
/// Minimum size in bytes at which the writer thread compacts the file.
const COMPACT_BYTES_MIN: u64 = 64 << 20;
/// Size in bytes at which the file is compacted at the latest. The content of the history is a
/// fraction of it.
pub const FILE_BYTES_MAX: u64 = 256 << 20;
/// Timeout for another process to close the file. The previous resource manager may have been
/// killed shortly before.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(1);
/// Poll interval while the file is in use, or while the last batch is being written.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout for the last batch when the store is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

const META: TableDefinition<&str, u64> = TableDefinition::new("sempa-rm");
const VERSION: &str = "version";

/// Why the history cannot be stored.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The directory cannot be created or used.
    #[error(
        "cannot use the directory {path} for the resource manager's history: {source}; no history is kept"
    )]
    Directory {
        path: PathBuf,
        source: std::io::Error,
    },
    /// Another process has the file open.
    #[error("{0} is in use by another resource manager; no history is kept")]
    InUse(PathBuf),
    /// The file cannot be read, and cannot be renamed either.
    #[error(
        "{path} cannot be read ({why}) and cannot be moved aside: {source}; no history is kept"
    )]
    CannotMoveAside {
        path: PathBuf,
        /// Why the file cannot be read.
        why: String,
        /// Why the file cannot be renamed.
        source: std::io::Error,
    },
    /// A new file cannot be created.
    #[error("cannot create {path}: {why}; no history is kept")]
    CannotCreate { path: PathBuf, why: String },
}

/// An opened file and its contents.
#[derive(Debug)]
pub struct OpenedHistory {
    /// Handle for writing to the file.
    pub store: HistoryFile,
    /// Stored entries as (table, key, value).
    pub entries: Vec<(Table, u64, Vec<u8>)>,
    /// Note that an unreadable file was renamed, with the reason.
    pub moved_aside: Option<String>,
}

/// Handle of the thread that writes the file.
#[derive(Debug)]
pub struct HistoryFile {
    batches: Option<SyncSender<Batch>>,
    errors: Receiver<String>,
    thread: Option<JoinHandle<()>>,
}

fn table_definition(sheet: Table) -> TableDefinition<'static, u64, &'static [u8]> {
    TableDefinition::new(match sheet {
        Table::LogPosition => "place",
        Table::Users => "users",
        Table::Jobs => "jobs",
        Table::Tasks => "tasks",
        Table::Decisions => "decisions",
        Table::Learned => "learned",
        Table::Hosts => "hosts",
        Table::Childless => "loners",
        Table::Drains => "drains",
        Table::Vacated => "parked",
    })
}

/// Why an existing file cannot be used.
enum OpenFailure {
    InUse,
    Unusable(String),
}

impl From<DatabaseError> for OpenFailure {
    fn from(error: DatabaseError) -> OpenFailure {
        match error {
            DatabaseError::DatabaseAlreadyOpen => OpenFailure::InUse,
            other => OpenFailure::Unusable(other.to_string()),
        }
    }
}

fn unusable<E: std::fmt::Display>(error: E) -> OpenFailure {
    OpenFailure::Unusable(error.to_string())
}

type Entries = Vec<(Table, u64, Vec<u8>)>;

/// Opens or creates the database and reads all its entries.
fn open_and_read(path: &Path) -> Result<(Database, Entries), OpenFailure> {
    // The file is created here with private permissions, because the database would create it
    // readable for everyone.
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
        .map_err(unusable)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(unusable)?;
    let db = Database::builder()
        .set_cache_size(CACHE_BYTES_MAX)
        .create(path)?;
    let begin = db.begin_write().map_err(unusable)?;
    {
        let mut meta = begin.open_table(META).map_err(unusable)?;
        let version = meta.get(VERSION).map_err(unusable)?.map(|v| v.value());
        match version {
            Some(SCHEMA_VERSION) => {}
            Some(other) => {
                return Err(OpenFailure::Unusable(format!(
                    "it is of version {other}, and this is {SCHEMA_VERSION}"
                )));
            }
            None => drop(meta.insert(VERSION, SCHEMA_VERSION).map_err(unusable)?),
        }
    }
    let mut entries = Vec::new();
    for sheet in Table::ALL {
        let table = begin
            .open_table(table_definition(sheet))
            .map_err(unusable)?;
        for entry in table.iter().map_err(unusable)? {
            let (key, value) = entry.map_err(unusable)?;
            entries.push((sheet, key.value(), value.value().to_vec()));
        }
    }
    begin.commit().map_err(unusable)?;
    Ok((db, entries))
}

/// Opens the database. Waits while another process uses it, up to [`IN_USE_TIMEOUT`]. If the
/// database code panics on a damaged file, that counts as an error.
fn open_and_read_guarded(path: &Path) -> Result<(Database, Entries), OpenFailure> {
    let until = Instant::now() + IN_USE_TIMEOUT;
    loop {
        let read = std::panic::catch_unwind(|| open_and_read(path))
            .unwrap_or_else(|_| Err(unusable("it is damaged")));
        match read {
            Err(OpenFailure::InUse) if Instant::now() < until => std::thread::sleep(POLL_INTERVAL),
            other => return other,
        }
    }
}

impl HistoryFile {
    /// Opens the history file `name` in a directory. Creates the directory if necessary.
    ///
    /// # Errors
    /// The history cannot be stored. A damaged file, or a file of another version, is not an error:
    /// it is renamed and replaced.
    pub fn open(dir: &Path, name: &str) -> Result<OpenedHistory, StoreError> {
        let path = dir.join(name);
        if !dir.is_dir() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|source| StoreError::Directory {
                path: dir.to_path_buf(),
                source,
            })?;
        }
        let mut moved_aside = None;
        let (db, entries) = match open_and_read_guarded(&path) {
            Ok(read) => read,
            Err(OpenFailure::InUse) => return Err(StoreError::InUse(path)),
            Err(OpenFailure::Unusable(why)) => {
                let aside = aside_path(&path);
                if let Err(source) = std::fs::rename(&path, &aside) {
                    return Err(StoreError::CannotMoveAside { path, why, source });
                }
                moved_aside = Some(format!(
                    "the resource manager's history in {} cannot be read ({why}); the file was renamed to {}, and the \
                     history starts empty",
                    path.display(),
                    aside.display()
                ));
                match open_and_read_guarded(&path) {
                    Ok(read) => read,
                    Err(OpenFailure::InUse) => return Err(StoreError::InUse(path)),
                    Err(OpenFailure::Unusable(why)) => {
                        return Err(StoreError::CannotCreate { path, why });
                    }
                }
            }
        };
        let (batches, queue) = sync_channel(1);
        let (complain, errors) = sync_channel(1);
        let thread = std::thread::spawn(move || run_writer(db, &path, &queue, &complain));
        Ok(OpenedHistory {
            store: HistoryFile {
                batches: Some(batches),
                errors,
                thread: Some(thread),
            },
            entries,
            moved_aside,
        })
    }

    /// Passes a batch to the writer thread.
    ///
    /// # Errors
    /// Returns the batch if the thread has not accepted the previous one. The caller must try
    /// again.
    pub fn write(&self, batch: Batch) -> Result<(), Batch> {
        let Some(batches) = &self.batches else {
            return Ok(());
        };
        match batches.try_send(batch) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(batch)) => Err(batch),
        }
    }

    /// Returns an error of the writer thread that was not returned before.
    pub fn take_error(&self) -> Option<String> {
        self.errors.try_recv().ok()
    }

    /// Passes the last batch to the writer thread and waits until it is written, at most two
    /// seconds.
    pub fn close(mut self, last: Batch) {
        if let Some(batches) = self.batches.take()
            && batches.send(last).is_ok()
        {
            drop(batches);
            let until = Instant::now() + CLOSE_TIMEOUT;
            while self.thread.as_ref().is_some_and(|t| !t.is_finished()) && Instant::now() < until {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

/// Returns the new path of a file that cannot be read. It contains the current time.
fn aside_path(path: &Path) -> PathBuf {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.broken-{now}"))
}

/// Runs in the writer thread: writes each batch in one transaction, until the handle is closed.
fn run_writer(
    mut db: Database,
    path: &Path,
    queue: &Receiver<Batch>,
    report_error: &SyncSender<String>,
) {
    let (mut told, mut compact_at) = (false, COMPACT_BYTES_MIN);
    while let Ok(batch) = queue.recv() {
        match write(&db, &batch) {
            Ok(()) => {
                told = false;
                compact_at = compact_if_large(&mut db, path, compact_at);
            }
            // An error that follows another one is not reported. Writing continues with the next
            // batch.
            Err(_) if told => {}
            Err(error) => {
                told = true;
                drop(report_error.try_send(error.to_string()));
            }
        }
    }
}

/// Compacts the file if it is larger than `at` bytes. Returns the size at which the next compaction
/// is due.
fn compact_if_large(db: &mut Database, path: &Path, at: u64) -> u64 {
    let length = || path.metadata().map_or(0, |meta| meta.len());
    if length() <= at {
        return at;
    }
    // A failed compaction is ignored, because the file can be written without it.
    drop(db.compact());
    (length() / 2 * 3).clamp(COMPACT_BYTES_MIN, FILE_BYTES_MAX)
}

#[expect(
    clippy::result_large_err,
    reason = "one for a batch that could not be written, told at once"
)]
fn write(db: &Database, batch: &Batch) -> Result<(), redb::Error> {
    let begin = db.begin_write()?;
    for sheet in Table::ALL {
        let changes: Vec<_> = batch.iter().filter(|c| c.table == sheet).collect();
        if changes.is_empty() {
            continue;
        }
        let mut table = begin.open_table(table_definition(sheet))?;
        for change in changes {
            match &change.value {
                Some(value) => drop(table.insert(change.key, value.as_slice())?),
                None => drop(table.remove(change.key)?),
            }
        }
    }
    begin.commit()?;
    Ok(())
}
