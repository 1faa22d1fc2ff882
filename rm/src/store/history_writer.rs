//! Connects the history with its file, if there is one: decides when changes are written, and
//! stores a batch that the writer thread has not accepted.

use super::file::{HistoryFile, OpenedHistory};
use super::history::{Batch, History};
use sempa_proto::{Micros, Tid};
use std::path::PathBuf;

/// Delay between a change and the write, so that several changes are written in one batch.
pub const WRITE_DELAY: Micros = Micros::from_millis(300);

/// Location of the history file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLocation {
    pub dir: PathBuf,
    /// Name of the file within the directory.
    pub file_name: String,
}

impl StoreLocation {
    /// True if the file exists.
    pub fn exists(&self) -> bool {
        self.dir.join(&self.file_name).exists()
    }
}

/// The history and, if it is stored, its file.
#[derive(Debug, Default)]
pub struct HistoryWriter {
    pub history: History,
    store: Option<HistoryFile>,
    /// A batch that the writer thread has not accepted yet.
    pending_batch: Option<Batch>,
    write_at: Option<Micros>,
}

impl HistoryWriter {
    /// Opens the history. Without a location, or if the file cannot be used, the history exists in
    /// memory only. Also returns notes about problems for the event log.
    pub fn open(
        shelf: Option<&StoreLocation>,
        user: u32,
        task: Tid,
    ) -> (HistoryWriter, Vec<String>) {
        let Some(shelf) = shelf else {
            return (
                HistoryWriter {
                    history: History::new(user, task),
                    ..HistoryWriter::default()
                },
                Vec::new(),
            );
        };
        match HistoryFile::open(&shelf.dir, &shelf.file_name) {
            Err(error) => (
                HistoryWriter {
                    history: History::new(user, task),
                    ..HistoryWriter::default()
                },
                vec![error.to_string()],
            ),
            Ok(OpenedHistory {
                store,
                entries,
                moved_aside,
            }) => {
                let (books, bad) = History::read(user, task, entries);
                let mut notes: Vec<String> = moved_aside.into_iter().collect();
                if bad > 0 {
                    notes.push(format!(
                        "{bad} entries of the resource manager's history could not be read"
                    ));
                }
                (
                    HistoryWriter {
                        history: books,
                        store: Some(store),
                        ..HistoryWriter::default()
                    },
                    notes,
                )
            }
        }
    }

    /// Returns when [`HistoryWriter::write`] is due.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.write_at
    }

    /// True if changes must be written now.
    pub fn is_due(&self, now: Micros) -> bool {
        self.write_at.is_some_and(|at| at <= now)
    }

    /// Schedules a write after [`WRITE_DELAY`] if there are changes and no write is scheduled.
    pub fn schedule_write(&mut self, now: Micros) {
        if self.write_at.is_none() && self.history.is_dirty() {
            self.write_at = Some(now + WRITE_DELAY);
        }
    }

    /// Passes the changes to the writer thread. Returns the text of an earlier write error, if
    /// there is one.
    pub fn write(&mut self, now: Micros) -> Option<String> {
        self.write_at = None;
        let Some(store) = &self.store else {
            self.history.take_batch();
            return None;
        };
        // A batch that the writer thread has not accepted is passed first, because a later batch
        // may change the same entries.
        let batch = self
            .pending_batch
            .take()
            .unwrap_or_else(|| self.history.take_batch());
        if let Err(batch) = store.write(batch) {
            self.pending_batch = Some(batch);
            self.write_at = Some(now + WRITE_DELAY);
        }
        let error = store.take_error()?;
        Some(format!(
            "the history of the resource manager cannot be written: {error}; it continues without"
        ))
    }

    /// Writes the remaining changes and closes the file.
    pub fn close(&mut self) {
        let Some(store) = self.store.take() else {
            return;
        };
        let mut last = self.pending_batch.take().unwrap_or_default();
        last.extend(self.history.take_batch());
        store.close(last);
    }
}
