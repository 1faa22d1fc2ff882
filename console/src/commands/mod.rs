//! The commands of the console: a file for each command or small family of commands, and the table
//! of all commands.

mod add;
mod alias;
mod can_migrate;
mod checkpoint;
mod checkpoints;
mod conf;
mod delete;
mod drain;
mod echo;
mod environment;
mod event_view;
mod events;
mod halt;
mod help;
mod hints;
mod hosts;
mod id;
mod idump;
mod job;
mod jobs;
mod live_usage;
mod lost;
mod mailbox;
mod migrate;
mod owner;
mod ps;
mod pvm_options;
mod quit;
mod replay;
mod reset;
mod restart;
mod signals;
mod spawn;
mod start;
mod status;
mod tickle;
mod trace;
mod undrain;
mod usage;
mod version;
mod why;
mod work;

pub(crate) use self::hints::{hint_lines, unknown_command_hint};
pub(crate) use self::version::banner;

use crate::command::{CommandSpec, CommandTable, ParsedCommand};
use crate::parse_error::ParseError;

/// All commands, sorted by name.
pub(crate) const COMMANDS: CommandTable = &[
    &add::SPEC,
    &alias::ALIAS,
    &can_migrate::SPEC,
    &checkpoint::SPEC,
    &checkpoints::SPEC,
    &conf::SPEC,
    &delete::SPEC,
    &drain::SPEC,
    &echo::SPEC,
    &events::SPEC,
    &environment::EXPORT,
    &pvm_options::GETOPT,
    &halt::SPEC,
    &help::SPEC,
    &hosts::SPEC,
    &id::SPEC,
    &idump::SPEC,
    &job::SPEC,
    &jobs::SPEC,
    &signals::KILL,
    &lost::SPEC,
    &migrate::SPEC,
    &status::MSTAT,
    &mailbox::NAMES,
    &owner::SPEC,
    &ps::SPEC,
    &status::PSTAT,
    &mailbox::PUT,
    &quit::SPEC,
    &replay::SPEC,
    &reset::SPEC,
    &restart::SPEC,
    &environment::SETENV,
    &pvm_options::SETOPT,
    &signals::SIG,
    &spawn::SPEC,
    &start::SPEC,
    &tickle::SPEC,
    &trace::SPEC,
    &alias::UNALIAS,
    &undrain::SPEC,
    &environment::UNEXPORT,
    &usage::SPEC,
    &version::SPEC,
    &why::SPEC,
    &work::SPEC,
];

/// Returns the table entry of the command with this name.
pub(crate) fn find_command(name: &str) -> Option<&'static CommandSpec> {
    COMMANDS.iter().copied().find(|spec| spec.name == name)
}

/// Parses words into a command. Returns `None` if there are no words.
/// A command with the option `--help`, or with `-h` as its only word, explains itself.
pub(crate) fn parse(words: &[String]) -> Result<Option<ParsedCommand>, ParseError> {
    let Some((name, args)) = words.split_first() else {
        return Ok(None);
    };
    match find_command(name) {
        Some(spec) if asks_for_help(spec, args) => Ok(Some(help::explain(spec))),
        Some(spec) => (spec.parse)(args).map(Some),
        None => Err(ParseError::NotFound(name.clone())),
    }
}

/// True if the words after the command's name ask for its help text.
pub(crate) fn asks_for_help(spec: &CommandSpec, args: &[String]) -> bool {
    let own_args = &args[..(spec.own_word_count)(args)];
    own_args.iter().any(|arg| arg == "--help")
        || matches!(args, [only_arg] if only_arg == "-h" || only_arg == "--help")
}

/// True if the command has JSON output. Also true for an unknown command, whose error is reported
/// later.
pub(crate) fn has_json(command: &str) -> bool {
    find_command(command).is_none_or(|spec| spec.has_json)
}

