//! `pvm`: the console of a virtual machine.
//!
//! It starts a virtual machine if none is running. Apart from that it is an ordinary task of the
//! virtual machine.
//!
//! | modules | purpose |
//! | --- | --- |
//! | [`words`], [`parse`], [`spawn`] | turn a line into a command (pure) |
//! | [`mod@format`], [`json`], [`jobs`], [`trace`], [`records`] | turn results into output (pure) |
//! | [`help`], [`options`] | help texts, and the PVM options (pure) |
//! | [`session`], [`collect`] | execute commands on a [`virtual_machine`] |
//! | [`why`], [`usage`], [`job`], [`replay`] | show what the resource manager reports |
//! | [`owner`] | directives of this machine's owner, and who uses the machine |
//! | [`shell`], [`oneshot`] | the two modes: interactive, and one command; [`args`] selects one |
//! | [`background_drain`] | the drain process that outlives both modes |
//! | [`editor`], [`complete`], [`async_output`] | line editing, and output that arrives during it |
//! | [`daemon`], [`detach`], [`host_file`], [`halt`] | start and end of the local daemon |

mod args;
mod async_output;
mod background_drain;
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
mod oneshot;
mod options;
mod owner;
mod parse;
mod records;
mod replay;
mod session;
mod shell;
mod spawn;
mod terminal;
mod trace;
mod usage;
mod virtual_machine;
mod why;
mod words;

use args::{ArgsError, Mode};
use daemon::{DaemonProcess, POLL_INTERVAL, StartError};
use halt::LocalDaemon;
use libpvm::{EnrollError, Vm};
use nix::sys::signal::{SigSet, Signal};
use oneshot::Plan;
use parse::Command;
use sempa_proto::runtime_paths::RuntimePaths;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};
use terminal::Terminal;

/// Time to wait for a killed daemon to disappear.
///
/// Until the kernel has torn it down, its socket still accepts connections, which are never
/// answered.
const DEAD_DAEMON_TIMEOUT: Duration = Duration::from_secs(5);

/// Error text for a command that needs a virtual machine when none is running.
const NOT_RUNNING: &str = "no virtual machine is running here: start one with `pvm`";

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
            Terminal.print_error(&format!("pvm: standard output cannot be written: {error}"));
        }
        ExitCode::FAILURE
    })
}

fn fail(line: &str) -> ExitCode {
    Terminal.print_error(line);
    ExitCode::FAILURE
}

fn run(mode: Mode) -> io::Result<ExitCode> {
    match mode {
        Mode::OneShot {
            words,
            json,
            requester: apart,
        } => match oneshot::run_without_vm(&words, json)? {
            Plan::Done(code) => Ok(code),
            Plan::NeedsVm(Command::Drain(what)) if apart.is_none() && what.may_checkpoint() => {
                background_drain::run_from_shell(&what, json)
            }
            Plan::NeedsVm(command) => {
                let lock = match refuse_root().and_then(|()| lock_path()) {
                    Ok(lock) => lock,
                    Err(line) => return Ok(fail(&line)),
                };
                let daemon = DaemonProcess::from_lock_file(lock.clone());
                match Vm::enroll() {
                    Ok(vm) => match command {
                        Command::Drain(what) => oneshot::drain(&vm, &what, apart, json),
                        _ => oneshot::run(
                            &vm,
                            LocalDaemon { lock, child: None },
                            environment(),
                            &words,
                            &command,
                            json,
                        ),
                    },
                    // Another process is halting the virtual machine at the same time.
                    Err(error) if command == Command::Halt && daemon.is_shutting_down(&error) => {
                        Ok(ExitCode::SUCCESS)
                    }
                    Err(error) => Ok(fail(&enroll_error_line(&error))),
                }
            }
        },
        Mode::Start(daemon) => Ok(
            match refuse_root().and_then(|()| start_daemon_only(&daemon)) {
                Ok(true) => ExitCode::SUCCESS,
                Ok(false) => ExitCode::FAILURE,
                Err(line) => fail(&line),
            },
        ),
        Mode::Console(daemon) => {
            // As in PVM, an interrupt does not end the console. Later threads inherit the signal
            // mask.
            let mut interrupt = SigSet::empty();
            interrupt.add(Signal::SIGINT);
            interrupt.thread_block().map_err(io::Error::from)?;
            let started = refuse_root().and_then(|()| {
                let (vm, child) = match ensure_daemon(&daemon)? {
                    RunningDaemon::AlreadyRunning(vm) => (vm, None),
                    RunningDaemon::Started(child) => (
                        Vm::enroll().map_err(|error| format!("pvm: {error}"))?,
                        Some(child),
                    ),
                };
                if child.is_some() && host_file::is_given(&daemon) {
                    host_file::await_hosts(&vm);
                }
                Ok((
                    vm,
                    LocalDaemon {
                        lock: lock_path()?,
                        child,
                    },
                ))
            });
            match started {
                Ok((vm, home)) => shell::run(&vm, home, environment()),
                Err(line) => Ok(fail(&line)),
            }
        }
    }
}

