//! As `main.rs`, for the tasks of an ordinary user that a tasker of root runs. Most refusals need
//! tasks of root; `ordinary_users.rs` has those of ordinary users.

#[path = "../common/mod.rs"]
mod common;

mod descriptors;
mod files;
mod fixture;
mod languages;
mod memory;
mod processes;
mod signals;
mod threads;

/// The user of the tasks: one with an account on every machine.
const TASK_USER: Option<u32> = Some(65_534);
