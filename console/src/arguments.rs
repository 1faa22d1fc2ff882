//! Parses arguments of commands: options, tids, users, numbers and durations.

use crate::parse_error::ParseError;
use sempa_proto::Tid;
use std::str::FromStr;
use std::time::Duration;

/// Returns the value of the option `name` if `arg` is that option: for `--name=value` the text
/// after `=`, for `--name value` the next element of `rest`. Returns `None` if `arg` is not that
/// option.
///
/// # Errors
/// Fails with [`ParseError::WrongArgs`] for `command` if the value is missing.
pub(crate) fn parse_option_value<'a>(
    command: &'static str,
    name: &str,
    arg: &'a str,
    rest: &mut impl Iterator<Item = &'a String>,
) -> Result<Option<&'a str>, ParseError> {
    match arg.strip_prefix(name) {
        Some("") => rest
            .next()
            .map(|value| Some(value.as_str()))
            .ok_or(ParseError::WrongArgs(command)),
        Some(value) => Ok(value.strip_prefix('=')),
        None => Ok(None),
    }
}

/// Returns the error for an option that the command does not have. `arg` includes the dashes.
pub(crate) fn unknown_option_error(arg: &str) -> ParseError {
    ParseError::UnknownFlag(arg.strip_prefix('-').unwrap_or(arg).to_string())
}

/// Returns `args`, the arguments of a command that requires at least one argument.
///
/// # Errors
/// Fails with [`ParseError::WrongArgs`] if `args` is empty.
pub(crate) fn require_args(
    command: &'static str,
    args: &[String],
) -> Result<Vec<String>, ParseError> {
    if args.is_empty() {
        Err(ParseError::WrongArgs(command))
    } else {
        Ok(args.to_vec())
    }
}

/// Returns `parsed`, a command without arguments.
///
/// # Errors
/// Fails with [`ParseError::WrongArgs`] if `args` is not empty.
pub(crate) fn require_no_args<C>(
    command: &'static str,
    args: &[String],
    parsed: C,
) -> Result<C, ParseError> {
    if args.is_empty() {
        Ok(parsed)
    } else {
        Err(ParseError::WrongArgs(command))
    }
}

/// Parses a tid as the console prints it (`t40001`), or the hexadecimal number with or without
/// `0x`.
pub(crate) fn parse_tid(word: &str) -> Option<Tid> {
    let digits = word
        .strip_prefix('t')
        .or_else(|| word.strip_prefix("0x"))
        .unwrap_or(word);
    let raw_tid = u32::from_str_radix(digits, 16).ok()?;
    // `from_str_radix` accepts a sign, but a tid has none.
    digits
        .starts_with(|c: char| c.is_ascii_hexdigit())
        .then(|| Tid::from_raw(raw_tid.cast_signed()))
}

/// Parses a tid, which may also belong to a host or a daemon.
pub(crate) fn parse_any_tid(command: &'static str, word: &str) -> Result<Tid, ParseError> {
    parse_tid(word).ok_or_else(|| ParseError::NotATid {
        command,
        word: word.to_string(),
    })
}

/// Parses the tid of a task. The tid of a host or of a daemon is an error.
pub(crate) fn parse_task_tid(command: &'static str, word: &str) -> Result<Tid, ParseError> {
    parse_any_tid(command, word).and_then(|tid| {
        if tid.is_task() {
            Ok(tid)
        } else {
            Err(ParseError::NotATid {
                command,
                word: word.to_string(),
            })
        }
    })
}

/// Parses a list of tids of tasks.
pub(crate) fn parse_task_tids(
    command: &'static str,
    words: &[String],
) -> Result<Vec<Tid>, ParseError> {
    words
        .iter()
        .map(|word| parse_task_tid(command, word))
        .collect()
}

pub(crate) fn parse_number<T: FromStr>(command: &'static str, word: &str) -> Result<T, ParseError> {
    word.parse().map_err(|_| ParseError::WrongType {
        command,
        word: word.to_string(),
        expected: "a number",
    })
}

/// Parses a user id or user name, and returns the user id.
pub(crate) fn parse_user(command: &'static str, word: &str) -> Result<u32, ParseError> {
    let uid_of_name = || {
        nix::unistd::User::from_name(word)
            .ok()
            .flatten()
            .map(|user| user.uid.as_raw())
    };
    let expected_type = "a user";
    word.parse()
        .ok()
        .or_else(uid_of_name)
        .ok_or_else(|| ParseError::WrongType {
            command,
            word: word.to_string(),
            expected: expected_type,
        })
}

/// Parses a duration such as `2h`, `90m`, `30s` or `1d`. Zero is invalid.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let unit_s = match text.chars().last()? {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return None,
    };
    let unit_count: u64 = text[..text.len() - 1].parse().ok()?;
    unit_count
        .checked_mul(unit_s)
        .map(Duration::from_secs)
        .filter(|span| !span.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tid may have the prefix `t` or `0x`. A word with a sign, without digits or with too many
    /// digits is not a tid.
    #[test]
    fn all_tid_spellings_parse() {
        for word in ["t40002", "40002", "0x40002"] {
            assert_eq!(parse_tid(word), Some(Tid::from_raw(0x40002)), "{word}");
        }
        for word in ["", "t", "tid", "-1", "+1", "t400020000"] {
            assert_eq!(parse_tid(word), None, "{word}");
        }
    }
}
