//! The history file: a database that a separate thread writes, so that no decision waits for a
//! disk.
//!
//! A batch is one transaction. While a batch is being written, further changes accumulate in the
//! history. The queue to the thread therefore has one slot, and the limits of the history bound the
//! amount of unwritten changes.
//!
//! A file that cannot be read is renamed and reported. The history then starts empty, because the
//! resource manager must start in any case.

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
/// Minimum size in bytes above which the writer thread compacts the file.
const COMPACTION_BYTES_MIN: u64 = 64 << 20;
/// Size in bytes above which the file is compacted in any case. The content of the history is a
/// fraction of this size.
pub const FILE_BYTES_MAX: u64 = 256 << 20;
/// Timeout for another process to close the file. The previous resource manager may have been
/// killed shortly before.
const IN_USE_TIMEOUT: Duration = Duration::from_secs(1);
/// Poll interval while the file is in use, or while the last batch is being written.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Timeout for the last batch when the store is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

const META_TABLE: TableDefinition<&str, u64> = TableDefinition::new("sempa-rm");
const VERSION_KEY: &str = "version";

/// Reason why the history cannot be stored.
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
    /// The file cannot be read, and renaming it failed.
    #[error(
        "{path} cannot be read ({why}) and cannot be moved aside: {source}; no history is kept"
    )]
    CannotRename {
        path: PathBuf,
        /// Reason why the file cannot be read.
        why: String,
        /// Reason why the file cannot be renamed.
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
    pub file: HistoryFile,
    /// Stored entries as (table, key, value).
    pub entries: Vec<(Table, u64, Vec<u8>)>,
    /// Note for the event log that an unreadable file was renamed, with the reason; `None` if the
    /// file was read.
    pub rename_note: Option<String>,
}

/// Handle of the writer thread, which writes the file.
#[derive(Debug)]
pub struct HistoryFile {
    batch_sender: Option<SyncSender<Batch>>,
    error_receiver: Receiver<String>,
    thread: Option<JoinHandle<()>>,
}

fn table_definition(table_id: Table) -> TableDefinition<'static, u64, &'static [u8]> {
    TableDefinition::new(match table_id {
        Table::LogPosition => "place",
        Table::Users => "users",
        Table::Jobs => "jobs",
        Table::Tasks => "tasks",
        Table::Decisions => "decisions",
        Table::LearnedValues => "learned",
        Table::Hosts => "hosts",
        Table::ChildlessTasks => "loners",
        Table::Drains => "drains",
        Table::VacatedJobs => "parked",
    })
}

/// Reason why an existing file cannot be used.
enum OpenError {
    InUse,
    Unusable(String),
}

impl From<DatabaseError> for OpenError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::DatabaseAlreadyOpen => Self::InUse,
            other => Self::Unusable(other.to_string()),
        }
    }
}

fn unusable_file<E: std::fmt::Display>(error: E) -> OpenError {
    OpenError::Unusable(error.to_string())
}

type StoredEntries = Vec<(Table, u64, Vec<u8>)>;

/// Opens or creates the database and reads all its entries.
fn open_and_read(path: &Path) -> Result<(Database, StoredEntries), OpenError> {
    // The file is created before the database opens it, because the database would create a file
    // that everyone can read.
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
        .map_err(unusable_file)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(unusable_file)?;
    let db = Database::builder()
        .set_cache_size(CACHE_BYTES_MAX)
        .create(path)?;
    let transaction = db.begin_write().map_err(unusable_file)?;
    {
        let mut meta = transaction.open_table(META_TABLE).map_err(unusable_file)?;
        let version = meta
            .get(VERSION_KEY)
            .map_err(unusable_file)?
            .map(|v| v.value());
        match version {
            Some(SCHEMA_VERSION) => {}
            Some(other) => {
                return Err(OpenError::Unusable(format!(
                    "it is of version {other}, and this is {SCHEMA_VERSION}"
                )));
            }
            None => drop(
                meta.insert(VERSION_KEY, SCHEMA_VERSION)
                    .map_err(unusable_file)?,
            ),
        }
    }
    let mut entries = Vec::new();
    for table_id in Table::ALL {
        let table = transaction
            .open_table(table_definition(table_id))
            .map_err(unusable_file)?;
        for entry in table.iter().map_err(unusable_file)? {
            let (key, value) = entry.map_err(unusable_file)?;
            entries.push((table_id, key.value(), value.value().to_vec()));
        }
    }
    transaction.commit().map_err(unusable_file)?;
    Ok((db, entries))
}

