//! Builds Sempa and installs it under a prefix, and installs a CRIU that works on this machine.

mod archive;
mod build;
mod criu;
mod libraries;
mod packages;
mod prefix;
mod programs;
mod pvm_root;
mod replace;

pub use build::{
    BuildParts, BuiltFolders, RELEASE_PROFILE, build, build_c_library, build_into, build_profile,
    cargo_command, target_folder,
};
pub use criu::{CRIU_PREFIX, ensure_criu_at};
pub use libraries::{LIBRARIES, Library};
pub use prefix::{install_built, install_files};
pub use programs::{DebianPackage, PROGRAMS, Program};

use anyhow::Result;
use clap::Subcommand;
use std::path::{Path, PathBuf};

/// Packages that build the installed programs and libraries.
pub const INSTALLED_PACKAGES: [&str; 12] = packages::INSTALLED_PACKAGES;

/// The commands of people who install Sempa.
#[derive(Debug, Subcommand)]
pub enum InstallCommand {
    /// Build the programs and install them under a folder
    Install {
        /// The folder: programs go to DIR/bin, libraries to DIR/lib; DIR can be PVM_ROOT
        #[arg(long)]
        prefix: PathBuf,
    },
    /// Install a CRIU that works on this kernel
    Criu {
        /// The folder to install it in
        #[arg(long, default_value = CRIU_PREFIX)]
        prefix: PathBuf,
    },
}

impl InstallCommand {
    /// Runs the command.
    ///
    /// # Errors
    /// The build fails, a file cannot be written, or no CRIU works.
    pub fn run(&self) -> Result<()> {
        match self {
            Self::Install { prefix } => build_and_install(prefix),
            Self::Criu { prefix } => ensure_criu_at(prefix),
        }
    }
}

fn build_and_install(prefix: &Path) -> Result<()> {
    build(RELEASE_PROFILE, BuildParts::Programs)?;
    install_files(prefix, RELEASE_PROFILE)?;
    let prefix = std::path::absolute(prefix)?;
    println!(
        "installed under {0}: put {0}/bin on PATH and {0}/lib in LD_LIBRARY_PATH; to build programs with \
         make files for PVM, set PVM_ROOT={0}",
        prefix.display()
    );
    Ok(())
}

/// Returns the top folder of the project.
pub fn project_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .unwrap_or(Path::new("/"))
        .to_path_buf()
}
