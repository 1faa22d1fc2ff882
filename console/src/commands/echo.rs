//! `echo`: prints its arguments.

use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::session::Session;
use libpvm::Error;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "echo",
    summary: "Print the arguments",
    detail: "Syntax:  echo [ word ... ]\n",
    parse: |args| {
        Ok(ParsedCommand::vm_command(EchoCommand {
            words: args.to_vec(),
        }))
    },
    has_json: false,
    own_word_count: |_| 0,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct EchoCommand {
    words: Vec<String>,
}

impl VmCommand for EchoCommand {
    fn run(&self, _session: &mut Session) -> Result<Outcome, Error> {
        Ok(Outcome::from_text(self.words.join(" ") + "\n"))
    }
}
