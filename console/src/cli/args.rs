//! Parses the command line of `pvm`.

use crate::arguments::parse_tid;
use crate::command::ShellOptions;
use crate::commands;
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
    #[arg(long, hide = true, value_name = "TID", value_parser = tid)]
    apart: Option<Tid>,
    /// A command with its arguments, or a host file (written as ./NAME if a command has the same
    /// name)
    #[arg(trailing_var_arg = true, value_name = "COMMAND | HOSTFILE")]
    words: Vec<String>,
}

/// The mode that the command line selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Reads commands. The value contains the arguments for a daemon, if one must be started.
    Console(Vec<OsString>),
    /// Starts a daemon with these arguments, if none is running, and exits.
    Start(Vec<OsString>),
    /// Executes one command and exits.
    OneShot {
        /// The words of the command, at least one.
        words: Vec<String>,
        options: ShellOptions,
    },
}

/// Why the command line is invalid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArgsError {
    /// Wrong options, or a request for help or the version. In all of these cases clap prints the
    /// text.
    #[error(transparent)]
    Clap(#[from] clap::Error),
    /// The word is neither a command nor a file.
    #[error("{0}: not found")]
    NotFound(String),
    /// Words follow the host file.
    #[error("{0}: one host file is enough")]
    ExtraWords(String),
    /// `--json` is given for a command without JSON output, or without a command.
    #[error("--json belongs to a command that prints something; {0}")]
    NoJson(String),
}

/// Parses the arguments, of which the first is the program's name.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Mode, ArgsError> {
    let Cli {
        debug,
        name,
        mut json,
        apart,
        mut words,
    } = Cli::try_parse_from(args)?;
    let mut daemon: Vec<OsString> = Vec::new();
    daemon.extend(debug.map(|mask| format!("-d{mask}").into()));
    daemon.extend(name.map(|name| format!("-n{name}").into()));
    let Some(first) = words.first().cloned() else {
        return if json {
            Err(no_json(None))
        } else {
            Ok(Mode::Console(daemon))
        };
    };
    let command = commands::find(&first).is_some();
    json |= commands::take_json(&mut words);
    if json && command && !commands::has_json(&first) {
        return Err(no_json(Some(&first)));
    }
    let host_files = if first == "start" {
        &words[1..]
    } else {
        &words[..]
    };
    if command && first != "start" {
        return Ok(Mode::OneShot {
            words,
            options: ShellOptions {
                json,
                requester: apart,
            },
        });
    }
    match host_files {
        [] => {}
        [file] if PathBuf::from(file).is_file() => daemon.push(file.into()),
        [file] => return Err(ArgsError::NotFound(file.clone())),
        [first, ..] if PathBuf::from(first).is_file() => {
            return Err(ArgsError::ExtraWords(first.clone()));
        }
        [first, ..] => return Err(ArgsError::NotFound(first.clone())),
    }
    Ok(if first == "start" {
        Mode::Start(daemon)
    } else {
        Mode::Console(daemon)
    })
}

fn tid(word: &str) -> Result<Tid, String> {
    parse_tid(word).ok_or_else(|| "not a tid".to_string())
}

fn no_json(command: Option<&str>) -> ArgsError {
    ArgsError::NoJson(match command {
        Some(name) => format!("{name} prints nothing that a program could read"),
        None => "none was given".to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(line: &str) -> Result<Mode, String> {
        parse(line.split(' ').map(OsString::from)).map_err(|error| error.to_string())
    }

    /// A command name selects one-shot mode. `--json` is removed from the words of the command
    /// where it is an option of the command itself.
    #[test]
    fn command_name_selects_oneshot_mode() {
        let by = |words: &[&str], json, apart| {
            Ok(Mode::OneShot {
                words: words.iter().map(|word| word.to_string()).collect(),
                options: ShellOptions {
                    json,
                    requester: apart,
                },
            })
        };
        let once = |words: &[&str], json| by(words, json, None);
        assert_eq!(
            mode("pvm --apart t0 --json drain h2"),
            by(&["drain", "h2"], true, Some(Tid::NONE))
        );
        assert!(mode("pvm --apart h2 drain h2").is_err());
        assert_eq!(mode("pvm conf"), once(&["conf"], false));
        assert_eq!(mode("pvm ps -a -l"), once(&["ps", "-a", "-l"], false));
        assert_eq!(
            mode("pvm spawn -3 hello --json"),
            once(&["spawn", "-3", "hello", "--json"], false)
        );
        assert_eq!(mode("pvm --json conf"), once(&["conf"], true));
        assert_eq!(mode("pvm conf --json"), once(&["conf"], true));
        assert_eq!(mode("pvm ps -a --json"), once(&["ps", "-a"], true));
        assert_eq!(
            mode("pvm spawn -3 --json hello -v"),
            once(&["spawn", "-3", "hello", "-v"], true)
        );
        assert_eq!(mode("pvm echo --json"), once(&["echo", "--json"], false));
        assert_eq!(mode("pvm mstat h2 --json"), once(&["mstat", "h2"], true));
        assert_eq!(mode("pvm alias --json"), once(&["alias"], true));
        assert_eq!(
            mode("pvm alias x conf --json"),
            once(&["alias", "x", "conf", "--json"], false)
        );
        assert_eq!(
            mode("pvm --json halt"),
            Err(no_json(Some("halt")).to_string())
        );
        assert_eq!(mode("pvm --json"), Err(no_json(None).to_string()));
        assert_eq!(mode("pvm foo"), Err("foo: not found".into()));
    }

    /// A host file and the options are passed to the daemon.
    #[test]
    fn host_file_and_options_go_to_daemon() {
        assert_eq!(mode("pvm"), Ok(Mode::Console(Vec::new())));
        let file = "/etc/passwd";
        assert_eq!(
            mode(&format!("pvm -d0x8 -nha1 {file}")),
            Ok(Mode::Console(vec![
                "-d0x8".into(),
                "-nha1".into(),
                file.into()
            ]))
        );
        assert_eq!(
            mode("pvm -nha1 start"),
            Ok(Mode::Start(vec!["-nha1".into()]))
        );
        assert_eq!(
            mode(&format!("pvm start {file}")),
            Ok(Mode::Start(vec![file.into()]))
        );
        assert_eq!(mode("pvm start nofile"), Err("nofile: not found".into()));
    }
}
