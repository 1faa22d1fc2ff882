//! The history together with its file, if there is one: schedules the writing and holds the batch
//! that waits for it.

use super::history::{Batch, History};
use super::file::{OpenedHistory, HistoryFile};
use sempa_proto::{Micros, Tid};
use std::path::PathBuf;

/// Delay between a change and its writing, so that changes are written together.
pub const WRITE_DELAY: Micros = Micros::from_millis(300);

/// Where the history is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLocation {
    pub dir: PathBuf,
    /// Name of the file in the directory.
    pub file_name: String,
}

impl StoreLocation {
    /// True if a history has been stored there.
    pub fn exists(&self) -> bool {
        self.dir.join(&self.file_name).exists()
    }
}

/// The history and its file.
#[derive(Debug, Default)]
pub struct HistoryWriter {
    pub history: History,
    store: Option<HistoryFile>,
    /// A batch that the writer has not accepted yet.
    pending_batch: Option<Batch>,
    write_at: Option<Micros>,
}

impl HistoryWriter {
    /// Opens the history; without a location it lasts as long as this process. Returns notes about
    /// problems, too.
    pub fn open(shelf: Option<&StoreLocation>, user: u32, task: Tid) -> (HistoryWriter, Vec<String>) {
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
                        "{bad} entries of what the resource manager remembered could not be read"
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

    /// Returns when [`Ledger::write`] is due.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.write_at
    }

    /// True if it is time to write.
    pub fn is_due(&self, now: Micros) -> bool {
        self.write_at.is_some_and(|at| at <= now)
    }

    /// Schedules the writing of changes, if there are any. Changes until then are written together.
    pub fn schedule_write(&mut self, now: Micros) {
        if self.write_at.is_none() && self.history.is_dirty() {
            self.write_at = Some(now + WRITE_DELAY);
        }
    }

    /// Hands the changes to the writer. Returns an earlier error of writing.
    pub fn write(&mut self, now: Micros) -> Option<String> {
        self.write_at = None;
        let Some(store) = &self.store else {
            self.history.take_batch();
            return None;
        };
        // A batch that the writer has not accepted goes first, because a later one may change the
        // same entries.
        let batch = self.pending_batch.take().unwrap_or_else(|| self.history.take_batch());
        if let Err(batch) = store.write(batch) {
            self.pending_batch = Some(batch);
            self.write_at = Some(now + WRITE_DELAY);
        }
        let error = store.take_error()?;
        Some(format!(
            "what the resource manager remembers cannot be written: {error}; it works on without"
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
