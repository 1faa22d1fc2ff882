//! `setenv`, `export` and `unexport`: the console's environment variables, and the list of
//! variables that spawned tasks receive.

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
        Ok(ParsedCommand::vm_command(ExportCommand {
            variables: names,
        }))
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
        Ok(ParsedCommand::vm_command(UnexportCommand {
            variables: names,
        }))
    },
    has_json: false,
    completion: Completion::EveryWord(WordKind::Variable),
    ..CommandSpec::DEFAULT
};

pub(crate) const SETENV: CommandSpec = CommandSpec {
    name: "setenv",
    summary: "Show or set the console's environment variables",
    detail: "Syntax:  setenv [ name [ value ... ] ]\nA variable reaches spawned tasks when it is exported.\n",
    parse: |args| Ok(ParsedCommand::vm_command(parse_setenv(args))),
    own_word_count: |args| args.len().min(1),
    completion: Completion::FirstWord(WordKind::Variable),
    ..CommandSpec::DEFAULT
};

/// Adds `variables` to the exported variables. If `variables` is empty, shows the exported
/// variables.
#[derive(Debug)]
struct ExportCommand {
    variables: Vec<String>,
}

/// Removes `variables` from the exported variables.
#[derive(Debug)]
struct UnexportCommand {
    variables: Vec<String>,
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
        Some((name, value_start)) => (name.to_string(), format!("{value_start}={value}")),
        None => (name.clone(), value),
    };
    SetenvCommand::Set { name, value }
}

/// Returns the value of `PVM_EXPORT`, and the names of the variables in that value.
fn export_list(session: &Session) -> (String, Vec<String>) {
    let export_text = session.env.get("PVM_EXPORT").cloned().unwrap_or_default();
    let names = export_text
        .split(':')
        .filter(|name| !name.is_empty())
        .map(String::from)
        .collect();
    (export_text, names)
}

fn set_export_list(session: &mut Session, names: &[String]) {
    session
        .env
        .insert("PVM_EXPORT".to_string(), names.join(":"));
}

impl VmCommand for ExportCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (export_text, mut exported_names) = export_list(session);
        if self.variables.is_empty() {
            return Ok(Outcome::with_json(
                format!("PVM_EXPORT={export_text}\n"),
                json!({ "exported": exported_names }),
                false,
            ));
        }
        for name in &self.variables {
            if !exported_names.contains(name) {
                exported_names.push(name.clone());
            }
        }
        set_export_list(session, &exported_names);
        Ok(Outcome::default())
    }
}

impl VmCommand for UnexportCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (_, mut exported_names) = export_list(session);
        exported_names.retain(|name| !self.variables.contains(name));
        set_export_list(session, &exported_names);
        Ok(Outcome::default())
    }
}

impl VmCommand for SetenvCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let env = &mut session.env;
        let (text, json_output) = match self {
            Self::Set {
                name,
                value: json_output,
            } => {
                env.insert(name.clone(), json_output.clone());
                return Ok(Outcome::default());
            }
            Self::Show { name } => {
                let text = env
                    .get(name)
                    .map_or_else(String::new, |json_output| format!("{json_output}\n"));
                (text, variables_json(env.get_key_value(name)))
            }
            Self::ShowAll => {
                let text = env
                    .iter()
                    .map(|(name, json_output)| format!("{name}={json_output}\n"))
                    .collect();
                (text, variables_json(env.iter()))
            }
        };
        Ok(Outcome::with_json(text, json_output, false))
    }
}

/// Returns variables as a JSON object with a key for each variable.
fn variables_json<'a>(variables: impl IntoIterator<Item = (&'a String, &'a String)>) -> Value {
    let variables: Map<String, Value> = variables
        .into_iter()
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    json!({ "variables": variables })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a variable consists of all words after its name.
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
        let set_command = |name: &str, value: &str| SetenvCommand::Set {
            name: name.into(),
            value: value.into(),
        };
        assert_eq!(
            parse(&["A", "b", "c", "d  e"]),
            set_command("A", "b c d  e")
        );
        assert_eq!(parse(&["A", ""]), set_command("A", ""));
        assert_eq!(parse(&["A=1", "2"]), set_command("A", "1=2"));
    }
}
