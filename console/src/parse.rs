//! Turns words into commands.
//!
//! The parser never contacts the virtual machine: every error in a line is reported before anything
//! is done.

use crate::checkpoint::{self, CheckpointCommand, CheckpointsCommand, RestartCommand};
use crate::drain::{self, DrainCommand};
use crate::help;
use crate::job::{self, JobCommand};
use crate::owner::{self, OwnerCommand};
use crate::spawn::{self, SpawnCommand};
use crate::trace::{self, TraceCommand};
use crate::usage::{self, UsageCommand};
use crate::why::{self, WhyCommand};
use crate::words::option_value;
use nix::sys::signal::Signal;
use sempa_proto::Tid;
use sempa_proto::task::DEBUG_QUERY_WORDS_MAX;
use std::str::FromStr;

/// Which tasks `ps` shows and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PsOptions {
    pub(crate) scope: PsScope,
    /// Also shows parent and process id.
    pub(crate) long: bool,
    /// Also shows the console itself and tasks without flags.
    pub(crate) all_tasks: bool,
}

/// Which hosts `ps` asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum PsScope {
    /// The console's own host.
    #[default]
    Here,
    Everywhere,
    /// The host with this tid, or this one task.
    Tid(Tid),
    /// The host with this name.
    Host(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SignalCommand {
    pub(crate) signal: i32,
    pub(crate) tids: Vec<Tid>,
}

/// A parsed console command with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Adds hosts. Each string is a line in host-file format.
    Add(Vec<String>),
    Alias {
        name: String,
        words: Vec<String>,
    },
    Aliases,
    /// Shows the host table.
    Conf,
    /// Shows which hosts would accept the task, or whether `to` would.
    CanMigrate {
        tid: Tid,
        to: Option<String>,
    },
    /// Writes a checkpoint of a job to the store.
    Checkpoint(CheckpointCommand),
    /// Lists or removes checkpoints in the store.
    Checkpoints(CheckpointsCommand),
    /// Restarts a job from a checkpoint.
    Restart(RestartCommand),
    /// Migrates all tasks away from a host.
    Drain(DrainCommand),
    /// Lets a drained host accept tasks again.
    Undrain {
        host: String,
    },
    /// Removes the named hosts.
    Delete(Vec<String>),
    Echo(Vec<String>),
    /// Shows the event log from number `from` on; with `follow`, waits for further events.
    Events {
        from: u64,
        follow: bool,
    },
    /// Exports variables, or shows the exported ones if the list is empty.
    Export(Vec<String>),
    /// Shows one option, or all.
    Getopt(Option<String>),
    /// Ends the virtual machine.
    Halt,
    /// Shows help about one command, or all.
    Help(Option<String>),
    /// Shows the console's own tid.
    Id,
    /// Shows the console's memory usage.
    Idump,
    /// Lists, shows, kills, suspends or resumes whole jobs.
    Job(JobCommand),
    /// Lists jobs; with `long`, also their tasks.
    Jobs {
        long: bool,
    },
    /// Sends SIGTERM to the tasks, or to their children.
    Kill {
        children: bool,
        tids: Vec<Tid>,
    },
    /// Migrates a task to a host.
    Migrate {
        tid: Tid,
        to: String,
    },
    /// Shows the state of the named hosts.
    Mstat(Vec<String>),
    /// Lists mailbox classes that match the pattern; an empty one matches all.
    Names(String),
    /// Directives of this machine's owner.
    Owner(OwnerCommand),
    Ps(PsOptions),
    /// Shows the state of tasks. A word that is no tid becomes [`Tid::NONE`].
    Pstat(Vec<Tid>),
    /// Inserts an entry into a mailbox class.
    Put {
        name: String,
        flags: i32,
    },
    /// Leaves the console; the virtual machine keeps running.
    Quit,
    /// Simulates a recorded log under another policy. The words are the arguments.
    Replay(Vec<String>),
    /// Kills all tasks and cleans the mailbox.
    Reset,
    /// Removes mailbox entries without an owner: all, those of a class, or one.
    ResetInfo {
        class: Option<String>,
        index: Option<i32>,
    },
    /// Without a name, shows all variables; without a value, shows one; otherwise sets one.
    Setenv {
        name: Option<String>,
        value: Option<String>,
    },
    /// Sets a PVM option of the console.
    Setopt {
        name: String,
        value: i32,
    },
    /// Sends a signal to tasks.
    Sig(SignalCommand),
    Spawn(SpawnCommand),
    /// Starts the virtual machine. Valid only on the program's command line.
    Start,
    /// Sends a debug query to the daemon.
    Tickle(Vec<i32>),
    /// Selects the events that traced tasks record.
    Trace(Vec<TraceCommand>),
    /// Names of aliases to remove.
    Unalias(Vec<String>),
    /// Removes variables from the exported ones.
    Unexport(Vec<String>),
    /// Shows resource usage of users and jobs.
    Usage(UsageCommand),
    Version,
    /// Explains decisions of the resource manager.
    Why(WhyCommand),
}

