//! Errors in the words of a command.

/// Reason why words are not a valid command. The console prints the text without a prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ParseError {
    #[error("{0}: not found")]
    NotFound(String),
    /// Too few or too many words. Contains the command.
    #[error("{0}: wrong #args")]
    WrongArgs(&'static str),
    /// The command has options, but no argument follows the options.
    #[error("incorrect arg count")]
    OnlyOptions,
    /// A single `-`. A shell that takes the `>` of `->` as a redirection leaves only the `-`.
    #[error("unknown flag -; in a shell the option -> needs quotes: '->'")]
    LoneDash,
    /// The command has no such option. Contains the option without its first dash.
    #[error("unknown flag -{0}")]
    UnknownFlag(String),
    /// The word is neither `t40001` nor `40001`.
    #[error("{command}: {word} is not a task id: write it as t40001")]
    NotATid { command: &'static str, word: String },
    /// The word does not have the required type.
    #[error("{command}: {word} is not {expected}")]
    WrongType {
        command: &'static str,
        word: String,
        /// The required type, with an article, such as "a number".
        expected: &'static str,
    },
    /// The argument of `reset` is unknown. Contains the argument.
    #[error("\"{0}\" arg to reset not valid")]
    UnknownResetArg(String),
}
