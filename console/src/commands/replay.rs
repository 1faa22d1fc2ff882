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
        _ => Ok(ParsedCommand::local(ReplayCommand {
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
        replay(&self.args, context.json)
    }
}

/// Returns the resource manager's program: in the folder of this one, or from `PATH`.
fn program() -> PathBuf {
    let sibling = std::env::current_exe()
        .ok()
        .map(|own| own.with_file_name(PROGRAM));
    sibling
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PROGRAM.into())
}

/// Runs a replay with these arguments.
fn replay(words: &[String], json: bool) -> Outcome {
    let mut command = Command::new(program());
    command.arg("--replay").args(words);
    if json {
        command.arg("--json");
    }
    match command.output() {
        Err(error) => Outcome::error(format!(
            "replay: {PROGRAM} cannot be run: {error}; is it installed next to pvm?"
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
