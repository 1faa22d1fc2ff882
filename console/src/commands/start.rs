//! `start`: starts the virtual machine.
//!
//! On the program's command line, `start` selects a mode of the program. In the console of a
//! running virtual machine, `start` is refused.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::session::Session;
use libpvm::Error;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "start",
    summary: "Start the virtual machine in the background",
    detail: "Syntax:  pvm [ -dMASK ] [ -nNAME ] start [ hostfile ]\n",
    parse: |args| require_no_args("start", args, ParsedCommand::vm_command(StartCommand)),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct StartCommand;

impl VmCommand for StartCommand {
    fn run(&self, _session: &mut Session) -> Result<Outcome, Error> {
        Ok(Outcome::from_refusal(
            "start: the virtual machine is running already",
        ))
    }
}
