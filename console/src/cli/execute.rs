//! Executes lines and commands in a session.

use super::words::split_words;
use crate::command::{LocalContext, ParsedCommand, VmCommand};
use crate::commands::{COMMANDS, parse, take_json};
use crate::outcome::Outcome;
use crate::session::Session;

/// Maximum number of alias replacements per line. More of them mean that aliases form a loop.
const ALIAS_DEPTH_MAX: usize = 100;

/// Executes one line of input.
pub(crate) fn run_line(session: &mut Session, line: &str) -> Outcome {
    match split_words(line) {
        Err(error) => Outcome::refused(error),
        Ok(words) => match replace_alias(session, words) {
            None => Outcome::refused("alias loop"),
            Some(mut words) => {
                let as_json = take_json(&mut words);
                session.as_json = as_json;
                Outcome {
                    as_json,
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
            json: false,
        }),
        Ok(Some(ParsedCommand::OnVm(command))) => {
            let name = words.first().expect("a command has words");
            run_command(session, name, &*command)
        }
        Err(error) => Outcome::refused(error),
    }
}

/// Executes the command with this name. An error of the virtual machine becomes a line that begins
/// with the name.
pub(crate) fn run_command(session: &mut Session, name: &str, command: &dyn VmCommand) -> Outcome {
    command
        .run(session)
        .unwrap_or_else(|error| Outcome::error(format!("{name}: {error}")))
}

/// Replaces an alias at the beginning. Returns `None` if aliases form a loop.
fn replace_alias(session: &Session, mut words: Vec<String>) -> Option<Vec<String>> {
    for _ in 0..ALIAS_DEPTH_MAX {
        let Some(meaning) = words.first().and_then(|first| session.aliases.get(first)) else {
            return Some(words);
        };
        // An alias such as `ps = ps -a` only adds words to the command with the same name.
        let is_recursive = meaning.first() == words.first();
        words.splice(..1, meaning.iter().cloned());
        if is_recursive {
            return Some(words);
        }
    }
    None
}
