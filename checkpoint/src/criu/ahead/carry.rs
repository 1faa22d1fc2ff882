//! The thread that stands between CRIU and the other host.

use super::super::images::page_size;
use super::super::process::hurry_thread;
use super::patience::{Open, Patience};
use super::{Ahead, Missing};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sempa_proto::migration::Failure;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Instant;

/// Bytes of questions that are read at once.
const QUESTIONS_BYTES: usize = 4 << 10;

/// Ends when CRIU has closed its end, or the other host's is closed; why, if that is due to what either has said.
pub(in super::super) type Carrying = JoinHandle<Result<(), String>>;

/// What CRIU gets: the stream on which it asks, and what keeps it from asking the kernel all the time.
#[derive(Debug)]
pub(in super::super) struct Asking {
    pub(in super::super) stream: UnixStream,
    pub(in super::super) patience: Patience,
}

/// Stands between CRIU and the other host for the task whose images are in this directory.
///
/// # Errors
/// The images are not whole, or there is no descriptor or thread.
pub(in super::super) fn start(dir: &Path, other: OwnedFd) -> Result<(Carrying, Asking), Failure> {
    let io = |e: io::Error| Failure::Io(format!("cannot fetch memory ahead: {e}"));
    let ahead = Ahead::new(Missing::in_images(dir)?, page_size(), Instant::now());
    let (ours, stream) = UnixStream::pair().map_err(io)?;
    let (open, patience) = Open::new().map_err(io)?;
    let thread = std::thread::Builder::new().name("ahead".into());
    let carrying = thread.spawn(move || carry(ahead, open, ours, other.into())).map_err(io)?;
    Ok((carrying, Asking { stream, patience }))
}

fn carry(mut ahead: Ahead, mut open: Open, mut engine: UnixStream, mut other: UnixStream) -> Result<(), String> {
    hurry_thread();
    let mut questions = [0; QUESTIONS_BYTES];
    loop {
        let (asks, answers) = ready(&ahead, &engine, &other);
        ahead.tell_time(Instant::now());
        if asks {
            match heard(engine.read(&mut questions)) {
                Some(0) => return Ok(()),
                Some(bytes) => ahead.engine_says(&questions[..bytes]),
                None => {}
            }
        }
        if answers {
            match heard(other.read(ahead.room())) {
                Some(0) => return Ok(()),
                Some(bytes) => ahead.came(bytes)?,
                None => {}
            }
        }
        let told = open.set(0).and_then(|()| ahead.answer(&mut engine)).and_then(|()| open.set(ahead.open()));
        let done = told.and_then(|()| other.write_all(&ahead.questions()));
        if done.is_err() {
            // Whoever does not listen any more has gone; the other one learns of it by the end of its stream.
            return Ok(());
        }
    }
}

/// Bytes that were read, 0 at the end of a stream.
fn heard(read: io::Result<usize>) -> Option<usize> {
    match read {
        Err(e) if e.kind() == io::ErrorKind::Interrupted => None,
        read => Some(read.unwrap_or(0)),
    }
}

/// Waits until CRIU asks or the other host answers.
fn ready(ahead: &Ahead, engine: &UnixStream, other: &UnixStream) -> (bool, bool) {
    let asked = if ahead.takes_questions() { PollFlags::POLLIN } else { PollFlags::empty() };
    let mut fds = [PollFd::new(engine.as_fd(), asked), PollFd::new(other.as_fd(), PollFlags::POLLIN)];
    // Without news it looks again.
    let _ = poll(&mut fds, PollTimeout::NONE);
    let [asks, answers] = fds.map(|fd| fd.any().unwrap_or(false));
    (asks, answers)
}
