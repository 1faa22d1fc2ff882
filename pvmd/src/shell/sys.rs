//! System calls without a safe wrapper: fork before any thread exists, descriptors and limits of
//! child processes, pidfds, thread priority, unread bytes of a socket, local time. All other code
//! of the daemon is safe Rust.
#![allow(unsafe_code)] // fork, pre_exec, pidfd, setpriority, TIOCOUTQ and localtime_r have no safe form

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{ForkResult, fork};
use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Nice value of threads for which a stopped task waits: a higher priority than ordinary processes,
/// but a lower priority than the engine (-20).
const BOOST_NICE: libc::c_int = -10;

/// Forks. Must be called while the process has only one thread.
pub(crate) fn fork_before_threads() -> nix::Result<ForkResult> {
    // SAFETY: the caller has not started a thread, so no lock can be held by a thread that the
    // child lacks.
    unsafe { fork() }
}

/// Closes all inherited descriptors except the standard streams. The daemon runs longer than the
/// program that starts the daemon, so the daemon must not hold the pipes and locks of that program
/// open. Must be called before this process opens any file.
pub(crate) fn close_inherited_fds() {
    // SAFETY: the call takes numbers only, and nothing in this process owns a descriptor yet.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
}

/// Raises the priority of the calling thread until this value is dropped. Without the capability,
/// the priority is unchanged.
pub(crate) struct PriorityBoost(());

impl PriorityBoost {
    pub(crate) fn start() -> Self {
        set_nice(BOOST_NICE);
        Self(())
    }
}

impl Drop for PriorityBoost {
    fn drop(&mut self) {
        set_nice(0);
    }
}

fn set_nice(nice: libc::c_int) {
    // SAFETY: the call takes numbers only. On Linux the call affects only the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

/// Makes the child of `command` inherit `fd` under the same number. The caller must not close the
/// descriptor before the spawn.
pub(crate) fn pass_descriptor(command: &mut Command, fd: RawFd) {
    let clear_cloexec = move || {
        // SAFETY: fcntl is async-signal-safe and changes only a flag in the child's own descriptor
        // table.
        let status = unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
        if status < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    };
    // SAFETY: the closure allocates nothing and calls only async-signal-safe functions.
    unsafe { command.pre_exec(clear_cloexec) };
}

/// The limit of open descriptors with which this process was started.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenFilesLimit(libc::rlimit);

/// Raises this process's limit of open descriptors to the hard limit, because each connected task
/// needs two descriptors. Returns the previous limit, for child processes.
pub(crate) fn raise_files_limit() -> nix::Result<OpenFilesLimit> {
    let (soft_limit, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard_limit, hard_limit)?;
    Ok(OpenFilesLimit(libc::rlimit {
        rlim_cur: soft_limit,
        rlim_max: hard_limit,
    }))
}

impl OpenFilesLimit {
    /// Makes the child of `command` start with this limit.
    pub(crate) fn apply_to(self, command: &mut Command) {
        let limit = self.0;
        let set_limit = move || {
            // SAFETY: setrlimit is async-signal-safe and reads from a value that the closure owns.
            let status = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
            if status < 0 {
                Err(io::Error::last_os_error())
            } else {
                Ok(())
            }
        };
        // SAFETY: the closure allocates nothing and calls only async-signal-safe functions.
        unsafe { command.pre_exec(set_limit) };
    }
}

/// Returns a pidfd of the process that opened this connection. `pid` is the process id from the
/// peer credentials.
///
/// The pidfd refers to this process even if the process id is reused.
///
/// # Errors
/// The process has ended, the process is not visible in this PID namespace, or no descriptors are
/// left.
pub(crate) fn peer_process(connection: BorrowedFd<'_>, pid: i32) -> io::Result<OwnedFd> {
    let mut fd: RawFd = -1;
    let mut size = size_of::<RawFd>() as libc::socklen_t;
    let socket = connection.as_raw_fd();
    let fd_pointer = (&raw mut fd).cast();
    // SAFETY: the kernel writes at most `size` bytes to `fd`, which lives through the call.
    if unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            fd_pointer,
            &raw mut size,
        )
    } == 0
    {
        // SAFETY: the kernel has just created this descriptor; the descriptor has no other owner.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let error = io::Error::last_os_error();
    // Kernels before 6.5 lack SO_PEERPIDFD.
    if error.raw_os_error() == Some(libc::ENOPROTOOPT) {
        peer_process_by_pid(connection, pid)
    } else {
        Err(error)
    }
}

/// As [`peer_process`], but opens the pidfd by process id. The pidfd refers to the right process if
/// the connection is still open afterwards, because the process then has not ended.
fn peer_process_by_pid(connection: BorrowedFd<'_>, pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two numbers and creates a descriptor, or fails.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: the kernel has just created this descriptor; the descriptor has no other owner.
    let pidfd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut poll_fds = [PollFd::new(connection, PollFlags::empty())];
    poll(&mut poll_fds, PollTimeout::ZERO)?;
    if poll_fds[0].any().unwrap_or(true) {
        Err(io::ErrorKind::ConnectionReset.into())
    } else {
        Ok(pidfd)
    }
}

/// Sends a signal to the process of a pidfd.
///
/// # Errors
/// The process has ended, or the signal number is invalid.
pub(crate) fn signal_process(pidfd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let no_siginfo = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: the call takes numbers and a null pointer, which requests an ordinary signal.
    let status = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            signal,
            no_siginfo,
            0,
        )
    };
    if status < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Returns the number of bytes that were written to a local socket and that the peer has not read,
