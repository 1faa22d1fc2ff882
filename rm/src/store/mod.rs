//! The persistent history of the resource manager: usage of users, jobs and tasks, decisions with
//! their reasons, and learned values.
//!
//! * [`history`]: the history in memory, with its limits. Applies event log entries and decisions,
//!   and returns the changes that must be written.
//! * [`decision_records`]: converts decisions to the types of [`sempa_proto::rm`].
//! * [`mod@file`]: the database file. A separate thread writes it in batches, so that no decision
//!   waits for a disk.
//! * [`history_writer`]: connects the history with its file.

pub mod decision_records;
pub mod file;
pub mod history;
pub mod history_writer;

pub use file::{HistoryFile, StoreError};
pub use history::{Batch, Change, History, LogPosition, Table};
pub use history_writer::{HistoryWriter, StoreLocation};
