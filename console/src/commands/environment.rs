//! `setenv`, `export` and `unexport`: the console's environment variables, and which of them
//! spawned tasks get.

use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::session::Session;
use libpvm::Error;
use serde_json::{Map, Value, json};

pub(crate) const EXPORT: CommandSpec = CommandSpec {
    name: "export",
    summary: "Add variables to the environment of tasks spawned from here",
    detail: "Syntax:  export [ variable ... ]\n",
    parse: |args| {
        let names = args.to_vec();
        Ok(ParsedCommand::on_vm(ExportCommand { names }))
    },
    completion: Completion::EveryWord(WordKind::Variable),
    ..CommandSpec::DEFAULT
};

pub(crate) const UNEXPORT: CommandSpec = CommandSpec {
    name: "unexport",
    summary: "Remove variables from the environment of tasks spawned from here",
    detail: "Syntax:  unexport variable ...\n",
    parse: |args| {
        let names = args.to_vec();
        Ok(ParsedCommand::on_vm(UnexportCommand { names }))
    },
    has_json: false,
    completion: Completion::EveryWord(WordKind::Variable),
    ..CommandSpec::DEFAULT
};

pub(crate) const SETENV: CommandSpec = CommandSpec {
    name: "setenv",
    summary: "Show or set the console's environment variables",
    detail: "Syntax:  setenv [ name [ value ... ] ]\nA variable reaches spawned tasks when it is exported.\n",
    parse: |args| Ok(ParsedCommand::on_vm(parse_setenv(args))),
    own_words: |args| args.len().min(1),
    completion: Completion::FirstWord(WordKind::Variable),
    ..CommandSpec::DEFAULT
};

/// Adds variables to the exported ones. Shows the exported ones if the list is empty.
#[derive(Debug)]
struct ExportCommand {
    names: Vec<String>,
}

/// Removes variables from the exported ones.
#[derive(Debug)]
struct UnexportCommand {
    names: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
enum SetenvCommand {
    ShowAll,
    Show { name: String },
    Set { name: String, value: String },
}

fn parse_setenv(args: &[String]) -> SetenvCommand {
    let (name, value) = match args {
        [] => return SetenvCommand::ShowAll,
        [name] => return SetenvCommand::Show { name: name.clone() },
        [name, words @ ..] => (name, words.join(" ")),
    };
    // Splits as the C library's `putenv` does: the first `=` ends the name.
    let (name, value) = match name.split_once('=') {
        Some((name, more)) => (name.to_string(), format!("{more}={value}")),
        None => (name.clone(), value),
    };
    SetenvCommand::Set { name, value }
}

/// Returns the value of `PVM_EXPORT`, and the variables that it lists.
fn exported(session: &Session) -> (String, Vec<String>) {
    let exported = session.env.get("PVM_EXPORT").cloned().unwrap_or_default();
    let names = exported
        .split(':')
        .filter(|name| !name.is_empty())
        .map(String::from)
        .collect();
    (exported, names)
}

fn set_exported(session: &mut Session, names: &[String]) {
    session
        .env
        .insert("PVM_EXPORT".to_string(), names.join(":"));
}

impl VmCommand for ExportCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (exported, mut list) = exported(session);
        if self.names.is_empty() {
            return Ok(Outcome::with_values(
                format!("PVM_EXPORT={exported}\n"),
                json!({ "exported": list }),
                false,
            ));
        }
        for name in &self.names {
            if !list.contains(name) {
                list.push(name.clone());
            }
        }
        set_exported(session, &list);
        Ok(Outcome::default())
    }
}

impl VmCommand for UnexportCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (_, mut list) = exported(session);
        list.retain(|name| !self.names.contains(name));
        set_exported(session, &list);
        Ok(Outcome::default())
    }
}

impl VmCommand for SetenvCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let env = &mut session.env;
        let (text, value) = match self {
            SetenvCommand::Set { name, value } => {
                env.insert(name.clone(), value.clone());
                return Ok(Outcome::default());
            }
            SetenvCommand::Show { name } => {
                let text = env
                    .get(name)
                    .map_or_else(String::new, |value| format!("{value}\n"));
                (text, variables(env.get_key_value(name)))
            }
            SetenvCommand::ShowAll => {
                let text = env
                    .iter()
                    .map(|(name, value)| format!("{name}={value}\n"))
                    .collect();
                (text, variables(env.iter()))
            }
        };
        Ok(Outcome::with_values(text, value, false))
    }
}

/// Returns variables as JSON, values by name.
fn variables<'a>(variables: impl IntoIterator<Item = (&'a String, &'a String)>) -> Value {
    let variables: Map<String, Value> = variables
        .into_iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    json!({ "variables": variables })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A variable's value is everything that follows its name.
    #[test]
    fn setenv_joins_remaining_words() {
        let parse = |words: &[&str]| {
            parse_setenv(
                &words
                    .iter()
                    .map(|word| word.to_string())
                    .collect::<Vec<_>>(),
            )
        };
        let set = |name: &str, value: &str| SetenvCommand::Set {
            name: name.into(),
            value: value.into(),
        };
        assert_eq!(parse(&["A", "b", "c", "d  e"]), set("A", "b c d  e"));
        assert_eq!(parse(&["A", ""]), set("A", ""));
        assert_eq!(parse(&["A=1", "2"]), set("A", "1=2"));
    }
}
