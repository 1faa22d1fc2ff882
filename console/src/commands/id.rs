//! `id`: shows the console's own tid.

use crate::arguments::require_no_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::session::Session;
use libpvm::Error;
use serde_json::json;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "id",
    summary: "Print the console's own tid",
    detail: "Syntax:  id\n",
    parse: |args| require_no_args("id", args, ParsedCommand::vm_command(IdCommand)),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct IdCommand;

impl VmCommand for IdCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let tid = session.vm.tid();
        Ok(Outcome::with_json(
            format!("{tid}\n"),
            json!({ "tid": tid.to_string() }),
            false,
        ))
    }
}
