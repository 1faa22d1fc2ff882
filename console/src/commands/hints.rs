//! Hints after a wrong command line: the syntax of the command, and the word that was probably
//! meant.

use super::{COMMANDS, find_command};
use crate::command::CommandSpec;
use crate::parse_error::ParseError;

/// Minimum similarity of a suggested word, from 0 to 1, by the Damerau-Levenshtein distance
/// relative to the length of the longer word. One wrong letter of three is similar enough.
const SIMILARITY_MIN: f64 = 0.6;

/// The beginning of a line with the syntax of a command.
const SYNTAX_PREFIX: &str = "Syntax:";

/// Returns the lines that explain `error`, the error in the words of a command.
pub(crate) fn hint_lines(words: &[String], error: &ParseError) -> Vec<String> {
    let spec = words.first().and_then(|name| find_command(name));
    match (error, spec) {
        (ParseError::NotFound(name), _) => vec![unknown_command_hint(name)],
        (_, Some(spec)) => {
            let suggestion = words[1..]
                .iter()
                .find_map(|word| similar_option(spec, word));
            let suggestion = suggestion.map(|option| format!("Did you mean {option}?"));
            suggestion
                .into_iter()
                .chain(syntax_lines(spec).map(String::from))
                .collect()
        }
        (_, None) => Vec::new(),
    }
}

/// Returns what a user can do who has typed a command that does not exist.
pub(crate) fn unknown_command_hint(name: &str) -> String {
    let names = COMMANDS.iter().map(|spec| spec.name);
    match most_similar(name, names) {
        Some(similar_name) => format!("Did you mean '{similar_name}'? 'help' lists the commands."),
        None => "'help' lists the commands.".to_string(),
    }
}

/// Returns the lines of the help text that show the syntax of the command.
fn syntax_lines(spec: &CommandSpec) -> impl Iterator<Item = &'static str> {
    let mut is_syntax = false;
    spec.detail.lines().filter(move |line| {
        // Indented lines continue the syntax.
        is_syntax = line.starts_with(SYNTAX_PREFIX)
            || (is_syntax && (line.starts_with("  ") && !line.trim().is_empty()));
        is_syntax
    })
}

/// Returns the option in the command's help text that is most similar to `word`. `None` if the
/// word is no long option, or is an option of the command.
fn similar_option(spec: &CommandSpec, word: &str) -> Option<&'static str> {
    let (name, _) = word
        .strip_prefix("--")?
        .split_once('=')
        .unwrap_or((&word[2..], ""));
    let options = spec
        .detail
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
        .filter(|option| option.starts_with("--") && option.len() > 3)
        .chain(spec.has_json.then_some("--json"));
    let similar_name = most_similar(name, options.clone().map(|option| &option[2..]))?;
    let mut options = options;
    options
        .find(|option| &option[2..] == similar_name)
        .filter(|_| similar_name != name)
}

fn most_similar<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| {
            let similarity = strsim::normalized_damerau_levenshtein(word, candidate);
            (similarity, candidate)
        })
        .filter(|(similarity, _)| *similarity >= SIMILARITY_MIN)
        .max_by(|(left, _), (right, _)| left.total_cmp(right))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::parse;
    use crate::fixtures::words;

    fn hints(line: &str) -> Vec<String> {
        let words = words(line);
        let error = parse(&words).expect_err(line);
        hint_lines(&words, &error)
    }

    #[test]
    fn similar_command_is_suggested() {
        for (typed, meant) in [
            ("migrat", "migrate"),
            ("halr", "halt"),
            ("evnets", "events"),
            ("spwan", "spawn"),
        ] {
            assert_eq!(
                hints(typed),
                [format!(
                    "Did you mean '{meant}'? 'help' lists the commands."
                )]
            );
        }
        assert_eq!(hints("xyzzy"), ["'help' lists the commands."]);
    }

    #[test]
    fn similar_option_is_suggested() {
        let lines = hints("restart a-1 --forse");
        assert_eq!(lines[0], "Did you mean --force?");
        assert!(lines[1].starts_with("Syntax:  restart"), "{lines:?}");
        assert_eq!(hints("spawn --rwa x")[0], "Did you mean --raw?");
        assert_eq!(hints("spawn --hots=a x")[0], "Did you mean --host?");
        assert_eq!(hints("conf --jsno")[0], "Did you mean --json?");
        assert!(hints("events --limit 3")[0].starts_with("Syntax:"));
    }

    /// Each wrong use of a command is followed by the syntax of the command.
    #[test]
    fn every_command_has_syntax_lines() {
        for spec in COMMANDS {
            let lines: Vec<&str> = syntax_lines(spec).collect();
            assert!(
                lines.first().is_some_and(|line| line.contains(spec.name)),
                "{}: {lines:?}",
                spec.name
            );
        }
        assert_eq!(hints("kill -q t40005"), ["Syntax:  kill [ -c ] tid ..."]);
        assert_eq!(
            hints("trace buf x").len(),
            syntax_lines(find_command("trace").expect("a command")).count()
        );
    }
}
