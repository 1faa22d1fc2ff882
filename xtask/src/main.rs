//! `cargo xtask`: commands for developers of the project, and the demo.

mod bench;
mod bench_broker;
mod bench_load;
mod bench_owners;
mod bench_virtual;
mod campaign;
mod conformance;
mod demo;
mod demo_output;
mod one_host_demo;
mod qap_demo;
mod runner;
mod setup;
mod skips;
mod test;
mod tidy;
mod timeline;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use xtask_install::InstallCommand;

#[derive(Parser)]
#[command(
    about = "Builds, shows, tests and installs Sempa",
    arg_required_else_help = true
)]
struct XtaskArgs {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
    /// Show an owner who logs in: four hosts on this machine, a running PVM program
    Demo {
        /// The JSON file for the timeline
        #[arg(long, default_value = "target/demo.json")]
        json: PathBuf,
        /// Another demo: `qap` proves an optimum with a master-worker run, while owners log in and
        /// the master is killed
        #[arg(long, value_parser = ["owner", "qap"], default_value = "owner")]
        only: String,
    },
    /// Set up, build, install under target/ and run all tests
    Test {
        /// Arguments for the test runner, such as the name of a test
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Check the language and the shape of the sources
    Tidy,
    /// Run checks that take hours: full matrices, soak, lies, conformance, fuzzing, limits;
    /// resumable
    Campaign(campaign::CampaignArgs),
    #[command(flatten)]
    Install(InstallCommand),
    /// Compare PVM 3.4.6 and Sempa with the conformance suite (tests/conformance)
    Conformance {
        /// `pvm3`: Debian's PVM; `sempa`: Sempa, with programs built for it and with programs built
        /// for Debian's PVM
        #[arg(long, default_value = "both", value_parser = ["pvm3", "sempa", "both"])]
        against: String,
        /// Use the programs in the prefix; neither build nor install anything
        #[arg(long)]
        as_installed: bool,
        /// Parts of program names; all programs if empty
        programs: Vec<String>,
    },
    /// Measure single layers, or compare the running system with PVM 3.4.6, Open MPI and MPICH
    Bench(bench::BenchArgs),
}

fn main() -> ExitCode {
    let command_result = match XtaskArgs::parse().command {
        XtaskCommand::Demo { json, only } => match only.as_str() {
            "qap" => qap_demo::run(&json),
            _ => demo::run(&json),
        },
        XtaskCommand::Test { words } => test::run(&words),
        XtaskCommand::Tidy => tidy::run_checks(),
        XtaskCommand::Campaign(words) => campaign::run(&words),
        XtaskCommand::Install(command) => command.run().map(|()| true),
        XtaskCommand::Conformance {
            against,
            as_installed,
            programs,
        } => conformance::run(&against, &programs, as_installed),
        XtaskCommand::Bench(words) => bench::run(&words),
    };
    match command_result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
