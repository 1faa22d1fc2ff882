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
/// Time limit for the daemon to exit after a halt. The daemon waits for the other hosts first, for
/// which it has its own time limits.
const EXIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval for polling the process table.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum bytes that are read of the daemon's output and of its error output.
const STDERR_BYTES_MAX: u64 = 64 << 10;

/// Why no daemon was started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The daemon's program could not be executed.
    #[error("{} cannot be started: {source}; install it next to pvm or in PATH", program.display())]
    NoProgram {
        program: PathBuf,
        source: std::io::Error,
    },
    /// The daemon exited without printing an address, but printed this error line.
    #[error("{0}")]
    Reported(String),
    /// The daemon exited without printing an address or an error.
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

/// Returns the daemon's program: in the folder of this one, or from `KDAT_PATH`.
fn program() -> PathBuf {
    let sibling = std::env::current_exe()
        .ok()
        .and_then(|exe| exe.parent().map(|dir| dir.join("pvmd")));
    sibling
        .filter(|path| path.is_file())
        .unwrap_or_else(|| PathBuf::from("pvmd"))
}

/// Starts the daemon in the background and waits until it listens. The caller must reap the child
/// when it exits.
///
/// # Errors
/// Fails if the daemon cannot be executed, exits, or does not listen in time.
pub(crate) fn start(args: &[OsString]) -> Result<Child, StartError> {
    run(&program(), args)
}

fn run(program: &Path, args: &[OsString]) -> Result<Child, StartError> {
    // The daemon's stderr is a memory file. A pipe would raise SIGPIPE in any process that still
    // writes to it after this console has ended.
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
        let read = BufReader::new(stdout.take(STDERR_BYTES_MAX)).read_line(&mut line);
        // The receiver is gone if the timeout has expired.
        let _ = sender.send(read.is_ok_and(|_| line.ends_with('\n')));
    });
    match line.recv_timeout(START_TIMEOUT) {
        Ok(true) => Ok(child),
        Ok(false) => {
            // A daemon that has closed its output is exiting. It is killed if it does not exit in
            // time.
            let _ = wait_until(START_TIMEOUT, || !matches!(child.try_wait(), Ok(None)));
            let _ = child.kill();
            let status = child.wait()?;
            let mut stderr_text = String::new();
            stderr_file.rewind()?;
            let _ = stderr_file
                .take(STDERR_BYTES_MAX)
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

/// Returns the line with the reason why the daemon did not start: a line that begins with `error:
/// `, which precedes further advice, or else the last line.
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
    lock: PathBuf,
    /// Process id and start time. The start time distinguishes it from a later process with the
    /// same id.
    process: Option<(i32, String)>,
}

impl DaemonProcess {
    /// Returns the running daemon that holds this lock file.
    pub(crate) fn from_lock_file(lock: PathBuf) -> DaemonProcess {
        let pid = fs::read_to_string(&lock)
            .ok()
            .and_then(|text| text.trim().parse().ok());
        // A zombie does not count as running.
        let running = |pid| process_stat(pid).filter(|(state, _)| *state != 'Z');
        DaemonProcess {
            process: pid.and_then(|pid| Some((pid, running(pid)?.1))),
            lock,
        }
    }

    fn has_exited(&self) -> bool {
        match &self.process {
            Some((pid, started)) => {
                process_stat(*pid).is_none_or(|(state, since)| state == 'Z' || since != *started)
            }
            None => !self.lock.exists(),
        }
    }

    /// True if a failed enrollment shows that the daemon was shutting down: the daemon was running,
    /// closed the connection, and exits within [`EXIT_TIMEOUT`]. Waits for the exit.
    pub(crate) fn is_shutting_down(&self, error: &EnrollError) -> bool {
        let broken_off = matches!(error, EnrollError::Io { .. } | EnrollError::NoDaemon { .. });
        self.process.is_some() && broken_off && self.wait_for_exit(None)
    }

    /// Waits until the daemon has exited. Returns false if it has not after [`EXIT_TIMEOUT`]. If
    /// `child` is the daemon, it is reaped.
    pub(crate) fn wait_for_exit(&self, mut child: Option<&mut Child>) -> bool {
        wait_until(EXIT_TIMEOUT, || {
            if let Some(child) = child.as_deref_mut() {
                let _ = child.try_wait();
            }
            self.has_exited()
        })
    }
}

fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if done() {
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

    fn shell(script: &str) -> Result<Child, StartError> {
        run(Path::new("/bin/sh"), &["-c".into(), script.into()])
    }

    /// A daemon that prints its address keeps running in a session of its own.
    #[test]
    fn started_daemon_runs_in_own_session() {
        let mut child = shell("echo /some/socket; exec sleep 60").expect("started");
        let pid = i32::try_from(child.id()).expect("a pid");
        let session = nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid))).expect("it runs");
        assert_eq!(session.as_raw(), pid);
        let watched = DaemonProcess {
            lock: PathBuf::new(),
            process: Some((pid, process_stat(pid).expect("it runs").1)),
        };
        assert!(!watched.has_exited());
        child.kill().expect("ours");
        assert!(watched.wait_for_exit(Some(&mut child)));
        child.wait().expect("ours");
    }

    /// If the daemon fails to start, the error is the line that the daemon has printed.
    #[test]
    fn failed_daemon_is_quoted() {
        let said = shell("echo 'warning: x' >&2; echo 'pvmd: no room' >&2; exit 1")
            .expect_err("failed")
            .to_string();
        assert_eq!(said, "pvmd: no room");
        let advice = "echo 'error: -d takes a mask' >&2; echo >&2; echo 'try --help' >&2; exit 2";
        assert_eq!(
            shell(advice).expect_err("failed").to_string(),
            "error: -d takes a mask"
        );
        assert!(matches!(
            shell("exit 3").expect_err("failed"),
            StartError::Silent(_)
        ));
        let none = run(Path::new("/nonexistent/pvmd"), &[]).expect_err("failed");
        assert!(matches!(none, StartError::NoProgram { .. }));
    }

    /// A process with the same id but another start time is a different process.
    #[test]
    fn start_time_identifies_process() {
        let me = i32::try_from(std::process::id()).expect("a pid");
        let (state, started) = process_stat(me).expect("this process runs");
        assert_ne!(state, 'Z');
        let same = DaemonProcess {
            lock: PathBuf::new(),
            process: Some((me, started)),
        };
        let other = DaemonProcess {
            lock: PathBuf::new(),
            process: Some((me, "1".into())),
        };
        assert!(!same.has_exited());
        assert!(other.has_exited());
    }
}
