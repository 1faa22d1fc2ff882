//! The interactive console. It reads commands from `$HOME/.pvmrc`, then from its input, until
//! `quit`, `halt` or the end of the input.
//!
//! If the input is a file or a pipe, the exit status is a failure if a command of the input failed.
//! The console executes the remaining commands nevertheless, as PVM's console does.

use super::editor::{EditorInput, LineEditor};
use super::execute;
use super::words::LINE_BYTES_MAX;
use crate::commands::banner;
use crate::daemon::halt::{LocalDaemon, halt_and_wait};
use crate::outcome::{AfterCommand, Outcome};
use crate::output::terminal::Terminal;
use crate::session::Session;
use crate::virtual_machine;
use libpvm::Vm;
use sempa_proto::Message;
use std::collections::BTreeMap;
use std::io::{self, BufRead, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

const PROMPT: &str = "pvm> ";
/// Maximum number of lines and messages that are queued for the console.
const INPUT_QUEUE_MAX: usize = 256;

/// An input of the console: from the user, or from the virtual machine.
enum Input {
    /// A line. A line from a file or a pipe includes its newline.
    Line(String),
    /// The end of the input.
    End,
    Message(Message),
    /// The connection to the daemon is lost. Contains the reason.
    ConnectionLost(String),
}

/// Source of commands and destination of output.
enum Frontend {
    /// A terminal with line editing.
    LineEditor(LineEditor),
    /// A file, a pipe, or a terminal without line editing.
    PlainInput { input_is_terminal: bool },
}

impl Frontend {
    fn start_prompt(&self, session: &Session) -> io::Result<()> {
        match self {
            Self::LineEditor(terminal) => {
                terminal.start_prompt(session.completion_names());
                Ok(())
            }
            Self::PlainInput { .. } => Terminal.print(PROMPT.as_bytes()),
        }
    }

    /// Shows output of jobs and announcements. May be called at any time.
    fn show(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::LineEditor(terminal) => terminal.show(bytes),
            Self::PlainInput { .. } => Terminal.print(bytes),
        }
    }

    /// Shows queued output. The console must call this function before the console executes a line,
    /// because the queued output arrived before the line.
    fn flush_pending(&self) -> io::Result<()> {
        match self {
            Self::LineEditor(terminal) => terminal.flush_pending(),
            Self::PlainInput { .. } => Ok(()),
        }
    }

    /// True if the input is a file or a pipe, whose lines no terminal has shown.
    fn reads_script(&self) -> bool {
        matches!(
            self,
            Self::PlainInput {
                input_is_terminal: false
            }
        )
    }

    /// Restores the terminal. After this call no more commands are read.
    fn close(&self) -> io::Result<()> {
        match self {
            Self::LineEditor(terminal) => terminal.close(),
            Self::PlainInput { .. } => Ok(()),
        }
    }
}

/// Runs the console until it ends.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(crate) fn run(
    vm: &Vm,
    mut daemon: LocalDaemon,
    env: BTreeMap<String, String>,
) -> io::Result<ExitCode> {
    let home_dir = env.get("HOME").map(PathBuf::from);
    let rc_path = home_dir.as_deref().map(|dir| dir.join(".pvmrc"));
    let session: &mut Session = &mut Session::new(vm.clone(), env);
    if let Err(error) = session.register_interactive() {
        Terminal.print_error(&format!("pvm: {error}"));
        return Ok(ExitCode::FAILURE);
    }
    // PVM's console prints nothing here. What a script reads stays the same.
    if io::stdin().is_terminal() && io::stdout().is_terminal() {
        Terminal.print(banner().as_bytes())?;
    }
    let mut after_command = AfterCommand::ReadLine;
    let rc_bytes = rc_path
        .and_then(|path| std::fs::read(path).ok())
        .unwrap_or_default();
    for line in String::from_utf8_lossy(&rc_bytes).split_inclusive('\n') {
        if after_command == AfterCommand::ReadLine {
            after_command = run_line(session, line, true)?.after_command;
        }
    }
    let mut script_failed = false;
    if after_command == AfterCommand::ReadLine {
        match run_commands(vm, session, home_dir.as_deref())? {
            Some(end) => (after_command, script_failed) = (end.after_command, end.script_failed),
            None => return Ok(ExitCode::FAILURE),
        }
    }
    let mut exit_code = ExitCode::SUCCESS;
    if after_command == AfterCommand::Halt {
        exit_code = halt_and_wait(vm, &mut daemon);
    } else {
        Terminal.print(b"\nConsole: exit handler called\npvmd still running.\n")?;
        // The virtual machine removes this task when its connection closes, even if `exit` fails.
        let _ = vm.exit();
    }
    Ok(if script_failed {
        ExitCode::FAILURE
    } else {
        exit_code
    })
}

/// How the input of a console ended.
struct InputEnd {
    after_command: AfterCommand,
    /// True if the input is no terminal and one of its commands failed.
    script_failed: bool,
}

