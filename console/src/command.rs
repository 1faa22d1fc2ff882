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

/// An entry of the table of commands: all that parser, help and completion need.
pub(crate) struct CommandSpec {
    /// The name as typed.
    pub(crate) name: &'static str,
    /// One line for the list of commands.
    pub(crate) summary: &'static str,
    /// The lines of the help text below the summary: syntax, options and details.
    pub(crate) detail: &'static str,
    /// Parses the words after the command.
    pub(crate) parse: fn(&[String]) -> Result<ParsedCommand, ParseError>,
    /// False if `help` omits the command from its list, because it only inspects the daemon or the
    /// console.
    pub(crate) is_listed: bool,
    /// True if the command has output that a program can read.
    pub(crate) has_json: bool,
    /// Returns how many of the words after the command belong to the command itself. The rest
    /// belongs to a program, an alias or a variable, and may contain `--json` as an ordinary word.
    pub(crate) own_words: fn(&[String]) -> usize,
    pub(crate) completion: Completion,
}

impl CommandSpec {
    /// Default values for the fields that are alike in most commands. Each command must set name,
    /// texts and parser.
    pub(crate) const DEFAULT: CommandSpec = CommandSpec {
        name: "",
        summary: "",
        detail: "",
        parse: |_| Err(ParseError::WrongArgs("")),
        is_listed: true,
        has_json: true,
        own_words: |args| args.len(),
        completion: Completion::None,
    };
}

/// Kind of completions for the words after a command.
#[derive(Clone, Copy)]
pub(crate) enum Completion {
    None,
    /// Only the first word after the command is completed.
    FirstWord(WordKind),
    EveryWord(WordKind),
    /// The kind depends on the words. The function gets the words between the command and the word
    /// to complete, and that word. It returns the number of bytes in front of the name that the
    /// word contains, and the kind of the name.
    ByWords(fn(&[&str], &str) -> (usize, WordKind)),
}

/// The kind of name that a word of a command is.
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
    OnVm(Box<dyn VmCommand>),
}

impl ParsedCommand {
    pub(crate) fn local(command: impl LocalCommand + 'static) -> ParsedCommand {
        ParsedCommand::Local(Box::new(command))
    }

    pub(crate) fn on_vm(command: impl VmCommand + 'static) -> ParsedCommand {
        ParsedCommand::OnVm(Box::new(command))
    }
}

/// State that a command without a virtual machine can use.
pub(crate) struct LocalContext {
    pub(crate) commands: CommandTable,
    /// True if the command was given on the program's command line, with `--json`.
    pub(crate) json: bool,
}

/// A command that needs no virtual machine.
pub(crate) trait LocalCommand: Debug {
    fn run(&self, context: &LocalContext) -> Outcome;
}

/// Options of the program's command line for a command that is given there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShellOptions {
    pub(crate) json: bool,
    /// Set in a detached drain process: the console that requested the drain, or [`Tid::NONE`]
    /// for a shell.
    pub(crate) requester: Option<Tid>,
}

/// A command that uses the virtual machine.
pub(crate) trait VmCommand: Debug {
    /// Executes the command in a session.
    ///
    /// # Errors
    /// Fails if the virtual machine refuses a request of the command, or has ended.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error>;

    /// Executes the command for a shell before this process joins the virtual machine: refuses it,
    /// or passes it to another process. Returns `None` if this process must join.
    ///
    /// # Errors
    /// Fails if standard output cannot be written.
    fn run_before_joining(&self, _options: ShellOptions) -> io::Result<Option<Outcome>> {
        Ok(None)
    }

    /// Executes the command for a shell, if it prints while it runs. Returns `None` if
    /// [`VmCommand::run`] must execute it.
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
