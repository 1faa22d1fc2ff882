//! Prints results on standard output and standard error. An error of standard output is returned to
//! the caller; errors of standard error are ignored.

use crate::outcome::Outcome;
use std::io::{self, Write};

/// Standard output and standard error of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terminal;

impl Terminal {
    /// Writes to standard output and flushes the output.
    ///
    /// # Errors
    /// Fails if standard output cannot be written, for instance because the reader has closed the
    /// pipe.
    pub(crate) fn print(self, bytes: &[u8]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// Writes one line to standard error. Errors are ignored.
    pub(crate) fn print_error(self, line: &str) {
        let _ = writeln!(io::stderr().lock(), "{line}");
    }

    /// Prints the outcome of a command that was typed into the console. A refusal goes to standard
    /// output.
    ///
    /// # Errors
    /// Fails as [`Terminal::print`] does.
    pub(crate) fn print_interactive(self, outcome: &Outcome) -> io::Result<()> {
        self.print_results(outcome, outcome.prints_json)?;
        if let Some(refusal) = &outcome.refusal {
            self.print(format!("{refusal}\n").as_bytes())?;
        }
        outcome
            .errors
            .iter()
            .for_each(|line| self.print_error(line));
        Ok(())
    }

    /// Prints the outcome of a command that was given on the command line. A refusal goes to
    /// standard error.
    ///
    /// # Errors
    /// Fails as [`Terminal::print`] does.
    pub(crate) fn print_oneshot(self, outcome: &Outcome, prints_json: bool) -> io::Result<()> {
        self.print_results(outcome, prints_json)?;
        outcome
            .refusal
            .iter()
            .chain(&outcome.errors)
            .for_each(|line| self.print_error(line));
        Ok(())
    }

    fn print_results(self, outcome: &Outcome, prints_json: bool) -> io::Result<()> {
        if prints_json {
            outcome
                .json_values
                .iter()
                .try_for_each(|value| self.print(format!("{value}\n").as_bytes()))
        } else {
            self.print(outcome.text.as_bytes())
        }
    }
}
