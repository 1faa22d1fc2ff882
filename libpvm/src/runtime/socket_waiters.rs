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
use sempa_proto::Tid;
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
/// Epoll event data of the daemon's socket. No task has this tid.
const DAEMON_EVENT_DATA: u64 = 0;
/// Maximum number of descriptors that one call reports.
const READY_SOCKETS_MAX: usize = 16;
/// Epoll event data of the wake-up eventfd. No task has this tid.
const WAKE_EVENT_DATA: u64 = 1;

/// One epoll set that watches the daemon's socket.
#[derive(Debug)]
pub(crate) struct EpollSet(Epoll);

impl AsFd for EpollSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// The sockets that were readable when a thread looked.
#[derive(Debug)]
pub(crate) struct ReadySockets {
    events: [EpollEvent; READY_SOCKETS_MAX],
    event_count: usize,
}

impl ReadySockets {
    fn data(&self) -> impl Iterator<Item = u64> {
        self.events[..self.event_count]
            .iter()
            .map(|event| event.data())
    }

    /// True if more sockets may be readable than one call reports.
    pub(crate) fn is_full(&self) -> bool {
        self.event_count == READY_SOCKETS_MAX
    }

    pub(crate) fn is_daemon_readable(&self) -> bool {
        self.data().any(|data| data == DAEMON_EVENT_DATA)
    }

    /// Returns the peers whose direct connections are readable.
    pub(crate) fn direct_peers(&self) -> impl Iterator<Item = Tid> {
        let peer_of = |data| i32::try_from(data).ok().map(Tid::from_raw);
        self.data()
            .filter(|data| *data > WAKE_EVENT_DATA)
            .filter_map(peer_of)
    }
}

/// The two epoll sets of the daemon's socket: a set of the application threads and a set of the I/O
/// thread. The set of the application threads also contains the established direct connections.
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
            set.get()
                .0
                .add(socket, EpollEvent::new(flags, DAEMON_EVENT_DATA))?;
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

    /// Adds an established direct connection to the set of the application threads. The caller
    /// adds it to a set of the I/O thread afterwards.
    pub(crate) fn add_direct_socket(&self, fd: BorrowedFd<'_>, event_data: u64) -> nix::Result<()> {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
        let event = EpollEvent::new(flags, event_data);
        self.app_threads_set.get().0.add(fd, event)
    }

    /// Makes the set of the application threads stop watching a direct connection.
    pub(crate) fn remove_direct_socket(&self, fd: BorrowedFd<'_>) {
        // The call fails if the set does not watch the connection. This error is harmless.
        let _ = self.app_threads_set.get().0.delete(fd);
    }

    /// Sleeps until a socket is readable, until [`SocketWaiters::wake_app_thread`] is called, or
    /// for at most `max_wait`. Spurious wake-ups are possible.
    pub(crate) fn wait_for_sockets(&self, max_wait: Duration) -> ReadySockets {
        let ready = self.wait(EpollTimeout::try_from(max_wait).unwrap_or(EpollTimeout::MAX));
        if ready.data().any(|data| data == WAKE_EVENT_DATA) {
            let _ = self.wake_event.get().read();
        }
        ready
    }

    /// Returns the sockets that are readable. Leaves the wake-up for the thread that sleeps.
    pub(crate) fn readable_sockets(&self) -> ReadySockets {
        self.wait(EpollTimeout::ZERO)
    }

    fn wait(&self, timeout: EpollTimeout) -> ReadySockets {
        let mut events = [EpollEvent::empty(); READY_SOCKETS_MAX];
        // An error means that a signal interrupted the sleep; the caller checks all conditions
        // again.
        let event_count = self
            .app_threads_set
            .get()
            .0
            .wait(&mut events, timeout)
            .unwrap_or(0);
        ReadySockets {
            events,
            event_count,
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
        assert!(!waiters.wait_for_sockets(LONG_TIMEOUT).is_daemon_readable());
        peer_socket.write_all(b"x").expect("written");
        assert!(waiters.wait_for_sockets(LONG_TIMEOUT).is_daemon_readable());
        assert!(
            start.elapsed() < LONG_TIMEOUT,
            "both times somebody woke it"
        );
        // Both sets report the data until a thread reads the data.
        assert!(io_thread_is_ready(&waiters));
        own_socket.read_exact(&mut [0]).expect("there");
        assert!(!io_thread_is_ready(&waiters));
    }

    /// A thread that sleeps on a direct connection is woken by the connection itself, and the set
    /// of the I/O thread does not report what that thread was woken for.
    #[test]
    fn direct_connection_wakes_only_sleeping_app_thread() {
        const PEER: Tid = Tid::from_raw(0x80001);
        let waiters = SocketWaiters::new().expect("made");
        let (own_socket, mut peer_socket) = UnixStream::pair().expect("made");
        let event_data = u64::try_from(PEER.raw()).expect("positive");
        waiters
            .add_direct_socket(own_socket.as_fd(), event_data)
            .expect("watched");
        let io_set = Epoll::new(EpollCreateFlags::empty()).expect("made");
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
        io_set
            .add(&own_socket, EpollEvent::new(flags, event_data))
            .expect("watched");
        let is_reported = |set: &Epoll| {
            set.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO)
                .expect("a set")
                == 1
        };
        let (tid_sender, tid_receiver) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| {
                tid_sender.send(nix::unistd::gettid()).expect("awaited");
                waiters.wait_for_sockets(LONG_TIMEOUT)
            });
            wait_until_sleeping(tid_receiver.recv().expect("sent"));
            peer_socket.write_all(b"x").expect("written");
            let ready = sleeper.join().expect("no panic");
            assert_eq!(ready.direct_peers().collect::<Vec<Tid>>(), [PEER]);
            assert!(!ready.is_daemon_readable() && !ready.is_full());
        });
        assert!(!is_reported(&io_set));
        // While no thread sleeps there, both sets report what arrives.
        peer_socket.write_all(b"y").expect("written");
        assert!(is_reported(&io_set));
        assert_eq!(waiters.readable_sockets().direct_peers().count(), 1);
        waiters.remove_direct_socket(own_socket.as_fd());
        assert_eq!(waiters.readable_sockets().direct_peers().count(), 0);
    }

    /// Waits until this thread of the process sleeps in the kernel.
    fn wait_until_sleeping(thread: nix::unistd::Pid) {
        let start = Instant::now();
        loop {
            let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
            let state = stat.ok().and_then(|stat| {
                let (_, fields) = stat.rsplit_once(") ")?;
                fields.chars().next()
            });
            if state == Some('S') {
                return;
            }
            assert!(start.elapsed() < LONG_TIMEOUT, "it never slept: {state:?}");
            std::thread::yield_now();
        }
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
