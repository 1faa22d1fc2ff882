//! Runs a drain that may checkpoint jobs in a process of its own.
//!
//! The drain process is this program with `--apart`. The process outlives the command that the user
//! typed, and the terminal. The command copies the output of the drain process and returns its exit
//! status.

use super::order::DrainRequest;
use crate::detach::detach;
use crate::outcome::Outcome;
use crate::output::terminal::Terminal;
use nix::sys::signal::{SigSet, Signal};
use sempa_proto::Tid;
use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;

/// Maximum number of bytes that are copied at a time.
const CHUNK_BYTES_MAX: usize = 16 << 10;
/// Offset of the exit status that a shell reports for a program killed by a signal. The status is
/// this offset plus the signal's number.
const SIGNAL_EXIT_BASE: u8 = 128;

/// Returns the path of this program. `/proc/self/exe` is used if the file was removed or replaced.
fn own_program_path() -> PathBuf {
    let current_path = std::env::current_exe().ok().filter(|path| path.is_file());
    current_path.unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

/// Starts the drain process.
///
/// `console` is the console that requested the drain, or [`Tid::NONE`] for a shell. The children of
/// that console are checkpointed although the console is alive.
fn spawn_drain_process(
    program: PathBuf,
    console: Tid,
    request: &DrainRequest,
    prints_json: bool,
) -> io::Result<Child> {
    let mut command = Command::new(program);
    command
        .args(["--apart", &console.to_string()])
        .args(prints_json.then_some("--json"))
        .args(request.to_words());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let spawn_result = detach(&mut command).spawn();
    spawn_result.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("drain: the drain process cannot be started: {error}"),
        )
    })
}

/// Runs a drain that was requested from a shell, in another process, and prints the progress of the
/// drain. After SIGINT or SIGTERM this process exits and the drain continues.
///
/// # Errors
/// Fails after the end of the drain if standard output cannot be written.
pub(super) fn run_from_shell(request: &DrainRequest, prints_json: bool) -> io::Result<Outcome> {
    let mut interrupts = SigSet::empty();
    interrupts.add(Signal::SIGINT);
    interrupts.add(Signal::SIGTERM);
    // Threads that start later inherit the signal mask.
    interrupts.thread_block()?;
    let mut child = match spawn_drain_process(own_program_path(), Tid::NONE, request, prints_json) {
        Ok(child) => child,
        Err(error) => {
            return Ok(Outcome::from_error(error));
        }
    };
    let host = request.host.clone();
    thread::spawn(move || exit_on_signal(interrupts, &host));
    let error_printer = child
        .stderr
        .take()
        .map(|source| thread::spawn(move || copy_output(source, io::stderr())));
    let copy_result = child
        .stdout
        .take()
        .map_or(Ok(()), |source| copy_output(source, io::stdout()));
    // A failure to write standard error is ignored.
    let _ = error_printer.map(thread::JoinHandle::join);
    let status = child.wait()?;
    copy_result?;
    let (succeeded, signal_error) = success_and_error(status);
    Ok(Outcome {
        errors: signal_error.into_iter().collect(),
        failed: !succeeded,
        ..Outcome::default()
    })
}

/// Waits for a signal of `interrupts`, reports that the drain continues, and exits this process.
fn exit_on_signal(interrupts: SigSet, host: &str) {
    let Ok(signal) = interrupts.wait() else {
        return;
    };
    // A second signal ends this process at once, also if the report blocks.
    let _ = interrupts.thread_unblock();
    Terminal.print_error(&format!(
        "drain: {host} is still being drained; 'undrain {host}' cancels it"
    ));
    let signal_number = u8::try_from(signal as i32).unwrap_or_default();
    std::process::exit(i32::from(SIGNAL_EXIT_BASE + signal_number));
}

