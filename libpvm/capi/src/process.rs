//! Functions of the calling process: pid, uid, standard error, clock, and locking around `fork`.

// `getuid` and `pthread_atfork` are calls of the C library.
#![allow(unsafe_code)]

use crate::receive::{self, ArrivalsGuard};
use crate::session::{self, SessionGuard};
use std::cell::RefCell;
use std::io::Write;
use std::sync::Once;

pub(crate) fn process_id() -> i32 {
    std::process::id() as i32
}

pub(crate) fn real_uid() -> i32 {
    // SAFETY: `getuid` cannot fail and accesses no memory of this process.
    unsafe { libc::getuid() as i32 }
}

/// Writes to standard error; errors are ignored.
pub(crate) fn write_stderr(bytes: &[u8]) {
    // There is no other output on which a closed standard error could be reported.
    let _ = std::io::stderr().write_all(bytes);
}

/// Returns the time since 1970 as seconds and microseconds.
pub(crate) fn unix_time() -> (i64, i64) {
    let time_since_epoch = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    (
        time_since_epoch.as_secs() as i64,
        i64::from(time_since_epoch.subsec_micros()),
    )
}

/// Registers handlers so that the child of every later `fork` has a usable session.
pub(crate) fn prepare_for_fork() {
    static REGISTRATION: Once = Once::new();
    REGISTRATION.call_once(|| {
        // SAFETY: neither function unwinds, and both stay valid while this library is loaded.
        unsafe {
            libc::pthread_atfork(
                Some(acquire_fork_locks),
                Some(release_fork_locks),
                Some(release_fork_locks),
            )
        };
    });
}

type ForkLocks = (Option<ArrivalsGuard>, SessionGuard);

thread_local! {
    static FORK_LOCKS: RefCell<Option<ForkLocks>> = const { RefCell::new(None) };
}

/// Acquires the locks before a fork. A lock that another thread holds at the fork would stay locked
/// in the child forever.
extern "C" fn acquire_fork_locks() {
    // In a message handler this thread already has the right to take in messages, so this thread
    // must not wait for that right. The session is never locked while code of the program runs.
    let arrivals = (!receive::is_in_handler()).then(receive::lock_arrivals);
    // `try_with` below fails only on a thread that is exiting, whose thread-local storage is
    // already destroyed. The locks are then released immediately.
    let session = session::lock();
    if let Some(runtime) = &session.runtime {
        // The runtime prepares once more: another thread may have received messages before the
        // locks were acquired, and the child has copies of these messages.
        runtime.prepare_for_fork();
    }
    let _ = FORK_LOCKS.try_with(|slot| *slot.borrow_mut() = Some((arrivals, session)));
}

extern "C" fn release_fork_locks() {
    let _ = FORK_LOCKS.try_with(|slot| drop(slot.borrow_mut().take()));
}
