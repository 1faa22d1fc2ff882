//! Executes one command from the command line. The exit status is zero only if every part of it
//! succeeded.

use crate::drain::{self, DrainCommand};
use crate::format::{self, HostNames};
use crate::halt::{LocalDaemon, halt};
use crate::json;
use crate::owner;
use crate::parse::{Command, parse};
use crate::replay;
use crate::session::{self, AfterCommand, EVENTS_BATCH_MAX, Session, TAG_EVENTS};
use crate::spawn::{Output, TraceOutput};
use crate::terminal::Terminal;
use crate::virtual_machine::{self, VirtualMachine};
use libpvm::{Error, Match, Vm};
use sempa_proto::Tid;
use sempa_proto::event::Event;
use sempa_proto::message::CTX_BASE;
use std::collections::BTreeMap;
use std::io;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;

/// Result of [`run_without_vm`]: what remains to be done for a command.
pub(crate) enum Plan {
    /// Nothing: the command needed no virtual machine and is done.
    Done(ExitCode),
    /// The command must be executed on a virtual machine.
    NeedsVm(Command),
}

/// Parses the words and executes commands that need no virtual machine.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn run_without_vm(words: &[String], json: bool) -> io::Result<Plan> {
    let command = match parse(words) {
        Ok(Some(command)) => command,
        Ok(None) => return Ok(Plan::Done(ExitCode::SUCCESS)),
        Err(error) => {
            Terminal.print_error(&error.to_string());
            return Ok(Plan::Done(ExitCode::FAILURE));
        }
    };
    let outcome = match &command {
        Command::Help(name) => session::help_outcome(name.as_deref()),
        Command::Version => session::version_outcome(),
        Command::Owner(what) => owner::run(what),
        Command::Replay(words) => replay::run(words, json),
        Command::Spawn(spawn)
            if json
                && (spawn.output == Output::Console
                    || spawn.trace == Some(TraceOutput::Console)) =>
        {
            Terminal
                .print_error("spawn: output and records of tasks are no JSON: write them to files with ->FILE and -@FILE");
            return Ok(Plan::Done(ExitCode::FAILURE));
        }
        _ => return Ok(Plan::NeedsVm(command)),
    };
    Terminal.print_oneshot(&outcome, json)?;
    Ok(Plan::Done(exit_code(!outcome.failed)))
}

fn exit_code(good: bool) -> ExitCode {
    if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Executes a command and, if it collects output of a job, waits until the job ends.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn run(
    vm: &Vm,
    mut home: LocalDaemon,
    env: BTreeMap<String, String>,
    words: &[String],
    command: &Command,
    json: bool,
) -> io::Result<ExitCode> {
    if let Command::Events { from, follow: true } = command {
        let error = EventFollower {
            vm,
            names: HostNames::default(),
            next: *from,
            json,
        }
        .run()?;
        Terminal.print_error(&format!("events: {error}"));
        return Ok(ExitCode::FAILURE);
    }
    let mut session = Session::new(vm.clone(), env);
    let outcome = session.run_words(words);
    Terminal.print_oneshot(&outcome, json)?;
    if outcome.next == AfterCommand::Halt {
        return Ok(halt(vm, &mut home));
    }
    while session.has_jobs() {
        match virtual_machine::receive(vm) {
            Ok(message) => Terminal.print(&session.handle_message(&message))?,
            Err(error) => {
                Terminal.print_error(&format!(
                    "pvm: the virtual machine has ended, output is missing: {error}"
                ));
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    // The virtual machine removes this task when its connection closes, even if `exit` fails.
    let _ = vm.exit();
    Ok(exit_code(!outcome.failed))
}

/// Drains a host and prints progress.
///
/// The optional tid is the console that requested the drain, if that is another process.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn drain(
    vm: &Vm,
    request: &DrainCommand,
    requester: Option<Tid>,
    json: bool,
) -> io::Result<ExitCode> {
    let (lines, printed) = mpsc::channel::<String>();
    // A separate thread prints: a reader that has stopped or closed the pipe must not leave the
    // host half drained.
    let printer = thread::spawn(move || {
        printed
            .iter()
            .for_each(|line| drop(Terminal.print(line.as_bytes())))
    });
    let mut show = |line: &str| {
        if !json {
            drop(lines.send(line.to_string()));
        }
    };
    let console = requester.filter(|tid| tid.is_task()).unwrap_or(vm.tid());
    let result = drain::drain(vm, request, console, &mut show);
    if result.is_ok() {
        // Leaves the virtual machine first, because printing the rest may take arbitrarily long.
        let _ = vm.exit();
    }
    drop(lines);
    // The thread contains nothing that can panic.
    let _ = printer.join();
    match result {
        Ok(outcome) => {
            Terminal.print_oneshot(&outcome, json)?;
            Ok(exit_code(!outcome.failed))
        }
        Err(error) => {
            Terminal.print_error(&format!("drain: {error}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Prints events as they occur.
struct EventFollower<'a> {
    vm: &'a Vm,
    names: HostNames,
    /// Number of the next event to print.
    next: u64,
    json: bool,
}

impl EventFollower<'_> {
    /// Runs until the virtual machine fails, and returns its error. The outer error is one of
    /// standard output.
    fn run(mut self) -> io::Result<Error> {
        // Subscribes before it reads the log, so that no event is missed in between.
        if let Err(error) = self.vm.subscribe_events(CTX_BASE, TAG_EVENTS) {
            return Ok(error);
        }
        loop {
            if let Err(error) = self.print_backlog()? {
                return Ok(error);
            }
            let message = match self.vm.recv(Match::any().ctx(CTX_BASE).tag(TAG_EVENTS)) {
                Ok(message) => message,
                Err(error) => return Ok(error),
            };
            if let Some(event) = Vm::decode_event(&message)
                && message.src.is_daemon()
                && event.number == self.next
            {
                self.print_event(&event)?;
            }
        }
    }

    /// Prints all logged events from `next` on.
    fn print_backlog(&mut self) -> io::Result<Result<(), Error>> {
        loop {
            let events = match self.vm.events(self.next, EVENTS_BATCH_MAX) {
                Ok(events) => events,
                Err(error) => return Ok(Err(error)),
            };
            if events.is_empty() {
                return Ok(Ok(()));
            }
            events
                .iter()
                .for_each(|event| self.names.learn_event(event));
            for event in events {
                self.print_event(&event)?;
            }
        }
    }

    fn print_event(&mut self, event: &Event) -> io::Result<()> {
        self.names.learn_event(event);
        if self.names.get(event.host).is_none()
            && let Ok(table) = self.vm.hosts()
        {
            self.names.learn_table(&table);
        }
        self.next = event.number + 1;
        let line = if self.json {
            format!("{}\n", json::event(&self.names, event))
        } else {
            format::event(&self.names, event)
        };
        Terminal.print(line.as_bytes())
    }
}
