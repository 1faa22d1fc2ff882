//! Shows output that arrives while a line is being edited. The output appears above the prompt, in
//! order, and does not change the line.
//!
//! All output passes through one queue under one lock. At the prompt the editor's thread writes the
//! queued output, otherwise the console's thread. The editor has a printer for such output, but the
//! order of text from that printer and text that is written directly is undefined. The printer is
//! therefore used only to wake the editor:
//!
//! 1. A thread sends a wake sequence through the printer ([`AsyncOutput::run_waker`]).
//! 2. The editor clears the rows of its prompt and redraws its line.
//! 3. During the redraw the editor asks its hint for text ([`RedrawHint`]). The hint writes the
//!    queued output to the cleared rows, and the editor draws the line below the output.
//!
//! The editor calls `Hint::display` once when it receives a hint and once when it draws the line
//! after a key. Every further call belongs to a redraw on cleared rows, which a wake causes.

use super::terminal::Terminal;
use rustyline::ExternalPrinter;
use rustyline::hint::Hint;
use std::cell::Cell;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Maximum number of bytes of queued output. Above this limit the console waits for the editor.
const PENDING_BYTES_MAX: usize = 1 << 20;
/// Text that wakes the editor when the editor's printer receives it. The printer ends every text
/// with a newline; the cursor-up sequence compensates for the newline.
const WAKE_SEQUENCE: &str = "\x1b[A\n";
/// Time limit for a wake in progress, in milliseconds. A wake that takes longer is queued after
/// another wake, so its sequence cannot reach the screen outside the editor.
const WAKE_TIMEOUT_MS: u64 = 100;

/// The output queue, and the state of the editor.
#[derive(Default)]
pub(crate) struct AsyncOutput {
    state: Mutex<OutputState>,
    state_changed: Condvar,
}

#[derive(Default)]
struct OutputState {
    /// Whole lines that wait to be shown.
    pending_output: String,
    /// True from [`AsyncOutput::begin_prompt`] until the editor has read a line.
    at_prompt: bool,
    /// True while the editor controls the terminal. Otherwise a wake does not reach the editor, and
    /// the printer writes to the screen.
    has_terminal: bool,
    /// True if a wake was sent and no redraw has followed yet.
    wake_pending: bool,
    /// True while a wake is being sent.
    wake_in_progress: bool,
    /// True if the next redraw is caused by a list of candidates, not by a wake.
    listing_candidates: bool,
}

impl OutputState {
    fn write_pending(&mut self) -> io::Result<()> {
        if self.pending_output.is_empty() {
            Ok(())
        } else {
            Terminal.print(std::mem::take(&mut self.pending_output).as_bytes())
        }
    }
}

impl AsyncOutput {
    fn lock_state(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().expect("no thread panics with this lock")
    }

    fn wait_for_change<'a>(
        &self,
        state: MutexGuard<'a, OutputState>,
    ) -> MutexGuard<'a, OutputState> {
        self.state_changed
            .wait(state)
            .expect("no thread panics with this lock")
    }

    /// Shows whole lines. If the editor shows a prompt, the lines appear above the prompt. Waits
    /// while the queue is full.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
    pub(crate) fn show(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.lock_state();
        while state.pending_output.len() > PENDING_BYTES_MAX && state.at_prompt {
            state = self.wait_for_change(state);
        }
        state
            .pending_output
            .push_str(&String::from_utf8_lossy(bytes));
        self.state_changed.notify_all();
        if state.at_prompt {
            Ok(())
        } else {
            state.write_pending()
        }
    }

    /// Writes queued output directly, after the editor has left its prompt or after the last line.
    ///
    /// # Errors
    /// Fails as [`AsyncOutput::show`] does.
    pub(crate) fn flush_pending(&self) -> io::Result<()> {
        let mut state = self.lock_state();
        if state.at_prompt && !state.pending_output.is_empty() {
            // The output starts below the line that was being edited.
            state.pending_output.insert(0, '\n');
        }
        state.write_pending()
    }

    /// Must be called before the editor reads a line.
    pub(crate) fn begin_prompt(&self) {
        self.lock_state().at_prompt = true;
    }

    /// Must be called when the editor has read its line. Waits for a wake in progress. After this
    /// call the console's thread writes output.
    pub(crate) fn end_prompt(&self) {
        let mut state = self.lock_state();
        (state.at_prompt, state.has_terminal) = (false, false);
        if state.wake_in_progress {
            // A wake that misses the editor reaches the screen and must not mix with later output.
            let timeout = Duration::from_millis(WAKE_TIMEOUT_MS);
            let is_waking = |state: &mut OutputState| state.wake_in_progress;
            let wait_result = self
                .state_changed
                .wait_timeout_while(state, timeout, is_waking);
            (state, _) = wait_result.expect("no thread panics with this lock");
            state.wake_pending = false;
        }
        drop(state);
        self.state_changed.notify_all();
    }

    /// Must be called before the editor lists candidates.
    pub(crate) fn on_list_candidates(&self) {
        self.lock_state().listing_candidates = true;
    }

    /// Creates the hint for a line that a key has changed.
    pub(crate) fn new_hint(self: &Arc<Self>) -> RedrawHint {
        let mut state = self.lock_state();
        (state.has_terminal, state.listing_candidates) = (true, false);
        drop(state);
        self.state_changed.notify_all();
        RedrawHint {
            output: self.clone(),
            display_calls: Cell::new(0),
        }
    }

    /// Writes queued output to the rows that the editor has cleared for a redraw.
    fn on_redraw(&self) {
        let mut state = self.lock_state();
        state.wake_pending = false;
        if !std::mem::take(&mut state.listing_candidates) {
            // If the terminal cannot be written, reading from the terminal fails as well.
            let _ = state.write_pending();
        }
        drop(state);
        self.state_changed.notify_all();
    }

    /// Wakes the editor whenever output is queued and the editor controls the terminal. Returns if
    /// the printer fails.
    pub(crate) fn run_waker(&self, mut printer: impl ExternalPrinter) {
        loop {
            let mut state = self.lock_state();
            while state.pending_output.is_empty() || !state.has_terminal || state.wake_pending {
                state = self.wait_for_change(state);
            }
            (state.wake_pending, state.wake_in_progress) = (true, true);
            drop(state);
            let print_result = printer.print(WAKE_SEQUENCE.to_string());
            self.lock_state().wake_in_progress = false;
            self.state_changed.notify_all();
            if print_result.is_err() {
                return;
            }
        }
    }
}

/// A hint without text. When the editor asks for the text, the hint writes queued output; see the
/// module description.
pub(crate) struct RedrawHint {
    output: Arc<AsyncOutput>,
    display_calls: Cell<u8>,
}

impl Hint for RedrawHint {
    fn display(&self) -> &str {
        let previous_call_count = self.display_calls.get();
        self.display_calls
            .set(previous_call_count.saturating_add(1));
        match previous_call_count {
            // The editor ignores an empty hint, so the first call returns a space.
            0 => " ",
            1 => "",
            _ => {
                self.output.on_redraw();
                ""
            }
        }
    }

    fn completion(&self) -> Option<&str> {
        None
    }
}
