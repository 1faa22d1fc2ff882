//! What the resource manager remembers beyond its own life: usage of users, jobs and tasks, decisions with their reasons,
//! and what it has learned.
//!
//! * [`books`]: all of it as a value, with its limits. Fed by the event log and by decisions; says what has to be written.
//! * [`record`]: decisions in the words of [`sempa_proto::rm`].
//! * [`file`]: the database, written in batches by a thread of its own. No decision waits for it.
//! * [`ledger`]: both together.

pub mod books;
pub mod file;
pub mod ledger;
pub mod record;

pub use books::{Batch, Books, Change, Place, Sheet};
pub use file::{Store, StoreError};
pub use ledger::{Ledger, Shelf};
