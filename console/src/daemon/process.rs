//! Starts the daemon of this host and detects when it has exited.

use crate::detach::detach;
use libpvm::EnrollError;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for the daemon to print its socket address.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for the daemon to exit after a halt. The daemon first waits for the other hosts, with
/// time limits of its own.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval for polling the process table.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of bytes that are read of the daemon's standard output, and of its standard
/// error.
const OUTPUT_BYTES_MAX: u64 = 64 << 10;

/// Reason why no daemon was started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The daemon's program could not be executed.
    #[error("{} cannot be started: {source}; install it next to pvm or in PATH", program.display())]
    NoProgram {
        program: PathBuf,
        source: std::io::Error,
    },
    /// The daemon exited without printing an address. Contains the error line that the daemon
    /// printed.
    #[error("{0}")]
    Reported(String),
    /// The daemon exited without printing an address or an error. Contains the exit status.
    #[error(
        "the daemon exited at once ({0}) without an error message: see its log with SEMPA_LOG=FILE"
    )]
    Silent(std::process::ExitStatus),
    /// The daemon printed nothing in time and was killed.
    #[error("the daemon did not begin to listen within {} s and was killed", START_TIMEOUT.as_secs())]
    TimedOut,
    #[error("the daemon cannot be started: {0}")]
    Io(#[from] std::io::Error),
}

/// Returns the path of the daemon's program: in the folder of this program, or the name alone,
/// which is searched for in `PATH`.
fn daemon_program() -> PathBuf {
    let sibling_path = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(|dir| dir.join("pvmd")));
    sibling_path
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from("pvmd"))
}

/// Starts the daemon in the background and waits until the daemon listens. The caller must reap the
/// returned child when the daemon exits.
///
/// # Errors
/// Fails if the daemon cannot be executed, exits, or does not listen in time.
pub(crate) fn start(args: &[OsString]) -> Result<Child, StartError> {
    start_program(&daemon_program(), args)
}

fn start_program(program: &Path, args: &[OsString]) -> Result<Child, StartError> {
    // The daemon's stderr is a memory file. A pipe would raise SIGPIPE in any process that still
    // writes to the pipe after this console has ended.
    let mut stderr_file = File::from(
        memfd_create("pvmd-stderr", MFdFlags::MFD_CLOEXEC).map_err(std::io::Error::from)?,
    );
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(stderr_file.try_clone()?);
    let mut child = detach(&mut command)
        .spawn()
        .map_err(|source| StartError::NoProgram {
            program: program.to_path_buf(),
            source,
        })?;
    let stdout = child.stdout.take().expect("it was asked for");
    let (sender, line) = mpsc::channel();
    thread::spawn(move || {
        let mut line = String::new();
        let read_result = BufReader::new(stdout.take(OUTPUT_BYTES_MAX)).read_line(&mut line);
        // Sending fails if the timeout has expired, because the receiver has been dropped.
        let _ = sender.send(read_result.is_ok_and(|_| line.ends_with('\n')));
    });
    match line.recv_timeout(START_TIMEOUT) {
        Ok(true) => Ok(child),
        Ok(false) => {
            // A daemon that has closed its output is exiting. A daemon that does not exit in time
            // is killed.
            let _ = wait_until(START_TIMEOUT, || !matches!(child.try_wait(), Ok(None)));
            let _ = child.kill();
            let status = child.wait()?;
            let mut stderr_text = String::new();
            stderr_file.rewind()?;
            let _ = stderr_file
                .take(OUTPUT_BYTES_MAX)
                .read_to_string(&mut stderr_text);
            Err(
                error_line(&stderr_text).map_or(StartError::Silent(status), |line| {
                    StartError::Reported(line.to_string())
                }),
            )
        }
        Err(_) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(StartError::TimedOut)
        }
    }
}

/// Returns the line with the reason why the daemon did not start. This is the first line with the
/// prefix "error: ", which advice may follow, or else the last line.
fn error_line(stderr_text: &str) -> Option<&str> {
    let mut lines = stderr_text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty());
    lines
        .clone()
        .find(|line| line.starts_with("error: "))
        .or_else(|| lines.next_back())
}

/// A running daemon whose exit can be awaited.
#[derive(Debug)]
pub(crate) struct DaemonProcess {
    lock_path: PathBuf,
    /// Process id and start time. The start time distinguishes the daemon from a later process with
    /// the same id. `None` if no daemon was running.
    pid_and_start_time: Option<(i32, String)>,
}

