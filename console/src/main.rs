//! `pvm`: the console of a virtual machine.
//!
//! It starts a virtual machine if none is running. Apart from that it is an ordinary task of the
//! virtual machine.
//!
//! | modules | purpose |
//! | --- | --- |
//! | [`words`], [`parse`], [`spawn`] | turn a line into a command (pure) |
//! | [`format`], [`json`], [`jobs`], [`trace`], [`records`] | turn results into output (pure) |
//! | [`help`], [`options`] | help texts, and the PVM options (pure) |
//! | [`session`], [`collect`] | execute commands on a [`machine`] |
//! | [`why`], [`usage`], [`job`], [`replay`] | show what the resource manager reports |
//! | [`owner`] | directives of this machine's owner, and who uses the machine |
//! | [`shell`], [`once`] | the two modes: interactive, and one command; [`args`] selects one |
//! | [`apart`] | the drain process that outlives both modes |
//! | [`editor`], [`complete`], [`above`] | line editing, and output that arrives during it |
//! | [`daemon`], [`detach`], [`host_file`], [`halt`] | start and end of the local daemon |

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

/// Time to wait for a killed daemon to disappear.
///
/// Until the kernel has torn it down, its socket still accepts connections, which are never
/// answered.
const GOING_MAX: Duration = Duration::from_secs(5);

/// Error text for a command that needs a virtual machine when none is running.
const NONE_RUNS: &str = "no virtual machine is running here: start one with `pvm`";

fn main() -> ExitCode {
    let mode = match args::parse(std::env::args_os()) {
        Ok(mode) => mode,
        Err(ArgsError::Clap(error)) => {
            // Help and version also arrive here; they go to standard output.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1));
        }
        Err(error) => return fail(&format!("pvm: {error}")),
    };
    run(mode).unwrap_or_else(|error| {
        // A closed pipe ends the program silently, as it does any other command.
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
                    // Another process is halting the virtual machine at the same time.
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
            // As in PVM, an interrupt does not end the console. Later threads inherit the signal
            // mask.
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

/// Refuses to run as root unless `PVM_ALLOW_ROOT` is set.
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

/// Returns the path of the daemon's socket, by the same rules as the library.
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

/// Returns the path of the daemon's lock file, which is in the folder of its socket.
fn lock() -> Result<PathBuf, String> {
    let socket = socket()?;
    let dir = socket.parent().unwrap_or(Path::new("/"));
    Ok(dir.join("pvmd.lock"))
}

/// A daemon that accepts tasks.
enum Begun {
    /// It was running already; this task is enrolled in it.
    Before(Vm),
    /// This process started it.
    Now(Child),
}

/// Starts a daemon if none is running.
fn start(args: &[OsString]) -> Result<Begun, String> {
    let socket = socket()?;
    let listens = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    let deadline = Instant::now() + GOING_MAX;
    loop {
        if listens() {
            match Vm::enroll() {
                Ok(vm) => {
                    // If standard output is closed, the console ends at its next line.
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
            // Another process started a daemon first.
            Err(_) if listens() => {}
            // The daemon's line already starts with its program name.
            Err(StartError::Said(line)) => return Err(line),
            Err(error) => return Err(format!("pvm: {error}")),
        }
    }
}

/// Starts a daemon if none is running. Returns false if a host of the host file did not join.
fn start_only(args: &[OsString]) -> Result<bool, String> {
    let (vm, is_new) = match start(args)? {
        Begun::Before(vm) => (vm, false),
        Begun::Now(_) if !host_file::is_given(args) => return Ok(true),
        Begun::Now(_) => (Vm::enroll().map_err(|error| format!("pvm: {error}"))?, true),
    };
    let good = !is_new || host_file::settle(&vm);
    // The virtual machine removes this task when its connection closes, even if `exit` fails.
    let _ = vm.exit();
    Ok(good)
}

/// Returns a copy of the environment without entries that are not UTF-8, which cannot be exported.
fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}
