//! Ending the virtual machine and waiting until its daemon here is gone.

use crate::daemon::Watched;
use crate::screen::Screen;
use libpvm::Vm;
use std::path::PathBuf;
use std::process::{Child, ExitCode};

/// The daemon of this host as far as this process knows it.
#[derive(Debug)]
pub(crate) struct Home {
    /// Its lock file.
    pub(crate) lock: PathBuf,
    /// The daemon itself when this process started it.
    pub(crate) child: Option<Child>,
}

/// Ends the virtual machine.
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
