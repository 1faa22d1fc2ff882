//! Starts the first daemon of a virtual machine (`pvm_start_pvmd`).

// Detaching the daemon from this process and finding the file of this library need calls of the C
// library.
#![allow(unsafe_code)]

use crate::{env, process, session};
use sempa_proto::runtime_paths::RuntimePaths;
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
/// Time limit for a halted daemon to stop accepting connections.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect to the daemon's socket.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Starts a daemon with these arguments, waits until it answers, and enrols this process. With
/// `block`, also waits until all hosts of the host file have been added or have failed.
///
/// # Errors
/// `DupHost` if a daemon is already running, `CantStart` if the new daemon does not start, `SysErr`
/// if the new daemon does not accept this task.
pub(crate) fn start_daemon(args: &[Vec<u8>], block: bool) -> PvmResult<()> {
    let paths = RuntimePaths::from_env(process::uid() as u32, env::get).map_err(|reason| {
        session::log_stderr(&format!("{reason}\n"), true);
        PvmError::CantStart
    })?;
    let accepts_connections = || UnixStream::connect(paths.daemon_socket()).is_ok();
    let deadline = Instant::now() + EXIT_TIMEOUT;
    // A daemon that was halted accepts connections for a moment longer.
    while accepts_connections() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left < RETRY_INTERVAL || libpvm::runtime::daemon_answers(&paths.daemon_socket(), left) {
            return Err(PvmError::DupHost);
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
    let mut command = Command::new(daemon_program());
    command
        .args(args.iter().map(|arg| OsStr::from_bytes(arg)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    // SAFETY: between fork and exec, `detach` makes only async-signal-safe calls, as the child of
    // a process with threads requires.
    unsafe { command.pre_exec(detach) };
    let mut child = command.spawn().map_err(|error| {
        session::log_stderr(&format!("pvmd: {error}\n"), true);
        PvmError::CantStart
    })?;
    let stdout = child.stdout.take();
    // The direct child exits immediately (see `detach`). The daemon is a child of that process, and
    // not a child of this process.
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
    if block {
        // The reply to a request for no hosts arrives after the hosts of the host file have been
        // added or have failed.
        rt.add_hosts(Vec::new()).map_err(|error| error.code)?;
    }
    Ok(())
}

/// Waits for the daemon's first line of output. A daemon prints its address when it is ready, and
/// closes its output when it fails.
fn wait_until_ready(
    mut stdout: impl Read + std::os::fd::AsRawFd,
    deadline: Instant,
) -> PvmResult<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut ready = libc::pollfd {
            fd: stdout.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the array has one entry, and its descriptor is open.
        match unsafe { libc::poll(&mut ready, 1, left.as_millis() as i32) } {
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
fn detach() -> std::io::Result<()> {
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
/// in `../bin`, else `pvmd` from `KDAT_PATH`.
pub(crate) fn daemon_program() -> OsString {
    if let Some(path) = env::get("PVM_DPATH") {
        return path.into();
    }
    let next_to_library = library_path().and_then(|library| {
        let folder = library.parent()?;
        [folder.join("pvmd"), folder.join("../bin/pvmd")]
            .into_iter()
            .find(|path| path.is_file())
    });
    next_to_library.map_or_else(|| "pvmd".into(), Into::into)
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