/// Why words are not a valid command. The text is printed as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ParseError {
    #[error("{0}: not found")]
    NotFound(String),
    /// Too few or too many words.
    #[error("{0}: wrong #args")]
    WrongArgs(&'static str),
    /// Options without an argument after them.
    #[error("incorrect arg count")]
    OnlyOptions,
    /// A single `-`: what remains of `->` after a shell took the `>` as a redirection.
    #[error("unknown flag -; in a shell the option -> needs quotes: '->'")]
    LoneDash,
    /// The command has no such option.
    #[error("unknown flag -{0}")]
    UnknownFlag(String),
    /// The word is neither `t40001` nor `40001`.
    #[error("{command}: {word} is not a task id: write it as t40001")]
    NotATid { command: &'static str, word: String },
    /// The word is not of the kind that is required.
    #[error("{command}: {word} is not {expected}")]
    WrongType {
        command: &'static str,
        word: String,
        /// What is required, with an article, such as "a number".
        expected: &'static str,
    },
    /// The argument of `reset` is unknown.
    #[error("\"{0}\" arg to reset not valid")]
    Reset(String),
}

/// Commands without output that a program could read.
const COMMANDS_WITHOUT_JSON: [&str; 10] = [
    "echo", "halt", "help", "idump", "put", "quit", "reset", "start", "unalias", "unexport",
];

/// True if the command supports JSON output.
pub(crate) fn has_json(command: &str) -> bool {
    !COMMANDS_WITHOUT_JSON.contains(&command)
}

/// Removes `--json` from a command's own words; true if it was there.
///
/// Words after the program of `spawn` belong to that program, and the words of an alias belong to
/// the alias.
pub(crate) fn take_json(words: &mut Vec<String>) -> bool {
    let Some(command) = words.first().filter(|name| has_json(name)) else {
        return false;
    };
    let own_words = match command.as_str() {
        "spawn" => 1 + spawn::option_count(&words[1..]),
        "alias" | "setenv" => words.len().min(2),
        _ => words.len(),
    };
    let found = words[..own_words].iter().position(|word| word == "--json");
    found.map(|at| words.remove(at)).is_some()
}

/// Parses words into a command. Returns `None` for no words.
pub(crate) fn parse(words: &[String]) -> Result<Option<Command>, ParseError> {
    let Some((name, args)) = words.split_first() else {
        return Ok(None);
    };
    let Some(entry) = help::find(name) else {
        return Err(ParseError::NotFound(name.clone()));
    };
    command(entry.name, args).map(Some)
}

fn command(name: &'static str, args: &[String]) -> Result<Command, ParseError> {
    let wrong = || Err(ParseError::WrongArgs(name));
    let one_or_more = |make: fn(Vec<String>) -> Command| {
        if args.is_empty() {
            wrong()
        } else {
            Ok(make(args.to_vec()))
        }
    };
    let no_args = |command: Command| {
        if args.is_empty() {
            Ok(command)
        } else {
            wrong()
        }
    };
    match (name, args) {
        ("add", _) => one_or_more(Command::Add),
        ("alias", [name, words @ ..]) if !words.is_empty() => Ok(Command::Alias {
            name: name.clone(),
            words: words.to_vec(),
        }),
        ("alias", _) => Ok(Command::Aliases),
        ("checkpoint", _) => checkpoint::parse(args).map(Command::Checkpoint),
        ("checkpoints", _) => checkpoint::parse_list(args).map(Command::Checkpoints),
        ("restart", _) => checkpoint::parse_restart(args).map(Command::Restart),
        ("conf", _) => no_args(Command::Conf),
        ("delete", _) => one_or_more(Command::Delete),
        ("drain", _) => drain::parse(args).map(Command::Drain),
        ("undrain", [host]) => Ok(Command::Undrain { host: host.clone() }),
        ("echo", _) => Ok(Command::Echo(args.to_vec())),
        ("events", _) => events(args),
        ("export", _) => Ok(Command::Export(args.to_vec())),
        ("getopt", []) => Ok(Command::Getopt(None)),
        ("getopt", [option]) => Ok(Command::Getopt(Some(option.clone()))),
        ("halt", _) => no_args(Command::Halt),
        ("help", []) => Ok(Command::Help(None)),
        ("help", [name]) => Ok(Command::Help(Some(name.clone()))),
        ("id", _) => no_args(Command::Id),
        ("idump", [] | [_]) => Ok(Command::Idump),
        ("job", _) => job::parse(args).map(Command::Job),
        ("jobs", _) => jobs(args),
        ("kill", _) => kill(args),
        ("can-migrate", [tid]) => Ok(Command::CanMigrate {
            tid: parse_task_tid(name, tid)?,
            to: None,
        }),
        ("can-migrate", [tid, host]) => Ok(Command::CanMigrate {
            tid: parse_task_tid(name, tid)?,
            to: Some(host.clone()),
        }),
        ("migrate", [tid, host]) => Ok(Command::Migrate {
            tid: parse_task_tid(name, tid)?,
            to: host.clone(),
        }),
        ("mstat", _) => one_or_more(Command::Mstat),
        ("names", []) => Ok(Command::Names(String::new())),
        ("names", [pattern]) => Ok(Command::Names(pattern.clone())),
        ("owner", _) => owner::parse(args).map(Command::Owner),
        ("ps", _) => ps(args),
        ("pstat", [_, ..]) => Ok(Command::Pstat(
            args.iter()
                .map(|word| parse_tid(word).unwrap_or(Tid::NONE))
                .collect(),
        )),
        // PVM's console requires a third word and ignores it.
        ("put", [class, flags] | [class, flags, _]) => Ok(Command::Put {
            name: class.clone(),
            flags: parse_number(name, flags)?,
        }),
        ("quit", _) => no_args(Command::Quit),
        ("replay", [_, ..]) => Ok(Command::Replay(args.to_vec())),
        ("reset", _) => reset(args),
        ("setenv", []) => Ok(Command::Setenv {
            name: None,
            value: None,
        }),
        ("setenv", [name]) => Ok(Command::Setenv {
            name: Some(name.clone()),
            value: None,
        }),
        ("setenv", [name, words @ ..]) => Ok(setenv(name, words.join(" "))),
        ("setopt", [option, value]) => Ok(Command::Setopt {
            name: option.clone(),
            value: parse_number(name, value)?,
        }),
        ("sig", [signal, tids @ ..]) if !tids.is_empty() => sig(signal, tids),
        ("spawn", []) => wrong(),
        ("spawn", _) => spawn::parse(args).map(Command::Spawn),
        ("start", _) => no_args(Command::Start),
        ("tickle", [_, ..]) if args.len() <= DEBUG_QUERY_WORDS_MAX => args
            .iter()
            .map(|word| parse_number(name, word))
            .collect::<Result<_, _>>()
            .map(Command::Tickle),
        ("trace", _) => trace::parse(args).map(Command::Trace),
        ("unalias", _) => one_or_more(Command::Unalias),
        ("unexport", _) => Ok(Command::Unexport(args.to_vec())),
        ("usage", _) => usage::parse(args).map(Command::Usage),
        ("version", _) => no_args(Command::Version),
        ("why", _) => why::parse(args).map(Command::Why),
        _ => wrong(),
    }
}

/// Parses a tid as the console prints it: `t40001`, or the hexadecimal number alone.
pub(crate) fn parse_tid(word: &str) -> Option<Tid> {
    let digits = word
        .strip_prefix('t')
        .or_else(|| word.strip_prefix("0x"))
        .unwrap_or(word);
    let raw = u32::from_str_radix(digits, 16).ok()?;
    // `from_str_radix` accepts a sign, but a tid has none.
    digits
        .starts_with(|c: char| c.is_ascii_hexdigit())
        .then(|| Tid::from_raw(raw.cast_signed()))
}

fn parse_any_tid(command: &'static str, word: &str) -> Result<Tid, ParseError> {
    parse_tid(word).ok_or_else(|| ParseError::NotATid {
        command,
        word: word.to_string(),
    })
}

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

fn parse_number<T: FromStr>(command: &'static str, word: &str) -> Result<T, ParseError> {
    word.parse().map_err(|_| ParseError::WrongType {
        command,
        word: word.to_string(),
        expected: "a number",
    })
}

fn events(args: &[String]) -> Result<Command, ParseError> {
    let (mut from, mut follow) = (0, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option_value("events", "--from", arg, &mut rest)? {
            Some(value) => from = parse_number("events", value)?,
            None if arg == "--follow" || arg == "-f" => follow = true,
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(
                    arg.trim_start_matches('-').to_string(),
                ));
            }
            None => return Err(ParseError::WrongArgs("events")),
        }
    }
    Ok(Command::Events { from, follow })
}

