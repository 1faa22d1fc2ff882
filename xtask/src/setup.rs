//! Installs what tests and the demo need on the machine: Debian packages and a CRIU that works on
//! its kernel.

use anyhow::{Context, Result, bail};
use sempa_tests::requirements;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of the required Debian packages.
pub(crate) const PACKAGES: [&str; 22] = [
    "tablix2",
    "openssh-server",
    "openssh-client",
    "iproute2",
    // PVM's daemon and library look up the protocol number of TCP in a file of this package.
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
    // A bus for the fake logind.
    "dbus-daemon",
    "procps",
    "gcc",
    "gfortran",
    "make",
    "pkg-config",
    "libc6-dev",
    // For tests that migrate tasks in other languages. Perl is always installed.
    "python3",
];

/// The prefix under which this program installs CRIU.
pub(crate) const CRIU_PREFIX: &str = "/opt/sempa/criu";

pub(crate) fn is_root() -> bool {
    requirements::is_root()
}

/// Returns the top folder of the project.
pub(crate) fn project_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("/"))
        .to_path_buf()
}

/// Installs the missing packages and CRIU. Without root, only prints what is missing.
///
/// # Errors
/// A package or CRIU cannot be installed although the user is root.
pub(crate) fn set_up_all() -> Result<()> {
    ensure_packages(&PACKAGES)?;
    // If no testbed can be made, no task can migrate and CRIU is not needed. The caller reports
    // this.
    if requirements::lacks().is_none() {
        ensure_criu()
    } else {
        Ok(())
    }
}

/// Makes sure that a CRIU under [`CRIU_PREFIX`], or another one that the tasker finds, works on
/// this kernel.
///
/// # Errors
/// The user is not root, or the call of [`ensure_criu_at`] fails.
pub(crate) fn ensure_criu() -> Result<()> {
    if !is_root() {
        bail!("tasks are moved by CRIU, which needs root");
    }
    ensure_criu_at(Path::new(CRIU_PREFIX))
}

/// Installs those of these Debian packages that are missing.
///
/// # Errors
/// A package cannot be installed although the user is root.
pub(crate) fn ensure_packages(names: &[&'static str]) -> Result<()> {
    let missing: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| !installed(name))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !is_root() {
        println!(
            "setup: not installed, and only root can: {}",
            missing.join(" ")
        );
        return Ok(());
    }
    println!("setup: installing {}", missing.join(" "));
    if install(&missing).is_ok() {
        return Ok(());
    }
    apt(&["update"]).context("apt-get update")?;
    install(&missing).with_context(|| format!("installing {}", missing.join(" ")))
}

fn installed(name: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    query.args(["-W", "-f", "${db:Status-Status}", name]);
    query.output().is_ok_and(|done| done.stdout == b"installed")
}

fn install(names: &[&str]) -> Result<()> {
    let mut words = vec!["install", "-y", "--no-install-recommends"];
    words.extend(names);
    apt(&words)
}

fn apt(words: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command
        .arg("-qq")
        .args(["-o", "Acquire::Retries=3"])
        .args(words);
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(std::process::Stdio::null());
    let done = command.output().context("apt-get (is this Debian?)")?;
    if done.status.success() {
        return Ok(());
    }
    bail!(
        "apt-get {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&done.stderr).trim()
    )
}

/// Makes sure that a CRIU works on this kernel: the one that the tasker finds, or a new one under
/// `prefix`.
///
/// # Errors
/// No CRIU works, and none can be installed.
pub(crate) fn ensure_criu_at(prefix: &Path) -> Result<()> {
    if let Some(program) = requirements::engine().filter(|program| criu_works(program)) {
        println!("setup: {} works", program.display());
        return Ok(());
    }
    let script = project_folder().join("xtask/scripts/install-criu.sh");
    println!(
        "setup: getting a CRIU for this kernel into {}",
        prefix.display()
    );
    let status = Command::new("bash")
        .arg(&script)
        .arg("--prefix")
        .arg(prefix)
        .status()?;
    match status.code() {
        Some(0) => Ok(()),
        Some(3) => {
            bail!("CRIU is installed but does not work on this kernel; tasks cannot be moved here")
        }
        _ => bail!(
            "{} failed; tasks cannot be moved without CRIU",
            script.display()
        ),
    }
}

/// True if `criu check` succeeds and the version is known to work. The version alone proves
/// nothing, because the result depends on the kernel.
fn criu_works(program: &Path) -> bool {
    let quiet = |word: &str| Command::new(program).arg(word).output();
    let version = quiet("--version")
        .map(|done| String::from_utf8_lossy(&done.stdout).into_owned())
        .unwrap_or_default();
    let number = version
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))
        .unwrap_or("0")
        .trim()
        .to_string();
    let mut parts = number
        .split('.')
        .map(|part| part.parse::<u32>().unwrap_or(0));
    let known = (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (4, 1);
    known && quiet("check").is_ok_and(|done| done.status.success())
}
