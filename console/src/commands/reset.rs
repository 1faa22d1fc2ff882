//! `reset`: kills tasks and removes mailbox entries.

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
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
enum ResetCommand {
    /// Kills all tasks and resets the mailbox. The console that requests the reset, all interactive
    /// consoles and the resource manager are not killed.
    All,
    /// Removes mailbox entries without an owner: in all classes, in one class, or a single entry.
    Mailbox {
        class: Option<String>,
        index: Option<i32>,
    },
}

fn parse(args: &[String]) -> Result<ResetCommand, ParseError> {
    match args {
        [] => Ok(ResetCommand::All),
        [keyword] if keyword == "info" => Ok(ResetCommand::Mailbox {
            class: None,
            index: None,
        }),
        [keyword, class] if keyword == "info" => Ok(ResetCommand::Mailbox {
            class: Some(class.clone()),
            index: None,
        }),
        [keyword, class, index] if keyword == "info" => Ok(ResetCommand::Mailbox {
            class: Some(class.clone()),
            index: Some(parse_number("reset", index)?),
        }),
        [word, ..] if word != "info" => Err(ParseError::UnknownResetArg(word.clone())),
        _ => Err(ParseError::WrongArgs("reset")),
    }
}

impl VmCommand for ResetCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        session.vm.ask(match self {
            Self::All => Request::Reset { kill_tasks: true },
            Self::Mailbox { class, index } => Request::Mailbox(MailboxRequest::Clean {
                name: class.clone().unwrap_or_default(),
                index: *index,
            }),
        })?;
        Ok(Outcome::default())
    }
}
