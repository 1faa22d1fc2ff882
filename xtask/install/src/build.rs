//! Builds parts of the workspace with cargo.

use crate::packages::INSTALLED_PACKAGES;
use crate::project_folder;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the build profile for the programs that users install and benchmarks measure.
pub const RELEASE_PROFILE: &str = "release";

/// Name of the build profile for the installed `libpvm3`: the C library alone, with link-time
/// optimization.
const C_LIBRARY_PROFILE: &str = "release-library";

/// Returns the folder of built programs: the folder of the running program, or its parent if that
/// folder is `deps`.
fn build_folder() -> Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let folder = executable.parent().unwrap_or(Path::new("/"));
    Ok(if folder.ends_with("deps") {
        folder.parent().unwrap_or(folder).to_path_buf()
    } else {
        folder.to_path_buf()
    })
}

/// Returns cargo's target folder of this build: two levels above the running program.
///
/// # Errors
/// The path of the running program is not known.
pub fn target_folder() -> Result<PathBuf> {
    let build_folder = build_folder()?;
    Ok(build_folder.parent().unwrap_or(&build_folder).to_path_buf())
}

/// Returns the profile with which this program was built.
///
/// # Errors
/// The path of the running program is not known.
pub fn build_profile() -> Result<String> {
    let build_folder = build_folder()?;
    let folder_name = build_folder
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    Ok(match &*folder_name {
        "debug" => "dev".to_string(),
        other => other.to_string(),
    })
}

/// Returns the name of the folder below the target folder that contains the programs of a profile.
fn profile_folder(profile: &str) -> &str {
    if profile == "dev" { "debug" } else { profile }
}

/// Returns a command that runs cargo in the project, with the target folder of this build.
///
/// # Errors
/// The path of the running program is not known.
pub fn cargo_command(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(arguments)
        .current_dir(project_folder())
        .env("CARGO_TARGET_DIR", target_folder()?);
    // Cargo sets variables that describe this package. These variables are removed: build scripts
    // of other packages would treat them as a change, and cargo would rebuild those packages and
    // all their dependents each time.
    let describes_package = |name: &OsString| {
        ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|variable_prefix| name.to_string_lossy().starts_with(variable_prefix))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| describes_package(name)) {
        command.env_remove(name);
    }
    Ok(command)
}

/// The parts of the workspace that are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildParts {
    /// The installed programs and libraries.
    Programs,
    /// The programs, the libraries, and the programs that run the hosts of a testbed.
    ProgramsAndHosts,
    /// The whole workspace with its tests.
    Tests,
}

/// Builds parts of the workspace with a profile.
///
/// # Errors
/// The build fails.
pub fn build(profile: &str, parts: BuildParts) -> Result<()> {
    let mut command = cargo_command(&["build", "--locked", "--profile", profile])?;
    if parts == BuildParts::Tests {
        command.args(["--workspace", "--all-targets"]);
    } else {
        command.args(INSTALLED_PACKAGES.iter().flat_map(|name| ["-p", name]));
    }
    if parts == BuildParts::ProgramsAndHosts {
        command.args(["-p", "sempa-tests"]);
    }
    if !command.status().context("cargo")?.success() {
        bail!("the build failed");
    }
    if profile == RELEASE_PROFILE {
        build_c_library()?;
    }
    Ok(())
}

/// Builds `libpvm3.so` and `libpvm3.a` as users install them.
///
/// Cargo ignores link-time optimization if the crate is also built as a Rust library, as tests and
/// benchmarks need it. This build therefore requests the other two types only.
///
/// # Errors
/// The build fails.
pub fn build_c_library() -> Result<()> {
    let mut command = c_library_command()?;
    if !command.status().context("cargo")?.success() {
        bail!("the build of libpvm3 failed");
    }
    Ok(())
}

fn c_library_command() -> Result<Command> {
    let mut command = cargo_command(&["rustc", "--locked", "--lib", "-p", "pvm3-capi"])?;
    command.args(["--profile", C_LIBRARY_PROFILE]);
    command.args(["--crate-type", "cdylib", "--crate-type", "staticlib"]);
    Ok(command)
}

/// Builds the installed programs and libraries, and the packages in `additional_packages`, into a
/// target folder of their own, with these flags for rustc. Builds with other flags therefore stay
/// up to date.
///
/// # Errors
/// The build fails.
pub fn build_into(
    target_folder: &Path,
    rustc_flags: &str,
    additional_packages: &[&str],
) -> Result<BuiltFolders> {
    let mut programs = cargo_command(&["build", "--locked", "--profile", RELEASE_PROFILE])?;
    let packages = INSTALLED_PACKAGES.iter().chain(additional_packages);
    programs.args(packages.flat_map(|name| ["-p", name]));
    for mut command in [programs, c_library_command()?] {
        let status = command
            .env("CARGO_TARGET_DIR", target_folder)
            .env("RUSTFLAGS", rustc_flags)
            .status()
            .context("cargo")?;
        if !status.success() {
            bail!("the build failed");
        }
    }
    Ok(BuiltFolders::below(target_folder, RELEASE_PROFILE))
}

/// Folders that contain the results of a build.
#[derive(Clone, Debug)]
pub struct BuiltFolders {
    /// Folder of the programs and of all libraries except `libpvm3`.
    pub programs: PathBuf,
    /// Folder of `libpvm3`, which a release builds with another profile.
    pub c_library: PathBuf,
}

impl BuiltFolders {
    /// Returns the folders after [`build`] with a profile.
    ///
    /// # Errors
    /// The path of the running program is not known.
    pub fn of_profile(profile: &str) -> Result<Self> {
        Ok(Self::below(&target_folder()?, profile))
    }

    /// Returns the folder of the library `name`.
    pub(crate) fn folder_of(&self, name: &str) -> &Path {
        match name {
            "libpvm3" => &self.c_library,
            _ => &self.programs,
        }
    }

    fn below(target_folder: &Path, profile: &str) -> Self {
        let library_profile = if profile == RELEASE_PROFILE {
            C_LIBRARY_PROFILE
        } else {
            profile_folder(profile)
        };
        Self {
            programs: target_folder.join(profile_folder(profile)),
            c_library: target_folder.join(library_profile),
        }
    }
}
