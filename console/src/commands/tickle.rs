//! `tickle`: sends a debug query to the daemon.

use crate::arguments::parse_number;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::unexpected_reply_error;
use libpvm::Error;
use sempa_proto::task::{DEBUG_QUERY_INTS_MAX, Reply, Request};
use serde_json::json;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "tickle",
    summary: "Send a debug query to the daemon",
    detail: "Syntax:  tickle how [ arg ... ]\nHow:\n  0        memory, into the log\n  1        host table, into the log\n  \
                 2        local tasks, into the log\n  3        pending requests, into the log\n  \
                 4        mailbox, into the log\n  5        show the debug mask\n  6 mask   set the debug mask\n  \
                 7 num    accepted, without effect\n  8 dtid   declare the host with this tid lost\n  \
                 9        statistics, into the log\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    is_listed: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct TickleCommand {
    /// The number of the query, and the arguments of the query.
    numbers: Vec<i32>,
}

fn parse(args: &[String]) -> Result<TickleCommand, ParseError> {
    if args.is_empty() || args.len() > DEBUG_QUERY_INTS_MAX {
        return Err(ParseError::WrongArgs("tickle"));
    }
    let numbers = args
        .iter()
        .map(|word| parse_number("tickle", word))
        .collect::<Result<_, _>>()?;
    Ok(TickleCommand { numbers })
}

impl VmCommand for TickleCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        match session.vm.ask(Request::DebugQuery(self.numbers.clone()))? {
            Reply::DebugValues(numbers) => {
                let numbers_text: String =
                    numbers.iter().map(|number| format!(" {number}")).collect();
                Ok(Outcome::with_json(
                    format!("({numbers_text} )\n"),
                    json!({ "numbers": numbers }),
                    false,
                ))
            }
            _ => Err(unexpected_reply_error()),
        }
    }
}
