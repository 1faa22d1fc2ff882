//! Futex wait and wake on words in shared memory.
#![allow(unsafe_code)] // The futex call has no safe form in the crates we use.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while the futex word has the value `value`, at most until `timeout` has passed; `None`
/// means without a time limit. The call may return early.
pub fn wait(word: &AtomicU32, value: u32, timeout: Option<Duration>) {
    let timespec = timeout.map(|timeout| libc::timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    let timespec = timespec
        .as_ref()
        .map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word outlives the call, and the kernel only reads the word and the time.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            timespec,
        )
    };
}

/// Wakes all threads that sleep on the word.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel uses the word's address only.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}
