//! As `main.rs`, for the tasks of an ordinary user that a tasker of root runs. What only root can
//! start is in `root.rs`.

#[path = "../common/mod.rs"]
mod common;

mod descriptors;
mod files;
mod fixture;
mod languages;
mod memory;
mod processes;
mod refusals;
mod signals;
mod threads;
mod user;

/// The user of the tasks: one with an account on every machine.
const TASK_USER: Option<u32> = Some(65_534);
