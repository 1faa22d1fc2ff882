//! System calls of the tests that have no safe interface.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Number of the first descriptor after the standard ones.
const FIRST_OTHER_FD: u32 = 3;

/// Tests whether missing memory of a process can be handled from outside: creates a descriptor as
/// CRIU does, and closes it.
///
/// # Errors
/// The kernel does not support the call, or does not permit it.
pub(super) fn test_userfaultfd() -> io::Result<()> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call takes a number only, and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let Ok(fd @ 0..) = i32::try_from(fd) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: the kernel has created the descriptor just now, and nothing else uses it.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    Ok(())
}

/// Lets programs that this process starts inherit the standard descriptors only.
///
/// # Errors
/// The kernel does not support the call.
pub(super) fn keep_descriptors_from_children() -> io::Result<()> {
    // SAFETY: the call closes nothing; it sets a flag of descriptors, whatever they are.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST_OTHER_FD,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
