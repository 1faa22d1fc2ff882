//! Installs what tests and the demo need on the machine: Debian packages, and a CRIU that works on
//! the machine's kernel.

use anyhow::{Context, Result, bail};
use sempa_tests::requirements;
use std::path::Path;
use std::process::Command;
use xtask_install::{CRIU_PREFIX, ensure_criu_at};

/// Names of the required Debian packages.
pub(crate) const REQUIRED_PACKAGES: [&str; 33] = [
    "tablix2",
    "openssh-server",
    "openssh-client",
    "iproute2",
    // PVM's daemon and library read the protocol number of TCP from a file of this package.
    "netbase",
    "pvm",
    "pvm-dev",
    "pvm-examples",
    "netpipe-pvm",
    "slang-pvm",
    "slsh",
    // A virtual display, and programs that read its pixels and move its mouse.
    "xvfb",
    "x11-apps",
    "xdotool",
    // The program of a D-Bus bus for the fake logind.
    "dbus-daemon",
    "procps",
    "gcc",
    "gfortran",
    "make",
    // imake, for programs with an Imakefile.
    "xutils-dev",
    "pkg-config",
    "libc6-dev",
    // Counts the instructions of the message path.
    "valgrind",
    // Checks the manual pages.
    "mandoc",
    // Tests migrate tasks in this language. Perl is always installed.
    "python3",
    // Packages are made with these programs, and checked in fresh systems.
    "debhelper",
    "dh-python",
    "python3-wheel",
    "dpkg-dev",
    "patchelf",
    "xz-utils",
    "debootstrap",
    "lintian",
];

pub(crate) fn is_root() -> bool {
    requirements::is_root()
}

/// Installs the missing packages and CRIU. If the user is not root, only prints what is missing.
///
/// # Errors
/// A package or CRIU cannot be installed although the user is root.
pub(crate) fn set_up_all() -> Result<()> {
    ensure_packages(&REQUIRED_PACKAGES)?;
    // Without a testbed no task can migrate, so CRIU is not needed. The caller reports the missing
    // testbed.
    if requirements::unmet_requirement().is_none() {
        ensure_criu()
    } else {
        Ok(())
    }
}

/// Checks that a CRIU under [`CRIU_PREFIX`], or another CRIU that the tasker finds, works on this
/// kernel; otherwise installs a CRIU under [`CRIU_PREFIX`].
///
/// # Errors
/// The user is not root, or [`ensure_criu_at`] fails.
pub(crate) fn ensure_criu() -> Result<()> {
    if !is_root() {
        bail!("tasks migrate by CRIU, which needs root");
    }
    ensure_criu_at(Path::new(CRIU_PREFIX))
}

/// Installs the packages in `names` that are missing.
///
/// # Errors
/// A package cannot be installed although the user is root.
pub(crate) fn ensure_packages(names: &[&'static str]) -> Result<()> {
    let missing_packages: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| !is_package_installed(name))
        .collect();
    if missing_packages.is_empty() {
        return Ok(());
    }
    if !is_root() {
        println!(
            "setup: not installed, and only root can: {}",
            missing_packages.join(" ")
        );
        return Ok(());
    }
    println!("setup: installing {}", missing_packages.join(" "));
    if install_packages(&missing_packages).is_ok() {
        return Ok(());
    }
    run_apt(&["update"]).context("apt-get update")?;
    install_packages(&missing_packages)
        .with_context(|| format!("installing {}", missing_packages.join(" ")))
}

fn is_package_installed(name: &str) -> bool {
    let mut query_command = Command::new("dpkg-query");
    query_command.args(["-W", "-f", "${db:Status-Status}", name]);
    query_command
        .output()
        .is_ok_and(|query_output| query_output.stdout == b"installed")
}

fn install_packages(names: &[&str]) -> Result<()> {
    let mut arguments = vec!["install", "-y", "--no-install-recommends"];
    arguments.extend(names);
    run_apt(&arguments)
}

fn run_apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command
        .arg("-qq")
        .args(["-o", "Acquire::Retries=3"])
        .args(arguments);
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null());
    let apt_output = command.output().context("apt-get (is this Debian?)")?;
    if apt_output.status.success() {
        return Ok(());
    }
    bail!(
        "apt-get {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&apt_output.stderr).trim()
    )
}
