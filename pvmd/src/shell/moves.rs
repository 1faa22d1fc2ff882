//! Small files of moves: the tokens that wake quiesced libraries, and the durable record of committed moves.

use super::input::{Input, Inputs};
use super::log::Log;
use pvmd_machine::io::Event;
use sempa_proto::frame::to_bytes;
use sempa_proto::migration::Failure;
use sempa_proto::place::Place;
use sempa_proto::task::ResumeToken;
use sempa_proto::{HostId, MigrationId, Tid};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Writes the files of moves in one place.
pub(crate) struct Moves {
    record: PathBuf,
    inputs: Inputs,
    /// One writer at a time.
    turn: Arc<Mutex<()>>,
    /// Tokens that could not be written yet.
    late: Late,
}

/// Bytes of the record. Nobody goes on with it: tasks end with their master, and the next one begins with none and removes it. It is
/// there for people who ask where tasks were when a master was killed. So what is older is let go, but for one more file of this size.
const RECORD_BYTES_MAX: u64 = 1 << 20;

/// How often a token is tried again that could not be written: its task waits for it.
const TOKEN_RETRY: Duration = Duration::from_millis(100);

/// Tokens that are still to be written, by path.
type Late = Arc<Mutex<BTreeMap<PathBuf, Vec<u8>>>>;

impl Moves {
    /// For this place; nothing is written yet.
    pub(crate) fn new(place: &Place, inputs: Inputs) -> Moves {
        Moves {
            record: place.moves(),
            inputs,
            turn: Arc::default(),
            late: Late::default(),
        }
    }

    /// Appends one committed move and syncs it; [`Event::MoveRecorded`] tells the end.
    pub(crate) fn record(&self, migration: MigrationId, tid: Tid, to: HostId) {
        let (path, inputs, turn) = (self.record.clone(), self.inputs.clone(), self.turn.clone());
        let line = format!("{migration} {tid} {}\n", to.index());
        tokio::task::spawn_blocking(move || {
            let result = {
                let _turn = turn.lock().unwrap_or_else(|e| e.into_inner());
                append(&path, &line, RECORD_BYTES_MAX).map_err(|e| {
                    Failure::Io(format!("cannot record the move in {}: {e}", path.display()))
                })
            };
            let _ = inputs.blocking_send(Input::Event(Event::MoveRecorded { migration, result }));
        });
    }

    /// Writes a token so that whoever looks sees all of it or nothing. A few bytes into a local directory: done at
    /// once, so that tokens and their removal keep their order. Where there is no room, images that are being removed may
    /// make some: it is tried again until the token is removed.
    pub(crate) fn write_token(&self, path: &Path, token: &ResumeToken, log: &Log) {
        let bytes = match to_bytes(token) {
            Ok(bytes) => bytes,
            Err(e) => return log.line(format!("cannot wake the task of {}: {e}", token.migration)),
        };
        if let Err(e) = replace(path, &bytes) {
            log.line(format!(
                "cannot wake the task of {} yet: {}: {e}",
                token.migration,
                path.display()
            ));
            lock(&self.late).insert(path.to_path_buf(), bytes);
            tokio::spawn(write_late(self.late.clone(), path.to_path_buf()));
        }
    }

    /// Removes a token, if it is there.
    pub(crate) fn remove_token(&self, path: &Path) {
        let mut late = lock(&self.late);
        late.remove(path);
        // It may never have been written.
        let _ = std::fs::remove_file(path);
    }
}

/// Tries again until the token is written or not wanted any more.
async fn write_late(late: Late, path: PathBuf) {
    loop {
        tokio::time::sleep(TOKEN_RETRY).await;
        let mut late = lock(&late);
        let Some(bytes) = late.get(&path) else { return };
        if replace(&path, bytes).is_ok() {
            late.remove(&path);
            return;
        }
    }
}

fn lock(late: &Late) -> MutexGuard<'_, BTreeMap<PathBuf, Vec<u8>>> {
    late.lock().unwrap_or_else(|e| e.into_inner())
}

fn append(path: &Path, line: &str, bytes_max: u64) -> std::io::Result<()> {
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

fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".tmp-{name}"));
    // A left-over of a failed attempt would be in the way of O_EXCL.
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

    #[test]
    fn the_record_has_the_newest_moves_and_no_more_than_its_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("moves");
        for number in 0..1000 {
            append(&path, &format!("m{number} t40001 3\n"), 400).expect("written");
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
