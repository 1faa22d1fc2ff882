//! The history together with its file, if there is one: schedules the writing and holds the batch
//! that waits for it.

use super::books::{Batch, Books};
use super::file::{Opened, Store};
use sempa_proto::{Micros, Tid};
use std::path::PathBuf;

/// Delay between a change and its writing, so that changes are written together.
pub const WRITE_PAUSE: Micros = Micros::from_millis(300);

/// Where the history is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shelf {
    pub dir: PathBuf,
    /// Name of the file in the directory.
    pub name: String,
}

impl Shelf {
    /// True if a history has been stored there.
    pub fn is_there(&self) -> bool {
        self.dir.join(&self.name).exists()
    }
}

/// The history and its file.
#[derive(Debug, Default)]
pub struct Ledger {
    pub books: Books,
    store: Option<Store>,
    /// A batch that the writer has not accepted yet.
    batch: Option<Batch>,
    write_at: Option<Micros>,
}

impl Ledger {
    /// Opens the history; without a location it lasts as long as this process. Returns notes about
    /// problems, too.
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
                        "{bad} entries of the resource manager's history could not be read"
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

    /// True if it is time to write.
    pub fn is_due(&self, now: Micros) -> bool {
        self.write_at.is_some_and(|at| at <= now)
    }

    /// Schedules the writing of changes, if there are any. Changes until then are written together.
    pub fn plan(&mut self, now: Micros) {
        if self.write_at.is_none() && self.books.is_dirty() {
            self.write_at = Some(now + WRITE_PAUSE);
        }
    }

    /// Hands the changes to the writer. Returns an earlier error of writing.
    pub fn write(&mut self, now: Micros) -> Option<String> {
        self.write_at = None;
        let Some(store) = &self.store else {
            self.books.batch();
            return None;
        };
        // A batch that the writer has not accepted goes first, because a later one may change the
        // same entries.
        let batch = self.batch.take().unwrap_or_else(|| self.books.batch());
        if let Err(batch) = store.write(batch) {
            self.batch = Some(batch);
            self.write_at = Some(now + WRITE_PAUSE);
        }
        let error = store.error()?;
        Some(format!(
            "the history of the resource manager cannot be written: {error}; it continues without"
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
