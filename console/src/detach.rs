//! Starts a program that outlives this one and its terminal.
#![allow(unsafe_code)] // Between fork and exec there is no safe way to act.

use nix::libc;
use nix::sys::signal::SigSet;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Configures the program to run in a new session with no blocked signals and no inherited
/// descriptors except the standard streams. Pipes and locks of this process must not live as long
/// as the program.
pub(crate) fn detach(command: &mut Command) -> &mut Command {
    // SAFETY: all calls are async-signal-safe, allocate nothing and affect only the new process;
    // descriptors are only marked here, and exec closes them.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            SigSet::empty().thread_set_mask()?;
            // A kernel without close_range leaves the descriptors open. The program works
            // nevertheless.
            libc::syscall(
                libc::SYS_close_range,
                3,
                u32::MAX,
                libc::CLOSE_RANGE_CLOEXEC,
            );
            Ok(())
        })
    }
}
