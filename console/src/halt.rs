//! Ends the virtual machine and waits until the local daemon has exited.

use crate::daemon::Watched;
use crate::screen::Screen;
use libpvm::Vm;
use std::path::PathBuf;
use std::process::{Child, ExitCode};

/// What this process knows about the daemon of this host.
#[derive(Debug)]
pub(crate) struct Home {
    /// Path of the daemon's lock file.
    pub(crate) lock: PathBuf,
    /// The daemon's process, if this process started it.
    pub(crate) child: Option<Child>,
}

/// Halts the virtual machine and waits for the local daemon to exit.
pub(crate) fn halt(vm: &Vm, home: &mut Home) -> ExitCode {
    let watched = Watched::holding(home.lock.clone());
    if let Err(error) = vm.halt() {
        Screen.complain(&format!("halt: {error}"));
        return ExitCode::FAILURE;
    }
    if watched.wait(home.child.as_mut()) {
        return ExitCode::SUCCESS;
    }
    Screen.complain(&format!(
        "halt: the daemon was asked to end and is still there; its process number is in {}",
        home.lock.display()
    ));
    ExitCode::FAILURE
}
