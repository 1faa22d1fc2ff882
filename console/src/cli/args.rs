//! Parses the command line of `pvm`.

use crate::arguments::parse_tid;
use crate::command::ShellOptions;
use crate::commands::{self, unknown_command_hint};
use clap::Parser;
use sempa_proto::Tid;
use std::ffi::OsString;
use std::path::PathBuf;

/// Console of a Sempa virtual machine: starts it if none is running, adds hosts, and starts, lists,
/// migrates and ends tasks.
///
/// Without a command, reads commands from its input. With one, executes it and exits: `pvm conf`,
/// `pvm add h2 h3`, `pvm spawn -3 hello`. `pvm help` lists the commands, `pvm help NAME`
/// explains one.
#[derive(Debug, Parser)]
#[command(
    name = "pvm",
    version,
    override_usage = "pvm [-dMASK] [-nNAME] [HOSTFILE]\n       pvm [--json] COMMAND [ARG ...]\n       pvm [-dMASK] [-nNAME] start [HOSTFILE]"
)]
struct Cli {
    /// Debug mask for a daemon that is started
    #[arg(short = 'd', value_name = "MASK")]
    debug: Option<String>,
    /// Name or address of this host for a daemon that is started
    #[arg(short = 'n', value_name = "NAME")]
    name: Option<String>,
    /// Print JSON, one value per line, for every command that prints something
    #[arg(long)]
    json: bool,
    /// Internal option of the detached drain process, which outlives the command that the user
    /// typed. The value is the tid of the console that requested the drain, or `t0` for a shell.
    #[arg(long, hide = true, value_name = "TID", value_parser = parse_requester)]
    apart: Option<Tid>,
    /// Internal option of the completion files of shells: print the completions of the last word of
    /// a command line, which begins with a command, and exit.
    #[arg(long, hide = true, value_name = "LINE", exclusive = true)]
    complete: Option<String>,
    /// A command with its arguments, or a host file (written as ./NAME if a command has the same
    /// name)
    #[arg(trailing_var_arg = true, value_name = "COMMAND | HOSTFILE")]
    words: Vec<String>,
}

/// The mode that the command line selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Starts an interactive console. Contains the arguments for the daemon, which the console
    /// starts if no daemon runs.
    Console(Vec<OsString>),
    /// Starts a daemon with these arguments, if no daemon runs, and exits.
    Start(Vec<OsString>),
    /// Prints the completions of the last word of this line.
    Complete(String),
    /// Executes one command and exits.
    OneShot {
        /// The command's name and its arguments. Never empty.
        words: Vec<String>,
        options: ShellOptions,
    },
}

/// Reason why the command line is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArgsError {
    /// The options are wrong, or the user requested the help text or the version. The error
    /// contains the text, and clap prints it.
    #[error(transparent)]
    Clap(#[from] clap::Error),
    /// The contained word is neither a command nor a file.
    #[error("{0}: not found. {hint}", hint = unknown_command_hint(.0))]
    NotFound(String),
    /// `start` names a host file that does not exist. Contains the name.
    #[error("{0}: there is no such host file")]
    NoHostFile(String),
    /// Words follow the host file. Contains the name of the host file.
    #[error("{0}: one host file is enough")]
    ExtraWords(String),
    /// `--json` is given for a command without JSON output, or without a command. Contains the
    /// reason as a clause.
    #[error("--json belongs to a command that prints something; {0}")]
    JsonUnsupported(String),
}

/// Parses the arguments of the program. The first argument is the program's name.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Mode, ArgsError> {
    let Cli {
        debug,
        name,
        mut json,
        apart: drain_requester,
        complete,
        mut words,
    } = Cli::try_parse_from(args)?;
    if let Some(line) = complete {
        return Ok(Mode::Complete(line));
    }
    let mut daemon_args: Vec<OsString> = Vec::new();
    daemon_args.extend(debug.map(|mask| format!("-d{mask}").into()));
    daemon_args.extend(name.map(|name| format!("-n{name}").into()));
    let Some(first_word) = words.first().cloned() else {
        return if json {
            Err(no_json_error(None))
        } else {
            Ok(Mode::Console(daemon_args))
        };
    };
    let is_command = commands::find_command(&first_word).is_some();
    json |= commands::take_json(&mut words);
    if json && is_command && !commands::has_json(&first_word) {
        return Err(no_json_error(Some(&first_word)));
    }
    let host_files = if first_word == "start" {
        &words[1..]
    } else {
        &words[..]
    };
    let asks_for_help = commands::find_command(&first_word)
        .is_some_and(|spec| commands::asks_for_help(spec, &words[1..]));
    if is_command && (first_word != "start" || asks_for_help) {
        return Ok(Mode::OneShot {
            words,
            options: ShellOptions {
                prints_json: json,
                requester: drain_requester,
            },
        });
    }
    match host_files {
        [] => {}
        [file] if PathBuf::from(file).is_file() => daemon_args.push(file.into()),
        [first_word, ..] if PathBuf::from(first_word).is_file() => {
            return Err(ArgsError::ExtraWords(first_word.clone()));
        }
        [file, ..] if is_command => return Err(ArgsError::NoHostFile(file.clone())),
        [first_word, ..] => return Err(ArgsError::NotFound(first_word.clone())),
    }
    Ok(if first_word == "start" {
        Mode::Start(daemon_args)
    } else {
        Mode::Console(daemon_args)
    })
}

