//! `getopt` and `setopt`: the PVM options of the console's own task.

use crate::arguments::parse_number;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::{Session, options};
use libpvm::Error;
use serde_json::{Map, Value, json};

const OPTION_COMPLETION: Completion = Completion::FirstWord(WordKind::OneOf(|| {
    options::option_names().map(String::from).collect()
}));

pub(crate) const GETOPT: CommandSpec = CommandSpec {
    name: "getopt",
    summary: "Show options of the console's own task",
    detail: "Syntax:  getopt [ option ]\n",
    parse: |args| parse_getopt(args).map(ParsedCommand::vm_command),
    completion: OPTION_COMPLETION,
    ..CommandSpec::DEFAULT
};

pub(crate) const SETOPT: CommandSpec = CommandSpec {
    name: "setopt",
    summary: "Set options of the console's own task",
    detail: "Syntax:  setopt option value\n",
    parse: |args| parse_setopt(args).map(ParsedCommand::vm_command),
    completion: OPTION_COMPLETION,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct GetoptCommand {
    /// Name of the only option to show. `None` shows all options.
    option_name: Option<String>,
}

#[derive(Debug)]
struct SetoptCommand {
    option_name: String,
    value: i32,
}

fn parse_getopt(args: &[String]) -> Result<GetoptCommand, ParseError> {
    match args {
        [] => Ok(GetoptCommand { option_name: None }),
        [option] => Ok(GetoptCommand {
            option_name: Some(option.clone()),
        }),
        _ => Err(ParseError::WrongArgs("getopt")),
    }
}

fn parse_setopt(args: &[String]) -> Result<SetoptCommand, ParseError> {
    match args {
        [option, value] => Ok(SetoptCommand {
            option_name: option.clone(),
            value: parse_number("setopt", value)?,
        }),
        _ => Err(ParseError::WrongArgs("setopt")),
    }
}

impl VmCommand for GetoptCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let options = match session.options.get(self.option_name.as_deref()) {
            Ok(options) => options,
            Err(error) => return Ok(Outcome::from_refusal(error)),
        };
        let text = options
            .iter()
            .map(|(name, value)| format!("{name} Currently Set to {value}\n"))
            .collect();
        let values: Map<String, Value> = options
            .iter()
            .map(|(name, value)| (name.to_string(), json!(value)))
            .collect();
        Ok(Outcome::with_json(
            text,
            json!({ "options": values }),
            false,
        ))
    }
}

impl VmCommand for SetoptCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let Self {
            option_name: name,
            value,
        } = self;
        let previous_value = match session.options.set(name, *value) {
            Ok(previous_value) => previous_value,
            Err(error) => return Ok(Outcome::from_refusal(error)),
        };
        Ok(Outcome::with_json(
            format!("{name} Changed from {previous_value} to {value}\n"),
            json!({ "option": name, "old": previous_value, "new": value }),
            false,
        ))
    }
}
