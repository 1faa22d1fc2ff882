//! Process-wide hooks: cleanup after `fork` in the child, and flushing at the end of the process.
//!
//! After `fork` the child is not a task. Its copies of the descriptors are closed immediately. Its
//! copies of the runtime detect the fork by [`fork_generation`] and refuse all calls. `vfork` and
//! `posix_spawn` do not run these hooks; for these calls all descriptors are close-on-exec.
#![allow(unsafe_code)] // pthread_atfork and atexit have no safe form.

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use sempa_proto::task::LIBRARY_SOCKET_FLAG;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once};

/// Maximum number of descriptors that a fork closes in the child. Further descriptors are only
/// close-on-exec.
const FORK_CLOSED_FDS_MAX: usize = 1024;
/// Marks a free entry of [`FDS_TO_CLOSE_AT_FORK`].
const NO_FD: i32 = -1;

/// Number of forks between the first process and this process. A forked child increments the
/// number.
static FORK_GENERATION: AtomicU64 = AtomicU64::new(0);
static FDS_TO_CLOSE_AT_FORK: [AtomicI32; FORK_CLOSED_FDS_MAX] =
    [const { AtomicI32::new(NO_FD) }; FORK_CLOSED_FDS_MAX];
/// Hooks that run at exit. The list is never freed. If another thread holds the list's lock during
/// a fork, the child creates a new list.
static EXIT_HOOKS: AtomicPtr<ExitHookList> = AtomicPtr::new(std::ptr::null_mut());

type ExitHookList = Mutex<Vec<Box<dyn ForkOrExitHook>>>;

pub(crate) fn fork_generation() -> u64 {
    FORK_GENERATION.load(Ordering::Relaxed)
}

/// Installs the hooks for fork and exit, once per process.
pub(crate) fn install_hooks() {
    static INSTALL_HOOKS: Once = Once::new();
    INSTALL_HOOKS.call_once(|| {
        // SAFETY: both functions are `extern "C"`, never unwind, and live as long as this library.
        unsafe {
            libc::pthread_atfork(Some(run_fork_hooks), None, Some(after_fork_in_child));
            libc::atexit(run_exit_hooks);
        }
    });
}

/// Actions before a fork and at the normal end of this process.
pub(crate) trait ForkOrExitHook: Send {
    /// True if the hook has nothing more to do. Obsolete hooks are removed when another hook is
    /// added.
    fn is_obsolete(&self) -> bool;
    fn prepare_for_fork(&self);
    /// Runs at the normal end of the process.
    fn run_at_exit(&self);
}

/// Adds a hook. At the end of the process, hooks run once, in no particular order.
pub(crate) fn add_exit_hook(hook: impl ForkOrExitHook + 'static) {
    let mut hooks = get_or_create_exit_hooks()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    hooks.retain(|hook| !hook.is_obsolete());
    hooks.push(Box::new(hook));
}

fn get_or_create_exit_hooks() -> &'static ExitHookList {
    let mut list_pointer = EXIT_HOOKS.load(Ordering::Acquire);
    if list_pointer.is_null() {
        let new_list = Box::into_raw(Box::<ExitHookList>::default());
        list_pointer = match EXIT_HOOKS.compare_exchange(
            list_pointer,
            new_list,
            Ordering::AcqRel,
            Ordering::Acquire,
        ) {
            Ok(_) => new_list,
            Err(existing_list) => {
                // SAFETY: `new_list` comes from `Box::into_raw` above and was never shared.
                drop(unsafe { Box::from_raw(new_list) });
                existing_list
            }
        };
    }
    // SAFETY: the pointer comes from `Box::into_raw`, and what is stored in EXIT_HOOKS is never
    // freed.
    unsafe { &*list_pointer }
}

extern "C" fn run_exit_hooks() {
    // A signal handler may call `exit` in a thread that already holds the lock. In that case the
    // flush is skipped, because waiting for the lock would be a deadlock.
    if let Ok(hooks) = get_or_create_exit_hooks().try_lock() {
        hooks.iter().for_each(|hook| hook.run_at_exit());
    }
}

extern "C" fn run_fork_hooks() {
    if let Ok(hooks) = get_or_create_exit_hooks().try_lock() {
        hooks.iter().for_each(|hook| hook.prepare_for_fork());
    }
}

/// Marks a socket that the library closes before a migration and in a forked child. Programs that
/// inspect this task from another process recognize the mark.
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

/// Value that belongs to the process that created it. In a forked child the value is never dropped.
/// If the value is a descriptor, the fork closes the child's copy.
#[derive(Debug)]
pub(crate) struct ProcessOwned<T> {
    value: Option<T>,
    fork_generation: u64,
    fd_slot: Option<usize>,
}

impl<T> ProcessOwned<T> {
    /// Wraps a value that is not a descriptor.
    pub(crate) fn new(value: T) -> Self {
        Self {
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
    pub(crate) fn from_fd(value: T) -> Self {
        let fd = value.as_fd().as_raw_fd();
        let try_claim = |fd_slot: &AtomicI32| {
            fd_slot
                .compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        let fd_slot = FDS_TO_CLOSE_AT_FORK.iter().position(try_claim);
        Self {
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
        } else if let Some(slot_index) = self.fd_slot {
            FDS_TO_CLOSE_AT_FORK[slot_index].store(NO_FD, Ordering::Relaxed);
        }
    }
}
