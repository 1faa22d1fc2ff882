//! The books together with the file that they are kept in, if there is one: when to write, and what is waiting for it.

use super::books::{Batch, Books};
use super::file::{Opened, Store};
use sempa_proto::{Micros, Tid};
use std::path::PathBuf;

/// What has changed is written after this.
pub const WRITE_PAUSE: Micros = Micros::from_millis(300);

/// Where the books are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shelf {
    /// The directory.
    pub dir: PathBuf,
    /// Name of the file in it.
    pub name: String,
}

impl Shelf {
    /// True when something has been kept there.
    pub fn is_there(&self) -> bool {
        self.dir.join(&self.name).exists()
    }
}

/// Books and file.
#[derive(Debug, Default)]
pub struct Ledger {
    /// The books.
    pub books: Books,
    store: Option<Store>,
    /// Not taken by the writer yet.
    batch: Option<Batch>,
    write_at: Option<Micros>,
}

impl Ledger {
    /// Opens the books; without a shelf they last as long as this process. Answers what is worth saying about it.
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

    /// When [`Ledger::write`] has something to do.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.write_at
    }

    /// True when it is time to write.
    pub fn is_due(&self, now: Micros) -> bool {
        self.write_at.is_some_and(|at| at <= now)
    }

    /// Something may have changed: it is written a little later, together with what changes meanwhile.
    pub fn plan(&mut self, now: Micros) {
        if self.write_at.is_none() && self.books.is_dirty() {
            self.write_at = Some(now + WRITE_PAUSE);
        }
    }

    /// Hands what has changed to the writer. Answers what went wrong with writing before.
    pub fn write(&mut self, now: Micros) -> Option<String> {
        self.write_at = None;
        let Some(store) = &self.store else {
            self.books.batch();
            return None;
        };
        // A batch that the writer had no time for goes first: a later one may speak of the same entries.
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

    /// Writes what is left.
    pub fn close(&mut self) {
        let Some(store) = self.store.take() else {
            return;
        };
        let mut last = self.batch.take().unwrap_or_default();
        last.extend(self.books.batch());
        store.close(last);
    }
}
