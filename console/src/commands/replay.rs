//! `replay`: simulates a log that a resource manager recorded, under another policy.
//!
//! Runs the resource manager's program, which makes the decisions. No virtual machine is needed.

use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = "pvm-rm";

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "replay",
    summary: "Simulate a resource manager's recorded log under another policy, and compare",
    detail: "Syntax:  replay log --policy file\nThe log is one that 'pvm-rm --record log' has written.\n",
    parse: |args| match args {
        [] => Err(ParseError::WrongArgs("replay")),
        _ => Ok(ParsedCommand::local_command(ReplayCommand {
            args: args.to_vec(),
        })),
    },
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct ReplayCommand {
    /// Arguments of the resource manager's program.
    args: Vec<String>,
}

impl LocalCommand for ReplayCommand {
    fn run(&self, context: &LocalContext) -> Outcome {
        replay(&self.args, context.prints_json)
    }
}

/// Returns the path of the resource manager's program: in the folder of this program, or the name
/// alone, which is searched for in `PATH`.
fn rm_program() -> PathBuf {
    let sibling_path = std::env::current_exe()
        .ok()
        .map(|program_path| program_path.with_file_name(PROGRAM));
    sibling_path
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PROGRAM.into())
}

/// Runs the resource manager's program with these arguments and returns its output.
fn replay(rm_args: &[String], prints_json: bool) -> Outcome {
    let mut command = Command::new(rm_program());
    command.arg("--replay").args(rm_args);
    if prints_json {
        command.arg("--json");
    }
    match command.output() {
        Err(error) => Outcome::from_error(format!(
            "replay: {PROGRAM} cannot be run: {error}; is it installed next to pvm?"
        )),
        Ok(output) => {
            let error_lines = String::from_utf8_lossy(&output.stderr)
                .lines()
                .map(String::from)
                .collect();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let prints_json = if prints_json {
                serde_json::from_str(&text).into_iter().collect()
            } else {
                Vec::new()
            };
            Outcome {
                text,
                json_values: prints_json,
                errors: error_lines,
                failed: !output.status.success(),
                ..Outcome::default()
            }
        }
    }
}
