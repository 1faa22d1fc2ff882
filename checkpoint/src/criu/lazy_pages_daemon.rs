//! Runs `criu lazy-pages`, which fetches the memory of a restored task while the task already runs.
//!
//! CRIU's restore passes the userfaultfd of each restored process to `criu lazy-pages` over a Unix
//! socket. When the last descriptor of a userfaultfd is closed, for example because `criu
//! lazy-pages` was killed, the kernel fills all missing pages with zeros and the task computes
//! wrong results.
//!
//! A thread therefore forwards all messages between the restore and `criu lazy-pages`. It copies
//! each forwarded descriptor ([`UffdKeeper`]); the copies stay open until all memory has arrived or
//! the processes are dead. The page requests of `criu lazy-pages` are forwarded by
//! [`super::prefetch`].

use super::prefetch::{self, PrefetchThread};
use super::process::{CriuCommand, take_ownership};
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

/// Name of the socket on which CRIU's restore connects to `criu lazy-pages`. Each of the two
/// programs looks for this name in its own working directory; the restore's is the image directory.
const SOCKET: &str = "lazy-pages.socket";
/// Working directory of `criu lazy-pages`, a subdirectory of the image directory.
const LAZY_PAGES_WORK_DIR: &str = "arriving";
const LAZY_PAGES_LOG: &str = "arriving.log";
/// Maximum number of descriptors in one forwarded message. CRIU sends one.
const DESCRIPTORS_MAX: usize = 4;
/// Maximum number of bytes that are forwarded at once: the size of the PID that CRIU sends before
/// each descriptor. A descriptor must be forwarded with the byte that carried it; a longer read
/// would return that byte together with the PID.
const FORWARD_BYTES_MAX: usize = 4;
/// Interval between attempts to connect to `criu lazy-pages` until it listens.
const CONNECT_INTERVAL: Duration = Duration::from_millis(1);

/// A running `criu lazy-pages` that fetches a restored task's memory, with the threads that forward
/// its messages.
pub(super) struct LazyPagesDaemon {
    program: CriuCommand,
    /// The thread that forwards descriptors until the restore has ended.
    forwarder: JoinHandle<()>,
    /// Copies of the forwarded userfaultfd descriptors.
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
                "cannot fetch memory into {}: {what}: {e}",
                dir.display()
            ))
        };
        let lazy_pages_dir = dir.join(LAZY_PAGES_WORK_DIR);
        std::fs::create_dir(&lazy_pages_dir).map_err(|e| io(LAZY_PAGES_WORK_DIR, e))?;
        let folder = File::open(dir).map_err(|e| io("its directory", e))?;
        // The path of the directory may be longer than a socket address allows.
        let listener = UnixListener::bind(short_path(&folder, Path::new(SOCKET)))
            .map_err(|e| io(SOCKET, e))?;
        let uffds = UffdKeeper::default();
        let (prefetcher, connection, completion) =
            prefetch::start(dir, page_stream, pre_copied, uffds.clone())?;
        let number = connection.stream_fd().to_string();
        let (images, work) = (dir.as_os_str(), lazy_pages_dir.as_os_str());
        let arguments = [
            "lazy-pages".as_ref(),
            "-D".as_ref(),
            images,
            "-W".as_ref(),
            work,
            "-o".as_ref(),
            LAZY_PAGES_LOG.as_ref(),
        ];
        let more = ["--page-server", "--ps-socket", &number, "-v2"].map(AsRef::as_ref);
        let arguments = arguments.into_iter().chain(more);
        let program = CriuCommand::start(
            criu,
            arguments,
            &lazy_pages_dir,
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
            log: lazy_pages_dir.join(LAZY_PAGES_LOG),
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
        let forwarder_result = self
            .forwarder
            .join()
            .map_err(|_| broken("passes descriptors on"));
        let prefetch_result = self
            .prefetcher
            .join()
            .unwrap_or_else(|_| Err(broken("fetches memory ahead")));
        let ended = match (ended, &prefetch_result) {
            // CRIU's failure has no consequences: the task already has all memory.
            (Err(_), Ok(true)) if self.completion.is_complete() => Ok(()),
            (Ok(()), Ok(false)) => Err(Failure::Engine(
                "it ended as if all memory were there, and it is not".into(),
            )),
            (ended, _) => ended,
        };
        ended.map_err(|why| {
            let kept = self.uffds.take_all();
            (
                prefetch_result.and(forwarder_result).err().unwrap_or(why),
                UffdGuard(kept),
            )
        })
    }
}

/// Returns a path of the file `name` in an open directory that is short enough for a socket
/// address.
fn short_path(folder: &File, name: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name)
}

/// Forwards messages between the restore and `criu lazy-pages` until either has ended. Keeps copies
/// of the forwarded descriptors.
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

/// Connects to `criu lazy-pages` when it listens. Waits until then; returns `None` if it has
/// exited.
fn connect(folder: &File, ended: &OwnedFd) -> Option<UnixStream> {
    let path = short_path(folder, &Path::new(LAZY_PAGES_WORK_DIR).join(SOCKET));
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

/// Forwards the bytes that can be read without waiting, with their descriptors. Returns false at
/// the end of the stream.
fn forward(from: &UnixStream, to: &UnixStream, kept: &UffdKeeper) -> io::Result<bool> {
    let mut bytes = [0; FORWARD_BYTES_MAX];
    let mut control_buffer = nix::cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let received = match recvmsg::<()>(
        from.as_raw_fd(),
        &mut parts,
        Some(&mut control_buffer),
        flags,
    ) {
        Ok(received) => received,
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return Ok(true),
        Err(e) => return Err(e.into()),
    };
    let mut received_fds = Vec::new();
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(numbers) = message {
            received_fds.extend(numbers.into_iter().map(take_ownership));
        }
    }
    let length = received.bytes;
    if length == 0 {
        return Ok(false);
    }
    let numbers: Vec<RawFd> = received_fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let control_messages = if numbers.is_empty() {
        &[][..]
    } else {
        &rights[..]
    };
    // Copies are kept before the descriptors are sent: if sending fails, dropping the descriptors
    // here could close the last descriptor of a userfaultfd.
    kept.add_copies(received_fds);
    sendmsg::<()>(
        to.as_raw_fd(),
        &[IoSlice::new(&bytes[..length])],
        control_messages,
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
