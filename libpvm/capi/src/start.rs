//! Starts the first daemon of a virtual machine (`pvm_start_pvmd`).

// Detaching the daemon from this process and finding the file of this library need calls of the C
// library.
#![allow(unsafe_code)]

use crate::{env, process, session};
use libpvm::runtime::runtime_paths;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, OsStr, OsString};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for a new daemon to accept connections.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a halted daemon to stop accepting connections, in [`start_daemon`].
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect to the daemon's socket.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Starts a daemon with these arguments, waits until the daemon answers, and enrols this process.
/// With `waits_for_hosts`, also waits until all hosts of the host file have been added or have
/// failed.
///
/// # Errors
/// `DupHost` if a daemon is already running, `CantStart` if the new daemon does not start, `SysErr`
/// if the new daemon does not accept this task.
pub(crate) fn start_daemon(args: &[Vec<u8>], waits_for_hosts: bool) -> PvmResult<()> {
    let socket_path = || {
        let paths = runtime_paths(process::real_uid() as u32, env::read_var);
        paths.map(|paths| paths.daemon_socket_path())
    };
    let initial_socket_path = socket_path().map_err(|error| {
        session::log_stderr(&format!("{error}\n"), true);
        PvmError::CantStart
    })?;
    // The new daemon may use another directory if another user has taken the usual one.
    let accepts_connections = || socket_path().is_ok_and(|path| UnixStream::connect(path).is_ok());
    let deadline = Instant::now() + EXIT_TIMEOUT;
    // A halted daemon may accept connections for a short time.
    while accepts_connections() {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        if remaining_time < RETRY_INTERVAL
            || libpvm::runtime::wait_for_daemon_answer(&initial_socket_path, remaining_time)
        {
            return Err(PvmError::DupHost);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    let mut command = Command::new(daemon_executable());
    command
        .args(args.iter().map(|arg| OsStr::from_bytes(arg)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: between fork and exec, `detach_from_parent` makes only async-signal-safe calls, as
    // the child of a process with threads requires.
    unsafe { command.pre_exec(detach_from_parent) };
    let mut child = command.spawn().map_err(|error| {
        session::log_stderr(&format!("pvmd: {error}\n"), true);
        PvmError::CantStart
    })?;
    let stdout = child.stdout.take();
    // The direct child exits immediately (see `detach_from_parent`). The daemon is a child of that
    // process, and not a child of this process.
    child.wait().map_err(|_| PvmError::CantStart)?;
    let deadline = Instant::now() + START_TIMEOUT;
    if let Some(stdout) = stdout {
        wait_until_ready(stdout, deadline)?;
    }
    while !accepts_connections() {
        if Instant::now() > deadline {
            return Err(PvmError::CantStart);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    let rt = session::runtime()?;
    if waits_for_hosts {
        // The reply to a request for no hosts arrives after the hosts of the host file have been
        // added or have failed.
        rt.add_hosts(Vec::new()).map_err(|error| error.code)?;
    }
    Ok(())
}

/// Waits for the first byte of the daemon's output. A daemon prints its address when it is ready,
/// and closes its output when it fails.
///
/// # Errors
/// `CantStart` if the daemon closes its output or the deadline passes.
fn wait_until_ready(
    mut stdout: impl Read + std::os::fd::AsRawFd,
    deadline: Instant,
) -> PvmResult<()> {
    loop {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        let mut poll_fd = libc::pollfd {
            fd: stdout.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the array has one entry, and its descriptor is open.
        match unsafe { libc::poll(&mut poll_fd, 1, remaining_time.as_millis() as i32) } {
            0 => return Err(PvmError::CantStart),
            1 => break,
            _ => (),
        }
    }
    let mut byte = [0];
    match stdout.read(&mut byte) {
        Ok(1) => Ok(()),
        _ => Err(PvmError::CantStart),
    }
}

/// Runs in the forked child, before exec, and forks again. The second child continues as the daemon
/// in a new session; the first child exits.
fn detach_from_parent() -> std::io::Result<()> {
    // SAFETY: `fork`, `_exit` and `setsid` take no pointers.
    unsafe {
        match libc::fork() {
            -1 => return Err(std::io::Error::last_os_error()),
            0 => (),
            _ => libc::_exit(0),
        }
        libc::setsid();
    }
    Ok(())
}

/// Returns the daemon's executable: `PVM_DPATH` if set, else `pvmd` in this library's directory or
/// in `../bin`, else the name `pvmd`, which is searched for in `PATH`.
pub(crate) fn daemon_executable() -> OsString {
    if let Some(path) = env::read_var("PVM_DPATH") {
        return path.into();
    }
    let installed_path = library_path().and_then(|library| {
        let directory = library.parent()?;
        [directory.join("pvmd"), directory.join("../bin/pvmd")]
            .into_iter()
            .find(|path| path.is_file())
    });
    installed_path.map_or_else(|| "pvmd".into(), Into::into)
}

/// Returns the path of this library's file.
fn library_path() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address lies in this library, and the file name stays valid while the library is
    // loaded.
    unsafe {
        if libc::dladdr(
            library_path as fn() -> Option<PathBuf> as *const libc::c_void,
            &mut info,
        ) == 0
            || info.dli_fname.is_null()
        {
            return None;
        }
        let name = CStr::from_ptr(info.dli_fname);
        std::fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()
    }
}
