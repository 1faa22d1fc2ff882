//! Executes one command from the command line. The exit status is zero only if all parts of the
//! command and all tasks whose output it shows succeed.

use super::execute;
use crate::command::{LocalContext, ParsedCommand, ShellOptions, VmCommand};
use crate::commands::{COMMANDS, parse};
use crate::daemon::halt::{LocalDaemon, halt_and_wait};
use crate::daemon::process::DaemonProcess;
use crate::daemon::running::{enroll_error_line, lock_path, refuse_root};
use crate::lost_vms;
use crate::outcome::AfterCommand;
use crate::output::terminal::Terminal;
use crate::session::Session;
use crate::virtual_machine;
use libpvm::{EnrollError, Vm};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// Executes the command `words`. `env` is the environment for spawned tasks.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn run(
    words: &[String],
    options: ShellOptions,
    env: BTreeMap<String, String>,
) -> io::Result<ExitCode> {
    let command = match parse(words) {
        Ok(Some(ParsedCommand::Vm(command))) => command,
        Ok(Some(ParsedCommand::Local(command))) => {
            let outcome = command.run(&LocalContext {
                commands: COMMANDS,
                prints_json: options.prints_json,
            });
            Terminal.print_oneshot(&outcome, options.prints_json)?;
            return Ok(exit_code(!outcome.failed));
        }
        Ok(None) => return Ok(ExitCode::SUCCESS),
        Err(error) => {
            let outcome = execute::refusal_with_hints(words, &error);
            Terminal.print_oneshot(&outcome, options.prints_json)?;
            return Ok(ExitCode::FAILURE);
        }
    };
    if let Some(outcome) = command.run_before_joining(options)? {
        Terminal.print_oneshot(&outcome, options.prints_json)?;
        return Ok(exit_code(!outcome.failed));
    }
    let lock_file = match refuse_root().and_then(|()| lock_path()) {
        Ok(lock_file) => lock_file,
        Err(error) => {
            Terminal.print_error(&error.to_string());
            return Ok(ExitCode::FAILURE);
        }
    };
    let daemon = DaemonProcess::from_lock_file(lock_file.clone());
    match Vm::enroll() {
        Ok(vm) => {
            let daemon = LocalDaemon {
                lock_path: lock_file,
                child: None,
            };
            let name = words.first().map_or("", String::as_str);
            run_on_vm(&vm, daemon, env, (name, &*command), options)
        }
        // Another process is halting the virtual machine at the same time.
        Err(error) if command.halts_vm() && daemon.wait_if_shutting_down(&error) => {
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            Terminal.print_error(&enroll_error_line(&error));
            if matches!(error, EnrollError::NoDaemon { .. }) {
                let dir = lock_file.parent().unwrap_or(Path::new("/"));
                if let Some(line) = lost_vms::hint_line(dir) {
                    Terminal.print_error(&line);
                }
            }
            Ok(ExitCode::FAILURE)
        }
    }
}

fn exit_code(succeeded: bool) -> ExitCode {
    if succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Executes `command`, whose name is `name`. If the command starts a job whose output this process
/// collects, waits for the end of the job. The exit status is then the status of the first of its
/// tasks, in the order in which `spawn` lists them, that failed: its exit code, or 128 plus the
/// number of the signal that killed it, or 1 if it was lost with its host.
///
/// # Errors
/// Fails if standard output cannot be written.
fn run_on_vm(
    vm: &Vm,
    mut daemon: LocalDaemon,
    env: BTreeMap<String, String>,
    (name, command): (&str, &dyn VmCommand),
    options: ShellOptions,
) -> io::Result<ExitCode> {
    if let Some(outcome) = command.run_for_shell(vm, options)? {
        Terminal.print_oneshot(&outcome, options.prints_json)?;
        return Ok(exit_code(!outcome.failed));
    }
    let session: &mut Session = &mut Session::new(vm.clone(), env);
    let outcome = execute::run_command(session, name, command);
    Terminal.print_oneshot(&outcome, options.prints_json)?;
    if outcome.after_command == AfterCommand::Halt {
        return Ok(halt_and_wait(vm, &mut daemon));
    }
    while session.has_jobs() {
        match virtual_machine::wait_for_message(vm) {
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
    Ok(if outcome.failed {
        ExitCode::FAILURE
    } else {
        ExitCode::from(session.first_job_failure)
    })
}
