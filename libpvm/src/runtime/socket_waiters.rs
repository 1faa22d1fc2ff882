//! Chooses the thread that wakes up when the daemon's socket becomes readable: an application
//! thread that waits for the daemon, otherwise the I/O thread, never both. A message that goes
//! through the I/O thread costs two additional wake-ups.
//!
//! The kernel makes the choice. The application threads and the I/O thread each have an epoll set
//! that watches the socket with `EPOLLEXCLUSIVE`. The application threads' set is added first. If
//! no thread sleeps on a set, the kernel reports the event to the next set. The epoll sets do not
//! prevent closing the socket.

use super::process::ProcessOwned;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Maximum sleep without a deadline. The limit is high because each wake-up disturbs a CPU that may
/// be idle.
const IDLE_SLEEP_MAX: Duration = Duration::from_secs(30);
/// Maximum sleep on a futex with a deadline. The limit bounds a sleep that began before a
/// migration, because the end of that sleep was computed from the clock of the previous host.
pub(super) const DEADLINE_SLEEP_MAX: Duration = Duration::from_secs(1);
/// Epoll event data of the wake-up eventfd.
const WAKE_EVENT_DATA: u64 = 1;

/// One epoll set that watches the daemon's socket.
#[derive(Debug)]
pub(crate) struct EpollSet(Epoll);

impl AsFd for EpollSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// The two epoll sets of the daemon's socket: a set of the application threads and a set of the I/O
/// thread.
#[derive(Debug)]
pub(crate) struct SocketWaiters {
    app_threads_set: ProcessOwned<EpollSet>,
    io_thread_set: ProcessOwned<EpollSet>,
    wake_event: ProcessOwned<EventFd>,
}

impl SocketWaiters {
    /// Creates both sets. The sets watch no socket yet.
    pub(crate) fn new() -> io::Result<Self> {
        let new_set = || {
            Ok::<_, io::Error>(ProcessOwned::from_fd(EpollSet(Epoll::new(
                EpollCreateFlags::EPOLL_CLOEXEC,
            )?)))
        };
        let event_fd =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let waiters = Self {
            app_threads_set: new_set()?,
            io_thread_set: new_set()?,
            wake_event: ProcessOwned::from_fd(event_fd),
        };
        waiters.app_threads_set.get().0.add(
            waiters.wake_event.get(),
            EpollEvent::new(EpollFlags::EPOLLIN, WAKE_EVENT_DATA),
        )?;
        Ok(waiters)
    }

    /// Adds the socket to both sets. The kernel wakes the set that was added first, so the set of
    /// the application threads comes first.
    pub(crate) fn add_socket(&self, socket: &UnixStream) -> io::Result<()> {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
        for set in [&self.app_threads_set, &self.io_thread_set] {
            set.get().0.add(socket, EpollEvent::new(flags, 0))?;
        }
        Ok(())
    }

    /// Makes both sets stop watching the socket.
    pub(crate) fn remove_socket(&self, socket: &UnixStream) {
        for set in [&self.app_threads_set, &self.io_thread_set] {
            // The call fails if the set does not watch the socket. This error is harmless.
            let _ = set.get().0.delete(socket);
        }
    }

    /// Sleeps until the socket is readable, until [`SocketWaiters::wake_app_thread`] is called, or
    /// for at most `max_wait`. Spurious wake-ups are possible.
    pub(crate) fn wait_for_socket(&self, max_wait: Duration) {
        let mut events = [EpollEvent::empty(); 2];
        let timeout = EpollTimeout::try_from(max_wait).unwrap_or(EpollTimeout::MAX);
        // An error means that a signal interrupted the sleep; the caller checks all conditions
        // again.
        let event_count = self
            .app_threads_set
            .get()
            .0
            .wait(&mut events, timeout)
            .unwrap_or(0);
        if events[..event_count]
            .iter()
            .any(|event| event.data() == WAKE_EVENT_DATA)
        {
            let _ = self.wake_event.get().read();
        }
    }

    /// Wakes the application thread that sleeps, or is about to sleep, on the socket.
    pub(crate) fn wake_app_thread(&self) {
        // The write fails only if the counter is full. In that case a wake-up is already pending.
        let _ = self.wake_event.get().write(1);
    }

    /// Returns the descriptor on which the I/O thread sleeps.
    pub(crate) fn io_thread_fd(&self) -> BorrowedFd<'_> {
        self.io_thread_set.get().as_fd()
    }
}

/// Returns how long a thread may sleep that waits for at most `timeout`.
pub(super) fn sleep_duration(timeout: Option<Duration>) -> Duration {
    timeout.map_or(IDLE_SLEEP_MAX, |timeout| timeout.min(DEADLINE_SLEEP_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::io::{Read, Write};
    use std::time::Instant;

    const LONG_TIMEOUT: Duration = Duration::from_secs(60);

    /// True if the epoll set of the I/O thread reports an event.
    fn io_thread_is_ready(waiters: &SocketWaiters) -> bool {
        let mut fds = [PollFd::new(waiters.io_thread_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO) == Ok(1)
    }

    /// A sleeping application thread wakes up for data on the socket and for
    /// [`SocketWaiters::wake_app_thread`].
    #[test]
    fn app_thread_wakes_for_socket_and_wake_event() {
        let waiters = SocketWaiters::new().expect("made");
        let (mut own_socket, mut peer_socket) = UnixStream::pair().expect("made");
        waiters.add_socket(&own_socket).expect("watched");
        let start = Instant::now();
        waiters.wake_app_thread();
        waiters.wait_for_socket(LONG_TIMEOUT);
        peer_socket.write_all(b"x").expect("written");
        waiters.wait_for_socket(LONG_TIMEOUT);
        assert!(
            start.elapsed() < LONG_TIMEOUT,
            "both times somebody woke it"
        );
        // Both sets report the data until a thread reads the data.
        assert!(io_thread_is_ready(&waiters));
        own_socket.read_exact(&mut [0]).expect("there");
        assert!(!io_thread_is_ready(&waiters));
    }

    /// A socket that was removed from the sets wakes no thread until it is added again.
    #[test]
    fn removed_socket_wakes_no_thread() {
        let waiters = SocketWaiters::new().expect("made");
        let (own_socket, mut peer_socket) = UnixStream::pair().expect("made");
        waiters.add_socket(&own_socket).expect("watched");
        waiters.remove_socket(&own_socket);
        peer_socket.write_all(b"x").expect("written");
        assert!(!io_thread_is_ready(&waiters));
        waiters.add_socket(&own_socket).expect("watched again");
        assert!(io_thread_is_ready(&waiters));
    }
}
