//! The history file: a database that a separate thread writes, so that no decision waits for a
//! disk.
//!
//! A batch is one transaction. While one is being written, further changes accumulate in the
//! history. The queue between them therefore has one slot, and the amount of unwritten changes is
//! bounded by the history's own limits.
//!
//! A file that cannot be read is moved aside and reported: running without old history is better
//! than not running.

use super::books::{Batch, Sheet};
use redb::{Database, DatabaseError, ReadableTable, TableDefinition};
use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Version of the tables and their entries. A file with another version is moved aside.
pub const SCHEMA_VERSION: u64 = 6;
/// Maximum size of the database's page cache.
const CACHE_BYTES_MAX: usize = 8 << 20;
/// Size above which the writer thread compacts the file.
const COMPACT_BYTES_MIN: u64 = 64 << 20;
/// Maximum size of the file, except until the next compaction. The history's contents are a
/// fraction of it.
pub const FILE_BYTES_MAX: u64 = 256 << 20;
/// Time for which another process may still use the file: the previous resource manager may just
/// have been killed.
const IN_USE_MAX: Duration = Duration::from_secs(1);
/// Interval between checks whether the file is still in use.
const IN_USE_PAUSE: Duration = Duration::from_millis(20);
/// Time that closing waits for the last batch.
const LAST_BATCH_MAX: Duration = Duration::from_secs(2);

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
    /// The file can neither be read nor moved aside.
    #[error(
        "{path} cannot be read ({why}) and cannot be moved aside: {source}; no history is kept"
    )]
    Stuck {
        path: PathBuf,
        /// Why it cannot be read.
        why: String,
        /// Why it cannot be moved aside.
        source: std::io::Error,
    },
    /// A new file cannot be created.
    #[error("cannot create {path}: {why}; no history is kept")]
    New { path: PathBuf, why: String },
}

/// An opened file and its contents.
#[derive(Debug)]
pub struct Opened {
    /// Handle for writing to the file.
    pub store: Store,
    /// Entries by table and key.
    pub entries: Vec<(Sheet, u64, Vec<u8>)>,
    /// Note that an unreadable file was moved aside, and why.
    pub moved_aside: Option<String>,
}

/// Handle of the writer thread.
#[derive(Debug)]
pub struct Store {
    batches: Option<SyncSender<Batch>>,
    errors: Receiver<String>,
    thread: Option<JoinHandle<()>>,
}

fn table(sheet: Sheet) -> TableDefinition<'static, u64, &'static [u8]> {
    TableDefinition::new(match sheet {
        Sheet::Place => "place",
        Sheet::Users => "users",
        Sheet::Jobs => "jobs",
        Sheet::Tasks => "tasks",
        Sheet::Decisions => "decisions",
        Sheet::Learned => "learned",
        Sheet::Hosts => "hosts",
        Sheet::Loners => "loners",
        Sheet::Drains => "drains",
        Sheet::Parked => "parked",
    })
}

/// Why an existing file cannot be used.
enum Broken {
    InUse,
    Why(String),
}

impl From<DatabaseError> for Broken {
    fn from(error: DatabaseError) -> Broken {
        match error {
            DatabaseError::DatabaseAlreadyOpen => Broken::InUse,
            other => Broken::Why(other.to_string()),
        }
    }
}

fn why<E: std::fmt::Display>(error: E) -> Broken {
    Broken::Why(error.to_string())
}

type Entries = Vec<(Sheet, u64, Vec<u8>)>;

/// Opens or creates the database and reads all of it.
fn read(path: &Path) -> Result<(Database, Entries), Broken> {
    // Created here first, because the database would make it readable for everyone.
    OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)
        .map_err(why)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(why)?;
    let db = Database::builder()
        .set_cache_size(CACHE_BYTES_MAX)
        .create(path)?;
    let begin = db.begin_write().map_err(why)?;
    {
        let mut meta = begin.open_table(META).map_err(why)?;
        let version = meta.get(VERSION).map_err(why)?.map(|v| v.value());
        match version {
            Some(SCHEMA_VERSION) => {}
            Some(other) => {
                return Err(Broken::Why(format!(
                    "it is of version {other}, and this is {SCHEMA_VERSION}"
                )));
            }
            None => drop(meta.insert(VERSION, SCHEMA_VERSION).map_err(why)?),
        }
    }
    let mut entries = Vec::new();
    for sheet in Sheet::ALL {
        let table = begin.open_table(table(sheet)).map_err(why)?;
        for entry in table.iter().map_err(why)? {
            let (key, value) = entry.map_err(why)?;
            entries.push((sheet, key.value(), value.value().to_vec()));
        }
    }
    begin.commit().map_err(why)?;
    Ok((db, entries))
}

