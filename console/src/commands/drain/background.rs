//! Runs a drain that may checkpoint jobs in a process of its own.
//!
//! The drain process is this program with `--apart`. The process outlives the command that the user
//! typed, and the terminal. As long as the command runs, it copies the output of the drain process;
//! it ends with the exit status of the drain process.

use super::order::DrainOrder;
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

/// Bytes of output that are copied at a time.
const CHUNK_BYTES: usize = 16 << 10;
/// A shell reports death by signal N as exit status 128 + N.
const SIGNAL_EXIT_BASE: u8 = 128;

/// Returns the path of this program. `/proc/self/exe` is used if the file was removed or replaced.
fn own_program() -> PathBuf {
    let own = std::env::current_exe().ok().filter(|path| path.is_file());
    own.unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

/// Starts the drain process.
///
/// `console` is the console that requested the drain, or [`Tid::NONE`] for a shell. The children of
/// that console are checkpointed although the console is alive.
fn spawn_drain_process(
    program: PathBuf,
    console: Tid,
    order: &DrainOrder,
    json: bool,
) -> io::Result<Child> {
    let mut command = Command::new(program);
    command
        .args(["--apart", &console.to_string()])
        .args(json.then_some("--json"))
        .args(order.to_words());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let spawned = detach(&mut command).spawn();
    spawned.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("drain: the drain process cannot be started: {error}"),
        )
    })
}

/// Runs a drain that was requested from a shell and prints its progress.
///
/// # Errors
/// Fails after the end of the drain if standard output cannot be written.
pub(super) fn run_from_shell(order: &DrainOrder, json: bool) -> io::Result<Outcome> {
    let mut interrupts = SigSet::empty();
    interrupts.add(Signal::SIGINT);
    interrupts.add(Signal::SIGTERM);
    // Later threads inherit the signal mask.
    interrupts.thread_block()?;
    let mut child = match spawn_drain_process(own_program(), Tid::NONE, order, json) {
        Ok(child) => child,
        Err(error) => {
            return Ok(Outcome::error(error));
        }
    };
    let host = order.host.clone();
    thread::spawn(move || detach_on_signal(interrupts, &host));
    let error_lines = child
        .stderr
        .take()
        .map(|from| thread::spawn(move || copy_output(from, io::stderr())));
    let shown = child
        .stdout
        .take()
        .map_or(Ok(()), |from| copy_output(from, io::stdout()));
    // Errors of standard error are ignored.
    let _ = error_lines.map(thread::JoinHandle::join);
    let status = child.wait()?;
    shown?;
    let (succeeded, signal_error) = exit_result(status);
    Ok(Outcome {
        errors: signal_error.into_iter().collect(),
        failed: !succeeded,
        ..Outcome::default()
    })
}

/// Waits for one of the signals, reports that the drain continues, and exits this process.
fn detach_on_signal(interrupts: SigSet, host: &str) {
    let Ok(signal) = interrupts.wait() else {
        return;
    };
    // A second signal ends this process at once, also if the report blocks.
    let _ = interrupts.thread_unblock();
    Terminal.print_error(&format!(
        "drain: {host} is still being drained; 'undrain {host}' cancels it"
    ));
    let number = u8::try_from(signal as i32).unwrap_or_default();
    std::process::exit(i32::from(SIGNAL_EXIT_BASE + number));
}

/// Copies output until its end. Reading continues when the target cannot be written, because the
/// drain process would otherwise block on a full pipe.
///
/// # Errors
/// Fails if a part of the output could not be read or written.
fn copy_output(mut from: impl Read, mut target: impl Write) -> io::Result<()> {
    let (mut chunk, mut result) = (vec![0; CHUNK_BYTES], Ok(()));
    loop {
        let bytes = match from.read(&mut chunk) {
            Ok(0) => return result,
            Ok(bytes) => &chunk[..bytes],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if result.is_ok() {
            result = target.write_all(bytes).and_then(|()| target.flush());
        }
    }
}

/// Returns whether the drain succeeded, and an error line if a signal killed its process.
fn exit_result(status: ExitStatus) -> (bool, Option<String>) {
    let by = status.signal().map(|signal| {
        format!(
            "drain: the drain process was killed by signal {signal}: remaining jobs were not checkpointed"
        )
    });
    (status.success(), by)
}

/// Runs a drain that was requested in this interactive console and waits for its end.
pub(super) fn run_from_console(console: Tid, order: &DrainOrder, json: bool) -> Outcome {
    run_program_from_console(own_program(), console, order, json)
}

fn run_program_from_console(
    program: PathBuf,
    console: Tid,
    order: &DrainOrder,
    json: bool,
) -> Outcome {
    let done = match spawn_drain_process(program, console, order, json)
        .and_then(Child::wait_with_output)
    {
        Ok(done) => done,
        Err(error) => return Outcome::error(error),
    };
    let (succeeded, signal_error) = exit_result(done.status);
    let (out, err) = (
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr),
    );
    let values = if json {
        out.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    } else {
        Vec::new()
    };
    let error_lines = err.lines().map(String::from).chain(signal_error).collect();
    let text = if json {
        String::new()
    } else {
        out.into_owned()
    };
    Outcome {
        text,
        json: values,
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

    /// All output of the process is read even if it cannot be written.
    #[test]
    fn output_is_drained_after_broken_pipe() {
        let text = vec![b'x'; 3 * CHUNK_BYTES + 1];
        let (mut from, mut to) = (&text[..], Vec::new());
        copy_output(&mut from, &mut to).expect("it is written");
        assert_eq!((from.len(), to.len()), (0, text.len()));
        let mut from = &text[..];
        let error = copy_output(&mut from, BrokenPipeWriter).expect_err("the pipe is closed");
        assert_eq!((from.len(), error.kind()), (0, io::ErrorKind::BrokenPipe));
    }

    /// The outcome of the command has the output, the errors and the exit status of the drain
    /// process.
    #[test]
    fn outcome_has_process_output_and_status() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = folder.path().join("pvm");
        let what = DrainOrder {
            host: "h2".into(),
            deadline: None,
            checkpoint: true,
        };
        let run = |script: &str, json| {
            fs::write(&place, format!("#!/bin/sh\n{script}\n")).expect("written");
            fs::set_permissions(&place, fs::Permissions::from_mode(0o755)).expect("ours");
            run_program_from_console(place.clone(), Tid::from_raw(0x40001), &what, json)
        };
        let done = run("echo \"$@\"; echo not all >&2; exit 1", false);
        assert_eq!(done.text, "--apart t40001 drain h2 --checkpoint\n");
        assert_eq!(
            (done.failed, done.errors),
            (true, vec!["not all".to_string()])
        );
        let done = run("echo '{\"left\":[]}'", true);
        assert_eq!(
            (done.failed, done.text.as_str(), done.json),
            (false, "", vec![serde_json::json!({ "left": [] })])
        );
        let killed = run("kill -9 $$", false);
        assert!(
            killed.failed && killed.errors[0].contains("killed by signal 9"),
            "{killed:?}"
        );
        let none = run_program_from_console(folder.path().join("none"), Tid::NONE, &what, false);
        assert!(
            none.failed && none.errors[0].starts_with("drain: the drain process cannot be started"),
            "{none:?}"
        );
    }
}
