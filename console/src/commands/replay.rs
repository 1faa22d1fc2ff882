//! `replay`: simulates a log that a resource manager recorded, under another policy.
//!
//! Runs the resource manager's program, which makes the decisions. No virtual machine is needed.

use crate::arguments::{parse_option_value, unknown_option_error};
use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const PROGRAM: &str = "pvm-rm";

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "replay",
    summary: "Simulate a resource manager's recorded log under another policy, and compare",
    detail: "Syntax:  replay log --policy file\nThe log is one that 'pvm-rm --record log' has written.\n",
    parse: |args| parse(args).map(ParsedCommand::local_command),
    ..CommandSpec::DEFAULT
};

#[derive(Debug, PartialEq, Eq)]
struct ReplayCommand {
    log: String,
    /// Name or file of the other policy.
    policy: String,
}

fn parse(args: &[String]) -> Result<ReplayCommand, ParseError> {
    const COMMAND: &str = "replay";
    let (mut log, mut policy) = (None, None);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match parse_option_value(COMMAND, "--policy", arg, &mut rest)? {
            Some(value) => policy = Some(value.to_string()),
            None if arg.starts_with('-') => return Err(unknown_option_error(arg)),
            None if log.is_none() => log = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs(COMMAND)),
        }
    }
    match (log, policy) {
        (Some(log), Some(policy)) => Ok(ReplayCommand { log, policy }),
        _ => Err(ParseError::WrongArgs(COMMAND)),
    }
}

impl LocalCommand for ReplayCommand {
    fn run(&self, context: &LocalContext) -> Outcome {
        replay(self, context.prints_json)
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

/// Runs the resource manager's program and returns its output.
fn replay(request: &ReplayCommand, prints_json: bool) -> Outcome {
    let mut command = Command::new(rm_program());
    command.args(["--replay", &request.log, "--policy", &request.policy]);
    if prints_json {
        command.arg("--json");
    }
    // The progress of the replay and its errors appear at once.
    command.stderr(Stdio::inherit());
    match command.output() {
        Err(error) => Outcome::from_error(format!(
            "replay: {PROGRAM} cannot be run: {error}; is it installed next to pvm?"
        )),
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let prints_json = if prints_json {
                serde_json::from_str(&text).into_iter().collect()
            } else {
                Vec::new()
            };
            Outcome {
                text,
                json_values: prints_json,
                failed: !output.status.success(),
                ..Outcome::default()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    #[test]
    fn replay_needs_log_and_policy() {
        let command = ReplayCommand {
            log: "log".into(),
            policy: "load".into(),
        };
        for line in ["log --policy load", "--policy=load log"] {
            assert_eq!(parse(&words(line)).as_ref(), Ok(&command), "{line}");
        }
        for line in [
            "",
            "log",
            "--policy load",
            "log --policy",
            "a b --policy load",
        ] {
            assert_eq!(parse(&words(line)), Err(ParseError::WrongArgs("replay")));
        }
    }
}
