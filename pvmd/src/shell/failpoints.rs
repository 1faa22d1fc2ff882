//! Failpoints for tests: stops this daemon at the start or end of a migration step.
//!
//! A fault injected while the daemon is stopped hits the migration at exactly that point,
//! regardless of the load of the machine.

use super::env::env_var;
use nix::sys::signal::{Signal, raise};
use sempa_proto::Tid;
use sempa_proto::migration::Step;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

/// Environment variable that names the failpoint folder. Set only by tests.
///
/// - A file `TID-before-STEP` stops the first daemon that is about to begin this step.
/// - A file `TID-STEP` stops the first daemon that has completed this step.
/// - Each daemon that reaches an edge of a step of the task appends a line to `TID-places`.
const FOLDER_VARIABLE: &str = "SEMPA_TEST_STEPS";

/// An edge of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepEdge {
    /// The step has not begun.
    Before,
    /// The step is complete, and its completion is not reported yet.
    After,
}

/// The failpoints that a test requested.
#[derive(Debug)]
pub(crate) struct Failpoints {
    folder: Option<PathBuf>,
}

impl Failpoints {
    /// Reads the folder from the environment. Without a folder there are no failpoints.
    pub(crate) fn from_environment() -> Failpoints {
        Failpoints {
            folder: env_var(FOLDER_VARIABLE).map(PathBuf::from),
        }
    }

    /// Stops this process with SIGSTOP if a test requested it for this edge; the test continues it.
    ///
    /// The request file is renamed to `*.reached`, so only the first daemon that reaches the edge
    /// stops.
    pub(crate) fn stop_if_requested(&self, tid: Tid, edge: StepEdge, step: Step) {
        let Some(folder) = &self.folder else { return };
        let edge = match edge {
            StepEdge::Before => "before-",
            StepEdge::After => "",
        };
        if let Ok(mut reached_log) = OpenOptions::new()
            .append(true)
            .open(folder.join(format!("{tid}-places")))
        {
            // On failure the test that reads the file misses a line.
            let _ = reached_log.write_all(format!("{edge}{step}\n").as_bytes());
        }
        let request = folder.join(format!("{tid}-{edge}{step}"));
        if std::fs::rename(&request, request.with_extension("reached")).is_ok() {
            // A failure is harmless: the test that waits for the stop reports it.
            let _ = raise(Signal::SIGSTOP);
        }
    }
}