/// Splits name and value as the C library's `putenv` does: the first `=` ends the name.
fn setenv(name: &str, value: String) -> Command {
    let (name, value) = match name.split_once('=') {
        Some((name, more)) => (name, format!("{more}={value}")),
        None => (name, value),
    };
    Command::Setenv {
        name: Some(name.to_string()),
        value: Some(value),
    }
}

fn jobs(args: &[String]) -> Result<Command, ParseError> {
    match args {
        [] => Ok(Command::Jobs { long: false }),
        [flag] if flag == "-l" => Ok(Command::Jobs { long: true }),
        [flag] if flag.starts_with('-') => Err(ParseError::UnknownFlag(flag[1..].to_string())),
        _ => Err(ParseError::WrongArgs("jobs")),
    }
}

/// Parses the arguments of `kill`.
///
/// As in PVM, options are recognized only before the tids. After them they would change which tasks
/// are killed.
fn kill(args: &[String]) -> Result<Command, ParseError> {
    let (options, tids) = args.split_at(args.iter().take_while(|arg| arg.starts_with('-')).count());
    let mut letters = options
        .iter()
        .flat_map(|option| option[1..].chars())
        .peekable();
    let children = letters.peek().is_some();
    if let Some(unknown) = letters.find(|letter| *letter != 'c') {
        return Err(ParseError::UnknownFlag(unknown.to_string()));
    }
    if tids.is_empty() {
        return Err(if options.is_empty() {
            ParseError::WrongArgs("kill")
        } else {
            ParseError::OnlyOptions
        });
    }
    let tids = tids
        .iter()
        .map(|word| parse_task_tid("kill", word))
        .collect::<Result<_, _>>()?;
    Ok(Command::Kill { children, tids })
}

