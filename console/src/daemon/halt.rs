//! Ends the virtual machine and waits until the local daemon has exited.

use super::process::DaemonProcess;
use crate::output::terminal::Terminal;
use libpvm::Vm;
use std::path::PathBuf;
use std::process::{Child, ExitCode};

/// What this process knows about the daemon of this host.
#[derive(Debug)]
pub(crate) struct LocalDaemon {
    /// Path of the daemon's lock file.
    pub(crate) lock: PathBuf,
    /// The daemon's process, if this process started it.
    pub(crate) child: Option<Child>,
}

/// Halts the virtual machine and waits for the local daemon to exit.
pub(crate) fn halt(vm: &Vm, daemon: &mut LocalDaemon) -> ExitCode {
    let watched = DaemonProcess::from_lock_file(daemon.lock.clone());
    if let Err(error) = vm.halt() {
        Terminal.print_error(&format!("halt: {error}"));
        return ExitCode::FAILURE;
    }
    if watched.wait_for_exit(daemon.child.as_mut()) {
        return ExitCode::SUCCESS;
    }
    Terminal.print_error(&format!(
        "halt: the daemon was asked to end and is still there; its process number is in {}",
        daemon.lock.display()
    ));
    ExitCode::FAILURE
}
