//! Checks that the machine meets the requirements of tests, and makes the testbeds of tests.

pub use crate::machine::{
    build_folder, find_engine, find_in_path, installed_prefix, is_root, missing_disk_reason,
    unmet_requirement,
};

use crate::Testbed;
use crate::layout::prefix_in_hosts;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// Returns the path of the installed programs in the hosts of a testbed.
///
/// # Panics
/// The programs are not installed.
pub fn require_prefix_in_hosts() -> PathBuf {
    let prefix = installed_prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
    prefix_in_hosts(&prefix)
}

/// Panics if the machine does not meet a requirement of the test, which `unmet_requirement`
/// describes.
///
/// Such a test must fail, because a test that returns early counts as passed. `cargo xtask test`
/// excludes such tests and reports them as skipped.
///
/// # Panics
/// `unmet_requirement` is not `None`.
pub fn panic_if_unmet(unmet_requirement: Option<String>) {
    if let Some(unmet_requirement) = unmet_requirement {
        panic!("cannot run here: {unmet_requirement}");
    }
}

/// Requires a program: `name` is its name in PATH, or its absolute path. `package` is the Debian
/// package that installs it.
///
/// # Panics
/// The program is missing.
pub fn require_program(name: &str, package: &str) {
    let is_installed = if name.starts_with('/') {
        Path::new(name).exists()
    } else {
        find_in_path(name).is_some()
    };
    panic_if_unmet((!is_installed).then(|| format!("{name} is missing: install {package}")));
}

/// Makes a testbed of `host_count` hosts for a test.
///
/// # Panics
/// The machine does not meet a requirement, the programs are not installed, or a host does not
/// start.
pub fn require_testbed(host_count: usize) -> Testbed {
    require_and_make(|prefix| Testbed::new(host_count, Some(prefix), &[]))
}

/// As [`require_testbed`], with [`Testbed::with_own_engine`].
pub fn require_testbed_with_own_engine(host_count: usize) -> Testbed {
    require_and_make(|prefix| Testbed::with_own_engine(host_count, Some(prefix)))
}

/// As [`require_testbed`], with [`Testbed::with_env`]: `env` contains additional environment
/// variables for all daemons except the first one.
pub fn require_testbed_with_env(host_count: usize, env: &[(&str, &str)]) -> Testbed {
    require_and_make(|prefix| Testbed::with_env(host_count, Some(prefix), env))
}

fn require_and_make(make: impl FnOnce(&Path) -> Result<Testbed>) -> Testbed {
    panic_if_unmet(unmet_requirement());
    installed_prefix()
        .and_then(|prefix| make(&prefix))
        .unwrap_or_else(|error| panic!("no testbed: {error:#}"))
}