fn ps(args: &[String]) -> Result<Command, ParseError> {
    let mut options = PsOptions::default();
    for arg in args {
        let Some(letters) = arg.strip_prefix('-') else {
            return Err(ParseError::WrongArgs("ps"));
        };
        for (at, letter) in letters.char_indices() {
            let rest = &letters[at + letter.len_utf8()..];
            match letter {
                'a' => options.scope = PsScope::Everywhere,
                'l' => options.long = true,
                'x' => options.all_tasks = true,
                'h' if rest.is_empty() => return Err(ParseError::WrongArgs("ps")),
                'h' => {
                    options.scope = PsScope::Tid(parse_any_tid("ps", rest)?);
                    break;
                }
                'n' => {
                    options.scope = PsScope::Host(rest.to_string());
                    break;
                }
                other => return Err(ParseError::UnknownFlag(other.to_string())),
            }
        }
    }
    Ok(Command::Ps(options))
}

fn reset(args: &[String]) -> Result<Command, ParseError> {
    match args {
        [] => Ok(Command::Reset),
        [info] if info == "info" => Ok(Command::ResetInfo {
            class: None,
            index: None,
        }),
        [info, class] if info == "info" => Ok(Command::ResetInfo {
            class: Some(class.clone()),
            index: None,
        }),
        [info, class, index] if info == "info" => Ok(Command::ResetInfo {
            class: Some(class.clone()),
            index: Some(parse_number("reset", index)?),
        }),
        [what, ..] if what != "info" => Err(ParseError::Reset(what.clone())),
        _ => Err(ParseError::WrongArgs("reset")),
    }
}

