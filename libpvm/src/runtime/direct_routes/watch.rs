//! The epoll sets that watch the descriptors of direct routes.
//!
//! Established connections are in two sets: in the set on which a waiting application thread sleeps
//! ([`SocketWaiters`]), and in the set that the I/O thread watches. As with the daemon's socket,
//! the kernel wakes the I/O thread only if no application thread sleeps. Connections in setup are
//! in the set of the I/O thread only.

use super::super::process::ProcessOwned;
use super::super::socket_waiters::SocketWaiters;
use nix::errno::Errno;
use nix::poll::PollFlags;
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use std::os::fd::{AsFd, BorrowedFd};

/// Epoll set of all descriptors of the direct routes.
#[derive(Debug)]
pub(crate) struct ReadySet(pub(super) Epoll);

impl AsFd for ReadySet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// Adds the descriptor of a route in setup to the set, or changes its events if the set already
/// contains the descriptor.
pub(super) fn watch_setup(
    ready_set: &ProcessOwned<ReadySet>,
    fd: BorrowedFd<'_>,
    poll_flags: PollFlags,
    event_data: u64,
) {
    let mut flags = EpollFlags::empty();
    flags.set(
        EpollFlags::EPOLLOUT,
        poll_flags.contains(PollFlags::POLLOUT),
    );
    flags.set(EpollFlags::EPOLLIN, poll_flags.contains(PollFlags::POLLIN));
    let mut event = EpollEvent::new(flags, event_data);
    if ready_set.get().0.add(fd, event) == Err(Errno::EEXIST) {
        // If the kernel has no memory for the entry, the route is not handled until its timer
        // expires.
        let _ = ready_set.get().0.modify(fd, &mut event);
    }
}

/// Adds an established connection to both sets. The kernel wakes the set that was added first.
/// Returns false if a set has no room for it.
pub(super) fn watch_conn(
    ready_set: &ProcessOwned<ReadySet>,
    app_waiters: Option<&SocketWaiters>,
    fd: BorrowedFd<'_>,
    event_data: u64,
) -> bool {
    // The set contains the connection if it was in setup.
    let _ = ready_set.get().0.delete(fd);
    app_waiters.is_none_or(|waiters| waiters.add_direct_socket(fd, event_data).is_ok())
        && ready_set
            .get()
            .0
            .add(fd, conn_event(false, event_data))
            .is_ok()
}

/// Sets whether the I/O thread is woken when an established connection becomes writable.
pub(super) fn set_writable_watched(
    ready_set: &ProcessOwned<ReadySet>,
    fd: BorrowedFd<'_>,
    is_watched: bool,
    event_data: u64,
) {
    // The events of an exclusive entry cannot be changed. If the kernel has no memory for the new
    // entry, the connection is read when the application polls or a timer expires.
    let _ = ready_set.get().0.delete(fd);
    let _ = ready_set
        .get()
        .0
        .add(fd, conn_event(is_watched, event_data));
}

fn conn_event(watches_writable: bool, event_data: u64) -> EpollEvent {
    let mut flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
    flags.set(EpollFlags::EPOLLOUT, watches_writable);
    EpollEvent::new(flags, event_data)
}

/// Removes a connection from both sets. Closing alone does not remove it: a forked child may have a
/// copy of the descriptor.
pub(super) fn unwatch_conn(
    ready_set: Option<&ProcessOwned<ReadySet>>,
    app_waiters: Option<&SocketWaiters>,
    fd: BorrowedFd<'_>,
) {
    if let Some(ready_set) = ready_set {
        let _ = ready_set.get().0.delete(fd);
    }
    if let Some(waiters) = app_waiters {
        waiters.remove_direct_socket(fd);
    }
}