/// including the kernel's overhead. Returns 0 if the number is unknown.
pub(crate) fn bytes_unread_by_peer(socket: &UnixStream) -> usize {
    let mut unread_bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one int to `unread_bytes`, which lives through the call.
    let status = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread_bytes) };
    if status == 0 {
        usize::try_from(unread_bytes).unwrap_or(0)
    } else {
        0
    }
}

/// Registers a socket with the runtime for reading only or for writing only, as `interest`
/// requests. Returns the registered socket.
///
/// # Errors
/// The socket cannot be registered.
pub(crate) fn register_socket<S: OwnedSocket>(
    socket: S,
    interest: Interest,
) -> io::Result<AsyncFd<S>> {
    // SAFETY: the socket owns its descriptor. The descriptor stays open and the same as long as the
    // socket lives.
    Ok(unsafe { AsyncFd::register_with_interest(socket, interest) }?)
}

/// Sockets that [`register_socket`] accepts. An implementing type must own its descriptor and never
/// replace it.
pub(crate) trait OwnedSocket: AsRawFd + Sized {
    /// Duplicates the socket's descriptor.
    ///
    /// # Errors
    /// No descriptors are left.
    fn duplicate(&self) -> io::Result<Self>;
}

impl OwnedSocket for UdpSocket {
    fn duplicate(&self) -> io::Result<Self> {
        self.try_clone()
    }
}

impl OwnedSocket for UnixStream {
    fn duplicate(&self) -> io::Result<Self> {
        self.try_clone()
    }
}

/// Converts seconds since 1970 to local time: month (1 to 12), day of the month, hour, minute and
/// second.
pub(crate) fn local_time(unix_s: i64) -> (i32, i32, i32, i32, i32) {
    // SAFETY: all-zero bytes are a valid `tm`: integers and a null pointer.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers refer to live values of the right types; localtime_r retains neither
    // pointer.
    unsafe { libc::localtime_r(&unix_s, &mut tm) };
    (tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Stdio};

    /// Environment variable with the socket's path, for the process that the tests start.
    const SOCKET_PATH_VARIABLE: &str = "SEMPA_TEST_CALLS";

    /// Not a test: this is the code of the process that the tests start. The process connects and
    /// then waits.
    #[test]
    #[ignore = "child process of another test"]
    fn subprocess_calls_and_waits() {
        if let Some(path) = std::env::var_os(SOCKET_PATH_VARIABLE) {
            let _connection = UnixStream::connect(path).expect("a listener");
            io::stdin().lines().for_each(drop);
        }
    }

    /// Starts a process that connects and waits. Returns the process, the connection, and the
    /// process id from the peer credentials.
    fn connected_child() -> (Child, UnixStream, i32) {
        let dir = tempfile::TempDir::new().expect("a directory");
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).expect("a socket");
        let child = Command::new(std::env::current_exe().expect("a path"))
            .args([
                "--exact",
                "shell::sys::tests::subprocess_calls_and_waits",
                "--ignored",
                "--nocapture",
            ])
            .env(SOCKET_PATH_VARIABLE, &path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        let (connection, _) = listener.accept().expect("it connects");
        let pid = getsockopt(&connection, PeerCredentials)
            .expect("its number")
            .pid();
        (child, connection, pid)
    }

    #[test]
    fn unread_counts_bytes_the_peer_has_not_read() {
        let (mut local_end, mut peer_end) = UnixStream::pair().expect("a pair");
        assert_eq!(bytes_unread_by_peer(&local_end), 0);
        local_end.write_all(&[7; 3000]).expect("room");
        assert!(bytes_unread_by_peer(&local_end) >= 3000);
        let mut bytes = [0; 3000];
        peer_end
            .read_exact(&mut bytes[..2999])
            .expect("it is there");
        assert!(bytes_unread_by_peer(&local_end) > 0, "one byte is left");
        peer_end
            .read_exact(&mut bytes[2999..])
            .expect("it is there");
        assert_eq!((bytes_unread_by_peer(&local_end), bytes), (0, [7; 3000]));
    }

    type PeerProcessFn = fn(BorrowedFd<'_>, i32) -> io::Result<OwnedFd>;

    /// The two functions that open a pidfd; the second function is for kernels before 6.5.
    const PEER_PROCESS_FNS: [PeerProcessFn; 2] = [peer_process, peer_process_by_pid];

    #[test]
    fn signal_reaches_connecting_process() {
        for open_peer_process in PEER_PROCESS_FNS {
            let (mut child, connection, pid) = connected_child();
            let pidfd = open_peer_process(connection.as_fd(), pid).expect("it lives");
            signal_process(pidfd.as_fd(), libc::SIGTERM).expect("it lives");
            assert_eq!(
                child.wait().expect("our child").signal(),
                Some(libc::SIGTERM)
            );
        }
    }

    /// Neither a dead peer nor another process with the reused process id of the peer gets a
    /// signal.
    #[test]
    fn dead_peer_and_reused_pid_get_no_signal() {
        for open_peer_process in PEER_PROCESS_FNS {
            let (mut child, connection, pid) = connected_child();
            let pidfd = open_peer_process(connection.as_fd(), pid).expect("it lives");
            child.kill().expect("our child");
            child.wait().expect("our child");
            let signal_error =
                signal_process(pidfd.as_fd(), libc::SIGTERM).expect_err("it has ended");
            assert_eq!(signal_error.raw_os_error(), Some(libc::ESRCH));
            // The peer's process id may be reused now. The test passes its own process id as the
            // reused id.
            let own_pid = i32::try_from(std::process::id()).expect("process numbers are ints");
            let open_error = open_peer_process(connection.as_fd(), own_pid)
                .and_then(|pidfd| signal_process(pidfd.as_fd(), libc::SIGTERM));
            open_error.expect_err("the process with this number did not make the connection");
        }
    }
}
