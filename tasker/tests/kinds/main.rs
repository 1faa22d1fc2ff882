//! Tests for the tables in docs/MIGRATION.md, which list the tasks that may migrate. Each row names
//! its test.
//!
//! Most tests migrate a real process to another tasker and back, and the process checks its own
//! state. The other tests assert the reason of a refusal. The programs are in `programs/kinds`.

#[path = "../common/mod.rs"]
mod common;

mod descriptors;
mod files;
mod fixture;
mod languages;
mod memory;
mod processes;
mod refusals;
mod root;
mod signals;
mod table;
mod threads;

/// The user of the tasks; `None` for the user of the tests.
const TASK_USER: Option<u32> = None;
