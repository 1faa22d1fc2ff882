//! The commands of this project's developers and of everybody who wants to see it work: `cargo
//! xtask demo` and friends.

mod bench;
mod bench_load;
mod bench_owners;
mod bench_virtual;
mod campaign;
mod conformance;
mod demo;
mod demo_alone;
mod install;
mod runner;
mod setup;
mod skips;
mod test;
mod tidy;
mod timeline;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    about = "Builds, shows, tests and installs Sempa",
    arg_required_else_help = true
)]
struct Words {
    #[command(subcommand)]
    command: What,
}

#[derive(Subcommand)]
enum What {
    /// Four hosts on this machine, a running PVM program, an owner who comes back
    Demo {
        /// Where the timeline goes as JSON
        #[arg(long, default_value = "target/demo.json")]
        json: PathBuf,
    },
    /// Set up, build, install under target/ and run all tests
    Test {
        /// Words for the test runner, for instance the name of a test
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Check the language and the shape of the sources
    Tidy,
    /// Run what takes hours: full matrices, soak, lies, conformance, fuzzing, limits; resumable
    Campaign(campaign::Words),
    /// Build and lay the programs out under a folder
    Install {
        /// The folder: DIR/bin, DIR/lib, DIR/include
        #[arg(long)]
        prefix: PathBuf,
    },
    /// Get a CRIU that works on this kernel
    Criu {
        /// Where it goes
        #[arg(long, default_value = setup::CRIU_PREFIX)]
        prefix: PathBuf,
    },
    /// The sentences of tests/conformance on PVM 3.4.6 and on ours, side by side
    Conformance {
        /// `pvm3`: Debian's; `sempa`: ours, with programs compiled for ours and with programs
        /// compiled for Debian's
        #[arg(long, default_value = "both", value_parser = ["pvm3", "sempa", "both"])]
        against: String,
        /// Neither build nor install anything: take what is in the prefix
        #[arg(long)]
        as_installed: bool,
        /// Parts of names of programs; none: all
        programs: Vec<String>,
    },
    /// Measure: single layers, or the running system beside PVM 3.4.6, Open MPI and MPICH
    Bench(bench::Words),
}

fn main() -> ExitCode {
    let done = match Words::parse().command {
        What::Demo { json } => demo::run(&json),
        What::Test { words } => test::run(&words),
        What::Tidy => tidy::run(),
        What::Campaign(words) => campaign::run(&words),
        What::Install { prefix } => put_in_place(&prefix),
        What::Criu { prefix } => setup::criu(&prefix).map(|()| true),
        What::Conformance {
            against,
            as_installed,
            programs,
        } => conformance::run(&against, &programs, as_installed),
        What::Bench(words) => bench::run(&words),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn put_in_place(prefix: &std::path::Path) -> Result<bool> {
    install::build(install::RELEASE, install::Parts::Programs)?;
    install::lay_out(prefix, install::RELEASE)?;
    println!(
        "installed under {}: put {0}/bin on PATH and {0}/lib in LD_LIBRARY_PATH",
        prefix.display()
    );
    Ok(true)
}