/// The value of `--apart` is not a tid.
#[derive(Debug, thiserror::Error)]
#[error("not a tid")]
struct RequesterError;

fn parse_requester(word: &str) -> Result<Tid, RequesterError> {
    parse_tid(word).ok_or(RequesterError)
}

fn no_json_error(command: Option<&str>) -> ArgsError {
    ArgsError::JsonUnsupported(match command {
        Some(name) => format!("{name} prints nothing that a program could read"),
        None => "none was given".to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_mode(line: &str) -> Result<Mode, String> {
        parse(line.split(' ').map(OsString::from)).map_err(|error| error.to_string())
    }

    /// The name of a command selects [`Mode::OneShot`]. The word `--json` is removed if it is an
    /// option of the command; the word stays if it belongs to a program or an alias.
    #[test]
    fn command_name_selects_oneshot_mode() {
        let one_shot_for = |words: &[&str], json, drain_requester| {
            Ok(Mode::OneShot {
                words: words.iter().map(|word| word.to_string()).collect(),
                options: ShellOptions {
                    prints_json: json,
                    requester: drain_requester,
                },
            })
        };
        let one_shot = |words: &[&str], json| one_shot_for(words, json, None);
        assert_eq!(
            parse_mode("pvm --apart t0 --json drain h2"),
            one_shot_for(&["drain", "h2"], true, Some(Tid::NONE))
        );
        assert!(parse_mode("pvm --apart h2 drain h2").is_err());
        assert_eq!(parse_mode("pvm conf"), one_shot(&["conf"], false));
        assert_eq!(
            parse_mode("pvm ps -a -l"),
            one_shot(&["ps", "-a", "-l"], false)
        );
        assert_eq!(
            parse_mode("pvm spawn -3 hello --json"),
            one_shot(&["spawn", "-3", "hello", "--json"], false)
        );
        assert_eq!(parse_mode("pvm --json conf"), one_shot(&["conf"], true));
        assert_eq!(parse_mode("pvm conf --json"), one_shot(&["conf"], true));
        assert_eq!(
            parse_mode("pvm ps -a --json"),
            one_shot(&["ps", "-a"], true)
        );
        assert_eq!(
            parse_mode("pvm spawn -3 --json hello -v"),
            one_shot(&["spawn", "-3", "hello", "-v"], true)
        );
        assert_eq!(
            parse_mode("pvm echo --json"),
            one_shot(&["echo", "--json"], false)
        );
        assert_eq!(
            parse_mode("pvm mstat h2 --json"),
            one_shot(&["mstat", "h2"], true)
        );
        assert_eq!(parse_mode("pvm alias --json"), one_shot(&["alias"], true));
        assert_eq!(
            parse_mode("pvm alias x conf --json"),
            one_shot(&["alias", "x", "conf", "--json"], false)
        );
        assert_eq!(
            parse_mode("pvm --json halt"),
            Err(no_json_error(Some("halt")).to_string())
        );
        assert_eq!(
            parse_mode("pvm --json"),
            Err(no_json_error(None).to_string())
        );
        assert_eq!(
            parse_mode("pvm foo"),
            Err("foo: not found. 'help' lists the commands.".into())
        );
        assert_eq!(
            parse_mode("pvm start --help"),
            one_shot(&["start", "--help"], false)
        );
    }

    #[test]
    fn shells_request_completions() {
        let words = ["pvm", "--complete", "migrate t4"].map(OsString::from);
        assert_eq!(
            parse(words).ok(),
            Some(Mode::Complete("migrate t4".to_string()))
        );
    }

    #[test]
    fn host_file_and_options_go_to_daemon() {
        assert_eq!(parse_mode("pvm"), Ok(Mode::Console(Vec::new())));
        let host_file = "/etc/passwd";
        assert_eq!(
            parse_mode(&format!("pvm -d0x8 -nha1 {host_file}")),
            Ok(Mode::Console(vec![
                "-d0x8".into(),
                "-nha1".into(),
                host_file.into()
            ]))
        );
        assert_eq!(
            parse_mode("pvm -nha1 start"),
            Ok(Mode::Start(vec!["-nha1".into()]))
        );
        assert_eq!(
            parse_mode(&format!("pvm start {host_file}")),
            Ok(Mode::Start(vec![host_file.into()]))
        );
        assert_eq!(
            parse_mode("pvm start nofile"),
            Err("nofile: there is no such host file".into())
        );
    }
}
