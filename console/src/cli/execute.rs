//! Executes lines and commands in a session.

use super::words::split_words;
use crate::command::{LocalContext, ParsedCommand, VmCommand};
use crate::commands::{COMMANDS, hint_lines, parse, take_json};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use sempa_proto::text::replace_host_numbers;

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
        Err(error) => refusal_with_hints(words, &error),
    }
}

/// Returns the outcome of words that are not a valid command: the reason, and what the user can
/// do.
pub(crate) fn refusal_with_hints(words: &[String], error: &ParseError) -> Outcome {
    Outcome {
        errors: hint_lines(words, error),
        ..Outcome::from_refusal(error)
    }
}

/// Executes a command. If the virtual machine returns an error, the outcome contains an error line
/// that begins with `name`.
pub(crate) fn run_command(session: &mut Session, name: &str, command: &dyn VmCommand) -> Outcome {
    let mut outcome = command
        .run(session)
        .unwrap_or_else(|error| Outcome::from_error(format!("{name}: {error}")));
    name_hosts(session, &mut outcome);
    outcome
}

/// Replaces the numbers of hosts in the error lines by their names. Daemons report numbers where
/// they do not know a name.
fn name_hosts(session: &Session, outcome: &mut Outcome) {
    let mut lines: Vec<&mut String> = outcome
        .errors
        .iter_mut()
        .chain(&mut outcome.refusal)
        .filter(|line| line.contains("host "))
        .collect();
    if lines.is_empty() {
        return;
    }
    // Without a host table the numbers remain.
    let Ok(table) = session.vm.hosts() else {
        return;
    };
    for line in &mut lines {
        **line = replace_host_numbers(line, |host| {
            table.get(host).map(|entry| entry.name.as_str())
        });
    }
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
