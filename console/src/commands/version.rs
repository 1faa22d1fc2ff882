//! `version`: shows the version of the PVM interface and of Sempa.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::outcome::Outcome;
use serde_json::json;

const INTERFACE_VERSION: &str = "3.4.6";
const SEMPA_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the line with which the console greets its user at a terminal.
pub(crate) fn banner() -> String {
    format!("Sempa {SEMPA_VERSION}, PVM interface {INTERFACE_VERSION}; help lists the commands\n")
}

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "version",
    summary: "Show the version of the interface and of Sempa",
    detail: "Syntax:  version\n",
    parse: |args| {
        require_no_args(
            "version",
            args,
            ParsedCommand::local_command(VersionCommand),
        )
    },
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct VersionCommand;

impl LocalCommand for VersionCommand {
    fn run(&self, _context: &LocalContext) -> Outcome {
        Outcome::with_json(
            // Scripts for PVM read the first line.
            format!("{INTERFACE_VERSION}\nSempa {SEMPA_VERSION}\n"),
            json!({ "interface": INTERFACE_VERSION, "sempa": SEMPA_VERSION }),
            false,
        )
    }
}
