//! Reads lines at a terminal, with editing, history and completion.
//!
//! The editor runs in its own thread and reads a line only between two commands. If output of tasks
//! arrives while the editor reads, the output is shown [above] the prompt.
//!
//! [above]: crate::output::async_output

use super::completion::{NameSource, complete};
use super::shell_completion::{folder_entries, host_names, task_tids};
use crate::output::async_output::{AsyncOutput, RedrawHint};
use crate::session::CompletionNames;
use libpvm::Vm;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Maximum number of lines in the history.
const HISTORY_LINES_MAX: usize = 1000;
/// Maximum number of completion candidates that are listed without a confirmation by the user.
const CANDIDATES_LISTED_MAX: usize = 100;
/// Offset of the exit status of a program that was killed by a signal. The status is this offset
/// plus the signal's number.
const SIGNAL_EXIT_BASE: i32 = 128;

/// Input from the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EditorInput {
    Line(String),
    /// The end of the input, or an error while a line is read.
    End,
}

/// A terminal with a line editor.
pub(crate) struct LineEditor {
    async_output: Arc<AsyncOutput>,
    prompt_requests: Sender<CompletionNames>,
    original_modes: Termios,
}

impl LineEditor {
    /// Starts the editor thread. The thread calls `on_input` for each line and for the end of the
    /// input. After the end, or if `on_input` returns false, the thread exits.
    ///
    /// Returns `None` if standard input is not a terminal that supports editing.
    pub(crate) fn start(
        vm: &Vm,
        history_path: Option<PathBuf>,
        prompt: &'static str,
        on_input: impl FnMut(EditorInput) -> bool + Send + 'static,
    ) -> Option<Self> {
        let original_modes = tcgetattr(io::stdin()).ok()?;
        let async_output = Arc::new(AsyncOutput::default());
        let mut editor = new_editor(vm, async_output.clone()).ok()?;
        let printer = editor.create_external_printer().ok()?;
        if let Some(path) = &history_path {
            // The history file may be missing. The editor then creates the file when a line is
            // added.
            let _ = editor.load_history(path);
        }
        restore_modes_on_signal(original_modes.clone());
        tcsetattr(
            io::stdin(),
            SetArg::TCSANOW,
            &modes_between_prompts(original_modes.clone()),
        )
        .ok()?;
        let (prompt_requests, request_receiver) = channel();
        let reader = LineReader {
            editor,
            history_path,
            prompt,
            async_output: async_output.clone(),
        };
        thread::spawn(move || reader.serve_prompts(&request_receiver, on_input));
        let waker = async_output.clone();
        thread::spawn(move || waker.run_waker(printer));
        Some(Self {
            async_output,
            prompt_requests,
            original_modes,
        })
    }

    /// Requests that the editor thread read the next line, without waiting for the line. The thread
    /// offers `names` for completion.
    pub(crate) fn start_prompt(&self, names: CompletionNames) {
        self.async_output.begin_prompt();
        // Sending fails only if the editor thread has exited, and then no line is needed.
        let _ = self.prompt_requests.send(names);
    }

    /// Shows `bytes`, which must be whole lines. If the editor shows a prompt, the lines appear
    /// above the prompt.
    ///
    /// # Errors
    /// Fails if the terminal cannot be written.
    pub(crate) fn show(&self, bytes: &[u8]) -> io::Result<()> {
        self.async_output.show(bytes)
    }

    /// Shows queued output. The console must call this function before the console executes a line,
    /// because the queued output arrived before the line.
    ///
    /// # Errors
    /// Fails as [`LineEditor::show`] does.
    pub(crate) fn flush_pending(&self) -> io::Result<()> {
        self.async_output.flush_pending()
    }

    /// Restores the terminal and shows queued output. No more lines are read after this call.
    ///
    /// # Errors
    /// Fails as [`LineEditor::show`] does.
    pub(crate) fn close(&self) -> io::Result<()> {
        self.restore_modes();
        self.async_output.flush_pending()
    }

    /// Restores the terminal modes. May be called while the editor reads a line.
    fn restore_modes(&self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.original_modes);
    }
}

impl Drop for LineEditor {
    fn drop(&mut self) {
        self.restore_modes();
    }
}

