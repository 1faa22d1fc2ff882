//! Checks the packages in fresh systems of Debian: with Debian's PVM programs on top and beneath,
//! during an upgrade, and after their removal; and the tar archive.

mod scenarios;
mod system;

use crate::process::capture;
use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The packages to check, and where.
pub(crate) struct Plan<'a> {
    /// Releases of Debian, by code name.
    pub(crate) suites: &'a [String],
    /// Folder of the packages and the archive.
    pub(crate) packages: &'a Path,
    /// Folder of the packages of the next version.
    pub(crate) next_packages: &'a Path,
    pub(crate) next_version: &'a str,
    /// Folder that keeps fresh systems for later checks.
    pub(crate) cache: &'a Path,
}

/// Runs all checks and prints their results. Returns false if one finds a fault.
///
/// # Errors
/// The packages cannot be read.
pub(crate) fn run(plan: &Plan<'_>) -> Result<bool> {
    let mut results = vec![("lintian".to_string(), run_lintian(plan.packages))];
    for suite in plan.suites {
        for (name, scenario) in scenarios::ALL {
            println!("check: {suite}: {name}");
            results.push((format!("{suite}: {name}"), scenario(plan, suite)));
        }
    }
    println!();
    for (name, result) in &results {
        match result {
            Ok(()) => println!("passed  {name}"),
            Err(error) => println!("FAILED  {name}: {error:#}"),
        }
    }
    Ok(results.iter().all(|(_, result)| result.is_ok()))
}

/// Runs lintian on all packages of a folder.
fn run_lintian(folder: &Path) -> Result<()> {
    let packages = deb_files(folder)?;
    let text = capture(
        Command::new("lintian")
            .args(["--allow-root", "--fail-on", "error"])
            .args(&packages),
    )?;
    print!("{text}");
    Ok(())
}

fn deb_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "deb"))
        .collect();
    files.sort();
    Ok(files)
}
