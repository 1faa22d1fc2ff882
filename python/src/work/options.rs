//! Options of a run, which the Python part passes as JSON.

use master_worker::{MasterOptions, Settings, WorkerPlace, WorkerProgram};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    run_name: String,
    journal: Option<PathBuf>,
    program: String,
    arguments: Vec<String>,
    workers: u32,
    host: Option<String>,
    arch: Option<String>,
    /// Settings that differ from the default, by their names.
    settings: Value,
    master_wait_s: f64,
    progress_interval_s: Option<f64>,
}

fn refused(reason: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("the run was not begun: {reason}"))
}

fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| refused(format!("{name} is {seconds} s: {error}")))
}

/// Replaces the values in `base` that `changes` contains.
fn merge(base: &mut Value, changes: Value) -> Result<(), String> {
    match (base, changes) {
        (Value::Object(base), Value::Object(changes)) => {
            for (name, change) in changes {
                let Some(value) = base.get_mut(&name) else {
                    return Err(format!("there is no setting {name}"));
                };
                merge(value, change)?;
            }
            Ok(())
        }
        (base, change) => {
            *base = change;
            Ok(())
        }
    }
}

fn settings(changes: Value) -> PyResult<Settings> {
    let mut value = serde_json::to_value(Settings::default()).map_err(refused)?;
    merge(&mut value, changes).map_err(refused)?;
    let settings: Settings = serde_json::from_value(value).map_err(refused)?;
    match settings.retry.attempts_max {
        0 => Err(refused("a task needs at least one attempt")),
        _ => Ok(settings),
    }
}

/// Returns the options in a JSON text.
///
/// # Errors
/// `ValueError` for an option without a meaning.
pub(super) fn master_options(text: &str) -> PyResult<MasterOptions> {
    let options: Options = serde_json::from_str(text).map_err(refused)?;
    let place = match (options.host, options.arch) {
        (None, None) => WorkerPlace::Anywhere,
        (Some(host), None) => WorkerPlace::Host(host),
        (None, Some(arch)) => WorkerPlace::Architecture(arch),
        (Some(_), Some(_)) => return Err(refused("give a host or an architecture, not both")),
    };
    Ok(MasterOptions {
        journal: options.journal,
        settings: settings(options.settings)?,
        default_workers: Some(WorkerProgram {
            arguments: options.arguments,
            place,
            ..WorkerProgram::new(options.program, options.workers)
        }),
        master_wait: duration("master_wait", options.master_wait_s)?,
        progress_interval: options
            .progress_interval_s
            .map(|seconds| duration("progress", seconds))
            .transpose()?,
        ..MasterOptions::new(options.run_name)
    })
}
