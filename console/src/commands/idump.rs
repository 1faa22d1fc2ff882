//! `idump`: shows the console's memory usage.

use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;

const PAGE_BYTES: u64 = 4096;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "idump",
    summary: "Show how much memory the console uses",
    detail: "Syntax:  idump [ how ]\n",
    parse: |args| match args {
        [] | [_] => Ok(ParsedCommand::vm_command(IdumpCommand)),
        _ => Err(ParseError::WrongArgs("idump")),
    },
    is_listed: false,
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct IdumpCommand;

impl VmCommand for IdumpCommand {
    /// Shows the resident memory of the console. There is no separate PVM heap to report.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let pages = std::fs::read_to_string("/proc/self/statm").ok();
        let pages = pages
            .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok())
            .unwrap_or(0);
        let line = format!(
            "libpvm [{}]: i_dump() {} bytes total",
            session.vm.tid(),
            pages * PAGE_BYTES
        );
        Ok(Outcome {
            errors: vec![line],
            ..Outcome::default()
        })
    }
}