/// Reads and executes commands until one of them ends the console. Returns `None` if the connection
/// to the daemon is lost.
fn run_commands(
    vm: &Vm,
    session: &mut Session,
    home_dir: Option<&Path>,
) -> io::Result<Option<InputEnd>> {
    let (frontend, inputs) = start_inputs(vm, home_dir);
    let mut script_failed = false;
    frontend.start_prompt(session)?;
    // `recv` never fails: an input thread sends [`Input::End`] or [`Input::ConnectionLost`] before
    // the thread exits.
    while let Ok(input) = inputs.recv() {
        match input {
            Input::Line(line) => {
                frontend.flush_pending()?;
                let outcome = run_line(session, &line, frontend.reads_script())?;
                script_failed |= outcome.failed && frontend.reads_script();
                match outcome.after_command {
                    AfterCommand::ReadLine => frontend.start_prompt(session)?,
                    after_command => {
                        frontend.close()?;
                        return Ok(Some(InputEnd {
                            after_command,
                            script_failed,
                        }));
                    }
                }
            }
            Input::End => {
                frontend.close()?;
                Terminal.print(b"quit\n")?;
                break;
            }
            Input::Message(message) => frontend.show(&session.handle_message(&message))?,
            Input::ConnectionLost(reason) => {
                frontend.close()?;
                Terminal.print_error(&format!("\npvm: the virtual machine has ended: {reason}"));
                return Ok(None);
            }
        }
    }
    Ok(Some(InputEnd {
        after_command: AfterCommand::Quit,
        script_failed,
    }))
}

/// Executes a line. If `echo` is true and the line ends with a newline, prints the line first, as
/// PVM's console does.
fn run_line(session: &mut Session, line: &str, echo: bool) -> io::Result<Outcome> {
    if echo && line.ends_with('\n') {
        Terminal.print(line.as_bytes())?;
    }
    let outcome = execute::run_line(session, line.strip_suffix('\n').unwrap_or(line));
    Terminal.print_interactive(&outcome)?;
    Ok(outcome)
}

/// Starts the threads that read lines from standard input and messages from the virtual machine.
/// The receiver yields lines and messages in order of arrival.
fn start_inputs(vm: &Vm, home_dir: Option<&Path>) -> (Frontend, Receiver<Input>) {
    let (sender, receiver) = sync_channel(INPUT_QUEUE_MAX);
    let frontend = open_frontend(vm, home_dir, &sender);
    let (vm, message_sender) = (vm.clone(), sender);
    thread::spawn(move || {
        loop {
            let (input, is_last) = match virtual_machine::wait_for_message(&vm) {
                Ok(message) => (Input::Message(message), false),
                Err(error) => (Input::ConnectionLost(error.to_string()), true),
            };
            if message_sender.send(input).is_err() || is_last {
                return;
            }
        }
    });
    (frontend, receiver)
}

/// Selects the frontend for standard input and output, and starts the thread that sends typed lines
/// to `sender`.
fn open_frontend(vm: &Vm, home_dir: Option<&Path>, sender: &SyncSender<Input>) -> Frontend {
    let stdin_is_terminal = io::stdin().is_terminal();
    if stdin_is_terminal && io::stdout().is_terminal() {
        let line_sender = sender.clone();
        let typed_input = move |typed_input| {
            let input = match typed_input {
                EditorInput::Line(line) => Input::Line(line),
                EditorInput::End => Input::End,
            };
            line_sender.send(input).is_ok()
        };
        if let Some(terminal) = LineEditor::start(
            vm,
            home_dir.map(|dir| dir.join(".pvm_history")),
            PROMPT,
            typed_input,
        ) {
            return Frontend::LineEditor(terminal);
        }
    }
    let line_sender = sender.clone();
    thread::spawn(move || read_lines(&mut io::stdin().lock(), &line_sender));
    Frontend::PlainInput {
        input_is_terminal: stdin_is_terminal,
    }
}

/// Sends the lines of `reader`, then [`Input::End`]. A line over the limit is cut, but stays longer
/// than the limit, so that the whole line is refused and no part of it is executed.
fn read_lines(reader: &mut impl BufRead, sender: &SyncSender<Input>) {
    let bytes_max = LINE_BYTES_MAX as u64 + 2;
    loop {
        let mut line = Vec::new();
        let read_result = reader.by_ref().take(bytes_max).read_until(b'\n', &mut line);
        if !read_result.is_ok_and(|bytes| bytes > 0) {
            // Sending fails if the console has ended.
            let _ = sender.send(Input::End);
            return;
        }
        if line.last() != Some(&b'\n') && line.len() as u64 == bytes_max {
            line.push(b'\n');
            let _ = reader.skip_until(b'\n');
        }
        if sender
            .send(Input::Line(String::from_utf8_lossy(&line).into_owned()))
            .is_err()
        {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &[u8]) -> Vec<String> {
        let (sender, receiver) = sync_channel(INPUT_QUEUE_MAX);
        read_lines(&mut io::BufReader::new(text), &sender);
        drop(sender);
        let line = |input| match input {
            Input::Line(line) => line,
            Input::End => "END".to_string(),
            Input::Message(_) | Input::ConnectionLost(_) => panic!("nothing of the kind was sent"),
        };
        receiver.iter().map(line).collect()
    }

    /// Every line is read, including lines after empty lines and a last line without newline.
    #[test]
    fn all_lines_are_read() {
        assert_eq!(
            lines(b"conf\n\n# comment\nps -a"),
            ["conf\n", "\n", "# comment\n", "ps -a", "END"]
        );
        assert_eq!(lines(b""), ["END"]);
        assert_eq!(lines(b"a\xffb\n"), ["a\u{fffd}b\n", "END"]);
    }

    #[test]
    fn overlong_line_stays_one_line() {
        let mut text = vec![b'x'; LINE_BYTES_MAX * 2];
        text.extend_from_slice(b"\nconf\n");
        let lines = lines(&text);
        assert_eq!(lines.len(), 3);
        assert!(lines[0].len() > LINE_BYTES_MAX);
        assert_eq!(lines[1], "conf\n");
    }
}
