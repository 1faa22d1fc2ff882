//! Output that comes while a line is typed: it is shown above the line, in order, and the line stays.
//!
//! All of it passes through one queue under one lock, and one of two hands writes it: at the prompt the editor's thread,
//! otherwise the console's. The editor has a printer for such output, but pieces given to it can change places with what
//! is written beside it. So it gets only bells, and the text is written by the editor's thread when it has heard one: the
//! rows of the prompt are cleared then, and it draws them again afterwards.
//!
//! How the text gets its turn: the editor asks each hint for its text once when it gets it and once when it draws the line
//! because of a key. Every further time it draws the line on cleared rows, which a bell makes it do.

use crate::screen::Screen;
use rustyline::ExternalPrinter;
use rustyline::hint::Hint;
use std::cell::Cell;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Bytes of output that wait for the editor before the console takes no more.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Rings for the editor. Its printer ends every text with a newline; the step up makes up for that.
const BELL: &str = "\x1b[A\n";
/// A bell that takes longer waits behind another one, and can no more be heard outside of the editor.
const BELL_MS_MAX: u64 = 100;

/// The output, and how far the editor is.
#[derive(Default)]
pub(crate) struct Above {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whole lines that wait to be shown.
    waiting: String,
    /// The editor reads a line, or is about to.
    at_prompt: bool,
    /// It has the terminal: a bell reaches it and not the screen.
    listens: bool,
    /// A bell has been rung and not been heard.
    rung: bool,
    /// A bell is being rung.
    ringing: bool,
    /// The line is drawn next below a list of candidates, and not because of a bell.
    listing: bool,
}

impl State {
    fn write_waiting(&mut self) -> io::Result<()> {
        if self.waiting.is_empty() {
            Ok(())
        } else {
            Screen.print(std::mem::take(&mut self.waiting).as_bytes())
        }
    }
}

impl Above {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics with this lock")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .expect("no thread panics with this lock")
    }

    /// Shows whole lines: above the prompt if there is one. Waits when too much waits already.
    ///
    /// # Errors
    /// When standard output cannot be written.
    pub(crate) fn show(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        while state.waiting.len() > WAITING_BYTES_MAX && state.at_prompt {
            state = self.wait(state);
        }
        state.waiting.push_str(&String::from_utf8_lossy(bytes));
        self.changed.notify_all();
        if state.at_prompt {
            Ok(())
        } else {
            state.write_waiting()
        }
    }

    /// Shows what the editor has not come to: it has left its prompt, or nobody waits for it any more.
    ///
    /// # Errors
    /// As [`Above::show`].
    pub(crate) fn catch_up(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.at_prompt && !state.waiting.is_empty() {
            // Behind what was being typed.
            state.waiting.insert(0, '\n');
        }
        state.write_waiting()
    }

    /// The editor is about to read a line.
    pub(crate) fn enter(&self) {
        self.lock().at_prompt = true;
    }

    /// The editor has read its line; from now on the console's thread writes.
    pub(crate) fn leave(&self) {
        let mut state = self.lock();
        (state.at_prompt, state.listens) = (false, false);
        if state.ringing {
            // It may miss the editor and get on the screen, where it must not disturb what comes next.
            let limit = Duration::from_millis(BELL_MS_MAX);
            let rings = |state: &mut State| state.ringing;
            let waited = self.changed.wait_timeout_while(state, limit, rings);
            (state, _) = waited.expect("no thread panics with this lock");
            state.rung = false;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The editor lists candidates.
    pub(crate) fn lists(&self) {
        self.lock().listing = true;
    }

    /// What the editor gets as a hint when a key has changed the line.
    pub(crate) fn hint(self: &Arc<Self>) -> Turn {
        let mut state = self.lock();
        (state.listens, state.listing) = (true, false);
        drop(state);
        self.changed.notify_all();
        Turn {
            above: self.clone(),
            asked: Cell::new(0),
        }
    }

    /// The editor draws its line on cleared rows.
    fn turn(&self) {
        let mut state = self.lock();
        state.rung = false;
        if !std::mem::take(&mut state.listing) {
            // A terminal that cannot be written ends the reading as well.
            let _ = state.write_waiting();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Rings whenever something waits and the editor listens.
    pub(crate) fn ring(&self, mut printer: impl ExternalPrinter) {
        loop {
            let mut state = self.lock();
            while state.waiting.is_empty() || !state.listens || state.rung {
                state = self.wait(state);
            }
            (state.rung, state.ringing) = (true, true);
            drop(state);
            let rung = printer.print(BELL.to_string());
            self.lock().ringing = false;
            self.changed.notify_all();
            if rung.is_err() {
                return;
            }
        }
    }
}

/// A hint that shows nothing; see the description of the module.
pub(crate) struct Turn {
    above: Arc<Above>,
    asked: Cell<u8>,
}

impl Hint for Turn {
    fn display(&self) -> &str {
        let before = self.asked.get();
        self.asked.set(before.saturating_add(1));
        match before {
            // An empty one would be taken for none.
            0 => " ",
            1 => "",
            _ => {
                self.above.turn();
                ""
            }
        }
    }

    fn completion(&self) -> Option<&str> {
        None
    }
}
