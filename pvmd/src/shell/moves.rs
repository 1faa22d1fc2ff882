//! Small files of moves: the tokens that wake quiesced libraries, and the durable record of committed moves.

use super::input::{Input, Inputs};
use super::log::Log;
use crate::machine::io::Event;
use sempa_proto::frame::to_bytes;
use sempa_proto::migration::Failure;
use sempa_proto::place::Place;
use sempa_proto::task::ResumeToken;
use sempa_proto::{HostId, MigrationId, Tid};
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Writes the files of moves in one place.
pub(crate) struct Moves {
    record: PathBuf,
    inputs: Inputs,
    /// One writer at a time.
    turn: Arc<Mutex<()>>,
}

impl Moves {
    /// For this place; nothing is written yet.
    pub(crate) fn new(place: &Place, inputs: Inputs) -> Moves {
        Moves { record: place.moves(), inputs, turn: Arc::default() }
    }

    /// Appends one committed move and syncs it; [`Event::MoveRecorded`] tells the end.
    pub(crate) fn record(&self, migration: MigrationId, tid: Tid, to: HostId) {
        let (path, inputs, turn) = (self.record.clone(), self.inputs.clone(), self.turn.clone());
        let line = format!("{migration} {tid} {}\n", to.index());
        tokio::task::spawn_blocking(move || {
            let result = {
                let _turn = turn.lock().unwrap_or_else(|e| e.into_inner());
                append(&path, &line)
                    .map_err(|e| Failure::Io(format!("cannot record the move in {}: {e}", path.display())))
            };
            let _ = inputs.blocking_send(Input::Event(Event::MoveRecorded { migration, result }));
        });
    }

    /// Writes a token so that whoever looks sees all of it or nothing. A few bytes into a local directory: done at
    /// once, so that tokens and their removal keep their order.
    pub(crate) fn write_token(&self, path: &Path, token: &ResumeToken, log: &Log) {
        let written = to_bytes(token).map_err(std::io::Error::other).and_then(|bytes| replace(path, &bytes));
        if let Err(e) = written {
            log.line(format!("cannot wake the task of {}: {}: {e}", token.migration, path.display()));
        }
    }

    /// Removes a token, if it is there.
    pub(crate) fn remove_token(&self, path: &Path) {
        // It may never have been written.
        let _ = std::fs::remove_file(path);
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    file.write_all(line.as_bytes())?;
    file.sync_data()
}

fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".tmp-{name}"));
    // A left-over of a failed attempt would be in the way of O_EXCL.
    let _ = std::fs::remove_file(&temporary);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    drop(file);
    std::fs::rename(&temporary, path)
}
