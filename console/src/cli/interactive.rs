//! The interactive console. It reads commands from `$HOME/.pvmrc`, then from its input, until
//! `quit`, `halt` or the end of the input.

use super::editor::{EditorInput, LineEditor};
use super::execute;
use super::words::LINE_BYTES_MAX;
use crate::daemon::halt::{LocalDaemon, halt};
use crate::outcome::AfterCommand;
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
    /// A line, with its newline if it has one.
    Line(String),
    /// The end of the input.
    End,
    Message(Message),
    /// The connection to the daemon is lost, for this reason.
    Lost(String),
}

/// How the console reads commands and shows output.
enum Frontend {
    /// A terminal with line editing.
    LineEditor(LineEditor),
    /// A file, a pipe, or a terminal without line editing. If `echo` is true, the console prints
    /// each line before it executes the line.
    Plain { echo: bool },
}

impl Frontend {
    fn prompt(&self, session: &Session) -> io::Result<()> {
        match self {
            Frontend::LineEditor(terminal) => {
                terminal.prompt(session.completion_names());
                Ok(())
            }
            Frontend::Plain { .. } => Terminal.print(PROMPT.as_bytes()),
        }
    }

    /// Shows output of jobs and announcements, which arrive at any time.
    fn show(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Frontend::LineEditor(terminal) => terminal.show(bytes),
            Frontend::Plain { .. } => Terminal.print(bytes),
        }
    }

    /// Shows queued output. Must be called before a line that was read is executed, because the
    /// output arrived before the line.
    fn flush_pending(&self) -> io::Result<()> {
        match self {
            Frontend::LineEditor(terminal) => terminal.flush_pending(),
            Frontend::Plain { .. } => Ok(()),
        }
    }

    fn echo(&self) -> bool {
        matches!(self, Frontend::Plain { echo: true })
    }

    /// Restores the terminal; no more commands are read.
    fn close(&self) -> io::Result<()> {
        match self {
            Frontend::LineEditor(terminal) => terminal.close(),
            Frontend::Plain { .. } => Ok(()),
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
    let rc = home_dir.as_deref().map(|dir| dir.join(".pvmrc"));
    let session: &mut Session = &mut Session::new(vm.clone(), env);
    if let Err(error) = session.register_interactive() {
        Terminal.print_error(&format!("pvm: {error}"));
        return Ok(ExitCode::FAILURE);
    }
    let mut next = AfterCommand::ReadLine;
    let lines = rc
        .and_then(|path| std::fs::read(path).ok())
        .unwrap_or_default();
    for line in String::from_utf8_lossy(&lines).split_inclusive('\n') {
        if next == AfterCommand::ReadLine {
            next = run_line(session, line, true)?;
        }
    }
    if next == AfterCommand::ReadLine {
        match run_commands(vm, session, home_dir.as_deref())? {
            Some(end) => next = end,
            None => return Ok(ExitCode::FAILURE),
        }
    }
    if next == AfterCommand::Halt {
        return Ok(halt(vm, &mut daemon));
    }
    Terminal.print(b"\nConsole: exit handler called\npvmd still running.\n")?;
    // The virtual machine removes this task when its connection closes, even if `exit` fails.
    let _ = vm.exit();
    Ok(ExitCode::SUCCESS)
}

/// Reads and executes commands until one of them ends the console. Returns `None` if the connection
/// to the daemon is lost.
fn run_commands(
    vm: &Vm,
    session: &mut Session,
    home: Option<&Path>,
) -> io::Result<Option<AfterCommand>> {
    let (frontend, inputs) = start_inputs(vm, home);
    frontend.prompt(session)?;
    // The loop never ends because of a closed channel: each thread sends the reason of its end
    // first.
    while let Ok(input) = inputs.recv() {
        match input {
            Input::Line(line) => {
                frontend.flush_pending()?;
                match run_line(session, &line, frontend.echo())? {
                    AfterCommand::ReadLine => frontend.prompt(session)?,
                    end => {
                        frontend.close()?;
                        return Ok(Some(end));
                    }
                }
            }
            Input::End => {
                frontend.close()?;
                Terminal.print(b"quit\n")?;
                return Ok(Some(AfterCommand::Quit));
            }
            Input::Message(message) => frontend.show(&session.handle_message(&message))?,
            Input::Lost(why) => {
                frontend.close()?;
                Terminal.print_error(&format!("\npvm: the virtual machine has ended: {why}"));
                return Ok(None);
            }
        }
    }
    Ok(Some(AfterCommand::Quit))
}

/// Executes a line. If `echo` is true and the line ends with a newline, prints the line first, as
/// PVM's console does.
fn run_line(session: &mut Session, line: &str, echo: bool) -> io::Result<AfterCommand> {
    if echo && line.ends_with('\n') {
        Terminal.print(line.as_bytes())?;
    }
    let outcome = execute::run_line(session, line.strip_suffix('\n').unwrap_or(line));
    Terminal.print_interactive(&outcome)?;
    Ok(outcome.after_command)
}

/// Starts the threads that read lines from standard input and messages from the virtual machine.
/// The receiver yields lines and messages in order of arrival.
fn start_inputs(vm: &Vm, home: Option<&Path>) -> (Frontend, Receiver<Input>) {
    let (sender, receiver) = sync_channel(INPUT_QUEUE_MAX);
    let frontend = open_frontend(vm, home, &sender);
    let (vm, messages) = (vm.clone(), sender);
    thread::spawn(move || {
        loop {
            let (input, last) = match virtual_machine::receive(&vm) {
                Ok(message) => (Input::Message(message), false),
                Err(error) => (Input::Lost(error.to_string()), true),
            };
            if messages.send(input).is_err() || last {
                return;
            }
        }
    });
    (frontend, receiver)
}

/// Selects the frontend for standard input and output. Typed lines go to `sender`.
fn open_frontend(vm: &Vm, home: Option<&Path>, sender: &SyncSender<Input>) -> Frontend {
    let stdin_is_terminal = io::stdin().is_terminal();
    if stdin_is_terminal && io::stdout().is_terminal() {
        let lines = sender.clone();
        let typed = move |typed| {
            let input = match typed {
                EditorInput::Line(line) => Input::Line(line),
                EditorInput::End => Input::End,
            };
            lines.send(input).is_ok()
        };
        if let Some(terminal) =
            LineEditor::open(vm, home.map(|dir| dir.join(".pvm_history")), PROMPT, typed)
        {
            return Frontend::LineEditor(terminal);
        }
    }
    let lines = sender.clone();
    thread::spawn(move || read_lines(&mut io::stdin().lock(), &lines));
    // A terminal has shown the line when it was typed.
    Frontend::Plain {
        echo: !stdin_is_terminal,
    }
}

/// Sends the lines of `from`, then [`Input::End`]. A line over the limit is cut, but stays longer
/// than the limit, so that the whole line is refused and no part of it is executed.
fn read_lines(from: &mut impl BufRead, to: &SyncSender<Input>) {
    let limit = LINE_BYTES_MAX as u64 + 2;
    loop {
        let mut line = Vec::new();
        let read = from.by_ref().take(limit).read_until(b'\n', &mut line);
        if !read.is_ok_and(|bytes| bytes > 0) {
            // The console may have ended already.
            let _ = to.send(Input::End);
            return;
        }
        if line.last() != Some(&b'\n') && line.len() as u64 == limit {
            line.push(b'\n');
            let _ = from.skip_until(b'\n');
        }
        if to
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
            Input::Message(_) | Input::Lost(_) => panic!("nothing of the kind was sent"),
        };
        receiver.iter().map(line).collect()
    }

    /// Every line is read, including lines after empty ones and a last line without newline.
    #[test]
    fn all_lines_are_read() {
        assert_eq!(
            lines(b"conf\n\n# comment\nps -a"),
            ["conf\n", "\n", "# comment\n", "ps -a", "END"]
        );
        assert_eq!(lines(b""), ["END"]);
        assert_eq!(lines(b"a\xffb\n"), ["a\u{fffd}b\n", "END"]);
    }

    /// A line over the limit stays one line.
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
