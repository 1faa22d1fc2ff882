//! Chooses the thread that wakes up when the daemon's socket becomes readable: an application
//! thread that waits for the daemon, otherwise the I/O thread, never both. A message that goes
//! through the I/O thread costs two additional wake-ups.
//!
//! The kernel makes the choice. The application threads and the I/O thread each have an epoll set
//! that watches the socket with `EPOLLEXCLUSIVE`. The application threads' set is added first; if
//! no thread sleeps on a set, the kernel passes the event on to the next set. The sets do not keep
//! the socket open.

use super::process::ProcessOwned;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Epoll event data of the wake-up eventfd.
const WAKE_TOKEN: u64 = 1;

/// One epoll set that watches the daemon's socket.
#[derive(Debug)]
pub(crate) struct EpollSet(Epoll);

impl AsFd for EpollSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// The two epoll sets of the daemon's socket: one of the application threads, one of the I/O
/// thread.
#[derive(Debug)]
pub(crate) struct SocketWaiters {
    app_threads: ProcessOwned<EpollSet>,
    io_thread: ProcessOwned<EpollSet>,
    wake_event: ProcessOwned<EventFd>,
}

impl SocketWaiters {
    /// Creates both sets without a socket.
    pub(crate) fn new() -> io::Result<SocketWaiters> {
        let set = || {
            Ok::<_, io::Error>(ProcessOwned::new_fd(EpollSet(Epoll::new(
                EpollCreateFlags::EPOLL_CLOEXEC,
            )?)))
        };
        let kick =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let seats = SocketWaiters {
            app_threads: set()?,
            io_thread: set()?,
            wake_event: ProcessOwned::new_fd(kick),
        };
        seats.app_threads.get().0.add(
            seats.wake_event.get(),
            EpollEvent::new(EpollFlags::EPOLLIN, WAKE_TOKEN),
        )?;
        Ok(seats)
    }

    /// Adds the socket to both sets. The kernel wakes the set that was added first, so the set of
    /// the application threads comes first.
    pub(crate) fn add_socket(&self, socket: &UnixStream) -> io::Result<()> {
        let wanted = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
        for set in [&self.app_threads, &self.io_thread] {
            set.get().0.add(socket, EpollEvent::new(wanted, 0))?;
        }
        Ok(())
    }

    /// Makes both sets stop watching the socket.
    pub(crate) fn remove_socket(&self, socket: &UnixStream) {
        for set in [&self.app_threads, &self.io_thread] {
            // Fails if the set never watched the socket, which is harmless.
            let _ = set.get().0.delete(socket);
        }
    }

    /// Sleeps until the socket is readable, until [`SocketWaiters::wake_app_thread`], or for at
    /// most `max_wait`. Spurious wake-ups are possible.
    pub(crate) fn wait_for_socket(&self, max_wait: Duration) {
        let mut events = [EpollEvent::empty(); 2];
        let timeout = EpollTimeout::try_from(max_wait).unwrap_or(EpollTimeout::MAX);
        // An error means a signal; the caller checks all conditions again.
        let count = self
            .app_threads
            .get()
            .0
            .wait(&mut events, timeout)
            .unwrap_or(0);
        if events[..count]
            .iter()
            .any(|event| event.data() == WAKE_TOKEN)
        {
            let _ = self.wake_event.get().read();
        }
    }

    /// Wakes the application thread that sleeps, or is about to sleep.
    pub(crate) fn wake_app_thread(&self) {
        // Fails if the counter is full; then a wake-up is pending.
        let _ = self.wake_event.get().write(1);
    }

    /// Returns the descriptor on which the I/O thread sleeps.
    pub(crate) fn io_thread_fd(&self) -> BorrowedFd<'_> {
        self.io_thread.get().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::io::{Read, Write};
    use std::time::Instant;

    const LONG_TIMEOUT: Duration = Duration::from_secs(60);

    /// True if the epoll set of the I/O thread reports an event.
    fn io_thread_is_ready(seats: &SocketWaiters) -> bool {
        let mut fds = [PollFd::new(seats.io_thread_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO) == Ok(1)
    }

    /// A sleeping application thread wakes up for data on the socket and for an explicit wake-up.
    #[test]
    fn app_thread_wakes_for_socket_and_kick() {
        let seats = SocketWaiters::new().expect("made");
        let (mut ours, mut theirs) = UnixStream::pair().expect("made");
        seats.add_socket(&ours).expect("watched");
        let begin = Instant::now();
        seats.wake_app_thread();
        seats.wait_for_socket(LONG_TIMEOUT);
        theirs.write_all(b"x").expect("written");
        seats.wait_for_socket(LONG_TIMEOUT);
        assert!(
            begin.elapsed() < LONG_TIMEOUT,
            "both times somebody woke it"
        );
        // Both sets still report the data until it is read.
        assert!(io_thread_is_ready(&seats));
        ours.read_exact(&mut [0]).expect("there");
        assert!(!io_thread_is_ready(&seats));
    }

    /// A socket that was removed from the sets wakes no thread until it is added again.
    #[test]
    fn removed_socket_wakes_no_thread() {
        let seats = SocketWaiters::new().expect("made");
        let (ours, mut theirs) = UnixStream::pair().expect("made");
        seats.add_socket(&ours).expect("watched");
        seats.remove_socket(&ours);
        theirs.write_all(b"x").expect("written");
        assert!(!io_thread_is_ready(&seats));
        seats.add_socket(&ours).expect("watched again");
        assert!(io_thread_is_ready(&seats));
    }
}
