//! `halt`: ends the virtual machine.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::{AfterCommand, Outcome};
use crate::session::Session;
use libpvm::Error;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "halt",
    summary: "End the virtual machine: all tasks, all daemons",
    detail: "Syntax:  halt\n\
             Returns when the daemon of this host has exited. Names the hosts that did not answer.\n",
    parse: |args| require_no_args("halt", args, ParsedCommand::vm_command(HaltCommand)),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct HaltCommand;

impl VmCommand for HaltCommand {
    fn run(&self, _session: &mut Session) -> Result<Outcome, Error> {
        Ok(Outcome {
            after_command: AfterCommand::Halt,
            ..Outcome::default()
        })
    }

    fn halts_vm(&self) -> bool {
        true
    }
}
