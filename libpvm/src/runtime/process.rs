//! What belongs to the process as a whole: what a fork must not take along, and what has to happen at its end.
//!
//! After `fork` the child is no task: its copies of the descriptors are closed at once and its copies of the runtime are
//! dead, which [`generation`] tells. `vfork` and `posix_spawn` do not come here; for them all descriptors are
//! close-on-exec.
#![allow(unsafe_code)] // pthread_atfork and atexit have no safe form.

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use sempa_proto::task::LIBRARY_SOCKET_FLAG;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Mutex, Once};

/// Descriptors that a fork closes in the child. More than that are left to close-on-exec.
const FORK_FDS_MAX: usize = 1024;
/// An unused place in [`FORK_FDS`].
const NO_FD: i32 = -1;

/// Rises with every fork, in the child.
static GENERATION: AtomicU64 = AtomicU64::new(0);
static FORK_FDS: [AtomicI32; FORK_FDS_MAX] = [const { AtomicI32::new(NO_FD) }; FORK_FDS_MAX];
/// Leaked on purpose: a fork may come while another thread holds the lock; the child then makes a new list.
static AT_EXIT: AtomicPtr<AtExit> = AtomicPtr::new(std::ptr::null_mut());

type AtExit = Mutex<Vec<Box<dyn ExitHook>>>;

/// Number of forks between the first process and this one.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Installs the hooks for fork and exit; once per process.
pub(crate) fn install_hooks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: both functions are `extern "C"`, never unwind, and live as long as this library.
        unsafe {
            libc::pthread_atfork(Some(before_fork), None, Some(after_fork_in_child));
            libc::atexit(at_exit);
        }
    });
}

/// Something to be done at the normal end of this process, or before a fork.
pub(crate) trait ExitHook: Send {
    /// True when there is nothing left to do; the hook is then forgotten at the next occasion.
    fn is_done(&self) -> bool;
    /// Does what has to be done before a fork.
    fn before_fork(&self);
    /// Does what has to be done at the end.
    fn run(&self);
}

/// Adds a hook; hooks run once, in no particular order.
pub(crate) fn add_exit_hook(hook: impl ExitHook + 'static) {
    let mut hooks = exit_hooks()
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    hooks.retain(|hook| !hook.is_done());
    hooks.push(Box::new(hook));
}

fn exit_hooks() -> &'static AtExit {
    let mut list = AT_EXIT.load(Ordering::Acquire);
    if list.is_null() {
        let fresh = Box::into_raw(Box::<AtExit>::default());
        list = match AT_EXIT.compare_exchange(list, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                // SAFETY: `fresh` came from `Box::into_raw` just now and nobody else has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                other
            }
        };
    }
    // SAFETY: the pointer came from `Box::into_raw` and is never freed once it is in AT_EXIT.
    unsafe { &*list }
}

extern "C" fn at_exit() {
    // `exit` may be called from a signal handler on top of a thread that holds the lock: better no flush than no end.
    if let Ok(hooks) = exit_hooks().try_lock() {
        hooks.iter().for_each(|hook| hook.run());
    }
}

extern "C" fn before_fork() {
    if let Ok(hooks) = exit_hooks().try_lock() {
        hooks.iter().for_each(|hook| hook.before_fork());
    }
}

/// Marks a socket as one that is closed before a move and in a forked child, for those who look at this task from outside.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn mark(socket: impl AsFd) -> io::Result<()> {
    let fd = socket.as_fd();
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(
        fd,
        FcntlArg::F_SETFL(flags | OFlag::from_bits_retain(LIBRARY_SOCKET_FLAG)),
    )?;
    Ok(())
}

/// Async-signal-safe: atomics and `close` only.
extern "C" fn after_fork_in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    AT_EXIT.store(std::ptr::null_mut(), Ordering::Relaxed);
    for place in &FORK_FDS {
        let fd = place.swap(NO_FD, Ordering::Relaxed);
        if fd != NO_FD {
            // SAFETY: the number is this child's copy of a descriptor of the runtime; `Own` never touches it again here.
            unsafe { libc::close(fd) };
        }
    }
}

/// Something that belongs to the process that made it: a forked child's copy is closed by the fork if it is a descriptor,
/// and never dropped.
#[derive(Debug)]
pub(crate) struct Own<T> {
    value: Option<T>,
    generation: u64,
    place: Option<usize>,
}

impl<T> Own<T> {
    /// Owns something that needs no closing at a fork.
    pub(crate) fn new(value: T) -> Own<T> {
        Own {
            value: Some(value),
            generation: generation(),
            place: None,
        }
    }

    /// Takes it out; `None` in a forked child.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        if self.generation == generation() {
            self.value.take()
        } else {
            None
        }
    }

    /// The thing itself, to change it.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value
            .as_mut()
            .expect("only `into_inner` and `drop` take it out")
    }

    /// The thing itself.
    pub(crate) fn get(&self) -> &T {
        self.value
            .as_ref()
            .expect("only `into_inner` and `drop` take it out")
    }
}

impl<T: AsFd> Own<T> {
    /// Owns a descriptor, which a fork closes in the child.
    pub(crate) fn fd(value: T) -> Own<T> {
        let fd = value.as_fd().as_raw_fd();
        let claim = |place: &AtomicI32| {
            place
                .compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        let place = FORK_FDS.iter().position(claim);
        Own {
            value: Some(value),
            generation: generation(),
            place,
        }
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.generation != generation() {
            std::mem::forget(self.value.take());
        } else if let Some(place) = self.place {
            FORK_FDS[place].store(NO_FD, Ordering::Relaxed);
        }
    }
}