/// Copies output until its end. Reading continues after a write error, because the drain process
/// would otherwise block on a full pipe.
///
/// # Errors
/// Fails after the end of the output if some bytes could not be written, and at once if a read
/// fails.
fn copy_output(mut source: impl Read, mut target: impl Write) -> io::Result<()> {
    let (mut chunk, mut write_result) = (vec![0; CHUNK_BYTES_MAX], Ok(()));
    loop {
        let bytes = match source.read(&mut chunk) {
            Ok(0) => return write_result,
            Ok(bytes) => &chunk[..bytes],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if write_result.is_ok() {
            write_result = target.write_all(bytes).and_then(|()| target.flush());
        }
    }
}

/// Returns true if the drain succeeded, and an error line if a signal killed the drain process.
fn success_and_error(status: ExitStatus) -> (bool, Option<String>) {
    let signal_error = status.signal().map(|signal| {
        format!(
            "drain: the drain process was killed by signal {signal}: remaining jobs were not checkpointed"
        )
    });
    (status.success(), signal_error)
}

/// Runs a drain that was requested in this interactive console, in another process. Waits for the
/// end of the drain and returns its output as an outcome.
pub(super) fn run_from_console(console: Tid, request: &DrainRequest, prints_json: bool) -> Outcome {
    run_program_from_console(own_program_path(), console, request, prints_json)
}

fn run_program_from_console(
    program: PathBuf,
    console: Tid,
    request: &DrainRequest,
    prints_json: bool,
) -> Outcome {
    let process_output = match spawn_drain_process(program, console, request, prints_json)
        .and_then(Child::wait_with_output)
    {
        Ok(process_output) => process_output,
        Err(error) => return Outcome::from_error(error),
    };
    let (succeeded, signal_error) = success_and_error(process_output.status);
    let (stdout, stderr) = (
        String::from_utf8_lossy(&process_output.stdout),
        String::from_utf8_lossy(&process_output.stderr),
    );
    let values = if prints_json {
        stdout
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    } else {
        Vec::new()
    };
    let error_lines = stderr
        .lines()
        .map(String::from)
        .chain(signal_error)
        .collect();
    let text = if prints_json {
        String::new()
    } else {
        stdout.into_owned()
    };
    Outcome {
        text,
        json_values: values,
        errors: error_lines,
        failed: !succeeded,
        ..Outcome::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// A writer whose reader has closed the pipe.
    struct BrokenPipeWriter;

    impl Write for BrokenPipeWriter {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// After a write error, [`copy_output`] reads the remaining output and returns the error.
    #[test]
    fn output_is_drained_after_broken_pipe() {
        let text = vec![b'x'; 3 * CHUNK_BYTES_MAX + 1];
        let (mut source, mut target) = (&text[..], Vec::new());
        copy_output(&mut source, &mut target).expect("it is written");
        assert_eq!((source.len(), target.len()), (0, text.len()));
        let mut source = &text[..];
        let error = copy_output(&mut source, BrokenPipeWriter).expect_err("the pipe is closed");
        assert_eq!((source.len(), error.kind()), (0, io::ErrorKind::BrokenPipe));
    }

    /// The outcome of the command has the output, the errors and the exit status of the drain
    /// process.
    #[test]
    fn outcome_has_process_output_and_status() {
        let folder = tempfile::tempdir().expect("a folder");
        let program_path = folder.path().join("pvm");
        let drain_request = DrainRequest {
            host: "h2".into(),
            deadline: None,
            checkpoints_all: true,
        };
        let run_script = |script: &str, json| {
            fs::write(&program_path, format!("#!/bin/sh\n{script}\n")).expect("written");
            fs::set_permissions(&program_path, fs::Permissions::from_mode(0o755)).expect("ours");
            run_program_from_console(
                program_path.clone(),
                Tid::from_raw(0x40001),
                &drain_request,
                json,
            )
        };
        let outcome = run_script("echo \"$@\"; echo not all >&2; exit 1", false);
        assert_eq!(outcome.text, "--apart t40001 drain h2 --checkpoint\n");
        assert_eq!(
            (outcome.failed, outcome.errors),
            (true, vec!["not all".to_string()])
        );
        let outcome = run_script("echo '{\"left\":[]}'", true);
        assert_eq!(
            (outcome.failed, outcome.text.as_str(), outcome.json_values),
            (false, "", vec![serde_json::json!({ "left": [] })])
        );
        let killed_outcome = run_script("kill -9 $$", false);
        assert!(
            killed_outcome.failed && killed_outcome.errors[0].contains("killed by signal 9"),
            "{killed_outcome:?}"
        );
        let missing_outcome =
            run_program_from_console(folder.path().join("none"), Tid::NONE, &drain_request, false);
        assert!(
            missing_outcome.failed
                && missing_outcome.errors[0]
                    .starts_with("drain: the drain process cannot be started"),
            "{missing_outcome:?}"
        );
    }
}
