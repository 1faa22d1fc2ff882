//! Options and arguments of all commands.

use crate::doctor::{DoctorOptions, ProbeCommand};
use crate::drain::DrainOptions;
use crate::limits::LimitsOptions;
use crate::site_key::SiteKeyCommand;
use crate::status::StatusOptions;
use clap::{Parser, Subcommand};

/// Manages Sempa on this machine, for all users and all their virtual machines.
#[derive(Debug, Parser)]
#[command(name = "pvm-admin", version)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Create, show and replace the key that seals the images of tasks
    #[command(subcommand)]
    SiteKey(SiteKeyCommand),
    /// Show the virtual machines, tasks and users of this machine, and the health of the service
    Status(StatusOptions),
    /// Find out what prevents migrations and checkpoints here, and between here and other hosts
    Doctor(DoctorOptions),
    /// Move all guests away from this machine, and let no guest come until 'drain --off'
    Drain(DrainOptions),
    /// Show and change the limits of users
    Limits(LimitsOptions),
    /// Test one ability of this machine; 'doctor' uses it
    #[command(subcommand, hide = true)]
    Probe(ProbeCommand),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Args::command().debug_assert();
    }

    /// Commands with missing or contradictory arguments are refused.
    #[test]
    fn wrong_command_lines_are_refused() {
        for line in [
            "",
            "site-key",
            "site-key destroy",
            "drain now",
            "drain --off --reason x",
            "limits alice --group students",
            "limits --set tasks",
            "doctor --port 0",
            "doctor --port 99999",
            "doctor -oProxyCommand=x",
        ] {
            let args = ["pvm-admin"].into_iter().chain(line.split_whitespace());
            assert!(Args::try_parse_from(args).is_err(), "{line}");
        }
    }
}
