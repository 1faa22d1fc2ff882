//! The program behind the alias `cargo xtask`: builds xtask with the profile that the requested
//! command needs, and runs xtask.
//!
//! The commands `test` and `campaign` need the whole workspace with profile `ci`. Cargo selects the
//! features of dependencies for all packages of a build together, so a separate build of xtask
//! would compile many dependencies a second time. Therefore this program builds the whole workspace
//! for these commands. This program has no dependencies.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Commands that run tests; they need the profile [`TEST_PROFILE`].
const TEST_COMMANDS: [&str; 2] = ["test", "campaign"];
/// Profile of the build in which the tests run.
const TEST_PROFILE: &str = "ci";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let runs_tests = arguments
        .first()
        .is_some_and(|word| TEST_COMMANDS.iter().any(|test| word == test));
    let mut command = if runs_tests {
        let build_arguments = ["build", "--locked", "--workspace", "--all-targets"];
        let build_status = cargo(&build_arguments)
            .args(["--profile", TEST_PROFILE])
            .status();
        if !build_status.is_ok_and(|status| status.success()) {
            eprintln!("xtask: the build failed");
            return ExitCode::FAILURE;
        }
        Command::new(target_folder().join(TEST_PROFILE).join("xtask"))
    } else {
        cargo(&["run", "--locked", "--release", "--package", "xtask", "--"])
    };
    let error = command.args(arguments).exec();
    eprintln!("xtask: {error}");
    ExitCode::FAILURE
}

/// Returns a cargo command that runs in the project and uses the target folder of this program.
fn cargo(arguments: &[&str]) -> Command {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(arguments)
        .current_dir(project)
        .env("CARGO_TARGET_DIR", target_folder());
    // Cargo sets variables that describe this package. These variables are removed, because build
    // scripts of other packages would treat them as a change.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// Returns the target folder, two levels above this program's file.
fn target_folder() -> PathBuf {
    let own_path = std::env::current_exe().unwrap_or_default();
    own_path
        .ancestors()
        .nth(2)
        .unwrap_or(Path::new("target"))
        .to_path_buf()
}
