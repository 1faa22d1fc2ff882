//! Reads lines at a terminal, with editing, history and completion.
//!
//! The editor runs in its own thread and is at the prompt only between two commands. Output of
//! tasks that arrives during that time is shown [above] the prompt.
//!
//! [above]: crate::above

use crate::above::{Above, Turn};
use crate::complete::{self, Known};
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
const ENDED_BY_SIGNAL: i32 = 128;

/// Input from the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    Line(String),
    /// The end of the input.
    End,
}

/// A terminal with a line editor.
pub(crate) struct Terminal {
    above: Arc<Above>,
    go: Sender<Known>,
    before: Termios,
}

impl Terminal {
    /// Starts the editor, which passes input to `typed`. Returns `None` if standard input is not a
    /// terminal that supports editing.
    pub(crate) fn open(
        vm: &Vm,
        history: Option<PathBuf>,
        prompt: &'static str,
        typed: impl FnMut(Typed) -> bool + Send + 'static,
    ) -> Option<Terminal> {
        let before = tcgetattr(io::stdin()).ok()?;
        let above = Arc::new(Above::default());
        let mut editor = editor(vm, above.clone()).ok()?;
        let printer = editor.create_external_printer().ok()?;
        if let Some(path) = &history {
            // A missing history file is created later.
            let _ = editor.load_history(path);
        }
        restore_at_signals(before.clone());
        tcsetattr(io::stdin(), SetArg::TCSANOW, &quiet(before.clone())).ok()?;
        let (go, known) = channel();
        let reader = Reader {
            editor,
            history,
            prompt,
            above: above.clone(),
        };
        thread::spawn(move || reader.run(&known, typed));
        let rung = above.clone();
        thread::spawn(move || rung.ring(printer));
        Some(Terminal { above, go, before })
    }

    /// Lets the editor read the next line.
    pub(crate) fn prompt(&self, known: Known) {
        self.above.enter();
        // The reader thread ends only with the process.
        let _ = self.go.send(known);
    }

    /// Shows whole lines of output, above the prompt if there is one.
    ///
    /// # Errors
    /// Fails if the terminal cannot be written.
    pub(crate) fn show(&self, bytes: &[u8]) -> io::Result<()> {
        self.above.show(bytes)
    }

    /// Shows output that arrived before the line that was read.
    ///
    /// # Errors
    /// Fails as [`Terminal::show`] does.
    pub(crate) fn catch_up(&self) -> io::Result<()> {
        self.above.catch_up()
    }

    /// Ends the reading of lines and restores the terminal.
    ///
    /// # Errors
    /// Fails as [`Terminal::show`] does.
    pub(crate) fn close(&self) -> io::Result<()> {
        self.restore();
        self.above.catch_up()
    }

    /// Restores the terminal modes, even while the editor is at its prompt: no more lines are read.
    fn restore(&self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.before);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.restore();
    }
}

/// Returns the terminal modes between two prompts. Echo and line mode are off: keys typed ahead
/// wait for the editor, which shows them when it reads them instead of in the middle of output.
fn quiet(mut modes: Termios) -> Termios {
    modes
        .local_flags
        .remove(LocalFlags::ECHO | LocalFlags::ICANON);
    modes.control_chars[SpecialCharacterIndices::VMIN as usize] = 1;
    modes.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
    modes
}

/// Restores the terminal modes when a signal ends the console. Later threads inherit the mask, so
/// only the thread started here receives these signals.
fn restore_at_signals(before: Termios) {
    let mut ending = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT] {
        ending.add(signal);
    }
    if ending.thread_block().is_ok() {
        thread::spawn(move || {
            let signal = ending.wait();
            let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &before);
            std::process::exit(signal.map_or(1, |signal| ENDED_BY_SIGNAL + signal as i32));
        });
    }
}

fn editor(vm: &Vm, above: Arc<Above>) -> rustyline::Result<Editor<Candidates, FileHistory>> {
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
    editor.set_helper(Some(Candidates {
        vm: vm.clone(),
        known: Known::default(),
        above,
    }));
    Ok(editor)
}

struct Reader {
    editor: Editor<Candidates, FileHistory>,
    history: Option<PathBuf>,
    prompt: &'static str,
    above: Arc<Above>,
}

impl Reader {
    fn run(mut self, known: &Receiver<Known>, mut typed: impl FnMut(Typed) -> bool) {
        while let Ok(known) = known.recv() {
            if let Some(helper) = self.editor.helper_mut() {
                helper.known = known;
            }
            let read = self.read();
            self.above.leave();
            let end = read == Typed::End;
            if !typed(read) || end {
                return;
            }
        }
    }

    fn read(&mut self) -> Typed {
        loop {
            match self.editor.readline(self.prompt) {
                Ok(line) => {
                    self.remember(&line);
                    return Typed::Line(line);
                }
                // Ctrl-C discards the line; a resized window is redrawn.
                Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => {}
                Err(_) => return Typed::End,
            }
        }
    }

    fn remember(&mut self, line: &str) {
        let new = self.editor.add_history_entry(line).unwrap_or(false);
        if let (true, Some(path)) = (new, &self.history) {
            // If the file cannot be written, the history lasts as long as the console.
            let _ = self.editor.append_history(path);
        }
    }
}

/// The editor's helper: supplies completion candidates and hints.
struct Candidates {
    vm: Vm,
    known: Known,
    above: Arc<Above>,
}

impl complete::World for Candidates {
    fn known(&self) -> &Known {
        &self.known
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

    fn entries(&self, dir: &Path) -> Vec<(String, bool)> {
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

impl Completer for Candidates {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        self.above.lists();
        Ok(complete::complete(&line[..pos], self))
    }
}

impl Hinter for Candidates {
    type Hint = Turn;

    fn hint(&self, _: &str, _: usize, _: &Context<'_>) -> Option<Turn> {
        Some(self.above.hint())
    }
}

impl Highlighter for Candidates {}
impl Validator for Candidates {}
impl Helper for Candidates {}
