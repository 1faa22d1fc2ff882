//! `start`: starts the virtual machine.
//!
//! The program executes the command when it parses its arguments. A virtual machine that already
//! runs refuses it.

use crate::arguments::no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::session::Session;
use libpvm::Error;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "start",
    summary: "Start the virtual machine in the background",
    detail: "Syntax:  pvm [ -dMASK ] [ -nNAME ] start [ hostfile ]\n",
    parse: |args| no_args("start", args, ParsedCommand::on_vm(StartCommand)),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct StartCommand;

impl VmCommand for StartCommand {
    fn run(&self, _session: &mut Session) -> Result<Outcome, Error> {
        Ok(Outcome::refused(
            "start: the virtual machine is running already",
        ))
    }
}
