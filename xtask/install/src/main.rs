//! Runs the commands of `cargo xtask` that install Sempa. The launcher of `cargo xtask` starts this
//! program.

use clap::Parser;
use std::process::ExitCode;
use xtask_install::InstallCommand;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Installs Sempa",
    arg_required_else_help = true
)]
struct InstallArgs {
    #[command(subcommand)]
    command: InstallCommand,
}

fn main() -> ExitCode {
    match InstallArgs::parse().command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