impl DaemonProcess {
    /// Returns the daemon whose process id is in the lock file.
    pub(crate) fn from_lock_file(lock_file: PathBuf) -> Self {
        let pid = fs::read_to_string(&lock_file)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        // A zombie does not count as running.
        let running_stat = |pid| process_stat(pid).filter(|(state, _)| *state != 'Z');
        Self {
            pid_and_start_time: pid.and_then(|pid| Some((pid, running_stat(pid)?.1))),
            lock_path: lock_file,
        }
    }

    fn has_exited(&self) -> bool {
        match &self.pid_and_start_time {
            Some((pid, start_time)) => {
                process_stat(*pid).is_none_or(|(state, current_start_time)| {
                    state == 'Z' || current_start_time != *start_time
                })
            }
            None => !self.lock_path.exists(),
        }
    }

    /// True if a failed enrollment shows that the daemon was shutting down: the daemon was running,
    /// closed the connection, and exits within [`EXIT_TIMEOUT`]. Waits for the exit.
    pub(crate) fn wait_if_shutting_down(&self, error: &EnrollError) -> bool {
        let connection_failed =
            matches!(error, EnrollError::Io { .. } | EnrollError::NoDaemon { .. });
        self.pid_and_start_time.is_some() && connection_failed && self.wait_for_exit(None)
    }

    /// Waits until the daemon has exited. Returns false if the daemon still runs after
    /// [`EXIT_TIMEOUT`]. If `child` is the daemon's process, the process is reaped.
    pub(crate) fn wait_for_exit(&self, mut child: Option<&mut Child>) -> bool {
        wait_until(EXIT_TIMEOUT, || {
            if let Some(child) = child.as_deref_mut() {
                let _ = child.try_wait();
            }
            self.has_exited()
        })
    }
}

fn wait_until(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the state letter and the start time of a process from `/proc/PID/stat`. `None` if the
/// process does not exist.
fn process_stat(pid: i32) -> Option<(char, String)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any character, so fields are counted from its closing
    // parenthesis.
    let mut fields = text[text.rfind(')')? + 1..].split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_shell(script: &str) -> Result<Child, StartError> {
        start_program(Path::new("/bin/sh"), &["-c".into(), script.into()])
    }

    /// A daemon that prints its address keeps running in a session of its own.
    #[test]
    fn started_daemon_runs_in_own_session() {
        let mut child = start_shell("echo /some/socket; exec sleep 60").expect("started");
        let pid = i32::try_from(child.id()).expect("a pid");
        let session = nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid))).expect("it runs");
        assert_eq!(session.as_raw(), pid);
        let daemon = DaemonProcess {
            lock_path: PathBuf::new(),
            pid_and_start_time: Some((pid, process_stat(pid).expect("it runs").1)),
        };
        assert!(!daemon.has_exited());
        child.kill().expect("ours");
        assert!(daemon.wait_for_exit(Some(&mut child)));
        child.wait().expect("ours");
    }

    /// If the daemon fails to start, the error is the line that the daemon has printed.
    #[test]
    fn failed_daemon_is_quoted() {
        let reported_text = start_shell("echo 'warning: x' >&2; echo 'pvmd: no room' >&2; exit 1")
            .expect_err("failed")
            .to_string();
        assert_eq!(reported_text, "pvmd: no room");
        let advice_script =
            "echo 'error: -d takes a mask' >&2; echo >&2; echo 'try --help' >&2; exit 2";
        assert_eq!(
            start_shell(advice_script).expect_err("failed").to_string(),
            "error: -d takes a mask"
        );
        assert!(matches!(
            start_shell("exit 3").expect_err("failed"),
            StartError::Silent(_)
        ));
        let start_error = start_program(Path::new("/nonexistent/pvmd"), &[]).expect_err("failed");
        assert!(matches!(start_error, StartError::NoProgram { .. }));
    }

    /// A process with the same id but another start time is a different process.
    #[test]
    fn start_time_identifies_process() {
        let own_pid = i32::try_from(std::process::id()).expect("a pid");
        let (state, start_time) = process_stat(own_pid).expect("this process runs");
        assert_ne!(state, 'Z');
        let this_process = DaemonProcess {
            lock_path: PathBuf::new(),
            pid_and_start_time: Some((own_pid, start_time)),
        };
        let other_process = DaemonProcess {
            lock_path: PathBuf::new(),
            pid_and_start_time: Some((own_pid, "1".into())),
        };
        assert!(!this_process.has_exited());
        assert!(other_process.has_exited());
    }
}
