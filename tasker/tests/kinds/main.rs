//! Tests for each row of the table in docs/MIGRATION.md, which lists the tasks that may migrate.
//! Each test migrates a real process to another tasker and back, and the process checks its own
//! state; or the test asserts the reason of the refusal. The programs are in `programs/kinds`.

#[path = "../common/mod.rs"]
mod common;

mod descriptors;
mod files;
mod languages;
mod memory;
mod processes;
mod refused;
mod scene;
mod signals;
mod table;
mod threads;
