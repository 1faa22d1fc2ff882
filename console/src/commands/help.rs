//! `help`: explains one command, or lists all commands.

use super::unknown_command_hint;
use crate::command::{
    CommandSpec, CommandTable, Completion, LocalCommand, LocalContext, ParsedCommand, WordKind,
};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "help",
    summary: "Explain a command",
    detail: "Syntax:  help [ command ]\n  or     command --help\n",
    parse: |args| parse(args).map(ParsedCommand::local_command),
    has_json: false,
    completion: Completion::FirstWord(WordKind::Command),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct HelpCommand {
    /// The command to explain.
    command_name: String,
}

/// Returns the command that explains `spec`.
pub(crate) fn explain(spec: &CommandSpec) -> ParsedCommand {
    ParsedCommand::local_command(HelpCommand {
        command_name: spec.name.to_string(),
    })
}

fn parse(args: &[String]) -> Result<HelpCommand, ParseError> {
    match args {
        [] => Ok(HelpCommand {
            command_name: SPEC.name.to_string(),
        }),
        [name] => Ok(HelpCommand {
            command_name: name.clone(),
        }),
        _ => Err(ParseError::WrongArgs(SPEC.name)),
    }
}

impl LocalCommand for HelpCommand {
    fn run(&self, context: &LocalContext) -> Outcome {
        match help_text(context.commands, &self.command_name) {
            Some(text) => Outcome::from_text(text),
            None => Outcome {
                errors: vec![unknown_command_hint(&self.command_name)],
                ..Outcome::from_refusal(ParseError::NotFound(self.command_name.clone()))
            },
        }
    }
}

/// Returns the text of `help NAME`, or `None` if there is no such command.
fn help_text(commands: CommandTable, name: &str) -> Option<String> {
    let spec = commands.iter().find(|spec| spec.name == name)?;
    let mut text = format!("{:<12}{}\n{}", spec.name, spec.summary, spec.detail);
    if name == SPEC.name {
        text.push_str(&command_list(commands));
    }
    Some(text)
}

/// Returns the list of all commands.
fn command_list(commands: CommandTable) -> String {
    let mut text = String::from("Commands are:\n");
    for spec in commands.iter().filter(|spec| spec.is_listed) {
        text.push_str(&format!("  {:<12}{}\n", spec.name, spec.summary));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_layout_matches_pvm() {
        const UNLISTED: CommandSpec = CommandSpec {
            name: "idump",
            is_listed: false,
            ..SPEC
        };
        const OTHER: CommandSpec = CommandSpec {
            name: "id",
            summary: "Print the console's own tid",
            detail: "Syntax:  id\n",
            ..SPEC
        };
        const TABLE: CommandTable = &[&SPEC, &OTHER, &UNLISTED];
        assert_eq!(
            help_text(TABLE, "help").expect("a command"),
            "help        Explain a command\nSyntax:  help [ command ]\n  or     command --help\nCommands are:\n  \
             help        Explain a command\n  id          Print the console's own tid\n"
        );
        assert_eq!(
            help_text(TABLE, "id").expect("a command"),
            "id          Print the console's own tid\nSyntax:  id\n"
        );
        assert_eq!(help_text(TABLE, "foo"), None);
    }
}