/// Opens the database, waiting for a previous user of the file. A panic of the database code on a
/// damaged file counts as an error.
fn read_guarded(path: &Path) -> Result<(Database, Entries), Broken> {
    let until = Instant::now() + IN_USE_MAX;
    loop {
        let read =
            std::panic::catch_unwind(|| read(path)).unwrap_or_else(|_| Err(why("it is damaged")));
        match read {
            Err(Broken::InUse) if Instant::now() < until => std::thread::sleep(IN_USE_PAUSE),
            other => return other,
        }
    }
}

impl Store {
    /// Opens the file `name` in a directory, which is created if necessary.
    ///
    /// # Errors
    /// The history cannot be stored. A damaged or foreign file is not an error: it is moved aside.
    pub fn open(dir: &Path, name: &str) -> Result<Opened, StoreError> {
        let path = dir.join(name);
        if !dir.is_dir() {
            let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
            made.map_err(|source| StoreError::Directory {
                path: dir.to_path_buf(),
                source,
            })?;
        }
        let mut moved_aside = None;
        let (db, entries) = match read_guarded(&path) {
            Ok(read) => read,
            Err(Broken::InUse) => return Err(StoreError::InUse(path)),
            Err(Broken::Why(why)) => {
                let aside = aside(&path);
                if let Err(source) = std::fs::rename(&path, &aside) {
                    return Err(StoreError::Stuck { path, why, source });
                }
                moved_aside = Some(format!(
                    "the resource manager's history in {} cannot be read ({why}); the file was renamed to {}, and the \
                     history starts empty",
                    path.display(),
                    aside.display()
                ));
                match read_guarded(&path) {
                    Ok(read) => read,
                    Err(Broken::InUse) => return Err(StoreError::InUse(path)),
                    Err(Broken::Why(why)) => return Err(StoreError::New { path, why }),
                }
            }
        };
        let (batches, queue) = sync_channel(1);
        let (complain, errors) = sync_channel(1);
        let thread = std::thread::spawn(move || keep(db, &path, &queue, &complain));
        Ok(Opened {
            store: Store {
                batches: Some(batches),
                errors,
                thread: Some(thread),
            },
            entries,
            moved_aside,
        })
    }

    /// Hands a batch to the writer.
    ///
    /// # Errors
    /// Returns the batch if the previous one is still being written; the caller must try again.
    pub fn write(&self, batch: Batch) -> Result<(), Batch> {
        let Some(batches) = &self.batches else {
            return Ok(());
        };
        match batches.try_send(batch) {
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(batch)) => Err(batch),
        }
    }

    /// Returns an error of writing since the last call.
    pub fn error(&self) -> Option<String> {
        self.errors.try_recv().ok()
    }

    /// Writes the last batch and closes the file.
    pub fn close(mut self, last: Batch) {
        if let Some(batches) = self.batches.take()
            && batches.send(last).is_ok()
        {
            drop(batches);
            let until = Instant::now() + LAST_BATCH_MAX;
            while self.thread.as_ref().is_some_and(|t| !t.is_finished()) && Instant::now() < until {
                std::thread::sleep(IN_USE_PAUSE);
            }
        }
    }
}

/// Returns the path to which an unusable file is moved: in the same directory, with the time.
fn aside(path: &Path) -> PathBuf {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{name}.broken-{now}"))
}

/// The writer thread: one transaction for each batch.
fn keep(mut db: Database, path: &Path, queue: &Receiver<Batch>, complain: &SyncSender<String>) {
    let (mut told, mut compact_at) = (false, COMPACT_BYTES_MIN);
    while let Ok(batch) = queue.recv() {
        match write(&db, &batch) {
            Ok(()) => {
                told = false;
                compact_at = compacted(&mut db, path, compact_at);
            }
            // A repeated error is not reported again; later batches are still tried.
            Err(_) if told => {}
            Err(error) => {
                told = true;
                drop(complain.try_send(error.to_string()));
            }
        }
    }
}

/// Compacts the file if it is larger than `at`. Returns the size above which the next compaction is
/// worthwhile.
fn compacted(db: &mut Database, path: &Path, at: u64) -> u64 {
    let length = || path.metadata().map_or(0, |meta| meta.len());
    if length() <= at {
        return at;
    }
    // If the compaction fails, writing continues, and a later one may succeed.
    drop(db.compact());
    (length() / 2 * 3).clamp(COMPACT_BYTES_MIN, FILE_BYTES_MAX)
}

#[expect(
    clippy::result_large_err,
    reason = "one for a batch that could not be written, told at once"
)]
fn write(db: &Database, batch: &Batch) -> Result<(), redb::Error> {
    let begin = db.begin_write()?;
    for sheet in Sheet::ALL {
        let changes: Vec<_> = batch.iter().filter(|c| c.sheet == sheet).collect();
        if changes.is_empty() {
            continue;
        }
        let mut table = begin.open_table(table(sheet))?;
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
