//! The persistent history of the resource manager: usage of users, jobs and tasks, decisions with
//! their reasons, and learned values.
//!
//! * [`history`]: the history as a value, with its limits. Receives the event log and decisions;
//!   returns what must be written.
//! * [`decision_records`]: decisions in the types of [`sempa_proto::rm`].
//! * [`file`]: the database, written in batches by a separate thread. No decision waits for it.
//! * [`history_writer`]: history and file together.

pub mod history;
pub mod file;
pub mod history_writer;
pub mod decision_records;

pub use history::{Batch, History, Change, LogPosition, Table};
pub use file::{HistoryFile, StoreError};
pub use history_writer::{HistoryWriter, StoreLocation};
