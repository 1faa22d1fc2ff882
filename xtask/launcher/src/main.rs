//! What the alias `cargo xtask` runs: builds xtask with the profile that its command needs.
//!
//! The commands `test` and `campaign` need the whole workspace with profile `ci`. Cargo chooses
//! features of dependencies for all packages of a build together, so a build of xtask alone would
//! compile many dependencies a second time. This program has no dependencies and avoids that.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Commands that run tests, and their profile.
const TESTS: [&str; 2] = ["test", "campaign"];
const PROFILE: &str = "ci";

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let runs_tests = words
        .first()
        .is_some_and(|word| TESTS.iter().any(|test| word == test));
    let mut command = if runs_tests {
        let build = ["build", "--locked", "--workspace", "--all-targets"];
        let built = cargo(&build).args(["--profile", PROFILE]).status();
        if !built.is_ok_and(|status| status.success()) {
            eprintln!("xtask: the build failed");
            return ExitCode::FAILURE;
        }
        Command::new(target().join(PROFILE).join("xtask"))
    } else {
        cargo(&["run", "--locked", "--release", "--package", "xtask", "--"])
    };
    let error = command.args(words).exec();
    eprintln!("xtask: {error}");
    ExitCode::FAILURE
}

/// A command of cargo in this project, with the target folder of this program.
fn cargo(words: &[&str]) -> Command {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(words)
        .current_dir(project)
        .env("CARGO_TARGET_DIR", target());
    // Variables that describe this package look like a change to build scripts of others.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// The target folder: two above this program.
fn target() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.ancestors()
        .nth(2)
        .unwrap_or(Path::new("target"))
        .to_path_buf()
}
