//! Ends the virtual machine and waits until the local daemon has exited.

use super::process::DaemonProcess;
use crate::output::terminal::Terminal;
use libpvm::Vm;
use std::path::PathBuf;
use std::process::{Child, ExitCode};

/// The lock file of this host's daemon, and the daemon's process if this process started the
/// daemon.
#[derive(Debug)]
pub(crate) struct LocalDaemon {
    /// Path of the daemon's lock file.
    pub(crate) lock_path: PathBuf,
    /// The daemon's process, if this process started it.
    pub(crate) child: Option<Child>,
}

/// Halts the virtual machine and waits for the local daemon to exit. Prints an error and returns a
/// failure if the request fails or the daemon does not exit in time.
pub(crate) fn halt_and_wait(vm: &Vm, daemon: &mut LocalDaemon) -> ExitCode {
    let daemon_process = DaemonProcess::from_lock_file(daemon.lock_path.clone());
    if let Err(error) = vm.halt() {
        Terminal.print_error(&format!("halt: {error}"));
        return ExitCode::FAILURE;
    }
    if daemon_process.wait_for_exit(daemon.child.as_mut()) {
        return ExitCode::SUCCESS;
    }
    Terminal.print_error(&format!(
        "halt: the daemon was asked to end and is still there; its process number is in {}",
        daemon.lock_path.display()
    ));
    ExitCode::FAILURE
}
