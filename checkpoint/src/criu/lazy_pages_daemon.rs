//! Runs `criu lazy-pages`, which fetches the memory of a restored task while the task already runs.
//!
//! CRIU's restore passes the userfaultfd of each restored process to `criu lazy-pages` over a Unix
//! socket. When the last descriptor of a userfaultfd is closed, for example because `criu
//! lazy-pages` was killed, the kernel fills all missing pages with zeros and the task computes
//! wrong results.
//!
//! A thread therefore stands between the two. It copies each descriptor that passes
//! ([`UffdKeeper`]); the copies stay open until all memory has arrived or the processes are dead.
//! The requests of `criu lazy-pages` for pages pass through [`super::prefetch`].

use super::prefetch::{self, PrefetchThread};
use super::process::{CriuCommand, own_descriptor};
use super::uffd_keeper::UffdKeeper;
use crate::engine::{CallLimits, FetchCompletion, MemoryFetch, ReceivedPages, UffdGuard};
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

/// Name of the socket on which CRIU's restore connects to `criu lazy-pages`, in the working
/// directory of each. The restore's is the image directory.
const SOCKET: &str = "lazy-pages.socket";
/// Working directory of `criu lazy-pages`, a subdirectory of the image directory.
const LAZY_PAGES_DIR: &str = "arriving";
const LOG: &str = "arriving.log";
/// Maximum number of descriptors in one message. CRIU sends one.
const DESCRIPTORS_MAX: usize = 4;
/// Bytes that are forwarded at once: the size of a PID, which CRIU sends before each descriptor. A
/// descriptor must be forwarded with the byte that carried it; a longer read would return that byte
/// together with the PID.
const FORWARD_BYTES_MAX: usize = 4;
/// Interval of attempts to connect to `criu lazy-pages` until it listens.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);

/// A running fetch of a restored task's memory.
pub(super) struct LazyPagesDaemon {
    program: CriuCommand,
    /// Forwards descriptors until the restore has ended.
    forwarder: JoinHandle<()>,
    /// Copies of the forwarded descriptors.
    uffds: UffdKeeper,
    prefetcher: PrefetchThread,
    completion: FetchCompletion,
    log: PathBuf,
}

impl LazyPagesDaemon {
    pub(super) fn start(
        criu: &Path,
        dir: &Path,
        page_stream: OwnedFd,
        pre_copied: ReceivedPages,
    ) -> Result<LazyPagesDaemon, Failure> {
        let io = |what: &str, e: io::Error| {
            Failure::Io(format!(
                "cannot prefetch memory into {}: {what}: {e}",
                dir.display()
            ))
        };
        let theirs = dir.join(LAZY_PAGES_DIR);
        std::fs::create_dir(&theirs).map_err(|e| io(LAZY_PAGES_DIR, e))?;
        let folder = File::open(dir).map_err(|e| io("its directory", e))?;
        // The path of the directory may be longer than a socket address allows.
        let listener = UnixListener::bind(short_path(&folder, Path::new(SOCKET)))
            .map_err(|e| io(SOCKET, e))?;
        let uffds = UffdKeeper::default();
        let (prefetcher, connection, completion) =
            prefetch::start(dir, page_stream, pre_copied, uffds.clone())?;
        let number = connection.stream().to_string();
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
        let program = CriuCommand::start(
            criu,
            arguments,
            &theirs,
            &connection.descriptors(),
            &connection.environment(),
        )?;
        let ended = program
            .exit_descriptor()
            .map_err(|e| io("no descriptor", e))?;
        let forwarder = std::thread::Builder::new()
            .name("passing".into())
            .spawn({
                let uffds = uffds.clone();
                move || forward_messages(&folder, &listener, &ended, &uffds)
            })
            .map_err(|e| io("no thread", e))?;
        Ok(LazyPagesDaemon {
            program,
            forwarder,
            uffds,
            prefetcher,
            completion,
            log: theirs.join(LOG),
        })
    }
}

impl MemoryFetch for LazyPagesDaemon {
    fn engine_pid(&self) -> i32 {
        self.program.pid()
    }

    fn completion(&self) -> FetchCompletion {
        self.completion.clone()
    }

    fn finish(mut self: Box<Self>, limits: &CallLimits) -> Result<(), (Failure, UffdGuard)> {
        let ended = self.program.finish(limits, &self.log);
        let broken = |what: &str| Failure::Engine(format!("the thread that {what} has panicked"));
        let passed = self
            .forwarder
            .join()
            .map_err(|_| broken("forwards descriptors"));
        let carried = self
            .prefetcher
            .join()
            .unwrap_or_else(|_| Err(broken("prefetches memory")));
        let ended = match (ended, &carried) {
            // CRIU's failure has no consequences: it already has all memory.
            (Err(_), Ok(true)) if self.completion.is_complete() => Ok(()),
            (Ok(()), Ok(false)) => Err(Failure::Engine(
                "it reported success although memory is missing".into(),
            )),
            (ended, _) => ended,
        };
        ended.map_err(|why| {
            let kept = self.uffds.take();
            (carried.and(passed).err().unwrap_or(why), UffdGuard(kept))
        })
    }
}

/// Returns a path below an open directory that is short enough for a socket address.
fn short_path(folder: &File, name: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name)
}

/// Forwards messages between the restore and `criu lazy-pages` until either has ended. Keeps copies
/// of the descriptors.
fn forward_messages(folder: &File, listener: &UnixListener, ended: &OwnedFd, kept: &UffdKeeper) {
    let Some(fetches) = connect(folder, ended) else {
        return;
    };
    if !wait_readable(&[listener.as_fd()], ended) {
        return;
    }
    let Ok((restore, _)) = listener.accept() else {
        return;
    };
    while wait_readable(&[restore.as_fd(), fetches.as_fd()], ended) {
        let passed =
            [(&restore, &fetches), (&fetches, &restore)].map(|(from, to)| forward(from, to, kept));
        if passed.iter().any(|passed| !matches!(passed, Ok(true))) {
            break;
        }
    }
}

/// Connects to `criu lazy-pages` as soon as it listens. Returns `None` if it has exited.
fn connect(folder: &File, ended: &OwnedFd) -> Option<UnixStream> {
    let path = short_path(folder, &Path::new(LAZY_PAGES_DIR).join(SOCKET));
    loop {
        if let Ok(stream) = UnixStream::connect(&path) {
            return Some(stream);
        }
        if has_ended(ended) {
            return None;
        }
        std::thread::sleep(CONNECT_INTERVAL);
    }
}

/// Forwards what can be read now, with its descriptors. Returns false at the end of the stream.
fn forward(from: &UnixStream, to: &UnixStream, kept: &UffdKeeper) -> io::Result<bool> {
    let mut bytes = [0; FORWARD_BYTES_MAX];
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
            came.extend(numbers.into_iter().map(own_descriptor));
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
    // Kept before they are sent: if sending fails, dropping them here could close the last
    // descriptor of a userfaultfd.
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

/// Waits until one of the streams is readable. Returns false if `criu lazy-pages` has exited.
fn wait_readable(streams: &[BorrowedFd<'_>], ended: &OwnedFd) -> bool {
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
