//! The persistent history of the resource manager: usage of users, jobs and tasks, decisions with
//! their reasons, and learned values.
//!
//! * [`books`]: the history in memory, with its limits. Applies event log entries and decisions,
//!   and returns the changes that must be written.
//! * [`record`]: converts decisions to the types of [`sempa_proto::rm`].
//! * [`file`]: the database file. A separate thread writes it in batches, so that no decision waits
//!   for it.
//! * [`ledger`]: connects the history with its file.

pub mod books;
pub mod file;
pub mod ledger;
pub mod record;

pub use books::{Batch, Books, Change, Place, Sheet};
pub use file::{Store, StoreError};
pub use ledger::{Ledger, Shelf};
