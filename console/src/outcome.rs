//! The result of a command.

use serde_json::Value;

/// Action of the interactive session after a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AfterCommand {
    /// Reads the next line.
    #[default]
    ReadLine,
    /// Ends the console; the virtual machine keeps running.
    Quit,
    /// Halts the virtual machine.
    Halt,
}

/// The result of a command.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Text for standard output.
    pub(crate) text: String,
    /// Values for standard output in place of `text` when JSON is requested.
    pub(crate) json: Vec<Value>,
    /// True if the line requested JSON.
    pub(crate) as_json: bool,
    /// Reason why the command was not executed, without newline. The interactive console prints the
    /// reason on standard output, as PVM does; a command from a shell prints it on standard error.
    pub(crate) refusal: Option<String>,
    /// Lines for standard error, without newlines.
    pub(crate) errors: Vec<String>,
    /// True if any part of the request failed.
    pub(crate) failed: bool,
    pub(crate) after_command: AfterCommand,
}

impl Outcome {
    pub(crate) fn from_text(text: String) -> Outcome {
        Outcome {
            text,
            ..Outcome::default()
        }
    }

    /// Creates a result with output; `failed` is true if part of the request failed.
    pub(crate) fn with_values(text: String, json: Value, failed: bool) -> Outcome {
        Outcome {
            text,
            json: vec![json],
            failed,
            ..Outcome::default()
        }
    }

    pub(crate) fn refused(line: impl std::fmt::Display) -> Outcome {
        Outcome {
            refusal: Some(line.to_string()),
            failed: true,
            ..Outcome::default()
        }
    }

    pub(crate) fn error(line: impl std::fmt::Display) -> Outcome {
        Outcome {
            errors: vec![line.to_string()],
            failed: true,
            ..Outcome::default()
        }
    }
}
