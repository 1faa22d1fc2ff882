//! What may move and what may not: a test for each row of the table in docs/MIGRATION.md. Each moves a real process to
//! another tasker and back, and the process looks by itself whether all is as it was; or it is refused with the reason, and goes
//! on. The programs are in `programs/kinds`.

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
