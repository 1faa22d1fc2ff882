//! Installs a CRIU that works on this machine's kernel.

use crate::project_folder;
use anyhow::{Result, bail};
use checkpoint::criu::Criu;
use std::path::Path;
use std::process::Command;

/// The prefix under which this program installs CRIU.
pub const CRIU_PREFIX: &str = "/opt/sempa/criu";

/// Checks that the CRIU that the tasker finds works on this kernel; otherwise installs a new one
/// under `prefix`.
///
/// # Errors
/// No CRIU works, and none can be installed.
pub fn ensure_criu_at(prefix: &Path) -> Result<()> {
    let found_criu = Criu::locate(|name| std::env::var_os(name)).ok();
    if let Some(criu) = found_criu.filter(|criu| criu_works(criu.program())) {
        println!("setup: {} works", criu.program().display());
        return Ok(());
    }
    let script = project_folder().join("xtask/install/install-criu.sh");
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
