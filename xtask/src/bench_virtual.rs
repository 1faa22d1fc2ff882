//! `cargo xtask bench decide` and `cargo xtask bench sim`: programs of the resource manager's own
//! (`rm/benches`) that need no host but this one. What they say is shown and kept.

use crate::{install, setup};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// What decisions cost. False if the median of one is above what is allowed.
///
/// # Errors
/// The build fails, or the results cannot be written.
pub(crate) fn decide(results: &Path) -> Result<bool> {
    let (text, json, good) = run("decide", &[])?;
    sempa_benches::store_decide(&text, &json, results)?;
    Ok(good)
}

/// A week, and some days, in virtual time with what was measured. False if somebody waits longer
/// than is allowed.
///
/// # Errors
/// The build fails, a measurement is missing, or the results cannot be written.
pub(crate) fn simulate(results: &Path) -> Result<bool> {
    let measured = |name: &str| {
        format!(
            "--{name}={}",
            setup::project()
                .join(format!("benches/results/{name}.json"))
                .display()
        )
    };
    let (text, json, good) = run("sim", &[measured("owners"), measured("migrate")])?;
    sempa_benches::store_sim(&text, &json, results)?;
    Ok(good)
}

/// Builds and runs such a program: what it said, where it wrote its findings, and whether they are
/// as they should be.
fn run(name: &str, words: &[String]) -> Result<(String, PathBuf, bool)> {
    let json = install::target()?.join(format!("{name}.json"));
    if json.exists() {
        // Nobody takes what an earlier run has found for this one's.
        fs::remove_file(&json).with_context(|| json.display().to_string())?;
    }
    let mut command = install::cargo(&["bench", "-q", "-p", "pvm-rm", "--bench", name, "--"])?;
    command
        .args(words)
        .arg(format!("--json={}", json.display()))
        .stderr(Stdio::inherit());
    let done = command.output().context("cargo")?;
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    print!("{text}");
    Ok((text, json, done.status.success()))
}
