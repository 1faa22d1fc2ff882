//! A CRIU that fetches the memory of a restored task while the task runs already.
//!
//! The restored processes hand it the descriptors by which the kernel tells of missing memory (userfaultfd). When the last
//! descriptor is closed the kernel takes all that is missing for zeros; so they pass through here, and copies of them stay
//! until all memory has come or the processes are dead.

use super::ahead::{self, Carrying};
use super::process::{Program, own};
use super::uffd_keeper::UffdKeeper;
use crate::engine::{Arriving, Limits, Missing, ReceivedPages, Whole};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

/// Where CRIU connects with the descriptors of what it restores, in its working directory.
const SOCKET: &str = "lazy-pages.socket";
/// Working directory of the CRIU that fetches, in that of the images.
const OWN_DIR: &str = "arriving";
const LOG: &str = "arriving.log";
/// Descriptors in one message; CRIU sends one.
const DESCRIPTORS_MAX: usize = 4;
/// Bytes that are passed on at once: no more than CRIU's numbers have. A descriptor has to come with the byte that it was sent with,
/// and more room would take that in together with the number in front of it.
const BYTES_MAX: usize = 4;
/// Until the one that fetches listens it is looked for this often.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

/// Memory on its way to here.
pub(super) struct Arrival {
    program: Program,
    /// Passes descriptors on until the restore is over.
    passing: JoinHandle<()>,
    /// Those that have passed.
    kept: UffdKeeper,
    /// Asks before it is asked.
    carrying: Carrying,
    whole: Whole,
    log: PathBuf,
}

impl Arrival {
    pub(super) fn start(
        criu: &Path,
        dir: &Path,
        ask_on: OwnedFd,
        store: ReceivedPages,
    ) -> Result<Arrival, Failure> {
        let io = |what: &str, e: io::Error| {
            Failure::Io(format!(
                "cannot fetch memory into {}: {what}: {e}",
                dir.display()
            ))
        };
        let theirs = dir.join(OWN_DIR);
        std::fs::create_dir(&theirs).map_err(|e| io(OWN_DIR, e))?;
        let folder = File::open(dir).map_err(|e| io("its directory", e))?;
        // The path itself may be longer than that of a socket can be.
        let listener =
            UnixListener::bind(in_folder(&folder, Path::new(SOCKET))).map_err(|e| io(SOCKET, e))?;
        let kept = UffdKeeper::default();
        let (carrying, asks, whole) = ahead::start(dir, ask_on, store, kept.clone())?;
        let number = asks.stream().to_string();
        let (images, work) = (dir.as_os_str(), theirs.as_os_str());
        let arguments = [
            "lazy-pages".as_ref(),
            "-D".as_ref(),
            images,
            "-W".as_ref(),
            work,
            "-o".as_ref(),
            LOG.as_ref(),
        ];
        let more = ["--page-server", "--ps-socket", &number, "-v2"].map(AsRef::as_ref);
        let arguments = arguments.into_iter().chain(more);
        let program = Program::start(
            criu,
            arguments,
            &theirs,
            &asks.descriptors(),
            &asks.variables(),
        )?;
        let ended = program.end_seen().map_err(|e| io("no descriptor", e))?;
        let passing = std::thread::Builder::new()
            .name("passing".into())
            .spawn({
                let kept = kept.clone();
                move || pass_on(&folder, &listener, &ended, &kept)
            })
            .map_err(|e| io("no thread", e))?;
        Ok(Arrival {
            program,
            passing,
            kept,
            carrying,
            whole,
            log: theirs.join(LOG),
        })
    }
}

impl Arriving for Arrival {
    fn engine_pid(&self) -> i32 {
        self.program.pid()
    }

    fn whole(&self) -> Whole {
        self.whole.clone()
    }

    fn finish(mut self: Box<Self>, limits: &Limits) -> Result<(), (Failure, Missing)> {
        let ended = self.program.finish(limits, &self.log);
        let broken = |what: &str| Failure::Engine(format!("the thread that {what} has panicked"));
        let passed = self
            .passing
            .join()
            .map_err(|_| broken("passes descriptors on"));
        let carried = self
            .carrying
            .join()
            .unwrap_or_else(|_| Err(broken("fetches memory ahead")));
        let ended = match (ended, &carried) {
            // Whatever meets it now, nothing is missing.
            (Err(_), Ok(true)) if self.whole.is_so() => Ok(()),
            (Ok(()), Ok(false)) => Err(Failure::Engine(
                "it ended as if all memory were there, and it is not".into(),
            )),
            (ended, _) => ended,
        };
        ended.map_err(|why| {
            let kept = self.kept.take();
            (carried.and(passed).err().unwrap_or(why), Missing(kept))
        })
    }
}

/// A path that is short enough for a socket, as long as the directory is open.
fn in_folder(folder: &File, name: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name)
}

/// Lets the restore talk with the one that fetches, until either has ended, and keeps the descriptors that pass.
fn pass_on(folder: &File, listener: &UnixListener, ended: &OwnedFd, kept: &UffdKeeper) {
    let Some(fetches) = connect(folder, ended) else {
        return;
    };
    if !ready(&[listener.as_fd()], ended) {
        return;
    }
    let Ok((restore, _)) = listener.accept() else {
        return;
    };
    while ready(&[restore.as_fd(), fetches.as_fd()], ended) {
        let passed =
            [(&restore, &fetches), (&fetches, &restore)].map(|(from, to)| pass(from, to, kept));
        if passed.iter().any(|passed| !matches!(passed, Ok(true))) {
            break;
        }
    }
}

/// Connects to the one that fetches as soon as it listens.
fn connect(folder: &File, ended: &OwnedFd) -> Option<UnixStream> {
    let path = in_folder(folder, &Path::new(OWN_DIR).join(SOCKET));
    loop {
        if let Ok(stream) = UnixStream::connect(&path) {
            return Some(stream);
        }
        if has_ended(ended) {
            return None;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
}

/// Passes on what there is, with its descriptors; false at the end of the stream.
fn pass(from: &UnixStream, to: &UnixStream, kept: &UffdKeeper) -> io::Result<bool> {
    let mut bytes = [0; BYTES_MAX];
    let mut room = nix::cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let got = match recvmsg::<()>(from.as_raw_fd(), &mut parts, Some(&mut room), flags) {
        Ok(got) => got,
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return Ok(true),
        Err(e) => return Err(e.into()),
    };
    let mut came = Vec::new();
    for message in got.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = message {
            came.extend(numbers.into_iter().map(own));
        }
    }
    let length = got.bytes;
    if length == 0 {
        return Ok(false);
    }
    let numbers: Vec<RawFd> = came.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let with = if numbers.is_empty() {
        &[][..]
    } else {
        &rights[..]
    };
    // First: what is closed here may be the last copy.
    kept.keep(came);
    sendmsg::<()>(
        to.as_raw_fd(),
        &[IoSlice::new(&bytes[..length])],
        with,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(true)
}

/// Waits until one of them has something; false when the one that fetches has ended.
fn ready(streams: &[BorrowedFd<'_>], ended: &OwnedFd) -> bool {
    loop {
        let all = streams.iter().copied().chain([ended.as_fd()]);
        let mut fds: Vec<PollFd<'_>> = all.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => return !has_ended(ended),
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

fn has_ended(ended: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(ended.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}
