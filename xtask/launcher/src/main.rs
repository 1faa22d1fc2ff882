//! The program behind the alias `cargo xtask`: builds the program that implements the requested
//! command, with the profile that the command needs, and runs this program.
//!
//! Cargo selects the features of dependencies for all packages of a build together, so a separate
//! build of one package would compile many dependencies a second time. Therefore this program
//! builds together what a command needs:
//!
//! * `install` and `criu`: the installed programs and the package `xtask-install`, but no package
//!   of tests or benchmarks.
//! * `test` and `campaign`: the whole workspace with profile `ci`.
//! * `package`: the package `xtask-package`, which builds the rest in a target folder of its own.
//! * other commands: xtask.
//!
//! This program has no dependencies.

#[path = "../../install/src/packages.rs"]
mod packages;

use packages::INSTALLED_PACKAGES;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Profile of the build in which the tests run.
const TEST_PROFILE: &str = "ci";
/// Profile of all other builds.
const RELEASE_PROFILE: &str = "release";
/// The package, and its program, with the commands that install Sempa.
const INSTALL_PACKAGE: &str = "xtask-install";

/// The package, and its program, that makes packages for distributions.
const PACKAGE_PACKAGE: &str = "xtask-package";

/// A build of cargo, and the program of this build that implements a command.
struct CommandBuild {
    profile: &'static str,
    /// Arguments of cargo that select the packages.
    packages: Vec<&'static str>,
    program: &'static str,
}

impl CommandBuild {
    /// Returns the build for a command of `cargo xtask`.
    fn for_command(name: &str) -> Self {
        match name {
            "install" | "criu" => Self {
                profile: RELEASE_PROFILE,
                packages: INSTALLED_PACKAGES
                    .into_iter()
                    .chain([INSTALL_PACKAGE])
                    .flat_map(|package| ["--package", package])
                    .collect(),
                program: INSTALL_PACKAGE,
            },
            "package" => Self {
                profile: RELEASE_PROFILE,
                packages: vec!["--package", PACKAGE_PACKAGE],
                program: PACKAGE_PACKAGE,
            },
            "test" | "campaign" => Self {
                profile: TEST_PROFILE,
                packages: vec!["--workspace", "--all-targets"],
                program: "xtask",
            },
            _ => Self {
                profile: RELEASE_PROFILE,
                packages: vec!["--package", "xtask"],
                program: "xtask",
            },
        }
    }

    /// Builds and runs the program with these arguments. Returns only if this fails.
    fn run(&self, arguments: &[OsString]) -> String {
        let build_status = cargo(&["build", "--locked", "--profile", self.profile])
            .args(&self.packages)
            .status();
        match build_status {
            Ok(status) if status.success() => {}
            Ok(_) => return "the build failed".to_string(),
            Err(error) => return format!("cargo cannot be executed: {error}"),
        }
        let program = target_folder().join(self.profile).join(self.program);
        let error = Command::new(&program).args(arguments).exec();
        format!("{} cannot be executed: {error}", program.display())
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let command_name = arguments
        .first()
        .map_or_else(String::new, |word| word.to_string_lossy().into_owned());
    let failure = CommandBuild::for_command(&command_name).run(&arguments);
    eprintln!("xtask: {failure}");
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