fn sig(signal: &str, tids: &[String]) -> Result<Command, ParseError> {
    let named = || {
        let name = signal.to_uppercase();
        let name = if name.starts_with("SIG") {
            name
        } else {
            format!("SIG{name}")
        };
        Signal::from_str(&name).ok().map(|signal| signal as i32)
    };
    let known = signal
        .parse::<i32>()
        .ok()
        .filter(|number| (0..=64).contains(number))
        .or_else(named);
    let expected = "a signal";
    let signal = known.ok_or_else(|| ParseError::WrongType {
        command: "sig",
        word: signal.to_string(),
        expected,
    })?;
    let tids = tids
        .iter()
        .map(|word| parse_task_tid("sig", word))
        .collect::<Result<_, _>>()?;
    Ok(Command::Sig(SignalCommand { signal, tids }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::split_words;

    fn command(line: &str) -> Command {
        parse(&split_words(line).expect(line))
            .expect(line)
            .expect(line)
    }

    fn error(line: &str) -> String {
        parse(&split_words(line).expect(line))
            .expect_err(line)
            .to_string()
    }

    fn tid(raw: i32) -> Tid {
        Tid::from_raw(raw)
    }

    /// The parser knows every command that `help` lists.
    #[test]
    fn every_listed_command_parses() {
        for entry in help::COMMANDS {
            let words = [entry.name.to_string()];
            assert!(
                !matches!(parse(&words), Err(ParseError::NotFound(_))),
                "{}",
                entry.name
            );
        }
        assert_eq!(parse(&[]), Ok(None));
    }

    /// Errors have the texts of PVM's console.
    #[test]
    fn error_texts_match_pvm() {
        assert_eq!(error("foo"), "foo: not found");
        assert_eq!(error("con"), "con: not found", "names must be complete");
        for name in [
            "add", "delete", "kill", "mstat", "pstat", "setopt", "sig", "spawn", "tickle",
            "unalias",
        ] {
            assert_eq!(error(name), format!("{name}: wrong #args"));
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
            assert_eq!(error(line), format!("{name}: wrong #args"));
        }
        assert_eq!(error("kill -q t40005"), "unknown flag -q");
        assert_eq!(error("ps -az"), "unknown flag -z");
        assert_eq!(error("kill -c"), "incorrect arg count");
        assert_eq!(error("kill -"), "incorrect arg count");
        assert_eq!(
            error("kill t40005 -c"),
            "kill: -c is not a task id: write it as t40001"
        );
        for line in ["reset bogus", "reset bogus twice"] {
            assert_eq!(error(line), "\"bogus\" arg to reset not valid");
        }
        assert_eq!(error("reset info a 1 2"), "reset: wrong #args");
        assert_eq!(error("tickle"), "tickle: wrong #args");
        assert_eq!(error("tickle x"), "tickle: x is not a number");
        assert_eq!(error("reset info a b"), "reset: b is not a number");
        assert_eq!(error("migrate t40001"), "migrate: wrong #args");
        assert_eq!(
            error("migrate 80000 h3"),
            "migrate: 80000 is not a task id: write it as t40001"
        );
    }

    #[test]
    fn ps_options_combine() {
        let ps = |line: &str| match command(line) {
            Command::Ps(options) => options,
            other => panic!("{other:?}"),
        };
        assert_eq!(ps("ps"), PsOptions::default());
        let long = PsOptions {
            scope: PsScope::Everywhere,
            long: true,
            all_tasks: true,
        };
        assert_eq!(ps("ps -alx"), long);
        assert_eq!(ps("ps -a -l -x"), long);
        assert_eq!(ps("ps -lnh2").scope, PsScope::Host("h2".into()));
        assert_eq!(ps("ps -ht80000").scope, PsScope::Tid(tid(0x80000)));
        assert_eq!(
            error("ps -hzz"),
            "ps: zz is not a task id: write it as t40001"
        );
    }

    /// An option letter may be repeated.
    #[test]
    fn repeated_option_letters_are_accepted() {
        assert_eq!(
            command("kill -cc t40002"),
            Command::Kill {
                children: true,
                tids: vec![tid(0x40002)]
            }
        );
    }

    /// A variable's value is everything that follows its name.
    #[test]
    fn setenv_joins_remaining_words() {
        let set = |name: &str, value: &str| Command::Setenv {
            name: Some(name.into()),
            value: Some(value.into()),
        };
        assert_eq!(command("setenv A b  c 'd  e'"), set("A", "b c d  e"));
        assert_eq!(command("setenv A ''"), set("A", ""));
        assert_eq!(command("setenv A=1 2"), set("A", "1=2"));
    }

    /// Tids are accepted in all spellings, and other words are not.
    #[test]
    fn all_tid_spellings_parse() {
        for word in ["t40002", "40002", "0x40002"] {
            assert_eq!(parse_tid(word), Some(tid(0x40002)), "{word}");
        }
        for word in ["", "t", "tid", "-1", "+1", "t400020000"] {
            assert_eq!(parse_tid(word), None, "{word}");
        }
        assert_eq!(
            command("kill -c t40002 80001"),
            Command::Kill {
                children: true,
                tids: vec![tid(0x40002), tid(0x80001)]
            }
        );
        assert_eq!(command("pstat zz"), Command::Pstat(vec![Tid::NONE]));
    }

    /// Signals are accepted by number and by name.
    #[test]
    fn signals_parse_by_number_and_name() {
        for word in ["9", "KILL", "sigkill", "SIGKILL"] {
            assert_eq!(
                command(&format!("sig {word} t40001")),
                Command::Sig(SignalCommand {
                    signal: 9,
                    tids: vec![tid(0x40001)]
                })
            );
        }
        assert_eq!(error("sig 99 t40001"), "sig: 99 is not a signal");
    }

    /// `events` accepts a start number and `--follow`.
    #[test]
    fn events_options_parse() {
        assert_eq!(
            command("events"),
            Command::Events {
                from: 0,
                follow: false
            }
        );
        assert_eq!(
            command("events --from 7 --follow"),
            Command::Events {
                from: 7,
                follow: true
            }
        );
        assert_eq!(
            command("events --from=7"),
            Command::Events {
                from: 7,
                follow: false
            }
        );
        assert_eq!(error("events --from"), "events: wrong #args");
        assert_eq!(error("events --from x"), "events: x is not a number");
    }
}
