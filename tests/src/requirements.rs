//! Checks for tests what they need of the machine, and makes their testbeds.

pub use crate::machine::{build_folder, engine, find_in_path, is_root, lacks, lacks_disk, prefix};

use crate::Testbed;
use crate::layout::prefix_in_hosts;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Returns the path of the installed programs in the hosts of a testbed.
///
/// # Panics
/// The programs are not installed.
pub fn prefix_in_bed() -> PathBuf {
    let prefix = prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
    prefix_in_hosts(&prefix)
}

/// Stops a test if the machine lacks what the test needs. `lack` is what is missing.
///
/// Such a test must fail, because a test that returns early counts as passed. `cargo xtask test`
/// excludes such tests and reports them as skipped.
///
/// # Panics
/// `lack` is not `None`.
pub fn require(lack: Option<String>) {
    if let Some(lack) = lack {
        panic!("cannot run here: {lack}");
    }
}

/// Requires a program in PATH. `package` is the Debian package that installs it.
///
/// # Panics
/// The program is missing.
pub fn require_program(name: &str, package: &str) {
    let found = if name.starts_with('/') {
        Path::new(name).exists()
    } else {
        find_in_path(name).is_some()
    };
    require((!found).then(|| format!("{name} is missing: install {package}")));
}

/// Makes a testbed of `count` hosts for a test.
///
/// # Panics
/// The machine lacks something, the programs are not installed, or a host does not start.
pub fn testbed(count: usize) -> Testbed {
    require_and_make(|prefix| Testbed::new(count, Some(prefix), &[]))
}

/// As [`testbed`], with a testbed that has its own engine ([`Testbed::with_own_engine`]).
pub fn testbed_with_own_engine(count: usize) -> Testbed {
    require_and_make(|prefix| Testbed::with_own_engine(count, Some(prefix)))
}

/// As [`testbed`], with additional environment variables for all daemons except the first one
/// ([`Testbed::with_env`]).
pub fn testbed_with_env(count: usize, env: &[(&str, &str)]) -> Testbed {
    require_and_make(|prefix| Testbed::with_env(count, Some(prefix), env))
}

fn require_and_make(new: impl FnOnce(&Path) -> Result<Testbed>) -> Testbed {
    require(lacks());
    prefix()
        .and_then(|prefix| new(&prefix))
        .unwrap_or_else(|error| panic!("no testbed: {error:#}"))
}
