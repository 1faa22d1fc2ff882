//! Starting a program that outlives this one and its terminal.
#![allow(unsafe_code)] // Between fork and exec there is no safe way to act.

use nix::sys::signal::SigSet;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets the program run in a session of its own, with no signal blocked.
pub(crate) fn detached(command: &mut Command) -> &mut Command {
    // SAFETY: both calls are async-signal-safe, allocate nothing and touch only the new process.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            SigSet::empty().thread_set_mask()?;
            Ok(())
        })
    }
}
