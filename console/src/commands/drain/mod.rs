//! `drain`: empties a host, for maintenance or before the host leaves.
//!
//! The resource manager migrates the tasks away; the console polls it and prints progress
//! ([`run`]). If a deadline or `--checkpoint` is given, the console also checkpoints jobs that
//! would not leave in time:
//!
//! 1. The console estimates from the jobs' memory how long checkpoints of all remaining jobs would
//!    take ([`estimate`]).
//! 2. When only that time is left before the deadline, the console checkpoints jobs, one at a time,
//!    in the order of [`jobs::select_job`].
//! 3. With `--checkpoint`, a checkpointed job ends, and at the end every remaining job is
//!    checkpointed and ended. Without `--checkpoint`, checkpointed jobs continue.
//! 4. At the end the console prints what each remaining job would lose if the host left at that
//!    moment.
//!
//! A drain that may checkpoint jobs runs in a process of its own ([`background`]).

mod background;
mod estimate;
mod jobs;
mod order;
mod progress;
mod run;

use self::order::DrainRequest;
use crate::arguments::{parse_duration, parse_option_value, unknown_option_error};
use crate::command::{CommandSpec, Completion, ParsedCommand, ShellOptions, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::terminal::Terminal;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::{Error, Vm};
use std::io;
use std::sync::mpsc;
use std::thread;

pub(super) use self::run::{unknown_host_outcome, unpack_drain_reply};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "drain",
    summary: "Migrate all tasks away from a host and place no others there",
    detail: "Syntax:  drain host [ --deadline time ] [ --checkpoint ]\n\
             Returns when the host is empty, at the deadline (such as 30s, 5m), or when no task has left for 10 s,\n\
             and lists remaining tasks with reasons. The host stays drained until 'undrain'.\n\
             With a deadline, jobs that still have tasks there are checkpointed when just enough time is left, and\n\
             continue. With --checkpoint they are also ended, and in the end all remaining jobs, except those whose\n\
             first task was started by hand and is running.\n\
             Of tasks that leave together the smallest leave first.\n\
             Tasks that were started by hand and tasks that belong to the host stay.\n\
             The resource manager migrates the tasks.\n",
    parse: |args| {
        parse(args).map(|order| ParsedCommand::vm_command(DrainCommand { request: order }))
    },
    completion: Completion::FirstWord(WordKind::Host),
    ..CommandSpec::DEFAULT
};

/// A parsed `drain` command.
#[derive(Debug)]
struct DrainCommand {
    request: DrainRequest,
}

impl VmCommand for DrainCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let console = session.vm.tid();
        if session.is_interactive && self.request.may_checkpoint() {
            return Ok(background::run_from_console(
                console,
                &self.request,
                session.prints_json,
            ));
        }
        let mut text = String::new();
        let outcome = run::drain(&session.vm, &self.request, console, &mut |line| {
            text.push_str(line);
        })?;
        Ok(Outcome { text, ..outcome })
    }

    fn run_before_joining(&self, options: ShellOptions) -> io::Result<Option<Outcome>> {
        if options.requester.is_none() && self.request.may_checkpoint() {
            background::run_from_shell(&self.request, options.prints_json).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Drains a host and prints progress.
    fn run_for_shell(&self, vm: &Vm, options: ShellOptions) -> io::Result<Option<Outcome>> {
        let (line_sender, line_receiver) = mpsc::channel::<String>();
        // A separate thread prints. If the reader of standard output stops reading or closes the
        // pipe, the drain therefore continues.
        let printer = thread::spawn(move || {
            line_receiver
                .iter()
                .for_each(|line| drop(Terminal.print(line.as_bytes())))
        });
        let mut send_line = |line: &str| {
            if !options.prints_json {
                drop(line_sender.send(line.to_string()));
            }
        };
        let console = options
            .requester
            .filter(|tid| tid.is_task())
            .unwrap_or(vm.tid());
        let result = run::drain(vm, &self.request, console, &mut send_line);
        if result.is_ok() {
            // Leaves the virtual machine first, because printing the remaining lines may take
            // arbitrarily long.
            let _ = vm.exit();
        }
        drop(line_sender);
        // `join` fails only if the thread panicked, and printing does not panic.
        let _ = printer.join();
        Ok(Some(result.unwrap_or_else(|error| {
            Outcome::from_error(format!("drain: {error}"))
        })))
    }
}

/// Parses the words after `drain`.
fn parse(args: &[String]) -> Result<DrainRequest, ParseError> {
    let (mut host, mut deadline, mut has_checkpoint_option) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match parse_option_value("drain", "--deadline", arg, &mut rest)? {
            Some(value) => {
                let expected_type = "a time such as 30s or 5m";
                let wrong_type_error = || ParseError::WrongType {
                    command: "drain",
                    word: value.into(),
                    expected: expected_type,
                };
                deadline = Some(
                    parse_duration(value)
                        .filter(|duration| *duration <= order::DEADLINE_MAX)
                        .ok_or_else(wrong_type_error)?,
                );
            }
            None if arg == "--checkpoint" => has_checkpoint_option = true,
            None if arg.starts_with('-') => {
                return Err(unknown_option_error(arg));
            }
            None if host.is_none() => host = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs("drain")),
        }
    }
    Ok(DrainRequest {
        host: host.ok_or(ParseError::WrongArgs("drain"))?,
        deadline,
        checkpoints_all: has_checkpoint_option,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use std::time::Duration;

    fn parse_line(line: &str) -> Result<DrainRequest, ParseError> {
        parse(&words(line))
    }

    #[test]
    fn drain_arguments_parse_in_any_order() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(
            parse_line("h2"),
            Ok(DrainRequest {
                host: "h2".into(),
                deadline: None,
                checkpoints_all: false
            })
        );
        assert_eq!(
            parse_line("h2 --deadline 30s"),
            Ok(DrainRequest {
                host: "h2".into(),
                deadline: seconds(30),
                checkpoints_all: false
            })
        );
        assert_eq!(
            DrainRequest {
                host: "h2".into(),
                deadline: None,
                checkpoints_all: false
            }
            .to_words(),
            ["drain", "h2"]
        );
        let request = parse_line("h2 --deadline 5m --checkpoint").expect("a drain");
        assert_eq!(
            (parse(&request.to_words()[1..]), request.may_checkpoint()),
            (Ok(request.clone()), true),
            "the words parse to the same request"
        );
        assert_eq!(
            parse_line("--deadline=5m h2"),
            Ok(DrainRequest {
                host: "h2".into(),
                deadline: seconds(300),
                checkpoints_all: false
            })
        );
        assert!(
            parse_line("h2 --checkpoint --deadline 30s").is_ok_and(|drain| drain.checkpoints_all)
        );
        for line in ["", "h2 h3", "--deadline 3s", "h2 --deadline"] {
            assert_eq!(
                parse_line(line),
                Err(ParseError::WrongArgs("drain")),
                "{line}"
            );
        }
        assert_eq!(
            parse_line("-x h2"),
            Err(ParseError::UnknownFlag("x".into()))
        );
        for duration_text in ["0s", "x", "3", "2d"] {
            let error = parse_line(&format!("h2 --deadline {duration_text}"))
                .expect_err(duration_text)
                .to_string();
            assert_eq!(
                error,
                format!("drain: {duration_text} is not a time such as 30s or 5m")
            );
        }
    }
}