/// Refuses to run as root unless `PVM_ALLOW_ROOT` is set.
fn refuse_root() -> Result<(), String> {
    if nix::unistd::geteuid().is_root() && std::env::var_os("PVM_ALLOW_ROOT").is_none() {
        return Err(
            "pvm: running as root is refused: use an ordinary user, or set PVM_ALLOW_ROOT=1 if you mean it".into()
        );
    }
    Ok(())
}

fn enroll_error_line(error: &EnrollError) -> String {
    match error {
        EnrollError::NoDaemon { .. } => format!("pvm: {NOT_RUNNING}"),
        other => format!("pvm: {other}"),
    }
}

/// Returns the path of the daemon's socket, by the same rules as the library.
fn socket_path() -> Result<PathBuf, String> {
    if let Some(socket) = std::env::var_os("PVMSOCK").filter(|value| !value.is_empty()) {
        return Ok(socket.into());
    }
    let place = RuntimePaths::from_env(nix::unistd::geteuid().as_raw(), |name| {
        std::env::var(name).ok()
    });
    place
        .map(|place| place.daemon_socket())
        .map_err(|error| format!("pvm: {error}"))
}

/// Returns the path of the daemon's lock file, which is in the folder of its socket.
fn lock_path() -> Result<PathBuf, String> {
    let socket = socket_path()?;
    let dir = socket.parent().unwrap_or(Path::new("/"));
    Ok(dir.join("pvmd.lock"))
}

/// A daemon that accepts tasks.
enum RunningDaemon {
    /// It was running already; this task is enrolled in it.
    AlreadyRunning(Vm),
    /// This process started it.
    Started(Child),
}

/// Starts a daemon if none is running.
fn ensure_daemon(args: &[OsString]) -> Result<RunningDaemon, String> {
    let socket = socket_path()?;
    let listens = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    let deadline = Instant::now() + DEAD_DAEMON_TIMEOUT;
    loop {
        if listens() {
            match Vm::enroll() {
                Ok(vm) => {
                    // If standard output is closed, the console ends at its next line.
                    let _ = Terminal.print(b"pvmd already running.\n");
                    return Ok(RunningDaemon::AlreadyRunning(vm));
                }
                Err(EnrollError::Io { .. } | EnrollError::NoDaemon { .. })
                    if Instant::now() < deadline =>
                {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(error) => return Err(format!("pvm: {error}")),
            }
            continue;
        }
        match daemon::start(args) {
            Ok(child) => return Ok(RunningDaemon::Started(child)),
            // Another process started a daemon first.
            Err(_) if listens() => {}
            // The daemon's line already starts with its program name.
            Err(StartError::Reported(line)) => return Err(line),
            Err(error) => return Err(format!("pvm: {error}")),
        }
    }
}

/// Starts a daemon if none is running. Returns false if a host of the host file did not join.
fn start_daemon_only(args: &[OsString]) -> Result<bool, String> {
    let (vm, is_new) = match ensure_daemon(args)? {
        RunningDaemon::AlreadyRunning(vm) => (vm, false),
        RunningDaemon::Started(_) if !host_file::is_given(args) => return Ok(true),
        RunningDaemon::Started(_) => (Vm::enroll().map_err(|error| format!("pvm: {error}"))?, true),
    };
    let good = !is_new || host_file::await_hosts(&vm);
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