/// Returns the terminal modes between two prompts. Echo and line mode are off, so that keys typed
/// ahead do not appear in the middle of output. The editor shows these keys when the editor reads
/// them.
fn modes_between_prompts(mut modes: Termios) -> Termios {
    modes
        .local_flags
        .remove(LocalFlags::ECHO | LocalFlags::ICANON);
    modes.control_chars[SpecialCharacterIndices::VMIN as usize] = 1;
    modes.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
    modes
}

/// Starts a thread that restores the terminal modes when SIGTERM, SIGHUP or SIGQUIT ends the
/// console. Threads that start later inherit the signal mask, so only the new thread receives these
/// signals.
fn restore_modes_on_signal(original_modes: Termios) {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        signals.add(signal);
    }
    if signals.thread_block().is_ok() {
        thread::spawn(move || {
            let signal = signals.wait();
            let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &original_modes);
            std::process::exit(signal.map_or(1, |signal| SIGNAL_EXIT_BASE + signal as i32));
        });
    }
}

fn new_editor(
    vm: &Vm,
    async_output: Arc<AsyncOutput>,
) -> rustyline::Result<Editor<EditorHelper, FileHistory>> {
    let config = Config::builder()
        .max_history_size(HISTORY_LINES_MAX)?
        .history_ignore_dups(true)?
        .history_ignore_space(true)
        .completion_type(rustyline::CompletionType::List)
        .completion_prompt_limit(CANDIDATES_LISTED_MAX)
        // Each pasted line is a command, as if it had been typed.
        .bracketed_paste(false)
        .build();
    let mut editor = Editor::with_config(config)?;
    editor.set_helper(Some(EditorHelper {
        vm: vm.clone(),
        session_names: CompletionNames::default(),
        async_output,
    }));
    Ok(editor)
}

struct LineReader {
    editor: Editor<EditorHelper, FileHistory>,
    history_path: Option<PathBuf>,
    prompt: &'static str,
    async_output: Arc<AsyncOutput>,
}

impl LineReader {
    fn serve_prompts(
        mut self,
        requests: &Receiver<CompletionNames>,
        mut on_input: impl FnMut(EditorInput) -> bool,
    ) {
        while let Ok(names) = requests.recv() {
            if let Some(helper) = self.editor.helper_mut() {
                helper.session_names = names;
            }
            let input = self.read_line();
            self.async_output.end_prompt();
            let is_end = input == EditorInput::End;
            if !on_input(input) || is_end {
                return;
            }
        }
    }

    fn read_line(&mut self) -> EditorInput {
        loop {
            match self.editor.readline(self.prompt) {
                Ok(line) => {
                    self.add_to_history(&line);
                    return EditorInput::Line(line);
                }
                // Ctrl-C discards the line. After a change of the window size, the line is read
                // again.
                Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => {}
                Err(_) => return EditorInput::End,
            }
        }
    }

    fn add_to_history(&mut self, line: &str) {
        let is_new = self.editor.add_history_entry(line).unwrap_or(false);
        if let (true, Some(path)) = (is_new, &self.history_path) {
            // If the file cannot be written, the history is lost when the console ends.
            let _ = self.editor.append_history(path);
        }
    }
}

/// The editor's helper: supplies completion candidates and hints.
struct EditorHelper {
    vm: Vm,
    session_names: CompletionNames,
    async_output: Arc<AsyncOutput>,
}

impl NameSource for EditorHelper {
    fn session_names(&self) -> &CompletionNames {
        &self.session_names
    }

    fn hosts(&self) -> Vec<String> {
        host_names(&self.vm)
    }

    fn tids(&self) -> Vec<String> {
        task_tids(&self.vm)
    }

    fn folder_entries(&self, dir: &Path) -> Vec<(String, bool)> {
        folder_entries(dir)
    }
}

impl Completer for EditorHelper {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        self.async_output.on_list_candidates();
        Ok(complete(&line[..pos], self))
    }
}

impl Hinter for EditorHelper {
    type Hint = RedrawHint;

    fn hint(&self, _: &str, _: usize, _: &Context<'_>) -> Option<RedrawHint> {
        Some(self.async_output.new_hint())
    }
}

impl Highlighter for EditorHelper {}
impl Validator for EditorHelper {}
impl Helper for EditorHelper {}
