//! The result of a command.

use serde_json::Value;

/// Action of the interactive session after a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AfterCommand {
    /// Reads the next line.
    #[default]
    ReadLine,
    /// Ends the console. The virtual machine continues to run.
    Quit,
    /// Halts the virtual machine.
    Halt,
}

/// The output and the errors of a command, and the action that follows the command.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Text for standard output.
    pub(crate) text: String,
    /// JSON values that are printed in place of `text` if JSON is requested.
    pub(crate) json_values: Vec<Value>,
    /// True if the command line requested JSON.
    pub(crate) prints_json: bool,
    /// Reason why the command was not executed, without newline. The interactive console prints the
    /// reason on standard output, as PVM does. If a shell has given the command, the reason is
    /// printed on standard error.
    pub(crate) refusal: Option<String>,
    /// Lines for standard error, without newlines.
    pub(crate) errors: Vec<String>,
    /// True if any part of the request failed.
    pub(crate) failed: bool,
    pub(crate) after_command: AfterCommand,
}

impl Outcome {
    pub(crate) fn from_text(text: String) -> Self {
        Self {
            text,
            ..Self::default()
        }
    }

    /// Creates an outcome with output. `failed` is true if part of the request failed.
    pub(crate) fn with_json(text: String, json: Value, failed: bool) -> Self {
        Self {
            text,
            json_values: vec![json],
            failed,
            ..Self::default()
        }
    }

    pub(crate) fn from_refusal(line: impl std::fmt::Display) -> Self {
        Self {
            refusal: Some(line.to_string()),
            failed: true,
            ..Self::default()
        }
    }

    pub(crate) fn from_error(line: impl std::fmt::Display) -> Self {
        Self {
            errors: vec![line.to_string()],
            failed: true,
            ..Self::default()
        }
    }
}
