//! `replay`: simulates a log that a resource manager recorded, under another policy.
//!
//! Runs the resource manager's program, which makes the decisions. No virtual machine is needed.

use crate::session::Outcome;
use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = "pvm-rm";

/// Returns the resource manager's program: in the folder of this one, or from `KDAT_PATH`.
fn program() -> PathBuf {
    let sibling = std::env::current_exe()
        .ok()
        .map(|own| own.with_file_name(PROGRAM));
    sibling
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PROGRAM.into())
}

/// Runs a replay with these arguments.
pub(crate) fn run(words: &[String], json: bool) -> Outcome {
    let mut command = Command::new(program());
    command.arg("--replay").args(words);
    if json {
        command.arg("--json");
    }
    match command.output() {
        Err(error) => Outcome::error(format!(
            "replay: {PROGRAM} cannot be run: {error}; is it installed beside pvm?"
        )),
        Ok(output) => {
            let complaints = String::from_utf8_lossy(&output.stderr)
                .lines()
                .map(String::from)
                .collect();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let json = if json {
                serde_json::from_str(&text).into_iter().collect()
            } else {
                Vec::new()
            };
            Outcome {
                text,
                json,
                errors: complaints,
                failed: !output.status.success(),
                ..Outcome::default()
            }
        }
    }
}
