//! Installs what tests and the demo need on the machine: Debian packages, and a CRIU that works on
//! the machine's kernel.

use anyhow::{Context, Result, bail};
use sempa_tests::requirements;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of the required Debian packages.
pub(crate) const REQUIRED_PACKAGES: [&str; 24] = [
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
    "pkg-config",
    "libc6-dev",
    // Counts the instructions of the message path.
    "valgrind",
    // Checks the manual pages.
    "mandoc",
    // Tests migrate tasks in this language. Perl is always installed.
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

/// Checks that the CRIU that the tasker finds works on this kernel; otherwise installs a new one
/// under `prefix`.
///
/// # Errors
/// No CRIU works, and none can be installed.
pub(crate) fn ensure_criu_at(prefix: &Path) -> Result<()> {
    if let Some(program) = requirements::find_engine().filter(|program| criu_works(program)) {
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
            bail!("CRIU is installed but does not work on this kernel; tasks cannot migrate here")
        }
        _ => bail!(
            "{} failed; tasks cannot migrate without CRIU",
            script.display()
        ),
    }
}

/// True if `criu check` succeeds and the version is known to work. The version alone is not
/// sufficient, because the result depends on the kernel.
fn criu_works(program: &Path) -> bool {
    let run_criu = |argument: &str| Command::new(program).arg(argument).output();
    let version_text = run_criu("--version")
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    let version_number = version_text
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))
        .unwrap_or("0")
        .trim()
        .to_string();
    let mut number_parts = version_number
        .split('.')
        .map(|number_part| number_part.parse::<u32>().unwrap_or(0));
    let is_known_version = (
        number_parts.next().unwrap_or(0),
        number_parts.next().unwrap_or(0),
    ) >= (4, 1);
    is_known_version && run_criu("check").is_ok_and(|output| output.status.success())
}
