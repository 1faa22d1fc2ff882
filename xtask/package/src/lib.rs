//! `cargo xtask package`: builds a release, makes Debian packages, a tar archive and a Python wheel
//! of it, and checks them in fresh systems.
//!
//! | module | purpose |
//! | --- | --- |
//! | [`contents`] | which file of an installation goes to which package, and where |
//! | `debian` | runs debhelper's programs on the files of each package |
//! | `python` | the Python module: its place in a package, and the wheel |
//! | `tarball` | the archive with an install script |
//! | [`manual`] | manual pages of the C interface |
//! | [`completion`] | completion files for shells |
//! | `check` | installs, upgrades and removes the packages in fresh systems |

mod check;
pub mod completion;
pub mod contents;
mod debian;
pub mod manual;
mod process;
mod python;
mod tarball;

use crate::debian::Release;
use crate::python::{PYTHON_PACKAGE, PythonModule};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use xtask_install::{self as install, BuiltFolders};

/// Triplet of the only architecture for which packages are made.
pub const TRIPLET: &str = "x86_64-linux-gnu";

/// Arguments of `cargo xtask package`.
#[derive(Debug, clap::Args)]
pub struct PackageArgs {
    /// Folder for the packages and the archive
    #[arg(long, value_name = "DIR", default_value = "target/package/out")]
    out: PathBuf,
    /// Build nothing; package the programs that the build profile PROFILE has made
    #[arg(long, value_name = "PROFILE")]
    as_built: Option<String>,
    /// Debian revision of the packages
    #[arg(long, default_value_t = 1)]
    revision: u32,
    /// Folder of the CRIU for the package sempa-criu, as `cargo xtask criu` makes it
    #[arg(long, value_name = "DIR", default_value = install::CRIU_PREFIX)]
    criu: PathBuf,
    /// Compress little: for tests
    #[arg(long)]
    quick: bool,
    /// Check the packages in fresh systems of Debian: install, run programs, upgrade, purge; run
    /// lintian
    #[arg(long)]
    check: bool,
    /// Releases of Debian for the check
    #[arg(long, value_delimiter = ',', default_value = "bookworm,trixie")]
    suites: Vec<String>,
}

/// Makes the packages, and checks them if the arguments request a check. Returns false if the check
/// finds a fault.
///
/// # Errors
/// The build fails, a program is missing, or a file cannot be written.
pub fn run(args: &PackageArgs) -> Result<bool> {
    let work_folder = install::target_folder()?.join("package");
    let built = match &args.as_built {
        Some(profile) => BuiltFolders::of_profile(profile)?,
        None => install::build_into(
            &work_folder.join("build"),
            &path_flags()?,
            &[PYTHON_PACKAGE],
        )?,
    };
    let prefix = install_for_packages(&work_folder, &built)?;
    let out = std::path::absolute(&args.out)?;
    let release = Release::new(args.revision)?;
    let python = PythonModule::new(&built.programs)?;
    let inputs = Inputs {
        prefix: &prefix,
        python: &python,
        criu: &args.criu,
        work_folder: &work_folder,
    };
    let compression = if args.quick {
        Compression::Little
    } else {
        Compression::Strong
    };
    make_empty(&out)?;
    let mut made = debian::make_packages(&release, &inputs, compression, &out)?;
    made.push(tarball::make(&release, &inputs, compression, &out)?);
    made.push(python.make_wheel(&release, &work_folder.join("wheel"), &out)?);
    for path in &made {
        println!("package: {}", path.display());
    }
    if !args.check {
        return Ok(true);
    }
    let next_release = Release::new(args.revision + 1)?;
    let next_out = work_folder.join("next");
    make_empty(&next_out)?;
    debian::make_packages(&next_release, &inputs, Compression::Little, &next_out)?;
    check::run(&check::Plan {
        suites: &args.suites,
        packages: &out,
        next_packages: &next_out,
        next_version: &next_release.version(),
        cache: &work_folder.join("systems"),
    })
}

/// Returns flags of rustc that replace the paths of this machine in programs.
fn path_flags() -> Result<String> {
    let cargo_home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo")))
        .context("neither CARGO_HOME nor HOME is set")?;
    Ok(format!(
        "--remap-path-prefix={}=/usr/src/cargo --remap-path-prefix={}=/usr/src/sempa",
        cargo_home.display(),
        install::project_folder().display()
    ))
}

/// Installs a build under a fresh prefix in the work folder and adds what packages have besides.
fn install_for_packages(work_folder: &Path, built: &BuiltFolders) -> Result<PathBuf> {
    let prefix = work_folder.join("prefix");
    remove_folder(&prefix)?;
    install::install_built(&prefix, built)?;
    manual::write_pages(&install::project_folder(), &prefix.join("share/man/man3"))?;
    completion::write_files(&prefix.join("bin/pvm"), &prefix.join("share"))?;
    Ok(prefix)
}

/// What packages are made of.
struct Inputs<'a> {
    /// Installation with all files of the packages.
    prefix: &'a Path,
    python: &'a PythonModule,
    /// Folder of a CRIU; it may be missing.
    criu: &'a Path,
    /// Folder for temporary files of the packaging.
    work_folder: &'a Path,
}

/// How much time is spent for small packages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    Strong,
    Little,
}

fn make_empty(folder: &Path) -> Result<()> {
    remove_folder(folder)?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())
}

fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            bail!("cannot remove {}: {error}", folder.display())
        }
        _ => Ok(()),
    }
}
