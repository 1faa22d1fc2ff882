//! Who is woken when the daemon says something: a thread of the application that waits for just that, or else the helper,
//! and never both. To go by way of the helper costs a message two wake-ups more, there and back.
//!
//! The kernel chooses: both watch the socket for themselves alone, the application's threads were there first, and a set
//! on which nobody sleeps passes the call on. Neither set keeps the socket open.

use super::process::Own;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// What a set says of its kick.
const KICK: u64 = 1;

/// A set of descriptors to sleep on.
#[derive(Debug)]
pub(crate) struct Set(Epoll);

impl AsFd for Set {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

/// The two places at the daemon's socket.
#[derive(Debug)]
pub(crate) struct Seats {
    front: Own<Set>,
    back: Own<Set>,
    kick: Own<EventFd>,
}

impl Seats {
    /// Places without a socket.
    pub(crate) fn new() -> io::Result<Seats> {
        let set = || Ok::<_, io::Error>(Own::fd(Set(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?)));
        let kick =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let seats = Seats {
            front: set()?,
            back: set()?,
            kick: Own::fd(kick),
        };
        seats
            .front
            .get()
            .0
            .add(seats.kick.get(), EpollEvent::new(EpollFlags::EPOLLIN, KICK))?;
        Ok(seats)
    }

    /// Both watch this socket; in this order.
    pub(crate) fn put(&self, socket: &UnixStream) -> io::Result<()> {
        let wanted = EpollFlags::EPOLLIN | EpollFlags::EPOLLEXCLUSIVE;
        for set in [&self.front, &self.back] {
            set.get().0.add(socket, EpollEvent::new(wanted, 0))?;
        }
        Ok(())
    }

    /// Neither watches it any more.
    pub(crate) fn take(&self, socket: &UnixStream) {
        for set in [&self.front, &self.back] {
            // One that was never there need not go.
            let _ = set.get().0.delete(socket);
        }
    }

    /// Sleeps in the front until the socket can be read, or a kick, or for `span`. It may return for nothing.
    pub(crate) fn sleep(&self, span: Duration) {
        let mut events = [EpollEvent::empty(); 2];
        let timeout = EpollTimeout::try_from(span).unwrap_or(EpollTimeout::MAX);
        // An error is a signal: whoever waits looks at everything again.
        let count = self.front.get().0.wait(&mut events, timeout).unwrap_or(0);
        if events[..count].iter().any(|event| event.data() == KICK) {
            let _ = self.kick.get().read();
        }
    }

    /// Wakes the thread in the front, also one that is only about to sleep.
    pub(crate) fn kick(&self) {
        // Full means kicked already.
        let _ = self.kick.get().write(1);
    }

    /// What the helper sleeps on.
    pub(crate) fn back(&self) -> BorrowedFd<'_> {
        self.back.get().as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::io::{Read, Write};
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    /// The helper's place would wake now.
    fn back_is_called(seats: &Seats) -> bool {
        let mut fds = [PollFd::new(seats.back(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO) == Ok(1)
    }

    #[test]
    fn whoever_sleeps_in_front_hears_the_socket_and_the_kick() {
        let seats = Seats::new().expect("made");
        let (mut ours, mut theirs) = UnixStream::pair().expect("made");
        seats.put(&ours).expect("watched");
        let begin = Instant::now();
        seats.kick();
        seats.sleep(LONG);
        theirs.write_all(b"x").expect("written");
        seats.sleep(LONG);
        assert!(begin.elapsed() < LONG, "both times somebody woke it");
        // Who did not sleep finds it all the same, and so does the helper.
        assert!(back_is_called(&seats));
        ours.read_exact(&mut [0]).expect("there");
        assert!(!back_is_called(&seats));
    }

    #[test]
    fn a_socket_that_was_taken_away_calls_nobody() {
        let seats = Seats::new().expect("made");
        let (ours, mut theirs) = UnixStream::pair().expect("made");
        seats.put(&ours).expect("watched");
        seats.take(&ours);
        theirs.write_all(b"x").expect("written");
        assert!(!back_is_called(&seats));
        seats.put(&ours).expect("watched again");
        assert!(back_is_called(&seats));
    }
}
