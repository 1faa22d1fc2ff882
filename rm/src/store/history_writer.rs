//! Connects the history with its file, if there is a file. Decides when changes are written, and
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

/// The history and its file. Without a file the history is not stored.
#[derive(Debug, Default)]
pub struct HistoryWriter {
    pub history: History,
    history_file: Option<HistoryFile>,
    /// A batch that the writer thread has not accepted yet.
    pending_batch: Option<Batch>,
    next_write_at: Option<Micros>,
}

impl HistoryWriter {
    /// Opens the history. Without a location, or if the file cannot be used, the history exists
    /// only in memory. Also returns notes about problems, for the event log.
    pub fn open(location: Option<&StoreLocation>, user: u32, task: Tid) -> (Self, Vec<String>) {
        let Some(location) = location else {
            return (
                Self {
                    history: History::new(user, task),
                    ..Self::default()
                },
                Vec::new(),
            );
        };
        match HistoryFile::open(&location.dir, &location.file_name) {
            Err(error) => (
                Self {
                    history: History::new(user, task),
                    ..Self::default()
                },
                vec![error.to_string()],
            ),
            Ok(OpenedHistory {
                file: opened_file,
                entries,
                rename_note: note_of_rename,
            }) => {
                let (stored_history, invalid_count) = History::from_entries(user, task, entries);
                let mut notes: Vec<String> = note_of_rename.into_iter().collect();
                if invalid_count > 0 {
                    notes.push(format!(
                        "{invalid_count} entries of the resource manager's history could not be read"
                    ));
                }
                (
                    Self {
                        history: stored_history,
                        history_file: Some(opened_file),
                        ..Self::default()
                    },
                    notes,
                )
            }
        }
    }

    /// Returns the time at which [`HistoryWriter::send_changes`] is due; `None` if no write is
    /// scheduled.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.next_write_at
    }

    /// True if changes must be written now.
    pub fn is_due(&self, now: Micros) -> bool {
        self.next_write_at.is_some_and(|due_time| due_time <= now)
    }

    /// Schedules a write after [`WRITE_DELAY`] if there are changes and no write is scheduled.
    pub fn schedule_write(&mut self, now: Micros) {
        if self.next_write_at.is_none() && self.history.has_changes() {
            self.next_write_at = Some(now + WRITE_DELAY);
        }
    }

    /// Sends the changes to the writer thread. Returns a note about an earlier write error that was
    /// not reported yet.
    pub fn send_changes(&mut self, now: Micros) -> Option<String> {
        self.next_write_at = None;
        let Some(open_file) = &self.history_file else {
            self.history.take_batch();
            return None;
        };
        // A batch that the writer thread has not accepted is sent first, because a later batch may
        // change the same entries.
        let batch = self
            .pending_batch
            .take()
            .unwrap_or_else(|| self.history.take_batch());
        if let Err(batch) = open_file.try_send_batch(batch) {
            self.pending_batch = Some(batch);
            self.next_write_at = Some(now + WRITE_DELAY);
        }
        let error = open_file.take_error()?;
        Some(format!(
            "the history of the resource manager cannot be written: {error}; it continues without"
        ))
    }

    /// Writes the remaining changes and closes the file. Waits for the write, but not longer than
    /// [`HistoryFile::write_and_close`] does.
    pub fn close(&mut self) {
        let Some(open_file) = self.history_file.take() else {
            return;
        };
        let mut final_batch = self.pending_batch.take().unwrap_or_default();
        final_batch.extend(self.history.take_batch());
        open_file.write_and_close(final_batch);
    }
}
