//! Starting a program that outlives this one and its terminal.
#![allow(unsafe_code)] // Between fork and exec there is no safe way to act.

use nix::libc;
use nix::sys::signal::SigSet;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Lets the program run in a session of its own, with no signal blocked, and with nothing that this process has inherited beside the
/// standard streams: pipes and locks of whoever started it must not live as long.
pub(crate) fn detached(command: &mut Command) -> &mut Command {
    // SAFETY: all calls are async-signal-safe, allocate nothing and touch only the new process; descriptors are closed by exec alone.
    unsafe {
        command.pre_exec(|| {
            nix::unistd::setsid()?;
            SigSet::empty().thread_set_mask()?;
            // A kernel that cannot do it leaves them open; nothing depends on it.
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
