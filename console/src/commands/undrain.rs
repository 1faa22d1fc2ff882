//! `undrain`: lets a host accept tasks again.

use super::drain::{unknown_host_outcome, unpack_drain_reply};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::rm::RmQuery;
use serde_json::json;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "undrain",
    summary: "Let a host accept tasks again",
    detail: "Syntax:  undrain host\n",
    parse: |args| match args {
        [host] => Ok(ParsedCommand::vm_command(UndrainCommand {
            host: host.clone(),
        })),
        _ => Err(ParseError::WrongArgs("undrain")),
    },
    completion: Completion::FirstWord(WordKind::Host),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct UndrainCommand {
    host: String,
}

impl VmCommand for UndrainCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let host = &self.host;
        let query = RmQuery::Undrain { host: host.clone() };
        let Some((is_drained, ..)) = unpack_drain_reply(session.vm.ask_rm(&query)?)? else {
            return Ok(unknown_host_outcome("undrain", host));
        };
        Ok(Outcome::with_json(
            format!("{host} accepts tasks\n"),
            json!({ "host": host, "drained": is_drained }),
            false,
        ))
    }
}
