//! `pvm`: the console of a virtual machine. It starts one when none runs, and is otherwise an ordinary task of it.
//!
//! * [`words`], [`parse`], [`spawn`]: from a line to a command. Pure.
//! * [`format`], [`json`], [`help`], [`jobs`], [`options`], [`trace`], [`records`]: from results to what is shown. Pure.
//! * [`session`], [`collect`]: carry commands out on a [`machine`].
//! * [`why`], [`usage`], [`job`], [`replay`]: what the resource manager can tell.
//! * [`owner`]: what the owner of this machine says, and who uses it.
//! * [`shell`], [`once`]: the two ways to use it; [`args`] tells them apart. [`apart`]: what outlives both.
//! * [`editor`], [`complete`], [`above`]: lines at a terminal, and output that comes meanwhile.
//! * [`daemon`], [`detach`], [`host_file`], [`halt`]: the daemon of this host, its start and its end.

mod above;
mod apart;
mod args;
mod checkpoint;
mod clock;
mod collect;
mod complete;
mod daemon;
mod detach;
mod drain;
mod editor;
mod format;
mod halt;
mod help;
mod host_file;
mod job;
mod jobs;
mod json;
mod machine;
mod once;
mod options;
mod owner;
mod parse;
mod records;
mod replay;
mod screen;
mod session;
mod shell;
mod spawn;
mod trace;
mod usage;
mod why;
mod words;

use args::{ArgsError, Mode};
use daemon::{LOOK_EVERY, StartError, Watched};
use halt::Home;
use libpvm::{EnrollError, Vm};
use nix::sys::signal::{SigSet, Signal};
use once::Plan;
use parse::Command;
use screen::Screen;
use sempa_proto::place::Place;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

/// A daemon that was killed listens, and answers nobody, until the kernel has taken it apart; on a loaded machine that takes a moment.
const GOING_MAX: Duration = Duration::from_secs(5);

/// Said when a command needs a virtual machine and none is there.
const NONE_RUNS: &str = "no virtual machine is running here: start one with `pvm`";

fn main() -> ExitCode {
    let mode = match args::parse(std::env::args_os()) {
        Ok(mode) => mode,
        Err(ArgsError::Clap(error)) => {
            // Help and version come this way as well, and go to standard output.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1));
        }
        Err(error) => return fail(&format!("pvm: {error}")),
    };
    run(mode).unwrap_or_else(|error| {
        // A reader that has gone away knows; it is as quiet as for any other command.
        if error.kind() != io::ErrorKind::BrokenPipe {
            Screen.complain(&format!("pvm: standard output cannot be written: {error}"));
        }
        ExitCode::FAILURE
    })
}

fn fail(line: &str) -> ExitCode {
    Screen.complain(line);
    ExitCode::FAILURE
}

fn run(mode: Mode) -> io::Result<ExitCode> {
    match mode {
        Mode::Once { words, json, apart } => match once::plan(&words, json)? {
            Plan::Done(code) => Ok(code),
            Plan::Needs(Command::Drain(what)) if apart.is_none() && what.writes() => {
                apart::follow(&what, json)
            }
            Plan::Needs(command) => {
                let lock = match allowed().and_then(|()| lock()) {
                    Ok(lock) => lock,
                    Err(line) => return Ok(fail(&line)),
                };
                let daemon = Watched::holding(lock.clone());
                match Vm::enroll() {
                    Ok(vm) => match command {
                        Command::Drain(what) => once::drain(&vm, &what, apart, json),
                        _ => once::run(
                            &vm,
                            Home { lock, child: None },
                            environment(),
                            &words,
                            &command,
                            json,
                        ),
                    },
                    // Somebody else halts it at this moment.
                    Err(error) if command == Command::Halt && daemon.is_ending(&error) => {
                        Ok(ExitCode::SUCCESS)
                    }
                    Err(error) => Ok(fail(&none_or(&error))),
                }
            }
        },
        Mode::Start(daemon) => Ok(match allowed().and_then(|()| start_only(&daemon)) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(line) => fail(&line),
        }),
        Mode::Console(daemon) => {
            // As in PVM an interrupt does not end the console. Threads made later do as this one.
            let mut interrupt = SigSet::empty();
            interrupt.add(Signal::SIGINT);
            interrupt.thread_block().map_err(io::Error::from)?;
            let begun = allowed().and_then(|()| {
                let (vm, child) = match start(&daemon)? {
                    Begun::Before(vm) => (vm, None),
                    Begun::Now(child) => (
                        Vm::enroll().map_err(|error| format!("pvm: {error}"))?,
                        Some(child),
                    ),
                };
                if child.is_some() && host_file::is_given(&daemon) {
                    host_file::settle(&vm);
                }
                Ok((
                    vm,
                    Home {
                        lock: lock()?,
                        child,
                    },
                ))
            });
            match begun {
                Ok((vm, home)) => shell::run(&vm, home, environment()),
                Err(line) => Ok(fail(&line)),
            }
        }
    }
}

