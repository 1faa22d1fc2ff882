//! `pvm-admin`: manages Sempa on one machine, for all users and all their virtual machines.
//!
//! Each command is in a module of its own. A command returns an [`Outcome`], which decides the exit
//! status.

mod cli;
mod doctor;
mod drain;
mod limits;
mod outcome;
mod process;
mod service;
mod site_key;
mod status;
mod table;
mod users;

use clap::Parser;
use cli::{Args, Command};
use outcome::Outcome;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return outcome::usage_exit(&error),
    };
    match run(args) {
        Ok(outcome) => outcome.exit_code(),
        Err(error) => {
            eprintln!("pvm-admin: {error:#}");
            Outcome::NotDone.exit_code()
        }
    }
}

fn run(args: Args) -> anyhow::Result<Outcome> {
    match args.command {
        Command::SiteKey(command) => site_key::run(&command),
        Command::Status(options) => status::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Drain(options) => drain::run(&options),
        Command::Limits(options) => limits::run(&options),
        Command::Probe(probe) => doctor::run_probe(&probe),
    }
}
