//! Shows output that arrives while a line is being edited: above the prompt, in order, without
//! disturbing the line.
//!
//! All output passes through one queue under one lock. At the prompt the editor's thread writes it,
//! otherwise the console's thread. The editor has a printer for such output, but text given to that
//! printer can change places with text that is written directly. The printer is therefore used only
//! to wake the editor:
//!
//! 1. A thread sends a wake sequence through the printer ([`Above::ring`]).
//! 2. The editor clears the rows of its prompt and redraws its line.
//! 3. During the redraw the editor asks its hint for text ([`Turn`]). The hint writes the queued
//!    output to the cleared rows, and the editor draws the line below it.
//!
//! The editor calls `Hint::display` once when it receives a hint and once when it draws the line
//! after a key. Every further call is a redraw on cleared rows, which a wake causes.

use crate::screen::Screen;
use rustyline::ExternalPrinter;
use rustyline::hint::Hint;
use std::cell::Cell;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Bytes of queued output at which the console waits for the editor.
const WAITING_BYTES_MAX: usize = 1 << 20;
/// Wakes the editor. Its printer ends every text with a newline; the cursor-up sequence compensates
/// for it.
const BELL: &str = "\x1b[A\n";
/// Time to wait for a wake in progress, in milliseconds. One that takes longer is queued after
/// another wake, and cannot reach the screen outside the editor.
const BELL_MS_MAX: u64 = 100;

/// The output queue, and the state of the editor.
#[derive(Default)]
pub(crate) struct Above {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Whole lines that wait to be shown.
    waiting: String,
    /// True while the editor reads a line or is about to.
    at_prompt: bool,
    /// True while the editor has the terminal. Only then a wake reaches it; otherwise the printer
    /// writes to the screen.
    listens: bool,
    /// A wake was sent and no redraw has followed yet.
    rung: bool,
    /// A wake is being sent.
    ringing: bool,
    /// The next redraw is caused by a list of candidates, not by a wake.
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

    /// Shows whole lines, above the prompt if there is one. Waits while the queue is full.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
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

    /// Writes queued output directly: the editor has left its prompt, or no more lines are read.
    ///
    /// # Errors
    /// Fails as [`Above::show`] does.
    pub(crate) fn catch_up(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.at_prompt && !state.waiting.is_empty() {
            // Starts below the line that was being edited.
            state.waiting.insert(0, '\n');
        }
        state.write_waiting()
    }

    /// Must be called before the editor reads a line.
    pub(crate) fn enter(&self) {
        self.lock().at_prompt = true;
    }

    /// Must be called when the editor has read its line. From then on the console's thread writes.
    pub(crate) fn leave(&self) {
        let mut state = self.lock();
        (state.at_prompt, state.listens) = (false, false);
        if state.ringing {
            // A wake that misses the editor reaches the screen and must not mix with later output.
            let limit = Duration::from_millis(BELL_MS_MAX);
            let rings = |state: &mut State| state.ringing;
            let waited = self.changed.wait_timeout_while(state, limit, rings);
            (state, _) = waited.expect("no thread panics with this lock");
            state.rung = false;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The editor is about to list candidates.
    pub(crate) fn lists(&self) {
        self.lock().listing = true;
    }

    /// Creates the hint for a line that a key has changed.
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

    /// The editor redraws its line on cleared rows.
    fn turn(&self) {
        let mut state = self.lock();
        state.rung = false;
        if !std::mem::take(&mut state.listing) {
            // If the terminal cannot be written, reading from it fails as well.
            let _ = state.write_waiting();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Wakes the editor whenever output is queued and the editor has the terminal. Returns if the
    /// printer fails.
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

/// A hint that shows nothing. See the module description for how it writes output.
pub(crate) struct Turn {
    above: Arc<Above>,
    asked: Cell<u8>,
}

impl Hint for Turn {
    fn display(&self) -> &str {
        let before = self.asked.get();
        self.asked.set(before.saturating_add(1));
        match before {
            // The editor ignores an empty hint, so it gets a space first.
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
