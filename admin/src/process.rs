//! Runs programs with a time limit.

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Maximum length in bytes of each output of a program. Nothing after it is read.
const OUTPUT_BYTES_MAX: u64 = 4 << 20;
/// Interval at which a running program is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The output of a program that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Why there is no result of a program.
#[derive(Debug, Error)]
pub(crate) enum RunError {
    #[error("{program} cannot be run: {cause}")]
    Start { program: String, cause: io::Error },
    #[error("{program} did not end within {} s", .timeout.as_secs())]
    TimedOut { program: String, timeout: Duration },
}

/// Runs a program to its end, at most for `timeout`; then the program is killed with all processes
/// of its group.
///
/// # Errors
/// The program cannot be started, or did not end in time.
pub(crate) fn run(
    mut command: Command,
    input: &[u8],
    timeout: Duration,
) -> Result<Finished, RunError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start_error = |cause| RunError::Start {
        program: program.clone(),
        cause,
    };
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut child = command.spawn().map_err(start_error)?;
    let group = Pid::from_raw(child.id().cast_signed());
    let deadline = Instant::now() + timeout;
    let readers = [
        child
            .stdout
            .take()
            .map(|pipe| read_in_background(Box::new(pipe))),
        child
            .stderr
            .take()
            .map(|pipe| read_in_background(Box::new(pipe))),
    ];
    if let Some(mut pipe) = child.stdin.take() {
        let input = input.to_vec();
        // A program that does not read its input must not block this one.
        thread::spawn(move || pipe.write_all(&input));
    }
    let status = loop {
        if let Some(status) = child.try_wait().map_err(start_error)? {
            break Some(status);
        }
        if Instant::now() >= deadline {
            break None;
        }
        thread::sleep(POLL_INTERVAL);
    };
    // Processes that the program has left behind would keep the pipes open.
    let _ = killpg(group, Signal::SIGKILL);
    let Some(status) = status else {
        let _ = child.wait();
        return Err(RunError::TimedOut { program, timeout });
    };
    let [stdout, stderr] = readers.map(|reader| {
        let bytes = reader.and_then(|reader| reader.join().ok());
        String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
    });
    Ok(Finished {
        status,
        stdout,
        stderr,
    })
}

fn read_in_background(pipe: Box<dyn Read + Send>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        // The bytes before an error are the output.
        let _ = pipe.take(OUTPUT_BYTES_MAX).read_to_end(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_and_input_pass_through() {
        let timeout = Duration::from_secs(60);
        let finished = run(shell("cat; echo e >&2; exit 3"), b"in", timeout).expect("it ends");
        assert_eq!(finished.status.code(), Some(3));
        assert_eq!(
            (finished.stdout.as_str(), finished.stderr.as_str()),
            ("in", "e\n")
        );
        let error = run(Command::new("/nonexistent"), b"", timeout).expect_err("no program");
        assert!(matches!(error, RunError::Start { .. }));
    }

    /// A program is killed with its children when its time is over.
    #[test]
    fn late_programs_are_killed() {
        let error = run(
            shell("sleep 1000 & sleep 1000"),
            b"",
            Duration::from_millis(50),
        );
        assert!(matches!(error, Err(RunError::TimedOut { .. })));
    }
}
