//! `version`: shows the version of the PVM interface.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::outcome::Outcome;
use serde_json::json;

const INTERFACE_VERSION: &str = "3.4.6";

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "version",
    summary: "Show the version of the interface",
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
            format!("{INTERFACE_VERSION}\n"),
            json!({ "interface": INTERFACE_VERSION, "sempa": env!("CARGO_PKG_VERSION") }),
            false,
        )
    }
}
