//! This process in the system: numbers, standard error, the clock, and what happens at a fork.

// Registering with the C library takes function pointers.
#![allow(unsafe_code)]

use crate::receive::{self, Turn};
use crate::session::{self, Session};
use std::cell::RefCell;
use std::io::Write;
use std::sync::{MutexGuard, Once};

/// Number of this process.
pub(crate) fn id() -> i32 {
    std::process::id() as i32
}

/// User this process runs as.
pub(crate) fn user() -> i32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::getuid() as i32 }
}

/// Writes to standard error in one piece.
pub(crate) fn write_stderr(bytes: &[u8]) {
    // Nobody left to tell when it is closed.
    let _ = std::io::stderr().write_all(bytes);
}

/// Seconds and microseconds since 1970.
pub(crate) fn clock() -> (i64, i64) {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    (since.as_secs() as i64, i64::from(since.subsec_micros()))
}

/// From now on a fork leaves the child with a session it can use.
pub(crate) fn prepare_for_fork() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both functions never unwind and live as long as this library.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

type Locks = (Option<Turn>, MutexGuard<'static, Session>);

thread_local! {
    static HELD: RefCell<Option<Locks>> = const { RefCell::new(None) };
}

/// Another thread might hold a lock at the fork, which would then stay locked in the child for ever.
extern "C" fn before_fork() {
    // Inside a handler this thread is the one that takes messages in. The session is never locked while program code runs.
    let turn = (!receive::in_handler()).then(receive::turn);
    // Only a thread that is ending has lost its place for the guards; then nothing is locked.
    let session = session::lock();
    if let Some(runtime) = &session.runtime {
        // Once more, now that no other thread receives messages that the child would see.
        runtime.prepare_for_fork();
    }
    let _ = HELD.try_with(|held| *held.borrow_mut() = Some((turn, session)));
}

extern "C" fn after_fork() {
    let _ = HELD.try_with(|held| drop(held.borrow_mut().take()));
}
