//! Errors of the words of a command.

/// Why words are not a valid command. The text is printed as it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ParseError {
    #[error("{0}: not found")]
    NotFound(String),
    /// Too few or too many words.
    #[error("{0}: wrong #args")]
    WrongArgs(&'static str),
    /// Options without an argument after them.
    #[error("incorrect arg count")]
    OnlyOptions,
    /// A single `-`: what remains of `->` after a shell took the `>` as a redirection.
    #[error("unknown flag -; in a shell the option -> needs quotes: '->'")]
    LoneDash,
    /// The command has no such option.
    #[error("unknown flag -{0}")]
    UnknownFlag(String),
    /// The word is neither `t40001` nor `40001`.
    #[error("{command}: {word} is not a task id: write it as t40001")]
    NotATid { command: &'static str, word: String },
    /// The word is not of the kind that is required.
    #[error("{command}: {word} is not {expected}")]
    WrongType {
        command: &'static str,
        word: String,
        /// The required argument, with an article, such as "a number".
        expected: &'static str,
    },
    /// The argument of `reset` is unknown.
    #[error("\"{0}\" arg to reset not valid")]
    Reset(String),
}