/// Root has to say that it means it.
fn allowed() -> Result<(), String> {
    if nix::unistd::geteuid().is_root() && std::env::var_os("PVM_ALLOW_ROOT").is_none() {
        return Err(
            "pvm: running as root is refused: use an ordinary user, or set PVM_ALLOW_ROOT=1 if you mean it".into()
        );
    }
    Ok(())
}

fn none_or(error: &EnrollError) -> String {
    match error {
        EnrollError::NoDaemon { .. } => format!("pvm: {NONE_RUNS}"),
        other => format!("pvm: {other}"),
    }
}

/// The daemon's socket, where this process would look for it.
fn socket() -> Result<PathBuf, String> {
    if let Some(socket) = std::env::var_os("PVMSOCK").filter(|value| !value.is_empty()) {
        return Ok(socket.into());
    }
    let place = Place::of(nix::unistd::geteuid().as_raw(), |name| {
        std::env::var(name).ok()
    });
    place
        .map(|place| place.socket())
        .map_err(|error| format!("pvm: {error}"))
}

/// The daemon's lock, which lies beside its socket.
fn lock() -> Result<PathBuf, String> {
    let socket = socket()?;
    let dir = socket.parent().unwrap_or(Path::new("/"));
    Ok(dir.join("pvmd.lock"))
}

/// A daemon that takes tasks.
enum Begun {
    /// It ran already; this task is connected to it.
    Before(Vm),
    /// It was started now.
    Now(Child),
}

/// Starts a daemon if none does its work.
fn start(args: &[OsString]) -> Result<Begun, String> {
    let socket = socket()?;
    let listens = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    let deadline = Instant::now() + GOING_MAX;
    loop {
        if listens() {
            match Vm::enroll() {
                Ok(vm) => {
                    // A console whose output nobody reads ends at its next line.
                    let _ = Screen.print(b"pvmd already running.\n");
                    return Ok(Begun::Before(vm));
                }
                Err(EnrollError::Io { .. } | EnrollError::NoDaemon { .. })
                    if Instant::now() < deadline =>
                {
                    std::thread::sleep(LOOK_EVERY);
                }
                Err(error) => return Err(format!("pvm: {error}")),
            }
            continue;
        }
        match daemon::start(args) {
            Ok(child) => return Ok(Begun::Now(child)),
            // Somebody else was faster.
            Err(_) if listens() => {}
            // It has named itself.
            Err(StartError::Said(line)) => return Err(line),
            Err(error) => return Err(format!("pvm: {error}")),
        }
    }
}

/// Starts a daemon if none does its work; false when some of its host file came to nothing.
fn start_only(args: &[OsString]) -> Result<bool, String> {
    let (vm, is_new) = match start(args)? {
        Begun::Before(vm) => (vm, false),
        Begun::Now(_) if !host_file::is_given(args) => return Ok(true),
        Begun::Now(_) => (Vm::enroll().map_err(|error| format!("pvm: {error}"))?, true),
    };
    let good = !is_new || host_file::settle(&vm);
    // The virtual machine forgets this task when its connection closes, whatever the answer would be.
    let _ = vm.exit();
    Ok(good)
}

/// A copy of the environment; what is not text cannot be exported and is left out.
fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}
