//! The thread that runs the proxy between `criu lazy-pages` and the source.

use super::super::process::hurry_thread;
use super::super::uffd_keeper::UffdKeeper;
use super::patience::{Asking, Closed};
use super::{Ahead, Missing, write_from};
use crate::engine::pages::page_size;
use crate::engine::{ReceivedPages, Whole};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sempa_proto::migration::Failure;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Size of the buffer for CRIU's requests.
const QUESTIONS_BYTES: usize = 4 << 10;

/// The proxy's thread. It ends when CRIU has all memory and the reply to its PS_IOV_CLOSE, when
/// CRIU closes its end, or when the source closes the stream.
///
/// Returns true if CRIU was done or no memory was missing, false if CRIU still lacks memory. An
/// error means that the source has violated the protocol, or that the images are damaged.
pub(in super::super) type Carrying = JoinHandle<Result<bool, Failure>>;

/// Starts the proxy for the task whose images are in `dir`. `other` is the stream to the source,
/// `store` the pre-copied memory. When CRIU closes a userfaultfd, its copy in `copies` is closed as
/// well.
///
/// # Errors
/// No file descriptor or thread is available.
pub(in super::super) fn start(
    dir: &Path,
    other: OwnedFd,
    store: ReceivedPages,
    copies: UffdKeeper,
) -> Result<(Carrying, Asking, Whole), Failure> {
    let io = |e: io::Error| Failure::Io(format!("cannot fetch memory ahead: {e}"));
    let (ours, stream) = UnixStream::pair().map_err(io)?;
    let other = Arc::new(UnixStream::from(other));
    // Nonblocking, so that neither side delays the other.
    ours.set_nonblocking(true)
        .and_then(|()| other.set_nonblocking(true))
        .map_err(io)?;
    let (asking, closed) = Asking::new(stream).map_err(io)?;
    let whole = Whole::new(other.clone());
    let told = whole.clone();
    let thread = std::thread::Builder::new().name("ahead".into());
    let dir = dir.to_path_buf();
    let carrying = thread.spawn(move || {
        hurry_thread();
        // CRIU's requests wait in the socket meanwhile.
        let ahead = Ahead::new(
            Missing::in_images(&dir)?,
            store,
            page_size(),
            Instant::now(),
        );
        let carried = carry(ahead, ours, &other, (closed, copies), &told);
        // A shutdown, because other handles have the stream open.
        let _ = other.shutdown(Shutdown::Both);
        carried.map_err(Failure::Engine)
    });
    Ok((carrying.map_err(io)?, asking, whole))
}

fn carry(
    mut ahead: Ahead,
    mut engine: UnixStream,
    mut other: &UnixStream,
    (closed, copies): (Closed, UffdKeeper),
    whole: &Whole,
) -> Result<bool, String> {
    let mut questions = [0; QUESTIONS_BYTES];
    let mut closes = Some(closed);
    loop {
        let [asks, answers] = ready(&mut ahead, &engine, other, closes.as_ref());
        ahead.tell_time(Instant::now());
        match closes.as_ref().map(Closed::inodes) {
            Some(Some(inodes)) => inodes.into_iter().for_each(|inode| copies.close(inode)),
            Some(None) => closes = None,
            None => {}
        }
        if asks {
            match heard(engine.read(&mut questions)) {
                Some(0) => return Ok(ahead.has_taken_leave()),
                Some(bytes) => ahead.engine_says(&questions[..bytes]),
                None => {}
            }
            if ahead.has_all() {
                whole.becomes();
            }
        }
        if answers {
            match heard(other.read(ahead.room())) {
                Some(0) if ahead.has_all() => {
                    // Only the reply to PS_IOV_CLOSE is missing, and CRIU waits for it. The socket
                    // has room for four bytes, or CRIU has exited.
                    let _ = engine.write(ahead.rest_of_parting());
                    return Ok(true);
                }
                Some(0) => return Ok(ahead.has_taken_leave()),
                Some(bytes) => ahead.came(bytes)?,
                None => {}
            }
        }
        let done = ahead
            .answer(&mut engine)
            .and_then(|()| write_from(&mut other, ahead.questions()));
        if done.is_err() {
            // One side has closed its stream. The other side notices by the end of its own stream.
            return Ok(ahead.has_taken_leave());
        }
        // CRIU may need long until it gets CPU time to exit. Neither host waits for that.
        if ahead.has_parted() {
            return Ok(true);
        }
    }
}

/// Returns the number of bytes read, 0 at the end of the stream or after an error, `None` if
/// nothing can be read now.
fn heard(read: io::Result<usize>) -> Option<usize> {
    match read {
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
            ) =>
        {
            None
        }
        read => Some(read.unwrap_or(0)),
    }
}

/// Waits until CRIU or the source can be read, either accepts more data, or CRIU has closed a
/// userfaultfd. Returns whether CRIU and the source can be read.
fn ready(
    ahead: &mut Ahead,
    engine: &UnixStream,
    other: &UnixStream,
    closes: Option<&Closed>,
) -> [bool; 2] {
    let wants = |reads, writes| {
        let when = |is: bool, flag| if is { flag } else { PollFlags::empty() };
        when(reads, PollFlags::POLLIN) | when(writes, PollFlags::POLLOUT)
    };
    let of_engine = wants(ahead.takes_questions(), ahead.is_blocked());
    let of_other = wants(ahead.takes_answers(), !ahead.questions().is_empty());
    let mut fds = vec![
        PollFd::new(engine.as_fd(), of_engine),
        PollFd::new(other.as_fd(), of_other),
    ];
    fds.extend(closes.map(|closes| PollFd::new(closes.as_fd(), PollFlags::POLLIN)));
    // If `poll` fails the caller tries again.
    let _ = poll(&mut fds, PollTimeout::NONE);
    let reads = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
    [0, 1].map(|which: usize| {
        fds[which]
            .revents()
            .is_some_and(|events| events.intersects(reads))
    })
}
