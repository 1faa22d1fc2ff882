//! `pvm-broker`: the message broker of a session of workers that come and go, and the commands for
//! its users.

mod args;
mod commands;
mod departure_reasons;
mod folder;
mod journal;
mod listener;
mod serve;
mod task_input;

use args::{Args, Command};
use clap::Parser;
use sempa_broker_client::{EXIT_OVER, Error};
use std::process::ExitCode;

fn main() -> ExitCode {
    let result = match Args::parse().command {
        Command::Serve(options) => serve::run(&options),
        Command::Start(options) => commands::start(&options),
        Command::Members(options) => commands::print_members(&options),
        Command::End(options) => commands::end(&options),
        Command::Secret(options) => commands::write_secret(&options),
        Command::Sessions(options) => commands::print_sessions(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvm-broker: {error:#}");
            match error.downcast_ref::<Error>() {
                Some(Error::Over { .. }) => ExitCode::from(EXIT_OVER),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
