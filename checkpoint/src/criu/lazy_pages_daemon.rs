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
/// programs looks for this name in its own working directory. The working directory of the restore
/// is the image directory.
const SOCKET_NAME: &str = "lazy-pages.socket";
/// Working directory of `criu lazy-pages`, a subdirectory of the image directory.
const WORK_DIR_NAME: &str = "arriving";
const LOG_NAME: &str = "arriving.log";
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
    command: CriuCommand,
    /// The thread that forwards descriptors until the restore has ended.
    forwarder_thread: JoinHandle<()>,
    /// Copies of the forwarded userfaultfd descriptors.
    uffd_keeper: UffdKeeper,
    prefetch_thread: PrefetchThread,
    completion: FetchCompletion,
    log_path: PathBuf,
}

impl LazyPagesDaemon {
    pub(super) fn start(
        criu_path: &Path,
        dir: &Path,
        page_stream: OwnedFd,
        received_pages: ReceivedPages,
    ) -> Result<Self, Failure> {
        let to_failure = |object: &str, e: io::Error| {
            Failure::Io(format!(
                "cannot prefetch memory into {}: {object}: {e}",
                dir.display()
            ))
        };
        let lazy_pages_dir = dir.join(WORK_DIR_NAME);
        std::fs::create_dir(&lazy_pages_dir).map_err(|e| to_failure(WORK_DIR_NAME, e))?;
        let dir_file = File::open(dir).map_err(|e| to_failure("its directory", e))?;
        // The path of the directory may be longer than a socket address allows.
        let listener = UnixListener::bind(short_path(&dir_file, Path::new(SOCKET_NAME)))
            .map_err(|e| to_failure(SOCKET_NAME, e))?;
        let uffds = UffdKeeper::default();
        let (prefetcher, connection, completion) =
            prefetch::start(dir, page_stream, received_pages, uffds.clone())?;
        let stream_fd = connection.stream_fd().to_string();
        let (image_dir, work_dir) = (dir.as_os_str(), lazy_pages_dir.as_os_str());
        let arguments = [
            "lazy-pages".as_ref(),
            "-D".as_ref(),
            image_dir,
            "-W".as_ref(),
            work_dir,
            "-o".as_ref(),
            LOG_NAME.as_ref(),
        ];
        let stream_arguments =
            ["--page-server", "--ps-socket", &stream_fd, "-v2"].map(AsRef::as_ref);
        let arguments = arguments.into_iter().chain(stream_arguments);
        let daemon_command = CriuCommand::start(
            criu_path,
            arguments,
            &lazy_pages_dir,
            &connection.descriptors(),
            &connection.environment(),
        )?;
        let exit_fd = daemon_command
            .exit_descriptor()
            .map_err(|e| to_failure("no descriptor", e))?;
        let forwarder_thread = std::thread::Builder::new()
            .name("passing".into())
            .spawn({
                let uffds = uffds.clone();
                move || forward_messages(&dir_file, &listener, &exit_fd, &uffds)
            })
            .map_err(|e| to_failure("no thread", e))?;
        Ok(Self {
            command: daemon_command,
            forwarder_thread,
            uffd_keeper: uffds,
            prefetch_thread: prefetcher,
            completion,
            log_path: lazy_pages_dir.join(LOG_NAME),
        })
    }
}

impl MemoryFetch for LazyPagesDaemon {
    fn engine_pid(&self) -> i32 {
        self.command.pid()
    }

    fn completion(&self) -> FetchCompletion {
        self.completion.clone()
    }

    fn wait_until_fetched(
        mut self: Box<Self>,
        limits: &CallLimits,
    ) -> Result<(), (Failure, UffdGuard)> {
        let result = self.command.wait_until_exit(limits, &self.log_path);
        let panic_failure =
            |duty: &str| Failure::Engine(format!("the thread that {duty} has panicked"));
        let forwarder_result = self
            .forwarder_thread
            .join()
            .map_err(|_| panic_failure("forwards descriptors"));
        let prefetch_result = self
            .prefetch_thread
            .join()
            .unwrap_or_else(|_| Err(panic_failure("prefetches memory")));
        let result = match (result, &prefetch_result) {
            // CRIU's failure has no consequences: the task already has all memory.
            (Err(_), Ok(true)) if self.completion.is_complete() => Ok(()),
            (Ok(()), Ok(false)) => Err(Failure::Engine(
                "it reported success although memory is missing".into(),
            )),
            (result, _) => result,
        };
        result.map_err(|failure| {
            let uffd_copies = self.uffd_keeper.take_all();
            (
                prefetch_result
                    .and(forwarder_result)
                    .err()
                    .unwrap_or(failure),
                UffdGuard(uffd_copies),
            )
        })
    }
}

