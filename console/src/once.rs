//! Executes one command from the command line. The exit status is zero only if every part of it
//! succeeded.

use crate::drain::{self, Drain};
use crate::format::{self, Names};
use crate::halt::{Home, halt};
use crate::json;
use crate::machine::{self, Machine};
use crate::owner;
use crate::parse::{Command, parse};
use crate::replay;
use crate::screen::Screen;
use crate::session::{self, EVENTS_AT_ONCE_MAX, Next, Session, TAG_EVENTS};
use crate::spawn::{Output, TraceOutput};
use libpvm::{Error, Match, Vm};
use sempa_proto::Tid;
use sempa_proto::event::Event;
use sempa_proto::message::CTX_BASE;
use std::collections::BTreeMap;
use std::io;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;

/// Result of [`plan`]: what remains to be done for a command.
pub(crate) enum Plan {
    /// Nothing: the command needed no virtual machine and is done.
    Done(ExitCode),
    /// The command must be executed on a virtual machine.
    Needs(Command),
}

/// Parses the words and executes commands that need no virtual machine.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn plan(words: &[String], json: bool) -> io::Result<Plan> {
    let command = match parse(words) {
        Ok(Some(command)) => command,
        Ok(None) => return Ok(Plan::Done(ExitCode::SUCCESS)),
        Err(error) => {
            Screen.complain(&error.to_string());
            return Ok(Plan::Done(ExitCode::FAILURE));
        }
    };
    let outcome = match &command {
        Command::Help(name) => session::about(name.as_deref()),
        Command::Version => session::version(),
        Command::Owner(what) => owner::run(what),
        Command::Replay(words) => replay::run(words, json),
        Command::Spawn(spawn)
            if json
                && (spawn.output == Output::Console
                    || spawn.trace == Some(TraceOutput::Console)) =>
        {
            Screen
                .complain("spawn: output and records of tasks are no JSON: write them to files with ->FILE and -@FILE");
            return Ok(Plan::Done(ExitCode::FAILURE));
        }
        _ => return Ok(Plan::Needs(command)),
    };
    Screen.report(&outcome, json)?;
    Ok(Plan::Done(code(!outcome.failed)))
}

fn code(good: bool) -> ExitCode {
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
    mut home: Home,
    env: BTreeMap<String, String>,
    words: &[String],
    command: &Command,
    json: bool,
) -> io::Result<ExitCode> {
    if let Command::Events { from, follow: true } = command {
        let error = Follow {
            vm,
            names: Names::default(),
            next: *from,
            json,
        }
        .run()?;
        Screen.complain(&format!("events: {error}"));
        return Ok(ExitCode::FAILURE);
    }
    let mut session = Session::new(vm.clone(), env);
    let outcome = session.words(words);
    Screen.report(&outcome, json)?;
    if outcome.next == Next::Halt {
        return Ok(halt(vm, &mut home));
    }
    while session.has_jobs() {
        match machine::receive(vm) {
            Ok(message) => Screen.print(&session.message(&message))?,
            Err(error) => {
                Screen.complain(&format!(
                    "pvm: the virtual machine has ended, output is missing: {error}"
                ));
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    // The virtual machine removes this task when its connection closes, even if `exit` fails.
    let _ = vm.exit();
    Ok(code(!outcome.failed))
}

/// Drains a host and prints progress.
///
/// The optional tid is the console that requested the drain, if that is another process.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn drain(vm: &Vm, what: &Drain, apart: Option<Tid>, json: bool) -> io::Result<ExitCode> {
    let (lines, said) = mpsc::channel::<String>();
    // A separate thread prints: a reader that has stopped or closed the pipe must not leave the
    // host half drained.
    let speaker = thread::spawn(move || {
        said.iter()
            .for_each(|line| drop(Screen.print(line.as_bytes())))
    });
    let mut show = |line: &str| {
        if !json {
            drop(lines.send(line.to_string()));
        }
    };
    let console = apart.filter(|tid| tid.is_task()).unwrap_or(vm.tid());
    let result = drain::drain(vm, what, console, &mut show);
    if result.is_ok() {
        // Leaves the virtual machine first, because printing the rest may take arbitrarily long.
        let _ = vm.exit();
    }
    drop(lines);
    // The thread contains nothing that can panic.
    let _ = speaker.join();
    match result {
        Ok(outcome) => {
            Screen.report(&outcome, json)?;
            Ok(code(!outcome.failed))
        }
        Err(error) => {
            Screen.complain(&format!("drain: {error}"));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Prints events as they occur.
struct Follow<'a> {
    vm: &'a Vm,
    names: Names,
    /// Number of the next event to print.
    next: u64,
    json: bool,
}

impl Follow<'_> {
    /// Runs until the virtual machine fails, and returns its error. The outer error is one of
    /// standard output.
    fn run(mut self) -> io::Result<Error> {
        // Subscribes before it reads the log, so that no event is missed in between.
        if let Err(error) = self.vm.subscribe(CTX_BASE, TAG_EVENTS) {
            return Ok(error);
        }
        loop {
            if let Err(error) = self.catch_up()? {
                return Ok(error);
            }
            let message = match self.vm.recv(Match::any().ctx(CTX_BASE).tag(TAG_EVENTS)) {
                Ok(message) => message,
                Err(error) => return Ok(error),
            };
            if let Some(event) = Vm::event_of(&message)
                && message.src.is_daemon()
                && event.number == self.next
            {
                self.show(&event)?;
            }
        }
    }

    /// Prints all logged events from `next` on.
    fn catch_up(&mut self) -> io::Result<Result<(), Error>> {
        loop {
            let events = match self.vm.events(self.next, EVENTS_AT_ONCE_MAX) {
                Ok(events) => events,
                Err(error) => return Ok(Err(error)),
            };
            if events.is_empty() {
                return Ok(Ok(()));
            }
            events.iter().for_each(|event| self.names.learn(event));
            for event in events {
                self.show(&event)?;
            }
        }
    }

    fn show(&mut self, event: &Event) -> io::Result<()> {
        self.names.learn(event);
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
        Screen.print(line.as_bytes())
    }
}
