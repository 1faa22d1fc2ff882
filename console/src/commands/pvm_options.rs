//! `getopt` and `setopt`: the PVM options of the console's own task.

use crate::arguments::parse_number;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::{Session, options};
use libpvm::Error;
use serde_json::{Map, Value, json};

const OPTION_COMPLETION: Completion = Completion::FirstWord(WordKind::OneOf(|| {
    options::names().map(String::from).collect()
}));

pub(crate) const GETOPT: CommandSpec = CommandSpec {
    name: "getopt",
    summary: "Show options of the console's own task",
    detail: "Syntax:  getopt [ option ]\n",
    parse: |args| parse_getopt(args).map(ParsedCommand::on_vm),
    completion: OPTION_COMPLETION,
    ..CommandSpec::DEFAULT
};

pub(crate) const SETOPT: CommandSpec = CommandSpec {
    name: "setopt",
    summary: "Set options of the console's own task",
    detail: "Syntax:  setopt option value\n",
    parse: |args| parse_setopt(args).map(ParsedCommand::on_vm),
    completion: OPTION_COMPLETION,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct GetoptCommand {
    /// The only option to show. `None` for all.
    name: Option<String>,
}

#[derive(Debug)]
struct SetoptCommand {
    name: String,
    value: i32,
}

fn parse_getopt(args: &[String]) -> Result<GetoptCommand, ParseError> {
    match args {
        [] => Ok(GetoptCommand { name: None }),
        [option] => Ok(GetoptCommand {
            name: Some(option.clone()),
        }),
        _ => Err(ParseError::WrongArgs("getopt")),
    }
}

fn parse_setopt(args: &[String]) -> Result<SetoptCommand, ParseError> {
    match args {
        [option, value] => Ok(SetoptCommand {
            name: option.clone(),
            value: parse_number("setopt", value)?,
        }),
        _ => Err(ParseError::WrongArgs("setopt")),
    }
}

impl VmCommand for GetoptCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let options = match session.options.get(self.name.as_deref()) {
            Ok(options) => options,
            Err(error) => return Ok(Outcome::refused(error)),
        };
        let text = options
            .iter()
            .map(|(name, value)| format!("{name} Currently Set to {value}\n"))
            .collect();
        let values: Map<String, Value> = options
            .iter()
            .map(|(name, value)| (name.to_string(), json!(value)))
            .collect();
        Ok(Outcome::with_values(
            text,
            json!({ "options": values }),
            false,
        ))
    }
}

impl VmCommand for SetoptCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let SetoptCommand { name, value } = self;
        let old = match session.options.set(name, *value) {
            Ok(old) => old,
            Err(error) => return Ok(Outcome::refused(error)),
        };
        Ok(Outcome::with_values(
            format!("{name} Changed from {old} to {value}\n"),
            json!({ "option": name, "old": old, "new": value }),
            false,
        ))
    }
}
