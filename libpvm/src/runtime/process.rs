//! What belongs to the process as a whole: what a fork must not take along, and what has to happen at its end.
//!
//! After `fork` the child is no task: its copies of the descriptors are closed at once and its copies of the runtime are
//! dead, which [`generation`] tells. `vfork` and `posix_spawn` do not come here; for them all descriptors are
//! close-on-exec.
#![allow(unsafe_code)] // pthread_atfork, atexit and receiving into spare capacity have no safe form.

use bytes::{BufMut, BytesMut};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
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
            libc::pthread_atfork(None, None, Some(after_fork_in_child));
            libc::atexit(at_exit);
        }
    });
}

/// Something to be done at the normal end of this process.
pub(crate) trait ExitHook: Send {
    /// True when there is nothing left to do; the hook is then forgotten at the next occasion.
    fn is_done(&self) -> bool;
    /// Does it.
    fn run(&self);
}

/// Adds a hook; hooks run once, in no particular order.
pub(crate) fn add_exit_hook(hook: impl ExitHook + 'static) {
    let mut hooks = exit_hooks().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
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
        Own { value: Some(value), generation: generation(), place: None }
    }

    /// Takes it out; `None` in a forked child.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        if self.generation == generation() { self.value.take() } else { None }
    }

    /// The thing itself, to change it.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("only `into_inner` and `drop` take it out")
    }

    /// The thing itself.
    pub(crate) fn get(&self) -> &T {
        self.value.as_ref().expect("only `into_inner` and `drop` take it out")
    }
}

impl<T: AsFd> Own<T> {
    /// Owns a descriptor, which a fork closes in the child.
    pub(crate) fn fd(value: T) -> Own<T> {
        let fd = value.as_fd().as_raw_fd();
        let claim = |place: &AtomicI32| place.compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        let place = FORK_FDS.iter().position(claim);
        Own { value: Some(value), generation: generation(), place }
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

/// Descriptors taken from one read at most; one word brings no more.
const READ_FDS_MAX: usize = sempa_proto::route::WORD_DESCRIPTORS_MAX;

/// Receives what is there, without waiting, behind what `buffer` holds, and the descriptors that came along. 0 is the end
/// of the stream.
///
/// # Errors
/// `WouldBlock` when nothing is there; anything else ends the connection.
pub(crate) fn receive(
    socket: &impl AsFd,
    buffer: &mut BytesMut,
    descriptors: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    receive_with(socket, buffer, descriptors, libc::MSG_DONTWAIT)
}

/// As [`receive`], but waits as long as the socket's own limit says.
///
/// # Errors
/// `WouldBlock` when nothing came in that time; anything else ends the connection.
pub(crate) fn receive_waiting(
    socket: &impl AsFd,
    buffer: &mut BytesMut,
    descriptors: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    receive_with(socket, buffer, descriptors, 0)
}

fn receive_with(
    socket: &impl AsFd,
    buffer: &mut BytesMut,
    descriptors: &mut VecDeque<OwnedFd>,
    flags: i32,
) -> io::Result<usize> {
    /// Room for one message of descriptors, aligned as the kernel wants it.
    const CONTROL_WORDS: usize = 8;
    const _: () = assert!(READ_FDS_MAX * size_of::<RawFd>() + 24 <= CONTROL_WORDS * 8);
    let room = buffer.spare_capacity_mut();
    let mut control = [0u64; CONTROL_WORDS];
    let mut slice = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: all zeroes is a good message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&mut slice, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    let flags = flags | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the kernel writes at most as many bytes as the two buffers hold, and both live through the call.
    let got = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &mut message, flags) };
    let Ok(got) = usize::try_from(got) else { return Err(io::Error::last_os_error()) };
    if message.msg_controllen > 0 {
        // SAFETY: the kernel has filled in the control part of this header, and nobody owns its descriptors yet.
        unsafe { take_descriptors(&message, descriptors) };
    }
    // SAFETY: the kernel has initialised the first `got` bytes of the spare capacity.
    unsafe { buffer.advance_mut(got) };
    Ok(got)
}

/// Takes the descriptors of a received message over.
///
/// # Safety
/// The header is as the kernel left it, its buffers are alive, and this is done once.
unsafe fn take_descriptors(message: &libc::msghdr, descriptors: &mut VecDeque<OwnedFd>) {
    // SAFETY: by this function's contract; the pointers stay within the control buffer.
    unsafe {
        let mut part = libc::CMSG_FIRSTHDR(message);
        while let Some(head) = part.as_ref() {
            if head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS {
                let bytes = head.cmsg_len - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(part).cast::<RawFd>();
                for i in 0..bytes / size_of::<RawFd>() {
                    descriptors.push_back(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            part = libc::CMSG_NXTHDR(message, part);
        }
    }
}

/// Takes a descriptor over that the kernel has just given to this process.
#[cfg(test)]
pub(crate) fn adopt(fd: RawFd) -> OwnedFd {
    // SAFETY: tests hand over what `recvmsg` has returned, once.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
