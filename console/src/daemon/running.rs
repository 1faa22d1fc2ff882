//! Finds the running daemon of this host, or starts one.

use super::host_file;
use super::process::{POLL_INTERVAL, StartError, start};
use crate::lost_vms;
use crate::output::terminal::Terminal;
use crate::service_notes;
use libpvm::runtime::runtime_paths;
use libpvm::{EnrollError, Vm};
use sempa_proto::runtime_paths::VmNameError;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// Time limit for the socket of a killed daemon to be closed.
///
/// Until the kernel has closed the socket, connections to the socket succeed but are never
/// answered.
const DEAD_DAEMON_TIMEOUT: Duration = Duration::from_secs(5);

/// Error text for a command that needs a virtual machine when none is running.
const NOT_RUNNING_TEXT: &str = "no virtual machine is running here: start one with `pvm`";

/// Reason why the console has no daemon. The text starts with the name of a program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DaemonError {
    /// The process runs as root without `PVM_ALLOW_ROOT`. No daemon was started.
    #[error(
        "pvm: running as root is refused: use an ordinary user, or set PVM_ALLOW_ROOT=1 to allow it"
    )]
    Root,
    /// The environment does not name a virtual machine. No daemon was started.
    #[error("pvm: {0}")]
    VmName(#[from] VmNameError),
    /// A daemon runs, but this process is not one of its tasks.
    #[error("pvm: {0}")]
    Enroll(#[from] EnrollError),
    /// The daemon has ended at its start. Contains the error line that the daemon printed.
    #[error("{0}")]
    Reported(String),
    /// No daemon was started, or the daemon has ended at its start.
    #[error("pvm: {0}")]
    Start(StartError),
}

/// Refuses to run as root unless `PVM_ALLOW_ROOT` is set.
pub(crate) fn refuse_root() -> Result<(), DaemonError> {
    if nix::unistd::geteuid().is_root() && std::env::var_os("PVM_ALLOW_ROOT").is_none() {
        return Err(DaemonError::Root);
    }
    Ok(())
}

/// Returns the error line for a command that could not join the virtual machine.
pub(crate) fn enroll_error_line(error: &EnrollError) -> String {
    match error {
        EnrollError::NoDaemon { .. } => format!("pvm: {NOT_RUNNING_TEXT}"),
        other => format!("pvm: {other}"),
    }
}

/// Returns the path of the daemon's socket, by the same rules as the library.
fn socket_path() -> Result<PathBuf, DaemonError> {
    if let Some(socket) = std::env::var_os("PVMSOCK").filter(|value| !value.is_empty()) {
        return Ok(socket.into());
    }
    let uid = nix::unistd::geteuid().as_raw();
    let paths = runtime_paths(uid, |name| std::env::var(name).ok())?;
    Ok(paths.daemon_socket_path())
}

/// Returns the daemon's runtime directory, which contains the daemon's socket.
pub(crate) fn runtime_dir() -> Result<PathBuf, DaemonError> {
    let socket = socket_path()?;
    Ok(socket.parent().unwrap_or(Path::new("/")).to_path_buf())
}

/// Returns the path of the daemon's lock file.
pub(crate) fn lock_path() -> Result<PathBuf, DaemonError> {
    Ok(runtime_dir()?.join("pvmd.lock"))
}

/// A daemon that accepts tasks.
pub(crate) enum RunningDaemon {
    /// The daemon was running already. Contains the enrollment of this task.
    AlreadyRunning(Vm),
    /// This process started the daemon. Contains the daemon's process.
    Started(Child),
}

/// Joins a running daemon, or starts one with these arguments.
///
/// # Errors
/// Fails if no daemon accepts tasks.
pub(crate) fn ensure_daemon(args: &[OsString]) -> Result<RunningDaemon, DaemonError> {
    let socket = socket_path()?;
    let socket_accepts = || std::os::unix::net::UnixStream::connect(&socket).is_ok();
    let deadline = Instant::now() + DEAD_DAEMON_TIMEOUT;
    loop {
        if socket_accepts() {
            match Vm::enroll() {
                Ok(vm) => {
                    // An error is ignored here: if standard output is closed, the next write ends
                    // the console.
                    let _ = Terminal.print(b"pvmd already running.\n");
                    return Ok(RunningDaemon::AlreadyRunning(vm));
                }
                Err(EnrollError::Io { .. } | EnrollError::NoDaemon { .. })
                    if Instant::now() < deadline =>
                {
                    std::thread::sleep(POLL_INTERVAL);
                }
                Err(error) => return Err(error.into()),
            }
            continue;
        }
        match start(args) {
            Ok(child) => return Ok(RunningDaemon::Started(child)),
            // Another process started a daemon first.
            Err(_) if socket_accepts() => {}
            // The error line already starts with the name of the daemon's program.
            Err(StartError::Reported(line)) => return Err(DaemonError::Reported(line)),
            Err(error) => return Err(DaemonError::Start(error)),
        }
    }
}

/// Starts a daemon if no daemon is running. Returns false if a host of the host file did not join.
pub(crate) fn start_daemon_only(args: &[OsString]) -> Result<bool, DaemonError> {
    let (vm, is_new) = match ensure_daemon(args)? {
        RunningDaemon::AlreadyRunning(vm) => (vm, false),
        RunningDaemon::Started(_) => {
            lost_vms::show_at_start(&runtime_dir()?);
            // An ordinary user is told what the tasker can do.
            if !host_file::has_host_file(args) && nix::unistd::geteuid().is_root() {
                return Ok(true);
            }
            (Vm::enroll()?, true)
        }
    };
    let all_joined = !is_new || !host_file::has_host_file(args) || host_file::await_hosts(&vm);
    if is_new {
        service_notes::show_at_start(&vm);
    }
    // The virtual machine removes this task when its connection closes, even if `exit` fails.
    let _ = vm.exit();
    Ok(all_joined)
}
