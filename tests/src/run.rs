//! Runs commands with a deadline, and waits for conditions.
//!
//! The output of commands is written to files instead of pipes, because a daemon that a command
//! starts could keep a pipe open.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use procfs::process::Process;
use std::fs::File;
use std::io::{Read, Seek};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Minimum pause between two checks of a condition. The pause is a sixteenth of the time waited so
/// far, between this minimum and [`CHECK_INTERVAL_MAX`]. Many checks start a console, and frequent
/// checks would slow down the work that the test waits for.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(5);
const CHECK_INTERVAL_MAX: Duration = Duration::from_millis(100);

/// Time limit for a killed process to end.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// Exit status and output of a command that has ended.
#[derive(Debug, Clone)]
pub struct CommandResult {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl CommandResult {
    /// True for exit status 0.
    pub fn succeeded(&self) -> bool {
        self.status.success()
    }

    /// Returns the result if the command has succeeded. `what` describes the command in the error.
    ///
    /// # Errors
    /// The command has failed; the error has its output.
    pub fn expect_success(self, what: &str) -> Result<CommandResult> {
        if self.succeeded() {
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

/// Repeats `check` until it succeeds or `deadline` has passed. An error of `check` says what is
/// still missing.
///
/// # Errors
/// The deadline has passed; the error is the last one of `check`.
pub fn wait_for<T>(deadline: Duration, mut check: impl FnMut() -> Result<T, String>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match check() {
            Ok(value) => return Ok(value),
            Err(missing) if begun.elapsed() >= deadline => {
                bail!("not within {} s: {missing}", deadline.as_secs_f32())
            }
            Err(_) => {
                let pause = (begun.elapsed() / 16).clamp(CHECK_INTERVAL_MIN, CHECK_INTERVAL_MAX);
                std::thread::park_timeout(pause);
            }
        }
    }
}

/// A running command, with its output in files.
#[derive(Debug)]
pub struct RunningCommand {
    description: String,
    child: Child,
    out: File,
    err: File,
}

impl RunningCommand {
    /// Starts a command with `stdin` as its standard input.
    pub fn start(mut command: Command, stdin: Stdio) -> Result<RunningCommand> {
        let what = format!("{command:?}");
        let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command
            .stdin(stdin)
            .stdout(out.try_clone()?)
            .stderr(err.try_clone()?);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {what}"))?;
        Ok(RunningCommand {
            description: what,
            child,
            out,
            err,
        })
    }

    /// Returns the standard output of the command so far.
    pub fn out_so_far(&self) -> Result<String> {
        read_all(&self.out)
    }

    /// Returns the standard error of the command so far.
    pub fn err_so_far(&self) -> Result<String> {
        read_all(&self.err)
    }

    /// Returns the process number on the machine.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the write end of the standard input; `None` if it is not piped or was taken before.
    pub fn take_stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.child.stdin.take()
    }

    /// Returns the exit status; `None` while the command runs.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Kills the children of the process and waits until the process ends. For a program that
    /// `nsenter` has started in a host: the process is `nsenter`, and the program is its child.
    ///
    /// # Errors
    /// A process cannot be found or ended.
    pub fn end_inside(self) -> Result<()> {
        let outer = Process::new(self.id().cast_signed())?;
        for child in outer.task_main_thread()?.children()? {
            kill(Pid::from_raw(child.cast_signed()), Signal::SIGKILL)?;
        }
        self.finish(END_TIMEOUT).map(|_| ())
    }

    /// Waits until the command ends. Kills it at the deadline.
    ///
    /// # Errors
    /// The command did not end before the deadline; the error has its output.
    pub fn finish(mut self, deadline: Duration) -> Result<CommandResult> {
        let ended = wait_for(deadline, || match self.child.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("it still runs".to_string()),
            Err(error) => Err(error.to_string()),
        });
        let (out, err) = (read_all(&self.out)?, read_all(&self.err)?);
        match ended {
            Ok(status) => Ok(CommandResult { status, out, err }),
            Err(late) => bail!(
                "{}: {late}\nstdout: {}\nstderr: {}",
                self.description,
                out.trim(),
                err.trim()
            ),
        }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // Both calls do nothing if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_all(file: &File) -> Result<String> {
    // A duplicate of the descriptor would share the file offset with the writer, so the file is
    // opened again.
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
/// The command does not start, or does not end before the deadline. A failure of the command is no
/// error.
pub fn run(command: Command, deadline: Duration) -> Result<CommandResult> {
    RunningCommand::start(command, Stdio::null())?.finish(deadline)
}

/// Runs a command to its end. The command must succeed.
///
/// # Errors
/// As [`run`]; also if the exit status is not 0.
pub fn run_ok(command: Command, deadline: Duration) -> Result<CommandResult> {
    let what = format!("{command:?}");
    run(command, deadline)?.expect_success(&what)
}
