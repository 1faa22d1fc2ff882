//! Small files of migrations: the resume tokens of quiesced libraries, and the durable record of
//! committed migrations.

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
    /// Held by the thread that writes the record.
    record_lock: Arc<Mutex<()>>,
    /// Tokens that could not be written yet. Writing each of these tokens is retried.
    pending_tokens: PendingTokens,
}

/// Size limit of the record in bytes. A full record is renamed and retained until the next record
/// is full.
///
/// No daemon reads the record: tasks end with their master, and the next master removes the record.
/// The record shows people where tasks were when a master was killed.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// Interval between attempts to write a token. The interval is short, because a task waits for the
/// token.
const TOKEN_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Tokens that must still be written: path and content.
type PendingTokens = Arc<Mutex<BTreeMap<PathBuf, Vec<u8>>>>;

impl MigrationFiles {
    pub(crate) fn new(paths: &RuntimePaths, inputs: InputSender) -> Self {
        Self {
            record_path: paths.migration_log(),
            inputs,
            record_lock: Arc::default(),
            pending_tokens: PendingTokens::default(),
        }
    }

    /// Queues the line of one committed migration for the record. The line is appended and synced
    /// on a blocking thread, which reports [`Event::MigrationRecorded`].
    pub(crate) fn record_migration(&self, migration: MigrationId, tid: Tid, target_host: HostId) {
        let (path, inputs, record_lock) = (
            self.record_path.clone(),
            self.inputs.clone(),
            self.record_lock.clone(),
        );
        let line = format!("{migration} {tid} {}\n", target_host.index());
        tokio::task::spawn_blocking(move || {
            let _in_span = tracing::info_span!("migration", id = %migration).entered();
            let result = {
                let _record_guard = record_lock.lock().unwrap_or_else(|e| e.into_inner());
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

    /// Writes a token atomically: a reader gets the complete token or no file.
    ///
    /// The token is a few bytes in a local directory, so the calling thread writes it. Thereby the
    /// order of writing and removing tokens is preserved. If the file cannot be written, for
    /// example because the file system is full, writing is retried until the token is written or
    /// removed: images that are being removed may free space.
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

    /// Removes a token if it exists, and cancels its pending retry.
    pub(crate) fn remove_token(&self, path: &Path) {
        let mut pending_tokens = lock(&self.pending_tokens);
        pending_tokens.remove(path);
        // The call fails if the token was never written.
        let _ = std::fs::remove_file(path);
    }
}

/// Retries writing the token `path` until the token is written or removed.
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

fn lock(pending_tokens: &PendingTokens) -> MutexGuard<'_, BTreeMap<PathBuf, Vec<u8>>> {
    pending_tokens.lock().unwrap_or_else(|e| e.into_inner())
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
    let temporary_path = path.with_file_name(format!(".tmp-{name}"));
    // `create_new` would fail if a file of a failed attempt still existed.
    let _ = std::fs::remove_file(&temporary_path);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary_path)?;
    file.write_all(bytes)?;
    drop(file);
    std::fs::rename(&temporary_path, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The record and its predecessor contain the newest migrations. Each of the two files is
    /// within the size limit.
    #[test]
    fn record_keeps_newest_migrations_within_limit() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("moves");
        for number in 0..1000 {
            append_rotating(&path, &format!("m{number} t40001 3\n"), 400).expect("written");
        }
        let file_text = |path: &Path| std::fs::read_to_string(path).expect("it is there");
        let (previous_record, current_record) =
            (file_text(&path.with_extension("before")), file_text(&path));
        assert!(previous_record.len() <= 400 && current_record.len() <= 400);
        let records = previous_record + &current_record;
        let numbers: Vec<&str> = records
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
        assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 2);
    }
}
