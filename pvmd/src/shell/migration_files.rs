//! Small files of migrations: the resume tokens that resume quiesced libraries, and the durable
//! record of committed migrations.

use super::input::{Input, InputSender};
use pvmd_machine::io::Event;
use sempa_proto::frame::to_bytes;
use sempa_proto::migration::Failure;
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::task::ResumeToken;
use sempa_proto::{HostId, MigrationId, Tid};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Writes the migration files of one runtime directory.
pub(crate) struct MigrationFiles {
    record_path: PathBuf,
    inputs: InputSender,
    /// Serializes writers of the record.
    record_lock: Arc<Mutex<()>>,
    /// Tokens that could not be written yet.
    pending_tokens: PendingTokens,
}

/// Size limit of the record. A full record is retained under another name until the next record is
/// full.
///
/// No daemon reads the record: tasks end with their master, and the next master removes it. It
/// shows people where tasks were when a master was killed.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// Interval between attempts to write a token; short because a task waits for the token.
const TOKEN_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Contents of the tokens that must still be written, by path.
type PendingTokens = Arc<Mutex<BTreeMap<PathBuf, Vec<u8>>>>;

impl MigrationFiles {
    pub(crate) fn new(place: &RuntimePaths, inputs: InputSender) -> MigrationFiles {
        MigrationFiles {
            record_path: place.migration_log(),
            inputs,
            record_lock: Arc::default(),
            pending_tokens: PendingTokens::default(),
        }
    }

    /// Appends one committed migration to the record and syncs it. Reports
    /// [`Event::MigrationRecorded`].
    pub(crate) fn record(&self, migration: MigrationId, tid: Tid, to: HostId) {
        let (path, inputs, turn) = (
            self.record_path.clone(),
            self.inputs.clone(),
            self.record_lock.clone(),
        );
        let line = format!("{migration} {tid} {}\n", to.index());
        tokio::task::spawn_blocking(move || {
            let _in_span = tracing::info_span!("migration", id = %migration).entered();
            let result = {
                let _turn = turn.lock().unwrap_or_else(|e| e.into_inner());
                append_rotating(&path, &line, RECORD_BYTES_MAX).map_err(|e| {
                    Failure::Io(format!(
                        "cannot record the migration in {}: {e}",
                        path.display()
                    ))
                })
            };
            let _ =
                inputs.blocking_send(Input::Event(Event::MigrationRecorded { migration, result }));
        });
    }

    /// Writes a token atomically: a reader sees all of it or nothing.
    ///
    /// The file is a few bytes in a local directory, so it is written in the calling thread; this
    /// keeps tokens and their removal in order. If the file system is full, the write is retried
    /// until it succeeds or the token is removed: images that are being removed may free space.
    pub(crate) fn write_token(&self, path: &Path, token: &ResumeToken) {
        let bytes = match to_bytes(token) {
            Ok(bytes) => bytes,
            Err(e) => {
                return tracing::error!("cannot wake the task of {}: {e}", token.migration);
            }
        };
        if let Err(e) = write_atomically(path, &bytes) {
            tracing::warn!(
                "cannot wake the task of {} yet: {}: {e}",
                token.migration,
                path.display()
            );
            lock(&self.pending_tokens).insert(path.to_path_buf(), bytes);
            tokio::spawn(retry_token(self.pending_tokens.clone(), path.to_path_buf()));
        }
    }

    /// Removes a token if it exists.
    pub(crate) fn remove_token(&self, path: &Path) {
        let mut late = lock(&self.pending_tokens);
        late.remove(path);
        // The token may never have been written.
        let _ = std::fs::remove_file(path);
    }
}

/// Retries until the token is written or removed.
async fn retry_token(pending_tokens: PendingTokens, path: PathBuf) {
    loop {
        tokio::time::sleep(TOKEN_RETRY_INTERVAL).await;
        let mut pending_tokens = lock(&pending_tokens);
        let Some(bytes) = pending_tokens.get(&path) else {
            return;
        };
        if write_atomically(&path, bytes).is_ok() {
            pending_tokens.remove(&path);
            return;
        }
    }
}

fn lock(late: &PendingTokens) -> MutexGuard<'_, BTreeMap<PathBuf, Vec<u8>>> {
    late.lock().unwrap_or_else(|e| e.into_inner())
}

fn append_rotating(path: &Path, line: &str, bytes_max: u64) -> std::io::Result<()> {
    if std::fs::metadata(path).is_ok_and(|meta| meta.len() + line.len() as u64 > bytes_max) {
        std::fs::rename(path, path.with_extension("before"))?;
    }
    let mut file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(line.as_bytes())?;
    file.sync_data()
}

fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".tmp-{name}"));
    // A file left by a failed attempt would make O_EXCL fail.
    let _ = std::fs::remove_file(&temporary);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    file.write_all(bytes)?;
    drop(file);
    std::fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The record and its predecessor contain the newest migrations, each within the limit.
    #[test]
    fn record_keeps_newest_migrations_within_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("moves");
        for number in 0..1000 {
            append_rotating(&path, &format!("m{number} t40001 3\n"), 400).expect("written");
        }
        let read = |path: &Path| std::fs::read_to_string(path).expect("it is there");
        let (before, now) = (read(&path.with_extension("before")), read(&path));
        assert!(before.len() <= 400 && now.len() <= 400);
        let both = before + &now;
        let numbers: Vec<&str> = both
            .lines()
            .map(|line| line.split(' ').next().expect("a word"))
            .collect();
        assert_eq!(numbers.last(), Some(&"m999"));
        assert_eq!(
            numbers.len(),
            numbers
                .iter()
                .collect::<std::collections::BTreeSet<_>>()
                .len()
        );
        assert!(numbers.len() > 20, "{numbers:?}");
        assert_eq!(
            std::fs::read_dir(folder.path()).expect("a folder").count(),
            2
        );
    }
}
