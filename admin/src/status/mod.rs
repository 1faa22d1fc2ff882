//! `status`: shows the virtual machines, tasks and users of this machine, its load, the verdict of
//! each load watcher, and the health of the tasker service.

mod collect;
mod show;

use crate::outcome::Outcome;
use crate::service::ServiceState;
use anyhow::Result;
use clap::Args;
use pvm_load_watcher::status::WatcherStatus;
use serde::Serialize;

#[derive(Debug, Args)]
pub(crate) struct StatusOptions {
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// The state of this machine.
#[derive(Debug, Serialize)]
struct MachineStatus {
    host: String,
    /// Load averages over 1, 5 and 15 minutes; `None` if they cannot be read.
    load: Option<[f32; 3]>,
    cores: usize,
    /// Memory in bytes that programs can get; 0 if unknown.
    available_bytes: u64,
    service: ServiceHealth,
    /// Why the administrator has drained this machine; `None` if it is not drained.
    drained: Option<String>,
    virtual_machines: Vec<VmStatus>,
    users: Vec<UserStatus>,
    /// Sentences about load watchers that do not answer, and about files that cannot be read.
    errors: Vec<String>,
}

/// The health of the tasker service and of what it needs.
#[derive(Debug, Serialize)]
struct ServiceHealth {
    #[serde(flatten)]
    state: ServiceState,
    /// Identifier of the site key, or why there is none.
    site_key: Result<String, String>,
    /// Path of CRIU, or why there is none.
    engine: Result<String, String>,
    /// Path of the settings, or why they are not used.
    settings: Result<String, String>,
    /// How owners are detected, or why each virtual machine does so itself.
    owner_sense: Result<String, String>,
}

/// A virtual machine on this host: a tasker, a load watcher, or both.
#[derive(Debug, Serialize)]
struct VmStatus {
    /// Name of the virtual machine; `None` if no load watcher of it answers.
    name: Option<String>,
    user: String,
    tasker: Option<TaskerStatus>,
    /// Memory of all tasks in bytes, as far as this user may see it.
    task_bytes: u64,
    watcher: Option<WatcherStatus>,
}

#[derive(Debug, Serialize)]
struct TaskerStatus {
    pid: i32,
    /// True if the tasker service has started the tasker.
    by_service: bool,
    tasks: Vec<TaskProcess>,
}

#[derive(Debug, Serialize)]
struct TaskProcess {
    pid: i32,
    program: String,
    resident_bytes: u64,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
struct UserStatus {
    user: String,
    virtual_machines: usize,
    /// Number of processes of tasks.
    task_processes: usize,
    task_bytes: u64,
}

pub(crate) fn run(options: &StatusOptions) -> Result<Outcome> {
    let status = collect::collect()?;
    match options.json {
        true => println!("{}", serde_json::to_string(&status)?),
        false => print!("{}", show::format(&status)),
    }
    Ok(match status.errors.is_empty() {
        true => Outcome::Done,
        false => Outcome::NotDone,
    })
}
