//! The program of `cargo xtask package`. The launcher of `cargo xtask` starts it.

use clap::Parser;
use std::process::ExitCode;
use xtask_package::PackageArgs;

#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Command {
    /// Make Debian packages and a tar archive
    Package(PackageArgs),
}

fn main() -> ExitCode {
    let Command::Package(args) = Command::parse();
    match xtask_package::run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
