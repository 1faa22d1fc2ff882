//! `quit`: leaves the console.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::{AfterCommand, Outcome};
use crate::session::Session;
use libpvm::Error;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "quit",
    summary: "Leave the console; the virtual machine keeps running",
    detail: "Syntax:  quit\n",
    parse: |args| require_no_args("quit", args, ParsedCommand::vm_command(QuitCommand)),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct QuitCommand;

impl VmCommand for QuitCommand {
    fn run(&self, _session: &mut Session) -> Result<Outcome, Error> {
        Ok(Outcome {
            after_command: AfterCommand::Quit,
            ..Outcome::default()
        })
    }
}
