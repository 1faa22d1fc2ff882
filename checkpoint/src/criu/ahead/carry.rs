//! The thread that stands between CRIU and the other host.

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

/// Bytes of questions that are read at once.
const QUESTIONS_BYTES: usize = 4 << 10;

/// Ends when CRIU has all memory and the answer to saying so, when it has closed its end, or when the other host's is closed: whether
/// CRIU had taken its leave, or has missed nothing; why, if the end is due to what either has said or the images.
pub(in super::super) type Carrying = JoinHandle<Result<bool, Failure>>;

/// Stands between CRIU and the other host for the task whose images are in this directory, of which this has come before. Of
/// descriptors that CRIU has closed the copies are closed, too.
///
/// # Errors
/// There is no descriptor or thread.
pub(in super::super) fn start(
    dir: &Path,
    other: OwnedFd,
    store: ReceivedPages,
    copies: UffdKeeper,
) -> Result<(Carrying, Asking, Whole), Failure> {
    let io = |e: io::Error| Failure::Io(format!("cannot fetch memory ahead: {e}"));
    let (ours, stream) = UnixStream::pair().map_err(io)?;
    let other = Arc::new(UnixStream::from(other));
    // Neither may keep the other one waiting.
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
        // What CRIU asks meanwhile waits.
        let ahead = Ahead::new(
            Missing::in_images(&dir)?,
            store,
            page_size(),
            Instant::now(),
        );
        let carried = carry(ahead, ours, &other, (closed, copies), &told);
        // Others have it open.
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
                    // Nothing is missing but this word, which it waits for. It has room for four bytes, or has gone.
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
            // Whoever does not listen any more has gone; the other one learns of it by the end of its stream.
            return Ok(ahead.has_taken_leave());
        }
        // It may be long until CRIU gets a processor for its end: neither host is kept waiting for that.
        if ahead.has_parted() {
            return Ok(true);
        }
    }
}

/// Bytes that were read, 0 at the end of a stream.
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

/// Waits until CRIU asks, the other host answers, either takes more, or CRIU has closed something: whether the first two have
/// something.
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
    // Without news it looks again.
    let _ = poll(&mut fds, PollTimeout::NONE);
    let reads = PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR;
    [0, 1].map(|which: usize| {
        fds[which]
            .revents()
            .is_some_and(|events| events.intersects(reads))
    })
}
