//! The persistent history of the resource manager: usage of users, jobs and tasks, decisions with
//! their reasons, and learned values.
//!
//! * [`books`]: the history as a value, with its limits. Receives the event log and decisions;
//!   returns what must be written.
//! * [`record`]: decisions in the types of [`sempa_proto::rm`].
//! * [`file`]: the database, written in batches by a separate thread. No decision waits for it.
//! * [`ledger`]: history and file together.

pub mod books;
pub mod file;
pub mod ledger;
pub mod record;

pub use books::{Batch, Books, Change, Place, Sheet};
pub use file::{Store, StoreError};
pub use ledger::{Ledger, Shelf};
