//! Results of commands, and their exit statuses.

use std::process::ExitCode;

/// Exit status of wrong options: EX_USAGE of sysexits.h.
const USAGE_STATUS: u8 = 64;
/// Exit status of a command that only root may use: EX_NOPERM of sysexits.h.
const NOT_ROOT_STATUS: u8 = 77;

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Something was not done, or `doctor` has warnings.
    NotDone,
    /// A finding of `doctor` is a failure.
    Failures,
    /// The command is for root only. Nothing was done.
    NotRoot,
}

impl Outcome {
    pub(crate) fn exit_code(self) -> ExitCode {
        ExitCode::from(match self {
            Self::Done => 0,
            Self::NotDone => 1,
            Self::Failures => 2,
            Self::NotRoot => NOT_ROOT_STATUS,
        })
    }
}

/// Prints the error of the command line, or the requested help.
pub(crate) fn usage_exit(error: &clap::Error) -> ExitCode {
    // A closed output leaves nothing to report to.
    let _ = error.print();
    match error.use_stderr() {
        true => ExitCode::from(USAGE_STATUS),
        false => ExitCode::SUCCESS,
    }
}

/// Returns an outcome if the user is not root, and prints why `command` needs root.
pub(crate) fn refuse_unless_root(command: &str, reason: &str) -> Option<Outcome> {
    if nix::unistd::geteuid().is_root() {
        return None;
    }
    eprintln!("pvm-admin: {command} is for root only, because {reason}");
    Some(Outcome::NotRoot)
}
