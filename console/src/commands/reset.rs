//! `reset`: kills all tasks and cleans the mailbox.

use crate::arguments::parse_number;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::task::{MailboxRequest, Request};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "reset",
    summary: "End all tasks and clean the mailbox",
    detail: "Syntax:  reset\n\nreset info    only remove mailbox entries without an owner\n\
                 Syntax:  reset info [ class [ index ] ]\n",
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
enum ResetCommand {
    /// Kills all tasks and cleans the mailbox.
    All,
    /// Removes mailbox entries without an owner: all, those of a class, or one.
    Mailbox {
        class: Option<String>,
        index: Option<i32>,
    },
}

fn parse(args: &[String]) -> Result<ResetCommand, ParseError> {
    match args {
        [] => Ok(ResetCommand::All),
        [info] if info == "info" => Ok(ResetCommand::Mailbox {
            class: None,
            index: None,
        }),
        [info, class] if info == "info" => Ok(ResetCommand::Mailbox {
            class: Some(class.clone()),
            index: None,
        }),
        [info, class, index] if info == "info" => Ok(ResetCommand::Mailbox {
            class: Some(class.clone()),
            index: Some(parse_number("reset", index)?),
        }),
        [what, ..] if what != "info" => Err(ParseError::Reset(what.clone())),
        _ => Err(ParseError::WrongArgs("reset")),
    }
}

impl VmCommand for ResetCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        session.vm.ask(match self {
            ResetCommand::All => Request::Reset { kill: true },
            ResetCommand::Mailbox { class, index } => Request::Mailbox(MailboxRequest::Clean {
                name: class.clone().unwrap_or_default(),
                index: *index,
            }),
        })?;
        Ok(Outcome::default())
    }
}
