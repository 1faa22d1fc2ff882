//! Where results go. A reader that has gone away ends the program quietly, as for any other command.

use crate::session::Outcome;
use std::io::{self, Write};

/// Standard output and standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen;

impl Screen {
    /// Writes to standard output at once.
    ///
    /// # Errors
    /// When nobody reads it any more.
    pub(crate) fn print(self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// Writes one line to standard error; what cannot be written there is lost.
    pub(crate) fn complain(self, line: &str) {
        let _ = writeln!(io::stderr().lock(), "{line}");
    }

    /// The outcome of a command that a person typed.
    ///
    /// # Errors
    /// As [`Screen::print`].
    pub(crate) fn show(self, outcome: &Outcome) -> io::Result<()> {
        self.results(outcome, outcome.as_json)?;
        if let Some(refusal) = &outcome.refusal {
            self.print(format!("{refusal}\n").as_bytes())?;
        }
        outcome
            .complaints
            .iter()
            .for_each(|line| self.complain(line));
        Ok(())
    }

    /// The outcome of a command given to the program: results on standard output, the rest on standard error.
    ///
    /// # Errors
    /// As [`Screen::print`].
    pub(crate) fn report(self, outcome: &Outcome, json: bool) -> io::Result<()> {
        self.results(outcome, json)?;
        outcome
            .refusal
            .iter()
            .chain(&outcome.complaints)
            .for_each(|line| self.complain(line));
        Ok(())
    }

    fn results(self, outcome: &Outcome, json: bool) -> io::Result<()> {
        if json {
            outcome
                .json
                .iter()
                .try_for_each(|value| self.print(format!("{value}\n").as_bytes()))
        } else {
            self.print(outcome.text.as_bytes())
        }
    }
}