/// Returns a path of the file `name` in an open directory that is short enough for a socket
/// address.
fn short_path(dir_file: &File, name: &Path) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", dir_file.as_raw_fd())).join(name)
}

/// Forwards messages between the restore and `criu lazy-pages` until the restore or `criu
/// lazy-pages` has ended. Adds copies of the forwarded descriptors to `uffd_keeper`.
fn forward_messages(
    dir_file: &File,
    listener: &UnixListener,
    exit_fd: &OwnedFd,
    uffd_keeper: &UffdKeeper,
) {
    let Some(daemon_stream) = connect_when_listening(dir_file, exit_fd) else {
        return;
    };
    if !wait_until_readable(&[listener.as_fd()], exit_fd) {
        return;
    }
    let Ok((restore_stream, _)) = listener.accept() else {
        return;
    };
    while wait_until_readable(&[restore_stream.as_fd(), daemon_stream.as_fd()], exit_fd) {
        let forward_result = [
            (&restore_stream, &daemon_stream),
            (&daemon_stream, &restore_stream),
        ]
        .map(|(input, output)| forward_available(input, output, uffd_keeper));
        if forward_result
            .iter()
            .any(|forward_result| !matches!(forward_result, Ok(true)))
        {
            break;
        }
    }
}

/// Waits until `criu lazy-pages` listens, and connects to it. `None` if `criu lazy-pages` has
/// exited.
fn connect_when_listening(dir_file: &File, exit_fd: &OwnedFd) -> Option<UnixStream> {
    let path = short_path(dir_file, &Path::new(WORK_DIR_NAME).join(SOCKET_NAME));
    loop {
        if let Ok(stream) = UnixStream::connect(&path) {
            return Some(stream);
        }
        if has_exited(exit_fd) {
            return None;
        }
        std::thread::sleep(CONNECT_INTERVAL);
    }
}

/// Forwards the bytes that can be read without waiting, with their descriptors. Returns false at
/// the end of the stream; otherwise true, even if no data was available.
fn forward_available(
    input: &UnixStream,
    output: &UnixStream,
    uffd_keeper: &UffdKeeper,
) -> io::Result<bool> {
    let mut bytes = [0; FORWARD_BYTES_MAX];
    let mut control_buffer = nix::cmsg_space!([RawFd; DESCRIPTORS_MAX]);
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_CMSG_CLOEXEC;
    let received_message = match recvmsg::<()>(
        input.as_raw_fd(),
        &mut slices,
        Some(&mut control_buffer),
        flags,
    ) {
        Ok(received_message) => received_message,
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => return Ok(true),
        Err(e) => return Err(e.into()),
    };
    let mut received_fds = Vec::new();
    for message in received_message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fd_numbers) = message {
            received_fds.extend(fd_numbers.into_iter().map(take_ownership));
        }
    }
    let length = received_message.bytes;
    if length == 0 {
        return Ok(false);
    }
    let fd_numbers: Vec<RawFd> = received_fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fd_numbers)];
    let control_messages = if fd_numbers.is_empty() {
        &[][..]
    } else {
        &rights[..]
    };
    // Copies are stored before the descriptors are sent: if sending fails, dropping the descriptors
    // here could close the last descriptor of a userfaultfd.
    uffd_keeper.add_copies(received_fds);
    sendmsg::<()>(
        output.as_raw_fd(),
        &[IoSlice::new(&bytes[..length])],
        control_messages,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(true)
}

/// Waits until one of the streams is readable. Returns false if `criu lazy-pages` has exited.
fn wait_until_readable(streams: &[BorrowedFd<'_>], exit_fd: &OwnedFd) -> bool {
    loop {
        let watched_fds = streams.iter().copied().chain([exit_fd.as_fd()]);
        let mut fds: Vec<PollFd<'_>> = watched_fds
            .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
            .collect();
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => return !has_exited(exit_fd),
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

fn has_exited(exit_fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(exit_fd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready_count| ready_count > 0)
}
