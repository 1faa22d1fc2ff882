//! Runs commands with a time limit, and waits for conditions.
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

/// Minimum pause between two checks of a condition. A pause is a sixteenth of the time since the
/// first check, but at least this minimum and at most [`CHECK_INTERVAL_MAX`]. Many checks start a
/// console, so frequent checks would slow down the virtual machine.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(5);
const CHECK_INTERVAL_MAX: Duration = Duration::from_millis(100);

/// Time limit for a killed process to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(20);

/// Exit status and output of a command that has ended.
#[derive(Debug, Clone)]
pub struct CommandResult {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl CommandResult {
    /// True for exit status 0.
    pub fn succeeded(&self) -> bool {
        self.status.success()
    }

    /// True if the command has failed and has printed one sentence. A command that takes more than
    /// two seconds also prints a line for each step, which does not count.
    pub fn failed_with_one_sentence(&self) -> bool {
        let is_step = |line: &&str| line.contains(" done");
        let sentence_count = self.stderr.lines().filter(|line| !is_step(line)).count();
        !self.succeeded() && sentence_count == 1
    }

    /// Returns the result if the command has succeeded. `description` describes the command in the
    /// error.
    ///
    /// # Errors
    /// The command has failed; the error contains its output.
    pub fn expect_success(self, description: &str) -> Result<Self> {
        if self.succeeded() {
            return Ok(self);
        }
        bail!(
            "{description}: {}\nstdout: {}\nstderr: {}",
            self.status,
            self.stdout.trim(),
            self.stderr.trim()
        )
    }
}

/// Repeats `check` until it succeeds or the time `timeout` has passed since the call. An error of
/// `check` describes what is missing.
///
/// # Errors
/// The time has passed; the error is the last error of `check`.
pub fn wait_for<T>(timeout: Duration, mut check: impl FnMut() -> Result<T, String>) -> Result<T> {
    let started_at = Instant::now();
    loop {
        match check() {
            Ok(value) => return Ok(value),
            Err(error) if started_at.elapsed() >= timeout => {
                bail!("not within {} s: {error}", timeout.as_secs_f32())
            }
            Err(_) => {
                let pause =
                    (started_at.elapsed() / 16).clamp(CHECK_INTERVAL_MIN, CHECK_INTERVAL_MAX);
                std::thread::park_timeout(pause);
            }
        }
    }
}

/// A running command, whose output is written to files. Dropping the value kills the process.
#[derive(Debug)]
pub struct RunningCommand {
    description: String,
    process: Child,
    stdout_file: File,
    stderr_file: File,
}

impl RunningCommand {
    /// Starts a command with `stdin` as its standard input.
    pub fn start(mut command: Command, stdin: Stdio) -> Result<Self> {
        let description = format!("{command:?}");
        let (stdout, stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command
            .stdin(stdin)
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {description}"))?;
        Ok(Self {
            description,
            process: child,
            stdout_file: stdout,
            stderr_file: stderr,
        })
    }

    /// Returns the standard output of the command so far.
    pub fn stdout_so_far(&self) -> Result<String> {
        read_from_start(&self.stdout_file)
    }

    /// Returns the standard error of the command so far.
    pub fn stderr_so_far(&self) -> Result<String> {
        read_from_start(&self.stderr_file)
    }

    /// Returns the command's process number on the machine.
    pub fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Returns the pipe to the command's standard input; `None` if standard input is no pipe or an
    /// earlier call has returned the pipe.
    pub fn take_stdin(&mut self) -> Option<std::process::ChildStdin> {
        self.process.stdin.take()
    }

    /// Returns the exit status if the command has ended; `None` while it runs. Does not wait.
    pub fn poll_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.process.try_wait()?)
    }

    /// Kills the child processes of the command's process and waits until this process ends. A
    /// command in a host must be killed in this way: its process is `nsenter`, and the program is a
    /// child process of `nsenter`.
    ///
    /// # Errors
    /// A process cannot be found or ended.
    pub fn kill_children_and_wait(self) -> Result<()> {
        let parent = Process::new(self.process_id().cast_signed())?;
        for child in parent.task_main_thread()?.children()? {
            kill(Pid::from_raw(child.cast_signed()), Signal::SIGKILL)?;
        }
        self.wait_or_kill(KILL_TIMEOUT).map(|_| ())
    }

    /// Waits until the command ends. Kills the command when the time `timeout` has passed.
    ///
    /// # Errors
    /// The command did not end in time; the error contains its output.
    pub fn wait_or_kill(mut self, timeout: Duration) -> Result<CommandResult> {
        let exit_status = wait_for(timeout, || match self.process.try_wait() {
            Ok(Some(status)) => Ok(status),
            Ok(None) => Err("it still runs".to_string()),
            Err(error) => Err(error.to_string()),
        });
        let (stdout, stderr) = (
            read_from_start(&self.stdout_file)?,
            read_from_start(&self.stderr_file)?,
        );
        match exit_status {
            Ok(status) => Ok(CommandResult {
                status,
                stdout,
                stderr,
            }),
            Err(timeout_error) => bail!(
                "{}: {timeout_error}\nstdout: {}\nstderr: {}",
                self.description,
                stdout.trim(),
                stderr.trim()
            ),
        }
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // Both calls have no effect if the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn read_from_start(file: &File) -> Result<String> {
    // A duplicate of the descriptor would share the file offset with the command, so the file is
    // opened again.
    use std::os::fd::AsRawFd;
    let mut reopened_file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    reopened_file.rewind()?;
    let mut bytes = Vec::new();
    reopened_file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Runs a command without input and waits for its end.
///
/// # Errors
/// The command does not start, or does not end within the time limit. A failure of the command is
/// no error.
pub fn run_to_end(command: Command, timeout: Duration) -> Result<CommandResult> {
    RunningCommand::start(command, Stdio::null())?.wait_or_kill(timeout)
}

/// Runs a command without input and waits for its end. The command must succeed.
///
/// # Errors
/// As [`run_to_end`], or the exit status is not 0.
pub fn run_successfully(command: Command, timeout: Duration) -> Result<CommandResult> {
    let description = format!("{command:?}");
    run_to_end(command, timeout)?.expect_success(&description)
}
