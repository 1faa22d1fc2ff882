//! The command line: the program's arguments, and the modes that they select.

mod args;
mod completion;
mod editor;
mod execute;
mod interactive;
mod one_shot;
mod shell_completion;
#[cfg(test)]
mod tests;
mod words;

use self::args::{ArgsError, Mode};
use crate::daemon::halt::LocalDaemon;
use crate::daemon::host_file;
use crate::daemon::running::{
    DaemonError, RunningDaemon, ensure_daemon, lock_path, refuse_root, runtime_dir,
    start_daemon_only,
};
use crate::lost_vms;
use crate::output::terminal::Terminal;
use crate::service_notes;
use libpvm::Vm;
use nix::sys::signal::{SigSet, Signal};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

/// Runs the program with the arguments of this process.
pub(crate) fn main() -> ExitCode {
    let mode = match args::parse(std::env::args_os()) {
        Ok(mode) => mode,
        Err(ArgsError::Clap(error)) => {
            // clap returns the texts of `--help` and `--version` as errors, too. `print` writes
            // these texts to standard output.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(1));
        }
        Err(error) => return report_failure(&format!("pvm: {error}")),
    };
    run_mode(mode).unwrap_or_else(|error| {
        // If the reader of standard output has closed the pipe, the program ends without a message,
        // as other programs do.
        if error.kind() != io::ErrorKind::BrokenPipe {
            Terminal.print_error(&format!("pvm: standard output cannot be written: {error}"));
        }
        ExitCode::FAILURE
    })
}

fn report_failure(line: &str) -> ExitCode {
    Terminal.print_error(line);
    ExitCode::FAILURE
}

fn run_mode(mode: Mode) -> io::Result<ExitCode> {
    match mode {
        Mode::Complete(line) => {
            shell_completion::print_candidates(&line).map(|()| ExitCode::SUCCESS)
        }
        Mode::OneShot { words, options } => one_shot::run(&words, options, utf8_environment()),
        Mode::Start(daemon) => Ok(
            match refuse_root().and_then(|()| start_daemon_only(&daemon)) {
                Ok(true) => ExitCode::SUCCESS,
                Ok(false) => ExitCode::FAILURE,
                Err(error) => report_failure(&error.to_string()),
            },
        ),
        Mode::Console(daemon) => {
            // As in PVM, an interrupt does not end the console. Later threads inherit the signal
            // mask.
            let mut interrupt = SigSet::empty();
            interrupt.add(Signal::SIGINT);
            interrupt.thread_block().map_err(io::Error::from)?;
            match join_or_start(&daemon) {
                Ok((vm, daemon)) => interactive::run(&vm, daemon, utf8_environment()),
                Err(error) => Ok(report_failure(&error.to_string())),
            }
        }
    }
}

/// Joins the virtual machine. If no virtual machine runs, starts a daemon with the arguments
/// `args`. If this daemon reads a host file, waits until the hosts in the file have joined or
/// failed.
///
/// # Errors
/// Fails if the virtual machine cannot be started or joined.
fn join_or_start(args: &[OsString]) -> Result<(Vm, LocalDaemon), DaemonError> {
    refuse_root()?;
    let (vm, child) = match ensure_daemon(args)? {
        RunningDaemon::AlreadyRunning(vm) => (vm, None),
        RunningDaemon::Started(child) => {
            lost_vms::show_at_start(&runtime_dir()?);
            (Vm::enroll()?, Some(child))
        }
    };
    if child.is_some() {
        if host_file::has_host_file(args) {
            host_file::await_hosts(&vm);
        }
        service_notes::show_at_start(&vm);
    }
    Ok((
        vm,
        LocalDaemon {
            lock_path: lock_path()?,
            child,
        },
    ))
}

/// Returns a copy of the environment. Entries that are not UTF-8 are omitted, because they cannot
/// be exported.
fn utf8_environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}
