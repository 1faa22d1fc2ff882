//! Failpoints for tests: they stop this daemon at the start or end of a migration step.
//!
//! A test injects a fault while the daemon is stopped. The fault then affects the migration at
//! exactly this step, regardless of the load of the machine.

use super::env::env_var;
use nix::sys::signal::{Signal, raise};
use sempa_proto::Tid;
use sempa_proto::migration::Step;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// Environment variable with the path of the failpoint folder. Only tests set this variable.
///
/// - A file `TID-before-STEP` stops the first daemon that is about to begin this step.
/// - A file `TID-STEP` stops the first daemon that has completed this step.
/// - Each daemon that reaches the start or end of a step of the task TID appends a line to
///   `TID-places`.
const FOLDER_VARIABLE: &str = "SEMPA_TEST_STEPS";

/// The start or the end of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepEdge {
    /// The step has not begun.
    Before,
    /// The step is complete, but its completion is not reported yet.
    After,
}

/// The failpoints that a test requested.
#[derive(Debug)]
pub(crate) struct Failpoints {
    folder: Option<PathBuf>,
}

impl Failpoints {
    /// Reads the folder from the environment. Without a folder there are no failpoints.
    pub(crate) fn from_environment() -> Self {
        Self {
            folder: env_var(FOLDER_VARIABLE).map(PathBuf::from),
        }
    }

    /// Records that this daemon has reached an edge of a step. Stops this process with SIGSTOP if a
    /// test requested a stop at this edge. The test must send SIGCONT.
    ///
    /// The request file is renamed to `*.reached`, so only the first daemon that reaches the edge
    /// stops.
    pub(crate) fn stop_if_requested(&self, tid: Tid, edge_prefix: StepEdge, step: Step) {
        let Some(folder) = &self.folder else { return };
        let edge_prefix = match edge_prefix {
            StepEdge::Before => "before-",
            StepEdge::After => "",
        };
        if let Ok(mut reached_log) = OpenOptions::new()
            .append(true)
            .open(folder.join(format!("{tid}-places")))
        {
            // If writing fails, a line is missing in the file that the test reads.
            let _ = reached_log.write_all(format!("{edge_prefix}{step}\n").as_bytes());
        }
        let request_path = folder.join(format!("{tid}-{edge_prefix}{step}"));
        if std::fs::rename(&request_path, request_path.with_extension("reached")).is_ok() {
            // If the signal cannot be sent, the test fails, because it waits for the stop.
            let _ = raise(Signal::SIGSTOP);
        }
    }
}