/// Removes `--json` if it is one of the command's own words. Returns true if the word was removed.
pub(crate) fn take_json(words: &mut Vec<String>) -> bool {
    let Some((command, args)) = words.split_first().filter(|(name, _)| has_json(name)) else {
        return false;
    };
    let own_arg_count =
        find_command(command).map_or(args.len(), |spec| (spec.own_word_count)(args));
    let json_index = words[..=own_arg_count]
        .iter()
        .position(|word| word == "--json");
    json_index.map(|index| words.remove(index)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_text(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(String::from).collect();
        parse(&words).expect_err(line).to_string()
    }

    /// The commands are sorted by name, and each has its syntax and a parser.
    #[test]
    fn table_is_sorted_and_complete() {
        assert!(COMMANDS.windows(2).all(|pair| pair[0].name < pair[1].name));
        for spec in COMMANDS {
            assert!(spec.detail.starts_with("Syntax:  "), "{}", spec.name);
            assert!(spec.detail.ends_with('\n'), "{}", spec.name);
            assert!(!spec.summary.is_empty(), "{}", spec.name);
            let result = parse(&[spec.name.to_string()]);
            assert!(
                result
                    .as_ref()
                    .err()
                    .is_none_or(|error| *error == ParseError::WrongArgs(spec.name)
                        || *error == ParseError::OnlyOptions),
                "{result:?}"
            );
        }
        assert!(parse(&[]).is_ok_and(|command| command.is_none()));
    }

    /// Each command explains itself. A word of a program or of an alias is no request for help.
    #[test]
    fn every_command_has_help_options() {
        let is_help = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
            let spec = find_command(&words[0]).expect("a command");
            asks_for_help(spec, &words[1..])
        };
        for spec in COMMANDS {
            assert!(is_help(&[spec.name, "--help"]), "{}", spec.name);
            assert!(is_help(&[spec.name, "-h"]), "{}", spec.name);
        }
        assert!(is_help(&["spawn", "-3", "--help"]));
        assert!(is_help(&["drain", "h2", "--help"]));
        for words in [
            ["spawn", "hello", "--help"],
            ["alias", "x", "--help"],
            ["echo", "a", "--help"],
            ["setenv", "X", "--help"],
            ["ps", "-h", "40000"],
        ] {
            assert!(!is_help(&words), "{words:?}");
        }
    }

    #[test]
    fn error_texts_match_pvm() {
        assert_eq!(error_text("foo"), "foo: not found");
        assert_eq!(
            error_text("con"),
            "con: not found",
            "names must be complete"
        );
        for name in [
            "add", "delete", "kill", "mstat", "pstat", "setopt", "sig", "spawn", "tickle",
            "unalias",
        ] {
            assert_eq!(error_text(name), format!("{name}: wrong #args"));
        }
        for line in [
            "conf x",
            "halt x",
            "quit x",
            "id x",
            "version x",
            "getopt x y",
            "sig 9",
            "ps foo",
            "ps -h 40000",
        ] {
            let name = line.split(' ').next().expect("a word");
            assert_eq!(error_text(line), format!("{name}: wrong #args"));
        }
        assert_eq!(error_text("kill -q t40005"), "unknown flag -q");
        assert_eq!(error_text("ps -az"), "unknown flag -z");
        assert_eq!(error_text("kill -c"), "incorrect arg count");
        assert_eq!(error_text("kill -"), "incorrect arg count");
        assert_eq!(
            error_text("kill t40005 -c"),
            "kill: -c is not a task id: write it as t40001"
        );
        for line in ["reset bogus", "reset bogus twice"] {
            assert_eq!(error_text(line), "\"bogus\" arg to reset not valid");
        }
        assert_eq!(error_text("reset info a 1 2"), "reset: wrong #args");
        assert_eq!(error_text("tickle"), "tickle: wrong #args");
        assert_eq!(error_text("tickle x"), "tickle: x is not a number");
        assert_eq!(error_text("reset info a b"), "reset: b is not a number");
        assert_eq!(error_text("migrate t40001"), "migrate: wrong #args");
        assert_eq!(
            error_text("migrate 80000 h3"),
            "migrate: 80000 is not a task id: write it as t40001"
        );
    }
}
