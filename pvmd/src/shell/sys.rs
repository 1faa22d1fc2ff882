//! The few calls that the safe libraries do not offer: forking before any thread exists, handing one descriptor to a
//! child, and local time. Everything else of the daemon is safe code.
#![allow(unsafe_code)] // fork, pre_exec and localtime_r have no safe form

use nix::unistd::{ForkResult, fork};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Forks. Call it only while the process has one thread: the child goes on with everything the parent had.
pub(crate) fn fork_before_threads() -> nix::Result<ForkResult> {
    // SAFETY: the caller has not started a thread, so no lock can be held by a thread that the child lacks.
    unsafe { fork() }
}

/// Has the command's child inherit `fd` under the same number. The descriptor must stay open until the spawn.
pub(crate) fn pass_descriptor(command: &mut Command, fd: RawFd) {
    let hand_over = move || {
        // SAFETY: fcntl is async-signal-safe and only touches a flag in the child's own descriptor table.
        let done = unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure allocates nothing and calls async-signal-safe functions only.
    unsafe { command.pre_exec(hand_over) };
}

/// Local month, day, hour, minute and second of a time in seconds since 1970.
pub(crate) fn local_time(unix_s: i64) -> (i32, i32, i32, i32, i32) {
    // SAFETY: all-zero bytes are a valid `tm`: integers and a null pointer.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the right types; localtime_r keeps neither.
    unsafe { libc::localtime_r(&unix_s, &mut tm) };
    (tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec)
}
