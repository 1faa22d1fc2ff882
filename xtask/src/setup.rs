//! Installs what the tests and the demo need of the machine: Debian packages and a working CRIU.

use anyhow::{Context, Result, bail};
use sempa_tests::needs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of the required Debian packages.
pub(crate) const PACKAGES: [&str; 22] = [
    "tablix2",
    "openssh-server",
    "openssh-client",
    "iproute2",
    // PVM's daemon and library look the protocol number of TCP up in its file.
    "netbase",
    "pvm",
    "pvm-dev",
    "pvm-examples",
    "netpipe-pvm",
    "slang-pvm",
    "slsh",
    // A display without a screen, and programs that read its pixels and move its mouse.
    "xvfb",
    "x11-apps",
    "xdotool",
    // A bus for the imitation of logind.
    "dbus-daemon",
    "procps",
    "gcc",
    "gfortran",
    "make",
    "pkg-config",
    "libc6-dev",
    // Tasks in other languages that migrate; Perl is always installed.
    "python3",
];

/// The prefix of a CRIU that this program installs.
pub(crate) const CRIU_PREFIX: &str = "/opt/sempa/criu";

/// True for uid 0.
pub(crate) fn is_root() -> bool {
    needs::is_root()
}

/// Returns the top folder of the project.
pub(crate) fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("/"))
        .to_path_buf()
}

/// Installs what is missing. Without root, only prints what is missing.
///
/// # Errors
/// Root could not install something.
pub(crate) fn everything() -> Result<()> {
    packages(&PACKAGES)?;
    // Without hosts no task can migrate; the caller reports it.
    if needs::lacks().is_none() {
        engine()
    } else {
        Ok(())
    }
}

/// Makes sure that a CRIU works here, in its usual place.
///
/// # Errors
/// As [`criu`], or this is not root.
pub(crate) fn engine() -> Result<()> {
    if !is_root() {
        bail!("tasks migrate by CRIU, which needs root");
    }
    criu(Path::new(CRIU_PREFIX))
}

/// Installs what is missing of these Debian packages.
///
/// # Errors
/// Root could not install something.
pub(crate) fn packages(names: &[&'static str]) -> Result<()> {
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

/// Makes sure that there is a CRIU that works on this kernel: the one that the tasker would find,
/// or a new one under `prefix`.
///
/// # Errors
/// None works, and none could be installed.
pub(crate) fn criu(prefix: &Path) -> Result<()> {
    if let Some(program) = needs::engine().filter(|program| works(program)) {
        println!("setup: {} works", program.display());
        return Ok(());
    }
    let script = project().join("xtask/scripts/install-criu.sh");
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
            bail!("CRIU is installed but does not work on this kernel; tasks cannot migrate here")
        }
        _ => bail!(
            "{} failed; tasks cannot migrate without CRIU",
            script.display()
        ),
    }
}

/// True if `criu check` succeeds. Version numbers prove nothing, because the kernel decides.
fn works(program: &Path) -> bool {
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
