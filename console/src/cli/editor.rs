//! Reads lines at a terminal, with editing, history and completion.
//!
//! The editor runs in its own thread and reads a line only between two commands. Output of tasks
//! that arrives while the editor reads is shown [above] the prompt.
//!
//! [above]: crate::output::async_output

use super::completion::{NameSource, complete};
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
use sempa_proto::Tid;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// Number of lines kept in the history.
const HISTORY_LINES_MAX: usize = 1000;
/// Number of candidates listed without a confirmation.
const CANDIDATES_LISTED_MAX: usize = 100;
/// Exit status of a program killed by a signal is this plus the signal's number.
const SIGNAL_EXIT_BASE: i32 = 128;

/// Input from the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EditorInput {
    Line(String),
    /// The end of the input.
    End,
}

/// A terminal with a line editor.
pub(crate) struct LineEditor {
    async_output: Arc<AsyncOutput>,
    prompt_requests: Sender<CompletionNames>,
    original_modes: Termios,
}

impl LineEditor {
    /// Starts the editor, which calls `on_input` for each line and for the end of the input, until
    /// `on_input` returns false. Returns `None` if standard input is not a terminal that supports
    /// editing.
    pub(crate) fn open(
        vm: &Vm,
        history: Option<PathBuf>,
        prompt: &'static str,
        on_input: impl FnMut(EditorInput) -> bool + Send + 'static,
    ) -> Option<LineEditor> {
        let original_modes = tcgetattr(io::stdin()).ok()?;
        let async_output = Arc::new(AsyncOutput::default());
        let mut editor = new_editor(vm, async_output.clone()).ok()?;
        let printer = editor.create_external_printer().ok()?;
        if let Some(path) = &history {
            // A missing history file is created later.
            let _ = editor.load_history(path);
        }
        restore_on_signal(original_modes.clone());
        tcsetattr(
            io::stdin(),
            SetArg::TCSANOW,
            &modes_between_prompts(original_modes.clone()),
        )
        .ok()?;
        let (prompt_requests, requests) = channel();
        let reader = Reader {
            editor,
            history,
            prompt,
            async_output: async_output.clone(),
        };
        thread::spawn(move || reader.run(&requests, on_input));
        let waker = async_output.clone();
        thread::spawn(move || waker.run_waker(printer));
        Some(LineEditor {
            async_output,
            prompt_requests,
            original_modes,
        })
    }

    /// Requests that the editor read the next line. `names` are offered for completion.
    pub(crate) fn prompt(&self, names: CompletionNames) {
        self.async_output.begin_prompt();
        // The reader thread ends only with the process.
        let _ = self.prompt_requests.send(names);
    }

    /// Shows whole lines of output, above the prompt if there is one.
    ///
    /// # Errors
    /// Fails if the terminal cannot be written.
    pub(crate) fn show(&self, bytes: &[u8]) -> io::Result<()> {
        self.async_output.show(bytes)
    }

    /// Shows queued output. Must be called before a line that was read is executed, because the
    /// output arrived before the line.
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
        self.restore();
        self.async_output.flush_pending()
    }

    /// Restores the terminal modes, also while the editor reads a line.
    fn restore(&self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.original_modes);
    }
}

impl Drop for LineEditor {
    fn drop(&mut self) {
        self.restore();
    }
}

/// Returns the terminal modes between two prompts. Echo and line mode are off, so that keys typed
/// ahead do not appear in the middle of output; the editor shows them when it reads them.
fn modes_between_prompts(mut modes: Termios) -> Termios {
    modes
        .local_flags
        .remove(LocalFlags::ECHO | LocalFlags::ICANON);
    modes.control_chars[SpecialCharacterIndices::VMIN as usize] = 1;
    modes.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
    modes
}

/// Restores the terminal modes when a signal ends the console. Later threads inherit the mask, so
/// only the thread started here receives these signals.
fn restore_on_signal(original_modes: Termios) {
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

struct Reader {
    editor: Editor<EditorHelper, FileHistory>,
    history: Option<PathBuf>,
    prompt: &'static str,
    async_output: Arc<AsyncOutput>,
}

impl Reader {
    fn run(
        mut self,
        requests: &Receiver<CompletionNames>,
        mut on_input: impl FnMut(EditorInput) -> bool,
    ) {
        while let Ok(names) = requests.recv() {
            if let Some(helper) = self.editor.helper_mut() {
                helper.session_names = names;
            }
            let read = self.read();
            self.async_output.end_prompt();
            let end = read == EditorInput::End;
            if !on_input(read) || end {
                return;
            }
        }
    }

    fn read(&mut self) -> EditorInput {
        loop {
            match self.editor.readline(self.prompt) {
                Ok(line) => {
                    self.add_to_history(&line);
                    return EditorInput::Line(line);
                }
                // Ctrl-C discards the line; a resized window is redrawn.
                Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => {}
                Err(_) => return EditorInput::End,
            }
        }
    }

    fn add_to_history(&mut self, line: &str) {
        let new = self.editor.add_history_entry(line).unwrap_or(false);
        if let (true, Some(path)) = (new, &self.history) {
            // If the file cannot be written, the history lasts as long as the console.
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
        self.vm
            .config()
            .map(|table| table.hosts.into_iter().map(|host| host.name).collect())
            .unwrap_or_default()
    }

    fn tids(&self) -> Vec<String> {
        let tasks = self.vm.tasks(Tid::NONE).unwrap_or_default();
        tasks
            .into_iter()
            .filter(|task| task.tid != self.vm.tid())
            .map(|task| task.tid.to_string())
            .collect()
    }

    fn folder_entries(&self, dir: &Path) -> Vec<(String, bool)> {
        let Ok(entries) = std::fs::read_dir(dir) else {
            return Vec::new();
        };
        let named = entries.flatten().filter_map(|entry| {
            let is_dir = entry.path().is_dir();
            entry
                .file_name()
                .into_string()
                .ok()
                .map(|name| (name, is_dir))
        });
        named.collect()
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
