//! Runs commands with a deadline, and waits for conditions.
//!
//! Output goes to files, not pipes: a daemon that a command starts could keep a pipe open.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Lower bound of the pause between two checks of a condition. The pause is a sixteenth of the time
/// waited so far, within its bounds. Many conditions start a console, which slows down the awaited
/// work.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Time for a killed process to end.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// The result of a command that has ended.
#[derive(Debug, Clone)]
pub struct Done {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Done {
    /// True for exit status 0.
    pub fn good(&self) -> bool {
        self.status.success()
    }

    /// Returns the result if the command has succeeded.
    ///
    /// # Errors
    /// It has failed; the error has its output.
    pub fn expect_good(self, what: &str) -> Result<Done> {
        if self.good() {
            return Ok(self);
        }
        bail!(
            "{what}: {}\nstdout: {}\nstderr: {}",
            self.status,
            self.out.trim(),
            self.err.trim()
        )
    }
}

/// Checks a condition until it holds, or until the deadline. The closure returns what is still
/// missing; the last such text is the error.
///
/// # Errors
/// The condition did not hold in time.
pub fn eventually<T>(
    deadline: Duration,
    mut check: impl FnMut() -> Result<T, String>,
) -> Result<T> {
    let begun = Instant::now();
    loop {
        match check() {
            Ok(value) => return Ok(value),
            Err(missing) if begun.elapsed() >= deadline => {
                bail!("not within {} s: {missing}", deadline.as_secs_f32())
            }
            Err(_) => {
                let pause = (begun.elapsed() / 16).clamp(PAUSE_MIN, PAUSE_MAX);
                std::thread::park_timeout(pause);
            }
        }
    }
}

/// A running command, with its output in files.
#[derive(Debug)]
pub struct Running {
    what: String,
    child: Child,
    out: File,
    err: File,
}

impl Running {
    /// Starts a command; standard input is `/dev/null` unless `stdin` says otherwise.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(mut command: Command, stdin: Stdio) -> Result<Running> {
        let what = format!("{command:?}");
        let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command
            .stdin(stdin)
            .stdout(out.try_clone()?)
            .stderr(err.try_clone()?);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {what}"))?;
        Ok(Running {
            what,
            child,
            out,
            err,
        })
    }

    /// Returns its standard output so far.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn out_so_far(&self) -> Result<String> {
        slurp(&self.out)
    }

    /// Returns its standard error so far.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn err_so_far(&self) -> Result<String> {
        slurp(&self.err)
    }

    /// Returns its process number on the machine.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the write end of its standard input, if it is piped and not taken yet.
    pub fn take_stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.child.stdin.take()
    }

    /// Returns its exit status, or `None` while it runs.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Kills its children and waits for its own end: for a program that `nsenter` has started in a
    /// host.
    ///
    /// # Errors
    /// Its processes cannot be found or ended.
    pub fn end_inside(self) -> Result<()> {
        let outer = self.id();
        let children = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
        for child in children.split_whitespace() {
            kill(Pid::from_raw(child.parse()?), Signal::SIGKILL)?;
        }
        self.finish(END_TIMEOUT).map(|_| ())
    }

    /// Waits for its end, and kills it at the deadline.
    ///
    /// # Errors
    /// It did not end in time; the error has its output.
    pub fn finish(mut self, deadline: Duration) -> Result<Done> {
        let ended = eventually(deadline, || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("it still runs".to_string()),
            Err(error) => Err(error.to_string()),
        });
        let (out, err) = (slurp(&self.out)?, slurp(&self.err)?);
        match ended {
            Ok(status) => Ok(Done { status, out, err }),
            Err(late) => bail!(
                "{}: {late}\nstdout: {}\nstderr: {}",
                self.what,
                out.trim(),
                err.trim()
            ),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both calls do nothing if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn slurp(file: &File) -> Result<String> {
    // A duplicate of the descriptor would share the offset with the writer, so this opens the file
    // again.
    use std::os::fd::AsRawFd;
    let mut fresh = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    fresh.rewind()?;
    let mut bytes = Vec::new();
    fresh.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a command to its end, without input.
///
/// # Errors
/// It does not start or does not end in time. A failure of the command is no error.
pub fn run(command: Command, deadline: Duration) -> Result<Done> {
    Running::start(command, Stdio::null())?.finish(deadline)
}

/// Runs a command that must succeed.
///
/// # Errors
/// As [`run`], and when the exit status is not 0.
pub fn must(command: Command, deadline: Duration) -> Result<Done> {
    let what = format!("{command:?}");
    run(command, deadline)?.expect_good(&what)
}
