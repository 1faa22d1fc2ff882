//! The entry of a command in the table of commands, and the parsed form of a command.
//!
//! Each command has a file in `commands/` that defines a [`CommandSpec`] and a type for the parsed
//! command. The type implements [`VmCommand`], or [`LocalCommand`] if it needs no virtual machine.

use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::{Error, Vm};
use sempa_proto::Tid;
use std::fmt::Debug;
use std::io;

/// The list of all commands.
pub(crate) type CommandTable = &'static [&'static CommandSpec];

/// An entry of the table of commands. Contains what the parser, `help` and the completion need.
pub(crate) struct CommandSpec {
    /// Name that the user types.
    pub(crate) name: &'static str,
    /// Summary in one line, for the list of commands.
    pub(crate) summary: &'static str,
    /// The lines of the help text below the summary: syntax, options and details.
    pub(crate) detail: &'static str,
    /// Parses the words after the command's name.
    pub(crate) parse: fn(&[String]) -> Result<ParsedCommand, ParseError>,
    /// False if `help` omits the command from its list, because the command only inspects the
    /// daemon or the console.
    pub(crate) is_listed: bool,
    /// True if the command has output that a program can read.
    pub(crate) has_json: bool,
    /// Returns how many of the words after the command's name are options of the command. The
    /// remaining words belong to a program, an alias or a variable, and may contain `--json` as an
    /// ordinary word.
    pub(crate) own_word_count: fn(&[String]) -> usize,
    pub(crate) completion: Completion,
}

impl CommandSpec {
    /// Default values of the fields, which most commands use. Each command must set `name`,
    /// `summary`, `detail` and `parse`.
    pub(crate) const DEFAULT: Self = Self {
        name: "",
        summary: "",
        detail: "",
        parse: |_| Err(ParseError::WrongArgs("")),
        is_listed: true,
        has_json: true,
        own_word_count: |args| args.len(),
        completion: Completion::None,
    };
}

/// Which words after a command are completed, and to which kind of name.
#[derive(Clone, Copy)]
pub(crate) enum Completion {
    None,
    /// Only the first word after the command is completed.
    FirstWord(WordKind),
    EveryWord(WordKind),
    /// The kind depends on the words. The function receives the words between the command and the
    /// word to complete, and the word to complete. The function returns the length in bytes of the
    /// part of that word before the name, and the kind of the name.
    WordDependent(fn(&[&str], &str) -> (usize, WordKind)),
}

/// Kind of name that a word of a command stands for.
#[derive(Clone, Copy)]
pub(crate) enum WordKind {
    Unknown,
    Command,
    Alias,
    Variable,
    Host,
    Tid,
    File,
    /// One of the words that the function returns.
    OneOf(fn() -> Vec<String>),
}

/// A parsed command with its arguments.
#[derive(Debug)]
pub(crate) enum ParsedCommand {
    Local(Box<dyn LocalCommand>),
    Vm(Box<dyn VmCommand>),
}

impl ParsedCommand {
    pub(crate) fn local_command(command: impl LocalCommand + 'static) -> Self {
        Self::Local(Box::new(command))
    }

    pub(crate) fn vm_command(command: impl VmCommand + 'static) -> Self {
        Self::Vm(Box::new(command))
    }
}

/// Input of a command that needs no virtual machine.
pub(crate) struct LocalContext {
    pub(crate) commands: CommandTable,
    /// True if the command was given on the program's command line, with `--json`.
    pub(crate) prints_json: bool,
}

/// A command that needs no virtual machine.
pub(crate) trait LocalCommand: Debug {
    fn run(&self, context: &LocalContext) -> Outcome;
}

/// Options of the program's command line that change how a command runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShellOptions {
    pub(crate) prints_json: bool,
    /// In a detached drain process, the console that requested the drain, or [`Tid::NONE`] if a
    /// shell requested it. `None` in any other process.
    pub(crate) requester: Option<Tid>,
}

/// A command that uses the virtual machine.
pub(crate) trait VmCommand: Debug {
    /// Executes the command in a session.
    ///
    /// # Errors
    /// Fails if the virtual machine refuses a request of the command, or has ended.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error>;

    /// Handles a command that a shell has given, before this process joins the virtual machine:
    /// refuses the command, or passes it to another process. Returns `None` if this process must
    /// join.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
    fn run_before_joining(&self, _options: ShellOptions) -> io::Result<Option<Outcome>> {
        Ok(None)
    }

    /// Executes a command that a shell has given and that prints while the command runs. Returns
    /// `None` if the caller must execute [`VmCommand::run`] instead.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
    fn run_for_shell(&self, _vm: &Vm, _options: ShellOptions) -> io::Result<Option<Outcome>> {
        Ok(None)
    }

    /// True for the command that ends the virtual machine.
    fn halts_vm(&self) -> bool {
        false
    }
}
