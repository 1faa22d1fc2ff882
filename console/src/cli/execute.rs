//! Executes lines and commands in a session.

use super::words::split_words;
use crate::command::{LocalContext, ParsedCommand, VmCommand};
use crate::commands::{COMMANDS, parse, take_json};
use crate::outcome::Outcome;
use crate::session::Session;

/// Maximum number of alias replacements per line. A line that needs more replacements contains a
/// loop of aliases.
const ALIAS_DEPTH_MAX: usize = 100;

/// Splits a line into words, replaces aliases, removes the option `--json`, and executes the
/// command. An error becomes part of the outcome.
pub(crate) fn run_line(session: &mut Session, line: &str) -> Outcome {
    match split_words(line) {
        Err(error) => Outcome::from_refusal(error),
        Ok(words) => match expand_aliases(session, words) {
            None => Outcome::from_refusal("alias loop"),
            Some(mut words) => {
                let as_json = take_json(&mut words);
                session.prints_json = as_json;
                Outcome {
                    prints_json: as_json,
                    ..run_words(session, &words)
                }
            }
        },
    }
}

/// Executes the words of a command without replacing aliases.
fn run_words(session: &mut Session, words: &[String]) -> Outcome {
    match parse(words) {
        Ok(None) => Outcome::default(),
        Ok(Some(ParsedCommand::Local(command))) => command.run(&LocalContext {
            commands: COMMANDS,
            prints_json: false,
        }),
        Ok(Some(ParsedCommand::Vm(command))) => {
            let name = words.first().expect("a command has words");
            run_command(session, name, &*command)
        }
        Err(error) => Outcome::from_refusal(error),
    }
}

/// Executes a command. If the virtual machine returns an error, the outcome contains an error line
/// that begins with `name`.
pub(crate) fn run_command(session: &mut Session, name: &str, command: &dyn VmCommand) -> Outcome {
    command
        .run(session)
        .unwrap_or_else(|error| Outcome::from_error(format!("{name}: {error}")))
}

/// Replaces the first word as long as it is an alias. Returns `None` after [`ALIAS_DEPTH_MAX`]
/// replacements.
fn expand_aliases(session: &Session, mut words: Vec<String>) -> Option<Vec<String>> {
    for _ in 0..ALIAS_DEPTH_MAX {
        let Some(replacement) = words.first().and_then(|first| session.aliases.get(first)) else {
            return Some(words);
        };
        // An alias such as `ps = ps -a` only adds words to the command with the same name, so
        // nothing more is replaced.
        let is_recursive = replacement.first() == words.first();
        words.splice(..1, replacement.iter().cloned());
        if is_recursive {
            return Some(words);
        }
    }
    None
}
