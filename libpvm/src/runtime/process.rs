//! Process-wide hooks: cleanup after `fork` in the child, and flushing at the end of the process.
//!
//! After `fork` the child is not a task. Its copies of the descriptors are closed immediately, and
//! its copies of the runtime are dead; they detect this by [`fork_generation`]. `vfork` and
//! `posix_spawn` do not run these hooks; for these calls all descriptors are close-on-exec.
#![allow(unsafe_code)] // pthread_atfork and atexit have no safe form.

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use sempa_proto::task::LIBRARY_SOCKET_FLAG;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once};

/// Maximum number of descriptors that a fork closes in the child. Descriptors beyond the maximum
/// are only close-on-exec.
const FORK_FDS_MAX: usize = 1024;
/// Marks a free entry of [`FDS_TO_CLOSE_AT_FORK`].
const NO_FD: i32 = -1;

/// Number of forks between the first process and this one; the child increments it.
static FORK_GENERATION: AtomicU64 = AtomicU64::new(0);
static FDS_TO_CLOSE_AT_FORK: [AtomicI32; FORK_FDS_MAX] =
    [const { AtomicI32::new(NO_FD) }; FORK_FDS_MAX];
/// Hooks that run at exit. The list is never freed: another thread may hold its lock during a fork,
/// and the child then creates a new list.
static EXIT_HOOKS: AtomicPtr<ExitHookList> = AtomicPtr::new(std::ptr::null_mut());

type ExitHookList = Mutex<Vec<Box<dyn ForkOrExitHook>>>;

/// Returns the number of forks between the first process and this one.
pub(crate) fn fork_generation() -> u64 {
    FORK_GENERATION.load(Ordering::Relaxed)
}

/// Installs the hooks for fork and exit, once per process.
pub(crate) fn install_hooks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both functions are `extern "C"`, never unwind, and live as long as this library.
        unsafe {
            libc::pthread_atfork(Some(before_fork), None, Some(after_fork_in_child));
            libc::atexit(run_exit_hooks);
        }
    });
}

/// Action before a fork, or at the normal end of this process.
pub(crate) trait ForkOrExitHook: Send {
    /// True if nothing is left to do. The hook is removed when the next hook is added.
    fn is_done(&self) -> bool;
    fn before_fork(&self);
    /// Runs at the normal end of the process.
    fn run_at_exit(&self);
}

/// Adds a hook. Hooks run once, in no particular order.
pub(crate) fn add_exit_hook(hook: impl ForkOrExitHook + 'static) {
    let mut hooks = exit_hooks()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    hooks.retain(|hook| !hook.is_done());
    hooks.push(Box::new(hook));
}

fn exit_hooks() -> &'static ExitHookList {
    let mut list = EXIT_HOOKS.load(Ordering::Acquire);
    if list.is_null() {
        let fresh = Box::into_raw(Box::<ExitHookList>::default());
        list = match EXIT_HOOKS.compare_exchange(list, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: `fresh` comes from `Box::into_raw` above and was never shared.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
    }
    // SAFETY: the pointer comes from `Box::into_raw`, and what is stored in EXIT_HOOKS is never
    // freed.
    unsafe { &*list }
}

extern "C" fn run_exit_hooks() {
    // A signal handler may call `exit` on top of a thread that holds the lock. Skipping the flush
    // is better than a deadlock.
    if let Ok(hooks) = exit_hooks().try_lock() {
        hooks.iter().for_each(|hook| hook.run_at_exit());
    }
}

extern "C" fn before_fork() {
    if let Ok(hooks) = exit_hooks().try_lock() {
        hooks.iter().for_each(|hook| hook.before_fork());
    }
}

/// Marks a socket that the library closes before a migration and in a forked child. Programs that
/// inspect this task from outside recognize the mark.
///
/// # Errors
/// The kernel refuses to set the flag.
pub(crate) fn mark_library_socket(socket: impl AsFd) -> io::Result<()> {
    let fd = socket.as_fd();
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(
        fd,
        FcntlArg::F_SETFL(flags | OFlag::from_bits_retain(LIBRARY_SOCKET_FLAG)),
    )?;
    Ok(())
}

/// Increments the fork generation in the child and closes the child's copies of the library's
/// descriptors. Async-signal-safe: uses only atomics and `close`.
extern "C" fn after_fork_in_child() {
    FORK_GENERATION.fetch_add(1, Ordering::Relaxed);
    EXIT_HOOKS.store(std::ptr::null_mut(), Ordering::Relaxed);
    for slot in &FDS_TO_CLOSE_AT_FORK {
        let fd = slot.swap(NO_FD, Ordering::Relaxed);
        if fd != NO_FD {
            // SAFETY: `fd` is this child's copy of a descriptor of the runtime; `ProcessOwned`
            // never uses it again in the child.
            unsafe { libc::close(fd) };
        }
    }
}

/// Value that belongs to the process that created it. In a forked child the value is never dropped;
/// if it is a descriptor, the fork closes the child's copy.
#[derive(Debug)]
pub(crate) struct ProcessOwned<T> {
    value: Option<T>,
    fork_generation: u64,
    fd_slot: Option<usize>,
}

impl<T> ProcessOwned<T> {
    /// Wraps a value that is not a descriptor.
    pub(crate) fn new(value: T) -> ProcessOwned<T> {
        ProcessOwned {
            value: Some(value),
            fork_generation: fork_generation(),
            fd_slot: None,
        }
    }

    /// Returns the value; `None` in a forked child.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        if self.fork_generation == fork_generation() {
            self.value.take()
        } else {
            None
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("only `into_inner` and `drop` take it out")
    }

    pub(crate) fn get(&self) -> &T {
        self.value
            .as_ref()
            .expect("only `into_inner` and `drop` take it out")
    }
}

impl<T: AsFd> ProcessOwned<T> {
    /// Wraps a descriptor, which a fork closes in the child.
    pub(crate) fn new_fd(value: T) -> ProcessOwned<T> {
        let fd = value.as_fd().as_raw_fd();
        let try_claim = |fd_slot: &AtomicI32| {
            fd_slot
                .compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        let fd_slot = FDS_TO_CLOSE_AT_FORK.iter().position(try_claim);
        ProcessOwned {
            value: Some(value),
            fork_generation: fork_generation(),
            fd_slot,
        }
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if self.fork_generation != fork_generation() {
            std::mem::forget(self.value.take());
        } else if let Some(place) = self.fd_slot {
            FDS_TO_CLOSE_AT_FORK[place].store(NO_FD, Ordering::Relaxed);
        }
    }
}