/// Opens the database. Waits while another process uses it, at most for [`IN_USE_TIMEOUT`]. A panic
/// of the database code on a damaged file counts as an error.
fn open_and_read_guarded(path: &Path) -> Result<(Database, StoredEntries), OpenError> {
    let deadline = Instant::now() + IN_USE_TIMEOUT;
    loop {
        let open_result = std::panic::catch_unwind(|| open_and_read(path))
            .unwrap_or_else(|_| Err(unusable_file("it is damaged")));
        match open_result {
            Err(OpenError::InUse) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
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
            let create_result = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            create_result.map_err(|source| StoreError::Directory {
                path: dir.to_path_buf(),
                source,
            })?;
        }
        let mut note = None;
        let (db, entries) = match open_and_read_guarded(&path) {
            Ok(opened_database) => opened_database,
            Err(OpenError::InUse) => return Err(StoreError::InUse(path)),
            Err(OpenError::Unusable(why)) => {
                let new_path = renamed_path(&path);
                if let Err(source) = std::fs::rename(&path, &new_path) {
                    return Err(StoreError::CannotRename { path, why, source });
                }
                note = Some(format!(
                    "the resource manager's history in {} cannot be read ({why}); the file was renamed to {}, and the \
                     history starts empty",
                    path.display(),
                    new_path.display()
                ));
                match open_and_read_guarded(&path) {
                    Ok(opened_database) => opened_database,
                    Err(OpenError::InUse) => return Err(StoreError::InUse(path)),
                    Err(OpenError::Unusable(why)) => {
                        return Err(StoreError::CannotCreate { path, why });
                    }
                }
            }
        };
        let (sender, queue) = sync_channel(1);
        let (error_sender, error_queue) = sync_channel(1);
        let thread = std::thread::spawn(move || run_writer(db, &path, &queue, &error_sender));
        Ok(OpenedHistory {
            file: Self {
                batch_sender: Some(sender),
                error_receiver: error_queue,
                thread: Some(thread),
            },
            entries,
            rename_note: note,
        })
    }

    /// Sends a batch to the writer thread.
    ///
    /// # Errors
    ///
    /// Returns the batch if the thread has not accepted the previous one. The caller must try again
    /// later.
    pub fn try_send_batch(&self, batch: Batch) -> Result<(), Batch> {
        let Some(sender) = &self.batch_sender else {
            return Ok(());
        };
        match sender.try_send(batch) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(batch)) => Err(batch),
        }
    }

    /// Returns an error of the writer thread that was not returned before; `None` if there is none.
    pub fn take_error(&self) -> Option<String> {
        self.error_receiver.try_recv().ok()
    }

    /// Sends the last batch to the writer thread. Waits until it is written, at most for
    /// `CLOSE_TIMEOUT`.
    pub fn write_and_close(mut self, final_batch: Batch) {
        if let Some(sender) = self.batch_sender.take()
            && sender.send(final_batch).is_ok()
        {
            drop(sender);
            let deadline = Instant::now() + CLOSE_TIMEOUT;
            while self.thread.as_ref().is_some_and(|t| !t.is_finished())
                && Instant::now() < deadline
            {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}

/// Returns the path to which a file that cannot be read is renamed. The path contains the current
/// time.
fn renamed_path(path: &Path) -> PathBuf {
    let now_ms = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.broken-{now_ms}"))
}

/// Runs in the writer thread: writes each batch in one transaction until the handle is closed.
fn run_writer(
    mut db: Database,
    path: &Path,
    queue: &Receiver<Batch>,
    error_sender: &SyncSender<String>,
) {
    let (mut error_reported, mut compaction_limit_bytes) = (false, COMPACTION_BYTES_MIN);
    while let Ok(batch) = queue.recv() {
        match write(&db, &batch) {
            Ok(()) => {
                error_reported = false;
                compaction_limit_bytes = compact_if_large(&mut db, path, compaction_limit_bytes);
            }
            // Of several errors in a row, only the first is reported. Writing continues with the
            // next batch.
            Err(_) if error_reported => {}
            Err(error) => {
                error_reported = true;
                drop(error_sender.try_send(error.to_string()));
            }
        }
    }
}

/// Compacts the file if it is larger than `size_limit_bytes` bytes. Returns the size in bytes above
/// which the next compaction is due.
fn compact_if_large(db: &mut Database, path: &Path, size_limit_bytes: u64) -> u64 {
    let file_bytes = || path.metadata().map_or(0, |meta| meta.len());
    if file_bytes() <= size_limit_bytes {
        return size_limit_bytes;
    }
    // An error of the compaction is ignored, because the file can be written without it.
    drop(db.compact());
    (file_bytes() / 2 * 3).clamp(COMPACTION_BYTES_MIN, FILE_BYTES_MAX)
}

#[expect(
    clippy::result_large_err,
    reason = "one for a batch that could not be written, told at once"
)]
fn write(db: &Database, batch: &Batch) -> Result<(), redb::Error> {
    let transaction = db.begin_write()?;
    for table_id in Table::ALL {
        let changes: Vec<_> = batch.iter().filter(|c| c.table == table_id).collect();
        if changes.is_empty() {
            continue;
        }
        let mut table = transaction.open_table(table_definition(table_id))?;
        for change in changes {
            match &change.value {
                Some(value) => drop(table.insert(change.key, value.as_slice())?),
                None => drop(table.remove(change.key)?),
            }
        }
    }
    transaction.commit()?;
    Ok(())
}
