//! Connects the history with its file, if there is one: decides when changes are written, and
//! stores a batch that the writer thread has not accepted.

use super::books::{Batch, Books};
use super::file::{Opened, Store};
use sempa_proto::{Micros, Tid};
use std::path::PathBuf;

/// Delay between a change and the write, so that several changes are written in one batch.
pub const WRITE_PAUSE: Micros = Micros::from_millis(300);

/// Location of the history file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shelf {
    pub dir: PathBuf,
    /// Name of the file within the directory.
    pub name: String,
}

impl Shelf {
    /// True if the file exists.
    pub fn is_there(&self) -> bool {
        self.dir.join(&self.name).exists()
    }
}

/// The history and, if it is stored, its file.
#[derive(Debug, Default)]
pub struct Ledger {
    pub books: Books,
    store: Option<Store>,
    /// A batch that the writer thread has not accepted yet.
    batch: Option<Batch>,
    write_at: Option<Micros>,
}

impl Ledger {
    /// Opens the history. Without a location, or if the file cannot be used, the history exists in
    /// memory only. Also returns notes about problems for the event log.
    pub fn open(shelf: Option<&Shelf>, user: u32, task: Tid) -> (Ledger, Vec<String>) {
        let Some(shelf) = shelf else {
            return (
                Ledger {
                    books: Books::new(user, task),
                    ..Ledger::default()
                },
                Vec::new(),
            );
        };
        match Store::open(&shelf.dir, &shelf.name) {
            Err(error) => (
                Ledger {
                    books: Books::new(user, task),
                    ..Ledger::default()
                },
                vec![error.to_string()],
            ),
            Ok(Opened {
                store,
                entries,
                moved_aside,
            }) => {
                let (books, bad) = Books::read(user, task, entries);
                let mut notes: Vec<String> = moved_aside.into_iter().collect();
                if bad > 0 {
                    notes.push(format!(
                        "{bad} entries of what the resource manager remembered could not be read"
                    ));
                }
                (
                    Ledger {
                        books,
                        store: Some(store),
                        ..Ledger::default()
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

    /// True if changes must be written now.
    pub fn is_due(&self, now: Micros) -> bool {
        self.write_at.is_some_and(|at| at <= now)
    }

    /// Schedules a write after [`WRITE_PAUSE`] if there are changes and no write is scheduled.
    pub fn plan(&mut self, now: Micros) {
        if self.write_at.is_none() && self.books.is_dirty() {
            self.write_at = Some(now + WRITE_PAUSE);
        }
    }

    /// Passes the changes to the writer thread. Returns the text of an earlier write error, if
    /// there is one.
    pub fn write(&mut self, now: Micros) -> Option<String> {
        self.write_at = None;
        let Some(store) = &self.store else {
            self.books.batch();
            return None;
        };
        // A batch that the writer thread has not accepted is passed first, because a later batch
        // may change the same entries.
        let batch = self.batch.take().unwrap_or_else(|| self.books.batch());
        if let Err(batch) = store.write(batch) {
            self.batch = Some(batch);
            self.write_at = Some(now + WRITE_PAUSE);
        }
        let error = store.error()?;
        Some(format!(
            "what the resource manager remembers cannot be written: {error}; it works on without"
        ))
    }

    /// Writes the remaining changes and closes the file.
    pub fn close(&mut self) {
        let Some(store) = self.store.take() else {
            return;
        };
        let mut last = self.batch.take().unwrap_or_default();
        last.extend(self.books.batch());
        store.close(last);
    }
}
