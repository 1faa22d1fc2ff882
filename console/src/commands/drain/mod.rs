//! `drain`: empties a host, for maintenance or before it leaves.
//!
//! The resource manager migrates the tasks away; the console polls it and prints progress
//! ([`run`]). If a deadline or `--checkpoint` is given, the console also checkpoints jobs that
//! would not leave in time:
//!
//! 1. It estimates from the jobs' memory how long checkpoints of all remaining jobs would take
//!    ([`estimate`]).
//! 2. When only that time is left before the deadline, it checkpoints jobs, one at a time, in the
//!    order of [`jobs::select_job`].
//! 3. With `--checkpoint`, a checkpointed job ends, and at the end every remaining job is
//!    checkpointed and ended. Without it, checkpointed jobs continue.
//! 4. At the end it prints what each remaining job would lose if the host left at that moment.
//!
//! A drain that may checkpoint jobs runs in a process of its own ([`background`]).

mod background;
mod estimate;
mod jobs;
mod order;
mod progress;
mod run;

use self::order::DrainOrder;
use crate::arguments::{option_value, parse_duration, unknown_option};
use crate::command::{CommandSpec, Completion, ParsedCommand, ShellOptions, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::terminal::Terminal;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::{Error, Vm};
use std::io;
use std::sync::mpsc;
use std::thread;

pub(super) use self::run::{unknown_host, unpack_drain_reply};

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
    parse: |args| parse(args).map(|order| ParsedCommand::on_vm(DrainCommand { order })),
    completion: Completion::FirstWord(WordKind::Host),
    ..CommandSpec::DEFAULT
};

/// A parsed `drain` command.
#[derive(Debug)]
struct DrainCommand {
    order: DrainOrder,
}

impl VmCommand for DrainCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let console = session.vm.tid();
        if session.is_interactive && self.order.may_checkpoint() {
            return Ok(background::run_from_console(
                console,
                &self.order,
                session.as_json,
            ));
        }
        let mut text = String::new();
        let outcome = run::drain(&session.vm, &self.order, console, &mut |line| {
            text.push_str(line);
        })?;
        Ok(Outcome { text, ..outcome })
    }

    fn run_before_joining(&self, options: ShellOptions) -> io::Result<Option<Outcome>> {
        if options.requester.is_none() && self.order.may_checkpoint() {
            background::run_from_shell(&self.order, options.json).map(Some)
        } else {
            Ok(None)
        }
    }

    /// Drains a host and prints progress.
    fn run_for_shell(&self, vm: &Vm, options: ShellOptions) -> io::Result<Option<Outcome>> {
        let (lines, printed) = mpsc::channel::<String>();
        // A separate thread prints: a reader that has stopped or closed the pipe must not stop the
        // drain.
        let printer = thread::spawn(move || {
            printed
                .iter()
                .for_each(|line| drop(Terminal.print(line.as_bytes())))
        });
        let mut show = |line: &str| {
            if !options.json {
                drop(lines.send(line.to_string()));
            }
        };
        let console = options
            .requester
            .filter(|tid| tid.is_task())
            .unwrap_or(vm.tid());
        let result = run::drain(vm, &self.order, console, &mut show);
        if result.is_ok() {
            // Leaves the virtual machine first: printing the rest may take arbitrarily long.
            let _ = vm.exit();
        }
        drop(lines);
        // Fails only if the thread panicked; printing does not panic.
        let _ = printer.join();
        Ok(Some(result.unwrap_or_else(|error| {
            Outcome::error(format!("drain: {error}"))
        })))
    }
}

/// Parses the words after the command.
fn parse(args: &[String]) -> Result<DrainOrder, ParseError> {
    let (mut host, mut deadline, mut checkpoint) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option_value("drain", "--deadline", arg, &mut rest)? {
            Some(value) => {
                let wanted = "a time such as 30s or 5m";
                let not = || ParseError::WrongType {
                    command: "drain",
                    word: value.into(),
                    expected: wanted,
                };
                deadline = Some(
                    parse_duration(value)
                        .filter(|span| *span <= order::DEADLINE_MAX)
                        .ok_or_else(not)?,
                );
            }
            None if arg == "--checkpoint" => checkpoint = true,
            None if arg.starts_with('-') => {
                return Err(unknown_option(arg));
            }
            None if host.is_none() => host = Some(arg.clone()),
            None => return Err(ParseError::WrongArgs("drain")),
        }
    }
    Ok(DrainOrder {
        host: host.ok_or(ParseError::WrongArgs("drain"))?,
        deadline,
        checkpoint,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use std::time::Duration;

    fn parse_line(line: &str) -> Result<DrainOrder, ParseError> {
        parse(&words(line))
    }

    /// Host and options of `drain` are accepted in any order.
    #[test]
    fn drain_arguments_parse_in_any_order() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(
            parse_line("h2"),
            Ok(DrainOrder {
                host: "h2".into(),
                deadline: None,
                checkpoint: false
            })
        );
        assert_eq!(
            parse_line("h2 --deadline 30s"),
            Ok(DrainOrder {
                host: "h2".into(),
                deadline: seconds(30),
                checkpoint: false
            })
        );
        assert_eq!(
            DrainOrder {
                host: "h2".into(),
                deadline: None,
                checkpoint: false
            }
            .to_words(),
            ["drain", "h2"]
        );
        let both = parse_line("h2 --deadline 5m --checkpoint").expect("a drain");
        assert_eq!(
            (parse(&both.to_words()[1..]), both.may_checkpoint()),
            (Ok(both.clone()), true),
            "the words parse to the same request"
        );
        assert_eq!(
            parse_line("--deadline=5m h2"),
            Ok(DrainOrder {
                host: "h2".into(),
                deadline: seconds(300),
                checkpoint: false
            })
        );
        assert!(parse_line("h2 --checkpoint --deadline 30s").is_ok_and(|drain| drain.checkpoint));
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
        for time in ["0s", "x", "3", "2d"] {
            let error = parse_line(&format!("h2 --deadline {time}"))
                .expect_err(time)
                .to_string();
            assert_eq!(
                error,
                format!("drain: {time} is not a time such as 30s or 5m")
            );
        }
    }
}
