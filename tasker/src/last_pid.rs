//! Sets the PID after which the kernel looks for the PID of the next process in a PID namespace.
//!
//! Only a process in the namespace can set it, and only with the tasker's capabilities. So a new
//! process sets it before its exec, or a helper process that does nothing else.
#![allow(unsafe_code)] // What a new process does before its exec has no safe interface.

use crate::sys;
use nix::errno::Errno;
use std::ffi::CStr;
use std::io;

/// The kernel's file. It is the file of the namespace of the process that writes it.
pub(crate) const FILE: &CStr = c"/proc/sys/kernel/ns_last_pid";
/// Maximum number of decimal digits of a PID.
const DIGITS_MAX: usize = 10;

/// A PID in the form that the kernel's file requires. A new process may not allocate, so its
/// creator prepares this value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastPid {
    digits: [u8; DIGITS_MAX],
    /// Index of the first digit; the last digit is at the end of the array.
    start: usize,
}

impl LastPid {
    pub(crate) fn new(pid: i32) -> Self {
        let (mut digits, mut start, mut rest) =
            ([b'0'; DIGITS_MAX], DIGITS_MAX, pid.unsigned_abs());
        while rest > 0 || start == DIGITS_MAX {
            start -= 1;
            digits[start] += (rest % 10) as u8;
            rest /= 10;
        }
        Self { digits, start }
    }

    /// Sets the PID in the namespace of the calling process. Makes only async-signal-safe calls.
    ///
    /// # Errors
    /// Those of `open` and `write`. `EINVAL` if the PID is not below the limit of the namespace.
    pub(crate) fn write(&self) -> Result<(), Errno> {
        let digits = &self.digits[self.start..];
        // SAFETY: plain system calls on a constant path and a buffer of this process; the
        // descriptor is closed by the code that has opened it.
        unsafe {
            let file = Errno::result(libc::open(FILE.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC))?;
            let write_result =
                Errno::result(libc::write(file, digits.as_ptr().cast(), digits.len()));
            libc::close(file);
            write_result.map(drop)
        }
    }
}

/// Creates a helper process that sets the last PID to `pid`, and waits until it has ended. The
/// helper is created in the namespace that is set for the calling thread's children. Its own PID
/// is `helper_pid`; `None` if the kernel chooses it.
///
/// The inner result is that of [`LastPid::write`].
///
/// # Errors
/// Those of `clone3`: the helper was not created.
pub(crate) fn set_by_helper(pid: i32, helper_pid: Option<i32>) -> io::Result<Result<(), Errno>> {
    let last_pid = LastPid::new(pid);
    // SAFETY: the new process only makes async-signal-safe calls and never leaves this block.
    let helper = match unsafe { sys::clone3(0, None, helper_pid) }? {
        Some(helper) => helper,
        // SAFETY: as above.
        None => unsafe { libc::_exit(last_pid.write().err().map_or(0, |errno| errno as i32)) },
    };
    let (wait_status, _) = sys::wait_and_reap(helper.pid)?;
    Ok(
        match (libc::WIFEXITED(wait_status), libc::WEXITSTATUS(wait_status)) {
            (true, 0) => Ok(()),
            (true, errno) => Err(Errno::from_raw(errno)),
            // The helper was killed.
            (false, _) => Err(Errno::EINTR),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pid_is_written_in_decimal_digits() {
        for pid in [0, 7, 10, 300, 32_767, 4_194_303, i32::MAX] {
            let last_pid = LastPid::new(pid);
            let text = std::str::from_utf8(&last_pid.digits[last_pid.start..]);
            assert_eq!(text, Ok(pid.to_string().as_str()));
        }
    }
}
