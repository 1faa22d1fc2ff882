//! Runs programs to their end.

use anyhow::{Context, Result, bail};
use std::process::{Command, Stdio};

/// Runs a program. Its output goes to this program's output.
///
/// # Errors
/// The program cannot be executed, or fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = name_of(command);
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| missing_program(&name))?;
    if !status.success() {
        bail!("{name} failed: {status}");
    }
    Ok(())
}

/// Runs a program and returns its standard output.
///
/// # Errors
/// The program cannot be executed, or fails; the error contains what it printed.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let name = name_of(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| missing_program(&name))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!(
            "{name} failed: {}\n{stdout}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(stdout)
}

fn name_of(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

fn missing_program(name: &str) -> String {
    format!(
        "{name} cannot be executed: install the Debian packages debhelper, dpkg-dev, patchelf, \
         debootstrap and lintian"
    )
}
